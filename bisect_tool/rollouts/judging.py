"""From numbers to a verdict: whose log-probs agree with whose, which class that leaves, and what would decide where it can't be told."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bisect_tool.faults import verb
from bisect_tool.rollouts import definitions
from bisect_tool.rollouts.known import Known
from bisect_tool.rollouts.patterns import ALL_APART, LITTLE, MOST, TAIL, USUAL, Measured, Pattern
from bisect_tool.rollouts.sample import Sample
from bisect_tool.rollouts.scoring import Scored

SIDES = ("decode", "prefill", "trained", "candidate", "export")
# sides that hold the converted weights: an engine that says what one of them says computes what it was given
GIVEN = ("candidate", "export")
WORDS = {
    "decode": "engine decode",
    "prefill": "engine prefill",
    "trained": "trainer",
    "candidate": "candidate",
    "export": "export",
    "reference": "reference",
}
SERVE = "serve the original checkpoint with the same engine flags, and rollout --server URL"


@dataclass(frozen=True)
class Said:
    """Every side's log-probs of one response's tokens [n], NaN where it said nothing."""

    decode: torch.Tensor
    prefill: torch.Tensor
    trained: torch.Tensor
    candidate: torch.Tensor
    export: torch.Tensor
    reference: torch.Tensor

    @property
    def best(self) -> str:
        """The side that stands for the engine: what it said while it generated, else what it says in one pass."""
        return "decode" if bool(self.decode.isfinite().any()) or not bool(self.prefill.isfinite().any()) else "prefill"

    def side(self, name: str) -> torch.Tensor:
        found: torch.Tensor = getattr(self, name)
        return found

    def apart(self, one: str, other: str) -> torch.Tensor:
        return self.side(one) - self.side(other)


def sides_of(sample: Sample, view: Scored, others: Mapping[str, Scored], unit: str = "") -> Said:
    """All that was said of a sample, in nats; what is no log-prob is NaN too.  unit: the definition that the engine's numbers are of"""

    def row(values: Sequence[float | None], unit: str = "") -> torch.Tensor:
        padded = values if values else [None] * sample.length
        found = torch.tensor([math.nan if value is None else value for value in padded], dtype=torch.float64)
        found = definitions.UNITS[unit](found) if unit in definitions.UNITS else found
        return torch.where((found > definitions.LOWEST) & (found <= definitions.HIGHEST), found, torch.nan)

    candidate, export = (others[name].logs[sample.start :] if name in others else row(()) for name in GIVEN)
    return Said(
        row(sample.decode, unit),
        row(sample.prefill[sample.start :], unit),
        row(sample.trained),
        candidate,
        export,
        view.logs[sample.start :],
    )


@dataclass(frozen=True, slots=True)
class Nulls:
    """Log-probs of responses that a side left null among those that it wrote.  where: the first"""

    count: int
    of: int
    where: str


def nulls(samples: Sequence[Sample], side: str) -> Nulls | None:
    """What a side owes and does not say; a token that the loss mask leaves out is owed by nobody.  None where nothing is missing."""
    rows = [
        (sample, {"decode": sample.decode, "prefill": sample.prefill[sample.start :], "trained": sample.trained}[side])
        for sample in samples
    ]
    if side == "prefill" and all(value is None for _, row in rows for value in row):  # a dump that keeps it of prompts alone
        return None
    owed = [(sample, k, value) for sample, row in rows for k, value in enumerate(row) if k not in sample.masked]
    missing = [f"{sample.where} at token {k}" for sample, k, value in owed if value is None]
    return Nulls(len(missing), len(owed), missing[0]) if missing else None


def mean_apart(said: Sequence[Said], one: str, other: str) -> float | None:
    """Mean distance in nats a token over all that both sides said; None where that is nothing."""
    both = torch.cat([each.apart(one, other) for each in said]) if said else torch.empty(0)
    both = both[both.isfinite()]
    return float(both.abs().mean()) if len(both) else None


def table(said: Sequence[Said]) -> dict[tuple[str, str], float]:
    """Mean distances between all sides that said something."""
    names = (*SIDES, "reference")
    found = {}
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            value = mean_apart(said, one, other)
            if value is not None:
                found[one, other] = value
    return found


@dataclass(frozen=True, slots=True)
class Blame:
    """The class of a disagreement, why, what it clears, and what would decide when cls is None."""

    cls: str | None
    between: tuple[str, str]
    why: str
    cleared: tuple[tuple[str, str], ...] = ()
    candidates: tuple[str, ...] = ()
    next: str = ""


CONVERSION = "the conversion"


def blame(found: Mapping[tuple[str, str], float], seen: Pattern, known: Known, to_trainer: bool) -> Blame:
    """Who is at fault, from the distances on the bad responses and from what those have in common.

    to_trainer: they were held against the trainer alone, because training has moved the weights
    """
    near, rerun = ("reference", "engine"), known.rerun

    def is_near(one: str, other: str) -> bool | None:
        value = found.get((one, other))
        return None if value is None else value < ALL_APART / 2

    if is_near("decode", "prefill") is False and is_near("prefill", "reference"):
        return Blame(
            "rollout", near, "the engine disagrees with itself: its decode leaves the reference, its own prefill of the same ids does not",
            ((CONVERSION, "prefill and decode use the same weights, and prefill agrees with the reference"),),
            next="Look at what decode alone uses: recurrent state, KV cache, speculation, CUDA graphs (NeMo-RL#2100).",
        )  # fmt: skip
    if to_trainer:
        return Blame(
            "rollout", ("candidate", "engine"), "the trainer gives other log-probs for the same ids with the weights that were sent",
            next=f"Does the engine hold what was sent? {rerun('--hashes ENGINE_HASHES --export EXPORT_DIR')} (docs/engine-hash.md).",
        )  # fmt: skip
    if is_near("trained", "reference"):
        return Blame(
            "rollout", near, "the trainer's log-probs of the same ids agree with the reference, the engine's do not",
            ((CONVERSION, "the trainer computes with the converted weights"),),
            next=f"Does the engine hold what was sent? {rerun('--hashes ENGINE_HASHES')} (docs/engine-hash.md), else {SERVE}.",
        )  # fmt: skip
    if is_near("trained", "reference") is False and (is_near("decode", "trained") or is_near("prefill", "trained")):
        return Blame(
            None, ("reference", "candidate"), "trainer and engine agree with each other and not with the reference: both have the wrong model",
            (("the engine", "it computes what the trainer computes"),), ("conversion", "model-definition", "parallel"),
            next=f"{known.audit} decides it.",
        )  # fmt: skip
    side = next((name for name in GIVEN if explains(found, name)), None)
    if side is not None:
        return Blame(
            None, ("reference", side), f"engine and {side} agree with each other and not with the reference: both have the wrong model",
            (("the engine", f"it computes what the {side} computes"),), ("conversion", "model-definition", "parallel"),
            next=f"{known.audit} decides it; run with --stages weights,forward places it.",
        )  # fmt: skip
    reasons = {
        "engine": "all engines were sent the same weights, and only some are wrong",
        "sync": "the first weights that went through the same conversion and sync were right",
        "draft": "prefill and plain decode are right with the same weights",
        "cache": "the same weights are right without a cached prefix",
        "length": "wrong weights would be wrong from the first token on",
        "some": "wrong weights would be wrong in every response",
    }
    if seen.kind in reasons:
        return Blame("rollout", near, reasons[seen.kind], ((CONVERSION, reasons[seen.kind]),), next=NEXT[seen.kind])
    if known.held:
        return Blame(
            "rollout", near, "the engine holds the weights that it should, byte by byte, so it computes something else with them",
            ((CONVERSION, "the engine's weights are the reference's"),), next=f"Look at the engine's flags and version; {SERVE}.",
        )  # fmt: skip
    if known.conversion or is_near("candidate", "reference"):
        why = known.conversion or "the candidate's log-probs of the same ids agree with the reference"
        return Blame(
            "rollout", near, f"{why}, and the engine's do not follow" if not known.conversion else f"{why}: what leaves the checkpoint is right",
            ((CONVERSION, why),), next=f"{rerun('--hashes ENGINE_HASHES')} tells a sync that goes wrong from an engine that does (docs/engine-hash.md).",
        )  # fmt: skip
    if seen.kind == "decode":  # first tokens may just be easy: a sum's first digit survives weights that lose the others
        return Blame(
            None, near, "a decode that goes wrong does that, and so do wrong weights where first tokens are easy", candidates=("rollout", "conversion"),
            next=f"{rerun('--server URL')} decides it: it has the engine score the same ids in one pass (NeMo-RL#2100).",
        )  # fmt: skip
    return Blame(
        None, near, "nothing in this evidence tells the weights from the engine", candidates=("conversion", "rollout"),
        next=f"{rerun('--train TRAIN_DUMP')} decides it (slime and miles: --save-debug-train-data), or: {SERVE}.",
    )  # fmt: skip


def explains(found: Mapping[tuple[str, str], float], side: str) -> bool:
    """Whether a side that leaves the reference says what the engine says."""
    away = found.get((side, "reference"))
    near = [value for pair, value in found.items() if set(pair) in ({"decode", side}, {"prefill", side})]
    return away is not None and bool(near) and away >= ALL_APART / 2 and min(near) < ALL_APART / 2 and min(near) * 3 < away


NEXT = {
    "engine": "Restart that engine, and list the weights of two engines (docs/engine-hash.md): bisect-tool rollout --hashes shows which bucket differs.",
    "sync": "List the engine's weights before and after that sync (docs/engine-hash.md, --hashes); keep the engine's version in mind (slime#2091).",
    "draft": "Run once without speculation; look at which state slot the step after an accepted draft reads (vllm#39273).",
    "cache": "Run once with the prefix cache off, and flush it on every weight update (NeMo-RL#4018).",
    "length": "Look at the engine's context length, rope scaling and chunked prefill.",
    "some": "Score the same ids in one pass (--server URL): if prefill is right, decode is at fault (NeMo-RL#2100).",
}


def noise_note(distance: float, tokens: int, torn: int, furthest: float, *, alike: bool) -> str:
    """What the distance on good responses means.  torn, furthest: see `patterns.torn`, and the largest in nats · alike: see `patterns.uneven`"""
    said = f"engine and reference are {distance:.3g} nats a token apart over {tokens} tokens"
    if not alike:
        return f"{said}, and some far more than others"
    if distance <= USUAL:
        return f"{said}: {'as' if distance >= LITTLE else 'below what'} bf16 engines are ({LITTLE:g} to {USUAL:g})"
    if torn:
        return f"{said}: above {USUAL:g}, and not as noise is: {torn} {verb(torn, 'token stands', 'tokens stand')} {TAIL:g} times as far off and more, the furthest {furthest:.2g} nats"
    if distance <= MOST:
        return (
            f"{said}: more than usual ({LITTLE:g} to {USUAL:g}), spread over all responses and without a first bad token; seen when tensor parallelism "
            "crosses nodes (vime#64), so name the engine's TP size and nodes before suspecting weights"
        )
    return f"{said}: above anything seen of engines that are right ({MOST:g})"


def worst_tokens(
    measured: Sequence[Measured], said: Sequence[Said], text: Callable[[list[int]], str], after: str, most: int = 3
) -> list[str]:
    """The worst responses, each with its worst token and the text around it.  after: the definition that they are held to, or nothing"""
    order = sorted(range(len(measured)), key=lambda i: (bool(measured[i].broken), measured[i].bad, measured[i].mean), reverse=True)
    lines = []
    for i in order[:most]:
        one, each = measured[i], said[i]
        k = int(one.signal.argmax())
        at = one.sample.start + k
        around = text(list(one.sample.tokens[max(0, at - 8) : at])), text([one.sample.tokens[at]])
        engine = each.side(each.best)[k]
        numbers = f"reference {float(each.reference[k]):.3g}" + (f", engine {float(engine):.3g}" if bool(engine.isfinite()) else "")
        since = f", bad from token {one.first} on" if one.first is not None else ""
        kind = "more surprising than its own text" if one.text else f"apart{after}"
        size = f"{one.mean:.3g} nats a token {kind}"
        if one.broken:
            size = f"{len(one.broken)} of its {one.sample.length} values {verb(len(one.broken), 'is no log-prob', 'are no log-probs')} ({no_numbers([one], named=False)}), the others {size}"
        lines.append(f"{one.sample.where}: {size}{since}; worst at token {k}, {around[1]!r} after {around[0]!r}: {numbers}")
    return lines


def no_numbers(measured: Sequence[Measured], most: int = 3, *, named: bool = True) -> str:
    """What stands in the place of log-probs, and where: "NaN in a.jsonl line 4 at token 3", without the response where it is not `named`."""
    found = []
    for one in measured:
        values = one.sample.decode if any(value is not None for value in one.sample.decode) else one.sample.prefill[one.sample.start :]
        found += [f"{str(values[k]).replace('nan', 'NaN')}{f' in {one.sample.where}' if named else ''} at token {k}" for k in one.broken]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def _temperature(one: definitions.Definition) -> tuple[str, str]:
    if not one.value:
        return "all 0: scored at temperature 0", "Score at the temperature that was sampled at, or at 1 on both sides (slime#2085)."
    return (
        f"those of the reference's logits divided by {one.value:g} (temperature {one.value:g})",
        "Use one temperature on both sides: engines give log-probs behind it, trainers must divide by it too (slime#557); --train shows whether yours does.",
    )


def _truncated(one: definitions.Definition) -> tuple[str, str]:
    name = one.kind
    also = f" at temperature {one.temperature:g}" if one.temperature != 1 else ""
    value = f"{one.value:g}" if one.between is None else f"{one.value:g} ({one.between[0]:g} to {one.between[1]:g} fit as well)"
    return (
        f"renormalised over what {name} {value} keeps{also}: never below the reference's",
        f"Ask the engine for log-probs before {name}, or sample without it (trl#6789).",
    )


def _exchange(rows: Sequence[int]) -> str:
    steps = {(j - i) % len(rows) for i, j in enumerate(rows)}
    if len(steps) == 1:
        step = steps.pop()
        step = step if step * 2 <= len(rows) else step - len(rows)
        return f"each carries those of the one {abs(step)} {'after' if step > 0 else 'before'} it"
    moved = [f"{i} those of {j}" for i, j in enumerate(rows) if i != j]
    return f"counted from 0, {', '.join(moved[:4])}{' ..' if len(moved) > 4 else ''}"


SENTENCES: dict[str, Callable[[definitions.Definition], tuple[str, str]]] = {
    "temperature": _temperature,
    "top_p": _truncated,
    "top_k": _truncated,
    "negated": lambda _: ("negated: log-probs are never above 0", "Write log-probs as they are; a loss is their negative."),
    "probability": lambda _: ("probabilities, not their logarithms", "Take the natural logarithm of what the engine gives."),
    "base 2": lambda _: ("of base 2: 1.44 times the natural logarithm", "Multiply by ln 2, or have the engine use the natural logarithm."),
    "base 10": lambda _: (
        "of base 10: 0.434 times the natural logarithm",
        "Multiply by ln 10, or have the engine use the natural logarithm.",
    ),
    "samples": lambda one: (
        f"those of other responses: {_exchange(one.rows)}",
        "Keep log-probs with their response where the batch is sorted, split or gathered.",
    ),
    "rows": lambda one: (
        f"those of the token one {'earlier' if one.value < 0 else 'later'}: the row is off by one",
        "Cut the engine's log-probs where the response begins: logits at position t belong to token t + 1.",
    ),
    "labels": lambda one: (
        f"those of each distribution for the {'previous' if one.value < 0 else 'next'} token: labels are off by one",
        "Gather logits at position t with the label at t + 1.",
    ),
}
