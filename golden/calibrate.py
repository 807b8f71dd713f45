"""How far clean runs go, by statistic, and how many raise an alarm: `make calibrate` writes golden/calibration.json.

Clean conversions on random token ids: by length, seed, dtype, checkpoint layout, parallel layout and model.  Some seeds say how
much of the noise the worst site uses; alarms are counted on others.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from bisect_hooks.parallel import Parallel
from models import Place, embedded, random_batch, real, tiny_families

from bisect_tool.forward import Judged
from bisect_tool.judge import Verdict
from bisect_tool.noise import MARGIN
from bisect_tool.ranks import WORLDS

OUT = Path(__file__).resolve().parent / "calibration.json"
LENGTHS = (1, 2, 29, 63, 64, 65, 257)
ONE, TP2, PP2 = Parallel(), Parallel(tp=2, sp=True), Parallel(pp=2)
EP4, MIXED, TP4, VPP2 = Parallel(ep=4), Parallel(tp=2, ep=2, etp=1, sp=True), Parallel(tp=4, sp=True), Parallel(pp=2, vpp=2)
STATISTICS = ("whole", "row", "column", "scale")
# the seeds that calibrate; alarms are counted on others
CALIBRATE = (0, 1)


@dataclass(frozen=True)
class Series:
    """Clean runs of the places of one model: parallel layouts, lengths and seeds, all with all."""

    places: Iterator[Place]
    parallels: tuple[Parallel, ...]
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]

    def judged(self) -> Iterator[tuple[Place, Parallel, int, int, list[Judged]]]:
        for place in self.places:
            for parallel in self.parallels:
                run = place.candidate(parallel)
                run.build()
                for seed in self.seeds:
                    for length in self.lengths:
                        batch = random_batch(seed, length, place.dims.vocabulary)
                        yield place, parallel, seed, length, list(place.bench(batch, run).one_pass().judged.values())


def series(folder: Path, seeds: int) -> list[Series]:
    """The embedded model in every layout and length, families and real weights in few."""
    counted = tuple(range(CALIBRATE[-1] + 1, CALIBRATE[-1] + 1 + seeds))
    return [
        Series(embedded(folder / "embedded"), (ONE, TP2), LENGTHS, (*CALIBRATE, *counted)),
        Series(embedded(folder / "layouts"), (PP2, EP4, MIXED, TP4, VPP2), LENGTHS, counted[:1]),
        Series(tiny_families(folder / "families"), (ONE, TP2), (65,), (*CALIBRATE, *counted[:1])),
        Series(real(folder / "real"), (ONE, Parallel(tp=3)), (65,), (*CALIBRATE, *counted[:1])),
    ]


def used(one: Judged) -> dict[str, float]:
    """Each statistic in units of the largest that the reference differs from itself by."""
    sizes = {"whole": one.whole} | {extreme.kind: extreme.ratio for extreme in one.extremes}
    return {statistic: size * MARGIN for statistic, size in sizes.items()}


def further(row: dict[str, Any], judged: Iterable[Judged], run: str = "") -> None:
    """Puts the furthest of each statistic, and where it was, into `row`."""
    for one in judged:
        for statistic, size in used(one).items():
            if size > row.get(statistic, 0.0):
                row |= {statistic: round(size, 2), f"{statistic}_at": f"{run}: {one.key}" if run else one.key}


@dataclass
class Found:
    """What clean runs did so far; written after every place, so that a run that is ended leaves what it had.

    runs  of the seeds that calibrate, the furthest by statistic · furthest  the same over all counted runs
    """

    command: str
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    furthest: dict[str, Any] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)

    def calibrate(self, name: str, judged: Iterable[Judged]) -> None:
        further(self.runs.setdefault(name, dict.fromkeys(STATISTICS, 0.0)), judged)

    def count(self, name: str, run: str, judged: Sequence[Judged]) -> None:
        self.counted[name] = self.counted.get(name, 0) + 1
        further(self.furthest, judged, run)
        self.alarms += [f"{run}: {one.key} {one.verdict.value}" for one in judged if one.verdict is not Verdict.AGREES][:1]

    @property
    def claim(self) -> str:
        runs = sum(self.counted.values())
        if not runs:
            return "no run was counted"
        return f"{len(self.alarms)} of {runs}" + ("" if self.alarms else f", at most {3 / runs:.1%} at 95 %")

    def write(self, seconds: float) -> None:
        page = {
            "command": self.command,
            "minutes": math.ceil(seconds / 60),
            "unit": "the largest that the reference differs from itself by, over its re-evaluations",
            "allowed": MARGIN,
            "largest": {statistic: max((row[statistic] for row in self.runs.values()), default=0.0) for statistic in STATISTICS},
            "clean": {
                "runs": sum(self.counted.values()),
                "by": self.counted,
                "furthest": self.furthest,
                "alarms": self.alarms,
                "claim": self.claim,
            },
            "runs": self.runs,
        }
        OUT.write_text(json.dumps(page, indent=1) + "\n")


@click.command()
@click.option("--seeds", default=1, show_default=True, help="Seeds, other than those that calibrate, on which alarms are counted.")
def main(seeds: int) -> None:
    """Writes golden/calibration.json."""
    found, started = Found(shlex.join(["python", "golden/calibrate.py", *sys.argv[1:]])), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        last = ""
        for one in series(Path(name), seeds):
            for place, parallel, seed, length, judged in one.judged():
                if str(place) != last:
                    sys.stdout.write(f"{time.monotonic() - started:5.0f} s  {last or 'begun'}: {found.claim}\n")
                    sys.stdout.flush()
                    last = str(place)
                run = f"{place} {parallel} {length} tokens"
                if seed in CALIBRATE:
                    found.calibrate(run, judged)
                else:
                    found.count(str(place), f"{run} seed {seed}", judged)
                found.write(time.monotonic() - started)
    WORLDS.close()
    sys.stdout.write(f"largest {json.loads(OUT.read_text())['largest']} of {MARGIN:.0f} allowed; alarms: {found.claim}\n")


if __name__ == "__main__":
    main()
