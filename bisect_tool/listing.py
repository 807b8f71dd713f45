"""taps and hash: what is listened to, and one line a tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bisect_hooks.family import LAYOUTS, Derived, family_of
from bisect_hooks.tap import Tap

from bisect_tool.args import plain
from bisect_tool.candidate import CandidateRun
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.compare import bits
from bisect_tool.hf_directory import open_hf, read_config
from bisect_tool.ladder import Job
from bisect_tool.prompts import Batch

Fired = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Column:
    """One side's taps by key, and how often each fired, by tap id (None: nothing was run)."""

    name: str
    taps: Mapping[str, Tap]
    fired: Fired | None = None

    def shown(self, key: str) -> str:
        tap = self.taps.get(key)
        if tap is None:
            return "-"
        times = None if self.fired is None else self.fired.get(tap.id, 0)
        return _shown(tap) + {None: "", 0: "   did not fire", 1: "   fired"}.get(times, f"   fired {times} times")

    @property
    def summary(self) -> str:
        assert self.fired is not None
        found = {tap.id: f"{tap.site} at {tap.path}" for tap in self.taps.values()}
        silent = [where for tap, where in found.items() if self.fired.get(tap, 0) != 1]
        return f"{self.name}: {len(found) - len(silent)} of {len(found)} taps fired once" + (
            f"; not so: {', '.join(silent)}" * bool(silent)
        )


def taps(reference: Path, candidate: Path | None, fire: bool, prompts: str | None) -> str:
    """Sites in compute order with the module paths and layouts of both sides; `-` where a side has no such place.

    Without a candidate every layout that a checkpoint of the family may have is listed.  `fire` runs one short forward a side.
    """
    config = read_config(reference)
    family = family_of(config)
    dims = family.reference_dimensions(config)
    fired: tuple[Fired | None, Fired | None] = _fired(reference, candidate, prompts) if fire else (None, None)
    columns = [Column("transformers", _by_key(family.reference_taps(dims)), fired[0])]
    if candidate is not None:
        checkpoint = open_checkpoint(candidate)
        args = plain(checkpoint.args)
        built = family.candidate_dimensions(args | family.read_by_spec(args, config))
        columns.append(Column("megatron-core", _by_key(family.candidate_taps(built, checkpoint.layout)), fired[1]))
    else:
        known = {layout: _by_key(family.candidate_taps(dims, layout)) for layout in LAYOUTS}
        alike = known["slime"] == known["native"]
        columns += [Column(f"megatron-core, {layout}", found) for layout, found in known.items() if not alike]
        columns += [Column("megatron-core", known["native"])] * alike
    return "\n".join([*_lines(columns, family.derived(dims, "reference")), *(one.summary for one in columns if one.fired is not None)])


def _lines(columns: Sequence[Column], derived: Sequence[Derived]) -> Iterator[str]:
    made = {one.key: f"derived by the reference's formula of {', '.join(one.sources)}" for one in derived}
    orders = {key: tap.site.order for column in columns for key, tap in column.taps.items()}
    width = max(len(column.name) for column in columns)
    for key in sorted(orders, key=lambda key: (orders[key], key)):
        yield key
        for i, column in enumerate(columns):
            yield f"    {column.name:<{width}}  {made[key] if i == 0 and key in made else column.shown(key)}"


def _fired(reference: Path, candidate: Path | None, prompts: str | None) -> tuple[Fired, Fired | None]:
    """How often each tap fires in one forward of either side, of the prompts or of a few ids."""
    from bisect_hooks.hf import Reference

    job = Job(reference, candidate, prompts)
    batch = job.batch if prompts is not None else Batch((tuple(n % job.dims.vocabulary for n in range(1, 9)),))
    model = Reference(job.reference.path, job.family, job.dims, torch.float32, torch.device(job.device))
    theirs = model.fired(batch.ids(), batch.mask())
    if candidate is None:
        return theirs, None
    run = CandidateRun(
        job.family, job.args, job.candidate.layout, job.candidate.path, job.parallel, torch.float32, job.device, batch
    )  # fmt: skip
    run.build()
    return theirs, run.fired()


def hashes(directory: Path) -> Iterator[str]:
    """name  shape  dtype  digest of the bytes, for a Hugging Face directory or a torch_dist checkpoint."""
    tensors = open_hf(directory).tensors() if (directory / "config.json").is_file() else open_checkpoint(directory).all()
    for name, tensor in tensors:
        yield f"{name}  {list(tensor.shape)}  {str(tensor.dtype).removeprefix('torch.')}  {digest(tensor)}"


def digest(tensor: torch.Tensor) -> str:
    """What `hash` writes of a tensor: 128 bits of the blake2b of its bytes."""
    return hashlib.blake2b(bits(tensor).numpy().tobytes(), digest_size=16).hexdigest()


def _by_key(found: tuple[Tap, ...]) -> dict[str, Tap]:
    return {key: tap for tap in found for key in tap.keys}


def _shown(tap: Tap | None) -> str:
    if tap is None:
        return "-"
    place = {
        "output": "output of",
        "input": "input of",
        "method": f"{tap.name}() of",
        "function": f"{tap.name.rsplit(':')[-1]}() under",
        "parameter": f"{tap.name} of",
    }[tap.at]
    return f"{place} {tap.path}   {tap.layout!r}"
