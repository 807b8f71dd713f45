"""The report: one page of strict JSON, written whole and last.  The text view is made from the same page."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_hooks.errors import UsageError

from bisect_tool import __version__
from bisect_tool.faults import Fault
from bisect_tool.judge import Verdict, worst

SCHEMA = "bisect-tool/report/1"
STAGES = ("inputs", "config", "weights", "forward", "engine")
FILE, PARTIAL = "report.json", ".report.json.partial"
# what `bisect-tool report` may have put beside it
VIEWS = ("report.txt", "report.html", "report.junit.xml", "report.sarif")
# what an audit that was killed has done so far (crew.py)
JOURNAL = "journal"
EXIT = {Verdict.AGREES: 0, Verdict.DIFFERS: 1, Verdict.INCOMPARABLE: 125}


@dataclass(slots=True)
class StageResult:
    """What one stage compared and concluded.  `verdict` is None when it was not run.

    cleared  what is no longer a suspect, and why
    """

    name: str
    verdict: Verdict | None = None
    seconds: float = 0.0
    compared: dict[str, int] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    probes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    minor: list[Fault] = field(default_factory=list)
    cleared: list[tuple[str, str]] = field(default_factory=list)
    trained: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict.value if self.verdict else None,
            "seconds": round(self.seconds, 3),
            "compared": self.compared,
            "skipped": [{"what": what, "why": why} for what, why in self.skipped],
            "notes": self.notes,
            "probes": self.probes,
            "cleared": [{"suspect": suspect, "why": why} for suspect, why in self.cleared],
        }


@contextmanager
def timed(result: StageResult) -> Iterator[None]:
    """Counts the seconds of a stage."""
    started = time.monotonic()
    yield
    result.seconds = time.monotonic() - started


@dataclass(frozen=True, slots=True)
class Report:
    """Every stage, in ladder order, and where everything came from."""

    stages: Sequence[StageResult]
    provenance: Mapping[str, Any]
    answers: Sequence[Mapping[str, str]] = ()
    strict: bool = False

    @property
    def faults(self) -> list[Fault]:
        """In compute order; a fault that two stages found is listed once, as the earlier stage saw it."""
        return united([stage.faults for stage in self.stages])

    @property
    def minor(self) -> list[Fault]:
        return united([stage.minor for stage in self.stages])

    @property
    def verdict(self) -> Verdict:
        asked = [stage.verdict for stage in self.stages if stage.verdict is not None]
        if self.strict and self.minor:
            return Verdict.DIFFERS
        return worst(asked)

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    def to_json(self) -> dict[str, Any]:
        first_by = {id(fault): stage.name for stage in reversed(self.stages) for fault in (*stage.faults, *stage.minor)}
        faults = [fault.to_json() | {"stage": first_by[id(fault)]} for fault in self.faults]
        return {
            "schema": SCHEMA,
            "verdict": self.verdict.value,
            "first": faults[0] if faults else None,
            "faults": faults,
            "minor": [fault.to_json() | {"stage": first_by[id(fault)]} for fault in self.minor],
            "cleared": [{"suspect": suspect, "why": why, "stage": stage.name} for stage in self.stages for suspect, why in stage.cleared],
            "stages": [stage.to_json() for stage in self.stages],
            "answers": list(self.answers),
            "provenance": {"tool": f"bisect-tool {__version__}", **self.provenance},
        }


def united(stages: Sequence[Sequence[Fault]]) -> list[Fault]:
    """Faults in compute order; what a later stage sees of a fault that an earlier one found is left out."""
    kept: list[Fault] = []
    for faults in stages:
        kept += [fault for fault in faults if not any(_same(one, fault) for one in kept)]
    return sorted(kept, key=lambda one: one.first.site)


def _same(one: Fault, other: Fault) -> bool:
    a, b = one.to_json(), other.to_json()
    if a["between"] != b["between"] or a["layers"] != b["layers"] or a["modules"][:1] != b["modules"][:1]:
        return False
    relation, again = a["relation"], b["relation"]
    if (
        relation
        and again
        and relation["kind"] == again["kind"] == "config"
        and relation["detail"].get("flag") != again["detail"].get("flag")
    ):
        return False
    return relation is None or again is None or relation["kind"] == again["kind"] or "unknown" in (relation["kind"], again["kind"])


def not_run(name: str, why: str) -> StageResult:
    """A stage that was not run, and why."""
    return StageResult(name, skipped=[(name, why)])


def prepare_out(out: Path) -> None:
    """Refuses an out directory that holds something else, before any work is done.  Raises UsageError."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"--out {out} is a file")
    held = {entry.name for entry in out.iterdir() if not entry.name.startswith(f"{JOURNAL}.")}
    if held - {FILE, PARTIAL, *VIEWS, "traceback.txt"}:
        raise UsageError(f"--out {out} holds something else ({sorted(held)[0]})", hint="give an empty or new directory")


def write(report: Report, out: Path) -> Path:
    """report.json, at once: half a report is none."""
    out.mkdir(parents=True, exist_ok=True)
    partial = out / PARTIAL
    partial.write_text(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")
    partial.replace(out / FILE)
    for file in (out / "traceback.txt", *out.glob(f"{JOURNAL}.*")):
        file.unlink(missing_ok=True)
    return out / FILE


def read(directory: Path) -> dict[str, Any]:
    """A finished run's page.  Raises UsageError."""
    file = directory / FILE
    if not file.is_file():
        raise UsageError(f"{directory} holds no {FILE}", hint="give the --out directory of a finished run")
    try:
        page = json.loads(file.read_text())
    except ValueError as error:
        raise UsageError(f"{file} is damaged: {error}") from error
    if not isinstance(page, dict) or page.get("schema") != SCHEMA:
        raise UsageError(f"{file} is not a {SCHEMA} page")
    # half a surrogate pair is no character, and nothing can be written with one in it
    whole: dict[str, Any] = json.loads(json.dumps(page, ensure_ascii=False).encode(errors="replace"))
    return whole
