"""Qwen3.5-MoE, text: gated delta net in three layers of four, gated full attention in the fourth, routed and shared experts.

Sources: transformers `models/qwen3_5_moe`, megatron-core `ssm/gated_delta_net.py`, `transformer/attention.py` and
`transformer/moe`; the `slime` layout keeps the linear attention as a Hugging Face style module under
`self_attention.linear_attn`, replicated on every tensor parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bisect_hooks.errors import UsageError
from bisect_hooks.families.args import Args, close
from bisect_hooks.families.blocks import (
    ROWS,
    attention_rules,
    candidate_attention,
    candidate_native,
    candidate_slime,
    dense_map,
    dense_probs,
    linear_attention_rules,
    moe_rules,
    mtp_rules,
    reference_attention,
    reference_linear,
)
from bisect_hooks.family import CheckpointLayout, Derived, Dimensions, Setting, Side
from bisect_hooks.site import Site
from bisect_hooks.table import Made, Rule
from bisect_hooks.tap import Tap


class Qwen35Moe:
    """The family, as `bisect_hooks.family.Family` wants it."""

    name = "qwen3.5-moe"
    model_types: tuple[str, ...] = ("qwen3_5_moe", "qwen3_5_moe_text")

    # -- config ---------------------------------------------------------------------------------------------------------------

    def reference_dimensions(self, config: Mapping[str, Any]) -> Dimensions:
        """From config.json (its text_config).  Raises UsageError naming a key that is not there."""
        text = config.get("text_config", config)
        try:
            kinds = tuple(KINDS[kind] for kind in layer_types(text))
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
        read = Args(args)
        layers, hidden, heads = read.need("num_layers"), read.need("hidden_size"), read.need("num_attention_heads")
        linear = read.pattern("linear_attention_freq", layers, every=lambda i, n: (i + 1) % n != 0)
        return Dimensions(
            layers=layers,
            hidden=hidden,
            heads=heads,
            groups=read.need("num_query_groups") if args.get("group_query_attention") else heads,
            head_width=read.number("kv_channels", hidden // heads),
            vocabulary=read.number("padded_vocab_size", 0) or read.need("vocab_size"),
            kinds=tuple("linear_attention" if one else "attention" for one in linear),
            moe=read.pattern("moe_layer_freq", layers, every=lambda i, n: i % n == 0, default=1),
            output_gate=bool(args.get("attention_output_gate")),
            tied=not args.get("untie_embeddings_and_output_weights"),
            mtp=read.number("mtp_num_layers", 0),
            positions=read.number("max_position_embeddings", 0) or None,
            experts=read.number("num_experts", 0),
            top_k=read.number("moe_router_topk", 2),
            routed=read.number("moe_ffn_hidden_size", read.number("ffn_hidden_size", 4 * hidden)),
            shared=read.number("moe_shared_expert_intermediate_size", 0),
            shared_gate=bool(args.get("moe_shared_expert_gate")),
            dense=read.number("ffn_hidden_size", 4 * hidden),
            key_heads=read.number("linear_num_key_heads", 16),
            key_width=read.number("linear_key_head_dim", 128),
            value_heads=read.number("linear_num_value_heads", 32),
            value_width=read.number("linear_value_head_dim", 128),
            kernel=read.number("linear_conv_kernel_dim", 4),
        )

    def read_by_spec(self, args: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """What slime's layer spec reads from the Hugging Face directory itself; what the args say of it goes unread there."""
        if not any("slime_plugins" in str(word) for word in args.get("spec") or ()):
            return {}
        dims = self.reference_dimensions(config)
        found = {
            "linear_attention_freq": [int(kind == "linear_attention") for kind in dims.kinds],
            "linear_num_key_heads": dims.key_heads,
            "linear_key_head_dim": dims.key_width,
            "linear_num_value_heads": dims.value_heads,
            "linear_value_head_dim": dims.value_width,
            "linear_conv_kernel_dim": dims.kernel,
        }
        return found

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

        def same_pattern(every: Callable[[int, int], bool], default: int | None) -> Callable[[Any, Any], bool]:
            def same(value: Any, expected: Any) -> bool:
                try:
                    found = Args({"freq": value}).pattern("freq", dims.layers, every=every, default=default)
                except UsageError:
                    return False
                return bool([int(one) for one in found] == expected)

            return same

        kinds_match = same_pattern(lambda i, n: (i + 1) % n != 0, None)
        moe_match = same_pattern(lambda i, n: i % n == 0, 1)
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
            Setting("norm_epsilon", "--norm-epsilon", text["rms_norm_eps"], norms, "norms use another epsilon", default=1e-5, same=close),
            Setting("position_embedding_type", "--position-embedding-type", "rope", rotary, "other positions", default="learned_absolute"),
            Setting("rotary_base", "--rotary-base", rope.get("rope_theta", 10000), rotary, "rotary frequencies from another base", default=10000, same=close),
            Setting("rotary_percent", "--rotary-percent", rope.get("partial_rotary_factor", 1.0), rotary, "another part of each head is rotated", default=1.0, same=close),
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
            Setting("moe_router_topk_scaling_factor", "--moe-router-topk-scaling-factor", 1.0, router, "expert weights are scaled", default=1.0, same=lambda a, b: a is None or close(a, b)),
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
                rules += attention_rules(n, source, target, dims)
            else:
                rules += linear_attention_rules(n, source, target, dims, layout)
            rules += moe_rules(n, source, target, dims, known)
        if mtp:
            rules += mtp_rules(dims, known)
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
            taps += reference_attention(n, layer, dims) if dims.kinds[n] == "attention" else reference_linear(n, layer, dims)
            moe = f"{layer}.mlp"
            taps += [
                Tap(Site("router", n, "logits"), f"{moe}.gate", "(b s) e", select=(0,)),
                Tap(Site("router", n, "probs"), f"{moe}.gate", "(b s) e", transform=dense_probs),
                Tap(Site("router", n, "topk"), f"{moe}.gate", "(b s) e", transform=dense_map),
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
                taps += candidate_attention(n, layer, dims)
            else:
                taps += candidate_native(n, layer, dims) if layout == "native" else candidate_slime(n, layer, dims)
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


KINDS = {"full_attention": "attention", "linear_attention": "linear_attention"}


def layer_types(text: Mapping[str, Any]) -> list[str]:
    """The kind of each layer as config.json names it.  Raises UsageError for a kind that is not known."""
    layers, every = text["num_hidden_layers"], text.get("full_attention_interval", 4)
    kinds = list(text.get("layer_types") or ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)])
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or len(kinds) != layers:
        what = f"layer_types of unknown kind {unknown[0]!r}" if unknown else f"{len(kinds)} layer_types for {layers} layers"
        raise UsageError(f"config.json has {what}", hint=f"known: {', '.join(KINDS)}")
    return kinds
