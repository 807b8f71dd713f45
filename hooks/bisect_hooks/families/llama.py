"""Llama (and what is saved as one: SmolLM2): plain full attention, a dense MLP, no biases.  Source: transformers `models/llama`."""

from __future__ import annotations

from bisect_hooks.blocks.attention import Attention
from bisect_hooks.blocks.decoder import Decoder
from bisect_hooks.blocks.feed_forward import Dense

FAMILY = Decoder(
    name="llama",
    model_types=("llama",),
    modeling="transformers.models.llama.modeling_llama",
    attention=Attention(rotary_percent=None),
    dense=Dense(),
)
