"""Qwen3.5 dense, text: gated delta net in three layers of four, gated full attention in the fourth, a dense MLP in each.

Source: transformers `models/qwen3_5`.
"""

from __future__ import annotations

from bisect_hooks.blocks.attention import Attention
from bisect_hooks.blocks.config import Key
from bisect_hooks.blocks.decoder import Decoder
from bisect_hooks.blocks.feed_forward import Dense
from bisect_hooks.blocks.linear_attention import LinearAttention
from bisect_hooks.blocks.mtp import Mtp

VISION = "the vision tower: text only, the engine keeps its own"

FAMILY = Decoder(
    name="qwen3.5",
    model_types=("qwen3_5", "qwen3_5_text"),
    modeling="transformers.models.qwen3_5.modeling_qwen3_5",
    attention=Attention(
        qk_norm=True,
        output_gate=Key("attn_output_gate", True),
        head_width=Key("head_dim", 256),
        rotary_percent=0.25,
    ),
    linear=LinearAttention(),
    dense=Dense(),
    mtp=Mtp(Key("mtp_num_hidden_layers", 0)),
    zero_centred=True,
    left={"model.visual.": VISION, "visual.": VISION},
)
