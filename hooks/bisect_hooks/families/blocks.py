"""Building blocks of families: weight rules and taps of gated attention, gated delta net and mixture of experts.

A family file puts them together; what a block needs to know of a model it is told in Dimensions.
Sources: transformers' modules of the same names, megatron-core `ssm/gated_delta_net.py`, `transformer/attention.py`,
`transformer/moe`; the `slime` layout keeps the linear attention as a Hugging Face style module under
`self_attention.linear_attn`, replicated on every tensor parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout, Dimensions
from bisect_hooks.site import Site
from bisect_hooks.table import Cut, GroupHeads, Join, Made, MinusOne, Op, Rule, Same, Split, Stack
from bisect_hooks.tap import Tap

HF = "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe"
GDN = "megatron.core.ssm.gated_delta_net"
ROWS, COLUMNS, HALVES = Cut("tp@0"), Cut("tp@1"), Cut("tp@0/2")


def attention_rules(n: int | None, source: str, target: str, dims: Dimensions, mtp: int | None = None) -> list[Rule]:
    """A full attention layer with its input norm; for an MTP layer every Site is `mtp.<n>.layer`."""

    def site(module: str, part: str | None = None) -> Site:
        return Site(module, n, part) if mtp is None else Site("mtp", mtp, "layer")

    attention, hf = f"{target}self_attention.", f"{source}self_attn."
    fused = ((f"{target}input_layernorm.weight", f"{attention}linear_qkv.layer_norm_weight"),)
    heads = GroupHeads(dims.groups, dims.heads, dims.head_width, dims.output_gate)
    packed = tuple(f"{hf}{name}_proj.weight" for name in "qkv")
    return [
        Rule(site("input_norm"), (f"{source}input_layernorm.weight",), (Made(f"{target}input_layernorm.weight"),), aliases=fused),
        Rule(site("attention", "qkv"), packed, (Made(f"{attention}linear_qkv.weight", ROWS),), heads),
        Rule(site("attention", "q_norm"), (f"{hf}q_norm.weight",), (Made(f"{attention}q_layernorm.weight"),)),
        Rule(site("attention", "k_norm"), (f"{hf}k_norm.weight",), (Made(f"{attention}k_layernorm.weight"),)),
        Rule(site("attention", "out_proj"), (f"{hf}o_proj.weight",), (Made(f"{attention}linear_proj.weight", COLUMNS),)),
    ]


def linear_attention_rules(n: int, source: str, target: str, dims: Dimensions, layout: CheckpointLayout) -> list[Rule]:
    """A gated delta net with its input norm, in either checkpoint layout."""
    hf, sharded = f"{source}linear_attn.", ROWS if layout == "native" else Cut("")
    key, value = dims.key_rows, dims.value_rows

    def rule(part: str, name: str, made: Sequence[Made], op: Op | None = None) -> Rule:
        return Rule(Site("linear_attention", n, part), (f"{hf}{name}",), tuple(made), op or Same())

    if layout == "slime":
        own = f"{target}self_attention.linear_attn."
        parts = {
            "in_proj_qkv.weight": "in_proj", "in_proj_z.weight": "in_proj", "in_proj_b.weight": "in_proj",
            "in_proj_a.weight": "in_proj", "conv1d.weight": "conv1d", "A_log": "a_log", "dt_bias": "dt_bias",
            "norm.weight": "gated_norm", "out_proj.weight": "out_proj",
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
    return [
        Rule(Site("input_norm", n), (f"{source}input_layernorm.weight",), (Made(f"{target}input_layernorm.weight"),), aliases=fused),
        rule("in_proj", "in_proj_qkv.weight", [Made(f"{own}in_proj.weight.{part}", sharded) for part in ("query", "key", "value")], three),
        rule("in_proj", "in_proj_z.weight", [Made(f"{own}in_proj.weight.z", sharded)]),
        rule("in_proj", "in_proj_b.weight", [Made(f"{own}in_proj.weight.beta", sharded)]),
        rule("in_proj", "in_proj_a.weight", [Made(f"{own}in_proj.weight.alpha", sharded)]),
        rule("conv1d", "conv1d.weight", [Made(f"{own}conv1d.weight.{part}", sharded) for part in ("query", "key", "value")], three),
        rule("a_log", "A_log", [Made(f"{own}A_log", sharded, fp32=True)]),
        rule("dt_bias", "dt_bias", [Made(f"{own}dt_bias", sharded, fp32=True)]),
        rule("gated_norm", "norm.weight", [Made(f"{own}out_norm.weight")], MinusOne()),
        rule("out_proj", "out_proj.weight", [Made(f"{own}out_proj.weight", COLUMNS)]),
    ]


def moe_rules(n: int | None, source: str, target: str, dims: Dimensions, known: frozenset[str], mtp: int | None = None) -> list[Rule]:
    """Router, routed experts (fused or one by one on the reference's side), shared expert and its gate."""

    def site(module: str, part: str | None = None) -> Site:
        return Site(module, n, part) if mtp is None else Site("mtp", mtp, "layer")

    hf, own = f"{source}mlp.", f"{target}mlp."
    fc1 = Made(f"{own}experts.experts.linear_fc1.weight", Cut("ep@0 etp@1/2"))
    fc2 = Made(f"{own}experts.experts.linear_fc2.weight", Cut("ep@0 etp@2"))
    if f"{hf}experts.0.gate_proj.weight" in known:
        pairs = tuple(f"{hf}experts.{e}.{name}_proj.weight" for e in range(dims.experts) for name in ("gate", "up"))
        downs = tuple(f"{hf}experts.{e}.down_proj.weight" for e in range(dims.experts))
        experts = [Rule(site("experts", "fc1"), pairs, (fc1,), Stack(each=2)), Rule(site("experts", "fc2"), downs, (fc2,), Stack(each=1))]
    else:
        experts = [
            Rule(site("experts", "fc1"), (f"{hf}experts.gate_up_proj",), (fc1,)),
            Rule(site("experts", "fc2"), (f"{hf}experts.down_proj",), (fc2,)),
        ]
    shared = tuple(f"{hf}shared_expert.{name}_proj.weight" for name in ("gate", "up"))
    return [
        Rule(site("pre_mlp_norm"), (f"{source}post_attention_layernorm.weight",), (Made(f"{target}pre_mlp_layernorm.weight"),)),
        Rule(site("router", "logits"), (f"{hf}gate.weight",), (Made(f"{own}router.weight"),)),
        *experts,
        Rule(site("shared_expert", "fc1"), shared, (Made(f"{own}shared_experts.linear_fc1.weight", HALVES),), Join(sizes=(dims.shared, dims.shared))),
        Rule(site("shared_expert", "fc2"), (f"{hf}shared_expert.down_proj.weight",), (Made(f"{own}shared_experts.linear_fc2.weight", COLUMNS),)),
        Rule(site("shared_expert_gate"), (f"{hf}shared_expert_gate.weight",), (Made(f"{own}shared_experts.gate_weight"),)),
    ]  # fmt: skip


def mtp_rules(dims: Dimensions, known: frozenset[str]) -> list[Rule]:
    """The multi-token prediction layer: full attention and experts behind a projection of [embedding; hidden]."""
    if dims.mtp > 1:
        raise UsageError(f"{dims.mtp} MTP layers: only one is known to share mtp.fc and its norms")
    rules = []
    for n in range(dims.mtp):
        own = f"mtp.layers.{n}."
        rules += [
            Rule(Site("mtp", n, "eh_proj"), ("mtp.fc.weight",), (Made(f"{own}eh_proj.weight", ROWS),)),
            Rule(Site("mtp", n, "enorm"), ("mtp.pre_fc_norm_embedding.weight",), (Made(f"{own}enorm.weight"),)),
            Rule(Site("mtp", n, "hnorm"), ("mtp.pre_fc_norm_hidden.weight",), (Made(f"{own}hnorm.weight"),)),
            Rule(Site("mtp", n, "final_norm"), ("mtp.norm.weight",), (Made(f"{own}final_layernorm.weight"),)),
            *attention_rules(None, f"mtp.layers.{n}.", f"{own}transformer_layer.", dims, mtp=n),
            *moe_rules(None, f"mtp.layers.{n}.", f"{own}transformer_layer.", dims, known, mtp=n),
        ]
    return rules


def reference_attention(n: int, layer: str, dims: Dimensions) -> list[Tap]:
    """transformers' gated attention."""
    own, width = f"{layer}.self_attn", dims.head_width
    rope, core = f"{HF}:apply_rotary_pos_emb", f"{HF}:eager_attention_forward"
    return [
        Tap(Site("attention", n, "qkv"), f"{own}.q_proj", f"b s (n (q:{width} gate:{width}))"),
        Tap(Site("attention", n, "qkv"), f"{own}.k_proj", "b s f", piece="k"),
        Tap(Site("attention", n, "qkv"), f"{own}.v_proj", "b s f", piece="v"),
        Tap(Site("attention", n, "q_norm"), f"{own}.q_norm", "b s n d"),
        Tap(Site("attention", n, "k_norm"), f"{own}.k_norm", "b s n d"),
        Tap(Site("attention", n, "rope"), own, "b n s d", "function", (0,), rope, piece="q"),
        Tap(Site("attention", n, "rope"), own, "b n s d", "function", (1,), rope, piece="k"),
        Tap(Site("attention", n, "core"), own, "b s n d", "function", (0,), core),
        Tap(Site("attention_gate", n), f"{own}.o_proj", "b s f", "input", (0,)),
        Tap(Site("attention", n, "out_proj"), f"{own}.o_proj", "b s h"),
    ]


def candidate_attention(n: int, layer: str, dims: Dimensions) -> list[Tap]:
    """megatron-core's SelfAttention with an output gate."""
    own, width = f"{layer}.self_attention", dims.head_width
    queries = dims.heads // dims.groups * width
    gate = f" gate:{queries}" if dims.output_gate else ""
    packed = f"s b (g[tp] (q:{queries}{gate} k:{width} v:{width}))"
    return [
        Tap(Site("input_norm", n), f"{layer}.input_layernorm", "s[sp] b h"),
        Tap(Site("attention", n, "qkv"), f"{own}.linear_qkv", packed, select=(0,)),
        Tap(Site("attention", n, "q_norm"), f"{own}.q_layernorm", "s b n[tp] d"),
        Tap(Site("attention", n, "k_norm"), f"{own}.k_layernorm", "s b n[tp] d"),
        Tap(Site("attention", n, "rope"), f"{own}.core_attention", "s b n[tp] d", "input", (0,), piece="q"),
        Tap(Site("attention", n, "rope"), f"{own}.core_attention", "s b n[tp] d", "input", (1,), piece="k"),
        Tap(Site("attention", n, "core"), f"{own}.core_attention", "s b f[tp]"),
        Tap(Site("attention_gate", n), f"{own}.linear_proj", "s b f[tp]", "input", (0,)),
        Tap(Site("attention", n, "out_proj"), f"{own}.linear_proj", "s[sp] b h", select=(0,)),
    ]


def reference_linear(n: int, layer: str, dims: Dimensions) -> list[Tap]:
    """transformers' gated delta net."""
    own, rule = f"{layer}.linear_attn", f"{HF}:torch_chunk_gated_delta_rule"
    sections = f"b s (q:{dims.key_rows} k:{dims.key_rows} v:{dims.value_rows})"
    return [
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_qkv", sections),
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_z", "b s f", piece="z"),
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_b", "b s f", piece="beta"),
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_a", "b s f", piece="alpha"),
        *delta_rule_taps(n, own, rule, "b s n d", "b s n"),
        Tap(Site("linear_attention", n, "gated_norm"), f"{own}.norm", "(b s n) d"),
        Tap(Site("linear_attention", n, "out_proj"), f"{own}.out_proj", "b s h"),
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


def candidate_native(n: int, layer: str, dims: Dimensions) -> list[Tap]:
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


def candidate_slime(n: int, layer: str, dims: Dimensions) -> list[Tap]:
    """A Hugging Face style module, whole on every tensor parallel rank, over the full sequence also under sequence parallel."""
    own = f"{layer}.self_attention.linear_attn"
    sections = f"b s (q:{dims.key_rows} k:{dims.key_rows} v:{dims.value_rows})"

    def entering(part: str, layout: str, position: int, piece: str = "") -> Tap:
        return Tap(Site("linear_attention", n, part), f"{own}.core", layout, "input", (position,), piece=piece)

    return [
        Tap(Site("input_norm", n), f"{layer}.self_attention.input_layernorm", "b s h"),
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_qkv", sections),
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_z", "b s f", piece="z"),
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_b", "b s f", piece="beta"),
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_a", "b s f", piece="alpha"),
        entering("conv1d", "b s n d", 0, "q"),
        entering("conv1d", "b s n d", 1, "k"),
        entering("conv1d", "b s n d", 2, "v"),
        entering("decay", "b s n", 3),
        entering("beta", "b s n", 4),
        Tap(Site("linear_attention", n, "core"), f"{own}.core", "b s n d"),
        Tap(Site("linear_attention", n, "gated_norm"), f"{own}.norm", "b s n d"),
        Tap(Site("linear_attention", n, "out_proj"), f"{own}.out_proj", "b s h"),
    ]


def dense_probs(output: Any) -> torch.Tensor:
    """The router's top-k weights as probabilities over all experts."""
    logits, scores, index = output
    return torch.zeros_like(logits).scatter(-1, index, scores)


def dense_map(output: Any) -> torch.Tensor:
    """The router's choice as 0 and 1 over all experts."""
    logits, _, index = output
    return torch.zeros_like(logits).scatter(-1, index, 1.0)
