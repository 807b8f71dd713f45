"""Full attention: grouped queries, rotary positions, with or without q/k norms, an output gate and QKV biases.

Sources: the attention modules of transformers; megatron-core `transformer/attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bisect_hooks.blocks.args import close
from bisect_hooks.blocks.config import Config, Key
from bisect_hooks.blocks.place import COLUMNS, ROWS, Place, at
from bisect_hooks.family import Dimensions, Setting
from bisect_hooks.site import Site
from bisect_hooks.table import GroupHeads, Made, Rule
from bisect_hooks.tap import Tap

ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}


@dataclass(frozen=True, slots=True)
class Attention:
    """What a family says of its attention; a Key where config.json says it.

    head_width      hidden size over heads where neither config.json nor its default says it
    rotary_percent  where config.json does not say it; None: the family's rotary code reads no such key and rotates the whole head
    qkv_bias        on q, k and v alone: Megatron has no flag for one on o_proj, so config.json may not ask for that
    """

    qk_norm: bool | Key = False
    output_gate: bool | Key = False
    qkv_bias: bool | Key = False
    head_width: Key = Key("head_dim", None)
    rotary_percent: float | None = 1.0

    def dimensions(self, config: Config) -> dict[str, Any]:
        hidden, heads = config.number(Key("hidden_size")), config.number(Key("num_attention_heads"))
        for name in ("attention_bias", "use_sliding_window"):
            if not (isinstance(self.qkv_bias, Key) and self.qkv_bias.name == name):
                config.only(name, False)
        if not config.get(Key("use_sliding_window", True)):
            config.get(Key("sliding_window", None))  # a width that is switched off
        base, percent = rotary(config, self.rotary_percent)
        return {
            "hidden": hidden,
            "heads": heads,
            "groups": config.number(Key("num_key_value_heads", heads)),
            "head_width": config.get(self.head_width) or hidden // heads,
            "output_gate": bool(config.get(self.output_gate)),
            "qk_norm": bool(config.get(self.qk_norm)),
            "qkv_bias": bool(config.get(self.qkv_bias)),
            "rotary_base": base,
            "rotary_percent": percent,
        }

    def settings(self, dims: Dimensions) -> list[Setting]:
        full = [n for n in range(dims.layers) if dims.kinds[n] == "attention"]
        qkv, gate, rope = at(full, "attention", "qkv"), at(full, "attention_gate"), at(full, "attention", "rope")
        if not dims.output_gate:
            gate = at(full, "attention", "out_proj")
        q_norm = at(full, "attention", "q_norm") if dims.qk_norm else at(full, "attention", "rope")
        grouped = dims.groups != dims.heads
        return [
            Setting("num_attention_heads", "--num-attention-heads", dims.heads, qkv, "other heads", needed=True),
            Setting("group_query_attention", "--group-query-attention", grouped, qkv, "one KV head a query head", default=False),
            Setting("num_query_groups", "--num-query-groups", dims.groups, qkv, "other KV heads", default=1),
            Setting("kv_channels", "--kv-channels", dims.head_width, qkv, "another head width", default=dims.hidden // dims.heads),
            Setting("attention_output_gate", "--attention-output-gate", dims.output_gate, gate, f"the attention output is {'not ' * dims.output_gate}gated", default=False),
            Setting("qk_layernorm", "--qk-layernorm", dims.qk_norm, q_norm, f"queries and keys are {'not ' * dims.qk_norm}normed", default=False),
            Setting("add_qkv_bias", "--add-qkv-bias", dims.qkv_bias, qkv, f"q, k and v have {'no ' * dims.qkv_bias}biases", default=False),
            Setting("position_embedding_type", "--position-embedding-type", "rope", rope, "other positions", default="learned_absolute"),
            Setting("rotary_base", "--rotary-base", dims.rotary_base, rope, "rotary frequencies from another base", default=10000, same=close),
            Setting("rotary_percent", "--rotary-percent", dims.rotary_percent, rope, "another part of each head is rotated", default=1.0, same=close),
            Setting("rotary_interleaved", "--rotary-interleaved", False, rope, "pairs are rotated interleaved", default=False),
        ]  # fmt: skip

    def rules(self, place: Place, dims: Dimensions) -> list[Rule]:
        """The layer with its input norm."""
        own, hf, target = f"{place.target}self_attention.", f"{place.source}self_attn.", place.target
        fused = ((f"{target}input_layernorm.weight", f"{own}linear_qkv.layer_norm_weight"),)
        heads = GroupHeads(dims.groups, dims.heads, dims.head_width, dims.output_gate)

        def packed(kind: str) -> Rule:
            names = tuple(f"{hf}{name}_proj.{kind}" for name in "qkv")
            return Rule(place.site("attention", "qkv"), names, (Made(f"{own}linear_qkv.{kind}", ROWS),), heads)

        norms = [
            Rule(place.site("attention", f"{one}_norm"), (f"{hf}{one}_norm.weight",), (Made(f"{own}{one}_layernorm.weight"),))
            for one in ("qk" if dims.qk_norm else "")
        ]
        return [
            Rule(
                place.site("input_norm"),
                (f"{place.source}input_layernorm.weight",),
                (Made(f"{target}input_layernorm.weight"),),
                aliases=fused,
            ),
            *map(packed, ("weight", "bias") if dims.qkv_bias else ("weight",)),
            *norms,
            Rule(place.site("attention", "out_proj"), (f"{hf}o_proj.weight",), (Made(f"{own}linear_proj.weight", COLUMNS),)),
        ]

    def reference_taps(self, n: int, layer: str, dims: Dimensions, modeling: str) -> list[Tap]:
        """transformers packs queries and gates of one head together; its rotation and its core are functions of the module."""
        own, width = f"{layer}.self_attn", dims.head_width
        rope, core = f"{modeling}:apply_rotary_pos_emb", f"{modeling}:eager_attention_forward"
        site = Site("attention", n, "qkv")
        query = Tap(site, f"{own}.q_proj", "b s f", piece="q")
        if dims.output_gate:
            query = Tap(site, f"{own}.q_proj", f"b s (n (q:{width} gate:{width}))")
        norms = [Tap(Site("attention", n, f"{one}_norm"), f"{own}.{one}_norm", "b s n d") for one in ("qk" if dims.qk_norm else "")]
        gate = [Tap(Site("attention_gate", n), f"{own}.o_proj", "b s f", "input", (0,))] if dims.output_gate else []
        return [
            query,
            Tap(site, f"{own}.k_proj", "b s f", piece="k"),
            Tap(site, f"{own}.v_proj", "b s f", piece="v"),
            *norms,
            Tap(Site("attention", n, "rope"), own, "b n s d", "function", (0,), rope, piece="q"),
            Tap(Site("attention", n, "rope"), own, "b n s d", "function", (1,), rope, piece="k"),
            Tap(Site("attention", n, "core"), own, "b s n d", "function", (0,), core),
            *gate,
            Tap(Site("attention", n, "out_proj"), f"{own}.o_proj", "b s h"),
        ]

    def candidate_taps(self, n: int, layer: str, dims: Dimensions) -> list[Tap]:
        """megatron-core's SelfAttention.  A module that the family has and the args switch off is heard where it would be."""
        own, width = f"{layer}.self_attention", dims.head_width
        queries = dims.heads // dims.groups * width
        gate = f" gate:{queries}" if dims.output_gate else ""
        packed, keys = f"s b (g (q:{queries}{gate} k:{width} v:{width}))[tp]", f"s b n[tp:{dims.groups}] d"
        taps = [
            Tap(Site("input_norm", n), f"{layer}.input_layernorm", "s[sp] b h"),
            Tap(Site("attention", n, "qkv"), f"{own}.linear_qkv", packed, select=(0,)),
            Tap(Site("attention", n, "rope"), f"{own}.core_attention", "s b n[tp] d", "input", (0,), piece="q"),
            Tap(Site("attention", n, "rope"), f"{own}.core_attention", keys, "input", (1,), piece="k"),
            Tap(Site("attention", n, "core"), f"{own}.core_attention", "s b f[tp]"),
            Tap(Site("attention", n, "out_proj"), f"{own}.linear_proj", "s[sp] b h", select=(0,)),
        ]
        if self.qk_norm:
            taps += [
                Tap(Site("attention", n, "q_norm"), f"{own}.q_layernorm", "s b n[tp] d"),
                Tap(Site("attention", n, "k_norm"), f"{own}.k_layernorm", keys),
            ]
        if self.output_gate:
            taps.append(Tap(Site("attention_gate", n), f"{own}.linear_proj", "s b f[tp]", "input", (0,)))
        return sorted(taps, key=lambda tap: tap.site)


def rotary(config: Config, percent: float | None) -> tuple[float, float]:
    """(base, rotated share of each head).  transformers 5 writes rope_parameters; before, rope_theta and rope_scaling stood apart.

    A key that the family's code does not read is read here and changes nothing, as there.
    """
    page: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        said = config.get(Key(name, {}))
        kind = said.get("rope_type", said.get("type", "default"))
        if kind != "default":
            config.not_understood(f"{name} of type", kind)
        for inner in sorted(set(said) - ROPE_KEYS) if kind == "default" else ():
            if said[inner]:
                config.not_understood(f"{name}.{inner}", said[inner])
        page |= said
    outer = {"rope_theta": config.get(Key("rope_theta", 10000)), "partial_rotary_factor": config.get(Key("partial_rotary_factor", percent))}
    base, share = (page.get(name) or value for name, value in outer.items())
    return float(base), 1.0 if percent is None else float(share)
