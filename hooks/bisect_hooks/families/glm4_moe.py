"""GLM-4.5: dense layers first, then experts scored by a sigmoid and chosen with a bias, beside a shared one without a gate.

Source: transformers `models/glm4_moe`.  The MTP layer stands behind the last layer of the decoder, under the number after it.
"""

from __future__ import annotations

from bisect_hooks.blocks.attention import Attention
from bisect_hooks.blocks.config import Key
from bisect_hooks.blocks.decoder import Decoder
from bisect_hooks.blocks.feed_forward import Dense, Experts, Shared, after_dense
from bisect_hooks.blocks.mtp import Mtp

FAMILY = Decoder(
    name="glm4-moe",
    model_types=("glm4_moe",),
    modeling="transformers.models.glm4_moe.modeling_glm4_moe",
    attention=Attention(qk_norm=Key("use_qk_norm", False), qkv_bias=Key("attention_bias", False), rotary_percent=0.5),
    dense=Dense(),
    experts=Experts(
        where=after_dense,
        count=Key("n_routed_experts"),
        renormalised=Key("norm_topk_prob", True),
        scaling=Key("routed_scaling_factor", 1.0),
        sigmoid=True,
        shared=Shared("shared_experts", Key("moe_intermediate_size"), gated=False, count=Key("n_shared_experts", 1)),
    ),
    mtp=Mtp(
        Key("num_nextn_predict_layers", 0, also="num_mtp_layers"),
        own="model.layers.{layers}.",
        names=tuple(f"model.layers.{{layers}}.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")),
        layer="model.layers.{layers}.",
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    ),
)
