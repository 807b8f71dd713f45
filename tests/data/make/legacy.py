"""Write Megatron's legacy checkpoint format from global tensors: what `--ckpt-format torch` leaves on disk.

A module for tests, no megatron needed and nothing of ours imported: `write_legacy(out, tensors, args, Layout(tp=2, ep=2))` writes

    out/latest_checkpointed_iteration.txt
    out/iter_0000005/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

`tensors` are global ones under the names of a torch_dist checkpoint (`decoder.layers.3.mlp.experts.experts.linear_fc1.weight` [E, 2F, H],
`decoder.layers.0.self_attention.in_proj.weight.query`), as the weight table makes them.  Whatever names a key has that are not listed
below are passed on as they are, replicated: norms, Transformer Engine's `linear_qkv.layer_norm_weight`, slime's `linear_attn.*`.

Source: `megatron/training/checkpointing.py` (`get_checkpoint_name`, `save_checkpoint`, `generate_state_dict`), which the wheel of
megatron-core 0.19.2 ships.  Names, shapes and values of `model` were compared with `state_dict_for_save_checkpoint()` of live
megatron-core 0.16.1 models on every rank of TP2, PP2 (also 1 + 3 layers), EP2, TP2 x EP2 at ETP 1 and 2, TP2 x ETP2, PP2 x VPP2, and
folders, keys and `model` with what 0.19.2's own `save_checkpoint` wrote at TP2 x EP2 x ETP1.  From reading only: Transformer Engine's
grouped experts, the stage that has the embedding tied.
"""

from __future__ import annotations

import math
import random
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
Experts = Literal["sequential", "grouped"]

PACKED = {
    "in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "conv1d.weight": ("query", "key", "value"),
}
# (name, dim that tensor parallel cuts, parts of it that are cut apart); the first that matches; none: replicated
CUTS = (
    (r"(word_embeddings|output_layer|linear_qkv|eh_proj)\.(weight|bias)$", 0, 1),
    (r"linear_fc1\.(weight|bias)$", 0, 2),
    (r"(linear_proj|linear_fc2|self_attention\.out_proj)\.weight$", 1, 1),
    (r"self_attention\.(in_proj\.weight|conv1d\.weight|A_log$|dt_bias$)", 0, 1),
)
EXPERTS = re.compile(r"(.*mlp\.experts)\.experts\.(linear_fc[12])\.(weight|bias)$")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
LINEAR = re.compile(
    r"(.*(?:linear_qkv|linear_proj|linear_fc1|linear_fc2|eh_proj|output_layer|self_attention\.(?:in_proj|out_proj)))\.weight\d*$"
)
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; etp is tp when not given, as in Megatron.  pp_layers: layers of each chunk, in layer order."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    pp_layers: tuple[int, ...] = ()

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage: the least that both the dense and the expert sizes divide."""
        return math.lcm(self.tp, self.ep * self.expert_tp)

    def args(self) -> dict[str, Any]:
        """The sizes under Megatron's names."""
        layers = self.pp_layers if self.pp > 1 and self.vpp == 1 else ()
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.expert_tp,
            "context_parallel_size": 1,
            "decoder_first_pipeline_num_layers": layers[0] if layers else None,
            "decoder_last_pipeline_num_layers": layers[-1] if layers else None,
        }


@dataclass(frozen=True)
class At:
    """One rank: tp and etp count fastest, pp slowest."""

    tp: int
    pp: int
    ep: int
    etp: int

    def folder(self, layout: Layout) -> str:
        """`get_checkpoint_name`: the stage is named only where there is more than one, and so is the expert rank."""
        stage = f"_{self.pp:03d}" if layout.pp > 1 else ""
        return f"mp_rank_{self.tp:02d}{stage}" + (f"_{self.ep:03d}" if layout.ep > 1 else "")


def writers(layout: Layout) -> Iterator[At]:
    """The ranks that write: first of their data parallel or of their expert data parallel group (until 0.16: of the latter only)."""
    for pp in range(layout.pp):
        for rank in range(layout.stage):
            at = At(rank % layout.tp, pp, rank // layout.expert_tp % layout.ep, rank % layout.expert_tp)
            if rank // layout.tp == 0 or rank // (layout.expert_tp * layout.ep) == 0:
                yield at


def cut(tensor: torch.Tensor, dim: int, parts: int, ways: int, index: int) -> torch.Tensor:
    """Piece `index` of `ways`; with `parts`, of each part (gate and up of a gated fc1)."""
    return torch.cat([part.chunk(ways, dim)[index] for part in tensor.chunk(parts, dim)], dim)


def chunks_of(layers: int, layout: Layout) -> list[range]:
    """The layers of each model chunk, in layer order; chunk c lies on stage c mod pp."""
    count = layout.pp * layout.vpp
    sizes = layout.pp_layers or (layers // count,) * count
    assert sum(sizes) == layers and len(sizes) == count, f"{layers} layers, chunks of {sizes}"
    starts = [sum(sizes[:c]) for c in range(count)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def packed(tensors: Tensors, tp: int, index: int) -> Tensors:
    """GatedDeltaNet's sections, separate keys in torch_dist, in one parameter a rank: each section cut by itself, then joined."""
    found = dict(tensors)
    for name, sections in PACKED.items():
        for first in [key for key in tensors if key.endswith(f"self_attention.{name}.{sections[0]}")]:
            base = first.removesuffix(f".{sections[0]}")
            found[base] = torch.cat([cut(found.pop(f"{base}.{section}"), 0, 1, tp, index) for section in sections])
    return found


def piece(key: str, tensor: torch.Tensor, layout: Layout, at: At, kind: Experts, *, gated: bool) -> Tensors:
    """What one rank holds of one global tensor, by local name."""
    experts = EXPERTS.match(key)
    if experts is None:
        for pattern, dim, parts in CUTS:
            if re.search(pattern, key):
                if not re.search(r"self_attention\.(in_proj|conv1d)\.weight$", key):
                    tensor = cut(tensor, dim, parts if gated else 1, layout.tp, at.tp)
                break
        return {key: tensor}
    prefix, linear, leaf = experts.groups()
    found = {}
    for i, expert in enumerate(tensor.chunk(layout.ep)[at.ep]):
        if linear == "linear_fc1":
            expert = cut(expert, 0, 2 if gated else 1, layout.expert_tp, at.etp)
        elif leaf == "weight":
            expert = cut(expert, 1, 1, layout.expert_tp, at.etp)
        name = f"{prefix}.local_experts.{i}.{linear}.{leaf}" if kind == "sequential" else f"{prefix}.{linear}.{leaf}{i}"
        found[name] = expert
    return found


def local_models(
    tensors: Tensors, layout: Layout, at: At, experts: Experts = "sequential", *, gated: bool = True, mtp_layer: str = "transformer_layer"
) -> list[OrderedDict[str, Any]]:
    """`state_dict_for_save_checkpoint()` of each model chunk of one rank; layers count from 0 in every chunk.

    A stage that predicts tokens ahead has a copy of the embedding, and so has, as its output layer, the last stage of a model whose
    embedding is tied.  mtp_layer: 0.19 calls the layer `mtp_model_layer` here, though not in torch_dist.
    """
    layers = max(int(found[1]) for found in map(LAYER.match, tensors) if found) + 1
    chunks = chunks_of(layers, layout)
    whole = packed(tensors, layout.tp, at.tp)
    models: list[OrderedDict[str, Any]] = []
    for number in range(at.pp, len(chunks), layout.pp):
        first, last = number == 0, number == len(chunks) - 1
        state: dict[str, Any] = {}
        for key, tensor in whole.items():
            layer = LAYER.match(key)
            ahead = any(name.startswith("mtp.") for name in tensors)
            if layer is not None:
                if int(layer[1]) not in chunks[number]:
                    continue
                key = f"decoder.layers.{int(layer[1]) - chunks[number].start}.{layer[2]}"
            elif not (first or (last and ahead) if key.startswith("embedding.") else last):
                continue
            key = re.sub(r"^(mtp\.layers\.\d+\.)transformer_layer\.", rf"\1{mtp_layer}.", key)
            state |= piece(key, tensor, layout, at, experts, gated=gated)
        if last and not first and OUTPUT not in tensors:
            state |= {OUTPUT: piece(EMBEDDING, whole[EMBEDDING], layout, at, experts, gated=gated)[EMBEDDING]}
        # megatron's own linears say None, Transformer Engine's an empty tensor (outside fp8)
        nothing = None if experts == "sequential" else torch.empty(0, dtype=torch.uint8)
        linears = dict.fromkeys(found[1] for found in map(LINEAR.match, state) if found and ".linear_attn." not in found[1])
        models.append(OrderedDict(state | {f"{linear}._extra_state": nothing for linear in linears}))
    return models


def optimizer_state(model: Mapping[str, Any]) -> dict[str, Any]:
    """`Float16OptimizerWithFloat16Params.state_dict()`, of the first two bf16 parameters of a chunk.

    The fp32 copies keep Megatron's attributes, for which a pickle names torch's `_rebuild_from_type_v2` and `torch.Tensor`.
    """
    trained = [value for value in model.values() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16][:2]
    group = {"lr": 1e-6, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01, "step": 5, "params": list(range(len(trained)))}
    moments = {i: {"exp_avg": t.float() * 1e-3, "exp_avg_sq": (t.float() * 1e-3).square()} for i, t in enumerate(trained)}
    copies = [t.float() for t in trained]
    for copy in copies:
        copy.__dict__.update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    return {"optimizer": {"state": moments, "param_groups": [group]}, "fp32_from_fp16_params": [copies]}


def rng_state() -> list[dict[str, Any]]:
    """`get_rng_state`: for its numpy part a pickle names `_codecs.encode` and numpy's `_reconstruct`, `ndarray` and `dtype`."""
    state = torch.Generator().manual_seed(5).get_state()
    return [
        {
            "random_rng_state": random.Random(5).getstate(),
            "np_rng_state": np.random.RandomState(5).get_state(),
            "torch_rng_state": state,
            "cuda_rng_state": state[:16].clone(),
            "rng_tracker_states": {"model-parallel-rng": state[:16].clone()},
        }
    ]


def in_one_storage(model: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The same tensors as views of one buffer a dtype, as the distributed optimizer lays parameters out (and so writes them)."""
    found = OrderedDict(model)
    for dtype in {value.dtype for value in model.values() if isinstance(value, torch.Tensor)}:
        names = [name for name, value in model.items() if isinstance(value, torch.Tensor) and value.dtype == dtype]
        buffer = torch.cat([model[name].reshape(-1) for name in names])
        parts = buffer.split([model[name].numel() for name in names])
        found.update((name, part.view(model[name].shape)) for name, part in zip(names, parts, strict=True))
    return found


def write_legacy(
    out: Path,
    tensors: Mapping[str, torch.Tensor],
    args: Mapping[str, Any],
    layout: Layout = Layout(),
    experts: Experts = "sequential",
    *,
    iteration: int | None = 5,
    optimizer: bool = True,
    one_storage: bool = False,
    mtp_layer: str = "transformer_layer",
) -> list[Path]:
    """Writes the directory and returns its files.  `args` get the layout's sizes; iteration None writes `release`.

    The rows of embedding and output layer are filled up with zeros to `padded_vocab_size`, where args say one.
    """
    namespace = Namespace(**{**args, **layout.args(), "ckpt_format": "torch", "iteration": iteration or 0})
    whole = {key: _padded(key, tensor, args.get("padded_vocab_size")) for key, tensor in tensors.items()}
    inner = out / ("release" if iteration is None else f"iter_{iteration:07d}")
    files = []
    for at in writers(layout):
        models = local_models(whole, layout, at, experts, gated=bool(args.get("swiglu", True)), mtp_layer=mtp_layer)
        models = [in_one_storage(model) if one_storage else OrderedDict((n, _owned(v)) for n, v in model.items()) for model in models]
        for model in models:
            # what torch's state_dict() hangs on its result
            model.__dict__["_metadata"] = OrderedDict({"": {"version": 1}})
        state: dict[str, Any] = {"args": namespace, "checkpoint_version": 3.0, "iteration": iteration or 0}
        state |= {"model" if len(models) == 1 else f"model{i}": model for i, model in enumerate(models)}
        if optimizer:
            state["optimizer"] = optimizer_state(models[0])
            state["opt_param_scheduler"] = {"max_lr": 1e-6, "lr_warmup_steps": 0, "num_steps": 5, "lr_decay_style": "constant"}
        state |= {"rng_state": rng_state(), "num_floating_point_operations_so_far": 0}
        file = inner / at.folder(layout) / "model_optim_rng.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, file)
        files.append(file)
    (out / "latest_checkpointed_iteration.txt").write_text("release" if iteration is None else str(iteration))
    return files


def _padded(key: str, tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
    if rows is None or key not in (EMBEDDING, OUTPUT) or tensor.shape[0] >= rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def _owned(value: Any) -> Any:
    """A tensor with a storage of its own: torch.save writes the whole storage of a view."""
    return value.clone() if isinstance(value, torch.Tensor) else value
