"""Planted faults, each scored field by field: was it found, with the right class, layer, module, part and shard, and was anything invented?

Two kinds.  *Spoiled tensors*: every tensor of one linear and one full attention layer, and those outside the layers, spoiled in
the memory of a candidate on one rank whenever that is built: turned round (full), one head, expert or channel zero (unit), times
1.01 (1 %).  The files are right, so the right class is model-definition.  *Catalogue*: planted checkpoints under parallel
layouts, the cells of `tests/faults/matrix.py`, by activations alone as `bisect-tool run` judges them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

from bisect_hooks.parallel import Parallel
from bisect_hooks.table import Rule
from models import Place, embedded, random_batch

from bisect_tool.arbiter import Arbiter
from bisect_tool.candidate import CandidateRun
from bisect_tool.drifts import to_finding
from bisect_tool.experiments import Lab
from bisect_tool.faults import Finding
from bisect_tool.floor import tolerance_of
from bisect_tool.flow import word
from bisect_tool.forward import Bench, Judged, Located
from bisect_tool.ladder import DTYPES
from bisect_tool.weights import Sides

SEVERITIES = ("full", "unit", "1 %")
LAYERS = (2, 3)
LENGTH, SEED = 65, 7
FIELDS = ("class", "layer", "module", "part", "shard")


@dataclass
class Spoiled(CandidateRun):
    """A candidate with one tensor spoiled whenever it is built: rows of it (None: all) times `factor`, or turned round (None)."""

    key: str = ""
    rows: tuple[int, int] | None = None
    factor: float | None = None

    def build(self) -> list[str]:
        missing = CandidateRun.build(self)
        self.edit(self.key, self.rows, self.factor)
        return missing


@dataclass(frozen=True)
class Score:
    """One fault.  right  which of FIELDS the first fault named has right · invented  faults beside it

    moved    of a spoiled tensor: how far it moves what it makes in fp32 (relative rms), where that run was made too
    allowed  how far that may move in this dtype
    """

    kind: str
    dtype: str
    severity: str
    found: bool
    right: Mapping[str, bool]
    invented: int
    moved: float = math.nan
    allowed: float = math.nan


def spoiled_of(run: CandidateRun, bench: Bench, rule: Rule, key: str, severity: str) -> Spoiled:
    """`run` with one of the rule's tensors spoiled."""
    choices: dict[str, dict[str, Any]] = {
        "full": {},
        "unit": {"rows": _unit(rule, bench), "factor": 0.0},
        "1 %": {"factor": 1.01},
    }
    same = {one.name: getattr(run, one.name) for one in fields(CandidateRun) if one.init}
    return Spoiled(**same, key=key, **choices[severity])


def _unit(rule: Rule, bench: Bench) -> tuple[int, int]:
    """Rows of one head, expert or channel: the first; of the embedding, those of a token that is there."""
    if rule.site.module == "embedding":
        token = bench.run.batch.rows[0][0]
        return token, token + 1
    return 0, bench.dims.head_width if word(rule.site) == "attention.qkv" else 1


def spoilt(place: Place, severities: tuple[str, ...]) -> Iterator[tuple[Rule, str, str, Bench]]:
    """Every tensor and severity of one place: (its rule, its name, severity, a bench whose candidate has it spoiled)."""
    run = place.candidate(Parallel())
    clean = place.bench(random_batch(SEED, LENGTH, place.dims.vocabulary), run)
    for rule in run.family.rules(place.dims, place.layout, place.directory.names, mtp=False):
        if rule.site.in_layer and rule.site.layer not in LAYERS:
            continue
        for made in rule.candidates:
            for severity in severities:
                spoiled = spoiled_of(run, clean, rule, made.name, severity)
                spoiled.build()
                yield rule, made.name, severity, Bench(clean.recording, spoiled, clean.dims)


def score_tensors(layout: str, dtypes: tuple[str, ...] = tuple(DTYPES), severities: tuple[str, ...] = SEVERITIES) -> list[Score]:
    """Spoiled tensors of one checkpoint layout."""
    scores = []
    exact: dict[tuple[str, str], Judged] = {}  # what an fp32 run named first, by tensor and severity
    with tempfile.TemporaryDirectory() as name:
        for place in embedded(Path(name), (layout,), dtypes):
            arbiter = Arbiter.of(place.directory, place.family, place.dims, place.wanted.rounding.read)
            auditor = Sides(place.directory.path, place.checkpoint, None, None).auditor("reference-candidate")
            for rule, tensor, severity, bench in spoilt(place, severities):
                located = bench.locate()
                if place.dtype == "fp32" and located.sites:
                    exact[tensor, severity] = located.sites[min(located.sites)]
                findings = {site: to_finding(bench, located, site) for site in located.sites}
                if findings and severity == "full":
                    findings = Lab(bench, located, auditor, place.directory.path, (), arbiter).decide(findings)
                score = _scored(rule, place.dtype, severity, located, findings)
                if (tensor, severity) in exact:
                    key, difference = exact[tensor, severity].key, exact[tensor, severity].difference
                    assert difference is not None
                    score = replace(score, moved=difference.relative_rms, allowed=tolerance_of(bench.recording, key).relative_rms)
                scores.append(score)
    return scores


def _scored(rule: Rule, dtype: str, severity: str, located: Located, findings: Mapping[Any, Finding]) -> Score:
    named = [findings[site] for site in sorted(located.sites)]
    right = {}
    if named:
        first, site = named[0], named[0].site
        right = {"layer": site.layer == rule.site.layer, "module": site.module == rule.site.module, "part": site.part == rule.site.part}
        if severity == "full":
            right["class"] = first.cls == "model-definition"
    return Score(word(rule.site), dtype, severity, bool(named), right, max(0, len(named) - 1))


# parallel layout → dtypes; checkpoint layouts take turns
COVERING = {"tp2sp": ("fp32", "bf16"), "pp2": ("fp32",), "ep4": ("fp32", "bf16"), "tp2ep2": ("fp32",), "tp4": ("fp32",), "vpp2": ("fp32",)}


def score_catalogue(layout: str, unders: tuple[str, ...] = tuple(COVERING)) -> list[Score]:
    """A covering set of the drill's cells: every fault under every one of `unders`, in this checkpoint layout or, at its turn, the other."""
    from matrix import cells
    from workshop import Workshop

    shown = [
        (made, at)
        for made, at, absent in cells()
        if at.under in unders and at.dtype in COVERING[at.under] and not absent and not made.unseen(at)
    ]
    can: dict[tuple[str, str], list[str]] = {}
    for made, at in shown:
        where = can.setdefault((made.plant, at.under), [])
        where += [] if at.layout in where else [at.layout]
    turn = {pair: where[number % len(where)] for number, (pair, where) in enumerate(can.items())}
    with tempfile.TemporaryDirectory() as name:
        workshop = Workshop(Path(name))
        return [_judged(made, at, workshop, Path(name)) for made, at in shown if turn[made.plant, at.under] == at.layout == layout]


def _judged(made: Any, at: Any, workshop: Any, folder: Path) -> Score:
    from matrix import case_of
    from workshop import judge, verdict_of

    case = case_of(made, at)
    candidate = workshop.faulty(case.layout, case.written, *case.faults)
    flags = [str(candidate / flag) if flag == "patch.py" else flag for flag in case.flags]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        _, page = judge(candidate, folder / f"report-{case.id}", case.under, *flags)
    found = [verdict_of(fault) for fault in (page["minor"] if made.minor else page["faults"])]
    wanted = made.expected(at)
    right = {}
    if found:
        first = found[0]
        names = {"layer": "layers", "module": "modules", "part": "parts"}
        right = {field: first[names.get(field, field)] == wanted[names.get(field, field)] for field in FIELDS}
    return Score(case.faults[0], at.dtype, at.under, bool(found), right, max(0, len(page["faults"]) + len(page["minor"]) - 1))
