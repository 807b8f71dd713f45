"""How every site of attention, gated delta net, MLP and mixture of experts follows from the sites before it, by its formula.

A Recipe names what a key is computed from (keys of the same recording, tensors of the reference) and computes it in float64.  It
shares no code with transformers or megatron-core, so it can take a side where the two disagree.  What the model is, its Dimensions
say; what its tensors are called, its weight table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bisect_hooks import formulas as f
from bisect_hooks.family import Dimensions
from bisect_hooks.site import parse_site
from bisect_hooks.table import Rule
from bisect_hooks.tap import split_key

Tensors = Sequence[torch.Tensor]
Formula = Callable[[Tensors, Tensors, f.Segments], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """formula: (inputs, weights, segment lengths) → the tensor of the key, [tokens ..]; of probed experts [e t f]"""

    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    formula: Formula


@dataclass(frozen=True, slots=True)
class Sources:
    """Which tensors of the reference each site reads, by the weight table: site → names."""

    by_site: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, rules: Sequence[Rule]) -> Sources:
        found: dict[str, tuple[str, ...]] = {}
        for rule in rules:
            found[str(rule.site)] = (*found.get(str(rule.site), ()), *rule.references)
        return cls(found)

    def __call__(self, site: str, *ends: str) -> tuple[str, ...]:
        """The tensors of a site whose names end so, in that order; all of them where no ends are given."""
        names = self.by_site.get(site, ())
        return tuple(name for end in ends for name in names if name.endswith(end)) if ends else names


def recipe(key: str, dims: Dimensions, sources: Sources) -> Recipe | None:
    """The recipe of a key, None for one that has none (tokens, layer inputs)."""
    site = parse_site(split_key(key)[0])
    n = site.layer
    if not site.in_layer or n is None:
        head = sources("embedding" if dims.tied else "lm_head")
        return {
            "embedding": Recipe(("tokens",), sources("embedding"), lambda x, w, _: f.wide(w[0][x[0].long().flatten()])),
            "final_norm": Recipe((f"layers.{dims.layers - 1}.output",), sources("final_norm"), _norm(dims)),
            "lm_head": Recipe(("final_norm",), head, _linear),
        }.get(site.module)
    makers = {"attention": _attention, "attention_gate": _attention, "linear_attention": _linear_attention}
    made = makers.get(site.module, _around)(f"layers.{n}", n, dims, sources)
    return made.get(key.removeprefix(f"layers.{n}."))


def _norm(dims: Dimensions, width: int | None = None) -> Formula:
    def formula(x: Tensors, w: Tensors, _: f.Segments) -> torch.Tensor:
        heads = x[0] if width is None else x[0].reshape(len(x[0]), -1, width)
        return f.rms_norm(heads, w[0], dims.epsilon, zero_centred=dims.zero_centred)

    return formula


def _linear(x: Tensors, w: Tensors, _: f.Segments) -> torch.Tensor:
    return f.linear(x[0], *w[:2])


def _down(x: Tensors, w: Tensors, _: f.Segments) -> torch.Tensor:
    """The second linear of a gated MLP."""
    return f.linear(f.swiglu(x[0], x[1]), w[0])


def _sum(x: Tensors, _w: Tensors, _: f.Segments) -> torch.Tensor:
    return torch.stack([f.wide(one) for one in x]).sum(0)


def _fused(w: Tensors, each: int) -> torch.Tensor:
    """Experts' weights as one tensor [e ..], also where each stands alone, in `each` pieces."""
    return w[0] if len(w) == 1 else torch.stack([torch.cat(list(w[i : i + each])) for i in range(0, len(w), each)])


def _gated_mlp(at: str, module: str, x: tuple[str, ...], sources: Sources) -> dict[str, Recipe]:
    fc1, site = f"{at}.{module}.fc1", f"{at}.{module}"
    return {
        f"{module}.fc1:gate": Recipe(x, sources(fc1, "gate_proj.weight"), _linear),
        f"{module}.fc1:up": Recipe(x, sources(fc1, "up_proj.weight"), _linear),
        f"{module}.fc2": Recipe((f"{fc1}:gate", f"{fc1}:up"), sources(f"{site}.fc2"), _down),
    }


def _around(at: str, n: int, dims: Dimensions, sources: Sources) -> dict[str, Recipe]:
    """Norms, the MLP or the experts, and the sums between them."""
    mixed, x = (f"{at}.input", f"{at}.{dims.kinds[n]}.out_proj"), (f"{at}.pre_mlp_norm",)
    made = {
        "input_norm": Recipe((f"{at}.input",), sources(f"{at}.input_norm"), _norm(dims)),
        "pre_mlp_norm": Recipe(mixed, sources(f"{at}.pre_mlp_norm"), lambda x, w, s: _norm(dims)([_sum(x, w, s)], w, s)),
    }
    if not dims.moe[n]:
        return made | _gated_mlp(at, "mlp", x, sources) | {"output": Recipe((*mixed, f"{at}.mlp.fc2"), (), _sum)}
    scored, biases = (f"{at}.router.logits",), (f"{at}.router.expert_bias",) if dims.expert_bias else ()
    fc1, fc2 = sources(f"{at}.experts.fc1"), sources(f"{at}.experts.fc2")

    def routed(which: int) -> Recipe:
        def formula(x: Tensors, _w: Tensors, _: f.Segments) -> torch.Tensor:
            score, bias = "sigmoid" if dims.sigmoid else "softmax", x[1] if biases else None
            return f.route(x[0], dims.top_k, score=score, bias_X=bias, scale=dims.scaling, renormalised=dims.renormalised)[which]

        return Recipe((*scored, *biases), (), formula)

    def combined(x: Tensors, w: Tensors, _: f.Segments) -> torch.Tensor:
        return f.experts(x[0], _fused(w[: len(fc1)], 2), _fused(w[len(fc1) :], 1), x[1])

    shared = {}
    if dims.shared:
        shared = _gated_mlp(at, "shared_expert", x, sources)
        shared["shared_expert_gate"] = Recipe(
            (f"{at}.shared_expert.fc2", *x),
            sources(f"{at}.shared_expert_gate"),
            lambda x, w, _: f.gate(x[0], f.linear(x[1], w[0])),
        )
    last = () if not dims.shared else (f"{at}.shared_expert_gate",) if dims.shared_gate else (f"{at}.shared_expert.fc2",)
    return made | shared | {
        "router.logits": Recipe(x, sources(f"{at}.router.logits"), _linear),
        "router.expert_bias": Recipe(x, sources(f"{at}.router.expert_bias"), lambda x, w, _: f.wide(w[0]).expand(len(x[0]), -1)),
        "router.probs": routed(0),
        "router.topk": routed(1),
        "experts.fc1": Recipe((f"{at}.experts.fc1:rows",), fc1, lambda x, w, _: torch.stack([f.linear(x[0], one) for one in _fused(w, 2)])),
        "experts.fc2": Recipe(
            (f"{at}.experts.fc2:rows",), fc2, lambda x, w, _: torch.stack([f.linear(*pair) for pair in zip(x[0], _fused(w, 1), strict=True)])
        ),
        "experts.combine": Recipe((*x, f"{at}.router.probs"), (*fc1, *fc2), combined),
        "output": Recipe((*mixed, f"{at}.experts.combine", *last), (), _sum),
    }  # fmt: skip


def _attention(at: str, n: int, dims: Dimensions, sources: Sources) -> dict[str, Recipe]:
    width, qkv = dims.head_width, f"{at}.attention.qkv"
    x, core = (f"{at}.input_norm",), f"{at}.attention.core"
    names = {one: sources(qkv, f"{one}_proj.weight", f"{one}_proj.bias") for one in "qkv"}

    def gated(which: int) -> Formula:
        """Queries and their gates lie head by head in one projection."""
        return lambda x, w, s: (
            _linear(x, w, s).reshape(len(x[0]), dims.heads, 2, width)[:, :, which] if dims.output_gate else _linear(x, w, s)
        )

    def rotated(which: str) -> Recipe:
        source = f"{at}.attention.{which}_norm" if dims.qk_norm else f"{qkv}:{which}"
        share = int(width * dims.rotary_percent)
        return Recipe(
            (source,), (), lambda x, _w, s: f.rope(x[0].reshape(len(x[0]), -1, width), f.positions_of(s), dims.rotary_base, share)
        )

    def attend(x: Tensors, _w: Tensors, segments: f.Segments) -> torch.Tensor:
        q, k, v = (one.reshape(len(one), -1, width) for one in x)
        return f.attention(q, k, v, segments)

    norms = {
        f"attention.{one}_norm": Recipe((f"{qkv}:{one}",), sources(f"{at}.attention.{one}_norm"), _norm(dims, width))
        for one in ("qk" if dims.qk_norm else "")
    }
    gate = {
        "attention.qkv:gate": Recipe(x, names["q"], gated(1)),
        "attention_gate": Recipe((core, f"{qkv}:gate"), (), lambda x, _w, _: f.gate(*x)),
    }
    return norms | (gate if dims.output_gate else {}) | {
        "attention.qkv:q": Recipe(x, names["q"], gated(0)),
        "attention.qkv:k": Recipe(x, names["k"], _linear),
        "attention.qkv:v": Recipe(x, names["v"], _linear),
        "attention.rope:q": rotated("q"),
        "attention.rope:k": rotated("k"),
        "attention.core": Recipe((f"{at}.attention.rope:q", f"{at}.attention.rope:k", f"{qkv}:v"), (), attend),
        "attention.out_proj": Recipe((f"{at}.attention_gate" if dims.output_gate else core,), sources(f"{at}.attention.out_proj"), _linear),
    }  # fmt: skip


def _linear_attention(at: str, n: int, dims: Dimensions, sources: Sources) -> dict[str, Recipe]:
    here, x = f"{at}.linear_attention", (f"{at}.input_norm",)
    key, value, ratio = dims.key_rows, dims.value_rows, dims.value_heads // dims.key_heads
    width = ratio * dims.value_width
    # how the rows of each projection are packed: one head after another where interleaved, else part after part
    heads = dims.key_heads if dims.interleaved else 1
    qkv = {"q": key // heads, "k": key // heads, "v": value // heads}
    if dims.interleaved:
        packed = {"in_proj_qkvz": qkv | {"z": width}, "in_proj_ba": {"beta": ratio, "alpha": ratio}}
    else:
        packed = {
            "in_proj_qkv": qkv,
            "in_proj_z": {"z": value},
            "in_proj_b": {"beta": dims.value_heads},
            "in_proj_a": {"alpha": dims.value_heads},
        }

    def rows(sizes: Mapping[str, int], piece: str) -> Formula:
        start = sum(list(sizes.values())[: list(sizes).index(piece)])
        return lambda x, w, _: f.linear(x[0], w[0].reshape(heads, -1, w[0].shape[-1])[:, start : start + sizes[piece]].flatten(0, 1))

    made = {
        f"linear_attention.in_proj:{piece}": Recipe(x, sources(f"{here}.in_proj", f"{name}.weight"), rows(sizes, piece))
        for name, sizes in packed.items()
        for piece in sizes
    }
    for piece, start, stop in (("q", 0, key), ("k", key, 2 * key), ("v", 2 * key, 2 * key + value)):
        made[f"linear_attention.conv1d:{piece}"] = Recipe(
            (f"{here}.in_proj:{piece}",), sources(f"{here}.conv1d"), lambda x, w, s, a=start, b=stop: f.conv(x[0], w[0][a:b], s)  # type: ignore[misc]
        )  # fmt: skip

    def rule(x: Tensors, _w: Tensors, segments: f.Segments) -> torch.Tensor:
        q, k = (one.reshape(len(one), dims.key_heads, dims.key_width) for one in x[:2])
        return f.delta_rule(q, k, x[2].reshape(len(x[2]), dims.value_heads, dims.value_width), x[3], x[4], segments)

    def normed(x: Tensors, w: Tensors, _: f.Segments) -> torch.Tensor:
        core, z = (one.reshape(len(one), dims.value_heads, dims.value_width) for one in x)
        return f.gated_norm(core, z, w[0], dims.epsilon)

    entering = (*(f"{here}.conv1d:{piece}" for piece in "qkv"), f"{here}.decay", f"{here}.beta")
    decays = (*sources(f"{here}.a_log"), *sources(f"{here}.dt_bias"))
    return made | {
        "linear_attention.decay": Recipe((f"{here}.in_proj:alpha",), decays, lambda x, w, _: f.decay(x[0], w[0], w[1])),
        "linear_attention.beta": Recipe((f"{here}.in_proj:beta",), (), lambda x, _w, _: torch.sigmoid(f.wide(x[0]))),
        "linear_attention.core": Recipe(entering, (), rule),
        "linear_attention.gated_norm": Recipe((f"{here}.core", f"{here}.in_proj:z"), sources(f"{here}.gated_norm"), normed),
        "linear_attention.out_proj": Recipe((f"{here}.gated_norm",), sources(f"{here}.out_proj"), _linear),
    }
