"""How far apart two tensors are.  A measurement holds no opinion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bisect_hooks.errors import BisectError

# elements that are measured at a time
BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Difference:
    """relative_rms is sqrt(Σ(c−r)²)/sqrt(Σr²) in fp64 over all compared elements; 0/0 is 0.

    index       of the largest difference, in the reference's canonical order
    nonfinite   elements that are finite on one side only
    both        elements that are finite on neither
    """

    relative_rms: float
    largest: float
    index: tuple[int, ...]
    reference_value: float
    candidate_value: float
    nonfinite: int
    both: int
    compared: int

    @property
    def zero(self) -> bool:
        return self.relative_rms == 0 and not self.nonfinite and not self.both


def measure(reference: torch.Tensor, candidate: torch.Tensor) -> Difference:
    """Raises BisectError for tensors of different shapes or none at all: those can't be compared, which is no agreement."""
    if reference.shape != candidate.shape:
        raise BisectError(f"shapes differ: reference {tuple(reference.shape)}, candidate {tuple(candidate.shape)}")
    if reference.numel() == 0:
        raise BisectError("nothing to compare: the tensors are empty")
    sums = Sums()
    if not reference.dim():
        sums.add(reference, candidate)
    for rows in blocks(reference) if reference.dim() else ():
        sums.add(reference[rows], candidate[rows], rows.start)
    return sums.difference()


def blocks(tensor: torch.Tensor) -> Iterator[slice]:
    """Rows of a tensor, a few million elements at a time: what is computed of them in float64 is many times as large."""
    each = max(1, BLOCK * len(tensor) // max(tensor.numel(), 1))
    for start in range(0, len(tensor), each):
        yield slice(start, min(start + each, len(tensor)))


@dataclass(slots=True)
class Sums:
    """What a Difference is made of, added up over blocks of rows."""

    squares: float = 0.0
    norm: float = 0.0
    nonfinite: int = 0
    both: int = 0
    compared: int = 0
    largest: float = -1.0
    one_sided: bool = False
    index: tuple[int, ...] = ()
    values: tuple[float, float] = (math.nan, math.nan)

    def add(self, reference: torch.Tensor, candidate: torch.Tensor, row: int = 0) -> None:
        """Adds two blocks of one shape whose first row is row `row` of their tensors."""
        # sixteen bits and fewer are exact in float32, and so nearly is their difference; squares are summed in float64 either way
        narrow = max(reference.element_size(), candidate.element_size()) <= 2
        r, c = (tensor.to(torch.float32 if narrow else torch.float64) for tensor in (reference, candidate))
        delta = (c - r).abs_()
        squares, norm = _square(delta), _square(r)
        if narrow and not math.isfinite(squares):  # the difference of the largest bfloat16 does not fit
            delta = (c.double() - r.double()).abs_()
            squares = _square(delta)
        self.compared += r.numel()
        if math.isfinite(squares) and math.isfinite(norm):
            self._keep(delta, r, c, row, one_sided=False)
        else:
            one_sided, neither = r.isfinite() != c.isfinite(), ~r.isfinite() & ~c.isfinite()
            self.nonfinite += int(one_sided.sum())
            self.both += int(neither.sum())
            self._keep(one_sided.int() if bool(one_sided.any()) else delta.nan_to_num(0.0, 0.0, 0.0), r, c, row, bool(one_sided.any()))
        self.squares += squares
        self.norm += norm

    def _keep(self, delta: torch.Tensor, r: torch.Tensor, c: torch.Tensor, row: int, one_sided: bool) -> None:
        """Remembers the largest difference; the first element that is finite on one side only is larger than any."""
        if self.one_sided:
            return
        index = tuple(int(i) for i in torch.unravel_index(delta.flatten().argmax(), delta.shape))
        largest = abs(float(c[index]) - float(r[index]))
        if one_sided or largest > self.largest:
            at = (index[0] + row, *index[1:]) if index else ()
            self.largest, self.one_sided, self.index, self.values = largest, one_sided, at, (float(r[index]), float(c[index]))

    def difference(self) -> Difference:
        squares, norm = self.squares, self.norm
        return Difference(
            relative_rms=0.0 if squares == 0 else math.inf if norm == 0 else math.sqrt(squares) / math.sqrt(norm),
            largest=self.largest,
            index=self.index,
            reference_value=self.values[0],
            candidate_value=self.values[1],
            nonfinite=self.nonfinite,
            both=self.both,
            compared=self.compared,
        )


def _square(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
