"""A Site is a named place in the forward pass: the same name on both sides, and sites sort in compute order."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import total_ordering

from bisect_hooks.errors import UsageError

# Compute order.  `output` closes a layer; modules after it are outside the layers.
BEFORE_LAYERS = ("tokens", "embedding", "vision")
IN_LAYER = (
    "input",
    "input_norm",
    "attention",
    "linear_attention",
    "attention_gate",
    "pre_mlp_norm",
    "router",
    "experts",
    "shared_expert",
    "shared_expert_gate",
    "mlp",
    "output",
)
AFTER_LAYERS = ("final_norm", "lm_head", "mtp")
MODULES = BEFORE_LAYERS + IN_LAYER + AFTER_LAYERS

# `half` joins what a fault can be cured by one graft: the mixer and everything in it, or the feed-forward and everything in it.
PARTS: dict[str, tuple[str, ...]] = {
    "linear_attention": ("in_proj", "conv1d", "a_log", "dt_bias", "decay", "beta", "core", "gated_norm", "out_proj"),
    "attention": ("qkv", "q_norm", "k_norm", "rope", "core", "out_proj"),
    "router": ("logits", "expert_bias", "probs", "topk"),
    "experts": ("dispatch", "fc1", "fc2", "combine"),
    "shared_expert": ("fc1", "fc2"),
    "mlp": ("fc1", "fc2"),
    "mtp": ("enorm", "hnorm", "eh_proj", "layer", "final_norm"),
}


@total_ordering
@dataclass(frozen=True, slots=True)
class Site:
    """`layers.3.attention.rope`, `layers.3.output`, `lm_head`, `mtp.0.eh_proj`.

    layer  0-based and global; None outside the decoder layers (for `mtp` it counts the MTP layers)
    """

    module: str
    layer: int | None = None
    part: str | None = None

    def __post_init__(self) -> None:
        _known("module", self.module, MODULES)
        if self.in_layer and self.layer is None:
            raise UsageError(f"site {self.module}: it is inside a layer, so say which", hint=f"layers.<n>.{self.module}")
        if self.layer is not None and not self.in_layer and self.module != "mtp":
            raise UsageError(f"site {self.module}.{self.layer}: {self.module} is outside the layers and has no number")
        if self.part is not None:
            _known(f"part of {self.module}", self.part, PARTS.get(self.module, ()))

    @property
    def in_layer(self) -> bool:
        return self.module in IN_LAYER

    @property
    def order(self) -> tuple[int, int, int, int]:
        parts = PARTS.get(self.module, ())
        block = 0 if self.module in BEFORE_LAYERS else 1 if self.in_layer else 2
        layer = -1 if self.layer is None else self.layer
        module = MODULES.index(self.module)
        within = parts.index(self.part) if self.part else -1
        return (block, layer, module, within) if self.in_layer else (block, module, layer, within)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Site):
            return NotImplemented
        return self.order < other.order

    def __str__(self) -> str:
        if self.in_layer:
            name = f"layers.{self.layer}.{self.module}"
        else:
            name = self.module if self.layer is None else f"{self.module}.{self.layer}"
        return f"{name}.{self.part}" if self.part else name


def parse_site(text: str) -> Site:
    """The Site written as `text`.  Raises UsageError naming the nearest word for one that is not known."""
    words = text.split(".")
    layer: int | None = None
    if words[0] == "layers":
        if len(words) < 3 or not _is_number(words[1]):
            raise UsageError(f"site {text!r}: expected layers.<n>.<module>[.<part>]")
        layer, words = int(words[1]), words[2:]
        _known("module inside a layer", words[0], IN_LAYER)
    elif len(words) > 1 and _is_number(words[1]):
        layer, words = int(words[1]), [words[0], *words[2:]]
    if len(words) > 2:
        raise UsageError(f"site {text!r}: too many words, expected <module>[.<part>]")
    return Site(words[0], layer, words[1] if len(words) == 2 else None)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal()


def _known(what: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        near = difflib.get_close_matches(word, words, n=3, cutoff=0.3) or list(words)
        raise UsageError(f"unknown {what} {word!r}", hint=f"nearest: {', '.join(near) or 'none'}")
