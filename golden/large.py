"""Checkpoints of any size, written a piece at a time: what `make bench-audit` and `make drill-397b` audit.

Nothing here goes through the tool's readers.  The reference is sharded safetensors with an index, names and dtypes as the public
checkpoints have them.  The candidate is torch_dist as megatron-core writes it: experts one by one, gate and up apart, each chunk in
the archive that torch.save wraps it in.  What a Content leaves out is never written, and stays a hole of a sparse file.
"""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import tempfile
import time
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import psutil
import torch
from bisect_hooks.family import Dimensions, Family
from bisect_hooks.parallel import Parallel
from bisect_hooks.table import Made, Rule
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import skip_data

from bisect_tool.args import conversion_args
from bisect_tool.shards import pieces_of

Shape = tuple[int, ...]
Shapes = Mapping[str, tuple[Shape, torch.dtype]]
# (byte of the tensor or chunk, what lies there)
Extents = Iterator[tuple[int, torch.Tensor]]
BF16, FP32 = torch.bfloat16, torch.float32
PREFIX = "model.language_model."
DTYPES = {BF16: "BF16", FP32: "F32"}


class Content(Protocol):
    """What is written of a reference tensor, and of a region of a tensor that a rule makes."""

    def reference(self, name: str) -> Extents: ...
    def candidate(self, rule: Rule, made: Made, region: tuple[slice, ...]) -> Extents: ...


def values(seed: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Numbers between 2^-7 and 2^-5 of either sign, with every bit of the mantissa; the same for the same seed."""
    count = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(zlib.crc32(seed.encode())).integers(0, 1 << 64, size=-(-count // 8), dtype=np.uint64).view(np.uint8)[:count]
    word, keep, put = (np.uint16, 0x80FF, 0x3C00) if dtype == BF16 else (np.uint32, 0x80FFFFFF, 0x3C000000)
    bits: Any = raw.view(word)
    bits &= word(keep)
    bits |= word(put)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def reference_shapes(dims: Dimensions, mtp: bool) -> dict[str, tuple[Shape, torch.dtype]]:
    """Every tensor of a Qwen3.5-MoE's text model: experts fused, those of the MTP layer one by one."""
    found: dict[str, tuple[Shape, torch.dtype]] = {}
    hidden, queries, pairs = dims.hidden, dims.heads * dims.head_width, dims.groups * dims.head_width

    def add(prefix: str, shapes: Mapping[str, Shape], dtype: torch.dtype = BF16) -> None:
        found.update({prefix + name: (shape, dtype) for name, shape in shapes.items()})

    def attention(own: str) -> None:
        add(f"{own}self_attn.", {
            "q_proj.weight": (queries * (2 if dims.output_gate else 1), hidden), "k_proj.weight": (pairs, hidden),
            "v_proj.weight": (pairs, hidden), "o_proj.weight": (hidden, queries), "q_norm.weight": (dims.head_width,), "k_norm.weight": (dims.head_width,),
        })  # fmt: skip

    def linear(own: str) -> None:
        packed, heads = 2 * dims.key_rows + dims.value_rows, dims.value_heads
        add(f"{own}linear_attn.", {
            "in_proj_qkv.weight": (packed, hidden), "in_proj_z.weight": (dims.value_rows, hidden), "in_proj_b.weight": (heads, hidden),
            "in_proj_a.weight": (heads, hidden), "conv1d.weight": (packed, 1, dims.kernel), "norm.weight": (dims.value_width,),
            "out_proj.weight": (hidden, dims.value_rows),
        })  # fmt: skip
        add(f"{own}linear_attn.", {"A_log": (heads,), "dt_bias": (heads,)}, FP32)

    def moe(own: str, *, fused: bool) -> None:
        add(own, {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)})
        if fused:
            shapes: dict[str, Shape] = {
                "gate_up_proj": (dims.experts, 2 * dims.routed, hidden),
                "down_proj": (dims.experts, hidden, dims.routed),
            }
        else:
            one = {"gate_proj": (dims.routed, hidden), "up_proj": (dims.routed, hidden), "down_proj": (hidden, dims.routed)}
            shapes = {f"{e}.{name}.weight": shape for e in range(dims.experts) for name, shape in one.items()}
        add(f"{own}mlp.experts.", shapes)
        add(f"{own}mlp.", {
            "gate.weight": (dims.experts, hidden), "shared_expert_gate.weight": (1, hidden), "shared_expert.gate_proj.weight": (dims.shared, hidden),
            "shared_expert.up_proj.weight": (dims.shared, hidden), "shared_expert.down_proj.weight": (hidden, dims.shared),
        })  # fmt: skip

    add("model.", {"embed_tokens.weight": (dims.vocabulary, hidden), "norm.weight": (hidden,)})
    add("lm_head.", {"weight": (dims.vocabulary, hidden)})
    for n, kind in enumerate(dims.kinds):
        own = f"model.layers.{n}."
        (attention if kind == "attention" else linear)(own)
        moe(own, fused=True)
    if mtp:
        add(
            "mtp.",
            {
                "fc.weight": (hidden, 2 * hidden),
                "norm.weight": (hidden,),
                "pre_fc_norm_embedding.weight": (hidden,),
                "pre_fc_norm_hidden.weight": (hidden,),
            },
        )
        attention("mtp.layers.0.")
        moe("mtp.layers.0.", fused=False)
    return found


def write_reference(out: Path, config: Mapping[str, Any], shapes: Shapes, content: Content, shard: int = 8 << 30) -> int:
    """A Hugging Face directory in shards of about `shard` bytes, with an index.  Returns the bytes of its tensors."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shards: list[list[str]] = [[]]
    held = total = 0
    for name, (shape, dtype) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if held and held + size > shard:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held, total = held + size, total + size
    index = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        index.update(dict.fromkeys(map(_on_disk, names), file))
        _write_shard(out / file, {name: shapes[name] for name in names}, content)
    page = {"metadata": {"total_size": total}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(page, indent=2) + "\n")
    return total


def _on_disk(name: str) -> str:
    return PREFIX + name.removeprefix("model.") if name.startswith("model.") else name


def _write_shard(file: Path, shapes: Shapes, content: Content) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[_on_disk(name)] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as raw:
        raw.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            _put(raw, 8 + len(text) + header[_on_disk(name)]["data_offsets"][0], content.reference(name))
        raw.truncate(8 + len(text) + end)


def _put(raw: BinaryIO, begin: int, extents: Extents) -> None:
    for at, tensor in extents:
        raw.seek(begin + at)
        raw.write(tensor.contiguous().view(torch.uint8).numpy().data)


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What torch.save writes before and behind the bytes of one tensor."""

    head: bytes
    tail: bytes


@cache
def wrapping(shape: Shape, dtype: torch.dtype) -> Wrapping:
    """torch writes it itself, over a sparse file instead of memory, and leaves the tensor's bytes out (their checksum is 0)."""
    with tempfile.TemporaryDirectory() as folder:
        raw, file = Path(folder) / "raw", Path(folder) / "archive"
        tensor = torch.from_file(str(raw), shared=True, size=math.prod(shape), dtype=dtype).view(shape)
        with skip_data():
            torch.save(tensor, file)
        with zipfile.ZipFile(file) as archive:
            at = archive.getinfo("archive/data/0").header_offset
        with file.open("rb") as found:
            found.seek(at)
            header = found.read(30)
            begin = at + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            found.seek(0)
            head = found.read(begin)
            found.seek(begin + tensor.nbytes)
            return Wrapping(head, found.read())


class RankFile:
    """The file that one rank writes its chunks into, one behind the other."""

    def __init__(self, path: Path) -> None:
        self.raw, self.end = path.open("wb"), 0

    def chunk(self, shape: Shape, dtype: torch.dtype, extents: Extents) -> tuple[int, int]:
        """(byte it starts at, its length)."""
        wrapped, size = wrapping(shape, dtype), math.prod(shape) * dtype.itemsize
        start = self.end
        self.raw.seek(start)
        self.raw.write(wrapped.head)
        _put(self.raw, start + len(wrapped.head), extents)
        self.raw.seek(start + len(wrapped.head) + size)
        self.raw.write(wrapped.tail)
        self.end = self.raw.tell()
        return start, self.end - start

    def close(self) -> None:
        self.raw.close()


def write_candidate(out: Path, family: Family, config: Mapping[str, Any], shapes: Shapes, parallel: Parallel, content: Content) -> int:
    """A torch_dist checkpoint in slime's layout, and its .metadata.  Returns the number of chunks.

    Every expert's chunks are in the file of the rank that holds it; everything else is in the file of its stage's first rank.
    """
    dims = family.reference_dimensions(config)
    mtp = bool(family.mtp_tensors(shapes, dims))
    rules = family.rules(dims, "slime", tuple(shapes), mtp)
    root = out / "release"
    root.mkdir(parents=True)
    described: dict[str, Any] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    each = parallel.world // parallel.pp
    with ExitStack() as stack:
        files = [RankFile(root / f"__{rank}_0.distcp") for rank in range(parallel.world)]
        for file in files:
            stack.callback(file.close)
        for rule in rules:
            stage = stage_of(rule, dims, parallel)
            for made, shape in zip(rule.candidates, rule.op.shapes([shapes[name][0] for name in rule.references]), strict=True):
                dtype = shapes[rule.references[0]][1]
                chunks = []
                for rank, region in _regions(made, shape, parallel):
                    offset = torch.Size(part.start for part in region)
                    size = torch.Size(part.stop - part.start for part in region)
                    rank += stage * each
                    start, length = files[rank].chunk(tuple(size), dtype, content.candidate(rule, made, region))
                    where[MetadataIndex(made.name, offset)] = _StorageInfo(f"__{rank}_0.distcp", start, length)
                    chunks.append(ChunkStorageMetadata(offset, size))
                described[made.name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
                _extra_states(made, shape, described)
        tensors = len(where)
        first = files[0].chunk((1,), torch.uint8, iter(()))
    for key, entry in described.items():
        if isinstance(entry, BytesStorageMetadata):
            where[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", *first)
    (root / ".metadata").write_bytes(pickle.dumps(Metadata(described, None, where)))
    args = conversion_args(family, config, dims, "slime", parallel, BF16, mtp)
    torch.save({"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 0}, root / "common.pt")
    page = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (root / "metadata.json").write_text(json.dumps(page))
    (out / "latest_checkpointed_iteration.txt").write_text("release")
    return tensors


def stage_of(rule: Rule, dims: Dimensions, parallel: Parallel) -> int:
    """The pipeline stage that writes a rule's tensors."""
    if rule.site.in_layer and rule.site.layer is not None:
        return parallel.stage_of(rule.site.layer, dims.layers)
    return 0 if rule.site.module == "embedding" else parallel.pp - 1


def _regions(made: Made, shape: Shape, parallel: Parallel) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """(rank inside the stage, region) of every chunk of a tensor; experts one by one."""
    for (rank, *_), regions in pieces_of(made.cut, shape, parallel).items():
        for region in regions:
            experts = range(region[0].start, region[0].stop) if made.cut.expert else [None]
            for e in experts:
                yield rank, region if e is None else (slice(e, e + 1), *region[1:])


def _extra_states(made: Made, shape: Shape, described: dict[str, Any]) -> None:
    """Megatron's modules keep an empty extra state beside every expert: entries that a reader has to skip."""
    if made.cut.expert:
        for e in range(shape[0]):
            described[f"{made.name.removesuffix('weight')}_extra_state/shard_{e}_{shape[0]}"] = BytesStorageMetadata()


class Dense:
    """Every byte written.  source: the expert of the reference that expert e holds"""

    def __init__(self, shapes: Shapes, source: Sequence[int] = ()) -> None:
        self.shapes, self.source = shapes, source
        self._made: dict[str, torch.Tensor] = {}
        self._rule: Rule | None = None

    def reference(self, name: str) -> Extents:
        yield 0, values(name, *self.shapes[name])

    def candidate(self, rule: Rule, made: Made, region: tuple[slice, ...]) -> Extents:
        if rule is not self._rule:
            self._rule, self._made = rule, rule.forward([values(name, *self.shapes[name]) for name in rule.references])
        if made.cut.expert and self.source:
            e = self.source[region[0].start]
            region = (slice(e, e + 1), *region[1:])
        yield 0, self._made[made.name][region]


@dataclass(frozen=True, slots=True)
class Watched:
    """A command that ended.  peaks: the most memory that each of its processes held, the largest first"""

    code: int
    seconds: float
    peaks: tuple[int, ...]
    said: str


def watched(command: Sequence[str]) -> Watched:
    """Runs a command and keeps an eye on its memory, children included, each at its own peak."""
    started = time.perf_counter()
    peaks: dict[int, int] = {}
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stdout=said) as child:
        while child.poll() is None:
            for pid in [child.pid, *_children(child.pid)]:
                peaks[pid] = max(peaks.get(pid, 0), _peak(pid))
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        said.seek(0)
        # multiprocessing's own tracker of resources never imports torch, and is no worker
        held = sorted((peak for peak in peaks.values() if peak > 64 << 20), reverse=True)
        return Watched(child.returncode, seconds, tuple(held), said.read())


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _peak(pid: int) -> int:
    """The most memory a process has held so far, as the kernel keeps it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
