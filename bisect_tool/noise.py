"""How far apart two values of one site are in units of the reference's own noise there: by token and by channel.

One number for a whole site hides a wrong channel among two thousand, and a channel a thousand times as loud hides all others.  So
the noise of a site is modelled as row scale x column scale, estimated from the reference's re-evaluations; differences are
divided by it, and the worst row (a token) and the worst column (a channel) each have an allowance of their own: MARGIN times the
worst that a re-evaluation of the same shape has, so that it counts how many rows and columns there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bisect_tool.measure import blocks

MARGIN = 8.0
# a column seen by few tokens leans on its neighbours: as if this many more differences had been seen there, of the usual size, or of
# the usual size among the NEAR on either side if that is larger (one head can be a hundred times as loud as another)
LEAN = 8.0
NEAR = 8


@dataclass(frozen=True, slots=True)
class Noise:
    """rows [t], columns [f]  whose product is the scale of the noise · row, column  the largest statistic of a re-evaluation."""

    rows: torch.Tensor
    columns: torch.Tensor
    row: float
    column: float

    def of_columns(self, index: torch.Tensor) -> Noise:
        return Noise(self.rows, self.columns[index], self.row, self.column)

    def of_rows(self, index: torch.Tensor) -> Noise:
        return Noise(self.rows[index], self.columns, self.row, self.column)


@dataclass(frozen=True, slots=True)
class Extreme:
    """The worst row or column: `size` and `allowed` are in units of the noise."""

    kind: str
    index: int
    size: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.size / self.allowed

    def __str__(self) -> str:
        what = {"row": "token", "column": "channel"}[self.kind]
        return f"worst {what} {self.index}: {self.size:.3g} x its noise, {self.allowed:.3g} allowed"


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
        for one, ok, square in zip(z, valid[:, rows], squares, strict=True):
            if bool(ok.any()):
                row = max(row, float(square.add(one[ok] / scales[-1][ok, None]).max()))
    column = max([1.0, *(float(one.rms.max()) for one in squares if one.count)])
    return Noise(torch.cat(scales).float(), columns.float(), row, column)


def weigh(reference: torch.Tensor, candidate: torch.Tensor, noise: Noise) -> tuple[Extreme, Extreme]:
    """The worst row and the worst column of two finite tensors [t f]."""
    by_row, columns = [], _Columns()
    for rows in blocks(reference):
        z = (candidate[rows].double() - reference[rows].double()) / noise.columns / noise.rows[rows, None]
        by_row.append(columns.add(z))
    row, column = torch.cat(by_row), columns.rms
    return (
        Extreme("row", int(row.argmax()), float(row.max()), MARGIN * noise.row),
        Extreme("column", int(column.argmax()), float(column.max()), MARGIN * noise.column),
    )


class _Columns:
    """Mean squares of columns [f], added up over blocks of rows."""

    def __init__(self) -> None:
        self.square: torch.Tensor | float = 0.0
        self.count = 0

    def add(self, z: torch.Tensor) -> torch.Tensor:
        """z [t f] → root mean squares of its rows [t]"""
        square = z.square()
        self.square, self.count = self.square + square.sum(0), self.count + len(z)
        return square.mean(1).sqrt()

    @property
    def rms(self) -> torch.Tensor:
        return (torch.as_tensor(self.square) / self.count).sqrt()


def _finite(deltas: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
    """[e t f] of some rows, zero where they can't be compared."""
    return torch.stack([one[rows].float() for one in deltas]).nan_to_num(0.0)
