"""Where it is wrong: which responses, from which token on, and what those have in common that the others lack.

A response is judged by the mean distance in nats between the engine's log-probs and the reference's, its largest token left out (one
flipped expert moves one token by nats and means nothing), unless that token is further off than any arithmetic moves one; where the engine gave no log-probs, by how much more surprising the text is
to the reference than what it would have said itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bisect_tool.faults import verb
from bisect_tool.rollouts.sample import Sample
from bisect_tool.rollouts.scoring import Scored

# nats a token of bf16 engines that are right: usual, and the most that was seen (cross-node tensor parallelism, vime#64)
LITTLE, USUAL, MOST = 0.01, 0.03, 0.2
# one response is apart when it is this far off, and this many times as far as the better ones are
APART, TIMES = 0.25, 5.0
# responses that are bad and responses that are good are two kinds only when this factor lies between them
BETWEEN = 3.0
# all of them are, when their mean is this far off
ALL_APART = 0.3
# a text is garbled when it surprises the reference by this many nats a token more than its own text would, and by that many deviations
SURPRISE, DEVIATIONS = 1.0, 6.0
WINDOW = 8
# tokens whose mean says how far off responses are
ENOUGH = 32
# nats that no arithmetic moves a token by: an expert that flips moves one by 4
FAR = 12.0
# noise has no tail: of a million normal ones the furthest is 6 times the mean
TAIL = 10.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One response.  first: its first bad token, in the response

    signal [n]: nats by token, 0 where nothing was said, infinite where it was no log-prob   numbers: those of it that are numbers that were said
    apart: what it is judged by, see above
    """

    sample: Sample
    signal: torch.Tensor
    numbers: torch.Tensor
    apart: float
    bad: bool = False
    first: int | None = None
    text: bool = False

    @property
    def broken(self) -> list[int]:
        """Tokens of the response whose log-prob is none."""
        return [int(k) for k in torch.nonzero(self.signal.isinf())[:, 0]]

    @property
    def mean(self) -> float:
        """What is shown, everywhere: nats a token, over all tokens that have a number."""
        return self.apart if self.text else mean([self.numbers])

    @property
    def position(self) -> int:
        """Where the first bad token stands in the whole row."""
        return self.sample.start + (self.first or 0)


def by_logs(samples: Sequence[Sample], differences: Sequence[torch.Tensor]) -> list[Measured]:
    """Responses by their log-probs.  differences [n]: engine - reference, NaN where nothing was said, infinite where it was no log-prob"""
    signals = [difference.abs().nan_to_num(0.0, posinf=math.inf) for difference in differences]
    apart = [_without_largest(signal[~difference.isnan()]) for signal, difference in zip(signals, differences, strict=True)]
    usual = sorted(apart)[len(apart) // 4] if apart else 0.0
    together = mean([one.abs() for one in differences])
    everywhere = together > ALL_APART and usual > USUAL
    bound = USUAL if everywhere else max(APART, TIMES * usual)
    bad = [far > bound or bool((signal > FAR).any()) for far, signal in zip(apart, signals, strict=True)]
    found = [
        Measured(sample, signal, difference[difference.isfinite()].abs(), far, wrong, _first(signal, 2 * APART) if wrong else None)
        for sample, signal, difference, far, wrong in zip(samples, signals, differences, apart, bad, strict=True)
    ]
    alike = {age for age in {sample.age for sample in samples} if _one_kind([one for one in found if one.sample.age == age])}
    return [replace(one, bad=True, first=_first(one.signal, 2 * APART)) if one.sample.age in alike else one for one in found]


def _one_kind(measured: Sequence[Measured]) -> bool:
    """Whether responses of one age are all bad where some are: the others too are further off than any engine, and nothing parts them."""
    good = [one for one in measured if not one.bad]
    seen = pattern(measured)
    if seen is None or seen.kind != "every" or not good or any(one.broken for one in measured):
        return False
    return mean([one.numbers for one in good]) > MOST and min(one.apart for one in good) > USUAL


def torn(signal: torch.Tensor) -> int:
    """Tokens that make a distance [n] no noise: how many stand far above its mean, where that is more than usual and they are not one alone."""
    signal = signal[signal.isfinite()].abs()
    level = _without_largest(signal)
    count = int((signal > max(APART, TAIL * level)).sum())
    return count if level > USUAL and count > max(1, len(signal) // 1000) else 0


def mean(signals: Sequence[torch.Tensor]) -> float:
    """Nats a token over all that have a number."""
    values = torch.cat([one[one.isfinite()] for one in signals]) if signals else torch.empty(0)
    return float(values.mean()) if len(values) else 0.0


@dataclass(frozen=True, slots=True)
class Uneven:
    """Responses that are no fault one by one, and together are further off than all others.  whose: what they share"""

    whose: str
    level: float
    others: float


def uneven(measured: Sequence[Measured]) -> Uneven | None:
    """The weights, or the engine, whose responses are further off than usual and than those of all others; None where there are none."""
    ages = {
        one.sample.age: f"weight version {one.sample.versions[0]}" if one.sample.versions else f"rollout {one.sample.rollout}"
        for one in measured
    }
    keys: list[tuple[dict[Any, str], Callable[[Measured], Any]]] = [
        (ages, lambda one: one.sample.age),
        ({one.sample.engine: f"engine {one.sample.engine}" for one in measured if one.sample.engine}, lambda one: one.sample.engine),
    ]
    for names, key in keys:
        for value, whose in names.items():
            inside = [one.numbers for one in measured if key(one) == value]
            outside = [one.numbers for one in measured if key(one) != value]
            if min(sum(map(len, inside)), sum(map(len, outside))) < ENOUGH:
                continue
            level, others = (_without_largest(torch.cat(side)) for side in (inside, outside))
            if level > USUAL and level > BETWEEN * others:
                return Uneven(whose, level, others)
    return None


def by_text(samples: Sequence[Sample], scored: Sequence[Scored]) -> list[Measured]:
    """Responses by their text: -log p of each token against the entropy of the distribution it should have been drawn from."""
    found = []
    for sample, view in zip(samples, scored, strict=True):
        own = slice(sample.start, None)
        signal = -view.logs[own] - view.entropy[own]
        mean = float(signal.mean())
        deviation = math.sqrt(float(view.spread[own].sum())) / len(signal)
        bad = mean > SURPRISE and mean > DEVIATIONS * deviation
        found.append(Measured(sample, signal.clamp(min=0), signal, mean, bad, _first(signal, 3 * SURPRISE) if bad else None, text=True))
    return found


def _without_largest(values: torch.Tensor) -> float:
    if not len(values):
        return 0.0
    return (
        float(values.mean()) if len(values) < 4 or float(values.max()) > FAR else float((values.sum() - values.max()) / (len(values) - 1))
    )


def _first(signal: torch.Tensor, bound: float) -> int:
    """The first token that is bad and not alone: a third of what follows in a window is at least half as bad."""
    for k in torch.nonzero(signal > bound)[:, 0].tolist():
        window = signal[k : k + WINDOW]
        if int((window > bound / 2).sum()) * 3 >= len(window):
            return int(k)
    return int(signal.argmax())


def repeats(tokens: Sequence[int]) -> float:
    """How much of a response is a loop: the share of its tokens that continue a copy of what stood up to 32 tokens before."""
    best = 0
    for period in range(1, min(33, len(tokens) // 3 + 1)):
        best = max(best, sum(tokens[i] == tokens[i - period] for i in range(period, len(tokens))))
    return best / max(1, len(tokens))


@dataclass(frozen=True, slots=True)
class Pattern:
    """What the bad responses have in common.  kind: the rule · said: in words · detail: as data"""

    kind: str
    said: str
    detail: dict[str, object]


def pattern(measured: Sequence[Measured]) -> Pattern | None:
    """The rule that parts bad responses from good ones; None when nothing is bad."""
    bad = [one for one in measured if one.bad]
    good = [one for one in measured if not one.bad]
    if not bad:
        return None
    for rule in (_by_engine, _by_age, _by_draft, _by_cache, _by_position, _by_decode):
        found = rule(bad, good)
        if found is not None:
            return found
    return _of_some(bad, good) or Pattern("every", _onset(bad) or _from(bad), {"wrong": len(bad), "of": len(measured)})


def parted(measured: Sequence[Measured]) -> Pattern:
    """What responses that are marked bad have in common by what the dump says of them, whatever their numbers."""
    bad = [one for one in measured if one.bad]
    good = [one for one in measured if not one.bad]
    found = next((one for rule in (_by_engine, _by_age, _by_cache) if (one := rule(bad, good))), None)
    return found or Pattern("some", _nothing(len(bad)), {"wrong": len(bad), "of": len(measured)})


def _nothing(bad: int) -> str:
    return f"and nothing in the dump tells {verb(bad, 'it', 'them')} from the others"


def _of_some(bad: Sequence[Measured], good: Sequence[Measured]) -> Pattern | None:
    """Far from all others, and alike in nothing that is known."""
    single = all(bool((one.signal > FAR).any()) for one in bad) and not bad[0].text
    if good and (single or min(one.apart for one in bad) > BETWEEN * max(one.apart for one in good)):
        return Pattern("some", _nothing(len(bad)), {"wrong": len(bad), "of": len(bad) + len(good)})
    return None


def _onset(bad: Sequence[Measured]) -> str:
    """Where in the responses it begins, where that is behind their first tokens and about the same in all."""
    first = sorted(one.first or 0 for one in bad)
    low, high = first[0], first[-1]
    if low < 2 or first[len(first) * 4 // 5] - low > WINDOW // 2:
        return ""
    return f"bad from token {low}{f' to {high}' if high > low else ''} on in every response"


def _from(bad: Sequence[Measured]) -> str:
    """The first bad tokens, as every response's own line has them."""
    low, high = (find(one.first or 0 for one in bad) for find in (min, max))
    return "from the first tokens on" if high < 2 else f"bad from token {low}{f' to {high}' if high > low else ''} on"


def _by_engine(bad: Sequence[Measured], good: Sequence[Measured]) -> Pattern | None:
    names = _parted(bad, good, lambda one: one.sample.engine or None)
    return Pattern("engine", f"only on engine {', '.join(names)}", {"engines": names}) if names else None


def _by_age(bad: Sequence[Measured], good: Sequence[Measured]) -> Pattern | None:
    """Good at first, bad from some weights on."""
    ages = sorted({one.sample.age for one in (*bad, *good)})
    late = {one.sample.age for one in bad}
    early = {one.sample.age for one in good}
    if len(ages) < 2 or not early or min(late) <= min(early) or not all(age < min(late) for age in early if age not in late):
        return None
    after = [one for one in (*bad, *good) if one.sample.age >= min(late)]
    if sum(one.bad for one in after) * 5 < len(after) * 4:
        return None
    first = min(bad, key=lambda one: one.sample.age).sample
    numbered = bool(first.versions) and first.versions[0].isdecimal()
    what = f"weight version {first.versions[0]}" if numbered else f"rollout {first.rollout}"
    return Pattern("sync", f"good at first, bad from {what} on", {"from": first.age[0], "by": "weight version" if numbered else "rollout"})


def _by_draft(bad: Sequence[Measured], good: Sequence[Measured]) -> Pattern | None:
    """Only behind a token that a draft proposed."""
    if not all(one.sample.drafted is not None for one in bad):
        return None
    starts = [_first_draft(one.sample) for one in bad]
    if any(start is None or one.first is None or one.first <= start for start, one in zip(starts, bad, strict=True)):
        return None
    if any(one.sample.drafted is not None and any(one.sample.drafted[:-WINDOW]) for one in good):
        return None
    return Pattern("draft", "right until a draft is accepted, wrong after it", {"accepted_before": True})


def _first_draft(sample: Sample) -> int | None:
    return next((i for i, drafted in enumerate(sample.drafted or ()) if drafted), None)


def _by_cache(bad: Sequence[Measured], good: Sequence[Measured]) -> Pattern | None:
    names = _parted(bad, good, lambda one: None if one.sample.cached is None else "cached" if one.sample.cached else "fresh")
    return Pattern("cache", "only behind a prefix that came from the cache", {"cached": True}) if names == ["cached"] else None


def _parted(bad: Sequence[Measured], good: Sequence[Measured], key: Callable[[Measured], str | None]) -> list[str] | None:
    """Values of a key that bad responses have (four in five of those are bad) and good ones lack; None where it does not part them."""
    named = [key(one) for one in (*bad, *good)]
    if None in named or len(set(named)) < 2:
        return None
    guilty = {key(one) for one in bad}
    inside = [one for one in (*bad, *good) if key(one) in guilty]
    if guilty == set(named) or len(bad) * 5 < len(inside) * 4:
        return None
    return sorted(str(one) for one in guilty)


def _by_position(bad: Sequence[Measured], good: Sequence[Measured]) -> Pattern | None:
    """Right up to some length of the whole row, and wrong beyond it, whatever the prompt."""
    first = sorted(one.position for one in bad)
    beyond = first[0]
    spread = first[-1] - beyond
    starts = {one.sample.start for one in bad}
    if len(bad) < 3 or min(one.first or 0 for one in bad) < WINDOW or spread > WINDOW or (len(starts) < 2 and not good):
        return None
    if any(len(one.sample.tokens) > beyond + 2 * WINDOW for one in good):
        return None
    return Pattern("length", f"right up to position {beyond - 1}, wrong from {beyond} on", {"position": beyond})


def _by_decode(bad: Sequence[Measured], good: Sequence[Measured]) -> Pattern | None:
    """The first token, which prefill made, is right; what decode makes is not."""
    if len(bad) < 4 or bad[0].text or sum(float(one.signal[0]) < MOST for one in bad) * 20 < len(bad) * 19:
        return None
    others = [float(one.signal[1 : 1 + WINDOW].mean()) for one in bad if len(one.signal) > 1]
    if not others or sorted(others)[len(others) // 2] < APART:
        return None
    onset = _onset(bad)
    text = "the first token of each, which comes out of prefill, is right; what decode adds is not"
    return Pattern("decode", f"{text} ({onset})" if onset else text, {"path": "decode"})
