"""Rows, halves and columns of one matrix in another order: candidate rows are the reference's, but not in their places."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bisect_tool.compare import bits, same_bytes

# tensor parallel sizes that a packed tensor may have been cut or joined for
WAYS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to a block: `apply` makes the candidate's block of the reference's."""

    kind: str
    detail: dict[str, Any]
    apply: Callable[[torch.Tensor], torch.Tensor]
    experiment: str
    control: str
    also: tuple[dict[str, Any], ...] = ()
    rule: str = ""
    shown: dict[str, Any] = field(default_factory=dict)


def digest(tensor: torch.Tensor) -> bytes:
    """A hash of a tensor's bytes."""
    return hashlib.blake2b(bits(tensor).numpy().tobytes(), digest_size=16).digest()


def reordered(want: torch.Tensor, got: torch.Tensor, ways: Sequence[int]) -> Change | None:
    """The change that makes `got` of `want` by moving rows or columns, or None.

    want, got  [rows], [rows columns] or what comes after an expert's number; ways  tensor parallel sizes to think of
    """
    if want.shape != got.shape:
        return _transposed(want, got)
    axes = [axis for axis, size in enumerate(want.shape) if size > 1]
    for axis in axes:
        half = want.shape[axis] // 2
        if want.shape[axis] == 2 * half and half and same_bytes(want.roll(half, axis), got):
            return Change(
                "halves-swapped", {"axis": axis}, partial(torch.roll, shifts=half, dims=axis),
                "exchange the two halves, compare every byte", "in order, they differ",
            )  # fmt: skip
    transposed = _transposed(want, got)
    if transposed is not None:
        return transposed
    if want.dim() < 2:
        return _blocks_of_vector(want, got, ways) or _exchanged(want, got, ways)
    orders = (_order(want.transpose(0, axis), got.transpose(0, axis), axis, ways) for axis in axes)
    return next((found for found in orders if found is not None), None)


def _transposed(want: torch.Tensor, got: torch.Tensor) -> Change | None:
    """The transpose: stored as such, or its bytes under the reference's shape."""
    if want.dim() != 2 or want.numel() != got.numel():
        return None
    turned = want.T.contiguous()
    if not same_bytes(turned.reshape(got.shape), got):
        return None
    shape = got.shape
    return Change(
        "transpose",
        {},
        lambda block: block.T.contiguous().reshape(shape),
        "transpose the reference, compare every byte",
        "as it is, it differs",
    )


def _order(want: torch.Tensor, got: torch.Tensor, axis: int, ways: Sequence[int]) -> Change | None:
    mapped = row_map(want, got)
    return None if mapped is None else order_of(mapped, axis, ways)


def _blocks_of_vector(want: torch.Tensor, got: torch.Tensor, ways: Sequence[int]) -> Change | None:
    """Numbers repeat where rows of a matrix do not, so a vector's blocks are looked for: the largest of which every one is found."""
    count = len(want)
    for size in (size for size in range(count // 2, 0, -1) if count % size == 0):
        mapped = row_map(want.reshape(-1, size), got.reshape(-1, size))
        if mapped is not None:
            return order_of([block * size + i for block in mapped for i in range(size)], 0, ways)
    return None


def _exchanged(want: torch.Tensor, got: torch.Tensor, ways: Sequence[int]) -> Change | None:
    """Numbers of a vector that changed places among themselves, whatever repeats in the rest; those that moved have to be unlike."""
    here, there = bits(want).tolist(), bits(got).tolist()
    moved = [i for i, (one, other) in enumerate(zip(here, there, strict=True)) if one != other]
    was = {here[i]: i for i in moved}
    if len(was) < len(moved) or was.keys() != {there[i] for i in moved}:
        return None
    to = {i: was[there[i]] for i in moved}
    return order_of([to.get(i, i) for i in range(len(here))], 0, ways)


def order_of(mapped: Sequence[int], axis: int, ways: Sequence[int]) -> Change | None:
    """What an order is called: row (axis 0) or column i holds the reference's row mapped[i].  None when all are in their places."""
    count, wrong = len(mapped), sum(i != j for i, j in enumerate(mapped))
    if not wrong:
        return None
    index = torch.tensor(mapped)

    def apply(block: torch.Tensor) -> torch.Tensor:
        return block.index_select(axis, index)

    word = ("rows", "columns", "taps")[axis]
    control = f"in their own order {wrong} of {count} {word} differ"
    half = count // 2
    if list(mapped) == [*range(half, 2 * half), *range(half)]:
        return Change("halves-swapped", {"axis": axis}, apply, "exchange the two halves, compare every byte", control)
    if len(set(mapped)) < count:
        modulus = next((m for m in range(1, count) if all(j == i % m for i, j in enumerate(mapped))), None)
        text = f"{word[:-1]} i holds {word[:-1]} {'i mod ' + str(modulus) if modulus else 'map[i]'}"
        detail = {"axis": axis, "map": f"e mod {modulus}" if modulus else list(mapped), "modulus": modulus, "wrong": wrong, "of": count}
        return Change("duplicate", detail, apply, f"apply '{text}' to the reference, compare every byte", control)
    experiment = f"put the reference's {word} in the order of the map, compare every byte"
    block = interleaved(mapped)
    if block is None:
        unit = moved_as_one(mapped)
        moved = {"axis": axis, "unit": unit, "map": [j // unit for j in mapped[::unit]]}
        return Change("permutation", moved, apply, experiment, control)
    parts, size = block
    ranks = count // parts // size
    both: list[tuple[str, dict[str, Any]]] = [
        ("block-interleave", {"axis": axis, "block": size, "parts": parts}),
        ("even-cut", {"parts": parts, "size": ranks}),
    ]
    (kind, named), (other, also) = reversed(both) if ranks in ways else both
    return Change(kind, named, apply, experiment, control, ({"kind": other, "detail": also},))


def row_map(want: torch.Tensor, got: torch.Tensor) -> list[int] | None:
    """For each row of `got` the row of `want` that it is; None when one is not found, or rows of `want` that are equal tell no order."""
    at: dict[bytes, int] = {}
    for i, row in enumerate(want):
        if at.setdefault(digest(row), i) != i:
            return None
    mapped: list[int] = []
    for row in got:
        found = at.get(digest(row))
        if found is None:
            return None
        mapped.append(found)
    return mapped if same_bytes(want[mapped], got.contiguous()) else None


def interleaved(mapped: Sequence[int]) -> tuple[int, int] | None:
    """(parts, block) when the parts, laid one after another in the reference, alternate in blocks: [a0 b0 a1 b1 ..]."""
    count = len(mapped)
    size = next((i for i in range(1, count) if mapped[i] != mapped[i - 1] + 1), count)
    if size in (0, count) or count % size or mapped[0] != 0:
        return None
    starts = list(mapped[::size])
    stride = starts[1]
    if stride <= size or count % stride:
        return None
    parts, blocks = count // stride, stride // size
    expected = [p * stride + b * size for b in range(blocks) for p in range(parts)]
    whole = [start + i for start in expected for i in range(size)]
    return (parts, size) if whole == list(mapped) else None


def moved_as_one(mapped: Sequence[int]) -> int:
    """The largest block of rows that moves as one."""
    for unit in range(len(mapped) // 2, 1, -1):
        if len(mapped) % unit == 0 and all(
            mapped[i] % unit == 0 and list(mapped[i : i + unit]) == list(range(mapped[i], mapped[i] + unit))
            for i in range(0, len(mapped), unit)
        ):
            return unit
    return 1


def even_cut(packed: Sequence[tuple[torch.Tensor, torch.Tensor]], ways: Sequence[int]) -> tuple[str, int] | None:
    """How a packed projection was handled with no regard to its parts, and for how many tensor parallel ranks.

    packed  (what it should be, what it is) for every part, in packing order
    "cut"   the packed rows cut evenly, each block then read as one rank's parts
    "joined"  each rank's parts put one after another, the whole then read as if it were packed
    """
    rows = [len(want) for want, _ in packed]
    for size in ways:
        if sum(rows) % size or any(count % size for count in rows):
            continue
        for how, made in (("cut", _cut(packed, rows, size)), ("joined", _joined(packed, rows, size))):
            if all(same_bytes(one, got) for one, (_, got) in zip(made, packed, strict=True)):
                return how, size
    return None


def _cut(packed: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: Sequence[int], size: int) -> list[torch.Tensor]:
    local = [block.split([count // size for count in rows]) for block in torch.cat([want for want, _ in packed]).chunk(size)]
    return [torch.cat([rank[i] for rank in local]) for i in range(len(rows))]


def _joined(packed: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: Sequence[int], size: int) -> list[torch.Tensor]:
    whole = torch.cat([want.chunk(size)[rank] for rank in range(size) for want, _ in packed])
    return list(whole.split(list(rows)))
