"""Changing tensors in the files of a torch_dist checkpoint: values in their chunks, keys in .metadata, args in common.pt.

Works on a copy that the caller made.  What is not named stays as it is, byte by byte.
"""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from bisect_tool.pickles import Inert, load_pickle, load_torch
from bisect_tool.places import Piece, Stored
from bisect_tool.torch_dist import COMMON

# where tensors go that had no place yet
ADDED = "__added_0.distcp"
# gives the part of a tensor that a chunk holds: its offset and shape → the part
Part = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]


@dataclass
class Rewriting:
    """Edits of one checkpoint directory, written when `finish` is called.

    moved, dropped, renamed, added  what .metadata has to say differently
    """

    root: Path
    moved: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    added: dict[str, tuple[torch.Tensor, int, int]] = field(default_factory=dict)

    def change(self, stored: Stored, part: Part) -> None:
        """Overwrites a tensor, a chunk at a time."""
        for piece in stored.pieces:
            place = _put(piece, part(piece.offset, piece.shape).contiguous())
            if place is not None:
                self.moved[stored.on_disk, piece.offset] = place

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """A tensor that was not there, or was in another shape: whole, in a file of its own."""
        blob = _blob(tensor.contiguous())
        with (self.root / ADDED).open("ab") as file:
            start = file.tell()
            file.write(blob)
        self.added[key] = (tensor, start, len(blob))

    def finish(self, args: Mapping[str, Any] | None = None) -> None:
        """Writes .metadata, and args into common.pt."""
        if self.moved or self.dropped or self.renamed or self.added:
            self._metadata()
        if args:
            self._args(args)

    def _metadata(self) -> None:
        file = self.root / ".metadata"
        found = _metadata_of(file)
        described, storage = dict(found.state_dict_metadata), dict(found.storage_data)
        for key in self.dropped:
            described.pop(key, None)
        storage = {index: info for index, info in storage.items() if index.fqn not in self.dropped}
        for old, new in self.renamed.items():
            described[new] = described.pop(old)
            storage = {
                MetadataIndex(new, index.offset, index.index) if index.fqn == old else index: info for index, info in storage.items()
            }
        for index, info in storage.items():
            place = self.moved.get((index.fqn, tuple(index.offset or ())))
            if place is not None:
                info.offset, info.length = place
        for key, (tensor, start, length) in self.added.items():
            zeros = torch.Size([0] * tensor.dim())
            chunk = ChunkStorageMetadata(offsets=zeros, sizes=tensor.shape)
            described[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk])
            storage[MetadataIndex(key, zeros)] = _StorageInfo(ADDED, start, length)
        names = {*self.dropped, *self.renamed}
        kept = (
            {key: value for key, value in found.planner_data.items() if key not in names} if isinstance(found.planner_data, dict) else None
        )
        found.state_dict_metadata, found.storage_data, found.planner_data = described, storage, kept
        file.write_bytes(pickle.dumps(found))

    def _args(self, args: Mapping[str, Any]) -> None:
        file = self.root / "common.pt"
        if file.is_file():
            file.write_bytes(_with_args(load_torch(file), args, file))
            return
        # inside the checkpoint: the new ones go behind everything else in the same file
        metadata = self.root / ".metadata"
        found = _metadata_of(metadata)
        entry = next(info for index, info in found.storage_data.items() if index.fqn.startswith(COMMON))
        file = self.root / entry.relative_path
        with file.open("r+b") as raw:
            raw.seek(entry.offset)
            common = load_torch(io.BytesIO(raw.read(entry.length)), str(file))
            entry.offset = raw.seek(0, io.SEEK_END)
            entry.length = raw.write(_with_args(common, args, file))
        metadata.write_bytes(pickle.dumps(found))


def _with_args(common: Any, args: Mapping[str, Any], file: Path) -> bytes:
    """The common state with other args, as torch saves it.  0.19 wraps it in a list."""
    inner = common[0] if isinstance(common, list) else common
    inner["args"] = Namespace(**(vars(inner["args"]) | args))
    buffer = io.BytesIO()
    try:
        torch.save(common, buffer)
    except (pickle.PicklingError, AttributeError) as error:  # classes of a framework that is not here
        raise UsageError(f"{file} holds {error}, which can't be written again") from error
    return buffer.getvalue()


def _put(piece: Piece, part: torch.Tensor) -> tuple[int, int] | None:
    """Overwrites a chunk's blob; a blob of another length goes to the end of the file and its place is returned."""
    if piece.blob is None or piece.blob[1] != piece.shape:
        raise UsageError(
            f"{piece.file} keeps the tensor inside a larger one (layers stacked), which is not rewritten", hint="convert again"
        )
    blob = _blob(part)
    with piece.file.open("r+b") as file:
        if len(blob) == piece.blob[0]:
            file.seek(piece.start)
            file.write(blob)
            return None
        place = file.seek(0, io.SEEK_END)
        file.write(blob)
        return place, len(blob)


def _blob(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor.clone(), buffer)
    return buffer.getvalue()


def without_path(root: Path) -> None:
    """Takes the directory's own path out of .metadata, where torch leaves it: files move, and whose disk it was is nobody's business."""
    file = root / ".metadata"
    found = _metadata_of(file)
    if found.storage_meta is not None:
        found.storage_meta.checkpoint_id = None
        file.write_bytes(pickle.dumps(found))


def _metadata_of(file: Path) -> Metadata:
    """What .metadata says, as torch's own class: a framework's subclass (megatron-core 0.15's) can't be written without the framework.

    What such a class adds is said of optimizer states and of how to save the next time, and is left out.
    """
    found = load_pickle(file)
    if not isinstance(found, Inert):
        return found  # type: ignore[no-any-return]
    said = vars(found)
    return Metadata(said["state_dict_metadata"], said.get("planner_data"), said["storage_data"], StorageMeta())
