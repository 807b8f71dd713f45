"""Linear attention: a gated delta net, in either checkpoint layout.

`native` is megatron-core's own GatedDeltaNet (`ssm/gated_delta_net.py`); `slime` keeps a Hugging Face style module under
`self_attention.linear_attn`, replicated on every tensor parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bisect_hooks.blocks.args import same_pattern
from bisect_hooks.blocks.config import Config, Key
from bisect_hooks.blocks.place import COLUMNS, ROWS, Place, at
from bisect_hooks.family import CheckpointLayout, Dimensions, Setting
from bisect_hooks.site import Site
from bisect_hooks.table import Made, MinusOne, Op, Rule, Same, Split
from bisect_hooks.table_more import Deinterleave
from bisect_hooks.tap import Tap

GDN = "megatron.core.ssm.gated_delta_net"
KINDS = {"full_attention": "attention", "linear_attention": "linear_attention"}


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """What a family says of its gated delta net.

    interleaved  its projections are `in_proj_qkvz` and `in_proj_ba`, packed key head by key head, not `in_proj_{qkv,z,b,a}`
    """

    interleaved: bool = False
    # a module without weights where transformers 5.3 has the activation
    helpers = ("act",)

    def dimensions(self, config: Config) -> dict[str, Any]:
        config.only("output_gate_type", "swish")  # the gated norm's activation; SiLU is its other name
        return {
            "key_heads": config.number(Key("linear_num_key_heads")),
            "key_width": config.number(Key("linear_key_head_dim")),
            "value_heads": config.number(Key("linear_num_value_heads")),
            "value_width": config.number(Key("linear_value_head_dim")),
            "kernel": config.number(Key("linear_conv_kernel_dim")),
            "interleaved": self.interleaved,
        }

    def settings(self, dims: Dimensions) -> list[Setting]:
        linear = [n for n in range(dims.layers) if dims.kinds[n] == "linear_attention"]
        delta, conv, everything = (
            at(linear, "linear_attention", "in_proj"),
            at(linear, "linear_attention", "conv1d"),
            at(range(dims.layers), "input_norm"),
        )
        pattern = [0 if kind == "attention" else 1 for kind in dims.kinds]
        kinds_match = same_pattern(dims.layers, lambda i, n: (i + 1) % n != 0, None)
        return [
            Setting("linear_attention_freq", "--linear-attention-freq", pattern, everything, "other layers are linear attention", needed=True, same=kinds_match),
            Setting("linear_num_key_heads", "--linear-num-key-heads", dims.key_heads, delta, "other key heads", default=16),
            Setting("linear_key_head_dim", "--linear-key-head-dim", dims.key_width, delta, "another key width", default=128),
            Setting("linear_num_value_heads", "--linear-num-value-heads", dims.value_heads, delta, "other value heads", default=32),
            Setting("linear_value_head_dim", "--linear-value-head-dim", dims.value_width, delta, "another value width", default=128),
            Setting("linear_conv_kernel_dim", "--linear-conv-kernel-dim", dims.kernel, conv, "another kernel", default=4),
        ]  # fmt: skip

    def read_by_spec(self, args: Mapping[str, Any], dims: Dimensions) -> dict[str, Any]:
        """What slime's layer spec reads from the Hugging Face directory itself; what the args say of it goes unread there."""
        if not any("slime_plugins" in str(word) for word in args.get("spec") or ()):
            return {}
        return {setting.arg: setting.expected for setting in self.settings(dims)}

    def rules(self, place: Place, dims: Dimensions, layout: CheckpointLayout) -> list[Rule]:
        """The layer with its input norm."""
        n, source, target = place.n, place.source, place.target
        hf = f"{source}linear_attn."
        key, value, ratio = dims.key_rows, dims.value_rows, dims.value_heads // max(1, dims.key_heads)

        def rule(part: str, name: str, made: Sequence[Made], op: Op | None = None) -> Rule:
            return Rule(Site("linear_attention", n, part), (f"{hf}{name}",), tuple(made), op or Same())

        if layout == "slime":
            own = f"{target}self_attention.linear_attn."
            projections = ("qkvz", "ba") if dims.interleaved else ("qkv", "z", "b", "a")
            parts = {f"in_proj_{one}.weight": "in_proj" for one in projections} | {
                "conv1d.weight": "conv1d", "A_log": "a_log", "dt_bias": "dt_bias", "norm.weight": "gated_norm", "out_proj.weight": "out_proj",
            }  # fmt: skip
            fp32 = ("A_log", "dt_bias")
            norm = Made(f"{target}self_attention.input_layernorm.weight")
            return [
                Rule(Site("input_norm", n), (f"{source}input_layernorm.weight",), (norm,)),
                *(rule(part, name, [Made(f"{own}{name}", fp32=name in fp32)]) for name, part in parts.items()),
            ]
        own = f"{target}self_attention."
        fused = ((f"{target}input_layernorm.weight", f"{own}in_proj.layer_norm_weight"),)
        three = Split(sizes=(key, key, value))

        def inside(names: Sequence[str], tensor: str = "in_proj") -> list[Made]:
            return [Made(f"{own}{tensor}.weight.{name}", ROWS) for name in names]

        if dims.interleaved:
            wide = ratio * dims.value_width
            projected = [
                rule("in_proj", "in_proj_qkvz.weight", inside(("query", "key", "value", "z")), Deinterleave(heads=dims.key_heads, sizes=(dims.key_width, dims.key_width, wide, wide))),
                rule("in_proj", "in_proj_ba.weight", inside(("beta", "alpha")), Deinterleave(heads=dims.key_heads, sizes=(ratio, ratio))),
            ]  # fmt: skip
        else:
            projected = [
                rule("in_proj", "in_proj_qkv.weight", inside(("query", "key", "value")), three),
                *(rule("in_proj", f"in_proj_{one}.weight", inside((name,))) for one, name in (("z", "z"), ("b", "beta"), ("a", "alpha"))),
            ]
        return [
            Rule(Site("input_norm", n), (f"{source}input_layernorm.weight",), (Made(f"{target}input_layernorm.weight"),), aliases=fused),
            *projected,
            rule("conv1d", "conv1d.weight", inside(("query", "key", "value"), "conv1d"), three),
            rule("a_log", "A_log", [Made(f"{own}A_log", ROWS, fp32=True)]),
            rule("dt_bias", "dt_bias", [Made(f"{own}dt_bias", ROWS, fp32=True)]),
            rule("gated_norm", "norm.weight", [Made(f"{own}out_norm.weight")], MinusOne()),
            rule("out_proj", "out_proj.weight", [Made(f"{own}out_proj.weight", COLUMNS)]),
        ]

    def reference_taps(self, n: int, layer: str, dims: Dimensions, modeling: str) -> list[Tap]:
        own = f"{layer}.linear_attn"
        return [
            *projection_taps(n, own, dims),
            *delta_rule_taps(n, own, f"{modeling}:torch_chunk_gated_delta_rule", "b s n d", "b s n"),
            Tap(Site("linear_attention", n, "gated_norm"), f"{own}.norm", "(b s n) d"),
            Tap(Site("linear_attention", n, "out_proj"), f"{own}.out_proj", "b s h"),
        ]

    def candidate_taps(self, n: int, layer: str, dims: Dimensions, layout: CheckpointLayout) -> list[Tap]:
        return native_taps(n, layer, dims) if layout == "native" else slime_taps(n, layer, dims)


def projection_taps(n: int, own: str, dims: Dimensions) -> list[Tap]:
    """The projections of a Hugging Face style module."""
    site = Site("linear_attention", n, "in_proj")
    if dims.interleaved:
        ratio = dims.value_heads // dims.key_heads
        wide = ratio * dims.value_width
        return [
            Tap(site, f"{own}.in_proj_qkvz", f"b s (n (q:{dims.key_width} k:{dims.key_width} v:{wide} z:{wide}))"),
            Tap(site, f"{own}.in_proj_ba", f"b s (n (beta:{ratio} alpha:{ratio}))", piece="beta"),
        ]
    return [
        Tap(site, f"{own}.in_proj_qkv", f"b s (q:{dims.key_rows} k:{dims.key_rows} v:{dims.value_rows})"),
        *(Tap(site, f"{own}.in_proj_{one}", "b s f", piece=piece) for one, piece in (("z", "z"), ("b", "beta"), ("a", "alpha"))),
    ]


def delta_rule_taps(n: int, own: str, rule: str, heads: str, scalars: str) -> list[Tap]:
    """What enters the delta rule (q, k, v after the convolution and SiLU; decay; beta) and what leaves it."""

    def heard(part: str, layout: str, select: tuple[int | str, ...], piece: str = "") -> Tap:
        return Tap(Site("linear_attention", n, part), own, layout, "function", select, rule, result=False, piece=piece)

    return [
        heard("conv1d", heads, (0, "query"), "q"),
        heard("conv1d", heads, (1, "key"), "k"),
        heard("conv1d", heads, (2, "value"), "v"),
        heard("decay", scalars, ("g",)),
        heard("beta", scalars, ("beta",)),
        Tap(Site("linear_attention", n, "core"), own, heads, "function", (0,), rule),
    ]


def native_taps(n: int, layer: str, dims: Dimensions) -> list[Tap]:
    """megatron-core's GatedDeltaNet.  It l2-normalises and repeats q and k before the rule, so they are heard before that."""
    own, rule, norm = f"{layer}.self_attention", f"{GDN}:torch_chunk_gated_delta_rule", f"{GDN}:l2norm"
    key, value, heads = dims.key_rows, dims.value_rows, dims.value_heads
    sections = f"s b (q:{key} k:{key} v:{value} z:{value} beta:{heads} alpha:{heads})[tp]"
    from_rule = [tap for tap in delta_rule_taps(n, own, rule, "b s n[tp] d", "b s n[tp]") if tap.piece not in ("q", "k")]

    def before_norm(call: int, piece: str) -> Tap:
        return Tap(Site("linear_attention", n, "conv1d"), own, "b s n[tp] d", "function", (0,), norm, call, result=False, piece=piece)

    return [
        Tap(Site("input_norm", n), f"{layer}.input_layernorm", "s[sp] b h"),
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj", sections, select=(0,)),
        before_norm(0, "q"),
        before_norm(1, "k"),
        *from_rule,
        Tap(Site("linear_attention", n, "gated_norm"), f"{own}.out_proj", "s b f[tp]", "input", (0,)),
        Tap(Site("linear_attention", n, "out_proj"), f"{own}.out_proj", "s[sp] b h", select=(0,)),
    ]


def slime_taps(n: int, layer: str, dims: Dimensions) -> list[Tap]:
    """A Hugging Face style module, whole on every tensor parallel rank, over the full sequence also under sequence parallel."""
    own = f"{layer}.self_attention.linear_attn"

    def entering(part: str, layout: str, position: int, piece: str = "") -> Tap:
        return Tap(Site("linear_attention", n, part), f"{own}.core", layout, "input", (position,), piece=piece)

    return [
        Tap(Site("input_norm", n), f"{layer}.self_attention.input_layernorm", "b s h"),
        *projection_taps(n, own, dims),
        entering("conv1d", "b s n d", 0, "q"),
        entering("conv1d", "b s n d", 1, "k"),
        entering("conv1d", "b s n d", 2, "v"),
        entering("decay", "b s n", 3),
        entering("beta", "b s n", 4),
        Tap(Site("linear_attention", n, "core"), f"{own}.core", "b s n d"),
        Tap(Site("linear_attention", n, "gated_norm"), f"{own}.norm", "b s n d"),
        Tap(Site("linear_attention", n, "out_proj"), f"{own}.out_proj", "b s h"),
    ]
