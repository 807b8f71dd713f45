"""What each site is made of inside a grafted layer: the edges along which a difference spreads.

A layer is cut loose at its input, at the output of its mixer and at its own output, so nothing spreads further than these edges.
Sites that are judged against the candidate's own upstream values (top-k and probabilities by the reference's rule on the
candidate's logits and expert bias, dispatch by the candidate's routing, experts by probes) have no upstream at all.
"""

from __future__ import annotations

from functools import cache

from bisect_hooks.site import Site
from bisect_hooks.tap import split_key

UPSTREAM: dict[str, tuple[str, ...]] = {
    "input": (),
    "input_norm": (),
    "linear_attention.in_proj": ("input_norm",),
    "linear_attention.conv1d": ("linear_attention.in_proj",),
    "linear_attention.decay": ("linear_attention.in_proj",),
    "linear_attention.beta": ("linear_attention.in_proj",),
    "linear_attention.core": ("linear_attention.conv1d", "linear_attention.decay", "linear_attention.beta"),
    "linear_attention.gated_norm": ("linear_attention.core", "linear_attention.in_proj"),
    "linear_attention.out_proj": ("linear_attention.gated_norm",),
    "attention.qkv": ("input_norm",),
    "attention.q_norm": ("attention.qkv",),
    "attention.k_norm": ("attention.qkv",),
    "attention.rope": ("attention.q_norm", "attention.k_norm"),
    "attention.core": ("attention.rope", "attention.qkv"),
    "attention_gate": ("attention.core", "attention.qkv"),
    "attention.out_proj": ("attention_gate",),
    "pre_mlp_norm": (),
    "router.logits": ("pre_mlp_norm",),
    "router.expert_bias": (),
    "router.probs": (),
    "router.topk": (),
    "experts.fc1": (),
    "experts.fc2": (),
    "experts.dispatch": (),
    "experts.combine": (
        "router.logits",
        "router.expert_bias",
        "router.probs",
        "router.topk",
        "experts.fc1",
        "experts.fc2",
        "experts.dispatch",
        "pre_mlp_norm",
    ),
    "shared_expert.fc1": ("pre_mlp_norm",),
    "shared_expert.fc2": ("shared_expert.fc1",),
    "shared_expert_gate": ("shared_expert.fc2", "pre_mlp_norm"),
    "mlp.fc1": ("pre_mlp_norm",),
    "mlp.fc2": ("mlp.fc1",),
    "output": ("experts.combine", "shared_expert_gate", "shared_expert.fc2", "mlp.fc2"),
    "embedding": (),
    "final_norm": (),
    "lm_head": (),
}

MIXED = ("attention.out_proj", "linear_attention.out_proj")
# edges that a graft cuts and a free run has; what ends in a dot lies in the layer before
EDGES: dict[str, tuple[str, ...]] = UPSTREAM | {
    "input": ("output.",),
    "input_norm": ("input",),
    "pre_mlp_norm": ("input", *MIXED),
    "router.probs": ("router.logits",),
    "router.topk": ("router.logits",),
    "mlp.fc1": ("pre_mlp_norm",),
    "mlp.fc2": ("mlp.fc1",),
    "output": (*UPSTREAM["output"], "mlp.fc2", "input", *MIXED),
    "final_norm": ("output.",),
    "lm_head": ("final_norm",),
}

# a fault that can't be replaced where it is made is replaced where it has just passed
CURED_AT = dict.fromkeys(("router.expert_bias", "experts.fc1", "experts.fc2", "experts.dispatch"), "experts.combine")


def word(site: Site) -> str:
    """A site without its layer."""
    return f"{site.module}.{site.part}" if site.part else site.module


def upstream(site: Site) -> set[str]:
    """Everything before a site inside its layer, transitively."""
    found: set[str] = set()
    todo = list(UPSTREAM.get(word(site), ()))
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += UPSTREAM[one]
    return found


@cache
def _fed_by(name: str) -> frozenset[str]:
    """Every word of a layer that a word of the same layer is computed from, in a free run."""
    near = {one for one in EDGES.get(name, ()) if not one.endswith(".")}
    return frozenset(near).union(*map(_fed_by, near))


def behind(site: Site, other: Site) -> bool:
    """Whether a difference made at `site` can be seen at `other` in a free run."""
    return word(site) in _fed_by(word(other)) if site.in_layer and site.layer == other.layer else site < other


def in_place(site: Site, name: str) -> str:
    """A word of this table as a site name in the layer of `site`."""
    return f"layers.{site.layer}.{name}" if site.in_layer else name


def site_name(key: str) -> str:
    """The site of a key.  The gate rows of linear_qkv are the attention gate's."""
    name, piece = split_key(key)
    return name.replace("attention.qkv", "attention_gate") if name.endswith("attention.qkv") and piece == "gate" else name
