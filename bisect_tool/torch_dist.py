"""A Megatron torch_dist checkpoint, read without megatron and without building a model."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError

from bisect_tool.checkpoint import TRACKER, Checkpoint, find_checkpoint
from bisect_tool.hf_directory import inside
from bisect_tool.pickles import load_pickle, load_torch
from bisect_tool.places import Piece, Stored

__all__ = ["COMMON", "TRACKER", "open_torch_dist"]

NOT_WEIGHTS = ("_extra_state", "rng_state", "common_state")
# megatron-core from 0.19 on keeps the common state as a byte entry of the checkpoint, before that in common.pt
COMMON = "common_state"
# one expert a key: SequentialMLP and `singleton_local_shards` number the module, TEGroupedMLP the weight
ONE_EXPERT = (
    re.compile(r"(?P<before>.*\.experts\.)(?:experts|local_experts)\.(?P<e>\d+)\.(?P<after>linear_fc[12]\.(?:weight|bias))"),
    re.compile(r"(?P<before>.*\.experts\.)(?:experts\.)?(?P<after>linear_fc[12]\.(?:weight|bias))(?P<e>\d+)"),
)
ONE_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?P<after>(?!\d+\.).*)")


def open_torch_dist(path: Path) -> Checkpoint:
    """Opens a checkpoint without reading a tensor.  Raises UsageError naming a .distcp file that is not there."""
    root = find_checkpoint(path)
    metadata = load_pickle(root / ".metadata")
    described = getattr(metadata, "state_dict_metadata", None)
    storage = getattr(metadata, "storage_data", None)
    if not isinstance(described, dict) or not isinstance(storage, dict):
        raise UsageError(f"{root / '.metadata'} describes no tensors")
    where = {(index.fqn, tuple(index.offset or ())): info for index, info in storage.items()}
    found, skipped = [], {}
    files: dict[Path, int] = {}
    for key, entry in described.items():
        if not hasattr(entry, "chunks"):
            skipped[key] = "bytes, not a tensor"
        elif key.startswith("optimizer.") or any(part in key for part in NOT_WEIGHTS):
            skipped[key] = "not a weight"
        else:
            found.append(_stored(root, key, entry, where))
            for piece in found[-1].pieces:
                files[piece.file] = files.get(piece.file, 0) + 1
    for file, held in sorted(files.items()):
        if not file.is_file():
            raise UsageError(f"{file} is not there; .metadata keeps {held} chunks in it", hint="was every rank's file copied?")
    return Checkpoint(root, "torch_dist", by_name(found, root), skipped, _common(root, where))


def _stored(root: Path, key: str, entry: Any, where: dict[tuple[str, tuple[int, ...]], Any]) -> Stored:
    pieces = []
    dtype = entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{root / '.metadata'} gives {key} the dtype {dtype!r}, which is not known")
    for chunk in entry.chunks:
        offset, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        info = where.get((key, offset))
        if info is None:
            raise UsageError(f"{root / '.metadata'}: no file is given for {key} at {offset}")
        if getattr(info, "transform_descriptors", None):
            raise UsageError(f"{key} is stored through {info.transform_descriptors}, which is not read here")
        file = root / inside(root, str(info.relative_path), "the .metadata")
        pieces.append(Piece(offset, shape, file, int(info.offset), (int(info.length), shape)))
    return Stored(key, tuple(entry.size), dtype, tuple(pieces))


def by_name(found: Iterable[Stored], root: Path) -> dict[str, Stored]:
    """Tensors by global key: layers that were stacked in one tensor apart, experts that were apart in one.

    Homogeneous models keep all layers in one tensor ([L, ..], `decoder.layers.mlp.linear_fc1.weight`).
    """
    tensors: dict[str, Stored] = {}
    experts: dict[str, dict[int, Stored]] = {}
    for stored in (layer for one in found for layer in _layers(one)):
        match = next(filter(None, (pattern.fullmatch(stored.name) for pattern in ONE_EXPERT)), None)
        if match:
            experts.setdefault(f"{match['before']}experts.{match['after']}", {})[int(match["e"])] = stored
        elif stored.name in tensors:
            raise UsageError(f"{root} keeps {stored.name} twice, as {tensors[stored.name].on_disk} and as {stored.on_disk}")
        else:
            tensors[stored.name] = stored
    for name, numbered in experts.items():
        if name in tensors:
            raise UsageError(f"{root} keeps {name} twice, as one tensor and one by one ({numbered[min(numbered)].on_disk})")
        tensors[name] = stack(name, numbered)
    return tensors


def _layers(stored: Stored) -> list[Stored]:
    """A stacked tensor's layers, each a tensor of its own; any other tensor as it is."""
    match = ONE_LAYER.fullmatch(stored.name)
    if match is None:
        return [stored]
    found = []
    for layer in range(stored.shape[0]):
        pieces = []
        for piece in stored.pieces:
            row = layer - piece.offset[0]
            if 0 <= row < piece.shape[0]:
                size = stored.dtype.itemsize
                for length in piece.shape[1:]:
                    size *= length
                pieces.append(replace(piece, offset=piece.offset[1:], shape=piece.shape[1:], skip=piece.skip + row * size))
        name = f"{match['before']}{layer}.{match['after']}"
        found.append(Stored(name, stored.shape[1:], stored.dtype, tuple(pieces), f"{stored.on_disk}[{layer}]"))
    return found


def stack(name: str, numbered: dict[int, Stored]) -> Stored:
    """Experts kept one by one as the one tensor [E, rows, columns] that the weight table knows.  Raises UsageError for a gap."""
    count, first = max(numbered) + 1, numbered[min(numbered)]
    gone = [e for e in range(count) if e not in numbered]
    if gone:
        raise UsageError(f"{first.on_disk} is one of {count} experts, and expert {gone[0]} is not there ({len(gone)} such)")
    odd = next((one for one in numbered.values() if one.shape != first.shape or one.dtype != first.dtype), None)
    if odd is not None:
        raise UsageError(f"{odd.on_disk} is {odd.dtype} {list(odd.shape)}, {first.on_disk} {first.dtype} {list(first.shape)}")
    pieces = [replace(piece, offset=(e, *piece.offset), shape=(1, *piece.shape)) for e, one in numbered.items() for piece in one.pieces]
    disk = re.sub(r"\b0\b|(?<=weight)0$", "*", numbered[0].on_disk.rpartition("layers.")[2])
    return Stored(
        name,
        (count, *first.shape),
        first.dtype,
        tuple(pieces),
        numbered[0].on_disk.rpartition("layers.")[0] + "layers." * ("layers." in numbered[0].on_disk) + disk,
    )


def _common(root: Path, where: dict[tuple[str, tuple[int, ...]], Any]) -> dict[str, Any]:
    """What the ranks have in common, of either format; empty when the checkpoint keeps nothing."""
    file = root / "common.pt"
    if file.is_file():
        found = load_torch(file)
    else:
        entry = next((info for (key, _), info in where.items() if key.startswith(COMMON)), None)
        if entry is None:
            return {}
        file = root / inside(root, str(entry.relative_path), "the .metadata")
        with file.open("rb") as raw:
            raw.seek(int(entry.offset))
            found = load_torch(io.BytesIO(raw.read(int(entry.length))), str(file))
        found = found[0] if isinstance(found, list) and len(found) == 1 else found  # as 0.19 wraps it
    if not isinstance(found, dict):
        raise UsageError(f"{file} holds a {type(found).__name__}, not a table")
    return found
