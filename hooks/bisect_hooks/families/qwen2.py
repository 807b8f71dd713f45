"""Qwen2.5 dense (and Qwen2): full attention with biases on q, k and v, a dense MLP.  Source: transformers `models/qwen2`."""

from __future__ import annotations

from bisect_hooks.blocks.attention import Attention
from bisect_hooks.blocks.decoder import Decoder
from bisect_hooks.blocks.feed_forward import Dense

FAMILY = Decoder(
    name="qwen2",
    model_types=("qwen2",),
    modeling="transformers.models.qwen2.modeling_qwen2",
    attention=Attention(qkv_bias=True, rotary_percent=None),
    dense=Dense(),
)
