"""What the ranks of a layout would have recorded, cut by hand from a whole forward pass and written with the shipping writer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.parallel import Parallel
from bisect_hooks.shard_file import Part, ShardPage, write_shard
from bisect_hooks.zigzag import zigzag_order

LayoutOf = Callable[[str], str]


def megatron(key: str) -> str:
    """How megatron-core's tensors lie on ranks, where the linear attention is whole on each of them (the `slime` layout)."""
    word = key.partition(":")[0]
    if word in ("tokens", "positions"):
        return "b s[cp]"
    if ".linear_attention." in word and not word.endswith("out_proj"):
        return "b s f"
    inner = ".attention." in word and not word.endswith("out_proj")
    if inner or word.endswith(("attention_gate", "shared_expert.fc1", "lm_head")):
        return "s[cp] b f[tp]"
    return "s[cp,sp] b h"


def write_ranks(
    out: Path, said: Mapping[str, torch.Tensor], rows: Sequence[Sequence[int]], parallel: Parallel, *,
    layout_of: LayoutOf = megatron, packed: Mapping[str, Any] | None = None, positions: Sequence[int] | None = None, change: Callable[[int, dict[str, torch.Tensor]], None] = lambda *_: None,
) -> Path:  # fmt: skip
    """Rows packed into one sequence, each padded to what context and sequence parallel divide; one file a rank."""
    lengths = [len(row) for row in rows]
    unit = 2 * parallel.cp * parallel.tp if parallel.cp > 1 else parallel.tp if parallel.sp else 1
    padded = [-(-size // unit) * unit for size in lengths]
    bounds = {"cu_seqlens": [0, *itertools.accumulate(lengths)], "cu_seqlens_padded": [0, *itertools.accumulate(padded)]}
    everything = dict(said)
    if positions is not None:
        everything["positions"] = torch.tensor(positions)[:, None]
    for rank in range(parallel.world):
        at = parallel.coordinates(rank)
        tensors, taps = {}, {}
        for key, value in everything.items():
            text = layout_of(key)
            whole = torch.cat([pad(part, size) for part, size in zip(value.split(lengths), padded, strict=True)])
            tensors[key] = _local(whole, text, padded, parallel, at)
            taps[key] = Part(text, (key,))
        change(rank, tensors)
        page = ShardPage(
            side="candidate", family="qwen3.5-moe", model="by hand", dtype="float32", rank=rank, world=parallel.world,
            sizes=parallel.shown() | {"dp": 1, "sp": int(parallel.sp)}, at={axis: at[axis] for axis in ("tp", "pp", "dp", "ep", "etp", "cp")},
            local={"b": 1}, taps=taps, packed=bounds | dict(packed or {}), layout="slime",
        )  # fmt: skip
        write_shard(out, page, tensors)
    return out


def pad(part: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([part, part.new_full((size - len(part), *part.shape[1:]), 7)])


def _local(whole: torch.Tensor, text: str, padded: Sequence[int], parallel: Parallel, at: Any) -> torch.Tensor:
    """[s f] → this rank's part, with a batch dim."""
    sequence_first = text.startswith("s")
    if "s[cp" in text and parallel.cp > 1:
        order = zigzag_order(len(whole), padded, parallel.cp)
        whole = whole[order].chunk(parallel.cp)[at.cp]
    if "sp" in text and parallel.sp:
        whole = whole.chunk(parallel.tp)[at.tp]
    if "[tp]" in text:
        whole = whole.chunk(parallel.tp, -1)[at.tp]
    if "f[cp]" in text:
        whole = whole.chunk(parallel.cp, -1)[at.cp]
    if text == "b s[cp]":
        return whole.flatten()[None]
    return (whole[:, None] if sequence_first else whole[None]).clone()
