"""The judgement of responses: which log-probs are compared with which, what explains a disagreement, and the faults that leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site

from bisect_tool.faults import Fault, Finding, Proof, Relation, counted, verb
from bisect_tool.judge import Tolerance
from bisect_tool.measure import Difference, measure
from bisect_tool.rollouts import definitions, judging, patterns, simulate
from bisect_tool.rollouts.bench import Bench
from bisect_tool.rollouts.judging import Said
from bisect_tool.rollouts.known import Known
from bisect_tool.rollouts.patterns import Measured
from bisect_tool.rollouts.sample import Sample
from bisect_tool.shards import Shard, shard_of

HEAD = Site("lm_head")


@dataclass
class Judged:
    """Faults and everything worth saying.  shown: the responses are wrong by a fault that an earlier stage found"""

    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    probes: list[str] = field(default_factory=list)
    cleared: list[tuple[str, str]] = field(default_factory=list)
    tokens: int = 0
    open: list[str] = field(default_factory=list)
    shown: bool = False


class Questions:
    """One method a question about the responses; `found` gathers the answers."""

    def __init__(self, bench: Bench, text: Callable[[list[int]], str], known: Known) -> None:
        self.bench, self.text = bench, text
        self.known, self.rerun, self.after = known, known.rerun, ""
        self.found = Judged()

    def judge(self) -> Judged:
        """All questions, in the order in which an answer makes the next one simpler."""
        self._capture()
        numbered = [i for i, each in enumerate(self.bench.said) if self.bench.has_logs(i)]
        compared = [i for i in numbered if not self.bench.samples[i].mixed]
        self._say_mixed(numbered)
        definition = self._definition([i for i in compared if self.bench.is_base(i)])
        if definition is not None:
            self.bench.in_units_of(definition)
        differences = [self.bench.difference(i, definition) for i in compared]
        self.found.tokens = sum(int(one.isfinite().sum()) for one in differences)
        by_logs = patterns.by_logs([self.bench.samples[i] for i in compared], differences)
        by_text = patterns.by_text(self.bench.samples, self.bench.scored)
        measured = self._held_to_text(compared, by_logs, by_text)
        rest = [by_text[i] for i in range(len(self.bench.samples)) if i not in compared]
        self._sampling(compared, measured, by_text)
        self._patterns([*measured, *rest], [*compared, *(i for i in range(len(self.bench.samples)) if i not in compared)])
        self._quiet(compared, measured)
        self._say_rest(compared, measured, by_text)
        return self.found

    def _capture(self) -> None:
        """Prompt log-probs that are garbage where the prefix came from a cache, while everything computed is right."""
        bad, total, responses = [], 0, []
        worst: tuple[torch.Tensor, torch.Tensor] | None = None
        for sample, view, each in zip(self.bench.samples, self.bench.scored, self.bench.said, strict=True):
            head = sample.prefill[1 : sample.start]
            if not any(one is not None for one in head):
                continue
            said = torch.tensor([math.nan if one is None else one for one in head], dtype=torch.float64)
            given = torch.tensor([one is not None for one in head])
            off = given & ((said - view.logs[1 : sample.start]).abs() > patterns.APART) | given & ~said.isfinite()
            total += int(given.sum())
            positions = [k + 1 for k in torch.nonzero(off)[:, 0].tolist()]
            engine = each.side(each.best) - each.reference
            engine = engine[engine.isfinite()]
            right = not len(engine) or float(engine.abs().mean()) < patterns.MOST
            inside = sample.cached is None or all(k < sample.cached for k in positions)
            enough = len(positions) * 3 > len(head) or (positions and sample.cached)
            if enough and right and inside:
                bad += positions
                responses.append(sample)
                worst = worst or (view.logs[1 : sample.start][off], said[off])
        if not responses or worst is None:
            return
        cached = any(sample.cached for sample in responses)
        where = "inside the cached prefix" if cached else "in the prompt"
        detail = {
            "positions": sorted(set(bad))[:32],
            "wrong": len(bad),
            "of": total,
            "cached": max((sample.cached or 0) for sample in responses),
        }
        text = (
            f"Capture fault: the engine's prompt log-probs are garbage {where} ({counted(len(bad), 'position', of=total)}, in {counted(len(responses), 'response')}), "
            f"while what it computes behind {verb(len(bad), 'it', 'them')} is right: {verb(len(bad), 'that row was', 'those rows were')} never written."
        )  # fmt: skip
        self._add(
            "capture", HEAD, ("reference", "engine"), Relation("unknown", detail), text,
            "Ask for prompt log-probs with the prefix cache off (vllm#42245); nothing else here needs mending.", measure(worst[0], worst[1]), whole=True,
        )  # fmt: skip
        self.found.cleared.append(("weights and computation", "log-probs of the responses agree with the reference"))

    def _definition(self, base: Sequence[int]) -> definitions.Definition | None:
        samples, scored = [self.bench.samples[i] for i in base], [self.bench.scored[i] for i in base]

        def numbers(sample: Sample) -> Sequence[float | None]:
            return sample.decode or sample.prefill[sample.start :]

        found = definitions.pool(samples, scored, numbers)
        if found is None:
            return None
        one = definitions.define(found)
        for other in (definitions.of_some, definitions.exchanged):
            one = one or other(samples, scored, numbers)
        if one is None:
            return None
        self.after = f" after {one.short}"
        text, do = judging.SENTENCES[one.kind](one)
        if self._trained_likewise(base, one):
            self.found.notes.append(f"{text}; the trainer's do the same, so the two are of one definition and this is no fault")
            return one
        proof = Proof(
            f"score the reference so: {text}; mean distance in nats a token",
            one.before,
            one.after,
            f"plainly scored, it stays {one.before:.3g}{'; some of them are above 0, as no log-prob is' if bool((found.engine > definitions.HIGHEST).any()) else ''}",
        )
        part, whose = self._part(samples, one, text)
        site = Site("tokens") if one.kind in ("rows", "labels", "samples") else HEAD
        kind = {"temperature": "scale", "rows": "shifted-tokens", "labels": "shifted-tokens", "samples": "permutation"}.get(
            one.kind, "config"
        )
        self._add(
            "rollout-config", site, ("reference", "engine"), Relation(kind, one.detail | part), f"Rollout-config fault: the engine's log-probs{whose}.", do,
            None, proof=proof,
        )  # fmt: skip
        self.found.cleared.append(("the weights", f"by that definition engine and reference are {one.after:.2g} nats a token apart"))
        return one

    def _trained_likewise(self, base: Sequence[int], one: definitions.Definition) -> bool:
        """Whether the trainer's log-probs are of the engine's definition too, and not the reference's own."""
        said = [(i, self.bench.said[i]) for i in base if one.holds_of(self.bench.samples[i])]
        to_it = [each.trained - definitions.expected(one, self.bench.samples[i], self.bench.scored[i]) for i, each in said]
        far, near = patterns.mean([each.apart("trained", "reference").abs() for _, each in said]), patterns.mean([a.abs() for a in to_it])
        return any(bool(a.isfinite().any()) for a in to_it) and near <= definitions.LEFT and near * definitions.GAIN <= far

    def _part(self, samples: Sequence[Sample], one: definitions.Definition, text: str) -> tuple[dict[str, object], str]:
        """(data, words) on whose log-probs are so defined, and what those have in common."""
        if not one.only:
            return {}, f" are {text}"
        nothing = torch.zeros(0)
        marked = [Measured(each, nothing, nothing, float(one.holds_of(each)), bad=one.holds_of(each)) for each in samples]
        seen = patterns.parted(marked)
        return {"seen": seen.kind, **seen.detail}, f" of {counted(len(one.only), 'response', of=len(samples))} are {text}, {seen.said}"

    def _held_to_text(self, compared: Sequence[int], by_logs: Sequence[Measured], by_text: Sequence[Measured]) -> list[Measured]:
        """Later weights may differ because they were trained: without the trainer's word only garbling or a sudden jump is a fault."""
        means: dict[tuple[int, str], list[float]] = {}
        for i, one in zip(compared, by_logs, strict=True):
            means.setdefault(self.bench.samples[i].age, []).append(one.apart)
        level = {age: sum(values) / len(values) for age, values in means.items()}
        kept, moved = [], 0
        for i, one in zip(compared, by_logs, strict=True):
            age = self.bench.samples[i].age
            before = level.get((age[0] - 1, age[1]))
            sudden = before is not None and before <= patterns.MOST and level[age] > patterns.APART
            if one.bad and not self.bench.is_base(i) and not len(self.bench.samples[i].trained) and not by_text[i].bad and not sudden:
                moved += 1
                one = Measured(one.sample, one.signal, one.numbers, one.apart)
            kept.append(one)
        if moved:
            self.found.open.append(
                f"{counted(moved, 'response')} of trained weights {verb(moved, 'leaves the reference and is', 'leave the reference and are')} not garbled: "
                "training explains that, and so would a bad sync; "
                f"{self.rerun('--train TRAIN_DUMP')} decides it, or --reference with the export of that iteration"
            )
        return kept

    def _sampling(self, compared: Sequence[int], measured: Sequence[Measured], by_text: Sequence[Measured]) -> None:
        """Log-probs that agree on a text that nobody would draw: the sampler, not the model."""
        odd = [i for i, one in zip(compared, measured, strict=True) if not one.bad and by_text[i].bad and self.bench.is_base(i)]
        if len(odd) * 2 <= len(compared):
            return
        surprise = sum(by_text[i].apart for i in odd) / len(odd)
        text = (
            f"Rollout-config fault: engine and reference give the same log-probs, and {counted(len(odd), 'response', of=len(compared))} {verb(len(odd), 'surprises', 'surprise')} both by "
            f"{surprise:.2g} nats a token more than text drawn at temperature 1: tokens are not drawn from these log-probs."
        )
        self._add(
            "rollout-config", HEAD, ("reference", "engine"), Relation("config", {"flag": "sampling", "surprise": surprise, "expected": 0.0}), text,
            "Look at temperature, top_p, top_k, min_p and penalties of the rollout.", None,
        )  # fmt: skip

    def _patterns(self, measured: Sequence[Measured], order: Sequence[int]) -> None:
        seen = patterns.pattern(measured)
        if seen is None:
            return
        bad = [(i, one) for i, one in zip(order, measured, strict=True) if one.bad]
        said = [self.bench.said[i] for i, _ in bad]
        to_trainer = all(self.bench.to_trainer(i) for i, _ in bad)
        distances = judging.table(said)
        given = None if to_trainer else next((name for name in judging.GIVEN if judging.explains(distances, name)), None)
        if given is not None and self.known.found:
            self._shown(given, distances, len(bad), len(measured))
            return
        tried = seen.kind in ("every", "decode") and given is None
        explained = self.bench.simulated([i for i, one in bad if not one.text]) if tried else None
        engine = torch.cat([each.side(each.best) for each in said])
        reference = torch.cat([each.reference for each in said])
        both = engine.isfinite()
        broken = sum(len(one.broken) for _, one in bad)
        difference = measure(reference[both], engine[both]) if bool(both.any()) and not broken else None
        first = min(one.first or 0 for _, one in bad)
        sizes = sum(one.apart for _, one in bad) / len(bad) if bad[0][1].text else patterns.mean([one.numbers for _, one in bad])
        what = (
            f"wrong: {broken} of {verb(len(bad), 'its', 'their')} values {verb(broken, 'is no log-prob', 'are no log-probs')} ({judging.no_numbers([one for _, one in bad])})" if broken
            else f"{sizes:.2g} nats a token more surprising than the reference's own text" if bad[0][1].text else f"{sizes:.2g} nats a token from the {'trainer' if to_trainer else 'reference'}"
        )  # fmt: skip
        loops = sum(patterns.repeats(self.bench.samples[i].tokens[self.bench.samples[i].start :]) > 0.5 for i, _ in bad)
        looped = f"; {loops} of them {verb(loops, 'is a loop', 'are loops')}" if loops else ""
        if explained is not None:
            self._placed(explained, difference, len(bad), what)
            return
        if seen.kind == "some" and not broken and not bad[0][1].text:
            what += f", {max(float(one.signal.max()) for _, one in bad):.2g} at the furthest token"
        blamed = judging.blame(distances, seen, self.known, to_trainer)
        relation = Relation("nan" if broken else "unknown", {"seen": seen.kind, "first_token": first, **seen.detail})
        cls = f"{blamed.cls.capitalize()} fault" if blamed.cls else "Fault of open class"
        text = f"{cls}: {counted(len(bad), 'response', of=len(measured))} {verb(len(bad), 'is', 'are')} {what}, {seen.said}{looped}; {blamed.why}."
        self._add(blamed.cls, HEAD, blamed.between, relation, text, blamed.next, difference, whole=True, candidates=blamed.candidates)
        self.found.cleared += blamed.cleared

    def _shown(self, side: str, distances: dict[tuple[str, str], float], bad: int, count: int) -> None:
        """The engine says what candidate or export say: its responses show what an earlier stage found, and are no fault of their own."""
        near = min(value for pair, value in distances.items() if side in pair and {"decode", "prefill"} & set(pair))
        away = distances[side, "reference"]
        self.found.shown = True
        self.found.notes.append(
            f"{counted(bad, 'response', of=count)} {verb(bad, 'is', 'are')} what the {side} says ({near:.2g} nats a token from it, {away:.2g} from the reference): "
            f"{verb(bad, 'it shows', 'they show')} {self.known.found}"
        )
        self.found.cleared.append(("the engine", f"it computes what the {side} computes"))

    def _quiet(self, compared: Sequence[int], measured: Sequence[Measured]) -> None:
        """More than engines usually are apart, and not enough to be a fault: is it one that is known, and small here?"""
        base = [(i, one) for i, one in zip(compared, measured, strict=True) if self.bench.is_base(i) and not one.bad]
        apart = patterns.mean([one.numbers for _, one in base])
        if self.found.faults or apart <= patterns.USUAL:
            return
        explained = self.bench.simulated([i for i, _ in base])
        if explained is not None:
            engine = torch.cat([self.bench.said[i].side(self.bench.said[i].best) for i, _ in base])
            reference = torch.cat([self.bench.said[i].reference for i, _ in base])
            both = engine.isfinite()
            self._placed(explained, measure(reference[both], engine[both]), len(base), f"{apart:.2g} nats a token from the reference")

    def _placed(self, found: simulate.Explained, difference: Difference | None, bad: int, what: str) -> None:
        one = found.simulation
        proof = Proof(
            f"do it to the reference: {one.said}; mean distance from the engine in nats a token", found.before, found.after,
            f"the next best, '{found.other.said}', leaves {found.other_after:.2g}",
        )  # fmt: skip
        text = f"Rollout fault: {counted(bad, 'response')} {verb(bad, 'is', 'are')} {what}, because {one.said}."
        findings = tuple(
            self._finding("rollout", site, ("reference", "engine"), Relation(one.kind, one.detail), text, one.next, difference, proof)
            for site in one.sites
        )
        self.found.faults.append(Fault(findings))
        self.found.cleared.append((judging.CONVERSION, "the reference's own weights, computed so, give the engine's log-probs"))

    def _say_mixed(self, numbered: Sequence[int]) -> None:
        mixed = [i for i in numbered if self.bench.samples[i].mixed]
        if mixed:
            versions = sorted({version for i in mixed for version in self.bench.samples[i].versions})
            self.found.skipped.append(
                (
                    f"log-probs of {counted(len(mixed), 'response')}",
                    f"mixed: weights were updated while {verb(len(mixed), 'it was', 'they were')} generated (versions {', '.join(versions)}); "
                    f"{verb(len(mixed), 'its', 'their')} text was judged",
                )
            )

    def _say_rest(self, compared: Sequence[int], measured: Sequence[Measured], by_text: Sequence[Measured]) -> None:
        rows = judging.table(self.bench.said)
        self._say_nulls()
        if self._say_noise(compared, measured):
            self._clear(rows, measured)
        if len(rows) > 1:
            words = [f"{judging.WORDS[a]} - {judging.WORDS[b]} {value:.3g}" for (a, b), value in rows.items()]
            plain = " (plainly scored)" if self.after else ""
            self.found.probes.append(f"mean distance in nats a token{plain}: {', '.join(words)}")
        order = {i: one for i, one in zip(compared, measured, strict=True)}
        every = [order.get(i, by_text[i]) for i in range(len(self.bench.samples))]
        self.found.probes += judging.worst_tokens(every, self.bench.said, self.text, self.after)
        entropy = torch.cat(
            [view.entropy[sample.start :] for sample, view in zip(self.bench.samples, self.bench.scored, strict=True)]
        ).mean()
        surprise = -torch.cat([each.reference for each in self.bench.said]).mean()
        loops = [patterns.repeats(sample.tokens[sample.start :]) for sample in self.bench.samples]
        looped = sum(one > 0.5 for one in loops)
        self.found.probes.append(
            f"to the reference the text is {float(surprise):.3g} nats a token, its own at temperature 1 would be {float(entropy):.3g}; "
            f"{counted(looped, 'response', of=len(loops))} {verb(looped, 'is', 'are')} more than half a loop"
        )
        silent = [i for i in range(len(self.bench.samples)) if not self.bench.has_logs(i)]
        if silent:
            self.found.open.append(
                f"{counted(len(silent), 'response', of=len(self.bench.samples))} {verb(len(silent), 'has', 'have')} no log-probs of the engine: "
                f"{verb(len(silent), 'its', 'their')} text alone was judged, which shows garbling and no "
                f"small drift; {self.rerun('--server URL')} would score {verb(len(silent), 'it', 'them')} (verl: actor_rollout_ref.rollout.calculate_log_probs=True)"
            )

    def _say_nulls(self) -> None:
        """A log-prob that is not there agrees with nothing, and who leaves out the bad ones would agree in all others."""
        for side in ("decode", "prefill", "trained"):
            found = judging.nulls(self.bench.samples, side)
            if found is not None:
                self.found.open.append(
                    f"{counted(found.count, 'log-prob', of=found.of)} of the {judging.WORDS[side]} {verb(found.count, 'is', 'are')} null, first {found.where}: "
                    f"{verb(found.count, 'that token was', 'those tokens were')} not compared, and the loss mask does not leave {verb(found.count, 'it', 'them')} out"
                )

    def _say_noise(self, compared: Sequence[int], measured: Sequence[Measured]) -> bool:
        """How far off responses are that have no fault one by one, and whether that is noise; answers whether all are alike in it."""
        good = [one for one in measured if not one.bad]
        if not good or any(fault.first.cls == "rollout-config" for fault in self.found.faults):
            return True
        signal = torch.cat([one.numbers for one in good])
        mean, tail = float(signal.mean()), patterns.torn(signal)
        held = [
            one for i, one in zip(compared, measured, strict=True) if not one.bad and (self.bench.is_base(i) or self.bench.to_trainer(i))
        ]
        part = patterns.uneven(held)
        self.found.notes.append(judging.noise_note(mean, len(signal), tail, float(signal.max()), alike=part is None))
        if part is not None:
            self.found.open.append(
                f"responses of {part.whose} are {part.level:.2g} nats a token from what they are held to, all others {part.others:.2g}: noise does not "
                f"choose them, an engine that holds other weights than the rest does; {self.rerun('--hashes ENGINE_HASHES --export EXPORT_DIR')} tells"
            )
        if tail and mean <= patterns.MOST and not self.found.faults:
            self.found.open.append(
                f"{tail} {verb(tail, 'token is', 'tokens are')} {patterns.TAIL:g} times as far from the reference as the mean of {mean:.2g} nats: no arithmetic scatters so, and it is "
                f"too little to be called a fault; {self.rerun('--train TRAIN_DUMP')} tells whose it is, or --hashes whether the engine holds the right weights"
            )
        if patterns.MOST < mean and not self.found.faults:
            self.found.open.append(
                f"{mean:.2g} nats a token is more than engines that are right show and too little to be called a fault; "
                f"{self.rerun('--train TRAIN_DUMP')} tells whose it is, or --hashes whether the engine holds the right weights"
            )
        return part is None

    def _clear(self, rows: dict[tuple[str, str], float], measured: Sequence[Measured]) -> None:
        """What the table of who agrees with whom clears, where nothing is wrong."""
        if self.found.faults or self.found.shown or not measured or any(one.bad for one in measured):
            return
        far = {pair: value for pair, value in rows.items() if pair[1] == "reference"}
        for side, suspect in (("decode", "the engine's decode"), ("prefill", "the engine's prefill"), ("candidate", judging.CONVERSION)):
            value = far.get((side, "reference"))
            tail = patterns.torn(torch.cat([each.apart(side, "reference") for each in self.bench.said]))
            whole = side not in ("decode", "prefill") or judging.nulls(self.bench.samples, side) is None
            if value is not None and value <= patterns.MOST and not tail and whole:
                self.found.cleared.append((suspect, f"its log-probs are {value:.2g} nats a token from the reference's"))

    def _add(
        self, cls: str | None, site: Site, between: tuple[str, str], relation: Relation, text: str, do: str, difference: Difference | None,
        *, proof: Proof | None = None, whole: bool = False, candidates: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        finding = self._finding(cls, site, between, relation, text, do, difference, proof, candidates)
        self.found.faults.append(Fault((finding,), whole))

    def _finding(
        self, cls: str | None, site: Site, between: tuple[str, str], relation: Relation, text: str, do: str, difference: Difference | None,
        proof: Proof | None = None, candidates: tuple[str, ...] = (),
    ) -> Finding:  # fmt: skip
        return Finding(
            cls, site, nowhere(site, self.bench.reference.dims.layers), ((), ()), difference, tolerance(self.bench.said), relation, proof, text, do, between,
            shows_at=None if site == HEAD else "lm_head", candidates=candidates or ("conversion", "model-definition", "parallel"),
        )  # fmt: skip


def nowhere(site: Site, layers: int) -> Shard:
    """No rank: nothing in the evidence says."""
    return shard_of(site, Parallel(), "unknown", layers)


def tolerance(said: Sequence[Said]) -> Tolerance:
    """What is allowed, in the report's measure: nats a token over the size of the reference's log-probs."""
    logs = torch.cat([each.reference for each in said])
    size = float(logs.square().mean().sqrt())
    return Tolerance(
        patterns.ALL_APART / size if size else math.inf, f"{patterns.ALL_APART:g} nats a token; bf16 engines are 0.01 to {patterns.USUAL:g}"
    )
