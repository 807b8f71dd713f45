"""Qwen3-MoE: full attention with q and k normed, routed experts, none shared.  Source: transformers `models/qwen3_moe`."""

from __future__ import annotations

from bisect_hooks.blocks.attention import Attention
from bisect_hooks.blocks.config import Key
from bisect_hooks.blocks.decoder import Decoder
from bisect_hooks.blocks.feed_forward import Dense, Experts, sparse_step

FAMILY = Decoder(
    name="qwen3-moe",
    model_types=("qwen3_moe",),
    modeling="transformers.models.qwen3_moe.modeling_qwen3_moe",
    attention=Attention(qk_norm=True, rotary_percent=None),
    dense=Dense(),
    experts=Experts(where=sparse_step, renormalised=Key("norm_topk_prob", False)),
)
