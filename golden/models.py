"""Clean candidates to measure on: the embedded model, a tiny one of every family, and SmolLM2's real weights where they are installed.

What `make calibrate` and `make scoreboard` have in common.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import LAYOUTS, CheckpointLayout, Dimensions, Family, family_of
from bisect_hooks.hf import Reference
from bisect_hooks.parallel import Parallel

from bisect_tool import golden
from bisect_tool.args import plain
from bisect_tool.candidate import CandidateRun
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.conversion import convert
from bisect_tool.forward import Bench
from bisect_tool.hf_directory import HuggingFaceDirectory, open_hf
from bisect_tool.ladder import DTYPES
from bisect_tool.prompts import Batch
from bisect_tool.recording import Recording
from bisect_tool.reference import Wanted
from bisect_tool.reference_recording import record_reference

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "tests/faults")]


@dataclass
class Place:
    """One model in one dtype and checkpoint layout: its reference, and candidates of its clean conversion."""

    model: str
    dtype: str
    layout: CheckpointLayout
    directory: HuggingFaceDirectory
    checkpoint: Path
    folder: Path
    family: Family = field(init=False)
    dims: Dimensions = field(init=False)
    wanted: Wanted = field(init=False, repr=False)
    reference: Reference = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.family = family_of(self.directory.config)
        self.dims = self.family.reference_dimensions(self.directory.config)
        self.wanted = Wanted(self.directory, self.family, self.layout, DTYPES[self.dtype])
        self.reference, _ = self.wanted.load()

    def __str__(self) -> str:
        return f"{self.model} {self.dtype} {self.layout}"

    def candidate(self, parallel: Parallel) -> CandidateRun:
        """Not built yet."""
        args = plain(open_checkpoint(self.checkpoint).args)
        return CandidateRun(self.family, args, self.layout, self.checkpoint, parallel, DTYPES[self.dtype], "cpu", Batch(((1,),)))

    def recording(self, batch: Batch) -> Recording:
        """The reference's, with its noise; made once a batch."""
        name = hashlib.sha256(repr(batch.rows).encode()).hexdigest()[:16]
        out = self.folder / f"recording-{self.dtype}-{self.layout}-{name}"
        return Recording(out) if out.exists() else record_reference(self.wanted, self.reference, batch, out)

    def bench(self, batch: Batch, run: CandidateRun) -> Bench:
        run.batch = batch
        return Bench(self.recording(batch), run, self.dims)


def embedded(folder: Path, layouts: Iterable[str] = LAYOUTS, dtypes: Iterable[str] = tuple(DTYPES)) -> Iterator[Place]:
    """The embedded model."""
    yield from _places("embedded", golden.reference(), folder, layouts, dtypes)


def tiny_families(folder: Path) -> Iterator[Place]:
    """A tiny model of every family, in every dtype and layout that the family has."""
    import tiny
    from family_cases import FAMILIES

    for traits in FAMILIES:
        reference = tiny.make(traits.family, folder / traits.family / "reference")
        yield from _places(traits.family, reference, folder / traits.family, traits.layouts)


def real(folder: Path) -> Iterator[Place]:
    """SmolLM2-135M; nothing where its package is not installed."""
    import real as weights

    folder.mkdir(parents=True, exist_ok=True)
    try:
        reference = weights.hugging_face(folder)
    except UsageError as error:
        sys.stderr.write(f"left out: {error}\n")
        return
    yield from _places("SmolLM2-135M", reference, folder, ("native",))


def _places(model: str, reference: Path, folder: Path, layouts: Iterable[str], dtypes: Iterable[str] = tuple(DTYPES)) -> Iterator[Place]:
    directory = open_hf(reference)
    for layout in (one for one in LAYOUTS if one in layouts):
        checkpoint = folder / f"torch_dist-{layout}"
        convert(directory.path, checkpoint, layout, Parallel(), None)
        for dtype in dtypes:
            yield Place(model, dtype, layout, directory, checkpoint, folder)


def random_batch(seed: int, length: int, vocabulary: int) -> Batch:
    """Two prompts: one of this length, and one of half of it."""
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    lengths = {length, max(1, length // 2)}
    return Batch(tuple(tuple(torch.randint(3, vocabulary, (n,), generator=generator).tolist()) for n in sorted(lengths)))
