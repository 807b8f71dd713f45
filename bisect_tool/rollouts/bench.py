"""The responses on the bench: what the engine and every other side say of them, and what is asked of one response at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from bisect_hooks.hf import Reference

from bisect_tool.rollouts import definitions, judging, simulate
from bisect_tool.rollouts.sample import Sample
from bisect_tool.rollouts.scoring import Scored, score

# responses, and tokens of them, that a simulation is tried on
TRIED, TRIED_TOKENS = 4, 1024
# simulations that are left after the first response
FINALISTS = 4


class Bench:
    """The responses, the reference's view of them and the other sides', in one order."""

    def __init__(
        self, samples: Sequence[Sample], scored: Sequence[Scored], others: Sequence[Mapping[str, Scored]], reference: Reference
    ) -> None:
        self.samples, self.scored, self.others, self.reference = samples, scored, others, reference
        self.said = [judging.sides_of(*one) for one in zip(samples, scored, others, strict=True)]
        self.lowest = min((sample.age for sample in samples), default=(0, ""))

    def in_units_of(self, definition: definitions.Definition) -> None:
        """Reads the engine's numbers again where they are of another unit."""
        units = [definition.kind if definition.kind in definitions.UNITS and definition.holds_of(one) else "" for one in self.samples]
        self.said = [judging.sides_of(*one) for one in zip(self.samples, self.scored, self.others, units, strict=True)]

    def has_logs(self, i: int) -> bool:
        sample = self.samples[i]
        return any(one is not None for one in sample.decode) or any(one is not None for one in sample.prefill[sample.start :])

    def is_base(self, i: int) -> bool:
        """Whether it was made with the weights that training began from, as far as the dump says."""
        sample = self.samples[i]
        return sample.rollout == 0 if sample.rollout is not None else sample.age == self.lowest

    def to_trainer(self, i: int) -> bool:
        """Whether training has moved the weights and the trainer said what it makes of them."""
        return not self.is_base(i) and bool(self.said[i].trained.isfinite().any())

    def difference(self, i: int, definition: definitions.Definition | None) -> torch.Tensor:
        """Engine - what it should say [n].  Later weights are held against the trainer's log-probs where there are any."""
        sample, each = self.samples[i], self.said[i]
        engine = each.side(each.best)
        if self.to_trainer(i):
            other = each.trained
        else:
            other = each.reference if definition is None else definitions.expected(definition, sample, self.scored[i])
            if definition is not None and definition.kind not in (
                "rows",
                "samples",
            ):  # a row off by one has an end that nothing is known of
                other = torch.where(other.isfinite(), other, each.reference)
        difference = engine - other
        values = sample.decode if each.best == "decode" else sample.prefill[sample.start :]
        given = torch.tensor([value is not None for value in values])
        return torch.where(given & engine.isnan(), math.inf, difference)

    def simulated(self, bad: Sequence[int]) -> simulate.Explained | None:
        """Tries every simulation on the shortest of the bad responses, and the best of them on a few more."""
        chosen: list[int] = []
        for i in sorted(bad, key=lambda i: len(self.samples[i].tokens)):
            if len(chosen) < TRIED and sum(len(self.samples[k].tokens) for k in (*chosen, i)) <= TRIED_TOKENS:
                chosen.append(i)
        engine = {i: self.said[i].side(self.said[i].best) for i in chosen}
        if not chosen or not all(bool(one.isfinite().any()) for one in engine.values()):
            return None

        def distance(one: simulate.Simulation | None, some: Sequence[int]) -> float:
            logs = [self.said[i].reference if one is None else self._done(one, self.samples[i]) for i in some]
            apart = torch.cat([engine[i] - other for i, other in zip(some, logs, strict=True)])
            return float(apart[apart.isfinite()].abs().mean())

        every = simulate.simulations(self.reference.model, self.reference.taps, self.reference.dims)
        best = sorted(every, key=lambda one: distance(one, chosen[:1]))[:FINALISTS]
        return simulate.explain([(one, distance(one, chosen)) for one in best], distance(None, chosen))

    def _done(self, one: simulate.Simulation, sample: Sample) -> torch.Tensor:
        """The reference's log-probs of a response with a fault in it."""
        with one.on(self.reference.model, sample.start):
            return score(self.reference, [sample], self.reference.dims.vocabulary)[0].logs[sample.start :]
