"""Every Megatron arg that changes the model: what config.json asks for, and what it never asks for.

The same table judges a launch's flags and a checkpoint's own args.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bisect_hooks.blocks.args import Args, close, flag
from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout, Dimensions, Family, Setting
from bisect_hooks.site import Site

PATTERNS: dict[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda i, n: i % n == 0,
    "linear_attention_freq": lambda i, n: (i + 1) % n != 0,
    "no_rope_freq": lambda i, n: (i + 1) % n == 0,
}


def every_setting(family: Family, config: Mapping[str, Any], layout: CheckpointLayout) -> list[Setting]:
    """The whole table for one model.  Raises UsageError for a config.json that is not understood."""
    return [*family.settings(config, layout), *more_settings(family.reference_dimensions(config))]


def _off(value: Any) -> bool:
    return not value


def _one(value: Any) -> bool:
    return value is None or value == 1


def _no_window(value: Any) -> bool:
    """None, or (-1, -1) and (-1, 0) as Transformer Engine writes "all of them"; a launch's words are texts."""
    words = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return value is None or words.partition(",")[0].strip("([ ") == "-1"


def _unset(value: Any) -> bool:
    """A number of tokens, or none: less than zero means none too."""
    return value is None or (isinstance(value, (int, float)) and value < 0)


@dataclass(frozen=True, slots=True)
class More:
    """An arg that no config.json asks for.  where: what it touches first; right: values that leave the model as it is"""

    arg: str
    where: str
    effect: str
    right: Callable[[Any], bool] = _off
    expected: Any = None

    def setting(self, sites: tuple[Site, ...]) -> Setting:
        right = self.right
        return Setting(
            self.arg, flag(self.arg), self.expected, sites, self.effect, default=self.expected, same=lambda value, _: right(value)
        )


def _switch(arg: str, where: str, effect: str) -> More:
    return More(arg, where, effect, expected=False)


MORE = (
    _switch("multi_latent_attention", "core", "another kind of attention"),
    _switch("qk_l2_norm", "q_norm", "queries and keys are normed by their length"),
    More("window_size", "core", "each token sees a window of the ones before it", _no_window),
    More("softmax_type", "core", "another softmax", lambda value: value in (None, "vanilla")),
    More("no_rope_freq", "rope", "some layers rotate nothing", lambda value: not (any(value) if isinstance(value, list) else value)),
    _switch("use_rope_scaling", "rope", "rotary frequencies are scaled as Llama 3.1 does"),
    More("rotary_seq_len_interpolation_factor", "rope", "positions are interpolated", _one),
    _switch("squared_relu", "activation", "another activation"),
    _switch("openai_gelu", "activation", "another activation"),
    _switch("quick_geglu", "activation", "another activation"),
    More("activation_func_clamp_value", "activation", "the activation is clamped"),
    More("glu_linear_offset", "activation", "the activation's linear half is shifted"),
    _switch("apply_residual_connection_post_layernorm", "norms", "the residual is taken after the norm"),
    _switch("post_self_attn_layernorm", "norms", "attention's output is normed again"),
    _switch("post_mlp_layernorm", "norms", "the feed-forward's output is normed again"),
    More("hybrid_override_pattern", "norms", "layers of other kinds"),
    More("heterogeneous_layers_config_path", "norms", "each layer is built by a file of its own"),
    More("heterogeneous_layers_config_encoded_json", "norms", "each layer is built by a text of its own"),
    More("moe_expert_capacity_factor", "dispatch", "tokens beyond an expert's capacity are dropped", _unset),
    _switch("moe_router_force_load_balancing", "topk", "experts are chosen at random"),
    More("moe_router_num_groups", "topk", "experts are chosen inside groups", _one),
    More("moe_router_topk_limited_devices", "topk", "experts are chosen on some devices alone"),
    More("moe_router_load_balancing_type", "topk", "experts are chosen by Sinkhorn's rule", lambda value: "sinkhorn" not in str(value)),
    More("moe_input_jitter_eps", "router", "the router's input is multiplied by noise, in every forward"),
    _switch("moe_apply_probs_on_input", "fc1", "experts get scaled inputs instead of giving scaled outputs"),
    More("moe_latent_size", "fc1", "experts work in a narrower space, between two projections"),
)  # fmt: skip


def held(arg: str, checkpoint: Mapping[str, Any] | None) -> Any:
    """What a checkpoint's args say of it; None when nothing.

    The rows that a model is built with are padded_vocab_size: where that is said, the weights have them, and vocab_size shapes nothing.
    """
    if checkpoint is None or (arg == "vocab_size" and checkpoint.get("padded_vocab_size")):
        return None
    return checkpoint.get(arg)


def more_settings(dims: Dimensions) -> list[Setting]:
    """Args that no config.json asks for, and that make another model of any when they are given."""
    every = range(dims.layers)
    full = [n for n in every if dims.kinds[n] == "attention"]
    moe = [n for n in every if dims.moe[n]]

    def at(layers: Sequence[int], module: str, part: str | None = None) -> tuple[Site, ...]:
        return tuple(Site(module, n, part) for n in layers)

    fc1 = at(moe, "experts", "fc1")
    sites = {
        "rope": at(full, "attention", "rope"),
        "core": at(full, "attention", "core"),
        "q_norm": at(full, "attention", "q_norm"),
        "norms": at(every, "input_norm"),
        "activation": fc1 or at(every, "mlp", "fc1"),
        "fc1": fc1,
        "router": at(moe, "router", "logits"),
        "topk": at(moe, "router", "topk"),
        "dispatch": at(moe, "experts", "dispatch"),
    }
    variants = (None, "gated_delta_net") if "linear_attention" in dims.kinds else (None,)
    of_this = (
        More("softmax_scale", "core", "scores are scaled otherwise", lambda value: value is None or close(value, dims.head_width**-0.5)),
        More("experimental_attention_variant", "norms", "another kind of attention", lambda value: value in variants),
    )
    found = [one.setting(sites[one.where]) for one in (*MORE, *of_this) if sites[one.where]]
    vocabulary = Setting(
        "vocab_size", "--vocab-size", dims.vocabulary, (Site("embedding"), Site("lm_head")), "the embedding and the output layer have other rows",
        default=dims.vocabulary,
    )  # fmt: skip
    depth = Setting(
        "mtp_num_layers", "--mtp-num-layers", dims.mtp, (Site("mtp"),), "another number of MTP layers: drafts differ, the text does not", default=dims.mtp,
        same=lambda value, expected: value == expected or not value,
    )  # fmt: skip
    return [*found, vocabulary, depth]


def narrowed(setting: Setting, value: Any, dims: Dimensions) -> Setting:
    """A pattern over layers that differs in some of them reaches those alone."""
    if setting.arg not in PATTERNS:
        return setting
    try:
        found = Args({setting.arg: value}).pattern(setting.arg, dims.layers, every=PATTERNS[setting.arg])
    except UsageError:
        return setting
    expected = [bool(one) for one in setting.expected or [0] * dims.layers]
    wrong = {n for n in range(dims.layers) if found[n] != expected[n]}
    return replace(setting, sites=tuple(site for site in setting.sites if site.layer in wrong) or setting.sites)
