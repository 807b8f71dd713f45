"""What the reference said, as a Recording: recorded now, kept from a moment ago, or taken from a golden directory."""

from __future__ import annotations

import tempfile
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from bisect_hooks.errors import UsageError, by_kind
from bisect_hooks.hf import VERSION, Reference

from bisect_tool.floor import measured
from bisect_tool.prompts import Batch
from bisect_tool.recording import Provenance, Recording, by_group, in_order, writing
from bisect_tool.reference import Wanted, probe_all, said_of
from bisect_tool.spilled import Spilled

# a golden directory's Recording
RECORDING = "recording"


def record_reference(wanted: Wanted, reference: Reference, batch: Batch, out: Path) -> Recording:
    """Runs the reference freely, writes everything it said, and measures its own noise at every key.

    What is held at once is what a few prompts say; what is said of the others waits on disk.
    """
    with tempfile.TemporaryDirectory(prefix="bisect-said-") as folder, writing(out) as writer:
        said = Spilled(Path(folder) / "said")
        for _, part in batch.parts():
            said.add(said_of(reference, part))
        _check_finite(reference, said)
        probes = probe_all(reference, said)
        own = measured(reference, batch, said, probes, Path(folder))
        everything = ChainMap(probes, said)  # type: ignore[arg-type]
        for group, keys in by_group([*said, *probes]).items():
            writer.add(group, {key: everything[key].cpu() for key in keys})
        writer.add_noise(own.noises)
        writer.close(
            Provenance(
                side="reference",
                family=reference.family.name,
                model=str(wanted.directory.path),
                dtype=str(reference.dtype).removeprefix("torch."),
                rows=batch.rows,
                layout=wanted.layout,
                versions={"torch": torch.__version__, "transformers": VERSION},
                device=str(reference.device),
                floor=own.floor,
                free_floor=own.free_floor,
                free_tokens=own.free_tokens,
                worst={key: found.worst for key, found in own.noises.items()},
                fingerprint=wanted.directory.fingerprint,
                rounded=wanted.rounding.shown,
            )
        )
    return Recording(out)


def _check_finite(reference: Reference, said: Mapping[str, torch.Tensor]) -> None:
    """Raises UsageError where the reference's own values are no numbers: nothing can be held against those."""
    for key in in_order(said):
        wrong = int((~said[key].isfinite()).sum())
        if wrong:
            weights = [name for name, one in reference.model.named_parameters() if not bool(one.isfinite().all())]
            held = (
                f"its own {', '.join(weights[:3])} {'holds' if len(weights) == 1 else 'hold'} some"
                if weights
                else "all its weights are finite"
            )
            raise UsageError(
                f"the reference itself gives {wrong} values that are NaN or infinite, first at {key} ({held})",
                hint="nothing can be held against it: take the reference from where it came from again",
            )


@dataclass(frozen=True)
class Recorded:
    """A reference that has spoken: its Recording with its noise, what there is to say about it, and the model, loaded when asked for."""

    load: Callable[[], Reference] = field(repr=False)
    recording: Recording
    notes: tuple[str, ...]
    folder: tempfile.TemporaryDirectory[str] | None = None

    @cached_property
    def reference(self) -> Reference:
        return self.load()


def recorded_reference(wanted: Wanted, batch: Batch) -> Recorded:
    """The reference recorded once a process: like ranks, it is kept for whoever judges several candidates against it."""
    directory = wanted.directory
    files = sorted({stored.pieces[0].file for stored in directory.stored.values()} | {directory.path / "config.json"})
    stamp = tuple((str(file.resolve()), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    key = (stamp, wanted.layout, wanted.dtype, wanted.device, batch, frozenset(wanted.rounding.dtypes.items()))
    if key not in _RECORDED:
        _RECORDED.clear()
        reference, notes = wanted.load()
        folder = tempfile.TemporaryDirectory(prefix="bisect-reference-")
        recording = record_reference(wanted, reference, batch, Path(folder.name) / RECORDING)
        _RECORDED[key] = Recorded(lambda: reference, recording, tuple(notes), folder)
    return _RECORDED[key]


def golden_recording(golden: Path) -> Recording:
    """The Recording of a golden directory.  Raises UsageError when there is none, or none with measured noise."""
    recording = Recording(golden / RECORDING if (golden / RECORDING).is_dir() else golden)
    if not recording.provenance.floor:
        raise UsageError(
            f"{recording.path} has no measured noise, so nothing says what is allowed",
            hint="record the reference again: bisect-tool record --side reference",
        )
    return recording


def golden_reference(golden: Path, wanted: Wanted, batch: Batch) -> Recorded:
    """What a golden directory keeps of the reference, in place of running it.

    Raises UsageError where it is of another family, of other weights, dtype or token ids, or of a checkpoint that rounds otherwise.
    """
    recording = golden_recording(golden)
    come, asked = recording.provenance, str(wanted.dtype).removeprefix("torch.")
    rounds = any(rule.op.lossy for rule in wanted.rounding.rules)
    otherwise = [name for name, _ in sorted(come.rounded.items() ^ wanted.rounding.shown.items())]
    wrong = [
        *([f"of {come.family}, the reference is a {wanted.family.name}"] if come.family != wanted.family.name else []),
        *(["of other weights"] if come.fingerprint != wanted.directory.fingerprint else []),
        *([f"in {come.dtype}, --dtype asks for {asked}"] if come.dtype != asked else []),
        *(["of rows padded on the right"] if batch.left else []),
        *([f"of {len(come.rows)} other prompts ({recording.batch.tokens} tokens)"] if come.rows != batch.rows else []),
        *(
            [f"for {come.layout} checkpoints, and the {wanted.layout} layout rounds some weights"]
            if come.layout != wanted.layout and rounds
            else []
        ),
        *(
            [f"of a reference that was not rounded as this candidate's dtypes round it ({', '.join(by_kind(otherwise)[:2])})"]
            if otherwise
            else []
        ),
    ]
    if wrong:
        raise UsageError(
            f"the recording in {recording.path} is {'; '.join(wrong)}", hint="leave --golden out, or record the reference again"
        )
    notes = (f"the reference was not run: {recording.path} holds what it said",)
    return Recorded(lambda: wanted.load()[0], recording, notes)


_RECORDED: dict[object, Recorded] = {}
