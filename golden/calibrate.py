"""How far clean runs go, by statistic, and how many raise an alarm: `make calibrate` writes golden/calibration.json.

Clean conversions of the embedded model on random token ids, by length, seed, dtype, checkpoint layout and parallel layout.  Some
seeds say how much of the noise the worst site uses; alarms are counted on others.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from bisect_hooks.family import LAYOUTS, CheckpointLayout, Dimensions, family_of
from bisect_hooks.hf import Reference
from bisect_hooks.parallel import Parallel

from bisect_tool import golden
from bisect_tool.args import plain
from bisect_tool.candidate import CandidateRun
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.conversion import convert
from bisect_tool.forward import Bench, Judged
from bisect_tool.hf_directory import open_hf
from bisect_tool.judge import Verdict
from bisect_tool.ladder import DTYPES
from bisect_tool.noise import MARGIN
from bisect_tool.prompts import Batch
from bisect_tool.ranks import WORLDS
from bisect_tool.recording import Recording
from bisect_tool.reference import load_reference, record_reference

OUT = Path(__file__).resolve().parent / "calibration.json"
LENGTHS = (1, 2, 63, 64, 65, 257)
PARALLEL = (Parallel(), Parallel(tp=2, sp=True))
STATISTICS = ("whole", "row", "column")


@dataclass(frozen=True)
class Place:
    """One dtype and checkpoint layout of the embedded model: the reference, and clean candidates that stay built."""

    dtype: str
    layout: CheckpointLayout
    reference: Reference
    dims: Dimensions
    runs: dict[str, CandidateRun]

    def bench(self, batch: Batch, parallel: str, out: Path) -> Bench:
        run = self.runs[parallel]
        made = out.exists()
        recording = Recording(out) if made else record_reference(self.reference, batch, out, model="", layout=self.layout)
        run.batch = batch
        return Bench(recording, run, self.dims)


def places(folder: Path, parallels: tuple[Parallel, ...] = PARALLEL, layouts: tuple[CheckpointLayout, ...] = LAYOUTS) -> Iterator[Place]:
    """Every dtype and checkpoint layout, built once."""
    directory = open_hf(golden.reference())
    family = family_of(directory.config)
    dims = family.reference_dimensions(directory.config)
    for layout in layouts:
        convert(directory.path, folder / layout, layout, Parallel(), None)
        checkpoint = open_checkpoint(folder / layout)
        for name, dtype in DTYPES.items():
            reference, _ = load_reference(directory, family, layout, dtype, "cpu")
            runs = {}
            for parallel in parallels:
                run = CandidateRun(family, plain(checkpoint.args), layout, checkpoint.path, parallel, dtype, "cpu", Batch(((1,),)))
                run.build()
                runs[str(parallel)] = run
            yield Place(name, layout, reference, dims, runs)


def random_batch(seed: int, length: int, vocabulary: int) -> Batch:
    """Two prompts: one of this length, and one of half of it."""
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    lengths = {length, max(1, length // 2)}
    return Batch(tuple(tuple(torch.randint(3, vocabulary, (n,), generator=generator).tolist()) for n in sorted(lengths)))


def used(one: Judged) -> dict[str, float]:
    """Each statistic in units of its allowance."""
    return {"whole": one.whole} | {extreme.kind: extreme.ratio for extreme in one.extremes}


@dataclass
class Found:
    """What clean runs did so far; written after every place, so that a run that is ended leaves what it had."""

    command: str
    runs: dict[str, dict[str, Any]]
    clean: int = 0
    alarms: int = 0

    def calibrate(self, name: str, judged: Iterable[Judged]) -> None:
        row = self.runs.setdefault(name, dict.fromkeys(STATISTICS, 0.0))
        for one in judged:
            for statistic, size in used(one).items():
                if size * MARGIN > row[statistic]:
                    row |= {statistic: round(size * MARGIN, 2), f"{statistic}_at": one.key}

    def count(self, judged: Iterable[Judged]) -> None:
        self.clean += 1
        self.alarms += any(one.verdict is not Verdict.AGREES for one in judged)

    def write(self) -> str:
        claim = f"{self.alarms} of {self.clean}" + ("" if self.alarms or not self.clean else f", at most {3 / self.clean:.1%} at 95 %")
        page = {
            "command": self.command,
            "unit": "the largest that the reference differs from itself by, over its re-evaluations",
            "allowed": MARGIN,
            "largest": {statistic: max(row[statistic] for row in self.runs.values()) for statistic in STATISTICS},
            "clean": {"runs": self.clean, "alarms": self.alarms, "claim": claim},
            "runs": self.runs,
        }
        OUT.write_text(json.dumps(page, indent=1) + "\n")
        return f"largest {page['largest']} of {MARGIN:.0f} allowed; alarms: {claim}\n"


@click.command()
@click.option("--seeds", default=1, show_default=True, help="Seeds that calibrate.")
@click.option("--count", default=2, show_default=True, help="Other seeds, on which alarms are counted.")
@click.option("--layout", "layouts", multiple=True, type=click.Choice(LAYOUTS), default=LAYOUTS, help="Checkpoint layouts.")
def main(seeds: int, count: int, layouts: tuple[CheckpointLayout, ...]) -> None:
    """Writes golden/calibration.json."""
    found = Found(shlex.join(["python", "golden/calibrate.py", *sys.argv[1:]]), {})
    with tempfile.TemporaryDirectory() as name:
        for place in places(Path(name), layouts=layouts):
            for seed, length in itertools.product(range(seeds + count), LENGTHS):
                batch = random_batch(seed, length, place.dims.vocabulary)
                with tempfile.TemporaryDirectory() as folder:
                    for parallel in place.runs:
                        judged = place.bench(batch, parallel, Path(folder) / "recording").one_pass().judged.values()
                        if seed < seeds:
                            found.calibrate(f"{place.dtype} {place.layout} {parallel} {length} tokens", judged)
                        else:
                            found.count(judged)
            sys.stdout.write(f"{place.dtype} {place.layout}: {found.write()}")
            sys.stdout.flush()
    WORLDS.close()


if __name__ == "__main__":
    main()
