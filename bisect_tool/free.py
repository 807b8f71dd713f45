"""Two free-running Recordings: where is a drift made, and where does it only show?

No graft is possible, so a difference at a site holds all that came in from before it.  It is judged on tokens whose routing, and
that of the tokens before them, agreed so far; and by growth: a drift is made where the difference leaves its allowance while all
that the site is computed from is inside its own, or, behind another drift, where it grows BEHIND times more over a step than the
reference's own noise does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
from bisect_hooks.errors import BisectError
from bisect_hooks.site import Site, parse_site
from bisect_hooks.tap import split_key

from bisect_tool.faults import span
from bisect_tool.floor import tolerance_of
from bisect_tool.flow import EDGES, MIXED, site_name, word
from bisect_tool.forward import PROBED, Judged
from bisect_tool.judge import Tolerance, Verdict, judge
from bisect_tool.measure import measure
from bisect_tool.noise import MARGIN, Extreme
from bisect_tool.recording import UNHEARD, Recording, in_order, kind_of
from bisect_tool.shapes import token_errors

# structured drift is not noise and may grow faster: only far faster growth is a drift of its own
BEHIND = MARGIN * MARGIN
WIDE = 16
HELPERS = ("experts.fc1:rows", "experts.fc2:rows", "shared_expert_gate:logit", "tokens")


@dataclass(slots=True)
class Free:
    """What judging found.  `level` of a site is its difference in units of what is allowed; tokens count those still compared.

    flips    tokens whose routing differs, by layer · garbage  rows that nobody wrote, by key
    strange  rows that are off by themselves, by key, where some have nothing to do with the reference's
    missing  expected and not compared · skipped  one side can't have it
    """

    judged: dict[str, Judged] = field(default_factory=dict)
    level: dict[str, float] = field(default_factory=dict)
    made: list[Site] = field(default_factory=list)
    flips: dict[int, int] = field(default_factory=dict)
    garbage: dict[str, torch.Tensor] = field(default_factory=dict)
    strange: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    alive: torch.Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))

    def shows_at(self, site: Site) -> str | None:
        """The first site behind `site` that differs."""
        return next((name for name in self._differing() if site < parse_site(name)), None)

    def _differing(self) -> Iterator[str]:
        yield from (name for name, level in self.level.items() if level > 1)

    def lacking(self) -> list[str]:
        """What was expected and not compared, a line for each kind of site and reason."""
        alike: dict[tuple[str, str], list[str]] = {}
        for key, why in self.missing.items():
            alike.setdefault((kind_of(key), why), []).append(key)
        lines = []
        for (kind, why), keys in alike.items():
            what = keys[0] if len(keys) == 1 else f"{kind} of layers {span(sorted(int(key.split('.')[1]) for key in keys))}"
            lines.append(f"not compared: {what}: {why}")
        return lines

    def worst_key(self, site: Site) -> Judged:
        keys = [one for key, one in self.judged.items() if site_name(key) == str(site) and one.verdict is Verdict.DIFFERS]
        return max(keys, key=lambda one: one.ratio)


@dataclass(frozen=True)
class FreeRun:
    """Two Recordings of the same tokens; `index` says which of the candidate's answers each of the reference's."""

    reference: Recording
    candidate: Recording
    index: torch.Tensor

    def pair(self, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Both sides' tensor, token by token.  Raises BisectError where the shapes can't be those of one site."""
        reference, candidate = self.reference[key].float(), self.candidate[key].float()
        if len(candidate) <= int(self.index.max()):
            raise BisectError(f"the candidate has {len(candidate)} tokens at {key}, its rows have more")
        candidate = candidate[self.index]
        if key == "lm_head":
            candidate = candidate[:, : reference.shape[1]]  # rows that only pad the vocabulary
        return reference, candidate

    @property
    def layers(self) -> int:
        return 1 + max((parse_site(split_key(key)[0]).layer or 0 for key in self.reference.keys if key.startswith("layers.")), default=0)

    def tolerance(self, key: str) -> Tolerance:
        """8 times the reference's own free-running noise; without it, or in a coarser dtype, half a unit in the last place a step."""
        stored = tolerance_of(self.reference, key, free=True)
        dtypes = [one.provenance.dtype for one in (self.reference, self.candidate)]
        coarsest = max(dtypes, key=_eps)
        if stored.relative_rms and coarsest == dtypes[0]:
            return stored
        site = parse_site(split_key(key)[0])
        layers = site.layer or 0 if site.in_layer else self.layers if site.module in ("final_norm", "lm_head") else 0
        steps = 1 + depth(word(site)) + depth("output") * layers
        model = Tolerance(
            MARGIN * _eps(coarsest) / 2 * math.sqrt(steps),
            f"{MARGIN:.0f} x half a unit in the last place of {coarsest}, over {steps} steps",
        )
        return max(stored, model, key=lambda one: one.relative_rms)

    def judge(self, on_key: Callable[[str], None] = lambda _key: None) -> Free:
        """Every site that both sides have, in compute order."""
        found = Free(alive=torch.ones(len(self.index), dtype=torch.bool))
        routed: set[int] = set()
        for key in self._expected(found):
            site = parse_site(split_key(key)[0])
            on_key(key)
            if site.module == "router" and site.part != "logits" and site.layer is not None and site.layer not in routed:
                routed.add(site.layer)
                self._route(site.layer, found)
            if word(site) != "router.topk":
                found.judged[key] = self._judge(key, found)
        for key, one in found.judged.items():
            name = site_name(key)
            level = math.inf if one.verdict is Verdict.DIFFERS and one.difference and one.difference.nonfinite else one.ratio
            found.level[name] = max(found.level.get(name, 0.0), level)
            if one.verdict is Verdict.INCOMPARABLE:
                found.missing[key] = one.why or "not finite on either side"
        found.missing |= self._unseen(found)
        found.level = {str(site): found.level[str(site)] for site in sorted(map(parse_site, found.level))}
        found.made = self._made(found)
        return found

    def _expected(self, found: Free) -> list[str]:
        """Keys that both sides have; what one lacks, or says that it lost, goes to `missing` or `skipped`."""
        reference, candidate = set(self.reference.keys), set(self.candidate.keys)
        both = reference & candidate
        told = self._absent(both, found)
        for key in reference ^ candidate:
            if key.endswith(HELPERS) or _probed(key) or {key, split_key(key)[0]} & told:
                continue
            if key in candidate:
                found.skipped.setdefault(kind_of(key), "the reference's recording has no such site")
            elif key.endswith(".input"):
                found.skipped[kind_of(key)] = "the output of the layer before it"
            else:
                found.missing[key] = "the candidate's recording has no such site"
        if any(map(_probed, reference)):
            found.skipped["experts, one by one"] = "they are probed on the same rows, which two recordings can't be; their sum is compared"
        keys = [key for key in in_order(both) if not key.endswith(HELPERS) and not _probed(key)]
        found.missing |= {key: why for key in keys if (why := self._misfit(key))}
        return [key for key in keys if key not in found.missing]

    def _absent(self, both: Collection[str], found: Free) -> set[str]:
        """What either side says that it has not, whatever the other side has: expected, but for what it can't have."""
        held, told = {*both, *(split_key(key)[0] for key in both)}, set()
        for side, recording in (("reference", self.reference), ("candidate", self.candidate)):
            for name, why in recording.provenance.absent.items():
                if name in held or name.endswith((*HELPERS, ".input")):
                    continue
                told.add(name)
                if why in UNHEARD:
                    found.skipped[kind_of(name)] = why
                else:
                    found.missing[name] = f"the {side}'s recording lacks it: {why}"
        return told

    def _unseen(self, found: Free) -> dict[str, str]:
        """Layers of which nothing was compared: that what lies behind them agrees does not show that they do."""
        named = {split_key(key)[0] for one in (self.reference, self.candidate) for key in one.keys} | found.missing.keys()
        layers = [int(name.split(".")[1]) for name in named if name.startswith("layers.")]
        seen = {name.split(".")[1] for name in (*found.level, *found.missing) if name.startswith("layers.")}
        unseen = [n for n in range(1 + max(layers, default=-1)) if str(n) not in seen]
        why = "nothing of it is in both recordings"
        return {f"layers.{n}.output": why for n in unseen} if layers else {"layers": why}

    def _misfit(self, key: str) -> str:
        """Why two tensors can't be those of one site, or ""."""
        reference, candidate = self.reference.width(key), self.candidate.width(key)
        padded = key == "lm_head" and candidate > reference
        sizes = ["x".join(map(str, one)) for one in (reference, candidate)]
        return (
            "" if reference == candidate or padded else f"it is {sizes[0]} wide in the reference's recording, {sizes[1]} in the candidate's"
        )

    def _judge(self, key: str, found: Free) -> Judged:
        tolerance = self.tolerance(key)
        try:
            reference, candidate = self.pair(key)
            rows = unwritten(candidate) & ~unwritten(reference)
            if bool(rows.any()):
                found.garbage[key] = rows
            elif (off := strange(reference, candidate, tolerance.relative_rms)) is not None:
                found.strange[key] = off
            if not bool(found.alive.any()):
                return Judged(key, Verdict.INCOMPARABLE, None, tolerance, "no token's routing agreed so far")
            difference = measure(reference[found.alive], candidate[found.alive])
        except BisectError as error:
            return Judged(key, Verdict.INCOMPARABLE, None, tolerance, error.message)
        verdict, worst = judge(difference, tolerance), _worst_token(reference, candidate, tolerance, found.alive)
        if verdict is Verdict.AGREES and any(one.ratio > 1 for one in worst):
            verdict = Verdict.DIFFERS
        return Judged(key, verdict, difference, tolerance, extremes=worst)

    def _route(self, layer: int, found: Free) -> None:
        """Judges the choice by the candidate's own logits, and drops tokens behind a choice that differs."""
        key, logits = f"layers.{layer}.router.topk", f"layers.{layer}.router.logits"
        if not self._both(key, found):
            return
        reference, candidate = self.pair(key)
        if self._both(logits, found) and bool(follows(reference, self.pair(logits)[0]).all()):
            broken = found.alive & ~follows(candidate, self.pair(logits)[1])
            verdict = Verdict.DIFFERS if bool(broken.any()) else Verdict.AGREES
            shown = measure(reference[broken], candidate[broken]) if bool(broken.any()) else None
            found.judged[key] = Judged(
                key, verdict, shown, Tolerance(0.0, "exact: the choice has to follow from the candidate's own logits")
            )
        flipped = (reference != candidate).any(-1)
        found.flips[layer] = int((flipped & found.alive).sum())
        kept, start = found.alive.clone(), 0
        for row in self.reference.provenance.rows:
            here = flipped[start : start + len(row)].cummax(0).values if len(row) else flipped[:0]
            kept[start : start + len(row)] &= ~here
            start += len(row)
        found.alive = kept

    def _both(self, key: str, found: Free) -> bool:
        return key in self.reference and key in self.candidate and key not in found.missing

    def _made(self, found: Free) -> list[Site]:
        made = []
        for name, level in found.level.items():
            site = parse_site(name)
            if level <= 1:
                continue
            sources = self.sources(site, found)
            if level == math.inf and any(site_name(key) in sources for key in found.garbage):
                continue  # NaN comes in from tokens that are compared no longer
            before = max((found.level[one] for one in sources), default=0.0)
            if before <= 1 or (level > BEHIND * before and before < math.inf):
                made.append(site)
        packed = {site.layer for site in made if word(site) == "attention.qkv"}
        return [site for site in made if site.module != "attention_gate" or site.layer not in packed]

    def sources(self, site: Site, found: Free) -> set[str]:
        """The nearest compared sites that this one is computed from."""
        sources, seen, todo = set(), {str(site)}, [site]
        while todo:
            for one in self._before(todo.pop()):
                if str(one) in seen:
                    continue
                seen.add(str(one))
                if str(one) in found.level:
                    sources.add(str(one))
                if str(one) not in found.level or self._gate_rows_alone(one, found):
                    todo.append(one)
        return sources

    def _gate_rows_alone(self, site: Site, found: Free) -> bool:
        """Whether all that was compared of a gate is what it is made of: rows of the projection, which know nothing of the core it closes."""
        return site.module == "attention_gate" and str(site) not in found.judged

    def passed_over(self, site: Site, found: Free) -> bool:
        """Whether whole layers lie between a site and what was compared before it."""
        seen, todo = {str(site)}, [site]
        while todo:
            for one in self._before(todo.pop()):
                if str(one) in seen or str(one) in found.level:
                    continue
                if word(one) == "output":
                    return True
                seen.add(str(one))
                todo.append(one)
        return False

    def near(self, site: Site, found: Free) -> bool:
        """Whether all that the site is computed from was compared, and not only what lies further back."""
        mixers = {f"layers.{site.layer}.{one}" for one in MIXED}
        names = {str(one) for one in self._before(site)}
        return bool(names & mixers) <= bool(names & mixers & set(found.level)) and names - mixers <= set(found.level)

    def _before(self, site: Site) -> list[Site]:
        found = []
        for one in EDGES.get(word(site), ()):
            layer = site.layer
            if one.endswith("."):
                layer = self.layers - 1 if site.layer is None else site.layer - 1
            found.append(parse_site("embedding" if layer == -1 else one if layer is None else f"layers.{layer}.{one.rstrip('.')}"))
        return found


def follows(chosen: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Rows whose chosen experts have the largest logits: no threshold for a discrete choice.  Equal logits may go either way."""
    picked = chosen.bool()
    least = logits.masked_fill(~picked, math.inf).amin(-1)
    most = logits.masked_fill(picked, -math.inf).amax(-1)
    return least >= most - 2 * torch.finfo(torch.float32).eps * most.abs()


def _worst_token(reference: torch.Tensor, candidate: torch.Tensor, tolerance: Tolerance, alive: torch.Tensor) -> tuple[Extreme, ...]:
    """One wrong token of many is small beside all of them: in units of the worst that the reference's own free run has."""
    errors = token_errors(reference, candidate).masked_fill(~alive, 0.0)
    if not tolerance.token or not bool(errors.isfinite().all()):
        return ()
    return (Extreme("row", int(errors.argmax()), float(errors.max()) / tolerance.token, MARGIN),)


def unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Rows that look as if nobody wrote them: nothing finite, or one value throughout."""
    flat = tensor.reshape(len(tensor), -1)
    constant = (flat == flat[:, :1]).all(-1) if flat.shape[1] > 2 else torch.zeros(len(flat), dtype=torch.bool)
    return constant | ~flat.isfinite().any(-1)


def unlike(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Rows that differ from the mean row in another way: a correlation under one half, where rows are wide enough to tell."""
    r, c = (tensor.reshape(len(tensor), -1).double().nan_to_num() for tensor in (reference, candidate))
    if r.shape[1] < WIDE:
        return torch.zeros(len(r), dtype=torch.bool)
    mean = r.mean(0)
    return torch.nn.functional.cosine_similarity(r - mean, c - mean) < 0.5


def strange(reference: torch.Tensor, candidate: torch.Tensor, allowed: float) -> torch.Tensor | None:
    """Rows that are off by themselves; None unless some of them are nothing like the reference's.

    `allowed` is for all rows together.  The noisiest of many goes beyond that and is right, so a row that is like its own has to be
    MARGIN times as far off.
    """
    errors, other = token_errors(reference, candidate), unlike(reference, candidate)
    off = (errors > allowed) & (other | (errors > MARGIN * allowed))
    return off if bool((off & other).any()) else None


@cache
def depth(name: str) -> int:
    """Steps from a layer's input to a site of it."""
    return max((1 + depth(one) for one in EDGES.get(name, ()) if not one.endswith(".")), default=0)


def _probed(key: str) -> bool:
    return word(parse_site(split_key(key)[0])) in PROBED


def _eps(dtype: str) -> float:
    found = getattr(torch, dtype, None)
    return torch.finfo(found).eps if isinstance(found, torch.dtype) and found.is_floating_point else torch.finfo(torch.float32).eps
