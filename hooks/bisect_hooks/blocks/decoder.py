"""A decoder family put together from blocks: embedding, layers of attention and feed-forward, final norm, head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bisect_hooks.blocks.args import close, dimensions_of
from bisect_hooks.blocks.attention import Attention
from bisect_hooks.blocks.config import Config, Key
from bisect_hooks.blocks.feed_forward import Dense, Experts, route
from bisect_hooks.blocks.linear_attention import KINDS, LinearAttention
from bisect_hooks.blocks.mtp import Mtp
from bisect_hooks.blocks.place import ROWS, Place, at
from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout, Derived, Dimensions, Routing, Setting, Side
from bisect_hooks.site import Site
from bisect_hooks.table import Made, Rule
from bisect_hooks.tap import Tap


@dataclass(frozen=True)
class Decoder:
    """One family, as `bisect_hooks.family.Family` wants it.

    modeling      the transformers module that defines it: calls of its functions are heard
    zero_centred  norms scale by 1 + w
    left          why reference tensors with this prefix are not converted
    """

    name: str
    model_types: tuple[str, ...]
    modeling: str
    attention: Attention
    dense: Dense | None = None
    experts: Experts | None = None
    linear: LinearAttention | None = None
    mtp: Mtp | None = None
    zero_centred: bool = False
    left: Mapping[str, str] = field(default_factory=dict)

    # -- config ---------------------------------------------------------------------------------------------------------------

    def reference_dimensions(self, config: Mapping[str, Any]) -> Dimensions:
        """From config.json (its text_config).  Raises UsageError that lists every key that is not understood."""
        dims, unknown = self.read(config)
        if unknown:
            raise UsageError(
                f"{self.name} does not understand {len(unknown)} of config.json: {'; '.join(unknown)}",
                hint="nothing was compared: what these change is not in its tables (docs/add-a-family.md)",
            )
        return dims

    def read(self, config: Mapping[str, Any]) -> tuple[Dimensions, list[str]]:
        """The same, and what of config.json was not understood.  Raises UsageError for a size that is not there."""
        read = Config(config, self.name)
        layers = read.number(Key("num_hidden_layers"))
        read.only("hidden_act", "silu")
        found: dict[str, Any] = {}
        for block in (self.attention, self.linear, self.experts):
            found |= block.dimensions(read) if block else {}
        moe = tuple(self.experts is not None and self.experts.where(read, n) for n in range(layers))
        if self.dense and not all(moe):
            found |= self.dense.dimensions(read)
        elif self.dense:
            read.get(self.dense.width)  # of a dense MLP that no layer has
        dims = Dimensions(
            layers=layers,
            vocabulary=read.number(Key("vocab_size")),
            kinds=self._kinds(read, layers),
            moe=moe,
            tied=read.tied,
            mtp=read.number(self.mtp.count) if self.mtp else 0,
            positions=read.get(Key("max_position_embeddings", None)),
            zero_centred=self.zero_centred,
            epsilon=float(read.get(Key("rms_norm_eps"))),
            **found,
        )
        return dims, read.not_known()

    def _kinds(self, config: Config, layers: int) -> tuple[str, ...]:
        """The kind of each layer.  Raises UsageError when there is not one for each."""
        every = config.number(Key("full_attention_interval", 4)) if self.linear else layers + 1
        usual = ["linear_attention" if self.linear and (i + 1) % every else "full_attention" for i in range(layers)]
        kinds = list(config.get(Key("layer_types", usual)))
        if len(kinds) != layers:
            raise UsageError(f"config.json has {len(kinds)} layer_types for {layers} layers")
        for kind in sorted(set(kinds) - set(KINDS if self.linear else ("full_attention",))):
            config.not_understood("layer_types", kind)
        return tuple(KINDS.get(kind, "attention") for kind in kinds)

    def candidate_dimensions(self, args: Mapping[str, Any]) -> Dimensions:
        """From Megatron's args alone; how a Hugging Face style module packs its projections is the family's to say."""
        dims = dimensions_of(args, linear=self.linear is not None)
        return replace(dims, interleaved=self.linear is not None and self.linear.interleaved)

    def read_by_spec(self, args: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        return self.linear.read_by_spec(args, self.reference_dimensions(config)) if self.linear else {}

    def settings(self, config: Mapping[str, Any], layout: CheckpointLayout) -> Sequence[Setting]:
        """Every Megatron argument that changes this model, with the value that config.json asks for."""
        dims = self.reference_dimensions(config)
        every = range(dims.layers)
        full = [n for n in every if dims.kinds[n] == "attention"]
        linear = [n for n in every if dims.kinds[n] == "linear_attention"]
        norms = (
            *at(every, "input_norm"),
            *(at(linear, "linear_attention", "gated_norm") if layout == "native" else ()),
            *(at(full, "attention", "q_norm") + at(full, "attention", "k_norm") if dims.qk_norm else ()),
            *at(every, "pre_mlp_norm"),
            Site("final_norm"),
        )
        inner = [Site("experts" if dims.moe[n] else "mlp", n, "fc1") for n in every]
        scale = ("w", "1 + w") if dims.zero_centred else ("1 + w", "w")
        head = "embedding" if not dims.tied else "a matrix of its own"
        general = [
            Setting("num_layers", "--num-layers", dims.layers, at(every, "input_norm"), "another depth", needed=True),
            Setting("hidden_size", "--hidden-size", dims.hidden, at(every, "input_norm"), "another width", needed=True),
            Setting("normalization", "--normalization", "RMSNorm", norms, "another norm", default="LayerNorm"),
            Setting(
                "apply_layernorm_1p", "--apply-layernorm-1p", dims.zero_centred, norms,
                f"norms scale by {scale[0]} where the reference scales by {scale[1]}", default=False,
            ),
            Setting("norm_epsilon", "--norm-epsilon", dims.epsilon, norms, "norms use another epsilon", default=1e-5, same=close),
            Setting("swiglu", "--swiglu", True, tuple(inner), "another activation", default=False),
            Setting("add_bias_linear", "--disable-bias-linear", False, at(full, "attention", "qkv"), "linear layers have biases", default=True),
            Setting(
                "untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights", not dims.tied, (Site("lm_head"),),
                f"the head is {'the ' * (not dims.tied)}{head}", default=False,
            ),
        ]  # fmt: skip
        absent = []
        if self.linear is None:
            absent.append(
                Setting("linear_attention_freq", "--linear-attention-freq", None, at(every, "input_norm"), "layers are linear attention")
            )
        if self.experts is None:
            absent.append(Setting("num_experts", "--num-experts", None, at(every, "mlp"), "layers have experts", same=lambda a, _: not a))
        blocks = (self.attention, self.linear, self.dense, self.experts)
        return (*general, *(setting for block in blocks if block for setting in block.settings(dims)), *absent)

    # -- weights --------------------------------------------------------------------------------------------------------------

    def mtp_tensors(self, names: Iterable[str], dims: Dimensions) -> list[str]:
        return self.mtp.tensors(names, dims) if self.mtp else []

    def mtp_key(self, config: Mapping[str, Any]) -> str | None:
        """The key of config.json that says how many MTP layers there are; None where the family's config says nothing of it."""
        return Config(config, self.name).where(self.mtp.count) if self.mtp else None

    def left_out(self, name: str, dims: Dimensions) -> str | None:
        """Why a reference tensor is not converted, or None.  Names are canonical: `model.visual.*`, `mtp.*`."""
        if dims.tied and name == "lm_head.weight":
            return "a head beside the embedding that it is tied to: transformers does not read it either"
        if name.endswith(".rotary_emb.inv_freq"):
            return "rotary frequencies: they are computed"
        why = next((why for prefix, why in self.left.items() if name.startswith(prefix)), None)
        return why or (self.mtp.left_out(name, dims) if self.mtp else None)

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
            place = Place(n, f"model.layers.{n}.", f"decoder.layers.{n}.")
            if self.linear and dims.kinds[n] == "linear_attention":
                rules += self.linear.rules(place, dims, layout)
            else:
                rules += self.attention.rules(place, dims)
            rules += self._feed_forward(place, dims, known, dims.moe[n])
        if mtp and self.mtp:
            moe = dims.experts > 0
            rules += self.mtp.rules(dims, lambda place: self.attention.rules(place, dims) + self._feed_forward(place, dims, known, moe))
        return sorted(rules, key=lambda rule: rule.site)

    def _feed_forward(self, place: Place, dims: Dimensions, known: frozenset[str], moe: bool) -> list[Rule]:
        if moe and self.experts:
            return self.experts.rules(place, dims, known)
        return (self.dense or Dense()).rules(place, dims)

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
            if self.linear and dims.kinds[n] == "linear_attention":
                taps += self.linear.reference_taps(n, layer, dims, self.modeling)
            else:
                taps += self.attention.reference_taps(n, layer, dims, self.modeling)
            block = self.experts if self.experts and dims.moe[n] else self.dense or Dense()
            taps += block.reference_taps(n, layer, dims)
            taps.append(Tap(Site("output", n), layer, "b s h"))
        return (*taps, Tap(Site("final_norm"), "model.norm", "b s h"), Tap(Site("lm_head"), "lm_head", "b s v"))

    def reference_modules(self, dims: Dimensions) -> frozenset[str]:
        """Every module that the reference may have: heard by a tap, holding tensors of the table, a helper of one of those, around them."""
        known = {tap.path for tap in self.reference_taps(dims)} | {"model.rotary_emb"}
        known |= {name.rpartition(".")[0] for rule in self.rules(dims, "native", (), mtp=False) for name in rule.references}
        for n in range(dims.layers):
            block = self.experts if self.experts and dims.moe[n] else self.dense or Dense()
            known |= {f"model.layers.{n}.mlp.{helper}" for helper in block.helpers}
            if self.linear and dims.kinds[n] == "linear_attention":
                known |= {f"model.layers.{n}.linear_attn.{helper}" for helper in self.linear.helpers}
        return frozenset(".".join(words[:i]) for words in (path.split(".") for path in known) for i in range(len(words) + 1))

    def candidate_taps(self, dims: Dimensions, layout: CheckpointLayout) -> tuple[Tap, ...]:
        """Paths count layers globally; whoever holds a pipeline stage shifts them to its own count."""
        taps = [
            Tap(Site("tokens"), "embedding", "b s", "input", (0, "input_ids")),
            Tap(Site("embedding"), "embedding", "s[sp] b h"),
        ]
        for n in range(dims.layers):
            layer = f"decoder.layers.{n}"
            taps.append(Tap(Site("input", n), layer, "s[sp] b h", "input", (0, "hidden_states")))
            if self.linear and dims.kinds[n] == "linear_attention":
                taps += self.linear.candidate_taps(n, layer, dims, layout)
            else:
                taps += self.attention.candidate_taps(n, layer, dims)
            taps.append(Tap(Site("pre_mlp_norm", n), f"{layer}.pre_mlp_layernorm", "s[sp] b h"))
            if self.experts and dims.moe[n]:
                taps += self.experts.candidate_taps(n, layer, dims)
            else:
                taps += (self.dense or Dense()).candidate_taps(n, layer, dims)
            taps.append(Tap(Site("output", n), layer, "s[sp] b h", select=(0,)))
        return (
            *taps,
            Tap(Site("final_norm"), "decoder.final_layernorm", "s[sp] b h"),
            Tap(Site("lm_head"), "output_layer", "s b v[tp]", select=(0,)),
        )

    def derived(self, dims: Dimensions, side: Side) -> tuple[Derived, ...]:
        if side == "candidate" or self.experts is None:
            return ()
        return tuple(made for n in range(dims.layers) if dims.moe[n] for made in self.experts.derived(n))

    def route(
        self, logits: torch.Tensor, dims: Dimensions, bias: torch.Tensor | None = None, chosen: torch.Tensor | None = None
    ) -> Routing:
        return route(logits, dims, bias, chosen)
