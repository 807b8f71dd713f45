"""The audit command: the weights stage by itself, with what may follow it (a repair, a sibling held beside it)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bisect_hooks.errors import UsageError

from bisect_tool.crew import joined_ranks, rank_of
from bisect_tool.judge import Verdict
from bisect_tool.ladder import Job, climb
from bisect_tool.repair import check_repairable, repair
from bisect_tool.report import Report, StageResult
from bisect_tool.sibling import held_beside


def audit(job: Job, repaired: Path | None, sibling: tuple[Path, Path] | None) -> Report | None:
    """The report; None on every torchrun rank but the first."""
    if repaired is not None:
        check_repairable(job.sides, repaired)
    with joined_ranks():
        report = climb(job)
        if rank_of()[0] != 0:
            return None
    weights = next(stage for stage in report.stages if stage.name == "weights")
    if sibling is not None:
        _beside(job, sibling, weights)
    if repaired is not None:
        _repair(job, repaired, weights)
    return report


def _repair(job: Job, out: Path, weights: StageResult) -> None:
    """Writes the copy and audits it; what came of it is said in the stage's notes."""
    if not weights.faults:
        weights.notes.insert(0, "nothing to repair: no fault was found, and nothing was written")
        return
    done = repair(job.sides, weights.faults, out, trained=weights.trained)
    again = climb(replace(job, candidate_path=out, export=None, out=None))
    left = [f"{fault.first.site} ({fault.first.relation.kind if fault.first.relation else 'unknown'})" for fault in again.faults]
    verdict = {Verdict.AGREES: "agrees", Verdict.DIFFERS: f"differs at {', '.join(left[:4])}", Verdict.INCOMPARABLE: "is incomparable"}
    weights.notes[:0] = [
        f"repaired: {out} has {len(done.written)} tensors written anew, all others as they were; audited again, it {verdict[again.verdict]}",
        *(f"not repaired: {line}" for line in done.left),
    ]


def _beside(job: Job, sibling: tuple[Path, Path], weights: StageResult) -> None:
    """The good sibling's audit, and what differs in kind between the two."""
    if job.candidate_path is None:
        raise UsageError("a sibling is held beside a candidate: give --candidate")
    other = replace(job, reference_path=sibling[0], candidate_path=sibling[1], export=None, converted=None, out=None)
    weights.notes[:0] = held_beside(job, weights, other, climb(other))
