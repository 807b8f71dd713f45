"""The candidate's side: megatron-core's GPTModel rebuilt from the candidate's own args.  The only file that imports megatron.

Everything here runs on a rank of a process group that somebody else started.  Nothing reads the reference's config.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

# torch.compile of megatron's fused helpers costs seconds a process, changes sums by about 1e-6 and hides calls from hooks
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from bisect_hooks.cpu import RMSNorm, prepare_megatron, running_on
from bisect_hooks.errors import BisectError, UsageError
from bisect_hooks.family import CheckpointLayout, Dimensions, Family, check_sizes
from bisect_hooks.linear_attention import GatedDeltaNet as OwnDeltaNet
from bisect_hooks.parallel import Coordinates, Parallel
from bisect_hooks.spec import Spec, layers_by
from bisect_hooks.tap import Tap

TIMEOUT = timedelta(seconds=120)
NAN = float("nan")


@dataclass(slots=True)
class Candidate:
    """One rank's part of the model, and where it stands."""

    model: GPTModel
    family: Family
    dims: Dimensions
    layout: CheckpointLayout
    parallel: Parallel
    at: Coordinates
    device: torch.device
    dtype: torch.dtype
    layers: range
    taps: tuple[Tap, ...] = field(default=())

    @property
    def first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.at.pp == self.parallel.pp - 1


def join_world(rank: int, world: int, store: Path, device: torch.device) -> None:
    """Joins the process group through a file.  Every wait in it has a timeout."""
    backend = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}.get(device.type, "gloo")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT)
    # megatron-core asserts on some options at every step of a build; its own warnings are not about this run
    logging.getLogger("megatron").setLevel(logging.ERROR)
    prepare_megatron(device)


def lay_out(parallel: Parallel) -> Coordinates:
    """(Re)makes megatron-core's groups for these sizes.  Raises UsageError when the world has another size."""
    if dist.get_world_size() != parallel.world:
        raise UsageError(f"{parallel} needs {parallel.world} ranks, there are {dist.get_world_size()}")
    sizes = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp,
    }
    if _laid_out.get("sizes") != sizes:
        _forget_groups()
        parallel_state.initialize_model_parallel(**sizes, distributed_timeout_minutes=2)
        _laid_out["sizes"] = sizes
    # the tracker for inference forks nothing, so eval needs no CUDA rng state (tensor_parallel/random.py:248)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    at = parallel.coordinates(dist.get_rank())
    theirs = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "etp": parallel_state.get_expert_tensor_parallel_rank(),
    }
    assert theirs == {axis: at[axis] for axis in theirs}, f"rank order: megatron-core says {theirs}, we say {at}"
    return at


_laid_out: dict[str, Any] = {}


def _forget_groups() -> None:
    """Takes down every group but the world.  megatron-core only forgets them, and each gloo group keeps its threads."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def transformer_config(
    args: Mapping[str, Any], dims: Dimensions, layout: CheckpointLayout, parallel: Parallel, dtype: torch.dtype
) -> TransformerConfig:
    """megatron-core's config out of Megatron's args, as `core_transformer_config_from_args` does it, for a CPU-friendly build."""
    first = parallel.pp_layers[0] if parallel.pp_layers else None
    last = parallel.pp_layers[-1] if parallel.pp_layers else None
    return TransformerConfig(
        num_layers=dims.layers,
        hidden_size=dims.hidden,
        ffn_hidden_size=dims.dense,
        num_attention_heads=dims.heads,
        num_query_groups=dims.groups,
        kv_channels=dims.head_width,
        normalization=args.get("normalization", "LayerNorm"),
        layernorm_zero_centered_gamma=bool(args.get("apply_layernorm_1p")),
        layernorm_epsilon=float(args.get("norm_epsilon") or 1e-5),
        qk_layernorm=bool(args.get("qk_layernorm")),
        attention_output_gate=dims.output_gate,
        add_bias_linear=bool(args.get("add_bias_linear", True)),
        add_qkv_bias=bool(args.get("add_qkv_bias")),
        gated_linear_unit=bool(args.get("swiglu")),
        activation_func=F.silu if args.get("swiglu") else F.gelu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        rotary_interleaved=bool(args.get("rotary_interleaved")),
        attention_softmax_in_fp32=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        experimental_attention_variant="gated_delta_net" if "linear_attention" in dims.kinds else None,
        linear_attention_freq=[int(kind == "linear_attention") for kind in dims.kinds],
        linear_conv_kernel_dim=dims.kernel,
        linear_key_head_dim=dims.key_width,
        linear_value_head_dim=dims.value_width,
        linear_num_key_heads=dims.key_heads,
        linear_num_value_heads=dims.value_heads,
        num_moe_experts=dims.experts or None,
        moe_layer_freq=[int(one) for one in dims.moe],
        moe_ffn_hidden_size=dims.routed if dims.experts else None,
        moe_shared_expert_intermediate_size=dims.shared or None,
        moe_shared_expert_gate=dims.shared_gate,
        moe_router_topk=dims.top_k,
        moe_router_score_function=args.get("moe_router_score_function") or "softmax",
        moe_router_pre_softmax=bool(args.get("moe_router_pre_softmax")),
        moe_router_num_groups=args.get("moe_router_num_groups"),
        moe_router_group_topk=args.get("moe_router_group_topk"),
        moe_router_topk_scaling_factor=args.get("moe_router_topk_scaling_factor"),
        moe_router_enable_expert_bias=bool(args.get("moe_router_enable_expert_bias")),
        moe_router_dtype=args.get("moe_router_dtype"),
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=parallel.dispatcher,
        mtp_num_layers=dims.mtp or None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        deterministic_mode=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        sequence_parallel=parallel.sp,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last if parallel.pp == 2 else None,
    )


class SlimeAttention(MegatronModule):  # type: ignore[misc]
    """slime's wrapper: gathers the sequence, norms, runs the replicated linear attention, scatters again.

    Names on disk: `self_attention.input_layernorm.weight` and `self_attention.linear_attn.*`.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, dims: Dimensions, **_: Any) -> None:
        super().__init__(config=config)
        self.input_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.linear_attn = OwnDeltaNet(dims, config.layernorm_epsilon, config.params_dtype)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        output = self.linear_attn(self.input_layernorm(hidden_states.transpose(0, 1))).transpose(0, 1).contiguous()
        return (scatter_to_sequence_parallel_region(output) if self.config.sequence_parallel else output), None


def layer_spec(kind: str, moe: bool, dims: Dimensions, layout: CheckpointLayout, args: Mapping[str, Any]) -> ModuleSpec:
    """One layer, written by hand: upstream's hybrid block spec exists for Transformer Engine only."""
    norm_of_heads = RMSNorm if args.get("qk_layernorm") else IdentityOp
    own_norm: Any = RMSNorm
    if kind == "attention":
        attention = ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=DotProductAttention,
                linear_proj=RowParallelLinear,
                q_layernorm=norm_of_heads,
                k_layernorm=norm_of_heads,
            ),
        )
    elif layout == "native":
        parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=RMSNorm, out_proj=RowParallelLinear)
        attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    else:
        attention, own_norm = ModuleSpec(module=SlimeAttention, params={"dims": dims}), IdentityOp
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linear)
    experts = ModuleSpec(module=SequentialMLP, submodules=linear)
    feed_forward = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=own_norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=feed_forward if moe else ModuleSpec(module=MLP, submodules=linear),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def build(
    family: Family,
    args: Mapping[str, Any],
    layout: CheckpointLayout,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    mtp: bool = False,
    spec: Spec | None = None,
) -> Candidate:
    """This rank's part of the model that `args` describe, by the user's spec or ours; NaN until something is loaded into it."""
    dims = family.candidate_dimensions(args)
    if not mtp:
        dims = replace(dims, mtp=0)
    check_sizes(dims, parallel)
    at = lay_out(parallel)
    layers = parallel.layers_of(at.pp, dims.layers)
    config = transformer_config(args, dims, layout, parallel, dtype)
    own = TransformerBlockSubmodules([layer_spec(dims.kinds[n], dims.moe[n], dims, layout, args) for n in layers], RMSNorm)
    with running_on(device), torch.no_grad():
        model = GPTModel(
            config=config,
            transformer_layer_spec=layers_by(spec, args, config, len(layers)) if spec else own,
            vocab_size=dims.vocabulary,
            max_sequence_length=dims.positions or 1 << 20,
            pre_process=at.pp == 0,
            post_process=at.pp == parallel.pp - 1,
            share_embeddings_and_output_weights=dims.tied,
            position_embedding_type=args.get("position_embedding_type") or "learned_absolute",
            rotary_percent=float(args.get("rotary_percent", 1.0)),
            rotary_base=int(args.get("rotary_base") or 10000),
            mtp_block_spec=_mtp_spec(dims, layout, args) if dims.mtp and at.pp == parallel.pp - 1 else None,
        )
        model.to(device).eval()
        model.requires_grad_(False)
        for _, tensor in stored_tensors(model):
            tensor.fill_(NAN)
    candidate = Candidate(model, family, dims, layout, parallel, at, device, dtype, layers)
    candidate.taps = local_taps(candidate)
    return candidate


def _mtp_spec(dims: Dimensions, layout: CheckpointLayout, args: Mapping[str, Any]) -> ModuleSpec:
    layer = layer_spec("attention", dims.experts > 0, dims, layout, args)
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=RMSNorm, hnorm=RMSNorm, eh_proj=ColumnParallelLinear, transformer_layer=layer, layer_norm=RMSNorm
    )
    each = ModuleSpec(module=MultiTokenPredictionLayer, submodules=parts)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[each] * dims.mtp)


def local_taps(candidate: Candidate) -> tuple[Tap, ...]:
    """The family's taps that this stage has, with layers counted as the stage counts them."""
    found = []
    for tap in candidate.family.candidate_taps(candidate.dims, candidate.layout):
        if tap.site.in_layer:
            assert tap.site.layer is not None
            if tap.site.layer not in candidate.layers:
                continue
            prefix = f"decoder.layers.{tap.site.layer}"
            path = f"decoder.layers.{tap.site.layer - candidate.layers.start}{tap.path.removeprefix(prefix)}"
            found.append(replace(tap, path=path))
        elif candidate.first_stage if tap.site.module in ("tokens", "embedding") else candidate.last_stage:
            found.append(tap)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A view into this rank's parameters and the part of which global tensor on disk it is."""

    key: str
    view: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


def local_tensors(candidate: Candidate) -> Iterator[LocalTensor]:
    """megatron-core's own account of what each parameter is on disk; views, so writing to them writes the model."""
    for entry in nested_values(candidate.model.sharded_state_dict(metadata={})):
        shards = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
        for shard in shards:
            if not isinstance(shard, ShardedTensor) or shard.data is None:
                continue
            # experts and layers are leading axes that the local tensor does not have
            view = shard.data.reshape((1,) * shard.prepend_axis_num + tuple(shard.data.shape))
            yield LocalTensor(shard.key, view, tuple(shard.global_shape), tuple(shard.global_offset))


def fill(candidate: Candidate, made: Callable[[str], torch.Tensor | None], padded: tuple[str, ...] = ()) -> list[str]:
    """Writes `made(key)` (a global tensor) into this rank's parameters; None leaves one alone.  Returns the keys written.

    Rows that only pad the vocabulary (keys in `padded`) become zero.  Raises BisectError for a shape that does not fit.
    """
    written = []
    with torch.no_grad():
        for local in local_tensors(candidate):
            whole = made(local.key)
            if whole is None:
                continue
            if local.key in padded and whole.shape[0] < local.global_shape[0]:
                whole = torch.cat([whole, whole.new_zeros(local.global_shape[0] - whole.shape[0], *whole.shape[1:])])
            if tuple(whole.shape) != local.global_shape:
                raise BisectError(f"{local.key}: the table makes {tuple(whole.shape)}, the model has {local.global_shape}")
            part = whole[tuple(slice(start, start + size) for start, size in zip(local.offset, local.view.shape, strict=True))]
            local.view.copy_(part)
            written.append(local.key)
    return written


def unfilled(candidate: Candidate) -> list[str]:
    """Parameters and kept buffers that nothing was loaded into (still NaN everywhere)."""
    return [name for name, tensor in stored_tensors(candidate.model) if bool(tensor.isnan().all())]


def stored_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything floating that a checkpoint holds by name: parameters, and buffers that are kept (the router's expert bias)."""
    kept = set(model.state_dict(keep_vars=True))
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point())


def load(candidate: Candidate, directory: Path, renamed: Mapping[str, str]) -> list[str]:
    """Loads a torch_dist checkpoint with megatron-core's own loader; `renamed` says which keys it keeps under another name.

    A key that the checkpoint lacks stays NaN.  Returns those keys.
    """
    state = candidate.model.sharded_state_dict(metadata={})
    for entry in nested_values(state):
        if getattr(entry, "key", None) in renamed:
            entry.key = renamed[entry.key]
    with running_on(candidate.device), torch.no_grad():
        values, missing, _ = dist_checkpointing.load(state, str(directory), strict=StrictHandling.RETURN_ALL)
        candidate.model.load_state_dict({key: value for key, value in values.items() if isinstance(value, torch.Tensor)}, strict=False)
    return sorted(map(str, missing))


def save(candidate: Candidate, directory: Path, common: Mapping[str, Any]) -> None:
    """Saves with megatron-core's own torch_dist writer; `common` goes to common.pt."""
    with running_on(candidate.device), torch.no_grad():
        state = candidate.model.sharded_state_dict(metadata={})
        dist_checkpointing.save({**state, **common}, str(directory))


def set_dtypes(candidate: Candidate, dtype_of: Callable[[str], torch.dtype | None]) -> None:
    """Gives every parameter the dtype its tensor has on disk, so that a save rounds nothing."""
    named = dict(candidate.model.named_parameters())
    for name, entry in candidate.model.sharded_state_dict(metadata={}).items():
        keys = [entry.key] if isinstance(entry, ShardedTensor) else []
        if isinstance(entry, ShardedTensorFactory):
            keys = [shard.key for shard in nested_values(entry.build()) if isinstance(shard, ShardedTensor)]
        wanted = {dtype_of(key) for key in keys} - {None}
        if len(wanted) == 1 and name in named:
            named[name].data = named[name].data.to(wanted.pop())
