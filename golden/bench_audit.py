"""What an audit costs, as ratios taken in one run on this machine, each beside its bound: `make bench-audit`.

A dense pair is written first (about 4 GB a side, a Qwen3.5-MoE of 64 layers), its candidate with E01 in every layer, and thinner
pairs of 4 and 16 layers.  What is compared takes turns, each in a process of its own whose clock starts when Python and torch are
there; the best of each counts, and rounds go on (up to a few) while a bound is not met: a busy machine is no slow program.  Exits
with 70 when a bound is broken.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from bisect_hooks.family import family_of
from bisect_hooks.parallel import Parallel
from large import Dense, reference_shapes, watched, write_candidate, write_reference

LAYERS = (4, 16, 64)
JOBS = (1, 2)
EP, ROUNDS = 4, (3, 12)
SPEED, FLAT, FAULTY, SEARCHED = 0.70, 0.10, 2.0, 2.0
PARALLEL = Parallel(ep=EP)
say = sys.stdout.write


def geometry(layers: int) -> dict[str, Any]:
    """About 64 MB a layer: sixteen experts, everything else in proportion."""
    config: dict[str, Any] = json.loads((Path(__file__).parent / "config.json").read_text())
    config["text_config"] |= {
        "num_hidden_layers": layers, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4), "hidden_size": 1024,
        "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 8, "linear_key_head_dim": 64,
        "linear_num_value_heads": 16, "linear_value_head_dim": 64, "moe_intermediate_size": 512, "num_experts": 16,
        "shared_expert_intermediate_size": 512, "vocab_size": 16384, "mtp_num_hidden_layers": 0,
    }  # fmt: skip
    return config


@dataclass(frozen=True)
class Pair:
    """A reference and its conversion."""

    folder: Path
    layers: int

    @property
    def reference(self) -> Path:
        return self.folder / f"hf-{self.layers}"

    @property
    def candidate(self) -> Path:
        return self.folder / f"torch_dist-{self.layers}"

    @property
    def faulty(self) -> Path:
        return self.folder / f"torch_dist-{self.layers}-e01"

    def write(self, *, faulty: bool = False) -> int:
        """Bytes of a side.  faulty: with a second candidate, E01 in all its layers"""
        config = geometry(self.layers)
        family = family_of(config)
        dims = family.reference_dimensions(config)
        shapes = reference_shapes(dims, mtp=False)
        size = write_reference(self.reference, config, shapes, Dense(shapes), shard=1 << 30)
        write_candidate(self.candidate, family, config, shapes, PARALLEL, Dense(shapes))
        if faulty:
            local = [e % (dims.experts // EP) for e in range(dims.experts)]
            write_candidate(self.faulty, family, config, shapes, PARALLEL, Dense(shapes, local))
        return size

    def files(self) -> list[Path]:
        return [file for side in (self.reference, self.candidate) for file in sorted(side.rglob("*")) if file.is_file()]

    def audit(self, jobs: int, *, faulty: bool = False) -> dict[str, Any]:
        """One audit in a process of its own: what `one` says, and the peaks of every process it was made of."""
        candidate = self.faulty if faulty else self.candidate
        command = [sys.executable, __file__, str(self.reference), str(candidate), str(jobs), str(self.folder / "report")]
        found = watched(command)
        answer: dict[str, Any] = json.loads(found.said.splitlines()[-1])
        return answer | {"peaks": found.peaks}


def cat(files: list[Path]) -> float:
    """Seconds of `cat FILES > /dev/null`."""
    started = time.perf_counter()
    with Path(os.devnull).open("wb") as nothing:
        subprocess.run(["cat", *map(str, files)], stdout=nothing, check=True)
    return time.perf_counter() - started


def one(reference: str, candidate: str, jobs: str, out: str) -> int:
    """An audit in this process: seconds, verdict, memory that opening took, bytes of the reference mapped in each step."""
    from bisect_tool import places, weights
    from bisect_tool.crew import Work
    from bisect_tool.ladder import Job, climb

    step, mapped = ["open"], dict[str, int]()
    work_of = weights.work_of

    def counted(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counting(file: Path, *more: Any) -> torch.Tensor:
            found = read(file, *more)
            if str(file).startswith(reference):
                mapped[step[0]] = mapped.get(step[0], 0) + found.nbytes
            return found

        return counting

    def stepped(sides: weights.Sides) -> Work:
        work = work_of(sides)

        def answer(name: str, argument: Any) -> Any:
            step[0] = name.rpartition(" ")[2]
            return work(name, argument)

        return answer

    if jobs == "1":  # what other processes map is not seen here
        vars(places).update({name: counted(vars(places)[name]) for name in ("_view", "_copy")})
        vars(weights)["work_of"] = stepped
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    job = Job(Path(reference), Path(candidate), stages=("weights",), jobs=int(jobs), out=Path(out))
    auditor = job.sides.auditor("reference-candidate")
    for name in auditor.row_of:
        auditor.candidate.tensor(name)
    opened = psutil.Process().memory_info().rss - before
    page = climb(job).to_json()
    seconds = time.perf_counter() - started
    faults = [(fault["modules"], fault["relation"]["kind"], len(fault["layers"])) for fault in page["faults"]]
    say(json.dumps({"seconds": seconds, "verdict": page["verdict"], "faults": faults, "opened": opened, "mapped": mapped}) + "\n")
    return 0


class Bounds:
    """Prints each figure beside its bound, and remembers whether one was broken."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def check(self, what: str, value: float, fine: bool, bound: str, more: str = "") -> None:
        say(f"{what}: {value:.2f} ({bound}){'' if fine else '  BROKEN'}{'; ' + more if more else ''}\n")
        if not fine:
            self.broken.append(what)


def memory(pairs: list[Pair], bounds: Bounds) -> None:
    """The largest process's peak by number of layers, without what it holds of the metadata.

    Of several processes only the largest counts: on few layers the others may come too late to get any work.
    """
    for jobs in JOBS:
        flat = []
        for pair in pairs:
            answer = pair.audit(jobs)
            peaks, opened = answer["peaks"], answer["opened"]
            flat.append(max(peaks) - opened)
            every = " + ".join(f"{peak / 1e6:.0f}" for peak in peaks)
            say(f"  {pair.layers} layers, --jobs {jobs}: peaks of {every} MB, {opened / 1e6:.1f} MB of the largest is metadata\n")
        what = f"peak memory, {', '.join(str(pair.layers) for pair in pairs)} layers, --jobs {jobs}, most by least"
        bounds.check(what, max(flat) / min(flat), max(flat) <= (1 + FLAT) * min(flat), f"at most {1 + FLAT}")


def timed(pair: Pair, bounds: Bounds) -> None:
    """The clean audit against `cat`, and the one with E01 in every layer against the clean one."""
    files = pair.files()
    size = sum(file.stat().st_size for file in files)
    cat([*files, *pair.faulty.rglob("*.distcp")])
    best: dict[Any, float] = {}
    mapped: dict[str, int] = {}

    def ratios() -> tuple[dict[int, float], dict[int, float]]:
        return {jobs: best["cat"] / best[jobs, False] for jobs in JOBS}, {jobs: best[jobs, True] / best[jobs, False] for jobs in JOBS}

    for i in range(ROUNDS[1]):
        best["cat"] = min(cat(files), best.get("cat", math.inf))
        for jobs, broken in itertools.product(JOBS, (False, True)):
            answer = pair.audit(jobs, faulty=broken)
            assert answer["faults"] == ([[["experts"], "duplicate", pair.layers]] if broken else []), answer
            best[jobs, broken] = min(answer["seconds"], best.get((jobs, broken), math.inf))
            mapped = answer["mapped"] or mapped
        speed, slower = ratios()
        if i + 1 >= ROUNDS[0] and min(speed.values()) >= SPEED and max(slower.values()) <= FAULTY:
            break
    say(f"{size / 1e9:.1f} GB on both sides; cat A B > /dev/null, warm: {best['cat']:.2f} s, {size / best['cat'] / 1e9:.1f} GB/s\n")
    for jobs in JOBS:
        said = f"{best[jobs, False]:.2f} s, {size / best[jobs, False] / 1e9:.1f} GB/s"
        bounds.check(f"bit-equal audit, --jobs {jobs}, speed of cat", speed[jobs], speed[jobs] >= SPEED, f"at least {SPEED}", said)
    for jobs in JOBS:
        what, said = f"E01 in every layer, --jobs {jobs}, clean audits it takes", f"{best[jobs, True]:.2f} s"
        bounds.check(what, slower[jobs], slower[jobs] <= FAULTY, f"at most {FAULTY}", said)
    whole = sum(file.stat().st_size for file in pair.reference.rglob("*.safetensors"))
    searched = sum(count for step, count in mapped.items() if step not in ("open", "compare")) / whole
    steps = ", ".join(f"{step} {count / whole:.2f}" for step, count in mapped.items())
    bounds.check("the search reads the reference so many times", searched, searched <= SEARCHED, f"at most {SEARCHED}", steps)


def main() -> int:
    """Prints one line a figure."""
    if len(sys.argv) > 1:
        return one(*sys.argv[1:5])
    bounds = Bounds()
    with tempfile.TemporaryDirectory() as folder:
        pairs = [Pair(Path(folder), layers) for layers in LAYERS]
        for pair in pairs:
            started = time.perf_counter()
            size = pair.write(faulty=pair is pairs[-1])
            say(f"wrote {pair.layers} layers, {size / 1e9:.2f} GB a side, in {time.perf_counter() - started:.0f} s\n")
        memory(pairs, bounds)
        timed(pairs[-1], bounds)
    say("every bound holds\n" if not bounds.broken else f"broken: {', '.join(bounds.broken)}\n")
    return 70 if bounds.broken else 0


if __name__ == "__main__":
    sys.exit(main())
