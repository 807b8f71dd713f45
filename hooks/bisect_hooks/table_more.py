"""Ops of the weight table that only some families need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bisect_hooks.table import Same, Shape, Span, Tensors


@dataclass(frozen=True, slots=True)
class Deinterleave(Same):
    """One reference tensor packed head by head → one candidate tensor a part, heads in order.

    `in_proj_qkvz` is, for each key head, its q, k, v and z rows (`fix_query_key_value_ordering` of transformers' gated delta net);
    Megatron wants all q, then all k.  sizes  rows of each part in one of the `heads`
    """

    heads: int = 1
    sizes: tuple[int, ...] = ()

    def shapes(self, references: Sequence[Shape]) -> list[Shape]:
        return [(self.heads * size, *references[0][1:]) for size in self.sizes]

    def spans(self, index: int, start: int, stop: int, references: Sequence[Shape]) -> list[Span]:
        size, before, whole = self.sizes[index], sum(self.sizes[:index]), sum(self.sizes)
        found = []
        for head in range(start // size, -(-stop // size)):
            first, last = max(start, head * size), min(stop, (head + 1) * size)
            here = head * (whole - size) + before  # what stands in front of this head's rows that is not of this part
            found.append((0, here + first, here + last))
        return found

    def make(self, parts: Tensors) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def backward(self, tensors: Tensors) -> Tensors:
        parts = [part.reshape(self.heads, -1, *part.shape[1:]) for part in tensors]
        return [torch.cat(parts, dim=1).flatten(0, 1)]
