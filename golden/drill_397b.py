"""The scale drill, `make drill-397b`: Qwen3.5-397B-A17B in its real geometry, converted under PP 2 x EP 16 with E01 in it.

Both sides are sparse files of 805 GB each (the 397B model without its vision tower, with its MTP layer).  In two layers everything
but the routed experts is written whole, and of each of their 512 experts the first megabyte of gate, of up and of down; everything
else is a hole.  The audit runs as a user runs it, must name the one fault exactly, then agree with the right conversion, and take
less than fifteen minutes on two cores.  Removes what it wrote.  Exits with 70 when the verdict or the time is not as it should be.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.family import family_of
from bisect_hooks.parallel import Parallel
from bisect_hooks.table import Made, Rule
from large import BF16, Dense, Extents, Shapes, Watched, reference_shapes, values, watched, write_candidate, write_reference

FILLED = (3, 40)
MEGABYTE = 1 << 20
PARALLEL = Parallel(pp=2, ep=16)
EXPERTS, WIDTH = 512, 512 // 16
MINUTES, JOBS, NEEDED = 15, 2, 16 << 30
say = sys.stdout.write


class Sparse:
    """Some layers, and of their experts the first bytes of each chunk.  faulty: expert e holds e mod 32"""

    def __init__(self, shapes: Shapes, *, faulty: bool = False, filled: tuple[int, ...] = FILLED, kept: int = MEGABYTE) -> None:
        self.shapes, self.faulty, self.whole = shapes, faulty, Dense(shapes)
        self.filled, self.kept = filled, kept

    def reference(self, name: str) -> Extents:
        if not any(name.startswith(f"model.layers.{layer}.") for layer in self.filled):
            return
        if ".experts." not in name:
            yield from self.whole.reference(name)
            return
        (_, rows, columns), dtype = self.shapes[name]
        halves = 2 if name.endswith("gate_up_proj") else 1
        chunk = rows // halves * columns * dtype.itemsize
        for e in range(EXPERTS):
            for half in range(halves):
                yield (e * halves + half) * chunk, self._begin(name, e, half)

    def candidate(self, rule: Rule, made: Made, region: tuple[slice, ...]) -> Extents:
        if not (rule.site.in_layer and rule.site.layer in self.filled):
            return
        if not made.cut.expert:
            yield from self.whole.candidate(rule, made, region)
            return
        e = region[0].start % WIDTH if self.faulty else region[0].start
        yield 0, self._begin(rule.references[0], e, int(region[1].start > 0))

    def _begin(self, name: str, e: int, half: int) -> torch.Tensor:
        return values(f"{name} {e} {half}", (self.kept // BF16.itemsize,), BF16)


def main() -> int:
    """Prints what was written, what was found, and what it took."""
    config = json.loads((Path(__file__).parent / "397b" / "config.json").read_text())
    family = family_of(config)
    shapes = reference_shapes(family.reference_dimensions(config), mtp=True)
    broken = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if shutil.disk_usage(folder).free < NEEDED:
            say(f"{folder} has less than {NEEDED >> 30} GB free; TMPDIR puts it elsewhere\n")
            return 2
        reference, candidate = folder / "hf", folder / "torch_dist"
        started = time.perf_counter()
        write_reference(reference, config, shapes, Sparse(shapes))
        for faulty in (True, False):
            shutil.rmtree(candidate, ignore_errors=True)
            chunks = write_candidate(candidate, family, config, shapes, PARALLEL, Sparse(shapes, faulty=faulty))
            say(
                f"wrote {_sizes(reference)} of reference and {_sizes(candidate)} of {'faulty' if faulty else 'right'} candidate "
                f"in {chunks} chunks; {time.perf_counter() - started:.0f} s\n"
            )
            out = folder / f"report-{faulty}"
            command = ["audit", "--reference", str(reference), "--candidate", str(candidate), "--jobs", str(JOBS), "--out", str(out)]
            found = watched([sys.executable, "-m", "bisect_tool", *command])
            say(found.said)
            broken += judged(found, out, faulty=faulty)
            started = time.perf_counter()
        say(f"removes {folder}\n")
    say("".join(f"BROKEN: {line}\n" for line in broken) or "the drill holds\n")
    return 70 if broken else 0


def _sizes(folder: Path) -> str:
    stats = [file.stat() for file in folder.rglob("*") if file.is_file()]
    whole, kept = sum(one.st_size for one in stats), sum(one.st_blocks * 512 for one in stats)
    return f"{whole / 1e9:.1f} GB ({kept / 1e9:.1f} GB of it no hole, {len(stats)} files)"


def judged(found: Watched, out: Path, *, faulty: bool) -> list[str]:
    """What is not as it should be."""
    minutes = found.seconds / 60
    say(
        f"{'E01' if faulty else 'clean'}: {minutes:.1f} minutes (at most {MINUTES}) with --jobs {JOBS}, "
        f"peak memory {' + '.join(f'{peak / 1e9:.2f}' for peak in found.peaks)} GB, each process at its own peak\n"
    )
    broken = [f"{minutes:.1f} minutes"] if minutes > MINUTES else []
    if found.code != int(faulty):
        return [*broken, f"exit code {found.code}"]
    page = json.loads((out / "report.json").read_text())
    weights = next(stage for stage in page["stages"] if stage["name"] == "weights")
    say("".join(f"  {note}\n" for note in weights["notes"]))
    expected: list[dict[str, Any]] = []
    if faulty:
        expected = [{
            "class": "conversion", "layers": list(FILLED), "modules": ["experts"], "parts": ["fc1", "fc2"],
            "relation": {"kind": "duplicate", "map": f"e mod {WIDTH}", "modulus": WIDTH, "wrong": EXPERTS - WIDTH, "of": EXPERTS},
            "ep": list(range(1, PARALLEL.ep)), "pp": [0, 1],
        }]  # fmt: skip
    named = [
        {
            **{key: fault[key] for key in ("class", "layers", "modules", "parts")},
            "relation": {"kind": fault["relation"]["kind"], **fault["relation"]["detail"]},
            **{axis: fault["shard"].get(axis) for axis in ("ep", "pp")},
        }
        for fault in page["faults"]
    ]
    if named != expected or page["minor"]:
        broken.append(f"the verdict is {named}, minor {len(page['minor'])}, and should be {expected}")
    if weights["compared"]["experts"] != EXPERTS * 61:
        broken.append(f"compared {weights['compared']}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
