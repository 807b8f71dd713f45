"""How far apart two tensors are.  A measurement holds no opinion."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from bisect_hooks.errors import BisectError


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
    r, c = reference.double(), candidate.double()
    delta = (c - r).abs()
    one_sided = r.isfinite() != c.isfinite()
    neither = ~r.isfinite() & ~c.isfinite()
    nonfinite, both = int(one_sided.sum()), int(neither.sum())
    if nonfinite:
        flat = int(one_sided.flatten().int().argmax())
    else:
        flat = int(delta.nan_to_num(0.0, 0.0, 0.0).flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), reference.shape))
    squares, norm = float(delta.square().sum()), float(r.square().sum())
    return Difference(
        relative_rms=0.0 if squares == 0 else math.inf if norm == 0 else math.sqrt(squares) / math.sqrt(norm),
        largest=float(delta[index]),
        index=index,
        reference_value=float(r[index]),
        candidate_value=float(c[index]),
        nonfinite=nonfinite,
        both=both,
        compared=reference.numel(),
    )
