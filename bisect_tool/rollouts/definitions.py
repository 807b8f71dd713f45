"""Another definition of the same log-prob: a temperature, a truncated support, labels off by one, another unit.

Each hypothesis says what the engine's number would be, from the reference's own logits.  It is claimed when it explains what is seen:
what is left is as small as an engine's arithmetic, and a third or less of what was there before.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bisect_tool.rollouts.sample import Sample
from bisect_tool.rollouts.scoring import Scored

# nats a token: less than `LEAST` is nobody's definition, more than `LEFT` is not explained
LEAST, LEFT = 0.002, 0.08
GAIN = 3.0
TEMPERATURES = [math.exp(x / 20) for x in range(-60, 61)]
TOP_P = [0.05 * n for n in range(2, 20)] + [0.96, 0.97, 0.98, 0.99, 0.995]
TOP_K = [1, 2, 3, 4, 5, 8, 10, 16, 20, 25, 30, 32, 40, 50, 64, 100, 128, 200, 256]
# what makes nats of numbers of another unit
UNITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": lambda said: -said,
    "probability": lambda said: said.log(),
    "base 2": lambda said: said * math.log(2),
    "base 10": lambda said: said * math.log(10),
}
# a number outside of these is no log-prob: engines write -9999 for none, and bf16 rounds to a little above 0
LOWEST, HIGHEST = -1000.0, 0.1
# hypotheses are tried on this many tokens, and every response against every other for this many
TOKENS = 4096
# a response of which so few tokens differ can be anything; and nats that a definition of some responses has to weigh (tokens that differ
# times the logarithm of how much nearer it brings them), beside the number of responses: the hypotheses tried, and as much again
FEW, CHANCE = 4, 10.0
RESPONSES = 256


@dataclass(frozen=True, slots=True)
class Pool:
    """Tokens of many samples in one row: what the engine said, what the reference says, and the distributions they come from.

    engine, reference, label [n]   logits [n, v]   shifted: what the reference says of the token one earlier (-1) and one later (+1)
    labels: the neighbouring tokens themselves
    """

    engine: torch.Tensor
    reference: torch.Tensor
    label: torch.Tensor
    logits: torch.Tensor
    shifted: dict[int, torch.Tensor]
    labels: dict[int, torch.Tensor]

    @property
    def differing(self) -> int:
        """Tokens at which the engine is not the reference."""
        return int(((self.engine - self.reference).abs() > LEAST).sum())

    def but_furthest(self) -> Pool:
        """All tokens but the eighth that the engine is furthest off at."""
        kept = (self.engine - self.reference).abs().argsort()[: len(self.engine) - max(1, len(self.engine) // 8)]
        return Pool(
            self.engine[kept], self.reference[kept], self.label[kept], self.logits[kept],
            {by: one[kept] for by, one in self.shifted.items()}, {by: one[kept] for by, one in self.labels.items()},
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Definition:
    """What the engine's log-probs are, if not the reference's.  before, after: mean distance in nats a token.

    rows: for each response, which one's it carries   others: what those are to the reference, by id() of the Sample
    only: the responses that are so defined, by id() of the Sample, where the others are the reference's own; empty where all are
    """

    kind: str
    value: float
    before: float
    after: float
    between: tuple[float, float] | None = None
    temperature: float = 1.0
    rows: tuple[int, ...] = ()
    others: dict[int, torch.Tensor] = field(default_factory=dict)
    only: frozenset[int] = frozenset()

    def holds_of(self, sample: Sample) -> bool:
        """Whether a response's log-probs are so defined."""
        return not self.only or id(sample) in self.only

    @property
    def short(self) -> str:
        """In a word or two, for "after .."."""
        if self.kind in ("rows", "labels"):
            return f"moving {self.kind} by one"
        return "exchanging rows" if self.rows else self.kind if self.kind in UNITS else f"{self.kind} {self.value:g}"

    @property
    def detail(self) -> dict[str, Any]:
        if self.kind == "temperature":
            return {"value": 1 / self.value if self.value else "inf", "temperature": self.value}
        if self.rows:
            return {"map": list(self.rows[:64]), "of": "responses"}
        if self.kind in UNITS:
            return {"flag": "log-prob", "value": self.kind, "expected": "natural logarithm"}
        if self.kind in ("rows", "labels"):
            return {"offset": int(self.value), "of": self.kind}
        words: dict[str, Any] = {"flag": self.kind, "value": self.value, "expected": 1.0 if self.kind == "top_p" else -1}
        if self.between is not None:
            words["between"] = list(self.between)
        return words if self.temperature == 1.0 else words | {"temperature": self.temperature}


def pool(samples: Sequence[Sample], scored: Sequence[Scored], said: Callable[[Sample], Sequence[float | None]]) -> Pool | None:
    """The tokens of `samples` that the engine gave a number for and whose logits were kept; None when there are none."""
    parts: list[tuple[torch.Tensor, ...]] = []
    taken = 0
    for sample, view in zip(samples, scored, strict=True):
        values = said(sample)
        if not values or view.logits is None or taken >= TOKENS:
            continue
        engine = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
        ids = torch.tensor(sample.tokens)
        nothing = torch.tensor([math.nan], dtype=torch.float64)
        own, last = slice(sample.start, None), ids[-1:]
        kept = engine.isfinite() & (engine > LOWEST) & view.logs[own].isfinite()
        columns = (
            engine, view.logs[own], ids[own], view.logits, torch.cat([nothing, view.logs[own][:-1]]), torch.cat([view.logs[own][1:], nothing]),
            ids[sample.start - 1 : -1], torch.cat([ids[sample.start + 1 :], last]),
        )  # fmt: skip
        parts.append(tuple(column[kept] for column in columns))
        taken += int(kept.sum())
    if not taken:
        return None
    engine, reference, label, logits, earlier, later, before, after = (torch.cat(column) for column in zip(*parts, strict=True))
    return Pool(engine, reference, label, logits, {-1: earlier, 1: later}, {-1: before, 1: after})


def define(found: Pool) -> Definition | None:
    """The definition that explains the engine's log-probs where the reference's own does not; None where none is needed or none does."""
    before = _distance(found.engine, found.reference)
    if before < LEAST:
        return None
    if len(found.engine) > 1 and bool((found.engine == 0).all()):
        return Definition("temperature", 0.0, before, 0.0)
    tried = [_temperature(found, before), *_shifts(found, before)]
    tried += [Definition(kind, 0.0, before, _distance(undo(found.engine), found.reference)) for kind, undo in UNITS.items()]
    tried += [_truncated(found, before, kind, values, 1.0) for kind, values in (("top_p", TOP_P), ("top_k", TOP_K))]
    simple = min(tried, key=lambda one: one.after)
    if not _holds(simple):
        both = [_truncated(found, before, "top_p", TOP_P, t) for t in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2)]
        simple = min(both, key=lambda one: one.after)
    return simple if _holds(simple) else None


def of_some(samples: Sequence[Sample], scored: Sequence[Scored], said: Callable[[Sample], Sequence[float | None]]) -> Definition | None:
    """The definition that some responses are of, each by itself, while the others are the reference's own; None where there is none.

    One token far off (an expert that flips) can be met by some temperature, so a definition has to hold without the furthest ones too; and
    of many responses some are explained by chance: together they have to weigh more than all that were tried.
    """
    kinds: dict[str, list[int]] = {}
    pools = [pool([sample], [view], said) for sample, view in zip(samples, scored, strict=True)]
    for i, own in enumerate(pools):
        one = _without_furthest(own) if own is not None and own.differing >= FEW else None
        if one is not None:
            kinds.setdefault(one.kind, []).append(i)
    for chosen in sorted(kinds.values(), key=len, reverse=True):
        part = [samples[i] for i in chosen]
        together = pool(part, [scored[i] for i in chosen], said)
        one = _without_furthest(together) if together is not None else None
        if together is not None and one is not None:
            gain = one.before / max(one.after, sys.float_info.min)
            if together.differing * math.log(gain) >= math.log(len(samples)) + CHANCE:
                # noise hides it from some that have it too: what it brings nearer is of it
                likewise = [sample for sample, own in zip(samples, pools, strict=True) if own is not None and _nearer(one, own)]
                return replace(one, only=frozenset(map(id, [*part, *likewise])))
    return None


def _nearer(one: Definition, own: Pool) -> bool:
    again = _again(one, own.but_furthest())
    return again.after * 2 <= again.before


def _without_furthest(found: Pool) -> Definition | None:
    """The definition of these tokens that is theirs without the furthest too."""
    one = define(found)
    return one if one is not None and _holds(_again(one, found.but_furthest())) else None


def exchanged(samples: Sequence[Sample], scored: Sequence[Scored], said: Callable[[Sample], Sequence[float | None]]) -> Definition | None:
    """Whether every response carries the log-probs of one response, and not each its own; None where it does not, or where they are many."""
    if not 1 < len(samples) <= RESPONSES:
        return None
    engine = [torch.tensor([math.nan if value is None else value for value in said(one)], dtype=torch.float64) for one in samples]
    reference = [view.logs[one.start :] for one, view in zip(samples, scored, strict=True)]
    apart = [[_distance(one, _padded(other, len(one))) for other in reference] for one in engine]
    rows = tuple(min(range(len(apart)), key=lambda j: row[j]) for row in apart)
    before, after = (sum(row[j] for row, j in zip(apart, chosen, strict=True)) / len(apart) for chosen in (range(len(apart)), rows))
    others = {id(one): _padded(reference[j], one.length) for one, j in zip(samples, rows, strict=True)}
    found = Definition("samples", 0.0, before, after, rows=rows, others=others)
    return found if before >= LEAST and math.isfinite(before) and len(set(rows)) == len(rows) and _holds(found) else None


def _padded(logs: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([logs[:length], torch.full((max(0, length - len(logs)),), math.nan, dtype=torch.float64)])


def _holds(one: Definition) -> bool:
    return one.after <= LEFT and one.after * GAIN <= one.before


def expected(definition: Definition, sample: Sample, view: Scored) -> torch.Tensor:
    """The engine's log-probs of a sample's response [n], in nats, as the definition makes them of the reference; NaN where it can't say."""
    if id(sample) in definition.others:
        return definition.others[id(sample)]
    if definition.kind in UNITS or definition.rows or not definition.holds_of(sample):
        return view.logs[sample.start :]
    one = pool([sample], [view], lambda sample: [0.0] * sample.length)
    if one is None:
        return torch.full((sample.length,), math.nan, dtype=torch.float64)
    return _made(definition, one)


def _made(definition: Definition, one: Pool) -> torch.Tensor:
    """What the definition makes of the reference's distributions."""
    if definition.kind == "temperature":
        return _at(one, definition.value) if definition.value else torch.zeros_like(one.reference)
    if definition.kind == "rows":
        return one.shifted[int(definition.value)]
    if definition.kind == "labels":
        return _at(one, 1.0, one.labels[int(definition.value)])
    return _at(one, definition.temperature) - _support(one, definition.kind, definition.value, definition.temperature).log()


def _again(one: Definition, found: Pool) -> Definition:
    """The same definition, measured on other tokens."""
    if one.kind in UNITS:
        after = _distance(UNITS[one.kind](found.engine), found.reference)
    else:
        after = _distance(found.engine, _made(one, found))
    before = _distance(found.engine, found.reference)
    return replace(one, before=before, after=after if before >= LEAST else math.inf)


def _temperature(found: Pool, before: float) -> Definition:
    def distance(temperature: float) -> float:
        return _distance(found.engine, _at(found, temperature))

    best = min(TEMPERATURES, key=distance)
    low, high = best / math.exp(1 / 20), best * math.exp(1 / 20)
    for _ in range(40):  # golden section: one valley between two neighbours of the best
        a, b = high - (high - low) * 0.618, low + (high - low) * 0.618
        low, high = (low, b) if distance(a) < distance(b) else (a, high)
    fitted = (low + high) / 2
    nice = round(fitted, 2)
    if nice and distance(nice) <= distance(fitted) * 1.05 + 1e-7:
        fitted = nice
    return Definition("temperature", fitted, before, distance(fitted))


def _shifts(found: Pool, before: float) -> list[Definition]:
    """Numbers that stand one row off, and numbers that were gathered with the neighbour's label."""
    tried = []
    for offset in (-1, 1):
        tried.append(Definition("rows", offset, before, _distance(found.engine, found.shifted[offset])))
        tried.append(Definition("labels", offset, before, _distance(found.engine, _at(found, 1.0, found.labels[offset]))))
    return tried


def _truncated(found: Pool, before: float, kind: str, values: Sequence[float], temperature: float) -> Definition:
    """log p - log S, where S is what the support that was kept weighs: always above the reference's."""
    whole = _at(found, temperature)
    tried = [(value, _distance(found.engine, whole - _support(found, kind, value, temperature).log())) for value in values]
    best, after = min(tried, key=lambda one: one[1])
    like = [value for value, distance in tried if distance <= after * 1.05 + 1e-9]
    between = (min(like), max(like)) if len(like) > 1 else None
    return Definition(kind, round(best, 4), before, after, between and (round(between[0], 4), round(between[1], 4)), temperature)


def _support(found: Pool, kind: str, value: float, temperature: float) -> torch.Tensor:
    """The mass [n] of the smallest set of likeliest tokens that weighs `value` (top_p), or of the `value` likeliest (top_k)."""
    ordered = (found.logits / temperature).softmax(-1).sort(-1, descending=True).values.double()
    if kind == "top_k":
        return ordered[:, : int(value)].sum(-1)
    mass = ordered.cumsum(-1)
    return mass.gather(1, (mass < value).sum(-1, keepdim=True).clamp(max=mass.shape[1] - 1))[:, 0]


def _at(found: Pool, temperature: float, labels: torch.Tensor | None = None) -> torch.Tensor:
    rows = (found.logits.double() / temperature).log_softmax(-1)
    return rows.gather(1, (found.label if labels is None else labels)[:, None])[:, 0]


def _distance(engine: torch.Tensor, other: torch.Tensor) -> float:
    """Mean distance in nats over the tokens that both have a number for; infinite where those are less than half."""
    both = engine.isfinite() & other.isfinite()
    if int(both.sum()) * 2 < len(engine):
        return math.inf
    return float((engine - other)[both].abs().mean())
