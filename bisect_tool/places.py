"""Where the bytes of a tensor lie, and reading them a few rows at a time.

Every format comes down to this: a tensor is made of pieces, each a row-major block of it at some byte of some file.  Rows are views of
the mapped file wherever one piece holds them whole, so memory stays flat however large the model is.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from bisect_hooks.errors import UsageError

from bisect_tool.torch_file import data_of

# bytes that are mapped and compared at once
WINDOW = 16 << 20
# bytes at the ends of a hole that may lie in blocks which other data has a part of
SHARED = 1 << 16
Shape = tuple[int, ...]
Place = tuple[slice, ...]


class Tensor(Protocol):
    """A tensor that is read only where it is asked for.

    rows   rows start..stop along dim 0 (both multiples of `unit`), as a tensor that may be a view of a file
    parts  the same in the pieces it is stored in: (place inside the rows, view)
    empty  whether rows start..stop lie in holes of sparse files: zeros that nobody has to read
    peek   for a tensor [E r c]: the first `width` columns of some rows of one expert, without reading the others
    """

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def unit(self) -> int: ...
    def rows(self, start: int, stop: int) -> torch.Tensor: ...
    def parts(self, start: int, stop: int) -> Iterable[tuple[Place, torch.Tensor]]: ...
    def empty(self, start: int, stop: int) -> bool: ...
    def peek(self, index: int, rows: Sequence[int], width: int) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor: where it starts in it, and the byte of a file its first element is at.

    blob  (bytes, shape) of the torch.save file that starts at `start` and holds the tensor the piece is in; None: it lies there bare
    skip  bytes from the beginning of that tensor to the piece
    """

    offset: Shape
    shape: Shape
    file: Path
    start: int
    blob: tuple[int, Shape] | None = None
    skip: int = 0

    def begin(self, dtype: torch.dtype) -> int:
        """The byte of the file that the first element is at."""
        begin = self.start if self.blob is None else data_of(self.file, self.start, self.blob[0], dtype, self.blob[1])
        return begin + self.skip


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint.  disk: its name there, where that is not `name`"""

    name: str
    shape: Shape
    dtype: torch.dtype
    pieces: tuple[Piece, ...] = field(repr=False)
    disk: str = ""
    unit: int = 1

    @property
    def on_disk(self) -> str:
        return self.disk or self.name

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Raises UsageError when a file ends before them."""
        shape = (stop - start, *self.shape[1:])
        parts = list(self.parts(start, stop))
        if len(parts) == 1 and parts[0][1].shape == shape:
            return parts[0][1]
        whole = torch.empty(shape, dtype=self.dtype)
        for place, part in parts:
            whole[place] = part
        return whole

    def parts(self, start: int, stop: int) -> Iterator[tuple[Place, torch.Tensor]]:
        """What each piece holds of the rows: (its place in them, a view of the file)."""
        inside = list(self._inside(start, stop))
        views = _views([(piece.file, piece.begin(self.dtype) + skip, shape) for shape, piece, skip in inside], self.dtype)
        for (shape, piece, _), view in zip(inside, views, strict=True):
            at = (max(piece.offset[0] - start, 0), *piece.offset[1:])
            yield tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True)), view

    def empty(self, start: int, stop: int) -> bool:
        for shape, piece, skip in self._inside(start, stop):
            begin = piece.begin(self.dtype) + skip
            if not in_hole(piece.file, begin, begin + math.prod(shape) * self.dtype.itemsize):
                return False
        return True

    def peek(self, index: int, rows: Sequence[int], width: int) -> torch.Tensor:
        found = torch.empty(len(rows), width, dtype=self.dtype)
        for shape, piece, skip in self._inside(index, index + 1):
            at, columns = piece.offset[1:], shape[2]
            for i, row in enumerate(rows):
                if at[0] <= row < at[0] + shape[1] and at[1] < width:
                    take = min(width - at[1], columns)
                    start = piece.begin(self.dtype) + skip + (row - at[0]) * columns * self.dtype.itemsize
                    found[i, at[1] : at[1] + take] = _copy(piece.file, start, self.dtype, take)
        return found

    def read(self) -> torch.Tensor:
        """The whole tensor, a copy of its own."""
        if not self.shape:
            piece = self.pieces[0]
            return _view(piece.file, piece.begin(self.dtype), self.dtype, ()).clone()
        return self.rows(0, self.shape[0]).clone()

    def _inside(self, start: int, stop: int) -> Iterator[tuple[Shape, Piece, int]]:
        """Pieces that hold some of the rows: (shape of what they hold, the piece, bytes to skip in it)."""
        pieces, starts, longest = self._sorted
        for piece in pieces[bisect_left(starts, start - longest + 1) : bisect_left(starts, stop)]:
            first, last = max(piece.offset[0], start), min(piece.offset[0] + piece.shape[0], stop)
            if first < last:
                row = math.prod(piece.shape[1:]) * self.dtype.itemsize
                yield (last - first, *piece.shape[1:]), piece, (first - piece.offset[0]) * row

    @cached_property
    def _sorted(self) -> tuple[list[Piece], list[int], int]:
        pieces = sorted(self.pieces, key=lambda piece: piece.offset)
        return pieces, [piece.offset[0] for piece in pieces], max(piece.shape[0] for piece in pieces)

    @cached_property
    def covered(self) -> bool:
        """Whether the pieces tile the tensor."""
        return covers(self)


def one_part(rows: torch.Tensor) -> list[tuple[Place, torch.Tensor]]:
    """Rows that are at hand whole, as `parts` gives them."""
    return [(tuple(slice(0, n) for n in rows.shape), rows)]


def covers(stored: Stored) -> bool:
    """Whether the pieces tile the tensor: no hole, no overlap.  Counted on the grid that their edges make."""
    if len(stored.pieces) == 1:
        return not any(stored.pieces[0].offset) and stored.pieces[0].shape == stored.shape
    edges: list[dict[int, int]] = []
    for dim, size in enumerate(stored.shape):
        marks = {0, size}
        for piece in stored.pieces:
            marks |= {piece.offset[dim], piece.offset[dim] + piece.shape[dim]}
        edges.append({mark: i for i, mark in enumerate(sorted(marks))})
        if min(marks) < 0 or max(marks) > size:
            return False
    cells = np.zeros([len(edge) - 1 for edge in edges], dtype=np.int32)
    for piece in stored.pieces:
        places = zip(edges, piece.offset, piece.shape, strict=True)
        cells[tuple(slice(edge[at], edge[at + size]) for edge, at, size in places)] += 1
    return bool((cells == 1).all())


def steps(rows: int, unit: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Row ranges of about WINDOW bytes, each a multiple of `unit` rows."""
    step = max(unit, WINDOW // max(1, row_bytes) // unit * unit)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def in_hole(file: Path, start: int, stop: int) -> bool:
    """Whether a sparse file keeps nothing for these bytes, or nothing but zeros in the blocks they share with their neighbours."""
    if start == stop:
        return True
    opened = _opened(file)
    hole = _seek(opened, start, os.SEEK_HOLE, start)
    data = min(_seek(opened, hole, os.SEEK_DATA, stop), stop)
    if hole >= stop or hole - start + stop - data > SHARED:
        return False
    return not os.pread(opened, hole - start, start).strip(b"\0") and not os.pread(opened, stop - data, data).strip(b"\0")


def _seek(opened: int, start: int, whence: int, otherwise: int) -> int:
    try:
        return os.lseek(opened, start, whence)
    except OSError:  # past the last data there is nothing left to find
        return otherwise


def _views(wanted: Sequence[tuple[Path, int, Shape]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Views of (file, byte, shape); what lies close together in a file is mapped at once."""
    spans: dict[Path, list[tuple[int, int]]] = {}
    for file, start, shape in wanted:
        spans.setdefault(file, []).append((start, start + math.prod(shape) * dtype.itemsize))
    mapped = {}
    for file, span in spans.items():
        first, last = min(span)[0], max(stop for _, stop in span)
        if len(span) > 1 and last - first <= sum(stop - start for start, stop in span) * 9 // 8:
            mapped[file] = first, _view(file, first, torch.uint8, (last - first,))
    found = []
    for file, start, shape in wanted:
        if file in mapped:
            skip, count = start - mapped[file][0], math.prod(shape)
            found.append(torch.frombuffer(mapped[file][1].numpy(), dtype=dtype, count=count, offset=skip).reshape(shape))
        else:
            found.append(_view(file, start, dtype, shape))
    return found


def _view(file: Path, start: int, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """Bytes of a file as a tensor, mapped read-only: whoever wants to write makes a copy."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    length = count * dtype.itemsize
    opened = _opened(file)
    if start + length > os.fstat(opened).st_size:
        raise UsageError(f"{file} ends at byte {os.fstat(opened).st_size}, a tensor in it at {start + length}", hint="is the file whole?")
    page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    mapped = mmap.mmap(opened, start - page + length, flags=flags, prot=mmap.PROT_READ, offset=page)
    _silence()
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start - page).reshape(shape)


def _copy(file: Path, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """A few bytes of a file as a tensor of its own: mapping them would cost more."""
    raw = bytearray(os.pread(_opened(file), count * dtype.itemsize, start))
    if len(raw) < count * dtype.itemsize:
        raise UsageError(
            f"{file} ends at byte {start + len(raw)}, a tensor in it at {start + count * dtype.itemsize}", hint="is the file whole?"
        )
    return torch.frombuffer(raw, dtype=dtype)


@lru_cache(maxsize=256)
def _descriptor(file: Path) -> _Descriptor:
    return _Descriptor(file)


def _opened(file: Path) -> int:
    return _descriptor(file).number


class _Descriptor:
    """An open file that closes when it is forgotten."""

    def __init__(self, file: Path) -> None:
        try:
            self.number = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"{file} can't be read: {error.strerror}", hint="was every file copied?") from error

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@lru_cache(maxsize=1)
def _silence() -> None:
    """torch warns once that a mapped file can't be written to, which is what is wanted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)
