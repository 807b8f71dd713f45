"""Who is wrong, where two implementations disagree and no statistic decides: the formula, in float64, takes a side.

Each side is held to what the formula makes of that side's own inputs and weights, so what came in from before clears nobody and
accuses nobody.  A reference that leaves the formula where the candidate follows it is at fault itself (class `reference`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from bisect_hooks.by_formula import Recipe, recipe
from bisect_hooks.errors import UsageError
from bisect_hooks.family import Dimensions

from bisect_tool.judge import Tolerance, Verdict, judge
from bisect_tool.measure import Difference, measure

SidesWith = Literal["reference", "candidate", "both", "neither"]
Get = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Spoken:
    """One side at a site: what entered it, its weights, what came out."""

    inputs: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    output: torch.Tensor


@dataclass(frozen=True, slots=True)
class Opinion:
    """How far each side is from the formula on its own inputs, and what that says."""

    key: str
    reference: Difference
    candidate: Difference
    tolerance: Tolerance

    @property
    def sides_with(self) -> SidesWith:
        follows = [judge(one, self.tolerance) is Verdict.AGREES for one in (self.reference, self.candidate)]
        if all(follows):
            return "both"
        return "reference" if follows[0] else "candidate" if follows[1] else "neither"

    @property
    def cls(self) -> str | None:
        """The class that this decides, if any."""
        return "reference" if self.sides_with == "candidate" else None

    @property
    def said(self) -> str:
        """One sentence for a person."""
        sizes = f"reference {self.reference.relative_rms:.2g}, candidate {self.candidate.relative_rms:.2g} relative rms off it"
        return {
            "candidate": f"the formula of {self.key}, written out in float64, sides with the candidate: the reference is wrong here ({sizes})",
            "reference": f"the formula of {self.key}, written out in float64, sides with the reference ({sizes})",
            "both": f"both sides follow the formula of {self.key} on their own inputs and weights: the difference came in from before ({sizes})",
            "neither": f"neither side follows the formula of {self.key} ({sizes}): both are wrong, or the formula is not this model's",
        }[self.sides_with]


def arbitrate(key: str, made_by: Recipe, reference: Spoken, candidate: Spoken, segments: Sequence[int], tolerance: Tolerance) -> Opinion:
    """The formula's opinion.  `segments` are the lengths of the sequences that the tokens belong to."""

    def off(side: Spoken) -> Difference:
        wanted = made_by.formula(side.inputs, side.weights, segments)
        return measure(wanted.reshape(len(wanted), -1), side.output.detach().double().reshape(len(side.output), -1))

    return Opinion(key, off(reference), off(candidate), tolerance)


@dataclass(frozen=True, slots=True)
class Arbiter:
    """The formulas of one model.  text: config.json's text_config"""

    dims: Dimensions
    text: Mapping[str, Any]

    def recipe(self, key: str) -> Recipe:
        """Raises UsageError for a key that no formula makes."""
        found = recipe(key, self.dims, self.text)
        if found is None:
            raise UsageError(f"no formula makes {key}")
        return found

    def opinion(
        self, key: str, segments: Sequence[int], tolerance: Tolerance, reference: tuple[Get, Get], candidate: tuple[Get, Get]
    ) -> Opinion:
        """Takes a side at `key`; each side is (its recording by key, its weights by Hugging Face name)."""
        made_by = self.recipe(key)
        sides = [
            Spoken([said(one) for one in made_by.inputs], [weight(one) for one in made_by.weights], said(key))
            for said, weight in (reference, candidate)
        ]
        return arbitrate(key, made_by, sides[0], sides[1], segments, tolerance)
