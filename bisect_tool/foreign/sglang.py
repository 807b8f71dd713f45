"""SGLang's dumper (`sglang.srt.debug_utils.dumper`, also miles'): one .pt a tensor a rank, tags in the file name.

A name is `k=v___k=v.pt` with step, rank, dump_index, name and the caller's tags; the content {"value", "meta"}, in older versions
the bare tensor.  Hooks name `non_intrusive__<module>.output[.i]` and `.inputs.<i>`; core fields are bare (input_ids, positions,
seq_lens).  An index of a pipeline stage is global in SGLang's own models.  Of several steps the one with most tokens is taken: the
prefill.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError

from bisect_tool.foreign.dump import Dump, RankDump, as_ids, read_tensors

HOOKED = re.compile(r"(?:non_intrusive__)?(?P<module>.*?)\.output(?:\.(?P<index>\d+))?")
INPUTS = ("input_ids", "positions", "position_ids", "seq_lens", "extend_seq_lens")
AXES = ("tp", "pp", "dp", "ep", "cp")


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    tags: dict[str, str]

    @property
    def step(self) -> int:
        return int(self.tags.get("step", self.tags.get("forward_pass_id", "0")))

    @property
    def rank(self) -> int:
        return int(self.tags.get("rank", "0"))


def read(directory: Path) -> Dump:
    """The pass with most tokens.  Raises UsageError for a directory without dumps or without token ids."""
    files, ids = _opened(directory)
    step = max(sorted(ids), key=lambda one: ids[one].numel())
    found = _step([file for file in files if file.step == step], ids[step])
    others = sorted(set(ids) - {step})
    note = f"step {step} was taken, the one with most tokens; {len(others)} other steps were left out"
    return replace(found, notes=(note,) if others else ())


def read_decode(directory: Path) -> Dump:
    """The prefill of one sequence and the decode steps behind it, put together as one pass.  Raises UsageError for a dump of several."""
    files, ids = _opened(directory)
    start = max(sorted(ids), key=lambda one: ids[one].numel())
    steps = [start]
    for step in sorted(one for one in ids if one > start):
        if ids[step].numel() == 1:
            steps.append(step)
    passes = [_step([file for file in files if file.step == step], ids[step]) for step in steps]
    if len(steps) == 1 or len(passes[0].lengths) > 1:
        raise UsageError(f"{directory} holds no prefill of one sequence with decode steps behind it", hint="dump one request, alone")
    ranks = []
    for parts in zip(*(one.ranks for one in passes), strict=True):
        names = set.intersection(*(set(part.tensors) for part in parts))
        ranks.append(RankDump({name: torch.cat([part.tensors[name] for part in parts]) for name in sorted(names)}, parts[0].at))
    whole = torch.cat([one.ids.flatten() for one in passes])
    positions = [one.positions for one in passes if one.positions is not None]
    placed = torch.cat([one.flatten() for one in positions]) if len(positions) == len(passes) else None
    note = f"{len(steps) - 1} decode steps were put behind the prefill of step {start}"
    return Dump(tuple(ranks), whole, (len(whole),), placed, passes[0].sizes, (note,), decoded=passes[0].ids.numel())


def _opened(directory: Path) -> tuple[list[_File], dict[int, torch.Tensor]]:
    """(files, token ids by step)."""
    files = sorted(_files(directory), key=lambda file: (file.rank, int(file.tags.get("dump_index", "0"))))
    if not files:
        raise UsageError(f"{directory} holds no file of SGLang's dumper (name=..___...pt)")
    ids = {file.step: as_ids(_value(file)[0], str(file.path)) for file in files if file.tags["name"] == "input_ids"}
    if not ids:
        raise UsageError(
            f"{directory}: no step dumped input_ids, so nothing can be lined up with it", hint="keep the core fields in the filter"
        )
    return files, ids


def _step(files: Sequence[_File], ids: torch.Tensor) -> Dump:
    """One forward pass."""
    by_rank: dict[int, tuple[dict[str, torch.Tensor], dict[str, int]]] = {}
    inputs: dict[str, torch.Tensor] = {}
    sizes: dict[str, int] = {}
    for file in files:
        value, meta = _value(file)
        if not isinstance(value, torch.Tensor):
            continue
        info = _parallel(meta)
        sizes |= {axis: info[f"{axis}_size"] for axis in AXES if f"{axis}_size" in info}
        tensors, _ = by_rank.setdefault(file.rank, ({}, {axis: info.get(f"{axis}_rank", 0) for axis in AXES}))
        name = file.tags["name"]
        hooked = HOOKED.fullmatch(name)
        if name in INPUTS:
            inputs.setdefault(name, value)
        elif hooked:
            tensors[hooked["module"] + (f":{hooked['index']}" if hooked["index"] else "")] = value
        elif not name.startswith(("grad__", "param__")) and ".inputs." not in name:
            layer = file.tags.get("layer_id")
            tensors[f"layers.{layer}.{name}" if layer is not None else name] = value
    lengths = inputs.get("extend_seq_lens", inputs.get("seq_lens"))
    return Dump(
        tuple(RankDump(tensors, at) for _, (tensors, at) in sorted(by_rank.items())), ids,
        tuple(lengths.tolist()) if lengths is not None and int(lengths.sum()) == ids.numel() else (),
        inputs.get("positions", inputs.get("position_ids")), sizes,
    )  # fmt: skip


def _files(directory: Path) -> Iterator[_File]:
    for path in directory.glob("*.pt"):
        tags = dict(word.split("=", 1) for word in path.stem.split("___") if "=" in word)
        if "name" in tags:
            yield _File(path, tags)


def _value(file: _File) -> tuple[Any, dict[str, Any]]:
    found = read_tensors(file.path)
    if isinstance(found, dict) and "value" in found:
        return found["value"], found.get("meta") or {}
    return found, {}


def _parallel(meta: dict[str, Any]) -> dict[str, int]:
    for name in ("sglang_parallel_info", "megatron_parallel_info"):
        info = meta.get(name)
        if isinstance(info, dict) and info and not any(key.endswith("_error") for key in info):
            return {key: value for key, value in info.items() if isinstance(value, int)}
    return {}
