"""Names of Megatron's TransformerConfig and of Megatron-Bridge's providers → Megatron's args, as checkpoints keep them.

verl's Hydra overrides, Megatron-Bridge's run_config.yaml and transformer_config.json all speak these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
}
# what says nothing that an arg of ours says, or says it in an object
LEFT_OUT = ("activation_func", "gated_linear_unit", "share_embeddings_and_output_weights", "params_dtype", "dtype")
SILU = ("silu", "swish")


def megatron_args(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(args, the config's own name for each)."""
    args: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) or name in LEFT_OUT or name.startswith("_"):
            continue
        args[RENAMED.get(name, name)] = value
        origin[RENAMED.get(name, name)] = name

    def give(arg: str, value: Any, name: str) -> None:
        args[arg], origin[arg] = value, name

    if isinstance(shared := config.get("share_embeddings_and_output_weights"), bool):
        give("untie_embeddings_and_output_weights", not shared, "share_embeddings_and_output_weights")
    if isinstance(gated := config.get("gated_linear_unit"), bool):
        function = _named(config.get("activation_func"))
        give("swiglu", gated and (function is None or any(word in function for word in SILU)), "gated_linear_unit")
    if config.get("num_query_groups") is not None and config.get("num_attention_heads") is not None:
        give("group_query_attention", config["num_query_groups"] != config["num_attention_heads"], "num_query_groups")
    for name in ("params_dtype", "dtype"):
        if precision := _named(config.get(name)):
            give("bf16", precision.endswith(("bfloat16", "bf16")), name)
            give("fp16", precision.endswith(("float16", "fp16")) and not args["bf16"], name)
    return args, origin


def _named(value: Any) -> str | None:
    """The name of a function or dtype, as a word or as the `_target_` of an object."""
    if isinstance(value, Mapping):
        value = value.get("_target_")
    return value if isinstance(value, str) else None
