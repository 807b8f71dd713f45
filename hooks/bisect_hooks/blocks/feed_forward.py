"""Feed-forward parts of a layer: a dense gated MLP, and routed experts with or without a shared one.

Sources: the MLP, router and experts modules of transformers; megatron-core `transformer/mlp.py` and `transformer/moe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bisect_hooks.blocks.args import close, same_pattern
from bisect_hooks.blocks.config import Config, Key
from bisect_hooks.blocks.place import COLUMNS, HALVES, Place, at
from bisect_hooks.family import Derived, Dimensions, Routing, Setting
from bisect_hooks.site import Site
from bisect_hooks.table import Cut, Join, Made, Rule, Stack
from bisect_hooks.tap import Tap

# the one product of a transformers router's forward
LINEAR = "torch.nn.functional:linear"


@dataclass(frozen=True, slots=True)
class Dense:
    """gate_proj, up_proj, down_proj with SiLU."""

    width: Key = Key("intermediate_size")

    @property
    def helpers(self) -> tuple[str, ...]:
        """Modules without weights, heard through those that they work for."""
        return ("act_fn",)

    def dimensions(self, config: Config) -> dict[str, Any]:
        config.only("mlp_bias", False)
        return {"dense": config.number(self.width)}

    def settings(self, dims: Dimensions) -> list[Setting]:
        sites = at([n for n in range(dims.layers) if not dims.moe[n]], "mlp", "fc1")
        return [Setting("ffn_hidden_size", "--ffn-hidden-size", dims.dense, sites, "another MLP width", needed=True)] if sites else []

    def rules(self, place: Place, dims: Dimensions) -> list[Rule]:
        hf, own = f"{place.source}mlp.", f"{place.target}mlp."
        return [norm_rule(place), *gated_rules(place, "mlp", hf, own, dims.dense)]

    def reference_taps(self, n: int, layer: str, dims: Dimensions) -> list[Tap]:
        return [
            Tap(Site("mlp", n, "fc1"), f"{layer}.mlp.gate_proj", "b s f", piece="gate"),
            Tap(Site("mlp", n, "fc1"), f"{layer}.mlp.up_proj", "b s f", piece="up"),
            Tap(Site("mlp", n, "fc2"), f"{layer}.mlp", "b s h"),
        ]

    def candidate_taps(self, n: int, layer: str, dims: Dimensions) -> list[Tap]:
        return [
            Tap(Site("mlp", n, "fc1"), f"{layer}.mlp.linear_fc1", f"s b (gate:{dims.dense} up:{dims.dense})[tp]", select=(0,)),
            Tap(Site("mlp", n, "fc2"), f"{layer}.mlp.linear_fc2", "s[sp] b h", select=(0,)),
        ]


@dataclass(frozen=True, slots=True)
class Shared:
    """The shared expert: its module on the reference's side, `count` times `width` rows, and whether a sigmoid gates it."""

    name: str
    width: Key
    gated: bool
    count: int | Key = 1


@dataclass(frozen=True, slots=True)
class Experts:
    """Router, routed experts, and what is shared.

    where        (config, layer) → whether that layer has experts
    renormalised whether the chosen probabilities are made to sum to one
    sigmoid      experts are scored by a sigmoid, chosen with a bias, and their weights scaled
    """

    where: Callable[[Config, int], bool]
    count: Key = Key("num_experts", also="num_local_experts")
    top_k: Key = Key("num_experts_per_tok")
    width: Key = Key("moe_intermediate_size")
    renormalised: bool | Key = True
    scaling: float | Key = 1.0
    sigmoid: bool = False
    shared: Shared | None = None

    @property
    def helpers(self) -> tuple[str, ...]:
        """Modules without weights, heard through those that they work for."""
        return ("experts.act_fn", *([f"{self.shared.name}.act_fn"] if self.shared else []))

    def dimensions(self, config: Config) -> dict[str, Any]:
        for name in ("n_group", "topk_group", "num_expert_group"):
            config.only(name, 1)  # experts are chosen among all of them, not group by group
        renormalised = bool(config.get(self.renormalised))
        if self.sigmoid and not renormalised:
            config.not_understood("norm_topk_prob", False)  # megatron-core renormalises sigmoid scores always (moe_utils.py)
        return {
            "experts": config.number(self.count),
            "top_k": config.number(self.top_k),
            "routed": config.number(self.width),
            "shared": config.number(self.shared.width) * config.number(self.shared.count) if self.shared else 0,
            "shared_gate": self.shared is not None and self.shared.gated,
            "sigmoid": self.sigmoid,
            "expert_bias": self.sigmoid,
            "renormalised": renormalised,
            "scaling": float(config.get(self.scaling)),
        }

    def settings(self, dims: Dimensions) -> list[Setting]:
        layers = [n for n in range(dims.layers) if dims.moe[n]]
        router, experts, topk = at(layers, "router", "probs"), at(layers, "experts"), at(layers, "router", "topk")
        shared, gate = at(layers, "shared_expert"), at(layers, "shared_expert_gate")
        moe_match = same_pattern(dims.layers, lambda i, n: i % n == 0, 1)
        score, plain = ("sigmoid" if dims.sigmoid else "softmax"), not dims.renormalised
        biased, width = dims.expert_bias, dims.shared or None
        return [
            Setting("num_experts", "--num-experts", dims.experts, experts, "other experts", default=None),
            Setting("moe_layer_freq", "--moe-layer-freq", [int(one) for one in dims.moe], experts, "other layers have experts", default=1, same=moe_match),
            Setting("moe_ffn_hidden_size", "--moe-ffn-hidden-size", dims.routed, experts, "another expert width", default=None),
            Setting("moe_router_topk", "--moe-router-topk", dims.top_k, topk, "another number of experts a token", default=2),
            Setting("moe_router_score_function", "--moe-router-score-function", score, router, "another score function", default="softmax"),
            Setting(
                "moe_router_pre_softmax", "--moe-router-pre-softmax", plain, router,
                f"the softmax is over {'the chosen' if plain else 'all'} experts and the top-k weights are {'' if plain else 'not '}renormalised", default=False,
            ),
            Setting(
                "moe_router_enable_expert_bias", "--moe-router-enable-expert-bias", biased, at(layers, "router", "expert_bias") if biased else router,
                f"experts are chosen with{'out' * biased} a bias", default=False,
            ),
            Setting(
                "moe_router_topk_scaling_factor", "--moe-router-topk-scaling-factor", dims.scaling, router,
                "expert weights are scaled otherwise", default=1.0, same=lambda a, b: close(a or 1.0, b),
            ),
            Setting("moe_shared_expert_intermediate_size", "--moe-shared-expert-intermediate-size", width, shared or experts, "another shared expert", default=None),
            Setting(
                "moe_shared_expert_gate", "--moe-shared-expert-gate", dims.shared_gate, gate if dims.shared_gate else experts,
                f"the shared expert is {'not ' * dims.shared_gate}gated", default=False,
            ),
        ]  # fmt: skip

    def rules(self, place: Place, dims: Dimensions, known: frozenset[str]) -> list[Rule]:
        """Experts may stand fused or one by one on the reference's side."""
        hf, own = f"{place.source}mlp.", f"{place.target}mlp."
        fc1 = Made(f"{own}experts.experts.linear_fc1.weight", Cut("ep@0 etp@1/2"))
        fc2 = Made(f"{own}experts.experts.linear_fc2.weight", Cut("ep@0 etp@2"))
        one, two = place.site("experts", "fc1"), place.site("experts", "fc2")
        if f"{hf}experts.0.gate_proj.weight" in known:
            pairs = tuple(f"{hf}experts.{e}.{name}_proj.weight" for e in range(dims.experts) for name in ("gate", "up"))
            downs = tuple(f"{hf}experts.{e}.down_proj.weight" for e in range(dims.experts))
            experts = [Rule(one, pairs, (fc1,), Stack(each=2)), Rule(two, downs, (fc2,), Stack(each=1))]
        else:
            experts = [Rule(one, (f"{hf}experts.gate_up_proj",), (fc1,)), Rule(two, (f"{hf}experts.down_proj",), (fc2,))]
        rules = [norm_rule(place), Rule(place.site("router", "logits"), (f"{hf}gate.weight",), (Made(f"{own}router.weight"),)), *experts]
        if dims.expert_bias:
            bias = Made(f"{own}router.expert_bias", fp32=True)
            rules.append(Rule(place.site("router", "expert_bias"), (f"{hf}gate.e_score_correction_bias",), (bias,)))
        if self.shared and dims.shared:
            rules += gated_rules(place, "shared_expert", f"{hf}{self.shared.name}.", f"{own}shared_experts.", dims.shared)
            if self.shared.gated:
                gate = Made(f"{own}shared_experts.gate_weight")
                rules.append(Rule(place.site("shared_expert_gate"), (f"{hf}{self.shared.name}_gate.weight",), (gate,)))
        return rules

    def reference_taps(self, n: int, layer: str, dims: Dimensions) -> list[Tap]:
        """The choice is heard as the experts are told it, (hidden states, indices, weights), and made one over all experts.

        Logits are heard where they are made: what a router hands on under that name is their softmax in some releases of transformers.
        """
        moe = f"{layer}.mlp"
        taps = [
            Tap(Site("router", n, "logits"), f"{moe}.gate", "(b s) e", "function", (0,), LINEAR),
            Tap(Site("router", n, "probs"), f"{moe}.experts", "(b s) e", "input", transform=partial(dense_probs, dims.experts)),
            Tap(Site("router", n, "topk"), f"{moe}.experts", "(b s) e", "input", transform=partial(dense_map, dims.experts)),
            Tap(Site("experts", n, "combine"), f"{moe}.experts", "(b s) h"),
        ]
        if self.sigmoid:
            taps.append(
                Tap(Site("router", n, "expert_bias"), f"{moe}.gate", "b s e", "parameter", (0, "hidden_states"), "e_score_correction_bias")
            )
        if self.shared:
            shared = f"{moe}.{self.shared.name}"
            rows = "(b s)" if self.shared.gated else "b s"
            taps += [
                Tap(Site("shared_expert", n, "fc1"), f"{shared}.gate_proj", f"{rows} f", piece="gate"),
                Tap(Site("shared_expert", n, "fc1"), f"{shared}.up_proj", f"{rows} f", piece="up"),
                Tap(Site("shared_expert", n, "fc2"), shared, f"{rows} h"),
            ]
            if self.shared.gated:
                taps.append(Tap(Site("shared_expert_gate", n), f"{shared}_gate", "(b s) f", piece="logit"))
        return taps

    def candidate_taps(self, n: int, layer: str, dims: Dimensions) -> list[Tap]:
        moe = f"{layer}.mlp"
        taps = [
            Tap(Site("router", n, "logits"), f"{moe}.router", "s[sp] b e", "method", name="gating"),
            Tap(Site("router", n, "probs"), f"{moe}.router", "(s[sp] b) e", select=(0,)),
            Tap(Site("router", n, "topk"), f"{moe}.router", "(s[sp] b) e", select=(1,)),
            Tap(Site("experts", n, "combine"), f"{moe}.token_dispatcher", "s[sp] b h", "method", name="combine_postprocess"),
        ]
        if dims.expert_bias:
            taps.append(Tap(Site("router", n, "expert_bias"), f"{moe}.router", "s[sp] b e", "parameter", (0, "input"), "expert_bias"))
        if self.shared and dims.shared:
            shared = f"{moe}.shared_experts"
            taps += [
                Tap(Site("shared_expert", n, "fc1"), f"{shared}.linear_fc1", f"s b (gate:{dims.shared} up:{dims.shared})[tp]", select=(0,)),
                Tap(Site("shared_expert", n, "fc2"), f"{shared}.linear_fc2", "s[sp] b h", select=(0,)),
            ]
            if self.shared.gated:
                taps.append(Tap(Site("shared_expert_gate", n), shared, "s[sp] b h"))
        return taps

    def derived(self, n: int) -> list[Derived]:
        """transformers gates the shared expert inside the block's forward: the product is the reference's own formula."""
        if self.shared is None or not self.shared.gated:
            return []
        gate = f"layers.{n}.shared_expert_gate"
        return [Derived(gate, (f"{gate}:logit", f"layers.{n}.shared_expert.fc2"), lambda logit, out: torch.sigmoid(logit) * out)]


def route(logits: torch.Tensor, dims: Dimensions, bias: torch.Tensor | None = None, chosen: torch.Tensor | None = None) -> Routing:
    """The reference's rule on any logits [.. e]: transformers' top-k routers, in fp32.  `chosen` are weighed in place of its own choice.

    Softmax: scores over all experts, top-k, renormalised where the family does.  Sigmoid: experts are chosen by score + bias and
    weighted by score, renormalised and scaled.
    """
    scores = torch.sigmoid(logits.float()) if dims.sigmoid else torch.softmax(logits.float(), dim=-1)
    ranked = scores if bias is None else scores + bias.float()
    if chosen is not None:
        kept = scores * chosen
        return Routing((kept / kept.sum(-1, keepdim=True) if dims.renormalised else kept) * dims.scaling, chosen, ranked)
    index = torch.topk(ranked, dims.top_k, dim=-1).indices
    top = scores.gather(-1, index)
    if dims.renormalised:
        top = top / top.sum(-1, keepdim=True)
    chosen = torch.zeros_like(scores).scatter(-1, index, 1.0)
    return Routing(torch.zeros_like(scores).scatter(-1, index, top * dims.scaling), chosen, ranked)


def norm_rule(place: Place) -> Rule:
    """The norm before the feed-forward part; Transformer Engine fuses a dense MLP's into its first linear."""
    name = f"{place.target}pre_mlp_layernorm.weight"
    aliases = ((name, f"{place.target}mlp.linear_fc1.layer_norm_weight"),)
    return Rule(place.site("pre_mlp_norm"), (f"{place.source}post_attention_layernorm.weight",), (Made(name),), aliases=aliases)


def gated_rules(place: Place, module: str, hf: str, own: str, width: int) -> list[Rule]:
    """A gated MLP: Megatron packs [gate; up] into linear_fc1 and cuts each half on its own."""
    pair = tuple(f"{hf}{name}_proj.weight" for name in ("gate", "up"))
    return [
        Rule(place.site(module, "fc1"), pair, (Made(f"{own}linear_fc1.weight", HALVES),), Join(sizes=(width, width))),
        Rule(place.site(module, "fc2"), (f"{hf}down_proj.weight",), (Made(f"{own}linear_fc2.weight", COLUMNS),)),
    ]


def sparse_step(config: Config, layer: int) -> bool:
    """Every decoder_sparse_step-th layer, but for those of mlp_only_layers."""
    only: Sequence[int] = config.get(Key("mlp_only_layers", ()))
    step = config.number(Key("decoder_sparse_step", 1))
    return layer not in only and (layer + 1) % step == 0


def after_dense(config: Config, layer: int) -> bool:
    """All but the first first_k_dense_replace layers."""
    return layer >= config.number(Key("first_k_dense_replace"))


def dense_probs(experts: int, told: Sequence[torch.Tensor]) -> torch.Tensor:
    """What experts are told, (hidden states, indices [t k], weights [t k]), as probabilities over all of them [t e]."""
    _, index, weights = told
    return weights.new_zeros(len(index), experts).scatter(-1, index, weights)


def dense_map(experts: int, told: Sequence[torch.Tensor]) -> torch.Tensor:
    """What experts are told as 0 and 1 over all of them [t e]."""
    return torch.zeros(len(told[1]), experts, device=told[1].device).scatter(-1, told[1], 1.0)
