"""Bytes against bytes, a window at a time.  Says what is equal and where it is not, and holds no opinion about why."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site
from bisect_hooks.table import Cut, Rule

from bisect_tool.places import Place, Tensor, steps
from bisect_tool.shards import Place as ShardPlace
from bisect_tool.shards import pieces_of

# elements of a window that is not equal, from which the size of the difference is estimated
SAMPLE = 1 << 16
# what one piece of a window holds: (its place in it, a view of the file)
Part = tuple[Place, torch.Tensor]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes, _memcmp.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int


@dataclass(slots=True)
class Compared:
    """One pair of tensors.

    equal    every byte, after a widening where the dtypes differ
    once     equal after one rounding to the stored dtype
    bf16     equal after rounding the reference through bfloat16 · coarse  or after rounding the candidate so
    unequal  ranges of rows that hold a difference; of experts, each by itself
    places   coordinates of the conversion's layout whose piece is wrong
    sites    where the unequal rows belong (rows of linear_qkv: attention, or its gate)
    size     relative rms difference, estimated from a sample of the unequal rows
    read     bytes read on both sides · holes  bytes that lie in holes of both
    """

    name: str
    equal: bool = True
    once: bool = True
    bf16: bool = False
    coarse: bool = False
    unequal: list[tuple[int, int]] = field(default_factory=list)
    places: list[ShardPlace] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    size: float = 0.0
    read: int = 0
    holes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_json(cls, page: Mapping[str, Any]) -> Compared:
        found = cls(**page)
        found.unequal = [(start, stop) for start, stop in found.unequal]
        found.places = [tuple(place) for place in found.places]
        return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of its width, so that equality is equality of bytes, NaN included."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality of shape, dtype and every byte."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_contiguous() and other.is_contiguous() and one.is_cpu and other.is_cpu:  # half as fast again as torch.equal
        return not _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)
    return torch.equal(bits(one), bits(other))


def compare(
    name: str, rule: Rule, cut: Cut, fp32: bool, expected: Tensor, candidate: Tensor, parallel: Parallel, rows: int | None = None
) -> Compared:
    """Compares tensors of one shape (`rows`: only so many of the candidate's, which pads its vocabulary).

    fp32  the family keeps it in float32, so a rounding through bfloat16 is told apart
    """
    found = Compared(name, once=expected.dtype != candidate.dtype, bf16=fp32, coarse=fp32)
    count = expected.shape[0] if rows is None else rows
    row = Row(expected, candidate)
    each = cut.expert and len(candidate.shape) == 3
    places: Mapping[ShardPlace, list[Place]] = {}
    squares = norm = 0.0
    for start, stop in steps(count, row.unit, row.bytes):
        if expected.empty(start, stop) and candidate.empty(start, stop):
            found.holes += 2 * (stop - start) * row.bytes
            continue
        found.read += (stop - start) * row.bytes * 2
        want = expected.rows(start, stop)
        got = list(candidate.parts(start, stop))
        wrong = [(at, part) for at, part in got if not _equal(want[at], part)]
        if not wrong:
            continue
        found.equal = False
        found.once = found.once and all(same_bytes(want[at].to(part.dtype), part) for at, part in got)
        found.bf16 = found.bf16 and all(_equal(want[at].to(torch.bfloat16), part) for at, part in got)
        found.coarse = found.coarse and all(_equal(want[at], part.to(torch.bfloat16)) for at, part in got)
        if want.dtype != candidate.dtype:
            want = want.to(candidate.dtype)
            wrong = [(at, part) for at, part in got if not same_bytes(want[at], part)]
            if not wrong:
                continue  # rounding alone makes no place wrong
        found.unequal += _experts(want, wrong, start) if each else [(start, stop)]
        places = places or pieces_of(cut, candidate.shape, parallel)  # ranks cut the vocabulary with its padding
        found.places += _wrong_places(places, found.places, want, wrong, start)
        found.sites += [site for site in _sites(rule, name, want, candidate, start) if site not in found.sites]
        delta, base = _sampled(want, wrong)
        squares, norm = squares + delta, norm + base
    found.once = found.once and not found.equal
    found.bf16, found.coarse = found.bf16 and not found.equal, found.coarse and not found.equal
    found.unequal = sorted(found.unequal) if each else joined(found.unequal)
    found.places.sort()
    found.size = (squares / norm) ** 0.5 if norm else float("inf") if squares else 0.0
    return found


class Row:
    """What one row costs, and how many have to be taken together."""

    def __init__(self, *tensors: Tensor) -> None:
        self.unit = max(tensor.unit for tensor in tensors)
        widest = max(tensors, key=lambda tensor: tensor.dtype.itemsize)
        self.bytes = widest.dtype.itemsize
        for length in widest.shape[1:]:
            self.bytes *= length


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether two unread tensors hold the same bytes; stops at the first that differs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    row = Row(one, other)
    return all(same_rows(one, other, start, stop) for start, stop in steps(one.shape[0], row.unit, row.bytes))


def same_rows(one: Tensor, other: Tensor, start: int, stop: int, other_start: int | None = None) -> bool:
    """Whether rows start..stop of one tensor are, byte by byte, those of another (from `other_start` on)."""
    at = start if other_start is None else other_start
    if one.empty(start, stop) and other.empty(at, at + stop - start):
        return True
    whole = one.rows(start, stop)
    return all(same_bytes(whole[place], part) for place, part in other.parts(at, at + stop - start))


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Adjacent row ranges as one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype:
        wide = torch.promote_types(one.dtype, other.dtype)
        one, other = one.to(wide), other.to(wide)
    return same_bytes(one, other)


def _experts(want: torch.Tensor, wrong: Iterable[Part], start: int) -> list[tuple[int, int]]:
    """Each wrong expert of a window, as a range of its own."""
    found = set()
    for at, part in wrong:
        alone = len(part) == 1
        found |= {start + at[0].start + i for i in range(len(part)) if alone or not same_bytes(want[at][i], part[i])}
    return [(e, e + 1) for e in found]


def _wrong_places(
    places: Mapping[ShardPlace, list[Place]], known: list[ShardPlace], want: torch.Tensor, wrong: list[Part], start: int
) -> list[ShardPlace]:
    """Coordinates, not known yet, whose piece of these rows (from row `start` of the tensor on) is wrong."""
    found = []
    for place, regions in places.items():
        if place not in known and any(_differs(region, want, part, start) for region in regions for part in wrong):
            found.append(place)
    return found


def _differs(region: Place, want: torch.Tensor, wrong: Part, start: int) -> bool:
    """Whether a region of the tensor is touched by what is wrong inside one part of a window."""
    at, part = wrong
    own = (slice(region[0].start - start, region[0].stop - start), *region[1:])
    both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(own, at, strict=True)]
    if any(one.start >= one.stop for one in both):
        return False
    inside = tuple(slice(one.start - b.start, one.stop - b.start) for one, b in zip(both, at, strict=True))
    return tuple(both) == at or not same_bytes(want[tuple(both)].contiguous(), part[inside].contiguous())


def _sites(rule: Rule, name: str, want: torch.Tensor, candidate: Tensor, start: int) -> list[str]:
    expected: dict[Site, torch.Tensor] = rule.parts(name, want)
    if len(expected) == 1:
        return [str(site) for site in expected]
    parts = rule.parts(name, candidate.rows(start, start + len(want)))
    return [str(site) for site, part in parts.items() if not same_bytes(part, expected[site])]


def _sampled(want: torch.Tensor, wrong: list[Part]) -> tuple[float, float]:
    step = max(1, sum(part.numel() for _, part in wrong) // SAMPLE)
    w, g = (
        torch.cat(found).double()
        for found in zip(*((want[at].flatten()[::step], part.flatten()[::step]) for at, part in wrong), strict=True)
    )
    finite = w.isfinite() & g.isfinite()
    return float((g - w)[finite].square().sum()), float(w[finite].square().sum())
