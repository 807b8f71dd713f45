"""Qwen3.5-MoE, text: gated delta net in three layers of four, gated full attention in the fourth, routed and shared experts.

Sources: transformers `models/qwen3_5_moe`, megatron-core `ssm/gated_delta_net.py`, `transformer/attention.py` and
`transformer/moe`; the `slime` layout keeps the linear attention as a Hugging Face style module under
`self_attention.linear_attn`, replicated on every tensor parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout, Derived, Dimensions, Setting, Side
from bisect_hooks.site import Site
from bisect_hooks.table import Cut, GroupHeads, Join, Made, MinusOne, Op, Rule, Same, Split, Stack
from bisect_hooks.tap import Tap

HF = "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe"
GDN = "megatron.core.ssm.gated_delta_net"
ROWS, COLUMNS, HALVES = Cut("tp@0"), Cut("tp@1"), Cut("tp@0/2")


def _close(a: Any, b: Any) -> bool:
    return a is not None and abs(float(a) - float(b)) <= 1e-9 * max(1.0, abs(float(b)))


class Qwen35Moe:
    """The family, as `bisect_hooks.family.Family` wants it."""

    name = "qwen3.5-moe"
    model_types: tuple[str, ...] = ("qwen3_5_moe", "qwen3_5_moe_text")

    # -- config ---------------------------------------------------------------------------------------------------------------

    def reference_dimensions(self, config: Mapping[str, Any]) -> Dimensions:
        """From config.json (its text_config).  Raises UsageError naming a key that is not there."""
        text = config.get("text_config", config)
        try:
            kinds = tuple("attention" if kind == "full_attention" else "linear_attention" for kind in _layer_types(text))
            return Dimensions(
                layers=text["num_hidden_layers"],
                hidden=text["hidden_size"],
                heads=text["num_attention_heads"],
                groups=text["num_key_value_heads"],
                head_width=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
                vocabulary=text["vocab_size"],
                kinds=kinds,
                moe=(True,) * text["num_hidden_layers"],
                output_gate=text.get("attn_output_gate", True),
                tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
                mtp=text.get("mtp_num_hidden_layers", 0) or 0,
                positions=text.get("max_position_embeddings"),
                experts=text["num_experts"],
                top_k=text["num_experts_per_tok"],
                routed=text["moe_intermediate_size"],
                shared=text["shared_expert_intermediate_size"],
                shared_gate=True,
                key_heads=text["linear_num_key_heads"],
                key_width=text["linear_key_head_dim"],
                value_heads=text["linear_num_value_heads"],
                value_width=text["linear_value_head_dim"],
                kernel=text["linear_conv_kernel_dim"],
            )
        except KeyError as error:
            raise UsageError(f"config.json has no {error.args[0]!r}, which {self.name} needs") from None

    def candidate_dimensions(self, args: Mapping[str, Any]) -> Dimensions:
        """From Megatron's args alone.  Raises UsageError with the flag of a value that has no default and is not there."""

        def need(name: str) -> int:
            value = args.get(name)
            if value is None:
                raise UsageError(f"the candidate's args say no {name}", hint=f"give it with --launch (--{name.replace('_', '-')} N)")
            return int(value)

        layers, hidden, heads = need("num_layers"), need("hidden_size"), need("num_attention_heads")
        every = args.get("linear_attention_freq")
        if every is None:
            raise UsageError("the candidate's args say no linear_attention_freq", hint="give it with --launch (--linear-attention-freq 4)")
        linear = [bool((i + 1) % every) for i in range(layers)] if isinstance(every, int) else [bool(kind) for kind in every]
        moe_freq = args.get("moe_layer_freq", 1)
        moe = [i % moe_freq == 0 for i in range(layers)] if isinstance(moe_freq, int) else [bool(one) for one in moe_freq]
        if len(linear) != layers or len(moe) != layers:
            raise UsageError(f"the candidate's args give {len(linear)} kinds and {len(moe)} MoE flags for {layers} layers")
        shared = args.get("moe_shared_expert_intermediate_size")
        return Dimensions(
            layers=layers,
            hidden=hidden,
            heads=heads,
            groups=need("num_query_groups") if args.get("group_query_attention") else heads,
            head_width=int(args.get("kv_channels") or hidden // heads),
            vocabulary=int(args.get("padded_vocab_size") or need("vocab_size")),
            kinds=tuple("linear_attention" if one else "attention" for one in linear),
            moe=tuple(moe),
            output_gate=bool(args.get("attention_output_gate")),
            tied=not args.get("untie_embeddings_and_output_weights"),
            mtp=int(args.get("mtp_num_layers") or 0),
            positions=args.get("max_position_embeddings"),
            experts=int(args.get("num_experts") or 0),
            top_k=int(args.get("moe_router_topk") or 2),
            routed=int(args.get("moe_ffn_hidden_size") or args.get("ffn_hidden_size") or 4 * hidden),
            shared=int(shared or 0),
            shared_gate=bool(args.get("moe_shared_expert_gate")),
            dense=int(args.get("ffn_hidden_size") or 4 * hidden),
            key_heads=int(args.get("linear_num_key_heads") or 16),
            key_width=int(args.get("linear_key_head_dim") or 128),
            value_heads=int(args.get("linear_num_value_heads") or 32),
            value_width=int(args.get("linear_value_head_dim") or 128),
            kernel=int(args.get("linear_conv_kernel_dim") or 4),
        )

    def settings(self, config: Mapping[str, Any], layout: CheckpointLayout) -> Sequence[Setting]:
        """Every Megatron argument that changes this model, with the value that config.json asks for."""
        text = config.get("text_config", config)
        dims = self.reference_dimensions(config)
        rope = {**text, **(text.get("rope_parameters") or {})}
        every = range(dims.layers)
        full = [n for n in every if dims.kinds[n] == "attention"]
        linear = [n for n in every if dims.kinds[n] == "linear_attention"]

        def at(layers: Sequence[int], module: str, part: str | None = None) -> tuple[Site, ...]:
            return tuple(Site(module, n, part) for n in layers)

        norms = (
            *at(every, "input_norm"),
            *(at(linear, "linear_attention", "gated_norm") if layout == "native" else ()),
            *at(full, "attention", "q_norm"),
            *at(full, "attention", "k_norm"),
            *at(every, "pre_mlp_norm"),
            Site("final_norm"),
        )
        qkv, gate, rotary = at(full, "attention", "qkv"), at(full, "attention_gate"), at(full, "attention", "rope")
        router, experts = at(every, "router", "probs"), at(every, "experts")
        everything = at(every, "input_norm")
        delta = at(linear, "linear_attention", "in_proj")
        pattern = [0 if kind == "attention" else 1 for kind in dims.kinds]

        def kinds_match(value: Any, expected: Any) -> bool:
            return bool((list(value) if isinstance(value, (list, tuple)) else [int(bool((i + 1) % int(value))) for i in every]) == expected)

        def moe_match(value: Any, expected: Any) -> bool:
            return bool((list(value) if isinstance(value, (list, tuple)) else [int(i % int(value) == 0) for i in every]) == expected)

        return (
            Setting("num_layers", "--num-layers", dims.layers, everything, "another depth", needed=True),
            Setting("hidden_size", "--hidden-size", dims.hidden, everything, "another width", needed=True),
            Setting("num_attention_heads", "--num-attention-heads", dims.heads, qkv, "other heads", needed=True),
            Setting("group_query_attention", "--group-query-attention", dims.groups != dims.heads, qkv, "one KV head a query head", default=False),
            Setting("num_query_groups", "--num-query-groups", dims.groups, qkv, "other KV heads", default=1),
            Setting("kv_channels", "--kv-channels", dims.head_width, qkv, "another head width", default=dims.hidden // dims.heads),
            Setting("attention_output_gate", "--attention-output-gate", dims.output_gate, gate, "the attention output is not gated", default=False),
            Setting("qk_layernorm", "--qk-layernorm", True, at(full, "attention", "q_norm"), "queries and keys are not normed", default=False),
            Setting("normalization", "--normalization", "RMSNorm", norms, "another norm", default="LayerNorm"),
            Setting("apply_layernorm_1p", "--apply-layernorm-1p", True, norms, "norms scale by w where the reference scales by 1 + w", default=False),
            Setting("norm_epsilon", "--norm-epsilon", text["rms_norm_eps"], norms, "norms use another epsilon", default=1e-5, same=_close),
            Setting("position_embedding_type", "--position-embedding-type", "rope", rotary, "other positions", default="learned_absolute"),
            Setting("rotary_base", "--rotary-base", rope.get("rope_theta", 10000), rotary, "rotary frequencies from another base", default=10000, same=_close),
            Setting("rotary_percent", "--rotary-percent", rope.get("partial_rotary_factor", 1.0), rotary, "another part of each head is rotated", default=1.0, same=_close),
            Setting("rotary_interleaved", "--rotary-interleaved", False, rotary, "pairs are rotated interleaved", default=False),
            Setting("swiglu", "--swiglu", True, at(every, "experts", "fc1"), "another activation", default=False),
            Setting("add_bias_linear", "--disable-bias-linear", False, qkv, "linear layers have biases", default=True),
            Setting("add_qkv_bias", "--add-qkv-bias", bool(text.get("attention_bias", False)), qkv, "q, k and v have biases", default=False),
            Setting("untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights", not dims.tied, (Site("lm_head"),), "the head is the embedding", default=False),
            Setting("linear_attention_freq", "--linear-attention-freq", pattern, everything, "other layers are linear attention", needed=True, same=kinds_match),
            Setting("linear_num_key_heads", "--linear-num-key-heads", dims.key_heads, delta, "other key heads", default=16),
            Setting("linear_key_head_dim", "--linear-key-head-dim", dims.key_width, delta, "another key width", default=128),
            Setting("linear_num_value_heads", "--linear-num-value-heads", dims.value_heads, delta, "other value heads", default=32),
            Setting("linear_value_head_dim", "--linear-value-head-dim", dims.value_width, delta, "another value width", default=128),
            Setting("linear_conv_kernel_dim", "--linear-conv-kernel-dim", dims.kernel, at(linear, "linear_attention", "conv1d"), "another kernel", default=4),
            Setting("num_experts", "--num-experts", dims.experts, experts, "other experts", default=None),
            Setting("moe_layer_freq", "--moe-layer-freq", [int(one) for one in dims.moe], experts, "other layers have experts", default=1, same=moe_match),
            Setting("moe_ffn_hidden_size", "--moe-ffn-hidden-size", dims.routed, experts, "another expert width", default=None),
            Setting("moe_router_topk", "--moe-router-topk", dims.top_k, at(every, "router", "topk"), "another number of experts a token", default=2),
            Setting("moe_router_score_function", "--moe-router-score-function", "softmax", router, "another score function", default="softmax"),
            Setting(
                "moe_router_pre_softmax", "--moe-router-pre-softmax", not text.get("norm_topk_prob", True), router,
                "the softmax is over all experts and the top-k weights are not renormalised", default=False,
            ),
            Setting("moe_router_enable_expert_bias", "--moe-router-enable-expert-bias", False, router, "experts are chosen with a bias", default=False),
            Setting("moe_router_topk_scaling_factor", "--moe-router-topk-scaling-factor", 1.0, router, "expert weights are scaled", default=1.0, same=lambda a, b: a is None or _close(a, b)),
            Setting("moe_shared_expert_intermediate_size", "--moe-shared-expert-intermediate-size", dims.shared, at(every, "shared_expert"), "another shared expert", default=None),
            Setting("moe_shared_expert_gate", "--moe-shared-expert-gate", True, at(every, "shared_expert_gate"), "the shared expert is not gated", default=False),
        )  # fmt: skip

    # -- weights --------------------------------------------------------------------------------------------------------------

    def left_out(self, name: str) -> str | None:
        """Why a reference tensor is not converted, or None.  Names are canonical: `model.visual.*`, `mtp.*`."""
        if name.startswith(("model.visual.", "visual.")):
            return "the vision tower: text only, the engine keeps its own"
        if name.startswith("mtp."):
            return "multi-token prediction, left out by the candidate's flags"
        return None

    def rules(self, dims: Dimensions, layout: CheckpointLayout, names: Sequence[str], mtp: bool) -> list[Rule]:
        """The weight table.  `dims` are the reference's; `names` decides between fused and per-expert expert tensors."""
        known = frozenset(names)
        rules = [
            Rule(Site("embedding"), ("model.embed_tokens.weight",), (Made("embedding.word_embeddings.weight", ROWS),)),
            Rule(Site("final_norm"), ("model.norm.weight",), (Made("decoder.final_layernorm.weight"),)),
        ]
        if not dims.tied:
            rules.append(Rule(Site("lm_head"), ("lm_head.weight",), (Made("output_layer.weight", ROWS),)))
        for n in range(dims.layers):
            source, target = f"model.layers.{n}.", f"decoder.layers.{n}."
            if dims.kinds[n] == "attention":
                rules += _attention_rules(n, source, target, dims)
            else:
                rules += _linear_attention_rules(n, source, target, dims, layout)
            rules += _moe_rules(n, source, target, dims, known)
        if mtp:
            rules += _mtp_rules(dims, known)
        return sorted(rules, key=lambda rule: rule.site)

    # -- taps -----------------------------------------------------------------------------------------------------------------

    def reference_taps(self, dims: Dimensions) -> tuple[Tap, ...]:
        taps = [
            Tap(Site("tokens"), "model.embed_tokens", "b s", "input"),
            Tap(Site("embedding"), "model.embed_tokens", "b s h"),
        ]
        for n in range(dims.layers):
            layer = f"model.layers.{n}"
            taps += [
                Tap(Site("input", n), layer, "b s h", "input", (0, "hidden_states")),
                Tap(Site("input_norm", n), f"{layer}.input_layernorm", "b s h"),
                Tap(Site("pre_mlp_norm", n), f"{layer}.post_attention_layernorm", "b s h"),
            ]
            taps += _reference_attention(n, layer, dims) if dims.kinds[n] == "attention" else _reference_linear(n, layer, dims)
            moe = f"{layer}.mlp"
            taps += [
                Tap(Site("router", n, "logits"), f"{moe}.gate", "(b s) e", select=(0,)),
                Tap(Site("router", n, "probs"), f"{moe}.gate", "(b s) e", transform=_dense_probs),
                Tap(Site("router", n, "topk"), f"{moe}.gate", "(b s) e", transform=_dense_map),
                Tap(Site("experts", n, "combine"), f"{moe}.experts", "(b s) h"),
                Tap(Site("shared_expert", n, "fc1"), f"{moe}.shared_expert.gate_proj", "(b s) f", piece="gate"),
                Tap(Site("shared_expert", n, "fc1"), f"{moe}.shared_expert.up_proj", "(b s) f", piece="up"),
                Tap(Site("shared_expert", n, "fc2"), f"{moe}.shared_expert", "(b s) h"),
                Tap(Site("shared_expert_gate", n), f"{moe}.shared_expert_gate", "(b s) f", piece="logit"),
                Tap(Site("output", n), layer, "b s h"),
            ]
        return (*taps, Tap(Site("final_norm"), "model.norm", "b s h"), Tap(Site("lm_head"), "lm_head", "b s v"))

    def candidate_taps(self, dims: Dimensions, layout: CheckpointLayout) -> tuple[Tap, ...]:
        """Paths count layers globally; whoever holds a pipeline stage shifts them to its own count."""
        taps = [
            Tap(Site("tokens"), "embedding", "b s", "input", (0, "input_ids")),
            Tap(Site("embedding"), "embedding", "s[sp] b h"),
        ]
        for n in range(dims.layers):
            layer = f"decoder.layers.{n}"
            taps.append(Tap(Site("input", n), layer, "s[sp] b h", "input", (0, "hidden_states")))
            if dims.kinds[n] == "attention":
                taps += _candidate_attention(n, layer, dims)
            else:
                taps += _candidate_native(n, layer, dims) if layout == "native" else _candidate_slime(n, layer, dims)
            taps.append(Tap(Site("pre_mlp_norm", n), f"{layer}.pre_mlp_layernorm", "s[sp] b h"))
            moe = f"{layer}.mlp"
            taps += [
                Tap(Site("router", n, "logits"), f"{moe}.router", "s[sp] b e", "method", name="gating"),
                Tap(Site("router", n, "probs"), f"{moe}.router", "(s[sp] b) e", select=(0,)),
                Tap(Site("router", n, "topk"), f"{moe}.router", "(s[sp] b) e", select=(1,)),
                Tap(Site("experts", n, "combine"), f"{moe}.token_dispatcher", "s[sp] b h", "method", name="combine_postprocess"),
            ]
            if dims.shared:
                shared = f"{moe}.shared_experts"
                sections = f"s b (gate:{dims.shared} up:{dims.shared})[tp]"
                taps += [
                    Tap(Site("shared_expert", n, "fc1"), f"{shared}.linear_fc1", sections, select=(0,)),
                    Tap(Site("shared_expert", n, "fc2"), f"{shared}.linear_fc2", "s[sp] b h", select=(0,)),
                    Tap(Site("shared_expert_gate", n), shared, "s[sp] b h"),
                ]
            taps.append(Tap(Site("output", n), layer, "s[sp] b h", select=(0,)))
        return (
            *taps,
            Tap(Site("final_norm"), "decoder.final_layernorm", "s[sp] b h"),
            Tap(Site("lm_head"), "output_layer", "s b v[tp]", select=(0,)),
        )

    def derived(self, dims: Dimensions, side: Side) -> tuple[Derived, ...]:
        """transformers gates the shared expert inside the block's forward: the product is the reference's own formula."""
        if side == "candidate":
            return ()
        found = []
        for n in range(dims.layers):
            gate = f"layers.{n}.shared_expert_gate"
            found.append(Derived(gate, (f"{gate}:logit", f"layers.{n}.shared_expert.fc2"), lambda logit, out: torch.sigmoid(logit) * out))
        return tuple(found)

    def route(self, logits: torch.Tensor, dims: Dimensions) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's rule on any logits [.. e]: (probabilities [.. e], zero where not chosen; chosen [.. e] as 0 and 1).

        transformers `Qwen3_5MoeTopKRouter`: softmax over all experts in fp32, top-k, renormalised.
        """
        scores = torch.softmax(logits.float(), dim=-1)
        top, index = torch.topk(scores, dims.top_k, dim=-1)
        chosen = torch.zeros_like(scores).scatter(-1, index, 1.0)
        return torch.zeros_like(scores).scatter(-1, index, top / top.sum(-1, keepdim=True)), chosen


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    if "layer_types" in text:
        return list(text["layer_types"])
    every = text.get("full_attention_interval", 4)
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(text["num_hidden_layers"])]


def _attention_rules(n: int | None, source: str, target: str, dims: Dimensions, mtp: int | None = None) -> list[Rule]:
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


def _linear_attention_rules(n: int, source: str, target: str, dims: Dimensions, layout: CheckpointLayout) -> list[Rule]:
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
    three = Split((key, key, value))
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


def _moe_rules(n: int | None, source: str, target: str, dims: Dimensions, known: frozenset[str], mtp: int | None = None) -> list[Rule]:
    """Router, routed experts (fused or one by one on the reference's side), shared expert and its gate."""

    def site(module: str, part: str | None = None) -> Site:
        return Site(module, n, part) if mtp is None else Site("mtp", mtp, "layer")

    hf, own = f"{source}mlp.", f"{target}mlp."
    fc1 = Made(f"{own}experts.experts.linear_fc1.weight", Cut("ep@0 etp@1/2"))
    fc2 = Made(f"{own}experts.experts.linear_fc2.weight", Cut("ep@0 etp@2"))
    if f"{hf}experts.0.gate_proj.weight" in known:
        pairs = tuple(f"{hf}experts.{e}.{name}_proj.weight" for e in range(dims.experts) for name in ("gate", "up"))
        downs = tuple(f"{hf}experts.{e}.down_proj.weight" for e in range(dims.experts))
        experts = [Rule(site("experts", "fc1"), pairs, (fc1,), Stack(2)), Rule(site("experts", "fc2"), downs, (fc2,), Stack(1))]
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
        Rule(site("shared_expert", "fc1"), shared, (Made(f"{own}shared_experts.linear_fc1.weight", HALVES),), Join((dims.shared, dims.shared))),
        Rule(site("shared_expert", "fc2"), (f"{hf}shared_expert.down_proj.weight",), (Made(f"{own}shared_experts.linear_fc2.weight", COLUMNS),)),
        Rule(site("shared_expert_gate"), (f"{hf}shared_expert_gate.weight",), (Made(f"{own}shared_experts.gate_weight"),)),
    ]  # fmt: skip


def _mtp_rules(dims: Dimensions, known: frozenset[str]) -> list[Rule]:
    rules = []
    for n in range(dims.mtp):
        own = f"mtp.layers.{n}."
        rules += [
            Rule(Site("mtp", n, "eh_proj"), ("mtp.fc.weight",), (Made(f"{own}eh_proj.weight", ROWS),)),
            Rule(Site("mtp", n, "enorm"), ("mtp.pre_fc_norm_embedding.weight",), (Made(f"{own}enorm.weight"),)),
            Rule(Site("mtp", n, "hnorm"), ("mtp.pre_fc_norm_hidden.weight",), (Made(f"{own}hnorm.weight"),)),
            Rule(Site("mtp", n, "final_norm"), ("mtp.norm.weight",), (Made(f"{own}final_layernorm.weight"),)),
            *_attention_rules(None, f"mtp.layers.{n}.", f"{own}transformer_layer.", dims, mtp=n),
            *_moe_rules(None, f"mtp.layers.{n}.", f"{own}transformer_layer.", dims, known, mtp=n),
        ]
    return rules


def _reference_attention(n: int, layer: str, dims: Dimensions) -> list[Tap]:
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


def _candidate_attention(n: int, layer: str, dims: Dimensions) -> list[Tap]:
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


def _reference_linear(n: int, layer: str, dims: Dimensions) -> list[Tap]:
    own, rule = f"{layer}.linear_attn", f"{HF}:torch_chunk_gated_delta_rule"
    sections = f"b s (q:{dims.key_rows} k:{dims.key_rows} v:{dims.value_rows})"
    return [
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_qkv", sections),
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_z", "b s f", piece="z"),
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_b", "b s f", piece="beta"),
        Tap(Site("linear_attention", n, "in_proj"), f"{own}.in_proj_a", "b s f", piece="alpha"),
        *_delta_rule_taps(n, own, rule, "b s n d", "b s n"),
        Tap(Site("linear_attention", n, "gated_norm"), f"{own}.norm", "(b s n) d"),
        Tap(Site("linear_attention", n, "out_proj"), f"{own}.out_proj", "b s h"),
    ]


def _delta_rule_taps(n: int, own: str, rule: str, heads: str, scalars: str) -> list[Tap]:
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


def _candidate_native(n: int, layer: str, dims: Dimensions) -> list[Tap]:
    """megatron-core's GatedDeltaNet.  It l2-normalises and repeats q and k before the rule, so they are heard before that."""
    own, rule, norm = f"{layer}.self_attention", f"{GDN}:torch_chunk_gated_delta_rule", f"{GDN}:l2norm"
    key, value, heads = dims.key_rows, dims.value_rows, dims.value_heads
    sections = f"s b (q:{key} k:{key} v:{value} z:{value} beta:{heads} alpha:{heads})[tp]"
    from_rule = [tap for tap in _delta_rule_taps(n, own, rule, "b s n[tp] d", "b s n[tp]") if tap.piece not in ("q", "k")]

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


def _candidate_slime(n: int, layer: str, dims: Dimensions) -> list[Tap]:
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


def _dense_probs(output: Any) -> torch.Tensor:
    logits, scores, index = output
    return torch.zeros_like(logits).scatter(-1, index, scores)


def _dense_map(output: Any) -> torch.Tensor:
    logits, _, index = output
    return torch.zeros_like(logits).scatter(-1, index, 1.0)
