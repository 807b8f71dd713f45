"""Qwen3.5-MoE, text: gated delta net in three layers of four, gated full attention in the fourth, routed and shared experts.

Source: transformers `models/qwen3_5_moe`.
"""

from __future__ import annotations

from bisect_hooks.blocks.attention import Attention
from bisect_hooks.blocks.config import Key
from bisect_hooks.blocks.decoder import Decoder
from bisect_hooks.blocks.feed_forward import Dense, Experts, Shared, sparse_step
from bisect_hooks.blocks.linear_attention import LinearAttention
from bisect_hooks.blocks.mtp import Mtp

VISION = "the vision tower: text only, the engine keeps its own"

FAMILY = Decoder(
    name="qwen3.5-moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    modeling="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    attention=Attention(
        qk_norm=True,
        output_gate=Key("attn_output_gate", True),
        head_width=Key("head_dim", 256),
        rotary_percent=0.25,
    ),
    linear=LinearAttention(),
    dense=Dense(Key("intermediate_size", 0)),
    experts=Experts(
        where=sparse_step,
        renormalised=Key("norm_topk_prob", True),
        shared=Shared("shared_expert", Key("shared_expert_intermediate_size"), gated=True),
    ),
    mtp=Mtp(Key("mtp_num_hidden_layers", 0)),
    zero_centred=True,
    left={"model.visual.": VISION, "visual.": VISION},
)
