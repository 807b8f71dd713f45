"""A Megatron torch_dist checkpoint, read without megatron and without building a model."""

from __future__ import annotations

import difflib
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout

from bisect_tool.hf_directory import inside
from bisect_tool.pickles import load_pickle, load_torch, tensor_of

NOT_WEIGHTS = ("_extra_state", "rng_state", "common_state")
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a global tensor: where it starts in it, and its torch.save blob in a file."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """One global tensor of the checkpoint."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class TorchDist:
    """tensors  the model's tensors by key · skipped  byte entries and optimizer state, by key, with the reason"""

    path: Path
    tensors: Mapping[str, Stored] = field(repr=False)
    skipped: Mapping[str, str] = field(repr=False)

    @cached_property
    def common(self) -> dict[str, Any]:
        file = self.path / "common.pt"
        if not file.is_file():
            return {}
        found = load_torch(file)
        if not isinstance(found, dict):
            raise UsageError(f"{file} holds a {type(found).__name__}, not a table")
        return found

    @cached_property
    def args(self) -> dict[str, Any]:
        """Megatron's args as the checkpoint keeps them; empty when it keeps none."""
        args = self.common.get("args")
        if args is None or isinstance(args, dict):
            return dict(args or {})
        if not hasattr(args, "__dict__"):
            raise UsageError(f"{self.path / 'common.pt'} keeps args as a {type(args).__name__}, not as a table")
        return dict(vars(args))

    @cached_property
    def layout(self) -> CheckpointLayout:
        """Read off the keys alone."""
        return "slime" if any(".self_attention.linear_attn." in key for key in self.tensors) else "native"

    def read(self, key: str) -> torch.Tensor:
        """A whole global tensor.  Raises UsageError for a key that is not there, or chunks that don't cover it."""
        if key not in self.tensors:
            near = difflib.get_close_matches(key, self.tensors, n=3)
            raise UsageError(f"{self.path} has no tensor {key}", hint=f"nearest: {', '.join(near) or 'none'}")
        stored = self.tensors[key]
        if len(stored.chunks) == 1 and stored.chunks[0].shape == stored.shape:
            return self.read_chunk(key, stored.chunks[0])
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        if not _covers(stored):
            raise UsageError(
                f"{self.path}: the chunks of {key} do not cover its {stored.shape} once each", hint="was every rank's file copied?"
            )
        for chunk in stored.chunks:
            whole[tuple(slice(at, at + size) for at, size in zip(chunk.offset, chunk.shape, strict=True))] = self.read_chunk(key, chunk)
        return whole

    def read_chunk(self, key: str, chunk: Chunk) -> torch.Tensor:
        source = f"{key} at {chunk.offset} in {chunk.file}"
        try:
            with chunk.file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                if chunk.start + chunk.length > len(mapped):
                    raise UsageError(f"{source}: the file ends at byte {len(mapped)}, the chunk at {chunk.start + chunk.length}")
                blob = mapped[chunk.start : chunk.start + chunk.length]
        except (OSError, ValueError) as error:
            raise UsageError(f"{source} can't be read: {error}", hint="was every rank's file copied?") from error
        tensor = tensor_of(blob, source)
        if tuple(tensor.shape) != chunk.shape or tensor.dtype != self.tensors[key].dtype:
            raise UsageError(f"{source} is {tensor.dtype} {tuple(tensor.shape)}, .metadata says {self.tensors[key].dtype} {chunk.shape}")
        return tensor

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key in self.tensors:
            yield key, self.read(key)


def _covers(stored: Stored) -> bool:
    """Whether the chunks tile the tensor: no hole, no overlap.  Counted on the grid that their edges make."""
    edges = []
    for dim, size in enumerate(stored.shape):
        starts = [(chunk.offset[dim], chunk.offset[dim] + chunk.shape[dim]) for chunk in stored.chunks]
        edges.append(sorted({0, size, *(edge for pair in starts for edge in pair)}))
        if edges[-1][0] < 0 or edges[-1][-1] > size:
            return False
    cells = np.zeros([len(edge) - 1 for edge in edges], dtype=np.int32)
    for chunk in stored.chunks:
        places = zip(edges, chunk.offset, chunk.shape, strict=True)
        cells[tuple(slice(edge.index(at), edge.index(at + size)) for edge, at, size in places)] += 1
    return bool((cells == 1).all())


def find_checkpoint(path: Path) -> Path:
    """The directory with `.metadata`: this one, or the one that its tracker file names.  Raises UsageError."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory", hint="give the checkpoint's directory (the one with .metadata, or its parent)")
    if (path / ".metadata").is_file():
        return path
    tracker = path / TRACKER
    if tracker.is_file():
        word = tracker.read_text().strip()
        if word != "release" and not word.isdigit():
            raise UsageError(f"{tracker} says {word!r}, neither `release` nor an iteration")
        inner = path / (word if word == "release" else f"iter_{int(word):07d}")
        if (inner / ".metadata").is_file():
            return inner
        raise UsageError(f"{tracker} names {inner.name}, which has no .metadata", hint="is the checkpoint complete?")
    seen = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing"
    raise UsageError(f"{path} is no torch_dist checkpoint: no .metadata and no {TRACKER} in it", hint=f"it holds {seen}")


def open_torch_dist(path: Path) -> TorchDist:
    """Opens a checkpoint without reading a tensor.  Raises UsageError naming a .distcp file that is not there."""
    root = find_checkpoint(path)
    metadata = load_pickle(root / ".metadata")
    described = getattr(metadata, "state_dict_metadata", None)
    storage = getattr(metadata, "storage_data", None)
    if not isinstance(described, dict) or not isinstance(storage, dict):
        raise UsageError(f"{root / '.metadata'} describes no tensors")
    where = {(index.fqn, tuple(index.offset or ())): info for index, info in storage.items()}
    tensors, skipped, files = {}, {}, set()
    for key, entry in described.items():
        if not hasattr(entry, "chunks"):
            skipped[key] = "bytes, not a tensor"
        elif key.startswith("optimizer.") or any(part in key for part in NOT_WEIGHTS):
            skipped[key] = "not a weight"
        else:
            chunks = []
            for chunk in entry.chunks:
                info = where.get((key, tuple(chunk.offsets)))
                if info is None:
                    raise UsageError(f"{root / '.metadata'}: no file is given for {key} at {tuple(chunk.offsets)}")
                file = root / inside(root, str(info.relative_path), "the .metadata")
                files.add(file)
                chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, int(info.offset), int(info.length)))
            tensors[key] = Stored(key, tuple(entry.size), entry.properties.dtype, tuple(chunks))
    for file in sorted(files):
        if not file.is_file():
            held = sum(chunk.file == file for stored in tensors.values() for chunk in stored.chunks)
            raise UsageError(f"{file} is not there; .metadata keeps {held} chunks in it", hint="was every rank's file copied?")
    return TorchDist(root, tensors, skipped)
