"""The forward stage: where is a drift made, and where does it only show?

The grafted run judges.  Every layer is given the reference's input, and the reference's mixer output in its second half, so each
difference is made where it is seen.  A site that differs although everything upstream of it agrees is where a drift is made; it
is cured by putting the reference's value in its place, and the run is repeated until nothing is left unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from bisect_hooks.errors import BisectError, by_kind
from bisect_hooks.family import Dimensions
from bisect_hooks.site import Site, parse_site
from bisect_hooks.tap import split_key

from bisect_tool.candidate import CandidateRun, Said
from bisect_tool.floor import tolerance_of
from bisect_tool.flow import CURED_AT, behind, in_place, site_name, upstream, word
from bisect_tool.judge import Tolerance, Verdict, judge
from bisect_tool.measure import Difference, measure
from bisect_tool.noise import Extreme, weigh
from bisect_tool.recording import Recording, in_order
from bisect_tool.reference import BEHIND_ROUTING, base_grafts, probe_inputs
from bisect_tool.routing import ByRule
from bisect_tool.shards import Place, Shard, shard_of

MOST_PASSES = 16
PROBED = ("experts.fc1", "experts.fc2")
# why there is nothing to say of what is judged by the reference's rule on the candidate's own values
NOT_HANDED = "what the candidate makes it of is not finite, so the reference's rule gives nothing to hold it against"


@dataclass(frozen=True, slots=True)
class Judged:
    """One key of one pass.  extremes  its worst row, worst column and scale, where they have allowances of their own"""

    key: str
    verdict: Verdict
    difference: Difference | None
    tolerance: Tolerance
    why: str = ""
    extremes: tuple[Extreme, ...] = ()

    @property
    def whole(self) -> float:
        """The relative rms in units of its tolerance."""
        if self.difference is None or self.difference.relative_rms == 0:
            return 0.0
        return self.difference.relative_rms / self.tolerance.relative_rms if self.tolerance.relative_rms else math.inf

    @property
    def ratio(self) -> float:
        """The statistic that is nearest to its allowance, or furthest beyond it, in units of that."""
        return max([self.whole, *(one.ratio for one in self.extremes)])

    @property
    def tripped(self) -> str:
        """What says that it differs, where that is not the site as a whole."""
        beyond = [str(one) for one in sorted(self.extremes, key=lambda one: -one.ratio) if one.ratio > 1]
        return beyond[0] if beyond and self.whole <= 1 else ""


@dataclass(slots=True)
class Pass:
    """One grafted run, judged.

    values    the pairs that differ, for whoever wants to look closer
    replicas  keys whose replicas were not bit-equal, with the largest relative rms between them
    """

    judged: dict[str, Judged] = field(default_factory=dict)
    values: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    experts: dict[str, list[int]] = field(default_factory=dict)
    replicas: Mapping[str, float] = field(default_factory=dict)
    flips: dict[str, torch.Tensor] = field(default_factory=dict)

    def differing(self, known: Iterable[Site] = ()) -> set[str]:
        """Names of the sites that differ.  Where q, k or v rows of a packed linear_qkv are known to be wrong, its gate rows are
        not looked at again: they belong to that (contract rule 6)."""
        packed = {f"{site}:gate" for site in known if word(site) == "attention.qkv"}
        return {site_name(key) for key, one in self.judged.items() if one.verdict is Verdict.DIFFERS and key not in packed}


@dataclass(slots=True)
class Located:
    """What the passes found: sites where a drift is made, with their judgement, shard and wrong experts."""

    sites: dict[Site, Judged] = field(default_factory=dict)
    shards: dict[Site, Shard] = field(default_factory=dict)
    experts: dict[Site, list[int]] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    cures: list[list[str]] = field(default_factory=list)
    incomparable: dict[str, str] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)

    @property
    def first(self) -> Pass:
        return self.passes[0]

    @property
    def all_cures(self) -> list[str]:
        return sorted({key for cures in self.cures for key in cures})


@dataclass(frozen=True, slots=True)
class Bench:
    """A reference Recording and a candidate to hold against it."""

    recording: Recording
    run: CandidateRun
    dims: Dimensions

    def one_pass(self, cures: Iterable[str] = (), *, base: bool = True) -> Pass:
        """A grafted run with `cures` also put in place; every expected key judged."""
        grafts = [*(base_grafts(self.dims) if base else [f"layers.{n}.input" for n in range(self.dims.layers)]), *cures]
        said = self.run.record((self.recording.path, grafts))
        probes = self.run.probe(probe_inputs(self.recording, self.dims))
        result = Pass(replicas=said.replicas)
        handed, own = (handed_to(said, grafted, self.recording) for grafted in (set(grafts), set[str]()))
        by_rule = ByRule(self.run.family, self.dims, handed, own, self.recording)
        for key in expected_keys(self.recording, self.run.fused):
            result.judged[key] = self._judge(key, said, by_rule, probes, result)
        return result

    def _judge(self, key: str, said: Said, by_rule: ByRule, probes: Mapping[str, object], result: Pass) -> Judged:
        site = parse_site(split_key(key)[0])
        tolerance = tolerance_of(self.recording, key)
        if word(site) in PROBED:
            return self._judge_experts(key, probes, tolerance, result)
        if key not in said.tensors:
            return Judged(key, Verdict.INCOMPARABLE, None, tolerance, said.absent.get(key, "the candidate's taps yield no such tensor"))
        candidate = said.tensors[key]
        try:
            own = word(site) in ("router.topk", "router.probs", "experts.dispatch")
            if site.module == "router" and own and not by_rule.finite(f"layers.{site.layer}"):
                return Judged(key, Verdict.INCOMPARABLE, None, tolerance, NOT_HANDED)
            reference = by_rule.value(site, key) if own else self.recording[key]
            if site.module == "lm_head" and candidate.shape[-1] > reference.shape[-1]:
                candidate = candidate[..., : reference.shape[-1]]  # rows that only pad the vocabulary
            if word(site) == "router.topk":
                candidate = _without_ties(reference, candidate.float(), by_rule.routing(f"layers.{site.layer}").ranked)
                result.flips[key] = (self.recording[key].float() != said.tensors[key].float()).any(-1)
            if word(site) == "router.probs":
                tolerance = by_rule.tolerance(f"layers.{site.layer}", tolerance)
            if word(site) in BEHIND_ROUTING and self.dims.moe[site.layer or 0]:
                # a token that is no number is compared however it was routed
                tokens = by_rule.chosen_alike(f"layers.{site.layer}.router.topk") | ~candidate.isfinite().all(-1)
                reference, candidate = reference[tokens], candidate[tokens]
                tolerance = tolerance.of_rows(tokens)
            reference, candidate = reference.float(), candidate.float()
            difference = measure(reference, candidate)
        except BisectError as error:
            return Judged(key, Verdict.INCOMPARABLE, None, tolerance, error.message)
        one = judged(key, reference, candidate, difference, tolerance)
        if one.verdict is Verdict.DIFFERS:
            result.values[key] = (reference, candidate)
        return replace(one, why=NOT_HANDED) if own and one.verdict is Verdict.INCOMPARABLE else one

    def _judge_experts(self, key: str, probes: Mapping[str, object], tolerance: Tolerance, result: Pass) -> Judged:
        """Every expert by itself, so that one wrong expert among many is not averaged away; the worst speaks."""
        if key not in probes:
            return Judged(key, Verdict.INCOMPARABLE, None, tolerance, "the candidate has no such experts")
        reference, candidate = self.recording[key].float(), probes[key].tensor.float()  # type: ignore[attr-defined]
        if reference.shape != candidate.shape:
            return Judged(
                key,
                Verdict.INCOMPARABLE,
                None,
                tolerance,
                f"experts are {tuple(candidate.shape)}, the reference's {tuple(reference.shape)}",
            )
        tokens = torch.arange(reference.shape[1])
        each = [
            judged(key, one, other, measure(one, other), tolerance.of_rows(tokens + e * len(tokens)), only="scale")
            for e, (one, other) in enumerate(zip(reference, candidate, strict=True))
        ]
        verdicts = [one.verdict for one in each]
        result.experts[key] = [e for e, verdict in enumerate(verdicts) if verdict is Verdict.DIFFERS]
        worst = max(each, key=lambda one: (one.verdict is Verdict.DIFFERS, one.ratio))
        if result.experts[key]:
            return replace(worst, difference=measure(reference, candidate))
        return worst if Verdict.INCOMPARABLE not in verdicts else replace(worst, verdict=Verdict.INCOMPARABLE)

    def locate(self, on_pass: Callable[[int, Located], None] = lambda *_: None) -> Located:
        """Repeats grafted runs, curing what is found, until every difference is explained."""
        located = Located()
        cures: list[str] = []
        for number in range(MOST_PASSES):
            result = self.one_pass(cures)
            located.passes.append(result)
            made, waiting = _made_here(result, set(located.sites))
            for site in made:
                located.sites[site] = _worst_key(result, site)
                located.shards[site] = self.shard(result, site)
                keys = [key for key in result.experts if site_name(key) == str(site)]
                if keys:
                    located.experts[site] = result.experts[keys[0]]
            on_pass(number + 1, located)
            new = self.cures(made)
            located.cures.append(new)
            cures += [key for key in new if key not in cures]
            if not waiting or not made:
                located.unexplained = sorted(waiting) if not made else []
                break
        for key, one in located.first.judged.items():
            # what came in not finite may be compared once that is cured
            if all(result.judged[key].verdict is Verdict.INCOMPARABLE for result in located.passes):
                located.incomparable[key] = one.why or "not finite on either side"
        return located

    def cures(self, sites: Iterable[Site]) -> list[str]:
        """Keys whose grafting takes a drift made at `sites` out of what follows."""
        known = set(self.recording.keys)
        found = []
        for site in sites:
            if site.module == "lm_head":
                continue  # nothing follows it
            target = in_place(site, CURED_AT.get(word(site), word(site)))
            keys = [key for key in known if site_name(key) == target and ":rows" not in key and ":logit" not in key]
            if word(site) == "attention.qkv":
                keys.append(f"{site}:gate")
            if word(site) == "router.topk":
                keys.append(f"layers.{site.layer}.router.probs")
            found += keys
        return sorted(found)

    def shard(self, result: Pass, site: Site) -> Shard:
        """The coordinates of the run whose piece of the site differs."""
        parallel = self.run.parallel
        keys = [key for key, one in result.judged.items() if site_name(key) == str(site) and one.verdict is Verdict.DIFFERS]
        inside: set[Place] = set()
        if site.module == "experts":
            width = self.dims.experts // parallel.ep
            wrong = {e // width for key in keys for e in result.experts.get(key, [])}
            inside = {(ep, etp) for ep in wrong for etp in range(parallel.expert_tp)}
        else:
            for key in keys:
                inside |= {(tp, cp) for tp in self._wrong_ranks(key, result) for cp in range(parallel.cp)}
        return shard_of(site, parallel, "run", self.dims.layers, inside or None)

    def _wrong_ranks(self, key: str, result: Pass) -> set[int]:
        """Tensor parallel ranks whose columns of a key differ; all of them where it is not cut over tp."""
        parallel, (reference, candidate) = self.run.parallel, result.values[key]
        every, piece = set(range(parallel.tp)), split_key(key)[1]
        tap = next((tap for tap in self.run.taps if key in tap.keys), None)
        if tap is None or parallel.tp == 1:
            return every
        # the vocabulary is cut with its padding, which is not compared
        width = self.run.dims.vocabulary if tap.site.module == "lm_head" else reference.shape[-1]
        wrong = set()
        for rank, columns in enumerate(tap.parsed.columns(piece, width, "tp", parallel) or ()):
            columns = columns[columns < reference.shape[-1]]
            if not len(columns):
                continue
            here, tolerance = (reference[..., columns], candidate[..., columns]), result.judged[key].tolerance.of_columns(columns)
            if judged(key, *here, measure(*here), tolerance).verdict is Verdict.DIFFERS:
                wrong.add(rank)
        return wrong or every


def judged(
    key: str, reference: torch.Tensor, candidate: torch.Tensor, difference: Difference, tolerance: Tolerance, only: str = ""
) -> Judged:
    """Four statistics, each with its own allowance: all of it, the worst row, the worst column, the scale (or `only` one of these)."""
    verdict = judge(difference, tolerance)
    extremes: tuple[Extreme, ...] = ()
    if tolerance.noise and not difference.nonfinite and not difference.both:
        extremes = tuple(one for one in weigh(reference, candidate, tolerance.noise) if only in ("", one.kind))
    if any(not one.size <= one.allowed for one in extremes):
        verdict = Verdict.DIFFERS
    return Judged(key, verdict, difference, tolerance, extremes=extremes)


def expected_keys(recording: Recording, fused: Collection[str] = ()) -> list[str]:
    """What has to be compared: everything the reference said, but for helpers, layer inputs (the outputs before them), and sites
    that the candidate computes inside another module (`fused`)."""
    helpers = ("experts.fc1:rows", "experts.fc2:rows", "shared_expert_gate:logit", "tokens", ".input")
    keys = [key for key in recording.keys if not key.endswith(helpers)]
    layers = [key.removesuffix(".combine") for key in keys if key.endswith(".experts.combine")]
    # dispatch is a matter between the candidate's router and its own experts: the reference has no such place
    keys += (f"{layer}.dispatch:{piece}" for layer in layers for piece in ("rows", "probs"))
    return in_order([key for key in keys if site_name(key) not in fused])


def handed_to(said: Said, grafted: set[str], recording: Recording) -> Callable[[str], torch.Tensor]:
    """What the candidate's next module got: the graft where one is in place, else the candidate's own value."""

    def value(key: str) -> torch.Tensor:
        if key in grafted:
            return recording[key]
        if key not in said.tensors:
            raise BisectError(f"the candidate said nothing at {key}")
        return said.tensors[key].float()

    return value


def _without_ties(rule: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The candidate's choice, with the rule's where the two differ only between equal scores (within two units in the last place)."""
    differs = (rule != chosen).any(-1) & (rule.sum(-1) == chosen.sum(-1))
    if not bool(differs.any()):
        return chosen
    least = scores.masked_fill(~chosen.bool(), math.inf).amin(-1)
    most = scores.masked_fill(chosen.bool(), -math.inf).amax(-1)
    tie = differs & ((most - least) <= 2 * torch.finfo(torch.float32).eps * most.abs())
    return torch.where(tie[:, None], rule, chosen)


def _made_here(result: Pass, known: set[Site]) -> tuple[list[Site], set[str]]:
    """(sites that differ while all before them agrees, sites that differ behind another)."""
    differing = result.differing(known)
    # where a fault is replaced behind the place it is made, what stands there can't be judged apart from it
    cured = {str(site) for site in known} | {in_place(site, CURED_AT[word(site)]) for site in known if word(site) in CURED_AT}
    made, waiting = [], set()
    for name in sorted(differing - cured, key=lambda name: parse_site(name)):
        site = parse_site(name)
        before = {in_place(site, one) for one in upstream(site)}
        if before & (differing - cured):
            waiting.add(name)
        else:
            made.append(site)
    # q, k or v rows wrong: the gate rows of the same packed tensor belong to that (contract rule 6)
    packed = {site.layer for site in made if word(site) == "attention.qkv"}
    return [site for site in made if site.module != "attention_gate" or site.layer not in packed], waiting


def _worst_key(result: Pass, site: Site) -> Judged:
    keys = [one for key, one in result.judged.items() if site_name(key) == str(site) and one.verdict is Verdict.DIFFERS]
    return max(keys, key=lambda one: one.ratio)


def shows_at(recording: Recording, free: Said, site: Site) -> str | None:
    """The first site behind `site` at which the free run leaves the reference's own free-running noise."""
    for key in in_order(expected_keys(recording)):
        here = parse_site(split_key(key)[0])
        if (
            not behind(site, here)
            or key not in free.tensors
            or key not in recording
            or word(here) in PROBED
            or word(here) in ("experts.dispatch", "router.topk")
        ):
            continue
        reference, candidate = recording[key].float(), free.tensors[key].float()
        if here.module == "lm_head":
            candidate = candidate[..., : reference.shape[-1]]
        if reference.shape != candidate.shape:
            continue
        if judge(measure(reference, candidate), tolerance_of(recording, key, free=True)) is Verdict.DIFFERS:
            return str(here)
    return None


def of_spec(run: CandidateRun) -> list[str]:
    """Which spec of the user's built the candidate, and what the checkpoint holds that its model has no place for."""
    if run.spec is None:
        return []
    notes = [f"the candidate was built by --spec {' '.join(run.spec)}"]
    if run.unread:
        notes.append(f"the spec's model has no place for {', '.join(by_kind(run.unread))} of the checkpoint")
    return notes


__all__ = ["Bench", "Judged", "Located", "Pass", "expected_keys", "handed_to", "of_spec", "shows_at"]
