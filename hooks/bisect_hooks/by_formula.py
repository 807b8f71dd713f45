"""How every site of gated attention, gated delta net and mixture of experts follows from the sites before it, by its formula.

A Recipe names what a key is computed from (keys of the same recording, weights by their Hugging Face names) and computes it in
float64.  It shares no code with transformers or megatron-core, so it can take a side where the two disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bisect_hooks import formulas as f
from bisect_hooks.family import Dimensions
from bisect_hooks.site import parse_site
from bisect_hooks.tap import split_key

Tensors = Sequence[torch.Tensor]
Formula = Callable[[Tensors, Tensors, f.Segments], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """formula: (inputs, weights, segment lengths) → the tensor of the key, [tokens ..]"""

    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    formula: Formula


def recipe(key: str, dims: Dimensions, text: Mapping[str, Any]) -> Recipe | None:
    """The recipe of a key, None for one that has none (tokens, layer inputs, probes).  `text` is config.json's text_config."""
    site = parse_site(split_key(key)[0])
    eps = float(text["rms_norm_eps"])
    if not site.in_layer:
        return {
            "embedding": Recipe(("tokens",), ("model.embed_tokens.weight",), lambda x, w, _: f.wide(w[0][x[0].long().flatten()])),
            "final_norm": Recipe((f"layers.{dims.layers - 1}.output",), ("model.norm.weight",), _norm(eps)),
            "lm_head": Recipe(("final_norm",), ("lm_head.weight",), _linear),
        }.get(site.module)
    n = site.layer
    assert n is not None
    makers = {"attention": _attention, "attention_gate": _attention, "linear_attention": _linear_attention}
    made = makers.get(site.module, _around)(f"layers.{n}", f"model.layers.{n}", dims, text)
    return made.get(key.removeprefix(f"layers.{n}."))


def _norm(eps: float, width: int | None = None) -> Formula:
    def formula(x: Tensors, w: Tensors, _: f.Segments) -> torch.Tensor:
        heads = x[0] if width is None else x[0].reshape(len(x[0]), -1, width)
        return f.rms_norm(heads, w[0], eps, zero_centred=True)

    return formula


def _linear(x: Tensors, w: Tensors, _: f.Segments) -> torch.Tensor:
    return f.linear(x[0], w[0])


def _rows(start: int, stop: int) -> Formula:
    """A part of a packed projection."""
    return lambda x, w, _: f.linear(x[0], w[0][start:stop])


def _sum(x: Tensors, _w: Tensors, _: f.Segments) -> torch.Tensor:
    return torch.stack([f.wide(one) for one in x]).sum(0)


def _around(at: str, source: str, dims: Dimensions, text: Mapping[str, Any]) -> dict[str, Recipe]:
    """Norms, experts and the sums between them."""
    eps = float(text["rms_norm_eps"])
    mixed = (f"{at}.input", f"{at}.{dims.kinds[int(at.split('.')[1])]}.out_proj")
    x, moe = (f"{at}.pre_mlp_norm",), f"{source}.mlp"
    shared = f"{at}.shared_expert.fc1"

    def router(which: int) -> Recipe:
        return Recipe((f"{at}.router.logits",), (), lambda x, _w, _: f.route(x[0], dims.top_k)[which])

    return {
        "input_norm": Recipe((f"{at}.input",), (f"{source}.input_layernorm.weight",), _norm(eps)),
        "pre_mlp_norm": Recipe(mixed, (f"{source}.post_attention_layernorm.weight",), lambda x, w, s: _norm(eps)([_sum(x, w, s)], w, s)),
        "router.logits": Recipe(x, (f"{moe}.gate.weight",), _linear),
        "router.probs": router(0),
        "router.topk": router(1),
        "experts.combine": Recipe(
            (*x, f"{at}.router.probs"), (f"{moe}.experts.gate_up_proj", f"{moe}.experts.down_proj"), lambda x, w, _: f.experts(x[0], w[0], w[1], x[1])
        ),
        "shared_expert.fc1:gate": Recipe(x, (f"{moe}.shared_expert.gate_proj.weight",), _linear),
        "shared_expert.fc1:up": Recipe(x, (f"{moe}.shared_expert.up_proj.weight",), _linear),
        "shared_expert.fc2": Recipe(
            (f"{shared}:gate", f"{shared}:up"), (f"{moe}.shared_expert.down_proj.weight",), lambda x, w, _: f.linear(f.swiglu(x[0], x[1]), w[0])
        ),
        "shared_expert_gate": Recipe(
            (f"{at}.shared_expert.fc2", *x), (f"{moe}.shared_expert_gate.weight",), lambda x, w, _: f.gate(x[0], f.linear(x[1], w[0]))
        ),
        "output": Recipe((*mixed, f"{at}.experts.combine", f"{at}.shared_expert_gate"), (), _sum),
    }  # fmt: skip


def _attention(at: str, source: str, dims: Dimensions, text: Mapping[str, Any]) -> dict[str, Recipe]:
    eps, width, own = float(text["rms_norm_eps"]), dims.head_width, f"{source}.self_attn"
    rope = {**text, **(text.get("rope_parameters") or {})}
    base, turned = float(rope.get("rope_theta", 10000)), int(width * rope.get("partial_rotary_factor", 1.0))
    x, core = (f"{at}.input_norm",), f"{at}.attention.core"

    def gated(which: int) -> Formula:
        """Queries and their gates lie head by head in one projection."""
        return lambda x, w, _: (
            f.linear(x[0], w[0]).reshape(len(x[0]), dims.heads, 2, width)[:, :, which] if dims.output_gate else f.linear(x[0], w[0])
        )

    def rotated(which: str) -> Recipe:
        return Recipe(
            (f"{at}.attention.{which}_norm",),
            (),
            lambda x, _w, s: f.rope(x[0].reshape(len(x[0]), -1, width), f.positions_of(s), base, turned),
        )

    def attend(x: Tensors, _w: Tensors, segments: f.Segments) -> torch.Tensor:
        q, k, v = (one.reshape(len(one), -1, width) for one in x)
        return f.attention(q, k, v, segments)

    return {
        "attention.qkv:q": Recipe(x, (f"{own}.q_proj.weight",), gated(0)),
        "attention.qkv:gate": Recipe(x, (f"{own}.q_proj.weight",), gated(1)),
        "attention.qkv:k": Recipe(x, (f"{own}.k_proj.weight",), _linear),
        "attention.qkv:v": Recipe(x, (f"{own}.v_proj.weight",), _linear),
        "attention.q_norm": Recipe((f"{at}.attention.qkv:q",), (f"{own}.q_norm.weight",), _norm(eps, width)),
        "attention.k_norm": Recipe((f"{at}.attention.qkv:k",), (f"{own}.k_norm.weight",), _norm(eps, width)),
        "attention.rope:q": rotated("q"),
        "attention.rope:k": rotated("k"),
        "attention.core": Recipe((f"{at}.attention.rope:q", f"{at}.attention.rope:k", f"{at}.attention.qkv:v"), (), attend),
        "attention_gate": Recipe((core, f"{at}.attention.qkv:gate"), (), lambda x, _w, _: f.gate(x[0], x[1])),
        "attention.out_proj": Recipe((f"{at}.attention_gate" if dims.output_gate else core,), (f"{own}.o_proj.weight",), _linear),
    }  # fmt: skip


def _linear_attention(at: str, source: str, dims: Dimensions, text: Mapping[str, Any]) -> dict[str, Recipe]:
    own, here, x = f"{source}.linear_attn", f"{at}.linear_attention", (f"{at}.input_norm",)
    key, value, eps = dims.key_rows, dims.value_rows, float(text["rms_norm_eps"])
    spans = {"q": (0, key), "k": (key, 2 * key), "v": (2 * key, 2 * key + value)}
    made = {}
    for piece, (start, stop) in spans.items():
        made[f"linear_attention.in_proj:{piece}"] = Recipe(x, (f"{own}.in_proj_qkv.weight",), _rows(start, stop))
        made[f"linear_attention.conv1d:{piece}"] = Recipe(
            (f"{here}.in_proj:{piece}",), (f"{own}.conv1d.weight",), lambda x, w, s, a=start, b=stop: f.conv(x[0], w[0][a:b], s)  # type: ignore[misc]
        )  # fmt: skip
    for piece, name in (("z", "in_proj_z"), ("beta", "in_proj_b"), ("alpha", "in_proj_a")):
        made[f"linear_attention.in_proj:{piece}"] = Recipe(x, (f"{own}.{name}.weight",), _linear)

    def rule(x: Tensors, _w: Tensors, segments: f.Segments) -> torch.Tensor:
        q, k = (one.reshape(len(one), dims.key_heads, dims.key_width) for one in x[:2])
        return f.delta_rule(q, k, x[2].reshape(len(x[2]), dims.value_heads, dims.value_width), x[3], x[4], segments)

    def normed(x: Tensors, w: Tensors, _: f.Segments) -> torch.Tensor:
        core, z = (one.reshape(len(one), dims.value_heads, dims.value_width) for one in x)
        return f.gated_norm(core, z, w[0], eps)

    entering = (*(f"{here}.conv1d:{piece}" for piece in "qkv"), f"{here}.decay", f"{here}.beta")
    return made | {
        "linear_attention.decay": Recipe((f"{here}.in_proj:alpha",), (f"{own}.A_log", f"{own}.dt_bias"), lambda x, w, _: f.decay(x[0], w[0], w[1])),
        "linear_attention.beta": Recipe((f"{here}.in_proj:beta",), (), lambda x, _w, _: torch.sigmoid(f.wide(x[0]))),
        "linear_attention.core": Recipe(entering, (), rule),
        "linear_attention.gated_norm": Recipe((f"{here}.core", f"{here}.in_proj:z"), (f"{own}.norm.weight",), normed),
        "linear_attention.out_proj": Recipe((f"{here}.gated_norm",), (f"{own}.out_proj.weight",), _linear),
    }  # fmt: skip
