"""What `golden/real.py` measured, as the second half of docs/real-weights.md.  Nothing here measures or judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bisect_tool.faults import span

MARK = "## Measured\n"
# the layers of one row of the table
STEP = 5


@dataclass(frozen=True, slots=True)
class Run:
    """One clean run.  floors, used  by place: the reference's own noise, and the share of the allowance that the candidate used"""

    layout: str
    dtype: str
    right: bool
    page: Mapping[str, Any]
    floors: Mapping[str, float]
    used: Mapping[str, float]
    answers: Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Found:
    """One planted fault.  command  what follows `bisect-tool run`"""

    fault: str
    what: str
    command: str
    right: bool
    page: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Memory:
    """Peaks of resident memory, in GB: of the process that judges, and of the largest rank."""

    driver: float
    rank: float


def write(file: Path, runs: Sequence[Run], faults: Sequence[Found], memory: Memory, versions: str) -> None:
    """Puts what was measured in the place of what stood under the mark."""
    said = file.read_text().partition(MARK)[0]
    prompts = runs[0].page["provenance"]["prompts"].partition("(")[2].rstrip(")")
    body = [
        f"Written by `golden/real.py`: {prompts} of English and code, on a CPU; {versions}.",
        f"Peak memory {memory.driver:.1f} GB where things are judged, {memory.rank:.1f} GB in a rank.",
        "",
        *_runs(runs),
        "",
        *_floors(runs),
        "",
        *_answers(runs),
        "",
        *_faults(faults),
    ]
    file.write_text(said + MARK + "\n" + "\n".join(body) + "\n")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _stage(page: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(stage for stage in page["stages"] if stage["name"] == name)
    return found


def _note(page: Mapping[str, Any], begins: str) -> str:
    notes: list[str] = _stage(page, "forward")["notes"]
    return next((note for note in notes if note.startswith(begins)), "").removeprefix(begins).strip()


def _runs(runs: Sequence[Run]) -> list[str]:
    rows = []
    for one in runs:
        forward, weights = (_stage(one.page, name)["compared"] for name in ("forward", "weights"))
        logits, _, normal = _note(one.page, "free-running, the logits differ by").partition("; is this normal? ")
        rows.append(
            [
                one.layout,
                one.dtype,
                f"{one.page['verdict']}: {weights['tensors']} tensors, {forward['sites']} sites",
                _note(one.page, "nearest to its tolerance:") if any(one.used.values()) else "every site bit-equal",
                logits + (f" ({normal.partition(':')[0]}, normal)" if normal else ""),
            ]
        )
    return _table(["run", "dtype", "result", "nearest to its allowance", "free-running logits"], rows)


def _floors(runs: Sequence[Run]) -> list[str]:
    """The worst site of some layers: the floor in each dtype, and what each run used of its allowance."""
    by_dtype = {one.dtype: one for one in runs}
    layers = sorted({int(place.split(".")[1]) for one in runs for place in one.floors if "." in place})
    groups: list[tuple[str, list[str]]] = [("outside the layers", ["outside"])]
    for start in range(0, len(layers), STEP):
        some = layers[start : start + STEP]
        groups.append((span(some), [f"layers.{n}" for n in some]))
    rows = [
        [
            said,
            *(_range([one.floors[place] for place in places]) for one in by_dtype.values()),
            *(f"{max(one.used[place] for place in places):.0%}" for one in runs),
        ]
        for said, places in groups
    ]
    head = ["layers", *(f"floor, {dtype}" for dtype in by_dtype), *(f"{one.layout}, {one.dtype}" for one in runs)]
    note = "The floor is the reference's distance from itself, at the worst site of a layer; the other columns are the share of the"
    return [
        note,
        "allowance (8 x the floor; worst tokens and channels have their own) that the worst site of the run used.",
        "",
        *_table(head, rows),
    ]


def _range(levels: Sequence[float]) -> str:
    return f"{min(levels):.1e} to {max(levels):.1e}" if len(levels) > 1 else f"{levels[0]:.1e}"


def _answers(runs: Sequence[Run]) -> list[str]:
    """One row an answer of the reference: what each run's candidate says to it."""
    rows = []
    for dtype in dict.fromkeys(one.dtype for one in runs):
        some = [one for one in runs if one.dtype == dtype]
        for number, answer in enumerate(some[0].answers):
            others = {one.layout: one.answers[number]["candidate"] for one in some}
            alike = all(said == answer["reference"] for said in others.values())
            candidate = f"the same ({', '.join(others)})" if alike else "; ".join(f"{at}: {_code(said)}" for at, said in others.items())
            rows.append([_code(answer["prompt"]), dtype, _code(answer["reference"]), candidate])
    return _table(["prompt", "dtype", "reference answers", "candidate answers"], rows)


def _code(text: str) -> str:
    return f"`{text!r}`".replace("|", "\\|")


def _faults(faults: Sequence[Found]) -> list[str]:
    rows = []
    for one in faults:
        fault = one.page["first"]
        relation, proof = fault["relation"], fault["proof"]
        where = [f"layer{'s' * (len(fault['layers']) > 1)} {span(fault['layers'])}"] if fault["layers"] else []
        shard = {axis: at for axis, at in fault["shard"].items() if axis not in ("layout", "of")}
        where += [", ".join(fault["modules"]), *([f"({', '.join(fault['parts'])})"] if fault["parts"] else [])]
        where += [f"{axis} {at}" for axis, at in shard.items()]
        levels = f"{_short(proof['before'])} → {_short(proof['after'])}" if proof["before"] is not None else "arguments alone"
        differing = one.page["answers"][:1]
        said = f"{_code(differing[0]['candidate'])} for {_code(differing[0]['reference'])}" if differing else "the same, or not asked"
        rows.append([one.fault, one.what, f"`{one.command}`", fault["class"], " ".join(where), relation["kind"], levels, said])
    head = ["planted", "what it is", "run with", "class", "where", "relation", "proof", "first answer that differs"]
    return [f"Planted, each found with its whole verdict and alone ({len(faults)} of {len(faults)}):", "", *_table(head, rows)]


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)
