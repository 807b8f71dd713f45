"""Where else in the reference is this block?  Samples of every whole tensor and every expert propose; bytes decide.

A sample is a few kilobytes, so the index costs next to nothing to make however large the model is, and the reference is read again only
where a candidate block is verified against it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from bisect_tool.compare import bits, same_rows, same_tensor
from bisect_tool.faults import without_layer
from bisect_tool.places import Tensor

# elements of a row that a sample takes; a tensor of fewer bytes than SMALL is taken whole
WIDTH, SMALL = 512, 1 << 16
Signature = tuple[tuple[int, ...], torch.dtype, bytes]


@dataclass(frozen=True)
class Index:
    """names  every tensor the table makes · experts  those of them that are stacked over experts
    expected  what the table makes of the reference under a name, unread and in the dtype it is stored in
    """

    names: tuple[str, ...]
    experts: frozenset[str]
    expected: Callable[[str], Tensor] = field(repr=False)

    def whole(self, tensor: Tensor, own: str) -> list[str]:
        """Other names whose tensor is this one, byte by byte."""
        signed = signature(tensor)
        if signed is None:
            return []
        found = self._whole.get(signed, [])
        return [name for name in found if name != own and same_tensor(self.expected(name), tensor)]

    def expert(self, tensor: Tensor, e: int, own: str) -> tuple[str, int] | None:
        """The (name, expert) whose slice candidate expert `e` is, byte by byte; its own place first, then its own tensor."""
        signed = expert_signature(tensor, e)
        if signed is None:
            return None
        places = self._experts.get((without_layer(own), signed), [])
        for name, f in sorted(places, key=lambda place: (place != (own, e), place[0] != own)):
            if same_rows(self.expected(name), tensor, f, f + 1, e):
                return name, f
        return None

    @cached_property
    def _whole(self) -> Mapping[Signature, list[str]]:
        found: dict[Signature, list[str]] = {}
        for name in self.names:
            signed = signature(self.expected(name))
            if signed is not None:
                found.setdefault(signed, []).append(name)
        return found

    @cached_property
    def _experts(self) -> Mapping[tuple[str, Signature], list[tuple[str, int]]]:
        found: dict[tuple[str, Signature], list[tuple[str, int]]] = {}
        for name in self.names:
            if name in self.experts:
                tensor = self.expected(name)
                for e in range(tensor.shape[0]):
                    signed = expert_signature(tensor, e)
                    if signed is not None:
                        found.setdefault((without_layer(name), signed), []).append((name, e))
        return found


def signature(tensor: Tensor) -> Signature | None:
    """Of a whole tensor; None for one that is constant where it was looked at: constant tensors can't bear witness."""
    count, unit = tensor.shape[0], tensor.unit
    size = tensor.dtype.itemsize
    for length in tensor.shape:
        size *= length
    if size <= SMALL:
        return _signed(tensor.shape, tensor.rows(0, count))
    if len(tensor.shape) == 3:
        return _signed(tensor.shape, torch.stack([_peeked(tensor, e) for e in sorted({0, count // 2, count - 1})]))
    found = []
    for row in sorted({0, count // 2, count - 1}):
        start = row // unit * unit
        found.append(_ends(tensor.rows(start, start + unit)[row - start]))
    return _signed(tensor.shape, torch.stack(found))


def expert_signature(tensor: Tensor, e: int) -> Signature | None:
    """Of one expert of a tensor [E rows columns]."""
    if tensor.empty(e, e + 1):
        return None
    return _signed(tensor.shape[1:], _peeked(tensor, e))


def _peeked(tensor: Tensor, e: int) -> torch.Tensor:
    rows, columns = tensor.shape[1:]
    return tensor.peek(e, sorted({0, rows // 2, rows - 1}), min(columns, WIDTH))


def _ends(row: torch.Tensor) -> torch.Tensor:
    flat = row.flatten()
    return torch.cat([flat[:WIDTH], flat[-WIDTH:]])


def _signed(shape: tuple[int, ...], sample: torch.Tensor) -> Signature | None:
    flat = bits(sample).flatten()
    if bool((flat == flat[0]).all()):
        return None
    return shape, sample.dtype, hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()
