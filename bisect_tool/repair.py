"""A repaired copy of a checkpoint: what reference and table say it should be, for every fault that was explained.

Nothing is inverted: a fault may have destroyed what it touched (E01 overwrites 480 of 512 experts), so the right values come from the
reference.  All other tensors stay bit-equal, and what was written is audited again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from bisect_hooks.errors import UsageError

from bisect_tool.audit import Auditor
from bisect_tool.checkpoint import TRACKER
from bisect_tool.conversion import check_empty, whole
from bisect_tool.faults import Fault, Finding
from bisect_tool.places import Tensor
from bisect_tool.rewrite import Rewriting
from bisect_tool.sides import Cast, StoredSide
from bisect_tool.weights import Sides

# what a copy of the reference's tensor does not mend: nobody knows what training would have made of it
NOT_MENDED = ("unknown", "stale", "rounded")


@dataclass(slots=True)
class Repaired:
    """written  tensors that were written anew · left  faults that were not repaired, with the reason"""

    written: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def check_repairable(sides: Sides, out: Path) -> None:
    """Refuses, before anything is read, what can't be repaired.  Raises UsageError."""
    if sides.checkpoint.format != "torch_dist":
        raise UsageError(
            f"--repair rewrites torch_dist checkpoints; {sides.checkpoint.path} is {sides.checkpoint.format}", hint="convert again"
        )
    check_empty(out)
    inside = [
        path for path in (sides.candidate, sides.checkpoint.path) if path is not None and out.resolve().is_relative_to(path.resolve())
    ]
    if inside:
        raise UsageError(f"--repair {out} lies inside the candidate")
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    size = sum(file.stat().st_blocks * 512 for file in sides.checkpoint.path.rglob("*") if file.is_file())
    free = shutil.disk_usage(out.resolve().parent).free
    if size > free:
        raise UsageError(f"--repair {out} needs {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")


def repair(sides: Sides, faults: Sequence[Fault], out: Path, *, trained: bool) -> Repaired:
    """Writes the copy.  Raises UsageError, and leaves nothing, when the disk is full or can't be written."""
    auditor = sides.auditor("reference-candidate")
    done = Repaired()
    source = sides.checkpoint.path
    try:
        with whole(out) as unfinished:
            nested = sides.candidate is not None and source.resolve() != sides.candidate.resolve()
            target = unfinished / source.name if nested else unfinished
            shutil.copytree(source, target, dirs_exist_ok=True)
            if nested:
                (unfinished / TRACKER).write_text(_tracked(source.name))
            copy = Sides(sides.reference, target, converted=sides.converted)
            rewriting, args = Rewriting(target), {}
            for fault in faults:
                why = "the checkpoint looks trained, so the reference no longer says what it holds" if trained else _unmended(fault.first)
                if why is not None:
                    done.left.append(f"{fault.first.site}: {why}")
                    continue
                done.written += _mend(auditor, copy, fault.findings, rewriting)
                setting = auditor.off.get(fault.first.site.module)
                if fault.first.cls == "model-definition" and setting is not None:
                    args[setting.arg] = setting.expected
            rewriting.finish(args)
    except OSError as error:
        raise UsageError(f"--repair {out}: {error.strerror or error}; nothing was left there") from error
    return done


def _tracked(name: str) -> str:
    return str(int(name.removeprefix("iter_"))) if name.startswith("iter_") else name


def _unmended(finding: Finding) -> str | None:
    if finding.between != ("reference", "candidate"):
        return f"it is between {' and '.join(finding.between)}"
    kind = finding.relation.kind if finding.relation is not None else "unknown"
    return f"its relation is {kind}" if kind in NOT_MENDED else None


def _mend(auditor: Auditor, copy: Sides, findings: Iterable[Finding], rewriting: Rewriting) -> list[str]:
    """Writes the tensors of one fault into the copy; returns their names."""
    side = copy.auditor("reference-candidate").candidate
    assert isinstance(side, StoredSide)
    written = []
    for finding in findings:
        relation = finding.relation
        assert relation is not None
        if relation.kind == "names-only" or (relation.kind == "extra" and not finding.made):
            for disk in finding.tensors[1]:
                if relation.kind == "names-only":
                    rewriting.renamed[disk] = relation.detail["as"]
                else:
                    rewriting.dropped.add(disk)
                written.append(disk)
            continue
        name = finding.made
        stored, expected = side.stored(name), auditor.expected(name)
        if stored is None:
            rewriting.add(name, expected.rows(0, expected.shape[0]))
        elif stored.shape[1:] == expected.shape[1:] and stored.shape[0] >= expected.shape[0] and len(stored.shape) == len(expected.shape):
            rewriting.change(stored, _Right(Cast(expected, stored.dtype), stored))
        else:
            rewriting.dropped.add(stored.on_disk)
            rewriting.add(stored.on_disk, expected.rows(0, expected.shape[0]).to(stored.dtype))
        written.append(name)
    return written


@dataclass(frozen=True)
class _Right:
    """The right part of a tensor for a chunk; rows that only pad the vocabulary become zero."""

    expected: Tensor
    stored: Tensor

    def __call__(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        unit, count = self.expected.unit, self.expected.shape[0]
        start, stop = min(offset[0], count), min(offset[0] + shape[0], count)
        first, last = start // unit * unit, -(-stop // unit) * unit
        rows = self.expected.rows(first, last)[start - first : stop - first]
        part = rows[(slice(None), *(slice(at, at + size) for at, size in zip(offset[1:], shape[1:], strict=True)))]
        if len(part) == shape[0]:
            return part
        return torch.cat([part, part.new_zeros(shape[0] - len(part), *shape[1:])])
