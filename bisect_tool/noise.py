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
    delta = torch.stack([one.float() for one in deltas if bool(one.nan_to_num(0.0).any())] or [one.float() for one in deltas[:1]])
    valid = ~delta.isnan().all(-1)
    delta = delta.nan_to_num(0.0)
    seen = float(valid.sum())
    columns = (delta.square().sum((0, 1)) / max(seen, 1.0)).double()
    near = torch.cat([columns[:1].expand(NEAR), columns, columns[-1:].expand(NEAR)]).unfold(0, 2 * NEAR + 1, 1)
    usual = near.sort(-1).values[:, :-2].mean(-1)  # a massive channel or two are not what is usual there
    columns = ((seen * columns + LEAN * usual.maximum(columns.median())) / (seen + LEAN)).sqrt()
    size = said.double().square().mean(0).sqrt()
    columns = columns.maximum(least * size.maximum(size.median())).clamp_min(torch.finfo(torch.float32).tiny)
    z = delta / columns
    each, count = valid.sum(0), delta.shape[-1]
    rows = (z.square().sum((0, 2)) + LEAN) / (each * count + LEAN)
    floor = (least * said.double() / columns).square().mean(-1)
    rows = rows.maximum(floor).sqrt()
    statistics = [_statistics(one[ok] / rows[ok, None]) for one, ok in zip(z, valid, strict=True) if bool(ok.any())]
    row = max([1.0, *(float(by_row.max()) for by_row, _ in statistics)])
    column = max([1.0, *(float(by_column.max()) for _, by_column in statistics)])
    return Noise(rows.float(), columns.float(), row, column)


def weigh(reference: torch.Tensor, candidate: torch.Tensor, noise: Noise) -> tuple[Extreme, Extreme]:
    """The worst row and the worst column of two finite tensors [t f]."""
    z = (candidate.double() - reference.double()) / noise.columns / noise.rows[:, None]
    by_row, by_column = _statistics(z)
    return (
        Extreme("row", int(by_row.argmax()), float(by_row.max()), MARGIN * noise.row),
        Extreme("column", int(by_column.argmax()), float(by_column.max()), MARGIN * noise.column),
    )


def _statistics(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    square = z.square()
    return square.mean(1).sqrt(), square.mean(0).sqrt()
