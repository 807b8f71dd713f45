"""Layer specs as a user would write them, for `--spec specs NAME`: megatron-core's own local specs, and their variations."""

from __future__ import annotations

from argparse import Namespace
from copy import deepcopy
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

# a spec that is no function: Megatron takes it as it is
PLAIN = get_gpt_layer_local_spec(normalization="RMSNorm")


def local(config: TransformerConfig) -> ModuleSpec:
    return get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)


def queries_not_normed(config: TransformerConfig, vp_stage: int | None = None) -> ModuleSpec:
    spec = deepcopy(local(config))
    spec.submodules.self_attention.submodules.q_layernorm = None
    return spec


def hybrid(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """slime's convention: what each layer is comes from the config, the rest from args."""
    full = get_gpt_layer_local_spec(args.num_experts, normalization=args.normalization, qk_layernorm=args.qk_layernorm)
    linear = deepcopy(full)
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    linear.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    linear.submodules.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    layers = [linear if one else full for one in config.linear_attention_freq]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)


class NormedLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A linear with its norm inside, under the names that Transformer Engine gives them."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> Any:
        return super().forward(torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps), *more, **named)


def fused(config: TransformerConfig) -> ModuleSpec:
    """Norms inside the linears that follow them, as Transformer Engine's spec has them."""
    spec = deepcopy(local(config))
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
    spec.submodules.self_attention.submodules.linear_qkv = NormedLinear
    spec.submodules.mlp.submodules.linear_fc1 = NormedLinear
    return spec


def broken(config: TransformerConfig) -> ModuleSpec:
    raise ValueError("this spec needs an attention backend\nand a second line")


def leaves(config: TransformerConfig) -> ModuleSpec:
    raise SystemExit("no kernels here")


def nothing_said(config: TransformerConfig) -> None:
    """Someone forgot to return what he made."""
    local(config)


class NormedBehind(TransformerLayer):  # type: ignore[misc]
    """A layer with one norm more."""

    def __init__(self, config: TransformerConfig, *more: Any, **named: Any) -> None:
        super().__init__(config, *more, **named)
        self.post_norm = torch.nn.RMSNorm(config.hidden_size)


def normed_behind(config: TransformerConfig) -> ModuleSpec:
    spec = deepcopy(local(config))
    spec.module = NormedBehind
    return spec


def of_another_kind(model: str, config: TransformerConfig) -> ModuleSpec:
    return local(config)
