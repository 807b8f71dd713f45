"""Make tests/data/reference-mini: a Qwen3.5-MoE Hugging Face directory of 4 layers, with an MTP layer, small and random.

Python 3.11.7, torch 2.13.0, safetensors 0.8.0 (the versions of constraints.txt):

    .venv/bin/python tests/data/make/reference.py

Same bytes on every run.  Names and layout are those of the public checkpoints: prefix `model.language_model.`, fused experts,
the MTP layer expert by expert.  Everything is bf16 but A_log and dt_bias, fp32 values of which none is a bf16 value.  No norm is
constant, every matrix is scaled by 1/√fan-in.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

OUT = Path(__file__).resolve().parent.parent / "reference-mini"
PREFIX = "model.language_model."
LAYERS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
HIDDEN, HEADS, GROUPS, WIDTH, VOCABULARY = 32, 4, 2, 16, 60
KEY_HEADS, KEY_WIDTH, VALUE_HEADS, VALUE_WIDTH, KERNEL = 2, 8, 4, 12, 4
EXPERTS, TOP_K, ROUTED, SHARED = 8, 2, 12, 20

CONFIG = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 56,
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "full_attention_interval": 4,
        "head_dim": WIDTH,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "layer_types": list(LAYERS),
        "linear_conv_kernel_dim": KERNEL,
        "linear_key_head_dim": KEY_WIDTH,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_value_head_dim": VALUE_WIDTH,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 128,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": ROUTED,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": len(LAYERS),
        "num_key_value_heads": GROUPS,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": SHARED,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCABULARY,
    },
    "tie_word_embeddings": False,
    "video_token_id": 57,
    "vision_end_token_id": 54,
    "vision_start_token_id": 53,
}


def linear_attention() -> dict[str, tuple[int, ...]]:
    """Shapes of a gated delta net."""
    keys, values = KEY_HEADS * KEY_WIDTH, VALUE_HEADS * VALUE_WIDTH
    return {
        "linear_attn.in_proj_qkv.weight": (2 * keys + values, HIDDEN),
        "linear_attn.in_proj_z.weight": (values, HIDDEN),
        "linear_attn.in_proj_b.weight": (VALUE_HEADS, HIDDEN),
        "linear_attn.in_proj_a.weight": (VALUE_HEADS, HIDDEN),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, KERNEL),
        "linear_attn.A_log": (VALUE_HEADS,),
        "linear_attn.dt_bias": (VALUE_HEADS,),
        "linear_attn.norm.weight": (VALUE_WIDTH,),
        "linear_attn.out_proj.weight": (HIDDEN, values),
    }


def attention() -> dict[str, tuple[int, ...]]:
    """Shapes of gated attention."""
    return {
        "self_attn.q_proj.weight": (2 * HEADS * WIDTH, HIDDEN),
        "self_attn.k_proj.weight": (GROUPS * WIDTH, HIDDEN),
        "self_attn.v_proj.weight": (GROUPS * WIDTH, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
        "self_attn.q_norm.weight": (WIDTH,),
        "self_attn.k_norm.weight": (WIDTH,),
    }


def gated(name: str, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one gated feed forward."""
    up, down = (width, HIDDEN), (HIDDEN, width)
    return {f"{name}.gate_proj.weight": up, f"{name}.up_proj.weight": up, f"{name}.down_proj.weight": down}


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the directory by its name on disk."""
    around = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
    router = {"mlp.gate.weight": (EXPERTS, HIDDEN), "mlp.shared_expert_gate.weight": (1, HIDDEN)} | gated("mlp.shared_expert", SHARED)
    fused = {"mlp.experts.gate_up_proj": (EXPERTS, 2 * ROUTED, HIDDEN), "mlp.experts.down_proj": (EXPERTS, HIDDEN, ROUTED)}
    one_by_one: dict[str, tuple[int, ...]] = {}
    for expert in range(EXPERTS):
        one_by_one |= gated(f"mlp.experts.{expert}", ROUTED)
    found: dict[str, tuple[int, ...]] = {f"{PREFIX}embed_tokens.weight": (VOCABULARY, HIDDEN), f"{PREFIX}norm.weight": (HIDDEN,)}
    found["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for n, kind in enumerate(LAYERS):
        mixer = attention() if kind == "full_attention" else linear_attention()
        found |= {f"{PREFIX}layers.{n}.{name}": shape for name, shape in (around | mixer | router | fused).items()}
    found |= {f"mtp.{norm}.weight": (HIDDEN,) for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    found["mtp.fc.weight"] = (HIDDEN, 2 * HIDDEN)
    return found | {f"mtp.layers.0.{name}": shape for name, shape in (around | attention() | router | one_by_one).items()}


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A random tensor of the size its place wants."""
    if name.endswith("A_log"):
        return not_bf16(torch.empty(shape).uniform_(math.log(0.02), math.log(2.0), generator=generator))
    if name.endswith("dt_bias"):
        return not_bf16(torch.randn(shape, generator=generator))
    if name.endswith("linear_attn.norm.weight"):
        return (1 + 0.25 * torch.randn(shape, generator=generator)).bfloat16()
    if "norm" in name:
        return (0.2 * torch.randn(shape, generator=generator)).bfloat16()
    fan_in = KERNEL if name.endswith("conv1d.weight") else shape[-1]
    return (torch.randn(shape, generator=generator) / math.sqrt(1 if "embed_tokens" in name else fan_in)).bfloat16()


def not_bf16(values: torch.Tensor) -> torch.Tensor:
    """The values, each moved off the bf16 grid."""
    values = torch.where(values == values.bfloat16().float(), values * 1.001, values)
    assert bool((values != values.bfloat16().float()).all())
    return values


def main() -> int:
    """Writes the directory."""
    generator = torch.Generator().manual_seed(20)
    stored = {name: draw(name, shape, generator) for name, shape in sorted(shapes().items())}
    OUT.mkdir(exist_ok=True)
    save_file(stored, OUT / "model.safetensors", metadata={"format": "pt"})
    (OUT / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
