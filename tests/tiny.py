"""A tiny model of each family: sizes pairwise different, random but well scaled, nothing left at its initial value.

    python tests/tiny.py FAMILY DIRECTORY

A norm that is still constant, an expert bias of zeros or a decay as it was made would hide the faults that touch them.  The
directory is what transformers' `save_pretrained` makes of it, with MTP tensors beside where the family's checkpoints have them
(transformers has no module for them, so they are only ever compared as files).
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SEED = 20260423
VOCABULARY = 211
FP32 = ("A_log", "dt_bias", "e_score_correction_bias")
INITIAL = {
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "intermediate_size": 80,
}
EXPERTS = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
SHARED = {"shared_expert_intermediate_size": 28}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
MTP = {"mtp_num_hidden_layers": 1}
QWEN_AROUND = "mtp.fc mtp.norm mtp.pre_fc_norm_embedding mtp.pre_fc_norm_hidden"
GLM_AROUND = "model.layers.4.eh_proj model.layers.4.enorm model.layers.4.hnorm model.layers.4.shared_head.norm"
GLM_COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
# family → (decoder layer that the MTP layer is like, its prefix, projection and norms around it)
MTP_TENSORS = {
    "qwen3.5": (1, "mtp.layers.0.", QWEN_AROUND),
    "qwen3-next": (1, "mtp.layers.0.", QWEN_AROUND),
    "glm4-moe": (3, "model.layers.4.", GLM_AROUND),
}


def rope(theta: float, **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


# family → (model_type, what its config says beside INITIAL)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True} | rope(1e6)),
    "qwen3-moe-mixed": ("qwen3_moe", EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [1]} | rope(1e6)),
    "qwen3": ("qwen3", rope(1e6)),
    "qwen2": ("qwen2", {"tie_word_embeddings": True} | rope(1e6)),
    "llama": ("llama", {"tie_word_embeddings": True} | rope(1e5)),
    "qwen3.5": ("qwen3_5_text", LINEAR | MTP | rope(1e7, partial_rotary_factor=0.25)),
    "qwen3.5-tied": (
        "qwen3_5_text", LINEAR | {"linear_num_value_heads": 2, "tie_word_embeddings": True} | rope(1e7, partial_rotary_factor=0.25),
    ),
    "qwen3-next": ("qwen3_next", EXPERTS | SHARED | LINEAR | {"norm_topk_prob": True} | rope(1e7, partial_rotary_factor=0.25)),
    "glm4-moe": (
        "glm4_moe",
        {
            "n_routed_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 1,
        } | rope(1e6, partial_rotary_factor=0.5),
    ),
}  # fmt: skip


@torch.no_grad()
def fill(model: PreTrainedModel, seed: int) -> None:
    """Random values at the scale that keeps every activation near one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        return scale * torch.randn(tensor.shape, generator=generator)

    for name, tensor in sorted(model.state_dict().items()):
        if name.endswith("dt_bias"):
            tensor.copy_(normal(tensor, 1.0))
        elif name.endswith("A_log"):
            tensor.copy_(torch.empty(tensor.shape).uniform_(math.log(0.02), math.log(2.0), generator=generator))
        elif name.endswith("norm.weight"):
            tensor.add_(normal(tensor, 0.15))
        elif tensor.dim() == 1:
            tensor.copy_(normal(tensor, 0.2))
        elif "embed_tokens" in name:
            tensor.copy_(normal(tensor, 0.5))
        else:
            tensor.copy_(normal(tensor, tensor.shape[-1] ** -0.5))


def mtp_tensors(stored: dict[str, torch.Tensor], layer: int, own: str, around: str, seed: int) -> dict[str, torch.Tensor]:
    """An MTP layer like decoder layer `layer`, and the projection and norms `around` it (the projection first)."""
    generator = torch.Generator().manual_seed(seed)
    prefix = f"model.layers.{layer}."
    like = {name.replace(prefix, own): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    norm = stored["model.norm.weight"]
    projection, *norms = around.split()
    like |= {f"{name}.weight": norm for name in norms} | {f"{projection}.weight": torch.empty(len(norm), 2 * len(norm), dtype=norm.dtype)}
    return {
        name: (torch.randn(tensor.shape, generator=generator) * (0.15 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5)).to(tensor.dtype)
        for name, tensor in sorted(like.items())
    }


def make(family: str, out: Path, seed: int = SEED) -> Path:
    """Writes the tiny model of a family and returns its directory."""
    model_type, said = CONFIGS[family]
    config = AutoConfig.for_model(model_type, **(INITIAL | said))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model, seed)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith(FP32)}
    model.to(torch.bfloat16).save_pretrained(out)
    file = out / "model.safetensors"
    stored = load_file(file) | kept
    if family in MTP_TENSORS:
        stored |= mtp_tensors(stored, *MTP_TENSORS[family], seed + 1)
    if family == "glm4-moe":  # its checkpoints repeat these
        stored |= {f"model.layers.4.{name}.weight": stored[f"{of}.weight"].clone() for name, of in GLM_COPIES.items()}
    save_file(stored, file, metadata={"format": "pt"})
    return out


def prompts(out: Path) -> Path:
    """Three prompts of token ids, one longer than a chunk of the delta rule."""
    generator = torch.Generator().manual_seed(SEED)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in (5, 23, 70)]
    out.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return out


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
