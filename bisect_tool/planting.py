"""plant: a copy of a checkpoint with one known fault in it.

Three carriers.  `weights` and `args` change files in the copy; `code` writes patch.py into it, which runs only when
`run --candidate-patch` names it.  Searching and judging never read where or what was planted.
"""

from __future__ import annotations

import io
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import Dimensions, Family, check_sizes, family_of_tensors
from bisect_hooks.parallel import Parallel
from bisect_hooks.table import GroupHeads

from bisect_tool.args import parallel_args, parallel_of, plain
from bisect_tool.candidate import Built
from bisect_tool.conversion import RELEASE, check_empty, whole
from bisect_tool.pickles import load_pickle, load_torch
from bisect_tool.ranks import WORLDS
from bisect_tool.torch_dist import TRACKER, Chunk, TorchDist, open_torch_dist


@dataclass(slots=True)
class Copy:
    """A copy of a checkpoint that is being edited."""

    checkpoint: TorchDist
    family: Family
    dims: Dimensions
    parallel: Parallel
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    args: dict[str, Any] = field(default_factory=dict)
    patch: str = ""

    def read(self, key: str) -> torch.Tensor:
        return self.checkpoint.read(key)

    def keys(self, end: str) -> list[str]:
        """Keys of the decoder's layers with this end, by layer.  Raises UsageError when there is none."""
        found = [key for n in range(self.dims.layers) if (key := f"decoder.layers.{n}.{end}") in self.checkpoint.tensors]
        if not found:
            raise UsageError(
                f"{self.checkpoint.path} has no decoder.layers.*.{end}: this fault can't be planted in the {self.checkpoint.layout} layout"
            )
        return found


@dataclass(frozen=True, slots=True)
class Plant:
    """One fault of the catalogue.  needs  the axis that has to be larger than 1 for the fault to exist"""

    id: str
    carrier: str
    what: str
    edit: Callable[[Copy], None]
    needs: str = ""


def expert_from_local_number(copy: Copy) -> None:
    """E01: the expert slice is taken with the EP-local number."""
    width = copy.dims.experts // copy.parallel.ep
    for end in ("mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight"):
        for key in copy.keys(end):
            right = copy.read(key)
            copy.changed[key] = right[[e % width for e in range(copy.dims.experts)]]


def gate_not_regrouped(copy: Copy) -> None:
    """Hugging Face's [query, gate] a head, taken over as it is, where Megatron wants a group's queries before its gates."""
    dims = copy.dims
    heads = GroupHeads(dims.groups, dims.heads, dims.head_width, True)
    for key in copy.keys("self_attention.linear_qkv.weight"):
        packed = copy.read(key)
        query, k, v = heads.backward([packed])
        parts = [query.reshape(dims.groups, -1, query.shape[-1]), *(t.reshape(dims.groups, dims.head_width, -1) for t in (k, v))]
        copy.changed[key] = torch.cat(parts, dim=1).reshape(packed.shape).contiguous()


def cut_evenly(copy: Copy) -> None:
    """in_proj's packed rows [q k v z beta alpha] cut into equal blocks, each then read as if it were one rank's parts."""
    parts = ("query", "key", "value", "z", "beta", "alpha")
    for first in copy.keys("self_attention.in_proj.weight.query"):
        keys = [first.removesuffix("query") + part for part in parts]
        right = [copy.read(key) for key in keys]
        ways = copy.parallel.tp
        local = [block.split([len(part) // ways for part in right]) for block in torch.cat(right).chunk(ways)]
        for i, key in enumerate(keys):
            copy.changed[key] = torch.cat([rank[i] for rank in local]).contiguous()


def decay_rounded(copy: Copy) -> None:
    """G04: A_log rounded to bf16 and stored as float32 again."""
    keys = [key for key in copy.checkpoint.tensors if key.endswith(".A_log")]
    for key in keys:
        copy.changed[key] = copy.read(key).to(torch.bfloat16).float()


def gate_dropped(copy: Copy) -> None:
    """S04: the flag is off, so the converter never made the tensor."""
    copy.args["moe_shared_expert_gate"] = False
    copy.dropped |= {key for key in copy.checkpoint.tensors if key.endswith(".mlp.shared_experts.gate_weight")}


def softmax_before_topk(copy: Copy) -> None:
    """T01: probabilities over all experts, not renormalised over the chosen."""
    copy.args["moe_router_pre_softmax"] = True


def rotary_base_forgotten(copy: Copy) -> None:
    """P01: the base falls back to Megatron's default."""
    copy.args["rotary_base"] = 10000


def plain_gamma(copy: Copy) -> None:
    """N03: w where the reference has 1 + w."""
    copy.args["apply_layernorm_1p"] = False


def _offset(copy: Copy) -> tuple[int, range]:
    if copy.dims.layers % copy.parallel.pp or copy.parallel.pp_layers:
        raise UsageError("L01 needs an even split over --pp")
    stage = copy.dims.layers // copy.parallel.pp
    last = range(copy.dims.layers - stage, copy.dims.layers)
    if any(copy.dims.kinds[n] != copy.dims.kinds[n - last.start] for n in last):
        raise UsageError(f"L01 can't be built: the kinds of layers 0 to {stage - 1} and {last.start} to {last.stop - 1} differ")
    return last.start, last


def stage_offset_forgotten(copy: Copy) -> None:
    """L01: layers of the last stage hold those of the first."""
    offset, layers = _offset(copy)
    for key in copy.checkpoint.tensors:
        words = key.split(".")
        if key.startswith("decoder.layers.") and int(words[2]) in layers:
            copy.changed[key] = copy.read(".".join([*words[:2], str(int(words[2]) - offset), *words[3:]]))


def stage_offset_at_run_time(copy: Copy) -> None:
    """L01 made by the running model: no file is wrong."""
    copy.patch = STAGE_OFFSET_PATCH


STAGE_OFFSET_PATCH = '''"""L01 at run time: every pipeline stage ends up with the first stage's layers, because the layer offset is forgotten."""

import torch.distributed as dist
from megatron.core import parallel_state


def patch(model, parallel):
    if parallel.pp == 1:
        return
    group = parallel_state.get_pipeline_model_parallel_group()
    first = parallel_state.get_pipeline_model_parallel_first_rank()
    for layer in model.decoder.layers:
        for parameter in layer.parameters():
            dist.broadcast(parameter.data, src=first, group=group)
'''

PLANTS = (
    Plant(
        "E01",
        "weights",
        "expert e holds expert e mod (experts / EP): the converter used EP-local numbers (slime#1799)",
        expert_from_local_number,
        "ep",
    ),
    Plant("A03", "weights", "q and gate rows of linear_qkv are not regrouped from Hugging Face's per-head packing", gate_not_regrouped),
    Plant("G01", "weights", "the packed in_proj is cut evenly over TP, not part by part (native; Megatron-Bridge#1690)", cut_evenly, "tp"),
    Plant("G04", "weights", "A_log rounded through bf16: precision lost, the function is the same (minor)", decay_rounded),
    Plant("S04", "args", "the shared expert's gate is left out: --moe-shared-expert-gate is missing", gate_dropped),
    Plant("T01", "args", "softmax over all experts and no renormalisation: --moe-router-pre-softmax", softmax_before_topk),
    Plant("P01", "args", "rotary base 10000 instead of the model's", rotary_base_forgotten),
    Plant("N03", "args", "zero-centred gamma taken as plain: --apply-layernorm-1p is missing", plain_gamma),
    Plant(
        "L01",
        "weights",
        "the last pipeline stage holds the first stage's layers: offset forgotten in the file",
        stage_offset_forgotten,
        "pp",
    ),
    Plant("L01-run", "code", "the same made at run time: the files are right", stage_offset_at_run_time, "pp"),
)


def listing() -> str:
    """One line a fault: id, carrier, what it needs, what it is."""
    return "\n".join(f"{one.id:<8} {one.carrier:<8} {'--' + one.needs + ' > 1' if one.needs else '':<9} {one.what}" for one in PLANTS)


def plant(fault: str, candidate: Path, out: Path, parallel: Parallel | None) -> str:
    """Writes the copy and returns a line about it.  The good checkpoint is never touched."""
    known = {one.id: one for one in PLANTS}
    if fault not in known:
        raise UsageError(f"unknown fault {fault!r}", hint=f"known: {', '.join(known)} (bisect-tool plant --list)")
    one = known[fault]
    checkpoint = open_torch_dist(candidate)
    args = plain(checkpoint.args)
    if not args:
        raise UsageError(f"{checkpoint.path} keeps no args, so nothing says how it was converted")
    family = family_of_tensors(args, checkpoint.layout, checkpoint.tensors)
    dims = family.candidate_dimensions(args)
    written = parallel_of(args, dims.layers) or Parallel()
    under = parallel or written
    if one.needs and under.size(one.needs) == 1:
        raise UsageError(
            f"{fault} exists only with --{one.needs} above 1; this copy would be written under {under}", hint=f"add --{one.needs} 2"
        )
    check_sizes(dims, under)
    check_empty(out)
    with whole(out) as partial:
        target = partial / RELEASE
        if _same_cut(under, written):
            shutil.copytree(checkpoint.path, target)
        else:
            _write_under(checkpoint, family, args, under, target)
        (partial / TRACKER).write_text(RELEASE)
        copy = Copy(open_torch_dist(target), family, dims, under, args=parallel_args(under))
        one.edit(copy)
        apply(copy)
        if copy.patch:
            (partial / "patch.py").write_text(copy.patch)
    changed = (
        f"{len(copy.changed)} tensors changed, {len(copy.dropped)} dropped"
        if one.carrier != "code"
        else "no file changed; patch.py written"
    )
    return f"wrote {out}: {fault} ({one.carrier}), {under}; {changed}"


def _same_cut(one: Parallel, other: Parallel) -> bool:
    names = ("tp", "pp", "ep", "expert_tp", "cp", "pp_layers")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _write_under(checkpoint: TorchDist, family: Family, args: dict[str, Any], parallel: Parallel, target: Path) -> None:
    """The same tensors written by as many ranks as the layout has, with megatron-core's own loader and writer."""
    what = Built(family.name, args, checkpoint.layout, parallel, torch.bfloat16, mtp=bool(args.get("mtp_num_layers")))
    world = WORLDS.get(parallel.world)
    world.call("build", what=what, checkpoint=None)
    common = {"args": args | parallel_args(parallel), "checkpoint_version": 3.0, "iteration": 0}
    world.call("save_again", checkpoint=checkpoint.path, out=target, common=common)


def apply(copy: Copy) -> None:
    """Writes the edits into the copy's files: chunks in place, args in common.pt, dropped tensors out of .metadata."""
    root = copy.checkpoint.path
    moved: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for key, tensor in copy.changed.items():
        stored = copy.checkpoint.tensors[key]
        if tuple(tensor.shape) != stored.shape or tensor.dtype != stored.dtype:
            raise UsageError(f"{key} is {stored.dtype} {stored.shape}; a plant may not change that")
        for chunk in stored.chunks:
            part = tensor[tuple(slice(at, at + size) for at, size in zip(chunk.offset, chunk.shape, strict=True))].clone()
            place = _put(chunk, part)
            if place is not None:
                moved[key, chunk.offset] = place
    if moved or copy.dropped:
        _rewrite_metadata(root / ".metadata", moved, copy.dropped)
    common = load_torch(root / "common.pt")
    common["args"] = Namespace(**(vars(common["args"]) | copy.args))
    torch.save(common, root / "common.pt")


def _put(chunk: Chunk, part: torch.Tensor) -> tuple[int, int] | None:
    """Overwrites a chunk's blob; a blob of another length goes to the end of the file and its place is returned."""
    buffer = io.BytesIO()
    torch.save(part, buffer)
    blob = buffer.getvalue()
    with chunk.file.open("r+b") as file:
        if len(blob) == chunk.length:
            file.seek(chunk.start)
            file.write(blob)
            return None
        place = file.seek(0, io.SEEK_END)
        file.write(blob)
        return place, len(blob)


def _rewrite_metadata(path: Path, moved: dict[tuple[str, tuple[int, ...]], tuple[int, int]], dropped: set[str]) -> None:
    metadata = load_pickle(path)
    for key in dropped:
        metadata.state_dict_metadata.pop(key)
    for index in [index for index in metadata.storage_data if index.fqn in dropped]:
        metadata.storage_data.pop(index)
    for index, info in metadata.storage_data.items():
        place = moved.get((index.fqn, tuple(index.offset or ())))
        if place is not None:
            info.offset, info.length = place
    if dropped and getattr(metadata, "planner_data", None):
        metadata.planner_data = {key: value for key, value in metadata.planner_data.items() if not any(one in str(key) for one in dropped)}
    path.write_bytes(pickle.dumps(metadata))
