"""Faults put into a conversion's files without megatron: every tensor as one whole, edited, and written back where it lay."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.family import family_of
from bisect_hooks.parallel import Parallel
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from workshop import REFERENCE, verdict_of

from bisect_tool.__main__ import run
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.hf_directory import read_config
from bisect_tool.planting import apply
from bisect_tool.plants import Copy

FAMILY = family_of(read_config(REFERENCE))
State = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]
EVERY, LINEAR, FULL = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 5, 6], [3, 7]
EXPERTS, ROUTED, WIDTH, GROUP = 16, 40, 32, 320
FC1, FC2 = "mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight"
SHARED1, SHARED2 = "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"
QKV, PROJ = "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"
HEAD, EMBEDDING, FINAL = "output_layer.weight", "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
MTP = "mtp.layers.0.transformer_layer."
BETA, DT_BIAS = ("linear_attn.in_proj_b.weight", "in_proj.weight.beta"), ("linear_attn.dt_bias", "dt_bias")
# the parts of a native packed projection, in packing order
IN_PROJ = tuple(f"in_proj.weight.{part}" for part in ("query", "key", "value", "z", "beta", "alpha"))
CONV = tuple(f"conv1d.weight.{part}" for part in ("query", "key", "value"))


@dataclass(frozen=True)
class Audited:
    """What an audit said: its exit code, its report, and the weights stage of that."""

    code: int
    page: Mapping[str, Any]

    @property
    def stage(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = next(stage for stage in self.page["stages"] if stage["name"] == "weights")
        return found

    @property
    def faults(self) -> list[dict[str, Any]]:
        return [verdict(fault) for fault in self.page["faults"]]

    @property
    def minor(self) -> list[dict[str, Any]]:
        return [verdict(fault) for fault in self.page["minor"]]


def audit(out: Path, *more: str | Path, reference: Path = REFERENCE) -> Audited:
    """bisect-tool audit, as a user runs it."""
    code = run(["audit", "--reference", str(reference), *map(str, more), "--out", str(out)])
    return Audited(code, json.loads((out / "report.json").read_text()))


def verdict(fault: Mapping[str, Any]) -> dict[str, Any]:
    """The whole verdict of a fault: everything but its numbers, names and sentences."""
    return verdict_of(fault) | {"between": fault["between"], "detail": fault["relation"]["detail"]}


@dataclass
class Work:
    """A checkpoint that is being edited: put new tensors in the place of old ones, never write into one."""

    tensors: State
    args: dict[str, Any] = field(default_factory=dict)
    iteration: int | None = None


Edit = Callable[[Work], None]


def edited(good: Path, out: Path, *edits: Edit) -> Path:
    """A copy of a conversion with the edits in it: chunk by chunk in the same files, or all anew where names or shapes change."""
    source = open_checkpoint(good)
    before = {key: source.read(key) for key in source.tensors}
    work = Work(dict(before))
    for edit in edits:
        edit(work)
    changed = {key: tensor for key, tensor in work.tensors.items() if tensor is not before.get(key)}
    fits = all(key in before and (one.shape, one.dtype) == (before[key].shape, before[key].dtype) for key, one in changed.items())
    target = out / source.path.name
    if fits:
        shutil.copytree(source.path, target)
        dims = FAMILY.candidate_dimensions(source.args)
        apply(Copy(open_checkpoint(target), FAMILY, dims, Parallel(), changed, set(before) - set(work.tensors), work.args))
    else:
        save({key: tensor.contiguous() for key, tensor in work.tensors.items()}, storage_writer=FileSystemWriter(target), no_dist=True)
    if not fits or work.iteration is not None:
        args = Namespace(**(source.args | work.args))
        torch.save(dict(source.common) | {"args": args, "iteration": work.iteration or 0}, target / "common.pt")
    return target


def both(*edits: Edit) -> Edit:
    def edit(work: Work) -> None:
        for one in edits:
            one(work)

    return edit


def row_times(at: tuple[int, ...], factor: float) -> Change:
    """One row as torch multiplies it in the dtype it has."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.clone()
        moved[at] = moved[at] * factor
        return moved

    return change


def each(ends: Sequence[str], layers: Sequence[int], change: Change) -> Edit:
    """Changes tensors of decoder layers."""
    return named([f"decoder.layers.{n}.{end}" for n in layers for end in ends], change)


def inside(names: Sequence[str], layers: Sequence[int], change: Change) -> Edit:
    """Changes a tensor of linear attention, by its name in the slime layout or in the native one."""

    def edit(work: Work) -> None:
        for n in layers:
            keys = [f"decoder.layers.{n}.self_attention.{name}" for name in names]
            named([key for key in keys if key in work.tensors], change)(work)

    return edit


def named(keys: Sequence[str], change: Change) -> Edit:
    def edit(work: Work) -> None:
        for key in keys:
            work.tensors[key] = change(work.tensors[key]).contiguous()

    return edit


def dropped(keys: Sequence[str]) -> Edit:
    def edit(work: Work) -> None:
        for key in keys:
            work.tensors.pop(key)

    return edit


def renamed(old: str, new: str, start: str = "") -> Edit:
    def edit(work: Work) -> None:
        work.tensors = {key.replace(old, new) if key.startswith(start) else key: tensor for key, tensor in work.tensors.items()}

    return edit


def copied(source: str, target: str) -> Edit:
    def edit(work: Work) -> None:
        work.tensors[target] = work.tensors[source].clone()

    return edit


def set_args(**args: Any) -> Edit:
    def edit(work: Work) -> None:
        work.args |= args

    return edit


def taken(order: Sequence[int], dim: int = 0) -> Change:
    index = torch.tensor(order)
    return lambda tensor: tensor.index_select(dim, index)


def filled(value: float) -> Change:
    return lambda tensor: torch.full_like(tensor, value)


def rows_filled(start: int, stop: int, value: float) -> Change:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[start:stop] = value
        return tensor

    return change


def fresh(seed: int, std: float = 0.02) -> Change:
    return lambda tensor: (torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * std).to(tensor.dtype)


def there_and_back(tensor: torch.Tensor) -> torch.Tensor:
    """w - 1 + 1, in bfloat16."""
    return (tensor - 1) + 1


def through_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().to(tensor.dtype)


def through_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """e4m3 with one scale for the tensor, and back."""
    scale = tensor.float().abs().max() / 448
    return ((tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)


def through_int8(tensor: torch.Tensor) -> torch.Tensor:
    """int8 with one scale a row, and back."""
    scale = tensor.float().abs().amax(-1, keepdim=True) / 127
    return ((tensor.float() / scale).round() * scale).to(tensor.dtype)


# gate and up of one expert's fc1, as they come to lie: cut over two ranks before they were parted; in blocks of eight
HALF_CUT = [*range(20), *range(40, 60), *range(20, 40), *range(60, 80)]
BLOCKS_OF_8 = [part * ROUTED + block * 8 + i for block in range(5) for part in range(2) for i in range(8)]
# units of 32 rows of linear_qkv: a group is four queries, four gates, k and v; Hugging Face's order is query, gate, query, gate ..
NOT_REGROUPED = [group * 10 + unit for group in range(2) for unit in (0, 4, 1, 5, 2, 6, 3, 7, 8, 9)]


def of_width(width: int) -> list[int]:
    """Rows of linear_qkv regrouped as if heads were of another width: the queries and gates of a group, k and v in their places."""
    found: list[int] = []
    for group in range(2):
        at = group * GROUP
        # where Hugging Face's row j of the group's [query, gate] a head lies when it is regrouped rightly
        right = [at + gate * 128 + head * WIDTH + i for head in range(4) for gate in range(2) for i in range(WIDTH)]
        heads = 256 // (2 * width)
        wrong = [head * 2 * width + gate * width + i for gate in range(2) for head in range(heads) for i in range(width)]
        found += [right[j] for j in wrong] + list(range(at + 256, at + GROUP))
    return found


def units(order: Sequence[int], size: int) -> list[int]:
    """Rows of an order of blocks."""
    return [unit * size + i for unit in order for i in range(size)]


def cut_evenly(parts: Sequence[str], layers: Sequence[int]) -> Edit:
    """Packed rows cut in two halves, each read as if it were one rank's parts."""

    def edit(work: Work) -> None:
        for n in layers:
            keys = [f"decoder.layers.{n}.self_attention.{part}" for part in parts]
            rows = [len(work.tensors[key]) // 2 for key in keys]
            ranks = [half.split(rows) for half in torch.cat([work.tensors[key] for key in keys]).chunk(2)]
            for i, key in enumerate(keys):
                work.tensors[key] = torch.cat([rank[i] for rank in ranks]).contiguous()

    return edit


def layers_of(source: Sequence[int], target: Sequence[int]) -> Edit:
    """Whole layers put in the place of others."""

    def edit(work: Work) -> None:
        old = dict(work.tensors)
        for a, b in zip(source, target, strict=True):
            for key, tensor in old.items():
                if key.startswith(f"decoder.layers.{a}."):
                    work.tensors[key.replace(f"layers.{a}.", f"layers.{b}.")] = tensor.clone()

    return edit


def expert_of(layer: int, other: int, e: int) -> Edit:
    """One expert of another layer."""

    def edit(work: Work) -> None:
        for end in (FC1, FC2):
            key, source = (f"decoder.layers.{n}.{end}" for n in (layer, other))
            tensor = work.tensors[key].clone()
            tensor[e] = work.tensors[source][e]
            work.tensors[key] = tensor

    return edit


def norms_exchanged(n: int) -> Edit:
    def edit(work: Work) -> None:
        first = input_norm(work, n)
        second = f"decoder.layers.{n}.pre_mlp_layernorm.weight"
        work.tensors[first], work.tensors[second] = work.tensors[second].clone(), work.tensors[first].clone()

    return edit


def input_norm(work: Work, n: int) -> str:
    """Its name: slime keeps it inside the linear attention."""
    name = f"decoder.layers.{n}.input_layernorm.weight"
    return name if name in work.tensors else f"decoder.layers.{n}.self_attention.input_layernorm.weight"


def norms_rounded(work: Work) -> None:
    """Every norm with a zero-centred gamma there and back."""
    keys = [key for key in work.tensors if key.startswith("decoder.") and key.endswith("layernorm.weight")]
    named(keys, there_and_back)(work)


def decay_rounded(work: Work) -> None:
    named([key for key in work.tensors if key.endswith(".A_log")], through_bf16)(work)


def loud_padding(work: Work) -> None:
    """Padding rows of the output layer that win every argmax."""
    head = work.tensors[HEAD].clone()
    head[500:] = head[:12] * 50
    work.tensors[HEAD] = head


def quiet_padding(work: Work) -> None:
    """Noise in the padding rows of both ends, as an initialisation leaves it there."""
    for key in (EMBEDDING, HEAD):
        tensor = work.tensors[key].clone()
        tensor[500:] = fresh(5)(tensor[500:])
        work.tensors[key] = tensor


def mtp_dropped(work: Work) -> None:
    dropped([key for key in work.tensors if key.startswith("mtp.")])(work)


def gate_left_out(work: Work) -> None:
    """S04: the flag is off, so the converter never made the tensor."""
    dropped([key for key in work.tensors if key.startswith("decoder.") and key.endswith("shared_experts.gate_weight")])(work)
    work.args["moe_shared_expert_gate"] = False
