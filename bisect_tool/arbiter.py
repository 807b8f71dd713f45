"""Who is wrong, where two implementations disagree and no statistic decides: the formula, in float64, takes a side.

Each side is held to what the formula makes of that side's own inputs and of the reference's tensors, so what came in from before
clears nobody and accuses nobody.  A reference that leaves the formula where the candidate follows it is at fault itself (class
`reference`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from bisect_hooks.by_formula import Recipe, Sources, recipe
from bisect_hooks.family import Dimensions, Family

from bisect_tool.forward import Judged, judged
from bisect_tool.hf_directory import HuggingFaceDirectory
from bisect_tool.judge import Tolerance, Verdict
from bisect_tool.measure import measure

SidesWith = Literal["reference", "candidate", "both", "neither"]
Get = Callable[[str], torch.Tensor]
# (what entered by key, what came out)
Spoken = tuple[Get, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Opinion:
    """How far each side is from the formula on its own inputs, and what that says."""

    reference: Judged
    candidate: Judged

    @property
    def sides_with(self) -> SidesWith:
        follows = [one.verdict is Verdict.AGREES for one in (self.reference, self.candidate)]
        if all(follows):
            return "both"
        return "reference" if follows[0] else "candidate" if follows[1] else "neither"

    @property
    def off(self) -> tuple[float, float]:
        """Relative rms of the reference, and of the candidate, from the formula."""
        assert self.reference.difference is not None and self.candidate.difference is not None
        return self.reference.difference.relative_rms, self.candidate.difference.relative_rms

    @property
    def said(self) -> str:
        """One sentence for a person."""
        one, other = self.off
        sizes = f"reference {one:.2g}, candidate {other:.2g} relative rms off it"
        return {
            "candidate": f"Its formula, written out in float64, sides with the candidate ({sizes}).",
            "reference": f"Its formula, written out in float64, sides with the reference ({sizes}).",
            "both": f"Both sides follow its formula, written out in float64, on their own inputs ({sizes}): the difference came in from before, within what is allowed there.",
            "neither": f"Neither side follows its formula, written out in float64 ({sizes}): both are wrong, or it is not this model's.",
        }[self.sides_with]


@dataclass(frozen=True, slots=True)
class Arbiter:
    """The formulas of one model.  weight  reads a tensor of the reference by its canonical name"""

    dims: Dimensions
    sources: Sources
    weight: Get

    @classmethod
    def of(cls, directory: HuggingFaceDirectory, family: Family, dims: Dimensions, weight: Get) -> Arbiter:
        """Of a directory; `weight` reads it, or what the reference was given in the place of what is on disk (a row that rounds)."""
        return cls(dims, Sources.of(family.rules(dims, "slime", directory.names, mtp=False)), weight)

    def recipe(self, key: str) -> Recipe | None:
        return recipe(key, self.dims, self.sources)

    def opinion(
        self, key: str, segments: Sequence[int], tolerance: Tolerance, dtype: torch.dtype, reference: Spoken, candidate: Spoken
    ) -> Opinion | None:
        """Takes a side at `key`; None where no formula makes it.  `segments` are the lengths of the sequences, `dtype` both sides'."""
        made_by = self.recipe(key)
        if made_by is None:
            return None
        weights = [self.weight(name).to(dtype) for name in made_by.weights]

        def off(side: Spoken) -> Judged:
            inputs, output = side
            wanted = made_by.formula([inputs(one) for one in made_by.inputs], weights, segments)
            # every token of every expert is a row of the noise
            tokens = len(tolerance.noise.rows) if tolerance.noise else len(wanted)
            wanted = wanted.reshape(tokens, -1)
            said = output.detach().double().reshape(tokens, -1)[:, : wanted.shape[1]]  # but for rows that pad the vocabulary
            return judged(key, wanted, said, measure(wanted, said), tolerance)

        return Opinion(off(reference), off(candidate))
