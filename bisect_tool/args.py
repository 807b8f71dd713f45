"""Megatron's args: reading the candidate's own words, and writing those of a conversion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout, Dimensions, Family
from bisect_hooks.parallel import Parallel

SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
}
PLAIN = (int, float, str, bool, type(None))


def plain(args: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are plain; a framework's own enums and configs say nothing that shapes a model here."""
    found: dict[str, Any] = {}
    for name, value in args.items():
        if isinstance(value, PLAIN):
            found[name] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(one, PLAIN) for one in value):
            found[name] = list(value)
    return found


def parallel_of(args: Mapping[str, Any], layers: int | None) -> Parallel | None:
    """The layout a checkpoint was written under, by its args; None when they don't say."""
    if any(args.get(SIZES[axis]) is None for axis in ("tp", "pp")):
        return None
    tp, pp = int(args[SIZES["tp"]]), int(args[SIZES["pp"]])
    stages = _stages(args, pp, layers)
    etp = args.get(SIZES["etp"])
    return Parallel(
        tp=tp,
        pp=pp,
        ep=int(args.get(SIZES["ep"]) or 1),
        etp=int(etp) if etp is not None else None,
        cp=int(args.get(SIZES["cp"]) or 1),
        sp=bool(args.get("sequence_parallel")) and tp > 1,
        vpp=int(args.get("virtual_pipeline_model_parallel_size") or 1),
        pp_layers=stages,
    )


def _stages(args: Mapping[str, Any], pp: int, layers: int | None) -> tuple[int, ...]:
    first, last = args.get("decoder_first_pipeline_num_layers"), args.get("decoder_last_pipeline_num_layers")
    if layers is None or pp == 1 or (first is None and last is None):
        return ()
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if middle and rest % middle:
        raise UsageError(f"the args cut {layers} layers into {first} first, {last} last and {rest} over {middle} stages")
    return (
        *((first,) if first is not None else ()),
        *((rest // middle,) * middle if middle else ()),
        *((last,) if last is not None else ()),
    )


def parallel_args(parallel: Parallel) -> dict[str, Any]:
    """The args that say a layout."""
    sizes = {name: parallel.size(axis) for axis, name in SIZES.items()}
    if parallel.pp_layers and parallel.vpp > 1:
        raise UsageError("--pp-layers with --vpp: Megatron's args can't say the size of each chunk")
    uneven = parallel.pp_layers if parallel.pp > 1 else ()
    if len(set(uneven[1:-1])) > 1:
        raise UsageError(
            f"--pp-layers {','.join(map(str, uneven))}: Megatron's args can say other sizes for the first and the last stage only"
        )
    return sizes | {
        "sequence_parallel": parallel.sp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "decoder_first_pipeline_num_layers": uneven[0] if uneven else None,
        "decoder_last_pipeline_num_layers": uneven[-1] if uneven else None,
        "moe_token_dispatcher_type": parallel.dispatcher,
    }


def conversion_args(
    family: Family, config: Mapping[str, Any], dims: Dimensions, layout: CheckpointLayout, parallel: Parallel, dtype: torch.dtype, mtp: bool
) -> dict[str, Any]:
    """Megatron-named args for every value that shapes the model, and the layout it is written under."""
    divisor = 128 * parallel.tp
    args = {setting.arg: setting.expected for setting in family.settings(config, layout)}
    args |= {
        "ffn_hidden_size": dims.dense or dims.routed,
        "max_position_embeddings": dims.positions,
        "seq_length": dims.positions,
        "vocab_size": dims.vocabulary,
        "make_vocab_size_divisible_by": 128,
        "padded_vocab_size": math.ceil(dims.vocabulary / divisor) * divisor,
        "mtp_num_layers": dims.mtp if mtp and dims.mtp else None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "attention_softmax_in_fp32": True,
        "experimental_attention_variant": "gated_delta_net" if layout == "native" and "linear_attention" in dims.kinds else None,
        "transformer_impl": "local",
        "ckpt_format": "torch_dist",
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "iteration": 0,
    }
    return args | parallel_args(parallel)
