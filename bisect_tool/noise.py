"""How far apart two values of one site are in units of the reference's own noise there: by token, by channel, and in scale.

One number for a whole site hides a wrong channel among two thousand, and a channel a thousand times as loud hides all others.  So
the noise of a site is modelled as row scale x column scale, estimated from the reference's re-evaluations; differences are
divided by it, and the worst row (a token) and the worst column (a channel) each have an allowance of their own: MARGIN times the
worst that a re-evaluation of the same shape has, so that it counts how many rows and columns there are.

A difference that goes with the value itself, as when a whole tensor is scaled, hides below noise that does not: so z is projected
on the reference.  Of independent noise the projection is 1 in size.  Noise of weights is the same for every token, and that of an
expert's rounded weight for every channel, and then it is more: how much is seen in the projections of single channels and single
tokens, added up as if they were independent.  One re-evaluation has many of those, and only one projection of the whole.  What all
tokens and channels share (all attend to one token, whose key is rounded) shows in that one alone, which may be small by chance: so
a site allows no less than is usual of it over all layers.  A factor of less than half a unit in the last place is what rounding
one constant makes, and is always allowed.

MARGIN covers what the candidate adds of its own (another order of sums, and in bf16 other places where it rounds): it is the next
power of two above twice what the furthest of the clean runs in golden/calibration.json went to, and a test holds it to that.
Twice, because those runs are of one machine's kernels: with every matrix product cut in two and rounded in between, bf16 goes to 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bisect_tool.measure import blocks

MARGIN = 8.0
# a column seen by few tokens leans on its neighbours: as if this many more differences had been seen there, of the usual size, or of
# the usual size among the NEAR on either side if that is larger (one head can be a hundred times as loud as another)
LEAN = 8.0
NEAR = 8


@dataclass(frozen=True, slots=True)
class Noise:
    """rows [t], columns [f]  whose product is the scale of the noise · row, column, scale  the largest statistic of a re-evaluation
    · constant  the factor on everything that rounding one constant makes, which is always allowed."""

    rows: torch.Tensor
    columns: torch.Tensor
    row: float
    column: float
    scale: float
    constant: float

    @property
    def worst(self) -> tuple[float, float, float, float]:
        return self.row, self.column, self.scale, self.constant

    def at_least(self, other: Noise) -> Noise:
        """The larger of two noises of one site, in everything."""
        larger = (max(one, another) for one, another in zip(self.worst, other.worst, strict=True))
        return Noise(self.rows.maximum(other.rows), self.columns.maximum(other.columns), *larger)

    def usual(self, others: Sequence[Noise]) -> Noise:
        """Its scale no less than the root mean square of those of the same site in all layers."""
        return replace(self, scale=max(self.scale, math.sqrt(sum(one.scale**2 for one in others) / len(others))))

    def of_columns(self, index: torch.Tensor) -> Noise:
        return Noise(self.rows, self.columns[index], *self.worst)

    def of_rows(self, index: torch.Tensor) -> Noise:
        return Noise(self.rows[index], self.columns, *self.worst)


@dataclass(frozen=True, slots=True)
class Extreme:
    """The worst row or column, or the scale of all (index 0): `size` and `allowed` are in units of the noise."""

    kind: str
    index: int
    size: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.size / self.allowed

    def __str__(self) -> str:
        what = {"row": f"worst token {self.index}", "column": f"worst channel {self.index}", "scale": "in proportion to the value"}[
            self.kind
        ]
        return f"{what}: {self.size:.3g} x its noise, {self.allowed:.3g} allowed"


def estimate(said: torch.Tensor, deltas: Sequence[torch.Tensor], least: float) -> Noise:
    """The noise of a site [t f] from what its re-evaluations differ by; rows of NaN are rows that can't be compared.

    The scale never falls below `least` (half a unit in the last place) times the magnitude of the column, or of the usual column.
    """
    # a re-evaluation that changes no bit (one prompt alone, where there is but one) has sampled no noise
    deltas = [one for one in deltas if bool(one.nan_to_num(0.0).any())] or deltas[:1]
    valid = torch.stack([~one.isnan().all(-1) for one in deltas])
    seen, (tokens, count) = float(valid.sum()), said.shape
    columns, size = (torch.zeros(count, dtype=dtype, device=said.device) for dtype in (torch.float32, torch.float64))
    for rows in blocks(said):
        columns += _finite(deltas, rows).square().sum((0, 1))
        size += said[rows].double().square().sum(0)
    columns = (columns / max(seen, 1.0)).double()
    near = torch.cat([columns[:1].expand(NEAR), columns, columns[-1:].expand(NEAR)]).unfold(0, 2 * NEAR + 1, 1)
    usual = near.sort(-1).values[:, :-2].mean(-1)  # a massive channel or two are not what is usual there
    columns = ((seen * columns + LEAN * usual.maximum(columns.median())) / (seen + LEAN)).sqrt()
    size = (size / tokens).sqrt()
    columns = columns.maximum(least * size.maximum(size.median())).clamp_min(torch.finfo(torch.float32).tiny)
    each, scales, row = valid.sum(0), [], 1.0
    squares = [_Columns() for _ in deltas]
    for rows in blocks(said):
        z = _finite(deltas, rows) / columns
        scale = (z.square().sum((0, 2)) + LEAN) / (each[rows] * count + LEAN)
        floor = (least * said[rows].double() / columns).square().mean(-1)
        scales.append(scale.maximum(floor).sqrt())
        value = said[rows].double() / columns / scales[-1][:, None]
        for one, ok, square in zip(z, valid[:, rows], squares, strict=True):
            if bool(ok.any()):
                row = max(row, float(square.add(one[ok] / scales[-1][ok, None], value[ok]).max()))
    column = max([1.0, *(float(one.rms.max()) for one in squares if one.count)])
    return Noise(torch.cat(scales).float(), columns.float(), row, column, max([1.0, *(one.shared for one in squares)]), least)


def weigh(reference: torch.Tensor, candidate: torch.Tensor, noise: Noise) -> tuple[Extreme, Extreme, Extreme]:
    """The worst row, the worst column and the scale of two finite tensors [t f]."""
    by_row, columns = [], _Columns()
    for rows in blocks(reference):
        unit, value = noise.columns.double() * noise.rows[rows, None], reference[rows].double()
        by_row.append(columns.add((candidate[rows].double() - value) / unit, value / unit))
    row, column = torch.cat(by_row), columns.rms
    return (
        Extreme("row", int(row.argmax()), float(row.max()), MARGIN * noise.row),
        Extreme("column", int(column.argmax()), float(column.max()), MARGIN * noise.column),
        Extreme("scale", 0, columns.scale, max(MARGIN * noise.scale, noise.constant * math.sqrt(columns.value))),
    )


class _Columns:
    """Mean squares of columns [f], and the projection on the value, added up over blocks of rows."""

    def __init__(self) -> None:
        self.square: torch.Tensor | float = 0.0
        self.count = 0
        self.along: torch.Tensor | float = 0.0
        self.by_row = self.value = 0.0

    def add(self, z: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """z, value [t f], both in units of the noise → root mean squares of z's rows [t]"""
        square, along = z.square(), z.double() * value
        self.square, self.count = self.square + square.sum(0), self.count + len(z)
        self.along, self.by_row = self.along + along.sum(0), self.by_row + float(along.sum(1).square().sum())
        self.value += float(value.square().sum())
        return square.mean(1).sqrt()

    @property
    def scale(self) -> float:
        """The projection of all."""
        return abs(float(torch.as_tensor(self.along).sum())) / math.sqrt(self.value) if self.value else 0.0

    @property
    def shared(self) -> float:
        """How large the projection of all may be by what tokens share, or channels: from those of single channels and tokens."""
        by_column = float(torch.as_tensor(self.along).square().sum())
        return max(self.scale, math.sqrt(max(by_column, self.by_row) / self.value)) if self.value else 0.0

    @property
    def rms(self) -> torch.Tensor:
        return (torch.as_tensor(self.square) / self.count).sqrt()


def _finite(deltas: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
    """[e t f] of some rows, zero where they can't be compared."""
    return torch.stack([one[rows].float() for one in deltas]).nan_to_num(0.0)
