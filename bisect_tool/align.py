"""Which token of the candidate's Recording answers which of the reference's: rows are found by their token ids, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bisect_tool.faults import span
from bisect_tool.recording import Provenance

SHOWN = 3


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Inputs that are not the same.  detail is data; kind is a relation's, or None"""

    text: str
    next: str
    kind: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Aligned:
    """index: for every token of the reference, the candidate's token"""

    index: torch.Tensor
    notes: tuple[str, ...]


def align(reference: Provenance, candidate: Provenance) -> Aligned | Mismatch:
    """Rows are equal, or the candidate's are padded with one id; positions agree where both are known.

    Padding before a row is told from a doubled first token by its length: a padded batch has rows of one length.
    """
    batch = len({len(row) for row in candidate.rows}) == 1 < len({len(row) for row in reference.rows})
    starts = [0]
    for row in candidate.rows:
        starts.append(starts[-1] + len(row))
    free = list(range(len(candidate.rows)))
    index, notes, positions, padded = [], [], [], 0
    for number, row in enumerate(reference.rows):
        place = next(((i, at) for i in free if (at := _held(row, candidate.rows[i], before=batch)) is not None), None)
        if place is None:
            return _token_mismatch(number, row, [candidate.rows[i] for i in free])
        i, at = place
        free.remove(i)
        padded += len(candidate.rows[i]) > len(row)
        index.append(torch.arange(starts[i] + at, starts[i] + at + len(row)))
        if candidate.positions:
            positions.append(candidate.positions[i][at : at + len(row)])
    if padded:
        notes.append(f"{padded} rows of the candidate are padded with one id; padding is not compared")
    if free:
        notes.append(f"{len(free)} rows of the candidate are not in the reference and were left out")
    if not candidate.positions:
        notes.append("the candidate recorded no positions; they are taken to count from 0 in every row")
    expected = reference.positions or tuple(tuple(range(len(row))) for row in reference.rows)
    for number, (right, said) in enumerate(zip(expected, positions, strict=False)):
        if tuple(right) != tuple(said):
            return _position_mismatch(number, right, said, [len(row) for row in reference.rows], packed=bool(candidate.packed))
    return Aligned(torch.cat(index), tuple(notes))


def _held(row: Sequence[int], other: Sequence[int], *, before: bool) -> int | None:
    """Where `row` begins in `other`, which may be padded with one id behind it, or before it."""
    more = len(other) - len(row)
    if more < 0:
        return None
    if tuple(other[: len(row)]) == tuple(row) and len(set(other[len(row) :])) <= 1:
        return 0
    return more if before and tuple(other[more:]) == tuple(row) and len(set(other[:more])) <= 1 else None


def _token_mismatch(number: int, row: Sequence[int], others: Sequence[Sequence[int]]) -> Mismatch:
    do = "Feed both sides the same ids: look at the tokenizer, the chat template and who adds BOS. Nothing after this can be compared."
    if not others:
        return Mismatch(f"the candidate recorded fewer rows than the reference: nothing is left for row {number}", do)
    for other in others:
        for by in (1, -1):
            if len(row) > 2 and (tuple(other[by:]) == tuple(row) if by > 0 else tuple(row[-by:]) == tuple(other)):
                what = "one token more" if by > 0 else "one token less"
                text = f"row {number} has {what} at its start on the candidate ({other[0]} where the reference has {row[0]})"
                return Mismatch(text, do, "shifted-tokens", {"row": number, "by": by})
    common = max((_common(row, other), other) for other in others)
    at, other = common
    shown, said = (list(one[max(0, at - SHOWN) : at + SHOWN]) for one in (row, other))
    text = f"row {number} of the reference has no equal: the nearest row of the candidate differs at index {at} ({shown} against {said})"
    return Mismatch(text, do, None, {"row": number, "index": at})


def _common(row: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(row, other, strict=False)) if a != b), min(len(row), len(other)))


def _position_mismatch(number: int, right: Sequence[int], said: Sequence[int], lengths: Sequence[int], *, packed: bool) -> Mismatch:
    off = sorted({b - a for a, b in zip(right, said, strict=True)})
    first = next(i for i, (a, b) in enumerate(zip(right, said, strict=True)) if a != b)
    constant = len(off) == 1
    text = f"the positions of row {number} are {said[first]} where the reference has {right[first]}, at index {first}"
    if constant:
        text += f"; the whole row is off by {off[0]:+d}"
    if constant and packed and off[0] == sum(lengths[:number]):
        text += ": they go on over the packed sequence where each segment should start again at 0"
    elif not constant:
        text += f"; off by {span(off[:8])}"
    return Mismatch(text, "Give each sequence its own positions, then record again.", None, {"row": number, "index": first, "off": off[:8]})
