"""What one rank heard, on disk: `rank00003.safetensors` and, written last, `rank00003.json` that says what it is a part of.

The page holds all that putting the ranks together needs (layouts, sizes, where the rank stands), so no model is built for it.
A tensor's name in the file is its tap's id; `taps` says its layout and the keys that it yields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bisect_hooks.errors import UsageError, first_line
from bisect_hooks.layout import parse_layout

SCHEMA = "bisect-tool/shard/1"
# why a site is absent that the build joins with its neighbour: no gap, one side can not have it
FUSED = "fused into the module that follows"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a rank: its layout, and the key of every piece that the layout takes it apart into."""

    layout: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShardPage:
    """Where a rank's tensors belong.

    sizes    parallel sizes (tp, pp, dp, ep, etp, cp; sp 0 or 1)   at  where this rank stands on those axes
    local    this rank's sizes of b and s, for layouts that flatten them
    lengths  real tokens of each row of b, () where all are real; padding is on the right
    packed   what the packed sequence says of itself (cu_seqlens, cu_seqlens_padded, ..), null where it says nothing; {} if not packed
    absent   sites that were not heard, and why
    """

    side: str
    family: str
    model: str
    dtype: str
    rank: int
    world: int
    sizes: Mapping[str, int]
    at: Mapping[str, int]
    local: Mapping[str, int]
    taps: Mapping[str, Part]
    lengths: tuple[int, ...] = ()
    packed: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    layout: str = ""
    layers: int = 0
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return f"rank{self.rank:05d}.safetensors"


def write_shard(out: Path, page: ShardPage, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tensors first, then the page: a rank that was killed leaves no page."""
    if set(tensors) != set(page.taps):
        raise UsageError(f"rank {page.rank}: tensors and taps name different things: {sorted(set(tensors) ^ set(page.taps))[:3]}")
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, out / page.file, metadata={"format": "pt"})
    partial = out / f"{page.file}.partial"
    partial.write_text(json.dumps({"schema": SCHEMA, **asdict(page)}, indent=1, sort_keys=True) + "\n")
    partial.replace((out / page.file).with_suffix(".json"))


def read_pages(directory: Path) -> list[ShardPage]:
    """Every rank's page, by rank.  Raises UsageError for one that is damaged or of another recording than the rest."""
    pages = []
    for file in sorted(directory.glob("rank*.json")):
        try:
            found = json.loads(file.read_text())
            if found.pop("schema", None) != SCHEMA:
                raise UsageError(f"{file}: schema is not {SCHEMA}", hint="was it written by another version?")
            found["taps"] = {name: Part(part["layout"], tuple(part["keys"])) for name, part in found["taps"].items()}
            found["lengths"] = tuple(found["lengths"])
            page = ShardPage(**found)
            for part in page.taps.values():
                parse_layout(part.layout)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{file} is damaged: {first_line(error)}") from error
        if page.file != file.with_suffix(".safetensors").name:
            raise UsageError(f"{file} says it is of rank {page.rank}; refused")
        pages.append(page)
    for page in pages[1:]:
        for name in ("family", "world", "sizes", "side", "layout"):
            if getattr(page, name) != getattr(pages[0], name):
                raise UsageError(f"{directory}: ranks 0 and {page.rank} disagree on {name}", hint="are there files of two recordings?")
    return pages


def cut_segments(packed: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int]]:
    """(padded lengths of the packed sequences, real lengths) as the metadata says."""
    real, padded = packed.get("cu_seqlens"), packed.get("cu_seqlens_padded")
    real = padded if real is None else real
    padded = real if padded is None else padded
    if not real or padded is None or len(real) != len(padded):
        raise UsageError("a packed recording whose metadata has no cu_seqlens", hint="where each sequence starts has to be known")

    def lengths(bounds: Sequence[int]) -> list[int]:
        return [stop - start for start, stop in pairwise(bounds)]

    return lengths(padded), lengths(real)
