"""Routing is judged by the reference's rule on the candidate's own logits: a choice has no threshold, and moves with what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from bisect_hooks.family import Dimensions, Family, Routing
from bisect_hooks.site import Site

from bisect_tool.judge import Tolerance
from bisect_tool.measure import measure
from bisect_tool.noise import MARGIN, estimate
from bisect_tool.recording import Recording

SEED = 20260507
NUDGES = 3


@dataclass(frozen=True)
class ByRule:
    """What the reference's rule makes of one pass of the candidate, layer by layer.

    handed  key → what the candidate's next step was given there [t f]: its own value, or the reference's where that was grafted
    own     key → the candidate's own value; its choice and its probabilities come from one call, so it weighs what it chose itself
    """

    family: Family
    dims: Dimensions
    handed: Callable[[str], torch.Tensor]
    own: Callable[[str], torch.Tensor]
    recording: Recording

    def routing(self, prefix: str) -> Routing:
        """The rule on the logits, and the expert bias where there is one, that the candidate itself has."""
        return self._rule(prefix)(self.handed(f"{prefix}.router.logits"))

    def value(self, site: Site, key: str) -> torch.Tensor:
        """What a key behind the logits has to be: choice and probabilities [t e], rows [t k·h] and probabilities [t k] as dispatched."""
        prefix = f"layers.{site.layer}"
        if site.module == "router":
            return self.routing(prefix).chosen if site.part == "topk" else self._weights(prefix)
        chosen = self.handed(f"{prefix}.router.topk").bool()
        if key.endswith(":rows"):
            return self.handed(f"{prefix}.pre_mlp_norm").repeat(1, int(chosen[0].sum()))
        return self.handed(f"{prefix}.router.probs")[chosen].reshape(chosen.shape[0], -1)

    def _weights(self, prefix: str) -> torch.Tensor:
        """Probabilities [t e] of the experts that the candidate itself chose, whether the rule chooses them or not."""
        routing, logits, own = self.routing(prefix), self.handed(f"{prefix}.router.logits"), self.own(f"{prefix}.router.topk")
        same = (own == routing.chosen).all(-1, keepdim=True)
        return torch.where(same, routing.probs, self.family.route(logits, self.dims, self._bias(prefix), own).probs)

    def finite(self, prefix: str) -> bool:
        """Whether the rule has numbers to go by."""
        return bool(self.handed(f"{prefix}.router.logits").isfinite().all())

    def chosen_alike(self, topk: str) -> torch.Tensor:
        """[t] tokens whose experts both sides chose alike: elsewhere their sums are of other experts.  All tokens where there is none."""
        alike = (self.recording[topk].float() == self.handed(topk).float()).all(-1)
        return alike if bool(alike.any()) else ~alike

    def tolerance(self, prefix: str, measured: Tolerance) -> Tolerance:
        """Of probabilities: what was measured on the reference's logits, and no less than the same noise on the candidate's own.

        Logits that drifted have large probabilities where the reference's are small, and so has their noise.
        """
        dtype = getattr(torch, self.recording.provenance.dtype)
        least, logits, routing = torch.finfo(dtype).eps / 2, self.handed(f"{prefix}.router.logits"), self.routing(prefix)
        if not bool(logits.isfinite().all()):
            return measured
        generator = torch.Generator().manual_seed(SEED)
        noise = [torch.rand(logits.shape, generator=generator).mul_(2).sub_(1).to(logits.device) for _ in range(NUDGES)]
        moved = (logits.float() * (1 + least * one) for one in noise)
        level, deltas = rule_deltas(self._rule(prefix), moved, routing.probs, routing.chosen)
        own = estimate(routing.probs, deltas, least)
        return replace(
            measured,
            relative_rms=max(measured.relative_rms, MARGIN * level),
            noise=own if measured.noise is None else measured.noise.at_least(own),
        )

    def _bias(self, prefix: str) -> torch.Tensor | None:
        return self.handed(f"{prefix}.router.expert_bias") if self.dims.expert_bias else None

    def _rule(self, prefix: str) -> Callable[[torch.Tensor], Routing]:
        bias = self._bias(prefix)
        return lambda logits: self.family.route(logits, self.dims, bias)


def rule_deltas(
    rule: Callable[[torch.Tensor], Routing], moved: Iterable[torch.Tensor], probs: torch.Tensor, chosen: torch.Tensor
) -> tuple[float, list[torch.Tensor]]:
    """How far a rule on moved logits [t e] leaves probabilities, by relative rms and each by itself; NaN where the choice moved too."""
    level, deltas = 0.0, []
    for logits in moved:
        again = rule(logits)
        keep = (again.chosen == chosen).all(-1)
        if bool(keep.any()):
            level = max(level, measure(probs[keep], again.probs[keep]).relative_rms)
        deltas.append((again.probs - probs).bfloat16().masked_fill(~keep[:, None], torch.nan))
    return level, deltas
