"""Qwen3 dense: full attention with q and k normed, a dense MLP.  Source: transformers `models/qwen3`."""

from __future__ import annotations

from bisect_hooks.blocks.attention import Attention
from bisect_hooks.blocks.config import Key
from bisect_hooks.blocks.decoder import Decoder
from bisect_hooks.blocks.feed_forward import Dense

FAMILY = Decoder(
    name="qwen3",
    model_types=("qwen3",),
    modeling="transformers.models.qwen3.modeling_qwen3",
    attention=Attention(qk_norm=True, head_width=Key("head_dim", 128), rotary_percent=None),
    dense=Dense(),
)
