"""Where inside a tensor a change lies: which rows, columns, taps, elements and experts, how many of how many; as data and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bisect_tool.compare import Row, bits, joined
from bisect_tool.faults import counted, number, span
from bisect_tool.places import Tensor, steps

# what the axes of a tensor are called: of a vector, of a matrix or a convolution's [channels 1 taps], of stacked experts
VECTOR, MATRIX, STACKED = ("elements",), ("rows", "columns", "taps"), ("experts", "rows", "columns")
# ranges and experts that are listed at most
RANGES, EXPERTS = 16, 64


def differing(want: torch.Tensor, got: torch.Tensor) -> list[torch.Tensor]:
    """For each axis, at which of its indices some byte differs."""
    return _marks(bits(want) != bits(got))


def placed(marks: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, Any]:
    """The ranges of each axis that are marked; nothing of an axis that is marked all over."""
    return {name: _ranges(mark) for name, mark in zip(names, marks, strict=False) if not bool(mark.all())}


def of_experts(wrong: Sequence[int], count: int) -> dict[str, Any]:
    """Which experts, and how many of how many."""
    return {"experts": list(wrong[:EXPERTS]), "wrong": len(wrong), "of": count}


def extent(expected: Tensor, candidate: Tensor, unequal: Sequence[tuple[int, int]], *, stacked: bool) -> dict[str, Any]:
    """Where two tensors differ, from the ranges of rows that hold a difference; a window at a time, however large they are.

    counts  of the rows (columns, ..) that not all differ: how many of how many
    nan, infinite, first  elements that are so on the candidate's side alone, and the first of them
    values  reference and candidate, of a single element
    """
    marks = [torch.zeros(size, dtype=torch.bool) for size in expected.shape]
    odd, found, values = {"nan": 0, "infinite": 0}, dict[str, Any](), list[Any]()
    differ, row = 0, Row(expected, candidate)
    for first, last in unequal:
        for a, b in steps(last - first, row.unit, row.bytes):
            want, got = (side.rows(first + a, first + b) for side in (expected, candidate))
            changed = bits(want) != bits(got)
            differ += int(changed.sum())
            here = _marks(changed)
            marks[0][first + a : first + b] |= here[0]
            for mark, more in zip(marks[1:], here[1:], strict=True):
                mark |= more
            wide = got.float()
            nan, infinite = wide.isnan() & changed, wide.isinf() & changed
            odd["nan"] += int(nan.sum())
            odd["infinite"] += int(infinite.sum())
            if "first" not in found and bool((nan | infinite).any()):
                at = (nan | infinite).nonzero()[0].tolist()
                found["first"] = [at[0] + first + a, *at[1:]]
            if differ == 1 and not values and bool(changed.any()):
                values = [number(float(side[changed])) for side in (want, got)]
    names = VECTOR if len(marks) == 1 else STACKED if stacked else MATRIX
    some = placed(marks, names)
    counts = {name: [int(mark.sum()), len(mark)] for name, mark in zip(names, marks, strict=False) if name in some}
    if stacked:
        some.pop("experts", None)
        counts.pop("experts", None)
        some |= of_experts(marks[0].nonzero().flatten().tolist(), len(marks[0]))
    return some | ({"counts": counts} if counts else {}) | {k: n for k, n in odd.items() if n} | found | _alone(differ, values)


def said(detail: Mapping[str, Any]) -> str:
    """' in row 3, column 7, in 2 of 16 experts (4 and 9)': which part of a tensor a change covers, where it is not all of it."""
    places = [_said(name, detail) for name in ("elements", "rows", "columns", "taps") if isinstance(detail.get(name), list)]
    inside = f" in {', '.join(places)}" if places else ""
    if "experts" not in detail or "wrong" not in detail:
        return inside
    more = " .." if len(detail["experts"]) > 8 else ""
    return f"{inside and f'{inside},'} in {detail['wrong']} of {detail['of']} experts ({span(detail['experts'][:8])}{more})"


def odd(detail: Mapping[str, Any]) -> str:
    """'2 elements are NaN, the first at [3][4]', or the two values where one element differs; empty where there is nothing to say."""
    if "first" in detail:
        kinds = [(detail[key], word) for key, word in (("nan", "NaN"), ("infinite", "infinite")) if key in detail]
        told = " and ".join(f"{counted(many, 'element')} {'is' if many == 1 else 'are'} {word}" for many, word in kinds)
        at = "".join(f"[{i}]" for i in detail["first"])
        return f"{told}, {'at' if sum(many for many, _ in kinds) == 1 else 'the first at'} {at}"
    if "values" in detail:
        here, there = (f"{value:.4g}" if isinstance(value, float) else value for value in detail["values"])
        return f"the reference's is {here}, the candidate's {there}"
    return ""


def _said(name: str, detail: Mapping[str, Any]) -> str:
    ranges = detail[name]
    shown = [f"{start} to {stop - 1}" if stop > start + 1 else f"{start}" for start, stop in ranges[:4]]
    one = len(ranges) == 1 and ranges[0][1] == ranges[0][0] + 1
    count = detail.get("counts", {}).get(name)
    of = f" ({count[0]} of {count[1]})" if count else ""
    return f"{name[:-1] if one else name} {', '.join(shown)}{' ..' if len(ranges) > 4 else ''}{of}"


def _marks(changed: torch.Tensor) -> list[torch.Tensor]:
    axes = range(changed.dim())
    return [changed if changed.dim() == 1 else changed.any(dim=tuple(i for i in axes if i != axis)) for axis in axes]


def _ranges(mark: torch.Tensor) -> list[list[int]]:
    return [[start, stop] for start, stop in joined((i, i + 1) for i in mark.nonzero().flatten().tolist())[:RANGES]]


def _alone(differ: int, values: Sequence[Any]) -> dict[str, Any]:
    return {"values": list(values)} if differ == 1 and values else {}
