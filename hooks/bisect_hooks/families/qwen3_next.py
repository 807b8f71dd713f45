"""Qwen3-Next: like Qwen3.5-MoE, with the projections of its gated delta net fused and packed key head by key head.

Source: transformers `models/qwen3_next`.  Its config says nothing of the one MTP layer that its checkpoints have.
"""

from __future__ import annotations

from bisect_hooks.blocks.attention import Attention
from bisect_hooks.blocks.config import Key
from bisect_hooks.blocks.decoder import Decoder
from bisect_hooks.blocks.feed_forward import Dense, Experts, Shared, sparse_step
from bisect_hooks.blocks.linear_attention import LinearAttention
from bisect_hooks.blocks.mtp import Mtp

FAMILY = Decoder(
    name="qwen3-next",
    model_types=("qwen3_next",),
    modeling="transformers.models.qwen3_next.modeling_qwen3_next",
    attention=Attention(qk_norm=True, output_gate=True, head_width=Key("head_dim", 256), rotary_percent=0.25),
    linear=LinearAttention(interleaved=True),
    dense=Dense(),
    experts=Experts(
        where=sparse_step,
        renormalised=Key("norm_topk_prob", True),
        shared=Shared("shared_expert", Key("shared_expert_intermediate_size"), gated=True),
    ),
    mtp=Mtp(1),
    zero_centred=True,
)
