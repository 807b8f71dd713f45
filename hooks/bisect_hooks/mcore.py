"""The candidate's side: megatron-core's GPTModel rebuilt from the candidate's own args.

Everything here runs on a rank of a process group that somebody else started.  Nothing reads the reference's config.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

# torch.compile of megatron's fused helpers costs seconds a process, changes sums by about 1e-6 and hides calls from hooks
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
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
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules, MultiTokenPredictionLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from bisect_hooks.core_versions import config_of, mtp_submodules, shared_expert_params
from bisect_hooks.cpu import RMSNorm, SlicedGate, prepare_megatron, running_on
from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout, Dimensions, Family, check_sizes
from bisect_hooks.linear_attention import GatedDeltaNet as OwnDeltaNet
from bisect_hooks.mcore_weights import NAN, stored_tensors
from bisect_hooks.parallel import Coordinates, Parallel
from bisect_hooks.spec import Spec, layers_by
from bisect_hooks.tap import Tap

TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of layers that this rank holds as one model.  first, last  whether it holds the embedding, the head"""

    model: GPTModel
    layers: range
    first: bool
    last: bool


@dataclass(slots=True)
class Candidate:
    """One rank's part of the model, and where it stands.  Under VPP that is several chunks, in the order of their layers."""

    chunks: tuple[Chunk, ...]
    family: Family
    dims: Dimensions
    layout: CheckpointLayout
    parallel: Parallel
    at: Coordinates
    device: torch.device
    dtype: torch.dtype
    taps: tuple[Tap, ...] = field(default=())

    @property
    def models(self) -> torch.nn.ModuleList:
        """The chunks as one thing to hook into: paths begin with the number of a chunk."""
        return torch.nn.ModuleList(chunk.model for chunk in self.chunks)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for chunk in self.chunks for layer in chunk.layers)

    def path(self, layer: int) -> str:
        """Where a global layer stands in `models`."""
        number, chunk = next((i, chunk) for i, chunk in enumerate(self.chunks) if layer in chunk.layers)
        return f"{number}.decoder.layers.{layer - chunk.layers.start}"


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
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
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
    linear = [int(kind == "linear_attention") for kind in dims.kinds]
    return config_of(
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
        experimental_attention_variant="gated_delta_net" if any(linear) else None,
        linear_attention_freq=linear if any(linear) else None,
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
        pipeline_model_parallel_layout=_stages(dims, parallel) if parallel.pp > 1 else None,
    )


def _stages(dims: Dimensions, parallel: Parallel) -> list[list[str]]:
    """What every chunk holds, in megatron-core's words (transformer/pipeline_parallel_layer_layout.py)."""
    chunks = [["decoder"] * size for size in parallel.chunk_sizes(dims.layers)]
    chunks[0] = ["embedding", *chunks[0]]
    chunks[-1] = [*chunks[-1], *["mtp"] * dims.mtp, "loss"]
    return chunks


class GatedSelfAttention(SlicedGate, SelfAttention):  # type: ignore[misc]
    """megatron-core's own, with its output gate put right."""


class SlimeAttention(MegatronModule):  # type: ignore[misc]
    """slime's wrapper: gathers the sequence, norms, runs the replicated linear attention, scatters again.

    What is padding (a key that not even its own query may see) is zeroed before it, as Hugging Face style modules do.
    Names on disk: `self_attention.input_layernorm.weight` and `self_attention.linear_attn.*`.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, dims: Dimensions, **_: Any) -> None:
        super().__init__(config=config)
        self.input_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.linear_attn = OwnDeltaNet(dims, config.layernorm_epsilon, config.params_dtype)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        normed = self.input_layernorm(hidden_states.transpose(0, 1))
        if attention_mask is not None:
            normed = normed.masked_fill(attention_mask[:, 0].diagonal(dim1=-2, dim2=-1)[..., None], 0)
        output = self.linear_attn(normed).transpose(0, 1).contiguous()
        return (scatter_to_sequence_parallel_region(output) if self.config.sequence_parallel else output), None


def layer_spec(kind: str, moe: bool, dims: Dimensions, layout: CheckpointLayout, args: Mapping[str, Any]) -> ModuleSpec:
    """One layer, written by hand: upstream's hybrid block spec exists for Transformer Engine only."""
    norm_of_heads = RMSNorm if args.get("qk_layernorm") else IdentityOp
    own_norm: Any = RMSNorm
    if kind == "attention":
        attention = ModuleSpec(
            module=GatedSelfAttention,
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
        from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules  # not in 0.15

        parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=RMSNorm, out_proj=RowParallelLinear)
        attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    else:
        attention, own_norm = ModuleSpec(module=SlimeAttention, params={"dims": dims}), IdentityOp
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    shared = ModuleSpec(module=SharedExpertMLP, params=shared_expert_params(dims.shared_gate), submodules=linear)
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
    config = transformer_config(args, dims, layout, parallel, dtype)
    chunks = []
    for number in range(parallel.vpp):
        layers = parallel.layers_of(at.pp, dims.layers, number)
        first, last = layers.start == 0, layers.stop == dims.layers
        specs = [layer_spec(dims.kinds[n], dims.moe[n], dims, layout, args) for n in layers]
        own = TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)
        with running_on(device), torch.no_grad():
            model = GPTModel(
                config=config,
                transformer_layer_spec=layers_by(spec, args, config, len(layers), number if parallel.vpp > 1 else None) if spec else own,
                vocab_size=dims.vocabulary,
                max_sequence_length=dims.positions or 1 << 20,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=dims.tied,
                position_embedding_type=args.get("position_embedding_type") or "learned_absolute",
                rotary_percent=float(args.get("rotary_percent", 1.0)),
                rotary_base=int(args.get("rotary_base") or 10000),
                mtp_block_spec=_mtp_spec(dims, layout, args) if dims.mtp and last else None,
                vp_stage=number if parallel.vpp > 1 else None,
            )
            model.to(device).eval()
            model.requires_grad_(False)
            for _, tensor in stored_tensors(model):
                tensor.fill_(NAN)
        chunks.append(Chunk(model, layers, first, last))
    candidate = Candidate(tuple(chunks), family, dims, layout, parallel, at, device, dtype)
    candidate.taps = local_taps(candidate)
    return candidate


def _mtp_spec(dims: Dimensions, layout: CheckpointLayout, args: Mapping[str, Any]) -> ModuleSpec:
    layer = layer_spec("attention", dims.experts > 0, dims, layout, args)
    parts = mtp_submodules(layer, enorm=RMSNorm, hnorm=RMSNorm, eh_proj=ColumnParallelLinear, layer_norm=RMSNorm)
    each = ModuleSpec(module=MultiTokenPredictionLayer, submodules=parts)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[each] * dims.mtp)


def local_taps(candidate: Candidate) -> tuple[Tap, ...]:
    """The family's taps that this rank has, with layers counted as its chunks count them."""
    ends = {"first": next((i for i, chunk in enumerate(candidate.chunks) if chunk.first), None)}
    ends["last"] = next((i for i, chunk in enumerate(candidate.chunks) if chunk.last), None)
    found = []
    for tap in candidate.family.candidate_taps(candidate.dims, candidate.layout):
        if tap.site.layer in candidate.layers:
            rest = tap.path.removeprefix(f"decoder.layers.{tap.site.layer}")
            found.append(replace(tap, path=candidate.path(tap.site.layer) + rest))
        elif not tap.site.in_layer:
            number = ends["first" if tap.site.module in ("tokens", "embedding") else "last"]
            if number is not None:
                found.append(replace(tap, path=f"{number}.{tap.path}"))
    return tuple(found)
