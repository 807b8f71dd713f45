"""How much of its tolerance a clean run uses, and what the forward stage costs in forwards of the reference: `make bench`.

Clean conversions of the embedded model, both checkpoint layouts, every parallel layout of the drill.  Times are ratios taken in
one run on this machine, so that they can be compared.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from bisect_hooks.family import LAYOUTS, family_of
from bisect_hooks.hf import Tokenizer
from bisect_hooks.parallel import Parallel

from bisect_tool import golden
from bisect_tool.args import plain
from bisect_tool.candidate import CandidateRun
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.conversion import convert
from bisect_tool.forward import Bench
from bisect_tool.hf_directory import open_hf
from bisect_tool.noise import MARGIN
from bisect_tool.prompts import make_batch, read_prompts
from bisect_tool.ranks import WORLDS
from bisect_tool.reference import Wanted
from bisect_tool.reference_recording import record_reference

PARALLEL = (Parallel(), Parallel(tp=2, sp=True), Parallel(pp=2), Parallel(ep=4), Parallel(tp=2, ep=2, etp=1, sp=True))


def main() -> int:
    """Prints one line a layout."""
    directory = open_hf(golden.reference())
    family = family_of(directory.config)
    dims = family.reference_dimensions(directory.config)
    prompts = read_prompts(str(golden.folder() / "prompts.jsonl"))
    batch = make_batch(prompts, lambda: Tokenizer(directory.path), vocabulary=dims.vocabulary, positions=dims.positions)
    say = sys.stdout.write
    say(
        f"{batch.tokens} tokens; 'used' is the worst site's difference in units of its tolerance ({MARGIN:.0f} x the reference's own noise)\n"
    )
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            wanted = Wanted(directory, family, layout, torch.float32)
            reference, _ = wanted.load()
            reference.forward(batch.ids(), batch.mask())
            started = time.perf_counter()
            reference.forward(batch.ids(), batch.mask())
            forward = time.perf_counter() - started
            started = time.perf_counter()
            recording = record_reference(wanted, reference, batch, Path(folder) / f"{layout}-recording")
            recorded = (time.perf_counter() - started) / forward
            out = Path(folder) / layout
            convert(directory.path, out, layout, Parallel(), None)
            checkpoint = open_checkpoint(out)
            say(f"{layout}: recording the reference with its noise costs {recorded:.0f} of its forwards\n")
            for parallel in PARALLEL:
                run = CandidateRun(family, plain(checkpoint.args), layout, checkpoint.path, parallel, torch.float32, "cpu", batch)
                run.build()
                bench = Bench(recording, run, dims)
                bench.one_pass()
                started = time.perf_counter()
                judged = bench.one_pass().judged
                cost = (time.perf_counter() - started) / forward
                nearest = max(judged.values(), key=lambda one: one.ratio)
                worst = max(worst, nearest.ratio)
                exact = sum(one.ratio == 0 for one in judged.values())
                say(
                    f"  {parallel!s:<22} used {nearest.ratio:.2f} at {nearest.key}; {exact} of {len(judged)} exact; a pass costs {cost:.0f} forwards\n"
                )
    WORLDS.close()
    say(f"worst of all: {worst:.2f}\n")
    return 0 if math.isfinite(worst) else 70


if __name__ == "__main__":
    sys.exit(main())
