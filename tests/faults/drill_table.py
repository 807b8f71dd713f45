"""docs/drill.md: which cells of the matrix came out with their whole verdict.  `make drill` writes it from what pytest reports."""

from __future__ import annotations

from collections.abc import Mapping

from matrix import DTYPES, FAULTS, UNDERS, Cells, Place

MARKS = {"passed": "yes", "failed": "**no**"}


def name_of(plant: str, at: Place) -> str:
    """The cell's name in a report."""
    return f"{plant} {at.layout} {at.under} {at.dtype}"


def page(outcomes: Mapping[str, str], seconds: float) -> str:
    """The table as Markdown: a row for each fault and checkpoint layout, a column for each parallel layout and dtype."""
    reasons: dict[str, int] = {}

    def cell(made: Cells, at: Place) -> str:
        absent, unseen = made.absent(at), made.unseen(at)
        if absent:
            return f"[{reasons.setdefault(absent, len(reasons) + 1)}]"
        mark = MARKS.get(outcomes.get(name_of(made.plant, at), ""), "not run")
        return f"{mark} [{reasons.setdefault(unseen, len(reasons) + 1)}]" if unseen else mark

    heads = [f"{under} {dtype}" for under in UNDERS for dtype in DTYPES]
    lines = ["| fault | checkpoint | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    for made in FAULTS:
        for layout in ("slime", "native"):
            row = [cell(made, Place(layout, under, dtype)) for under in UNDERS for dtype in DTYPES]
            lines.append(f"| {made.plant} | {layout} | " + " | ".join(row) + " |")
    right = sum(outcome == "passed" for outcome in outcomes.values())
    return "\n".join(
        [
            "# The drill",
            "",
            f"Written by `make drill` in {seconds / 60:.0f} minutes; do not edit. Every fault of the catalogue that the embedded model can carry, under",
            "every parallel layout, in both checkpoint layouts and dtypes, located by activations alone (`--stages inputs,forward`). yes: the",
            "whole verdict (class, layers, modules, parts, shard, relation), and nothing else. A number: why there is no such cell, or, beside a",
            f"yes, why nothing is to be seen and nothing was said. {right} of {len(outcomes)} cells are as they have to be.",
            "",
            *lines,
            "",
            *(f"{number}. {reason}" for reason, number in reasons.items()),
            "",
        ]
    )
