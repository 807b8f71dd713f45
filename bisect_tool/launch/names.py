"""Names of Megatron's TransformerConfig and of Megatron-Bridge's providers → Megatron's args, as checkpoints keep them.

verl's Hydra overrides, Megatron-Bridge's run_config.yaml and transformer_config.json all speak these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bisect_tool.launch.flags import FLAGS, kind, pattern
from bisect_tool.launch.words import Where, refuse

RENAMED = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
# what says nothing that an arg of ours says, or says it in an object
LEFT_OUT = ("activation_func", "gated_linear_unit", "share_embeddings_and_output_weights", "params_dtype", "dtype")
SILU = ("silu", "swish")
READS = {flag.arg: flag.read for flag in FLAGS.values()}


def megatron_args(config: Mapping[str, Any], where: Mapping[str, Where]) -> tuple[dict[str, Any], dict[str, Where]]:
    """(args, where each is said).  Raises UsageError naming the line of a value that is none of its kind."""
    args: dict[str, Any] = {}
    said: dict[str, Where] = {}

    def give(arg: str, value: Any, name: str) -> None:
        args[arg], said[arg] = value, where[name]

    for name, value in config.items():
        if isinstance(value, Mapping) or name in LEFT_OUT or name.startswith("_"):
            continue
        arg = RENAMED.get(name, name)
        give(arg, _typed(arg, name, value, where[name]), name)
    if isinstance(shared := config.get("share_embeddings_and_output_weights"), bool):
        give("untie_embeddings_and_output_weights", not shared, "share_embeddings_and_output_weights")
    if isinstance(gated := config.get("gated_linear_unit"), bool):
        function = _named(config.get("activation_func"))
        give("swiglu", gated and (function is None or any(word in function for word in SILU)), "gated_linear_unit")
    if args.get("num_query_groups") is not None and args.get("num_attention_heads") is not None:
        give("group_query_attention", args["num_query_groups"] != args["num_attention_heads"], "num_query_groups")
    for name in ("params_dtype", "dtype"):
        if precision := _named(config.get(name)):
            give("bf16", precision.endswith(("bfloat16", "bf16")), name)
            give("fp16", precision.endswith(("float16", "fp16")) and not args["bf16"], name)
    return args, said


def _typed(arg: str, name: str, value: Any, where: Where) -> Any:
    """A value as Megatron's command line would have it: YAML takes 1e-6 for a text, and patterns may be written as expressions."""
    read = READS.get(arg)
    if value is None or read is None or isinstance(read, str) or read is str:
        return value
    if isinstance(value, list) and read is pattern:
        return value
    try:
        if isinstance(value, (bool, list)):
            raise ValueError
        return read(value if isinstance(value, str) else str(int(value) if read is not float and value == int(value) else value))
    except (ValueError, SyntaxError, OverflowError):
        raise refuse(where, f"{name} is {str(value)[:60]}, which is no {kind(read)}") from None


def _named(value: Any) -> str | None:
    """The name of a function or dtype, as a word or as the `_target_` of an object."""
    if isinstance(value, Mapping):
        value = value.get("_target_")
    return value if isinstance(value, str) else None
