"""A Hugging Face directory, read tensor by tensor.

The weight table knows canonical names; a directory on disk may prefix them with `model.language_model.`, keep its tensors in one
file or in shards with an index, and keep experts fused or one by one (the table's rules choose).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError, first_line
from safetensors import SafetensorError, safe_open

PREFIXES = ("model.language_model.", "language_model.model.")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8,
}  # fmt: skip


def canonical(name: str) -> str:
    """A name on disk as the weight table writes it: `model.language_model.layers.0...` → `model.layers.0...`."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else name


@dataclass(frozen=True)
class HuggingFaceDirectory:
    """Config and tensors of one directory; `files` maps canonical names to (file, name on disk)."""

    path: Path
    config: dict[str, Any]
    files: dict[str, tuple[Path, str]] = field(repr=False)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.files))

    def on_disk(self, name: str) -> str:
        return self.files[name][1]

    def read(self, name: str) -> torch.Tensor:
        """One tensor by its canonical name.  Raises UsageError when it is not there, or its file is damaged."""
        if name not in self.files:
            near = difflib.get_close_matches(name, self.files, n=3)
            raise UsageError(f"{self.path} has no {name}, which the weight table reads", hint=f"nearest: {', '.join(near) or 'none'}")
        path, disk = self.files[name]
        with _opened(path) as file:
            return file.get_tensor(disk)  # type: ignore[no-any-return]

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        found = {}
        for path in sorted({path for path, _ in self.files.values()}):
            with _opened(path) as file:
                for disk in file.keys():
                    dtype = file.get_slice(disk).get_dtype()
                    if dtype not in DTYPES:
                        raise UsageError(f"{path}: {disk} has dtype {dtype}, which is not known", hint=f"known: {', '.join(DTYPES)}")
                    found[canonical(disk)] = DTYPES[dtype]
        return found

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.names:
            yield name, self.read(name)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a directory.  Raises UsageError."""
    file = path / "config.json"
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory", hint="give the Hugging Face directory, the one with config.json")
    if not file.is_file():
        raise UsageError(f"{path} has no config.json", hint="give the Hugging Face directory, not a file in it or its parent")
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file} holds a {type(found).__name__}, not a table")
    return found


def open_hf(path: Path) -> HuggingFaceDirectory:
    """Opens a directory without reading a tensor.  Raises UsageError naming the first file that is missing or damaged."""
    config = read_config(path)
    index = path / "model.safetensors.index.json"
    files: dict[str, tuple[Path, str]] = {}
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text())["weight_map"].items())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{index} is damaged: {first_line(error)}") from error
        paths = {path / inside(path, str(name), "the index") for name in weight_map.values()}
    else:
        weight_map, paths = None, set(path.glob("*.safetensors"))
    if not paths:
        raise UsageError(f"{path} has no *.safetensors files")
    for file in sorted(paths):
        if not file.is_file():
            listed = sum((path / str(name)) == file for name in (weight_map or {}).values())
            raise UsageError(f"{index.name} lists {listed} tensors in {file.name}, which is not there", hint="copy the missing shard")
        with _opened(file) as opened:
            for disk in opened.keys():
                name = canonical(disk)
                if name in files:
                    raise UsageError(f"{path}: {disk} is in {files[name][0].name} and in {file.name}")
                files[name] = (file, disk)
    absent = sorted(set(map(canonical, weight_map or {})) - set(files))
    if absent:
        raise UsageError(f"{index.name} lists {absent[0]}, which its file does not hold ({len(absent)} such)")
    return HuggingFaceDirectory(path, config, files)


def inside(root: Path, name: str, said_by: str) -> str:
    """A file name that a page of a directory gives, refused (UsageError) when it leads out of that directory."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UsageError(f"{said_by} of {root} names {name!r}, a path that leaves the directory; refused")
    return name


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} can't be read: {error}", hint="is the download complete?") from error
