"""Whether a difference is allowed.  A verdict holds its measurement and where its tolerance came from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from bisect_tool.measure import Difference
from bisect_tool.noise import Noise


class Verdict(Enum):
    """Two outcomes are not enough: what was not compared does not agree."""

    AGREES = "agrees"
    DIFFERS = "differs"
    INCOMPARABLE = "incomparable"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart may be, and who says so; where rows and columns are judged by themselves, by which noise.

    token  how far off the worst token of a re-evaluation is, in units of the usual token; 0 where nobody measured it
    """

    relative_rms: float
    source: str
    noise: Noise | None = field(default=None, compare=False, repr=False)
    token: float = 0.0

    def of_rows(self, index: torch.Tensor) -> Tolerance:
        """For some rows only."""
        return replace(self, noise=self.noise.of_rows(index)) if self.noise else self

    def of_columns(self, index: torch.Tensor) -> Tolerance:
        """For some columns only."""
        return replace(self, noise=self.noise.of_columns(index)) if self.noise else self


EXACT = Tolerance(0.0, "bytes equal after the weight table")


def judge(difference: Difference, tolerance: Tolerance) -> Verdict:
    """NaN on one side is a difference, NaN on both is nothing to go by."""
    if difference.nonfinite:
        return Verdict.DIFFERS
    if difference.both:
        return Verdict.INCOMPARABLE
    # written so that a NaN that got here can't pass
    return Verdict.AGREES if difference.relative_rms <= tolerance.relative_rms else Verdict.DIFFERS


def worst(verdicts: list[Verdict]) -> Verdict:
    """differs if any differs, else incomparable if any is (or there are none), else agrees."""
    if Verdict.DIFFERS in verdicts:
        return Verdict.DIFFERS
    return Verdict.INCOMPARABLE if Verdict.INCOMPARABLE in verdicts or not verdicts else Verdict.AGREES
