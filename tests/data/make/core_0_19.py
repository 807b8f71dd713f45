"""Make tests/data/core-0.19.2-slime and -native: reference-mini as megatron-core 0.19.2 itself saves it from a live GPTModel.

Our own environment has megatron-core 0.16.1, whose files look different.  In an environment of its own (Python 3.11.7; 0.19.2
asks for 3.12 and runs on 3.11 all the same):

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 psutil==7.2.2 packaging==26.2
    VENV/bin/pip install --no-deps --ignore-requires-python megatron-core==0.19.2 triton==3.9.0 einops==0.8.2
    VENV/bin/torchrun --standalone --nproc-per-node 2 tests/data/make/core_0_19.py slime --ep 2
    VENV/bin/torchrun --standalone --nproc-per-node 2 tests/data/make/core_0_19.py native --tp 2 --optimizer

Real gloo ranks, megatron-core's modules, its `sharded_state_dict` and its `dist_checkpointing.save`.  Ours are: the values (by the
weight table of hooks/), the layer spec, a norm with zero-centred gamma, slime's linear attention as a bag of parameters, and
what makes CUDA's names mean the CPU.  No forward is run.  `--optimizer` adds Adam's state for a few parameters, after one step
at learning rate 0: what is left of a training checkpoint.  The slime one has no MTP layer, as slime's own conversions have none; the native one has it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from safetensors.torch import load_file

DATA = Path(__file__).resolve().parent.parent
REFERENCE = DATA / "reference-mini"
sys.path.insert(0, str(DATA.parents[1] / "hooks"))
FP32 = ("A_log", "dt_bias")

# names and values as our own conversion of reference-mini keeps them, but for the padding of the vocabulary (it pads to 128)
ARGS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2,
    "kv_channels": 16, "attention_output_gate": True, "qk_layernorm": True, "normalization": "RMSNorm",
    "apply_layernorm_1p": True, "norm_epsilon": 1e-06, "position_embedding_type": "rope", "rotary_base": 10000000,
    "rotary_percent": 0.25, "rotary_interleaved": False, "swiglu": True, "add_bias_linear": False, "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": True, "linear_attention_freq": [1, 1, 1, 0], "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_num_value_heads": 4, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    "num_experts": 8, "moe_layer_freq": [1, 1, 1, 1], "moe_ffn_hidden_size": 12, "moe_router_topk": 2,
    "moe_router_score_function": "softmax", "moe_router_pre_softmax": False, "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": 1.0, "moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True,
    "ffn_hidden_size": 12, "max_position_embeddings": 128, "seq_length": 128, "vocab_size": 60,
    "make_vocab_size_divisible_by": 32, "padded_vocab_size": 64, "mtp_num_layers": None, "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_grouped_gemm": False,
    "attention_softmax_in_fp32": True, "transformer_impl": "local", "ckpt_format": "torch_dist", "bf16": True, "fp16": False,
    "iteration": 5, "pipeline_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "context_parallel_size": 1,
    "sequence_parallel": False, "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip


def prepare() -> None:
    """CUDA's names mean the CPU, for the whole process."""

    class NoStream:
        def __init__(self, *_: Any, **__: Any) -> None: ...

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, device=None, **more: make(*args, device="cpu" if str(device).startswith("cuda") else device, **more)

    for owner, name, value in (
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "Stream", NoStream),
        (torch.cuda, "current_stream", lambda *_: NoStream()),
        (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (torch, "tensor", on_cpu(torch.tensor)),
    ):
        setattr(owner, name, value)
    from megatron.core.ssm.gated_delta_net import common

    # __init__ refuses to build without fla; nothing of it is called here
    common.HAVE_FLA = True


def norm_class() -> type[torch.nn.Module]:
    """megatron-core's own norms refuse zero-centred gamma outside Transformer Engine; only the parameter matters here."""

    class RMSNorm(torch.nn.Module):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))

    return RMSNorm


def slime_attention(shapes: dict[str, tuple[int, ...]], norm: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """slime's wrapper as far as a checkpoint sees it: `input_layernorm` and a replicated `linear_attn` with Hugging Face's names."""
    from megatron.core.transformer.module import MegatronModule

    class LinearAttention(torch.nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            for name, shape in shapes.items():
                *path, leaf = name.split(".")
                owner: torch.nn.Module = self
                for part in path:
                    if not hasattr(owner, part):
                        owner.add_module(part, torch.nn.Module())
                    owner = getattr(owner, part)
                owner.register_parameter(leaf, torch.nn.Parameter(torch.empty(shape, dtype=dtype)))

    class SlimeAttention(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
            super().__init__(config=config)
            self.input_layernorm = norm(config, config.hidden_size)
            self.linear_attn = LinearAttention(config.params_dtype)

    return SlimeAttention


def build(args: dict[str, Any], layout: str, shapes: dict[str, tuple[int, ...]]) -> Any:
    """This rank's part of megatron-core's GPTModel, by the args that the checkpoint will keep."""
    import torch.nn.functional as F  # noqa: N812
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    sizes = {
        name: args[name]
        for name in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size"),
        )
    }
    parallel_state.initialize_model_parallel(**sizes)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    same = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization"),
        *("qk_layernorm", "attention_output_gate", "add_bias_linear", "linear_conv_kernel_dim", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "moe_layer_freq", "moe_ffn_hidden_size"),
        *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_topk", "moe_router_score_function"),
        *("moe_router_dtype", "moe_token_dispatcher_type", "mtp_num_layers", "linear_attention_freq", "bf16"),
    )
    config = TransformerConfig(
        **sizes,
        **{name: args[name] for name in same},
        num_moe_experts=args["num_experts"],
        layernorm_zero_centered_gamma=args["apply_layernorm_1p"],
        layernorm_epsilon=args["norm_epsilon"],
        gated_linear_unit=args["swiglu"],
        activation_func=F.silu,
        bias_activation_fusion=False,
        experimental_attention_variant="gated_delta_net",
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        deterministic_mode=True,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    norm = norm_class()
    moe = get_moe_module_spec_for_backend(LocalSpecProvider(), args["num_experts"], moe_grouped_gemm=False)

    def layer(linear: bool) -> ModuleSpec:
        own: Any = norm
        if not linear:
            parts = SelfAttentionSubmodules(ColumnParallelLinear, DotProductAttention, RowParallelLinear, norm, norm)
            attention = ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)
        elif layout == "native":
            attention = ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(ColumnParallelLinear, norm, RowParallelLinear))
        else:
            attention, own = ModuleSpec(module=slime_attention(shapes, norm)), IdentityOp
        submodules = TransformerLayerSubmodules(
            input_layernorm=own, self_attention=attention, self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm, mlp=moe, mlp_bda=get_bias_dropout_add,
        )  # fmt: skip
        return ModuleSpec(module=TransformerLayer, submodules=submodules)

    ahead = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=layer(linear=False)
    )
    one = ModuleSpec(module=MultiTokenPredictionLayer, submodules=ahead)
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([layer(bool(one)) for one in args["linear_attention_freq"]], norm),
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        mtp_block_spec=MultiTokenPredictionBlockSubmodules([one]) if args["mtp_num_layers"] else None,
    )
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.float() if name.endswith(FP32) else parameter.data
        parameter.data.fill_(float("nan"))
    return model


def pieces(model: Any) -> Iterator[Any]:
    """megatron-core's own account of this rank's parameters: ShardedTensors whose data are views of them."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for entry in nested_values(model.sharded_state_dict(metadata={})):
        for piece in nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]:
            if isinstance(piece, ShardedTensor):
                yield piece


def fill(model: Any, whole: dict[str, torch.Tensor]) -> None:
    """Writes each rank's pieces of the global tensors; rows that only pad the vocabulary become zero."""
    for piece in pieces(model):
        tensor = whole[piece.key]
        if tensor.shape[0] < piece.global_shape[0]:
            tensor = torch.cat([tensor, tensor.new_zeros(piece.global_shape[0] - tensor.shape[0], *tensor.shape[1:])])
        assert tuple(tensor.shape) == tuple(piece.global_shape), (piece.key, tensor.shape, piece.global_shape)
        assert tensor.dtype == piece.data.dtype, (piece.key, tensor.dtype, piece.data.dtype)
        view = piece.data.view((1,) * piece.prepend_axis_num + tuple(piece.data.shape))
        view.copy_(tensor[tuple(slice(at, at + size) for at, size in zip(piece.global_offset, view.shape, strict=True))])
    left = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    assert not left, f"nothing was written to {left}"


# none of the fp32 parameters: this optimizer's sharded_state_dict counts parameters wrongly in a group that mixes dtypes
TRAINED = ("decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "decoder.final_layernorm.weight")


def adam(model: Any) -> dict[str, Any]:
    """The sharded state of megatron-core's bf16 optimizer after one step at learning rate 0."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    named = dict(model.named_parameters())
    trained = [named[name] for name in TRAINED]
    optimizer = torch.optim.AdamW([{"params": trained, "lr": 0.0, "is_expert_parallel": False, "wd_mult": 1.0, "lr_mult": 1.0}])
    kind = torch.Tensor.type
    # optimizer.py tells what to keep in fp32 by the names of CUDA's tensor types
    torch.Tensor.type = lambda tensor, *rest: kind(tensor, *rest) if rest else kind(tensor).replace("torch.", "torch.cuda.")  # type: ignore
    whole = Float16OptimizerWithFloat16Params(optimizer, OptimizerConfig(optimizer="adam", bf16=True), None, lambda *_: None)
    torch.Tensor.type = kind  # type: ignore
    generator = torch.Generator().manual_seed(21 + dist.get_rank())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 1e-3
    optimizer.step()
    return dict(whole.sharded_state_dict(model.sharded_state_dict(metadata={})))


def main() -> int:
    """core_0_19.py LAYOUT [--tp N] [--ep N] [--optimizer], under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layout", choices=("slime", "native"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--optimizer", action="store_true")
    options = parser.parse_args()
    prepare()
    from bisect_hooks.family import family_of
    from megatron.core import dist_checkpointing

    dist.init_process_group("gloo")
    mtp = options.layout == "native"
    args = ARGS | {
        "mtp_num_layers": 1 if mtp else None,
        "experimental_attention_variant": "gated_delta_net" if options.layout == "native" else None,
        "tensor_model_parallel_size": options.tp,
        "expert_model_parallel_size": options.ep,
    }
    stored = {
        name.replace("model.language_model.", "model."): tensor for name, tensor in load_file(REFERENCE / "model.safetensors").items()
    }
    family = family_of(json.loads((REFERENCE / "config.json").read_text()))
    dims = family.reference_dimensions(json.loads((REFERENCE / "config.json").read_text()))
    whole: dict[str, torch.Tensor] = {}
    for rule in family.rules(dims, options.layout, sorted(stored), mtp=mtp):
        whole |= rule.forward([stored[name] for name in rule.references])
    prefix = "model.layers.0.linear_attn."
    shapes = {name.removeprefix(prefix): tuple(tensor.shape) for name, tensor in stored.items() if name.startswith(prefix)}
    with torch.no_grad():
        model = build(args, options.layout, shapes)
        fill(model, whole)
    state = dict(model.sharded_state_dict(metadata={}))
    if options.optimizer:
        state["optimizer"] = adam(model)
    # a name without a folder in front: the checkpoint keeps the path it was written under
    os.chdir(DATA)
    root = Path(f"core-0.19.2-{options.layout}")
    out = root / "iter_0000005"
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
        out.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text("5")
    dist.barrier()
    dist_checkpointing.save(state | {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 5}, str(out))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
