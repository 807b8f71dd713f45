"""Ops of the weight table that only some families need."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bisect_hooks.table import Tensors


@dataclass(frozen=True, slots=True)
class Deinterleave:
    """One reference tensor packed head by head → one candidate tensor a part, heads in order.

    `in_proj_qkvz` is, for each key head, its q, k, v and z rows (`fix_query_key_value_ordering` of transformers' gated delta net);
    Megatron wants all q, then all k.  sizes  rows of each part in one of the `heads`
    """

    heads: int
    sizes: tuple[int, ...]
    lossy: bool = False

    def forward(self, tensors: Tensors) -> Tensors:
        by_head = tensors[0].reshape(self.heads, -1, *tensors[0].shape[1:])
        return [part.flatten(0, 1) for part in by_head.split(list(self.sizes), dim=1)]

    def backward(self, tensors: Tensors) -> Tensors:
        parts = [part.reshape(self.heads, -1, *part.shape[1:]) for part in tensors]
        return [torch.cat(parts, dim=1).flatten(0, 1)]
