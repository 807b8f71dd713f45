"""import: a foreign dump becomes a Recording.

An importer only renames: what a foreign dump holds is written as our own ranks would have left it, and put together by the code that
puts those together.  What is not known is listed with its nearest neighbours, and nothing is guessed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import BisectError, UsageError, first_line
from bisect_hooks.family import family_of
from bisect_hooks.layout import parse_layout
from bisect_hooks.parallel import Parallel
from bisect_hooks.shard_file import Part, ShardPage, write_shard

from bisect_tool.foreign import msprobe, sglang, slime, torch_dict
from bisect_tool.foreign.dump import Dump, RankDump
from bisect_tool.foreign.names import Names, Piece
from bisect_tool.recording import NOWHERE, kind_of
from bisect_tool.unshard import unshard

READERS: dict[str, Callable[[Path], Dump]] = {
    "sglang": sglang.read,
    "msprobe": msprobe.read,
    "slime": slime.read,
    "torch": torch_dict.read,
}
DECODES: dict[str, Callable[[Path], Dump]] = {"sglang": sglang.read_decode}
SHOWN = 12


def import_dump(
    form: str, path: Path, out: Path, reference: Path, parallel: Parallel | None = None, given: Path | None = None, *, decode: bool = False
) -> str:
    """Writes the Recording and returns lines about it.  `reference` needs only its config.json.  decode: the decode steps too

    Raises UsageError for a dump that can't be read, or in which nothing is known.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file or directory")
    config = _config(reference)
    family = family_of(config)
    dims = family.reference_dimensions(config)
    if decode and form not in DECODES:
        raise UsageError(f"--decode reads the steps of {', '.join(DECODES)}; a dump of {form} holds one pass")
    dump = (DECODES if decode else READERS)[form](path)
    renaming = Renaming(Names(family, dims, _mapping(given)), dump, _parallel(dump, parallel))
    with tempfile.TemporaryDirectory(prefix="bisect-import-") as folder:
        ranks = Path(folder)
        for number, rank in enumerate(renaming.reduced()):
            tensors, parts = renaming.rank(rank)
            page = ShardPage(
                side="candidate", family=family.name, model=str(path), dtype=_dtype(rank), rank=number, world=len(dump.ranks), sizes=renaming.sizes,
                at=renaming.at(rank), local=renaming.local, taps=parts, packed=renaming.packed, layers=dims.layers, versions={form: "imported"},
            )  # fmt: skip
            write_shard(ranks, page, tensors)
        if not renaming.known:
            near = "; ".join(
                f"{name} (nearest: {', '.join(renaming.names.nearest(name)) or 'none'})" for name in list(renaming.unknown)[:3]
            )
            raise UsageError(f"{path}: no name in it is known: {near}", hint="say what they are with --map")
        if renaming.misfit:
            shown = "; ".join(renaming.misfit[:SHOWN]) + (f"; {len(renaming.misfit) - SHOWN} more" if len(renaming.misfit) > SHOWN else "")
            raise UsageError(f"{path}: {shown}", hint="is --reference the directory of that model?")
        absent = renaming.names.absent(renaming.known, renaming.unknown)
        recording = unshard(ranks, out, imported=form, decoded=() if dump.decoded is None else (dump.decoded,), absent=absent)
    lines = [f"wrote {out}: {len(recording.keys)} tensors, {recording.batch.tokens} tokens of {len(recording.provenance.rows)} sequences"]
    lines += [f"note: {note}" for note in (*dump.notes, *renaming.notes)]
    lost = {key: why for key, why in recording.provenance.absent.items() if why != NOWHERE}
    lines += [f"absent: {key}: {why}" for key, why in list(lost.items())[:SHOWN]]
    if len(lost) > SHOWN:
        lines.append(f"absent: {len(lost) - SHOWN} more")
    nowhere = dict.fromkeys(kind_of(key) for key in recording.provenance.absent if key not in lost)
    lines += [f"nowhere in it: {', '.join(nowhere)}"] if nowhere else []
    lines += [f"left out: {name}: {why}" for name, why in list(renaming.unfit.items())[:SHOWN]]
    lines += [f"not known: {name}; nearest: {', '.join(renaming.names.nearest(name)) or 'none'}" for name in list(renaming.unknown)[:SHOWN]]
    if len(renaming.unknown) > SHOWN:
        lines.append(f"not known: {len(renaming.unknown) - SHOWN} more")
    return "\n".join(lines)


@dataclass(slots=True)
class Renaming:
    """One dump's names as ours.  Remembers what was known, not known, known but not fitting, and of another model's size."""

    names: Names
    dump: Dump
    parallel: Parallel
    known: set[str] = field(default_factory=set)
    unknown: dict[str, None] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    misfit: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        ids = self.dump.ids
        return (1, len(ids)) if ids.dim() == 1 else (ids.shape[0], ids.shape[1])

    @property
    def sizes(self) -> dict[str, int]:
        return self.parallel.shown() | {"dp": self.parallel.dp, "sp": int(self.parallel.sp)}

    @property
    def local(self) -> dict[str, int]:
        return {"b": self.shape[0], "s": self.shape[1] // (self.parallel.tp if self.parallel.sp else 1)}

    @property
    def packed(self) -> dict[str, Any]:
        """Sequences one behind the other, where the dump says how long each is."""
        if self.shape[0] > 1 or not self.dump.lengths:
            return {}
        bounds = [0]
        for length in self.dump.lengths:
            bounds.append(bounds[-1] + int(length))
        if bounds[-1] != self.shape[1]:
            raise UsageError(f"the dump's sequences have {bounds[-1]} tokens, its token ids {self.shape[1]}")
        return {"cu_seqlens": bounds}

    def at(self, rank: RankDump) -> dict[str, int]:
        if "rank" not in rank.at:
            return {axis: int(rank.at.get(axis, 0)) for axis in ("tp", "pp", "dp", "ep", "etp", "cp")}
        if rank.at["rank"] >= self.parallel.world:
            raise UsageError(
                f"the dump has a rank {rank.at['rank']}, {self.parallel} has {self.parallel.world}",
                hint="say how it was laid out: --tp, --pp, ..",
            )
        here = self.parallel.coordinates(rank.at["rank"])
        return {axis: here[axis] for axis in ("tp", "pp", "dp", "ep", "etp", "cp")}

    def reduced(self) -> list[RankDump]:
        """Ranks whose partial sums over tp are added up: an engine may reduce later than the module whose output it is."""
        if self.parallel.tp == 1:
            return list(self.dump.ranks)
        names = sorted(
            {
                name
                for rank in self.dump.ranks
                for name in rank.tensors
                if self.names.partial(name.partition(":")[0]) and not name.endswith(":1")
            }
        )
        sums: dict[str, torch.Tensor] = {}
        for name in names:
            held = [rank.tensors[name] for rank in self.dump.ranks if name in rank.tensors]
            if len(held) == self.parallel.tp and any(not torch.equal(held[0], other) for other in held[1:]):
                sums[name] = torch.stack([one.float() for one in held]).sum(0)
        if sums:
            self.notes.append(
                f"{len(sums)} outputs differ over TP ranks where the engine reduces later: they were taken for partial sums and added up"
            )
        return [replace(rank, tensors={name: sums.get(name, tensor) for name, tensor in rank.tensors.items()}) for rank in self.dump.ranks]

    def rank(self, rank: RankDump) -> tuple[dict[str, torch.Tensor], dict[str, Part]]:
        """This rank's tensors by our names, and what each is."""
        ids = self.dump.ids.reshape(self.shape)
        tensors, parts = {"tokens": ids.clone()}, {"tokens": Part("b s", ("tokens",))}
        if self.dump.positions is not None and self.dump.positions.numel() == ids.numel():
            tensors["positions"], parts["positions"] = self.dump.positions.reshape(self.shape).clone(), Part("b s", ("positions",))
        modules: dict[str, list[torch.Tensor]] = {}
        for name in sorted(rank.tensors):
            modules.setdefault(name if self.names.own(name) else name.partition(":")[0], []).append(rank.tensors[name])
        for name, outputs in modules.items():
            try:
                pieces = self.names.pieces(name, outputs, self.parallel.tp, self.shape)
                for piece in pieces:
                    self._check(piece)
            except BisectError as error:
                self.unfit[name] = error.message
                continue
            except RuntimeError as error:
                self.unfit[name] = f"{first_line(error)} (is config.json that of this model?)"
                continue
            if not pieces:
                self.unknown[name] = None
            for piece in pieces:
                try:
                    self.names.fitting(piece)
                except UsageError as error:
                    self.misfit.append(f"{name}: {error.message}")
                self.known.add(piece.key)
                tensors[piece.key], parts[piece.key] = piece.tensor.float().clone(), Part(piece.layout, tuple(piece.key.split("|")))
        return tensors, parts

    def _check(self, piece: Piece) -> None:
        parse_layout(piece.layout).split(piece.tensor, self.local, self.parallel)


def _config(reference: Path) -> dict[str, Any]:
    file = reference / "config.json"
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} can't be read: {first_line(error)}", hint="a dump does not say what model it is of") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file} is no page of settings")
    return found


def _mapping(file: Path | None) -> Mapping[str, str]:
    """Their names → ours, from a JSON object."""
    if file is None:
        return {}
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} can't be read: {first_line(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise UsageError(f"{file}: a map is one JSON object, their name → ours", hint='{"blocks.*.attn": "layers.*.attention.out_proj"}')
    return found


def _parallel(dump: Dump, parallel: Parallel | None) -> Parallel:
    """The dump's own sizes, else those of the flags."""
    sizes = dump.sizes
    found = Parallel(tp=sizes.get("tp", 1), pp=sizes.get("pp", 1), etp=1) if sizes and parallel is None else parallel or Parallel()
    if found.cp > 1 or sizes.get("cp", 1) > 1:
        raise UsageError("a dump under context parallel is not read: nothing in it says how its sequence was cut")
    return found


def _dtype(rank: RankDump) -> str:
    """The coarsest dtype that was computed in."""
    kinds = {tensor.dtype for tensor in rank.tensors.values() if tensor.is_floating_point()}
    return str(max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)).removeprefix("torch.")
