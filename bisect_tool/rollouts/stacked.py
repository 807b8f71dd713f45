"""What vLLM and SGLang call the weights they hold, and how they make them of a Hugging Face directory's.

An engine stacks what it multiplies together (`qkv_proj` is q, k and v), keeps experts as `w13_weight` and `w2_weight`, and cuts all of it
over its tensor parallel ranks.  Given a name of an engine and its rank, this makes the tensor that ought to be there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from bisect_hooks.family import Dimensions

from bisect_tool.hf_directory import HuggingFaceDirectory, canonical

# engine's word → the words it stacks, row after row
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
COLUMNS = ("o_proj", "out_proj", "down_proj")
ROWS = ("q_proj", "gate_proj", "up_proj", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias", "embed_tokens", "lm_head")
PARTS = ("in_proj_qkv", "conv1d")


@dataclass(frozen=True)
class Held:
    """Tensors of a directory as an engine at tensor parallel size `tp` would hold them."""

    directory: HuggingFaceDirectory
    dims: Dimensions
    tp: int = 1
    read: Callable[[str], torch.Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "read", self.directory.read)

    def sources(self, name: str) -> tuple[str, ...]:
        """Names of the directory that an engine's tensor is made of; none for what is the engine's own."""
        name = canonical(name)
        if name in self.directory.stored:
            return (name,)
        for word, words in STACKED.items():
            stacked = tuple(re.sub(rf"\b{word}\b", one, name) for one in words)
            if f".{word}." in name and all(one in self.directory.stored for one in stacked):
                return stacked
        found = re.fullmatch(r"(.*\.experts)\.(?:routed_experts\.)?(w13|w2)_weight", name)
        if found is None:
            return ()
        prefix, words = found[1], ("gate", "up") if found[2] == "w13" else ("down",)
        whole = f"{prefix}.gate_up_proj" if found[2] == "w13" else f"{prefix}.down_proj"
        single = tuple(f"{prefix}.{e}.{word}_proj.weight" for e in range(self.dims.experts) for word in words)
        return (whole,) if whole in self.directory.stored else single if single and single[0] in self.directory.stored else ()

    def make(self, name: str, rank: int) -> torch.Tensor | None:
        """The tensor that rank `rank` ought to hold under this name; None for what is the engine's own."""
        sources = self.sources(name)
        if not sources:
            return None
        pieces = [self._cut(source, self.read(source), rank) for source in sources]
        if ".experts." in sources[0] and len(sources) > 1:
            each = 2 if "w13" in name else 1
            return torch.stack([torch.cat(pieces[i : i + each]) for i in range(0, len(pieces), each)])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _cut(self, source: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if self.tp == 1:
            return tensor
        word = next((one for one in reversed(source.split(".")) if one not in ("weight", "bias")), "")
        if source.startswith("model.layers.") and ".experts." in source and tensor.ndim == 3:
            return _rows(tensor, rank, self.tp, 2, 1) if word == "gate_up_proj" else tensor.chunk(self.tp, 2)[rank]
        if word in COLUMNS:
            return tensor.chunk(self.tp, 1)[rank]
        if word in ROWS:
            return tensor.chunk(self.tp)[rank]
        if word in ("k_proj", "v_proj"):
            width, heads = self.dims.head_width, max(1, self.dims.groups // self.tp)
            first = rank * self.dims.groups // self.tp
            return tensor[first * width : (first + heads) * width]
        if word in PARTS:
            sizes = (self.dims.key_rows, self.dims.key_rows, self.dims.value_rows)
            return torch.cat([part.chunk(self.tp)[rank] for part in tensor.split(sizes)])
        return tensor


def _rows(tensor: torch.Tensor, rank: int, ways: int, parts: int, dim: int) -> torch.Tensor:
    return torch.cat([part.chunk(ways, dim)[rank] for part in tensor.chunk(parts, dim)], dim)


def repacked(tensor: torch.Tensor) -> dict[str, tuple[str, dict[str, object], torch.Tensor]]:
    """Layouts that kernels want, by what they are called: (relation, its detail, the tensor in it)."""
    found: dict[str, tuple[str, dict[str, object], torch.Tensor]] = {}
    dim = tensor.ndim - 2
    if tensor.ndim < 2:
        return found
    if tensor.shape[dim] % 2 == 0:
        one, other = tensor.chunk(2, dim)
        found["halves swapped"] = ("halves-swapped", {}, torch.cat([other, one], dim))
        for block in (1, 2, 4, 8, 16, 32, 64, 128):
            if one.shape[dim] % block == 0 and one.shape[dim] > block:
                rows = torch.stack([half.unflatten(dim, (-1, block)) for half in (one, other)], dim + 1)
                found[f"interleaved in blocks of {block}"] = ("block-interleave", {"parts": 2, "block": block}, rows.flatten(dim, dim + 2))
    found["transposed"] = ("transpose", {}, tensor.transpose(-1, -2))
    return found
