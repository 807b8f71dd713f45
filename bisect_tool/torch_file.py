"""What torch.save wrote, read without loading it: a tensor comes back as the place of its bytes in the file.

A torch.save file is a zip archive that stores its records bare: one pickle that names storages, and one record a storage.  The pickle
goes through the unpickler that runs nothing; storages are never read here.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError, first_line

from bisect_tool.pickles import Inert, SafeUnpickler

Shape = tuple[int, ...]
STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "UntypedStorage": torch.uint8,
    "Float8_e4m3fnStorage": torch.float8_e4m3fn, "Float8_e5m2Storage": torch.float8_e5m2,
}  # fmt: skip
# a pickle describes tensors; one larger than this is no description
LARGEST_PICKLE = 1 << 30


@dataclass(frozen=True, slots=True)
class Storage:
    """One record of the archive: the byte of the file it starts at, and what it holds."""

    start: int
    length: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor's place in a file: row-major from byte `start` on.  Stands where the tensor would in what was unpickled."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: Shape


def open_torch(path: Path) -> Any:
    """The object in a torch.save file, its tensors as Placed.  Raises UsageError for one that is damaged or would call something."""
    return _Archive(path, 0, path.stat().st_size, str(path)).load()


@lru_cache(maxsize=1 << 18)
def data_of(file: Path, start: int, length: int, dtype: torch.dtype, shape: Shape) -> int:
    """Where the one tensor of a torch.save blob inside `file` begins.  Raises UsageError when it is not the tensor announced."""
    source = f"{file} at byte {start}"
    size = file.stat().st_size
    if start + length > size:
        raise UsageError(f"{file} ends at byte {size}, a chunk in it at {start + length}", hint="was every rank's file copied whole?")
    found = _Archive(file, start, length, source).load()
    if not isinstance(found, Placed):
        raise UsageError(f"{source} holds a {type(found).__name__}, not a tensor")
    if found.dtype != dtype or found.shape != shape:
        raise UsageError(f"{source} is {found.dtype} {found.shape}, .metadata says {dtype} {shape}")
    return found.start


class _Archive:
    """The zip archive in bytes start..start+length of a file."""

    def __init__(self, file: Path, start: int, length: int, source: str) -> None:
        self.file, self.start, self.length, self.source = file, start, length, source

    def load(self) -> Any:
        try:
            with self.file.open("rb") as raw:
                window = _Window(raw, self.start, self.length)
                with zipfile.ZipFile(window) as archive:
                    return self._unpickle(archive, window)
        except UsageError:
            raise
        except Exception as error:  # zip and pickle raise whatever damaged bytes happen to spell
            raise UsageError(f"{self.source} can't be read as a torch file: {first_line(error)}", hint="is the file whole?") from error

    def _unpickle(self, archive: zipfile.ZipFile, window: _Window) -> Any:
        records = {name.partition("/")[2]: info for name, info in archive.NameToInfo.items()}
        if "data.pkl" not in records:
            raise UsageError(f"{self.source} is a zip archive without data.pkl: no torch file")
        if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
            raise UsageError(f"{self.source} was written on a big-endian machine")
        if records["data.pkl"].file_size > LARGEST_PICKLE:
            raise UsageError(f"{self.source}: its pickle claims {records['data.pkl'].file_size} bytes; refused")

        def storage(key: str, dtype: torch.dtype, count: int) -> Storage:
            info = records.get(f"data/{key}")
            length = count * dtype.itemsize
            if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size < length:
                held = "no such record" if info is None else f"a record of {info.file_size} bytes"
                raise UsageError(f"{self.source}: storage {key} claims {length} bytes, the archive has {held}")
            begin = window.data_of(info)
            if begin + length > self.length:
                raise UsageError(f"{self.source}: storage {key} ends at byte {begin + length}, past the end at {self.length}")
            return Storage(self.start + begin, length, dtype)

        unpickler = type("Unpickler", (_Placing,), {"source": self.source, "file": self.file, "storage": staticmethod(storage)})
        return unpickler(io.BytesIO(archive.read(records["data.pkl"]))).load()


class _Placing(SafeUnpickler):
    """Unpickles tensors as Placed."""

    file: Path
    storage: Callable[[str, torch.dtype, int], Storage]

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise UsageError(f"{self.source} refers to something that is no storage")
        return self.storage(str(pid[2]), pid[1] if isinstance(pid[1], torch.dtype) else torch.uint8, int(pid[4]))

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return self._tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda tensor, *_: tensor
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):  # a tensor that was given Python attributes
            return lambda make, _kind, arguments, _state: make(*arguments)
        if (module, name) == ("torch", "Tensor"):
            return Inert
        if (module, name) == ("_codecs", "encode"):  # how pickle writes bytes: the random state of numpy
            return lambda text, _encoding: str(text).encode("latin1")
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            if name not in STORAGES:
                raise UsageError(f"{self.source} keeps a {name}, which is not known", hint=f"known: {', '.join(STORAGES)}")
            return STORAGES[name]
        return super().find_class(module, name)

    def _tensor(self, storage: Any, offset: int, size: Any, stride: Any, *more: Any) -> Placed:
        if not isinstance(storage, Storage):
            raise UsageError(f"{self.source} makes a tensor of something that is no storage")
        dtype = next((one for one in more if isinstance(one, torch.dtype)), storage.dtype)
        shape = tuple(int(n) for n in size)
        if math.prod(shape) > 1 and not _row_major(shape, tuple(stride)):
            raise UsageError(f"{self.source} holds a {shape} tensor with strides {tuple(stride)}, which is not row-major")
        begin = int(offset) * dtype.itemsize
        if min((*shape, begin)) < 0 or begin + math.prod(shape) * dtype.itemsize > storage.length:
            raise UsageError(f"{self.source} holds a {dtype} {shape} tensor in a storage of {storage.length} bytes")
        return Placed(self.file, storage.start + begin, dtype, shape)


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, raw: Any, start: int, length: int) -> None:
        self.raw, self.start, self.length, self.at = raw, start, length, 0

    def data_of(self, info: zipfile.ZipInfo) -> int:
        """Where a record's bytes begin: behind its local header, whose lengths may differ from the directory's."""
        self.seek(info.header_offset)
        header = self.read(30)
        return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        self.at = max(0, base + offset)
        return self.at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.length - self.at)
        size = left if size is None or size < 0 else min(size, left)
        self.raw.seek(self.start + self.at)
        found: bytes = self.raw.read(size)
        self.at += len(found)
        return found


def _row_major(shape: Shape, stride: Shape) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
