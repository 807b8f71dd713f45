"""An engine's activations, placed: its prefill, its decode, the candidate and the reference on the same token ids, pair by pair.

The reference (and the candidate) is recorded on the rows that the engine's Recordings hold.  Where the engine leaves the reference,
`comparing` says at which layer and module; who agrees with whom says whose fault that is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from bisect_hooks.errors import UsageError

from bisect_tool.align import Mismatch, align
from bisect_tool.comparing import Comparison, inputs_differ
from bisect_tool.faults import Fault, Finding
from bisect_tool.free import Free
from bisect_tool.judge import Verdict
from bisect_tool.prompts import Batch
from bisect_tool.recording import Recording
from bisect_tool.reference import Wanted
from bisect_tool.reference_recording import record_reference
from bisect_tool.report import StageResult
from bisect_tool.rollouts.gather import Gathered
from bisect_tool.rollouts.judging import CONVERSION
from bisect_tool.rollouts.known import Known
from bisect_tool.shapes import token_errors

# records the candidate on a batch, into a directory
Record = Callable[[Batch, Path], Recording]
PAIR = ("reference", "engine")
SHOWN = "the engine's activations are the candidate's: they show what an earlier stage found in it"


@dataclass(frozen=True)
class Held:
    """One side held against another.  inner: what `compare` makes of it · free: its judgement by site"""

    words: tuple[str, str]
    inner: StageResult
    free: Free | None
    comparison: Comparison | None

    @property
    def agrees(self) -> bool | None:
        """None where something expected was not compared and no difference was found."""
        return {Verdict.AGREES: True, Verdict.DIFFERS: False}.get(self.inner.verdict or Verdict.INCOMPARABLE)

    @property
    def row(self) -> str:
        """A line of the table."""
        sites = self.inner.compared.get("sites", 0)
        if self.agrees is None:
            return f"{self.words[1]} against {self.words[0]}: no difference at {sites} sites, and not all could be compared"
        if self.agrees:
            return f"{self.words[1]} against {self.words[0]}: agrees at {sites} sites"
        first = self.inner.faults[0].first
        size = f", {first.difference.relative_rms:.2g} relative rms" if first.difference is not None else ""
        return f"{self.words[1]} against {self.words[0]}: differs, first at {first.site}{size}"


def judge(gathered: Gathered, known: Known, candidate: Record | None, result: StageResult, open_questions: list[str]) -> Known:
    """Fills `result`; answers what is known after it.  Raises UsageError for Recordings of another family."""
    engines = _named(gathered)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bisect-engine-")))
        rows = tuple(dict.fromkeys(row for one in engines.values() for row in one.provenance.rows))
        gathered.asked.progress("engine: the reference on the recorded tokens")
        wanted = Wanted(gathered.directory, gathered.family, "native", torch.float32, gathered.asked.device)
        reference = record_reference(wanted, wanted.load()[0], Batch(rows), folder / "reference")
        sides = {"reference": reference, **engines}
        if candidate is not None:
            gathered.asked.progress("engine: the candidate on the recorded tokens")
            sides["candidate"] = candidate(Batch(rows), folder / "candidate")
        table = {(one, other): _held(sides, one, other, gathered) for one, other in _pairs(list(sides))}
        result.probes += [held.row for held in table.values()]
        _conclude(table, list(engines), gathered, known, result, open_questions)
    cleared = next((why for suspect, why in result.cleared if suspect == CONVERSION), "")
    return replace(known, conversion=known.conversion or cleared)


def _named(gathered: Gathered) -> dict[str, Recording]:
    """The engine's Recordings as prefill and decode: one of each, by whether its tokens came one pass at a time."""
    found: dict[str, Recording] = {}
    for one in gathered.recordings:
        come = one.provenance
        if come.family and come.family != gathered.family.name:
            raise UsageError(f"{one.path} is of the family {come.family}, the reference of {gathered.family.name}")
        word = "engine decode" if come.decoded else "engine prefill"
        if word in found:
            raise UsageError(
                f"{one.path} is a second recording of {word}", hint="one of each: a prefill, and a decode (import sglang --decode)"
            )
        found[word] = one
    return dict(sorted(found.items(), reverse=True))


def _pairs(names: list[str]) -> list[tuple[str, str]]:
    """Who is held against whom: prefill and decode against the reference and each other, the candidate with both sides."""
    wanted = [
        ("reference", "engine prefill"), ("reference", "engine decode"), ("engine prefill", "engine decode"),
        ("reference", "candidate"), ("candidate", "engine prefill"), ("candidate", "engine decode"),
    ]  # fmt: skip
    return [(one, other) for one, other in wanted if one in names and other in names]


def _held(sides: dict[str, Recording], one: str, other: str, gathered: Gathered) -> Held:
    a, b = sides[one], sides[other]
    inner = StageResult("engine")
    wanted = replace(a.provenance, rows=b.provenance.rows) if set(b.provenance.rows) <= set(a.provenance.rows) else a.provenance
    aligned = align(wanted, b.provenance)
    if isinstance(aligned, Mismatch):
        inner.faults, inner.verdict = [Fault((inputs_differ(aligned, b),))], Verdict.DIFFERS
        return Held((one, other), inner, None, None)
    comparison = Comparison(_of_rows(a, wanted.rows), b, aligned.index, lambda key: gathered.asked.progress(f"{other}: {key}"))
    free = comparison.judge(inner)
    return Held((one, other), inner, free, comparison)


class _Rows(Recording):
    """A Recording of some rows of another, in their order."""

    def __init__(self, whole: Recording, rows: tuple[tuple[int, ...], ...]) -> None:
        self.path, self.files = whole.path, whole.files
        self.provenance = replace(whole.provenance, rows=rows, positions=(), worst={})
        self.whole, starts, at = whole, {}, 0
        for row in whole.provenance.rows:
            starts[row], at = at, at + len(row)
        self.index = torch.cat([torch.arange(starts[row], starts[row] + len(row)) for row in rows])

    def __getitem__(self, key: str) -> torch.Tensor:
        tensor = self.whole[key]
        return tensor[self.index] if len(tensor) == self.whole.batch.tokens else tensor


def _of_rows(whole: Recording, rows: tuple[tuple[int, ...], ...]) -> Recording:
    return whole if whole.provenance.rows == rows else _Rows(whole, rows)


def _conclude(
    table: dict[tuple[str, str], Held], engines: list[str], gathered: Gathered, known: Known, result: StageResult, open_questions: list[str]
) -> None:
    """Faults, what is cleared, and what stays open."""

    def agree(one: str, other: str) -> bool | None:
        held = table.get((one, other))
        return None if held is None else held.agrees

    for word in engines:
        held = table["reference", word]
        result.compared |= {what: result.compared.get(what, 0) + count for what, count in held.inner.compared.items() if what != "ranks"}
        result.skipped += [(f"{word}: {what}", why) for what, why in held.inner.skipped]
        result.notes += [f"{word}: {note}" for note in held.inner.notes]
        if held.inner.verdict is Verdict.INCOMPARABLE:
            open_questions.append(f"{word}: something expected was not compared")
    self_consistent = agree("engine prefill", "engine decode")
    prefill, decode = agree("reference", "engine prefill"), agree("reference", "engine decode")
    if prefill:
        result.cleared.append(("the engine's prefill", "its activations agree with the reference site by site"))
    if prefill and decode is False:
        result.cleared.append((CONVERSION, "prefill and decode use the same weights, and prefill agrees with the reference"))
    elif agree("reference", "candidate"):
        result.cleared.append((CONVERSION, "the candidate's activations on the engine's tokens agree with the reference"))
    if decode is True:
        result.cleared.append(("the engine's decode", "its activations agree with the reference site by site"))
    for word in engines:
        held = table["reference", word]
        if held.agrees is not False or (word == "engine decode" and prefill is False and self_consistent):
            continue
        if agree("reference", "candidate") is False and agree("candidate", word):
            result.cleared.append(("the engine", "it computes what the candidate computes"))
            if known.found:
                result.notes.append(SHOWN)
                continue
        result.faults += [_fault(fault, held, word, agree, gathered, known, result) for fault in held.inner.faults]


def _fault(
    fault: Fault, held: Held, word: str, agree: Callable[[str, str], bool | None], gathered: Gathered, known: Known, result: StageResult
) -> Fault:
    """A drift of the engine as a fault of this stage."""
    decoded = _decoded_only(fault.first, held)
    cleared = known.conversion or next((why for suspect, why in result.cleared if suspect == CONVERSION), "")
    cls: str | None
    candidates: tuple[str, ...] = ()
    if fault.first.cls == "capture":
        cls, why = "capture", ""
    elif agree("candidate", word) and agree("reference", "candidate") is False:
        cls, candidates, why = None, ("conversion", "model-definition", "parallel"), " The candidate does the same."
    elif decoded or (word == "engine decode" and agree("reference", "engine prefill")):
        cls = "rollout"
        why = " Only tokens that decode made are wrong: the same weights are right in prefill."
    elif fault.first.cls in ("model-definition", "parallel"):
        cls, why = "rollout", ""
    elif cleared or known.held:
        cls, why = "rollout", f" The weights are cleared: {cleared or 'the engine holds what it should, byte by byte'}."
    else:
        cls, candidates, why = (
            None,
            ("conversion", "rollout"),
            " Nothing in this evidence tells the engine's weights from what it computes.",
        )
    if decoded and not cleared:
        result.cleared.append((CONVERSION, "the same weights are right on the tokens of the prefill"))
    return replace(fault, findings=tuple(_finding(one, cls, candidates, why, word, gathered, known) for one in fault.findings))


def _finding(one: Finding, cls: str | None, candidates: tuple[str, ...], why: str, word: str, gathered: Gathered, known: Known) -> Finding:
    between = ("reference", "candidate") if cls is None and "rollout" not in candidates else PAIR
    label = f"{cls.capitalize()} fault" if cls else "Fault of open class"
    text = one.explanation if cls == "capture" else f"{label}, {word}: {one.explanation[:1].lower()}{one.explanation[1:]}{why}"
    do = one.next
    if cls == "rollout":
        do = f"Look at what the engine does at {one.site}: run it once eagerly, without speculation and prefix cache, and with one TP rank."
    elif cls is None:
        do = (
            f"{known.audit} decides it." if "rollout" not in candidates else f"{known.audit} clears the weights or names the fault in them."
        )
    shard = replace(one.shard, of="engine") if one.shard.of == "run" and one.shard.parallel.world > 1 else replace(one.shard, of="unknown")
    return replace(one, cls=cls, candidates=candidates or one.candidates, explanation=text, next=do, between=between, shard=shard)


def _decoded_only(finding: Finding, held: Held) -> bool:
    """Whether every wrong token at the drift's site was made by decode."""
    if held.comparison is None or held.free is None:
        return False
    candidate = held.comparison.candidate
    starts, wrong = candidate.provenance.decoded, []
    if not starts or str(finding.site) not in held.free.level:
        return False
    judged = held.free.worst_key(finding.site)
    bad = token_errors(*held.comparison.run.pair(judged.key)) > judged.tolerance.relative_rms
    at = 0
    for row in held.comparison.reference.provenance.rows:
        start = starts[candidate.provenance.rows.index(row)]
        wrong += [i >= start for i in range(len(row)) if bool(bad[at + i])]
        at += len(row)
    return bool(wrong) and all(wrong)
