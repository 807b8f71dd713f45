"""Which faults are found, down to which severity, and what is said of them: `make scoreboard` writes docs/scoreboard.md.

Faults are those of `score.py`; clean runs are counted by `calibrate.py`, rivals by `rivals.py`, whose tables are taken over.  The
two checkpoint layouts are scored by processes of their own.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import click
import torch
from calibrate import OUT as CALIBRATION
from score import COVERING, FIELDS, LAYERS, SEVERITIES, Score, score_catalogue, score_tensors

from bisect_tool.ranks import WORLDS

DOCS = Path(__file__).resolve().parent.parent / "docs"
OUT = DOCS / "scoreboard.md"
DTYPES = ("fp32", "bf16")


def alone(task: partial[list[Score]]) -> list[Score]:
    """One task in a process of its own, ranks included."""
    started = time.monotonic()
    try:
        return task()
    finally:
        WORLDS.close()
        sys.stderr.write(f"{task.func.__name__} {task.args}: {time.monotonic() - started:.0f} s\n")


def cell(scores: Sequence[Score]) -> str:
    """found of all, and what is not right of those."""
    if not scores:
        return "-"
    found = [score for score in scores if score.found]
    wrong = [f"{field} {n} wrong" for field in FIELDS if (n := sum(not score.right.get(field, True) for score in found))]
    invented = sum(score.invented for score in scores)
    return ", ".join([f"{len(found)}/{len(scores)}", *wrong, *([f"{invented} invented"] if invented else [])])


def smallest(scores: Sequence[Score]) -> str:
    """The smallest severity of which every fault was found."""
    held = [severity for severity in SEVERITIES if all(score.found for score in scores if score.severity == severity)]
    return held[-1] if held else "none"


def table(scores: Sequence[Score], columns: Sequence[tuple[str, str]], last: str = "") -> list[str]:
    """A row for each kind, a column for each dtype and severity (or layout)."""
    heads = ["fault", *(f"{dtype} {severity}" for dtype, severity in columns), *([last] if last else [])]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for kind in dict.fromkeys(score.kind for score in scores):
        own = [score for score in scores if score.kind == kind]
        cells = [cell([score for score in own if (score.dtype, score.severity) == column]) for column in columns]
        if last:
            cells.append(", ".join(smallest([score for score in own if score.dtype == dtype]) for dtype in DTYPES))
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return lines


def missed(scores: Sequence[Score]) -> list[str]:
    """Of each kind, dtype and severity that is missed: how far the fault moves what the tensor makes, and how far that may move."""
    kinds: dict[str, list[Score]] = {}
    for score in scores:
        if not score.found:
            kinds.setdefault(f"{score.kind} | {score.dtype} {score.severity}", []).append(score)
    lines = ["| fault | in | missed | moves it by | allowed |", "|---" * 5 + "|"]
    for kind, own in kinds.items():
        moved, allowed = (_span([getattr(score, name) for score in own]) for name in ("moved", "allowed"))
        lines.append(f"| {kind} | {len(own)} | {moved} | {allowed} |")
    return lines


def _span(sizes: Sequence[float]) -> str:
    least, most = f"{min(sizes):.1e}", f"{max(sizes):.1e}"
    return least if least == most else f"{least} to {most}"


def in_short(tensors: Sequence[Score], catalogue: Sequence[Score], claim: str) -> str:
    """The one sentence that README may say."""

    def placed(scores: Iterable[Score]) -> int:
        return sum(score.found and all(score.right.values()) and not score.invented for score in scores)

    full = [score for score in tensors if score.severity == "full"]
    parts = [
        f"{placed(full)} of {len(full)} tensors spoiled as a whole are named with the right class, layer, module and part and nothing else"
    ]
    for severity in SEVERITIES[1:]:
        for dtype in DTYPES:
            own = [score for score in tensors if (score.severity, score.dtype) == (severity, dtype)]
            what = {"unit": "one head, expert or channel zero", "1 %": "1 % off"}[severity]
            parts.append(f"{sum(score.found for score in own)} of {len(own)} are found with {what} in {dtype}")
    parts.append(f"{placed(catalogue)} of {len(catalogue)} faults of the catalogue under parallel layouts have their whole verdict")
    return f"{'; '.join(parts)}; false alarms in clean runs: {claim}."


def page(tensors: Sequence[Score], catalogue: Sequence[Score], seconds: float, command: str) -> str:
    """The scoreboard as Markdown; its last line is README's."""
    clean = json.loads(CALIBRATION.read_text())
    unders = [(dtype, under) for under, dtypes in COVERING.items() for dtype in dtypes]
    by = "; ".join(f"{name} {runs}" for name, runs in clean["clean"]["by"].items())
    rivals = DOCS / "rivals.md"
    lines = [
        "# Scoreboard",
        "",
        f"Written by `{command}` in {math.ceil(seconds / 60)} minutes on two cores; do not edit.",
        "",
        "## Spoiled tensors, one rank",
        "",
        f"Embedded model, both checkpoint layouts, layers {LAYERS[0]} and {LAYERS[1]} and what lies outside the layers; one batch of random",
        "tokens. full: the tensor's last dim turned round. unit: one head, expert or channel zero. 1 %: times 1.01. A cell is found/planted,",
        "then how many of those found have a wrong class (looked at where full), layer, module or part, and how many faults were named that",
        "are not there. Last column: the smallest severity of which every fault is found.",
        "",
        *table(tensors, [(dtype, severity) for dtype in DTYPES for severity in SEVERITIES], "always found (fp32, bf16)"),
        "",
        "### What is missed",
        "",
        "How far the fault moves what the tensor makes, in fp32, and how far that may move in its dtype (relative rms, of the whole). One number",
        f"of bf16 is rounded by up to {torch.finfo(torch.bfloat16).eps / 2:.1e} of itself. Norms are kept as w of 1 + w, so 1 % of w is less than 1 % of what they give.",
        "",
        *missed(tensors),
        "",
        "## Catalogue under parallel layouts",
        "",
        "By activations alone, at full severity; checkpoint layouts take turns. A cell is found/planted and what is wrong of class, layers,",
        "modules, parts and shard. `-`: can't exist there, or can't be seen (tests/faults/matrix.py has the reasons).",
        "",
        *table(catalogue, unders),
        "",
        "## Clean runs",
        "",
        f"`{clean['command']}`, {clean['minutes']} minutes. The allowance is {clean['allowed']:.0f} times the largest that the reference differs from",
        f"itself by; the furthest that a clean run went is {clean['largest']['whole']} times (a site as a whole), {clean['largest']['row']} (its worst token),",
        f"{clean['largest']['column']} (its worst channel) and {clean['largest']['scale']} (its scale); on the seeds that are counted, which did not",
        f"calibrate, {max(size for size in clean['clean']['furthest'].values() if isinstance(size, float))} times. Alarms on those: {clean['clean']['claim']}. Runs: {by}.",
        "",
        *([rivals.read_text().replace("# ", "## ", 1)] if rivals.exists() else []),
        "## In short",
        "",
        in_short(tensors, catalogue, clean["clean"]["claim"]),
        "",
    ]
    return "\n".join(lines)


@click.command()
@click.option(
    "--short", is_flag=True, help="Every tensor of one checkpoint layout 1 % off in fp32, and no table written: 0 if all are placed."
)
def main(short: bool) -> None:
    """Writes docs/scoreboard.md."""
    started = time.monotonic()
    if short:
        raise SystemExit(shortly())
    tasks = [partial(score, layout) for score in (score_catalogue, score_tensors) for layout in ("slime", "native")]
    with get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        catalogue, more, slime, native = pool.map(alone, tasks, chunksize=1)
    OUT.write_text(page([*slime, *native], [*catalogue, *more], time.monotonic() - started, "make scoreboard"))
    sys.stdout.write(OUT.read_text().splitlines()[-1] + "\n")


def shortly() -> int:
    """A subset for CI: what has to hold whatever else changes."""
    scores = score_tensors("slime", ("fp32",), ("1 %",))
    WORLDS.close()
    wrong = [score for score in scores if not score.found or not all(score.right.values()) or score.invented]
    for score in wrong:
        sys.stdout.write(f"{score}\n")
    sys.stdout.write(f"{len(scores) - len(wrong)} of {len(scores)} spoiled tensors placed, and nothing else named\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
