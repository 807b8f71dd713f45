from __future__ import annotations

from pathlib import Path

import pytest

from bisect_tool.launch.names import megatron_args
from bisect_tool.launch.words import Where


@pytest.mark.parametrize(
    ("config", "args"),
    [
        ({"layernorm_epsilon": 1e-6, "num_moe_experts": 8}, {"norm_epsilon": 1e-6, "num_experts": 8}),
        ({"layernorm_zero_centered_gamma": True}, {"apply_layernorm_1p": True}),
        ({"share_embeddings_and_output_weights": False}, {"untie_embeddings_and_output_weights": True}),
        ({"gated_linear_unit": True, "activation_func": {"_target_": "torch.nn.functional.silu"}}, {"swiglu": True}),
        ({"gated_linear_unit": True, "activation_func": "torch.nn.functional.gelu"}, {"swiglu": False}),
        (
            {"num_query_groups": 2, "num_attention_heads": 8},
            {"num_query_groups": 2, "num_attention_heads": 8, "group_query_attention": True},
        ),
        (
            {"num_query_groups": 8, "num_attention_heads": 8},
            {"num_query_groups": 8, "num_attention_heads": 8, "group_query_attention": False},
        ),
        ({"params_dtype": {"_target_": "torch.bfloat16"}}, {"bf16": True, "fp16": False}),
        ({"dtype": "float16"}, {"bf16": False, "fp16": True}),
        ({"_target_": "x", "init_method": {"_target_": "y"}, "tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}),
    ],
)
def test_names_of_the_transformer_config_are_megatrons_args(config: dict[str, object], args: dict[str, object]) -> None:
    found, said = megatron_args(config, {name: Where(Path("run.yaml"), line) for line, name in enumerate(config)})
    assert found == args
    assert set(said) == set(found)
