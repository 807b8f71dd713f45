"""taps and hash: what is listened to, and one line a tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from bisect_hooks.family import family_of
from bisect_hooks.tap import Tap

from bisect_tool.args import plain
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.compare import bits
from bisect_tool.hf_directory import open_hf, read_config


def taps(reference: Path, candidate: Path) -> str:
    """Sites in compute order with the module paths and layouts of both sides; `-` where a side has no such place."""
    config = read_config(reference)
    family = family_of(config)
    checkpoint = open_checkpoint(candidate)
    theirs = _by_key(family.reference_taps(family.reference_dimensions(config)))
    ours = _by_key(family.candidate_taps(family.candidate_dimensions(plain(checkpoint.args)), checkpoint.layout))
    derived = {one.key for one in family.derived(family.reference_dimensions(config), "reference")}
    lines = []
    for key in sorted(theirs.keys() | ours.keys(), key=lambda key: _order(theirs.get(key) or ours[key], key)):
        hf = _shown(theirs.get(key)) if key in theirs else "derived by the reference's formula" if key in derived else "-"
        lines.append(f"{key}\n    transformers   {hf}\n    megatron-core  {_shown(ours.get(key))}")
    return "\n".join(lines)


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


def _order(tap: Tap, key: str) -> tuple[object, str]:
    return tap.site.order, key


def _shown(tap: Tap | None) -> str:
    if tap is None:
        return "-"
    place = {"output": "output of", "input": "input of", "method": f"{tap.name}() of", "function": f"{tap.name.rsplit(':')[-1]}() under"}[
        tap.at
    ]
    return f"{place} {tap.path}   {tap.layout!r}"
