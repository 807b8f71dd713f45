"""Bytes against bytes, a window at a time.  Says what is equal and where it is not, and holds no opinion about why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
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


@dataclass(slots=True)
class Compared:
    """One pair of tensors.

    equal    every byte, after a widening where the dtypes differ
    once     equal after one rounding to the stored dtype
    bf16     equal after rounding the reference through bfloat16 · coarse  or after rounding the candidate so
    unequal  ranges of rows that hold a difference
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
        return asdict(self)

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
    if one.is_contiguous() and other.is_contiguous() and one.numel() * one.element_size() % 8 == 0:
        try:  # eight bytes at a time is three times as fast
            return torch.equal(one.flatten().view(torch.int64), other.flatten().view(torch.int64))
        except RuntimeError:  # a view that starts at an odd place of its storage
            pass
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
    places = pieces_of(cut, candidate.shape, parallel)  # ranks cut the vocabulary with its padding
    squares = norm = 0.0
    for start, stop in steps(count, row.unit, row.bytes):
        if expected.empty(start, stop) and candidate.empty(start, stop):
            found.holes += 2 * (stop - start) * row.bytes
            continue
        found.read += (stop - start) * row.bytes * 2
        want = expected.rows(start, stop)
        got = list(candidate.parts(start, stop))
        if all(_equal(want[place], part) for place, part in got):
            continue
        found.equal = False
        found.once = found.once and all(same_bytes(want[place].to(part.dtype), part) for place, part in got)
        found.bf16 = found.bf16 and all(_equal(want[place].to(torch.bfloat16), part) for place, part in got)
        found.coarse = found.coarse and all(_equal(want[place], part.to(torch.bfloat16)) for place, part in got)
        whole = candidate.rows(start, stop)
        cast = want.to(whole.dtype)
        if same_bytes(cast, whole):
            continue  # rounding alone makes no place wrong
        found.unequal.append((start, stop))
        found.places += _wrong_places(places, found.places, cast, whole, start)
        found.sites += [site for site in _sites(rule, name, cast, whole) if site not in found.sites]
        delta, base = _sampled(want, whole)
        squares, norm = squares + delta, norm + base
    found.once = found.once and not found.equal
    found.bf16, found.coarse = found.bf16 and not found.equal, found.coarse and not found.equal
    found.unequal = joined(found.unequal)
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


def _wrong_places(
    places: Mapping[ShardPlace, list[Place]], known: list[ShardPlace], want: torch.Tensor, got: torch.Tensor, start: int
) -> list[ShardPlace]:
    """Coordinates, not known yet, whose piece of these rows (from row `start` of the tensor on) is wrong."""
    found = []
    for place, regions in places.items():
        if place in known:
            continue
        for region in regions:
            rows = slice(max(region[0].start - start, 0), max(min(region[0].stop - start, len(want)), 0))
            here = (rows, *region[1:])
            if rows.start < rows.stop and not same_bytes(want[here].contiguous(), got[here].contiguous()):
                found.append(place)
                break
    return found


def _sites(rule: Rule, name: str, want: torch.Tensor, got: torch.Tensor) -> list[str]:
    expected = rule.parts(name, want)
    unequal: list[Site] = [site for site, part in rule.parts(name, got).items() if not same_bytes(part, expected[site])]
    return [str(site) for site in unequal]


def _sampled(want: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    step = max(1, want.numel() // SAMPLE)
    w, g = want.flatten()[::step].double(), got.flatten()[::step].double()
    finite = w.isfinite() & g.isfinite()
    return float((g - w)[finite].square().sum()), float(w[finite].square().sum())
