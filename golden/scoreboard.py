"""Which faults are found, down to which severity, and placed how: `make scoreboard` writes docs/scoreboard.md.

Every tensor of one linear and one full attention layer, and those outside the layers, is spoiled in memory on one rank, in fp32
and bf16: turned round (full), one head, expert or channel set to zero (unit), scaled by 1 %.  A fault counts as placed when the
first site named is the tensor's own, layer, module and part, and nothing else is named.  The files are right all the while, so
classes are not counted here: the drill does that.  Clean runs are those of golden/calibration.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
from bisect_hooks.family import LAYOUTS
from bisect_hooks.parallel import Parallel
from bisect_hooks.table import Rule
from calibrate import OUT as CALIBRATION
from calibrate import Place, places, random_batch

from bisect_tool import golden
from bisect_tool.flow import word
from bisect_tool.forward import Bench, to_finding
from bisect_tool.hf_directory import HuggingFaceDirectory, open_hf
from bisect_tool.ranks import WORLDS

OUT = Path(__file__).resolve().parent.parent / "docs" / "scoreboard.md"
SEVERITIES = ("full", "unit", "1 %")
LAYERS = (2, 3)
LENGTH, SEED = 65, 7


@dataclass
class Row:
    """One module and part: severity → (found, placed, invented, of)."""

    counts: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, dtype: str, severity: str, found: bool, placed: bool, invented: int) -> None:
        count = self.counts.setdefault((dtype, severity), [0, 0, 0, 0])
        for i, one in enumerate((found, placed, invented, 1)):
            count[i] += int(one)

    def cell(self, dtype: str, severity: str) -> str:
        found, placed, invented, of = self.counts.get((dtype, severity), [0, 0, 0, 0])
        return f"{found}/{of} found, {placed} placed" + (f", {invented} invented" if invented else "") if of else "-"

    def smallest(self, dtype: str) -> str:
        held = [
            severity
            for severity in SEVERITIES
            if self.counts.get((dtype, severity), [0, 0, 0, 1])[0] == self.counts.get((dtype, severity), [0, 0, 0, 1])[3]
        ]
        return held[-1] if held else "none"


def unit(rule: Rule, bench: Bench) -> tuple[int, int]:
    """Rows of one head, expert or channel: the first; of the embedding, those of a token that is there."""
    if rule.site.module == "embedding":
        token = bench.run.batch.rows[0][0]
        return token, token + 1
    return 0, bench.dims.head_width if word(rule.site) == "attention.qkv" else 1


def spoil(bench: Bench, rule: Rule, key: str, severity: str) -> None:
    """Plants one fault in memory."""
    if severity == "full":
        bench.run.edit(key)
    elif severity == "unit":
        bench.run.edit(key, unit(rule, bench), 0.0)
    else:
        bench.run.edit(key, None, 1.01)


def score(place: Place, directory: HuggingFaceDirectory, table: dict[str, Row], folder: Path) -> None:
    """Every fault of one dtype and checkpoint layout."""
    (parallel,) = place.runs
    bench = place.bench(random_batch(SEED, LENGTH, place.dims.vocabulary), parallel, folder / f"{place.dtype}-{place.layout}")
    rules = bench.run.family.rules(place.dims, place.layout, directory.names, mtp=False)
    for rule in rules:
        if rule.site.in_layer and rule.site.layer not in LAYERS:
            continue
        for made in rule.candidates:
            for severity in SEVERITIES:
                spoil(bench, rule, made.name, severity)
                located = bench.locate()
                named = [str(to_finding(bench, located, site).site) for site in sorted(located.sites)]
                bench.run.put_reference(directory.path, [made.name])
                right = str(rule.site)
                row = table.setdefault(word(rule.site), Row())
                row.add(place.dtype, severity, bool(named), named[:1] == [right], sum(name != right for name in named))
    left = bench.one_pass().differing()
    assert not left, f"mended, the candidate still differs at {sorted(left)[:3]}"


def page(table: dict[str, Row], seconds: float, command: str) -> str:
    """The table as Markdown, with its last line for README."""
    dtypes = ("fp32", "bf16")
    heads = [f"{dtype} {severity}" for dtype in dtypes for severity in SEVERITIES]
    lines = [
        "# Scoreboard",
        "",
        f"Written by `{command}` in {seconds / 60:.0f} minutes; do not edit. Embedded model, one rank, layers {LAYERS[0]} and {LAYERS[1]} and what",
        "lies outside the layers; one batch of random tokens. full: the tensor's last dim turned round; unit: one head, expert or channel",
        "zero; 1 %: times 1.01. placed: the first site named is the right layer, module and part. Classes and",
        "parallel layouts are not counted here; `make drill` asserts them.",
        "",
        "| module | " + " | ".join(heads) + " | smallest always found (fp32, bf16) |",
        "|---" * (len(heads) + 2) + "|",
    ]
    totals = {head: [0, 0, 0, 0] for head in heads}
    for name, row in table.items():
        cells = [row.cell(dtype, severity) for dtype in dtypes for severity in SEVERITIES]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {row.smallest('fp32')}, {row.smallest('bf16')} |")
        for (dtype, severity), counts in row.counts.items():
            totals[f"{dtype} {severity}"] = [a + b for a, b in zip(totals[f"{dtype} {severity}"], counts, strict=True)]
    lines.append("| **all** | " + " | ".join(f"{f}/{of} found, {p} placed, {i} invented" for f, p, i, of in totals.values()) + " | |")
    clean = json.loads(CALIBRATION.read_text())
    found = "; ".join(f"{head} {counts[0]} of {counts[3]} found, {counts[1]} placed" for head, counts in totals.items())
    return "\n".join(
        [*lines, "", f"False alarms in clean runs (`{clean['command']}`): {clean['clean']['claim']}.", "", f"In short: {found}.", ""]
    )


@click.command()
@click.option("--layout", "layouts", multiple=True, type=click.Choice(LAYOUTS), default=LAYOUTS, help="Checkpoint layouts.")
def main(layouts: tuple[str, ...]) -> None:
    """Writes docs/scoreboard.md."""
    started, table = time.monotonic(), dict[str, Row]()
    directory = open_hf(golden.reference())
    with tempfile.TemporaryDirectory() as name:
        for place in places(Path(name), (Parallel(),), layouts):  # type: ignore[arg-type]
            score(place, directory, table, Path(name))
            sys.stdout.write(f"{place.dtype} {place.layout}: {time.monotonic() - started:.0f} s\n")
            sys.stdout.flush()
    WORLDS.close()
    more = "" if set(layouts) == set(LAYOUTS) else "".join(f" --layout {layout}" for layout in layouts)
    OUT.write_text(page(table, time.monotonic() - started, f"python golden/scoreboard.py{more}"))
    sys.stdout.write(OUT.read_text().splitlines()[-1] + "\n")


if __name__ == "__main__":
    main()
