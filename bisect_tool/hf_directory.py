"""A Hugging Face directory, read tensor by tensor.

The weight table knows canonical names; a directory on disk may prefix them with `model.language_model.`, keep its tensors in one
file or in shards with an index, keep experts fused or one by one (the table's rules choose), and keep matrices in FP8 with a scale
for each block.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError, first_line
from safetensors import SafetensorError, safe_open

from bisect_tool.places import Piece, Place, Shape, Stored, Tensor, one_part

PREFIXES = ("model.language_model.", "language_model.model.")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE = "_scale_inv"
# bytes of a model that a fingerprint takes in whole; of a tensor of a larger one it takes so many rows, spread evenly
WHOLE, SAMPLED = 1 << 30, 16


def canonical(name: str) -> str:
    """A name on disk as the weight table writes it: `model.language_model.layers.0...` → `model.layers.0...`."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else name


@dataclass(frozen=True)
class Dequantised:
    """An FP8 matrix times the scale of each of its blocks, as bfloat16: what a loader without FP8 kernels makes of it.

    weight [.. r c], scale [.. ceil(r/block) ceil(c/block)]
    """

    weight: Stored
    scale: Stored
    block: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    unit: int = 1

    @property
    def shape(self) -> Shape:
        return self.weight.shape

    def rows(self, start: int, stop: int) -> torch.Tensor:
        rows, columns = self.block
        if len(self.shape) == 2:
            first = start // rows
            scale = self.scale.rows(first, -(-stop // rows)).repeat_interleave(rows, 0)[start - first * rows : stop - first * rows]
        else:
            scale = self.scale.rows(start, stop).repeat_interleave(rows, -2)[..., : self.shape[-2], :]
        scale = scale.repeat_interleave(columns, -1)[..., : self.shape[-1]]
        return (self.weight.rows(start, stop).float() * scale.float()).to(self.dtype)

    def parts(self, start: int, stop: int) -> Iterable[tuple[Place, torch.Tensor]]:
        return one_part(self.rows(start, stop))

    def empty(self, start: int, stop: int) -> bool:
        return False

    def peek(self, index: int, rows: Sequence[int], width: int) -> torch.Tensor:
        return self.rows(index, index + 1)[0, list(rows), :width]


@dataclass(frozen=True)
class HuggingFaceDirectory:
    """Config and tensors of one directory.

    stored  by canonical name
    strays  files in the directory that its index does not name
    """

    path: Path
    config: dict[str, Any]
    stored: Mapping[str, Stored] = field(repr=False)
    strays: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the model's tensors; the scales of FP8 matrices belong to those."""
        return tuple(sorted(name for name in self.stored if not self.is_scale(name)))

    def is_scale(self, name: str) -> bool:
        return name.endswith(SCALE) and name.removesuffix(SCALE) in self.stored

    @cached_property
    def quantised(self) -> tuple[str, ...]:
        """Matrices in FP8 with block scales."""
        return tuple(name for name in self.names if self.stored[name].dtype in FP8)

    def on_disk(self, name: str) -> str:
        return self.stored[name].on_disk

    def tensor(self, name: str) -> Tensor:
        """One tensor by its canonical name, unread.  Raises UsageError when it is not there, or in FP8 without a scale."""
        if name not in self.stored:
            near = difflib.get_close_matches(name, self.stored, n=3)
            raise UsageError(f"{self.path} has no {name}, which the weight table reads", hint=f"nearest: {', '.join(near) or 'none'}")
        found = self.stored[name]
        if found.dtype not in FP8:
            return found
        scale = self.stored.get(name + SCALE)
        if scale is None:
            raise UsageError(f"{self.path}: {found.on_disk} is {found.dtype} and has no {SCALE} beside it")
        if len(scale.shape) != len(found.shape) or len(found.shape) < 2:
            raise UsageError(f"{self.path}: {scale.on_disk} is {list(scale.shape)}, which scales no blocks of {list(found.shape)}")
        return Dequantised(found, scale, self._block(found, scale))

    def _block(self, found: Stored, scale: Stored) -> tuple[int, int]:
        said = (self.config.get("quantization_config") or {}).get("weight_block_size")
        block = (
            tuple(said)
            if said
            else tuple(2 ** math.ceil(math.log2(-(-n // s))) for n, s in zip(found.shape[-2:], scale.shape[-2:], strict=True))
        )
        if tuple(-(-n // b) for n, b in zip(found.shape[-2:], block, strict=True)) != scale.shape[-2:]:
            raise UsageError(f"{self.path}: {scale.on_disk} is {list(scale.shape)}, blocks of {block} of {list(found.shape)} need another")
        return int(block[0]), int(block[1])

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor by its canonical name, a copy of its own."""
        found = self.tensor(name)
        return found.read() if isinstance(found, Stored) else found.rows(0, found.shape[0])

    def check_sizes(self, embedding: str, vocabulary: int, hidden: int) -> None:
        """Raises UsageError where config.json says other sizes than the embedding, [vocabulary hidden], has: no model can be built of it."""
        stored, said = self.stored.get(embedding), (vocabulary, hidden)
        if stored is not None and tuple(stored.shape) != said:
            raise UsageError(
                f"{self.path}: config.json says vocab_size {vocabulary} and hidden_size {hidden}, but {embedding} is {list(stored.shape)}",
                hint="config.json and the tensors are not of one model: take both from where the reference came from",
            )

    @cached_property
    def fingerprint(self) -> str:
        """A digest of every tensor's name, shape, dtype and values: all of them up to WHOLE bytes, of larger models some rows of each."""
        digest = hashlib.sha256()
        whole = sum(stored.row_bytes * (stored.shape[0] if stored.shape else 1) for stored in self.stored.values()) <= WHOLE
        for name in self.names:
            stored = self.stored[name]
            digest.update(f"{name} {stored.shape} {stored.dtype} ".encode())
            apart = max(1, stored.shape[0] // SAMPLED) if stored.shape else 1
            some = [stored.read()] if whole or not stored.shape else (stored.rows(n, n + 1) for n in range(0, stored.shape[0], apart))
            for rows in some:
                digest.update(rows.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """What each tensor is read as."""
        return {name: torch.bfloat16 if stored.dtype in FP8 else stored.dtype for name, stored in self.stored.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.names:
            yield name, self.read(name)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a directory.  Raises UsageError."""
    file = path / "config.json"
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory", hint="give the Hugging Face directory, the one with config.json")
    if not file.is_file():
        raise UsageError(
            f"{path} has no config.json", hint=_instead(path) or "give the Hugging Face directory, not a file in it or its parent"
        )
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file} holds a {type(found).__name__}, not a table")
    return found


def _instead(path: Path) -> str:
    """What a directory without config.json or safetensors holds in their place, and what to do about it; "" when nothing known."""
    if any((path / name).exists() for name in (".metadata", "latest_checkpointed_iteration.txt")) or any(path.glob("mp_rank_*")):
        return "it is a Megatron checkpoint: are --reference and --candidate exchanged?"
    for suffix, do in (
        (".gguf", "let transformers read it (from_pretrained with gguf_file) and save a plain model, as docs/real-weights.md does"),
        (".bin", "save it as safetensors (transformers: from_pretrained, then save_pretrained)"),
    ):
        for file in sorted(path.glob(f"*{suffix}")):
            return f"it holds {file.name}: {do}"
    return ""


def open_hf(path: Path) -> HuggingFaceDirectory:
    """Opens a directory without reading a tensor.  Raises UsageError naming the first file that is missing or damaged."""
    config = read_config(path)
    index = path / "model.safetensors.index.json"
    here = set(path.glob("*.safetensors"))
    weight_map = _read_index(path, index) if index.is_file() else None
    paths = here if weight_map is None else {path / file for file in weight_map.values()}
    if not paths:
        raise UsageError(f"{path} has no *.safetensors files", hint=_instead(path) or "config.json alone says nothing of weights")
    stored: dict[str, Stored] = {}
    for file in sorted(paths):
        if not file.is_file():
            listed = sum((path / name) == file for name in (weight_map or {}).values())
            raise UsageError(f"{index.name} lists {listed} tensors in {file.name}, which is not there", hint="copy the missing shard")
        for found in read_header(file):
            name = canonical(found.name)
            if name in stored:
                raise UsageError(f"{path}: {found.name} is in {stored[name].pieces[0].file.name} and in {file.name}")
            stored[name] = Stored(name, found.shape, found.dtype, found.pieces, found.name)
    absent = sorted(set(map(canonical, weight_map or {})) - set(stored))
    if absent:
        raise UsageError(f"{index.name} lists {absent[0]}, which its file does not hold ({len(absent)} such)")
    holders = {name: stored[canonical(name)].pieces[0].file for name in weight_map or {}}
    moved = [(name, told) for name, told in (weight_map or {}).items() if path / told != holders[name]]
    if moved:
        name, told = moved[0]
        raise UsageError(
            f"{index.name} has {name} in {told}, it is in {holders[name].name} ({len(moved)} such)", hint="a loader fails on it"
        )
    return HuggingFaceDirectory(path, config, stored, tuple(sorted(file.name for file in here - paths)))


def _read_index(path: Path, index: Path) -> dict[str, str]:
    try:
        weight_map = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index} is damaged: {first_line(error)}") from error
    return {name: inside(path, file, "the index") for name, file in weight_map.items()}


def read_header(file: Path) -> list[Stored]:
    """Every tensor of a safetensors file, unread.  Raises UsageError for a damaged file or a dtype that is not known."""
    try:
        with safe_open(file, framework="np") as opened:  # checks that lengths and offsets fit the file
            names = list(opened.keys())
        with file.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise UsageError(f"{file} can't be read: {error}", hint="is the download complete?") from error
    found = []
    for name in names:
        entry = header[name]
        if entry["dtype"] not in DTYPES:
            raise UsageError(f"{file}: {name} has dtype {entry['dtype']}, which is not known", hint=f"known: {', '.join(DTYPES)}")
        shape = tuple(entry["shape"])
        piece = Piece((0,) * len(shape), shape, file, 8 + length + entry["data_offsets"][0])
        found.append(Stored(name, shape, DTYPES[entry["dtype"]], (piece,)))
    return found


def inside(root: Path, name: str, said_by: str) -> str:
    """A file name that a page of a directory gives, refused (UsageError) when it leads out of that directory."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UsageError(f"{said_by} of {root} names {name!r}, a path that leaves the directory; refused")
    return name
