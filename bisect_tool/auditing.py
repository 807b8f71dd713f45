"""The audit command: the weights stage by itself, with what may follow it (a repair, a sibling held beside it)."""

from __future__ import annotations

from pathlib import Path

from bisect_tool.crew import joined_ranks, rank_of
from bisect_tool.ladder import Job, climb
from bisect_tool.report import Report


def audit(job: Job, repair: Path | None, sibling: tuple[Path, Path] | None) -> Report | None:
    """The report; None on every torchrun rank but the first."""
    with joined_ranks():
        report = climb(job)
        if rank_of()[0] != 0:
            return None
    return report
