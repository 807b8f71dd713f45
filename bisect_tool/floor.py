"""The reference's own noise, and what it allows.

The allowance at a site comes from the reference itself: the same function, on the same inputs, evaluated another way.  Four
re-evaluations are made, each layer given the same inputs as the first time:

    another order   half the chunk of the delta rule, experts in one batched product, torch's own attention
    alone           every prompt in a batch of its own, so other shapes and other blocking
    permuted        the hidden dimension in another order, weights and all: an exact symmetry
    half an ulp     every weight and every grafted input moved by up to half a unit in its last place (seeded)

Of fewer than 64 tokens the last two are made up to eight times each, with other seeds.

The floor of a site is the largest relative rms of them all, and at least half a unit in the last place; the allowance is MARGIN
times the floor.  Rows (tokens) and columns (channels) have allowances of their own (`noise.py`, which says where the margin is from).

A choice has no noise.  What lies behind one (the routed experts' sum, the layer's output) is compared on tokens whose experts
were chosen alike; probabilities by the rule on logits moved by half a unit in the last place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from bisect_hooks.hf import Reference
from bisect_hooks.site import parse_site
from bisect_hooks.tap import split_key

from bisect_tool.judge import Tolerance
from bisect_tool.measure import Sums, measure
from bisect_tool.noise import MARGIN, Noise, estimate
from bisect_tool.prompts import Batch
from bisect_tool.recording import Recording
from bisect_tool.reference import base_grafts, routed_alike, said_of
from bisect_tool.routing import rule_deltas
from bisect_tool.shapes import token_errors
from bisect_tool.spilled import Spilled

SEED = 20260423
# with fewer tokens than this the last two ways are taken several times, with other seeds: the largest of a few differences says little
# of the next one
ENOUGH, MOST_SEEDS = 64, 8
SOURCE = f"{MARGIN:.0f} x the reference's own noise (four re-evaluations)"


def tolerance_of(recording: Recording, key: str, *, free: bool = False) -> Tolerance:
    """The allowance at a key; what is only handed on (dispatch) or chosen (top-k) has to be exact."""
    if ".dispatch:" in key or key.endswith(".topk"):
        return Tolerance(0.0, "exact: judged by the candidate's own routing")
    floor = (recording.provenance.free_floor if free else recording.provenance.floor).get(key, 0.0)
    if free:
        return Tolerance(MARGIN * floor, SOURCE, token=recording.provenance.free_tokens.get(key, 0.0))
    return Tolerance(MARGIN * floor, SOURCE, recording.noise(key))


Floors = dict[str, float]


@dataclass(frozen=True)
class Measured:
    """By key: how far the reference is from itself as a whole, grafted and free; its worst token, free; its noise by row and column."""

    floor: Floors
    free_floor: Floors
    free_tokens: Floors
    noises: dict[str, Noise]


Evaluate = Callable[[Batch, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
Nudge = Callable[[torch.Tensor], torch.Tensor]


def measured(reference: Reference, batch: Batch, said: Spilled, probes: Mapping[str, torch.Tensor], folder: Path) -> Measured:
    """The reference's noise; differences wait on disk in `folder`."""
    least = torch.finfo(reference.dtype).eps / 2
    floor, free, tokens = dict.fromkeys(said, least), dict.fromkeys(said, least), dict.fromkeys(said, 0.0)
    deltas: list[Spilled] = []
    parts = [part for _, part in batch.parts()]
    cut_loose = base_grafts(reference.dims)

    def raise_to(levels: Floors, evaluate: Evaluate, grafted: bool) -> None:
        """Evaluates another way, a part of the batch at a time; of grafted evaluations the differences are kept."""
        sums: dict[str, Sums] = {}
        spilled = Spilled(folder / f"deltas-{len(deltas)}") if grafted else None
        for number, part in enumerate(parts):
            before = said.part(number, reference.device)
            again = evaluate(part, {key: before[key] for key in cut_loose} if grafted else {})
            # a choice has no noise: it is judged by the rule on the candidate's own logits
            compared = {key: _kept(key, before, again) for key in again if not _is_choice(key)}
            for key, keep in compared.items():
                if bool(keep.any()):
                    sums.setdefault(key, Sums()).add(before[key][keep], again[key][keep])
                    if not grafted:
                        tokens[key] = max(tokens[key], _worst_token(before[key][keep], again[key][keep], least))
            if spilled is not None:
                # noise needs few digits
                spilled.add(
                    {
                        key: (again[key].float() - before[key].float()).bfloat16().masked_fill(~keep[:, None], torch.nan)
                        for key, keep in compared.items()
                    }
                )
        for key, one in sums.items():
            levels[key] = max(levels[key], one.difference().relative_rms)
        if spilled is not None:
            deltas.append(spilled)

    def once(part: Batch, grafts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return said_of(reference, part, grafts)

    with reference.another_order():
        raise_to(floor, once, grafted=True)
        raise_to(free, once, grafted=False)
    raise_to(floor, partial(said_of, reference, most=1), grafted=True)  # every prompt in a batch of its own
    seeds = [SEED + i for i in range(min(MOST_SEEDS, -(-ENOUGH // batch.tokens)))]
    for seed in seeds:
        with reference.hidden_permuted(seed):
            raise_to(floor, once, grafted=True)
    floor |= dict.fromkeys((key for key in probes if ":" not in key), least)
    chosen = {key: least for key in said if key.endswith(".router.probs")}
    moved: dict[str, list[torch.Tensor]] = {}  # what is not in `deltas`: probabilities by the rule, experts that are probed
    for seed in seeds:
        with reference.half_an_ulp_off(seed) as nudge:
            raise_to(floor, partial(_nudged, reference, nudge), grafted=True)
            raise_to(free, once, grafted=False)
            for layer in (n for n, moe in enumerate(reference.dims.moe) if moe):
                first, _, second = reference.probe_experts(layer, nudge(probes[f"layers.{layer}.experts.fc1:rows"]))
                for key, again in ((f"layers.{layer}.experts.fc1", first), (f"layers.{layer}.experts.fc2", second)):
                    # each expert is judged by itself, so the floor is the worst expert's
                    floor[key] = max(floor[key], *(measure(a, b).relative_rms for a, b in zip(probes[key], again, strict=True)))
                    moved.setdefault(key, []).append((again.float() - probes[key].float()).bfloat16().flatten(0, 1))
            for key in chosen:
                level, ruled = _rule_noise(reference, key, said, nudge)
                chosen[key] = max(chosen[key], level)
                moved.setdefault(key, []).extend(ruled)
    floor |= chosen  # whatever was heard of them behind logits that moved otherwise
    noises = {key: estimate(said[key], moved.pop(key) if key in moved else [one[key] for one in deltas], least) for key in deltas[0]}
    noises |= {key: estimate(probes[key].flatten(0, 1), of, least) for key, of in moved.items()}
    layers: dict[str, list[Noise]] = {}
    for key, one in noises.items():
        layers.setdefault(_anywhere(key), []).append(one)
    return Measured(floor, free, tokens, {key: one.usual(layers[_anywhere(key)]) for key, one in noises.items()})


def _worst_token(before: torch.Tensor, again: torch.Tensor, least: float) -> float:
    """How far off the worst token [t f] is, and no less than half a unit in the last place of the largest, in units of the usual one."""
    sizes = before.double().reshape(len(before), -1).norm(dim=-1)
    usual = float(sizes.square().mean().sqrt())
    return max(float(token_errors(before, again).max()), least * float(sizes.max()) / usual if usual else 0.0)


def _anywhere(key: str) -> str:
    """A key without its layer."""
    return re.sub(r"^layers\.\d+\.", "", key)


def _kept(key: str, before: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[t] tokens whose values at a key can be compared."""
    alike = routed_alike(key, before, again)
    return torch.ones(len(before[key]), dtype=torch.bool, device=before[key].device) if alike is None else alike


def _nudged(reference: Reference, nudge: Nudge, part: Batch, grafts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A forward on grafts that were moved by half a unit in the last place."""
    return said_of(reference, part, {key: nudge(value) for key, value in grafts.items()})


def _rule_noise(reference: Reference, key: str, said: Mapping[str, torch.Tensor], nudge: Nudge) -> tuple[float, list[torch.Tensor]]:
    """Of probabilities: the rule on its own logits and on moved ones, against what the reference said, where the choice stayed."""
    prefix = key.removesuffix(".probs")
    logits, bias = said[f"{prefix}.logits"], said.get(f"{prefix}.expert_bias")
    moved = (logits.float(), nudge(logits).float())
    return rule_deltas(
        lambda one: reference.family.route(one, reference.dims, bias), moved, said[key].float(), said[f"{prefix}.topk"].float()
    )


def _is_choice(key: str) -> bool:
    site = parse_site(split_key(key)[0])
    return site.module == "tokens" or site.part == "topk"
