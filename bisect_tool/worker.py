"""One rank of a candidate.  Started by `ranks.World`; does what it is told over a socket until that closes."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bisect_hooks import drive, mcore, mcore_weights
from bisect_hooks.errors import BisectError, UsageError, by_kind, first_line, first_sentence
from bisect_hooks.family import families
from bisect_hooks.spec import Spec, import_spec, settle
from bisect_hooks.tap import Graft
from safetensors.torch import save_file

from bisect_tool.allocator import give_back_what_is_freed
from bisect_tool.candidate import Built
from bisect_tool.checkpoint import Checkpoint, open_checkpoint
from bisect_tool.hf_directory import HuggingFaceDirectory, open_hf
from bisect_tool.legacy import LegacyCheckpoint
from bisect_tool.prompts import Batch
from bisect_tool.ranks import listen, say
from bisect_tool.recording import Recording
from bisect_tool.rounding import Rounding, rounded_once


@dataclass(slots=True)
class Rank:
    """The commands.  Every public method is one; its arguments and answer travel between our own processes."""

    device: torch.device
    candidate: mcore.Candidate | None = None
    built: Built | None = None
    references: dict[Path, HuggingFaceDirectory] = field(default_factory=dict)
    stored: dict[str, torch.dtype] = field(default_factory=dict)
    patch: Path | None = None

    @property
    def here(self) -> mcore.Candidate:
        if self.candidate is None:
            raise BisectError("no model is built on this rank")
        return self.candidate

    def import_spec(self, spec: Spec) -> None:
        """Refuses a spec that can't be imported before anything else is done."""
        import_spec(spec)

    def build(self, what: Built, checkpoint: Path | None, patch: Path | None = None) -> dict[str, Any]:
        """Builds and loads.  Answers {"missing": parameters nothing was loaded into}, and what a user's spec made of the model."""
        self.candidate, self.stored, self.patch = None, {}, patch
        family = families()[what.family]
        try:
            self.candidate = mcore.build(
                family, what.args, what.layout, what.parallel, self.device, what.dtype, mtp=what.mtp, spec=what.spec
            )
        except BisectError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {first_sentence(error)}"
            by = f"by --spec {' '.join(what.spec)}" if what.spec is not None else "of the candidate's args"
            raise UsageError(f"no model can be built {by}: {said}") from error
        self.built = what
        answer: dict[str, Any] = {"unbound": {}, "fused": (), "unread": ()}
        if what.spec is not None:
            answer = self._settle(what.spec, checkpoint)
        if checkpoint is not None:
            # whatever is missing is a finding of the weights stage; here it must not become zeros or an old value
            stored = _opened(self.candidate, checkpoint)
            self.stored = stored.dtypes
            renamed = _renamed(self.candidate, stored)
            _check_shapes(self.candidate, stored, renamed)
            if stored.core_reads:
                try:
                    mcore_weights.load(self.candidate, stored.path, renamed)
                except Exception as error:
                    said = f"{type(error).__name__}: {first_sentence(error)}"
                    raise UsageError(
                        f"megatron-core can't load {checkpoint} into the model that its own args make: {said}",
                        hint="the config and weights stages say what is off (bisect-tool run --stages config,weights)",
                    ) from error
            else:
                keys = {local.key: renamed.get(local.key, local.key) for local in mcore_weights.local_tensors(self.candidate)}
                mcore_weights.fill(self.candidate, lambda key: stored.read(keys[key]) if keys[key] in stored.tensors else None, PADDED)
        if patch is not None:
            run_patch(patch, self.candidate)
        return answer | {"missing": mcore_weights.unfilled(self.candidate)}

    def _settle(self, spec: Spec, checkpoint: Path | None) -> dict[str, Any]:
        """Lines the taps up with what the user's spec built.  Raises UsageError for parameters that no row of the table makes."""
        candidate = self.here
        rules = candidate.family.rules(candidate.dims, candidate.layout, (), mtp=False)
        keys = frozenset(local.key for local in mcore_weights.local_tensors(candidate))
        settled = settle(candidate.models, candidate.taps, rules, keys)
        candidate.taps = settled.taps
        names = {made.name: made.name for rule in rules for made in rule.candidates} | {
            alias: own for rule in rules for own, alias in rule.aliases
        }
        unknown = sorted(key for key in keys if key not in names and not key.startswith("mtp."))
        if unknown:
            raise UsageError(
                f"--spec {' '.join(spec)} builds {', '.join(by_kind(unknown))}, which the table of {candidate.family.name} does not know",
                hint="a model with other modules is a family of its own (docs/add-a-family.md)",
            )
        held = {names.get(key, key) for key in keys}
        stored = open_checkpoint(checkpoint).tensors if checkpoint is not None else {}
        unread = sorted(key for key in stored if names.get(key, key) not in held and not key.startswith("mtp."))
        return {"unbound": dict(settled.unbound), "fused": sorted(settled.fused), "unread": unread}

    def put_reference(self, reference: Path, keys: list[str] | None) -> list[str]:
        """Overwrites the named tensors (None: all) by what the weight table makes of the reference.  Answers the keys written.

        They are rounded as the reference was: to the dtypes of the checkpoint that was loaded.
        """
        directory, family = self._reference(reference), self.here.family
        dims = family.reference_dimensions(directory.config)
        rules = family.rules(dims, self.here.layout, directory.names, mtp=self.here.dims.mtp > 0)
        rule_of = {made.name: rule for rule in rules for made in rule.candidates}
        own_name = {alias: own for rule in rules for own, alias in rule.aliases}
        rounding = Rounding.of(directory, family, self.here.layout, self.stored)
        made: dict[str, torch.Tensor] = {}

        def tensor(key: str) -> torch.Tensor | None:
            key = own_name.get(key, key)
            if key not in rule_of or (keys is not None and key not in keys):
                return None
            if key not in made:
                made.clear()
                made.update(rule_of[key].forward([directory.read(name) for name in rule_of[key].references]))
                dtypes = rounding.dtypes
                made.update({name: rounded_once(tensor, dtypes[name]) for name, tensor in made.items() if name in dtypes})
            return made[key]

        return mcore_weights.fill(self.here, tensor, PADDED)

    def edit(self, key: str, rows: tuple[int, int] | None, factor: float | None) -> None:
        """Multiplies rows (None: all) of a named tensor by `factor`, or turns its last dim round where that is None."""
        with torch.no_grad():
            for local in mcore_weights.local_tensors(self.here):
                if local.key != key:
                    continue
                start, stop = rows or (0, local.global_shape[0])
                part = local.view[max(start - local.offset[0], 0) : max(stop - local.offset[0], 0)]
                part.copy_(part.flip(-1) if factor is None else part * factor)

    def record(self, rows: Batch, start: int, ids: torch.Tensor, graft: tuple[Path, list[str]] | None, out: Path) -> None:
        """One forward of `ids` [b s]; what this rank heard goes to `out`/rank<r>.safetensors by tap id.

        Values of a Recording are grafted in; the first token of `rows` is its token number `start`.
        """
        candidate, parallel = self.here, self.here.parallel
        batch = ids.shape[0] // parallel.dp
        own_rows = slice(candidate.at.dp * batch, (candidate.at.dp + 1) * batch)
        local, real = ids[own_rows], rows.mask(ids.shape[1], len(ids))[own_rows].bool()
        sizes = {"b": batch, "s": ids.shape[1] // (parallel.tp if parallel.sp else 1)}
        values = {}
        if graft is not None:
            recording = Recording(graft[0])
            here = {key for tap in candidate.taps for key in tap.keys}
            own = slice(start, start + rows.tokens)
            values = {key: rows.unpack(recording[key][own], *ids.shape) for key in graft[1] if key in here}
        with drive.listening_to_experts(candidate) as dispatched:
            heard = drive.record(
                candidate, local, candidate.taps, Graft(values, candidate.at, sizes, parallel), ~real if rows.left else None
            )
        tensors = {tap.id: heard.one(tap) for tap in candidate.taps}
        for (layer, expert), (tokens, probabilities) in dispatched.items():
            tensors[f"dispatch|{layer}|{expert}|rows"] = tokens
            tensors[f"dispatch|{layer}|{expert}|probs"] = probabilities
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, out / f"rank{dist.get_rank()}.safetensors")

    def fired(self, ids: torch.Tensor) -> dict[str, int]:
        """One forward of `ids` [b s]: tap id → how often it fired on this rank."""
        return drive.fired(self.here, ids)

    def probe(self, rows: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Every local expert of every local layer on the same rows: layer → (fc1 [e t f/etp], fc2 [e t h])."""
        candidate = self.here
        return {
            layer: tuple(part.cpu() for part in drive.probe_experts(candidate, layer, *inputs))  # type: ignore[misc]
            for layer, inputs in rows.items()
            if layer in candidate.layers
        }

    def logits(self, ids: torch.Tensor, positions: list[int] | None) -> torch.Tensor | None:
        """ids [b s] → this rank's columns of the logits; None off the last stage.

        [b v/tp] at one position of each row, [b s v/tp] without positions.
        """
        candidate = self.here
        batch = ids.shape[0] // candidate.parallel.dp
        start = candidate.at.dp * batch
        output = drive.forward(candidate, ids[start : start + batch])
        if output is None:
            return None
        if positions is None:
            return output.transpose(0, 1).float().contiguous().cpu()
        return torch.stack([output[positions[start + i], i] for i in range(batch)]).cpu()

    def save(self, reference: Path, out: Path, common: dict[str, Any]) -> dict[str, list[str]]:
        """Fills the built model from the reference by the table and saves it.  Answers what no rule made and what none read."""
        directory, candidate = self._reference(reference), self.here
        dims = candidate.family.reference_dimensions(directory.config)
        rules = candidate.family.rules(dims, candidate.layout, directory.names, mtp=candidate.dims.mtp > 0)
        dtypes = {made.name: directory.dtypes[rule.references[0]] for rule in rules for made in rule.candidates}
        mcore_weights.set_dtypes(candidate, dtypes.get)
        written = set(self.put_reference(reference, None))
        needed = {local.key for local in mcore_weights.local_tensors(candidate)}
        if needed - written:
            return {"unmade": sorted(needed - written), "keys": sorted(needed)}
        self._write(out, common)
        return {"unmade": [], "keys": sorted(needed)}

    def save_again(self, checkpoint: Path, out: Path, common: dict[str, Any]) -> None:
        """Saves what was loaded from `checkpoint` under this layout, every tensor in the dtype it has there."""
        stored = open_checkpoint(checkpoint).tensors
        mcore_weights.set_dtypes(self.here, lambda key: stored[key].dtype if key in stored else None)
        mcore_weights.load(self.here, checkpoint, _renamed(self.here, _opened(self.here, checkpoint)))
        self._write(out, common)

    def _write(self, out: Path, common: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            out.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        mcore_weights.save(self.here, out, common | {"args": Namespace(**common["args"])})
        dist.barrier()

    def _reference(self, path: Path) -> HuggingFaceDirectory:
        if path not in self.references:
            self.references[path] = open_hf(path)
        return self.references[path]


PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


def _opened(candidate: mcore.Candidate, path: Path) -> Checkpoint:
    """The checkpoint with global tensors; ranks' own files are joined by the candidate's own table."""
    found = open_checkpoint(path)
    if not isinstance(found, LegacyCheckpoint):
        return found
    shapes = {local.key: local.global_shape for local in mcore_weights.local_tensors(candidate)}
    return found.joined(candidate.family.rules(candidate.dims, candidate.layout, (), mtp=candidate.dims.mtp > 0), shapes)


def _renamed(candidate: mcore.Candidate, checkpoint: Checkpoint) -> dict[str, str]:
    """Keys of this build that the checkpoint keeps under another name (Transformer Engine fuses norms into linears), either way."""
    stored = checkpoint.tensors
    rules = candidate.family.rules(candidate.dims, candidate.layout, (), mtp=candidate.dims.mtp > 0)
    pairs = [pair for rule in rules for own, alias in rule.aliases for pair in ((own, alias), (alias, own))]
    return {built: there for built, there in pairs if built not in stored and there in stored}


def _check_shapes(candidate: mcore.Candidate, checkpoint: Checkpoint, renamed: dict[str, str]) -> None:
    """Refuses a checkpoint whose tensors are not of the sizes that its own args make.  Raises UsageError naming the first."""
    for local in mcore_weights.local_tensors(candidate):
        found = checkpoint.tensors.get(renamed.get(local.key, local.key))
        if found is not None and found.shape != local.global_shape and local.key not in PADDED:
            raise UsageError(
                f"the stored shape and the args disagree: {found.on_disk} is {list(found.shape)} in the checkpoint, its own args make it "
                f"{list(local.global_shape)}",
                hint="the config and weights stages say which of the two is off (bisect-tool run --stages config,weights)",
            )


def run_patch(path: Path, candidate: mcore.Candidate) -> None:
    """Runs `patch(model, parallel)` of a file the user named with --candidate-patch."""
    spec = importlib.util.spec_from_file_location("candidate_patch", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    with _as_the_users(path):
        spec.loader.exec_module(module)
    if not callable(getattr(module, "patch", None)):
        raise UsageError(f"{path} defines no patch(model, parallel)")
    with _as_the_users(path), torch.no_grad():
        for chunk in candidate.chunks:
            module.patch(chunk.model, candidate.parallel)


@contextmanager
def _as_the_users(path: Path) -> Iterator[None]:
    """What the user's own file raises is no error of ours.  Raises UsageError with the line of the file that raised it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = _lines_in(path, error)
        if isinstance(error, SyntaxError) and not lines:  # it never ran
            lines = [error.lineno]
        raise _of_the_patch(path, lines, error) from error


@contextmanager
def _hooks_of(path: Path | None) -> Iterator[None]:
    """What a hook of the user's file raises in a forward is no error of ours either; of any other error the file may still be the cause."""
    try:
        yield
    except Exception as error:
        if path is None or isinstance(error, UsageError):
            raise
        lines = _lines_in(path, error)
        if lines:
            raise _of_the_patch(path, lines, error) from error
        error.hint = f"--candidate-patch {path} changed this model: does the error stay without it?"  # type: ignore[attr-defined]
        raise


def _lines_in(path: Path, error: BaseException) -> list[int | None]:
    """Lines of a file that an error passed, the innermost last."""
    return [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == path.resolve()]


def _of_the_patch(path: Path, lines: Sequence[int | None], error: BaseException) -> UsageError:
    at = f", line {lines[-1]}" if lines else ""
    said = f"--candidate-patch {path}{at}: {type(error).__name__}: {first_line(error)}"
    return UsageError(said, hint="mend the file, or run without it")


def serve(connection: Connection, rank: Rank) -> None:
    """Answers commands until the socket closes."""
    while True:
        try:
            command, arguments = listen(connection)
        except (EOFError, ConnectionError):
            return
        try:
            with _hooks_of(rank.patch):
                answer = getattr(rank, command)(**arguments)
        except UsageError as error:
            say(connection, (False, UsageError(error.message, error.hint)))
        except BaseException as error:
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).splitlines()[0] if str(error) else ""
            at = f"{Path(where.filename).name}:{where.lineno}"
            said = error.message if isinstance(error, BisectError) else f"{type(error).__name__}: {text} ({at})"
            say(connection, (False, BisectError(f"rank {dist.get_rank()}: {said}", getattr(error, "hint", ""))))
        else:
            say(connection, (True, answer))


def main() -> None:
    """worker DIRECTORY RANK WORLD DEVICE"""
    directory, rank, world, device = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), torch.device(sys.argv[4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    give_back_what_is_freed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    mcore.join_world(rank, world, directory / "store", device)
    with Client(str(directory / "socket"), family="AF_UNIX", authkey=bytes.fromhex(os.environ["BISECT_AUTHKEY"])) as connection:
        say(connection, rank)
        serve(connection, Rank(device))
    # the whole group, this process included: megatron-core's save leaves a manager and write workers behind, and gloo's
    # threads can keep a process whose work is done
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
