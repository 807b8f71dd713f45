"""Which relation explains a wrong tensor: candidate = relation(reference), said forwards and checked on every byte.

A relation is claimed only when applying it to the reference reproduces the candidate's bytes, all of them.  Whole tensors and experts
are found again by their samples, rows by their hashes, so nothing is searched by trying.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from bisect_hooks.table import Made, Rule

from bisect_tool.arithmetic import constant, constant_change, fresh, moved, of_one
from bisect_tool.compare import Compared, bits, joined, same_bytes, same_tensor
from bisect_tool.extent import MATRIX, VECTOR, differing, extent, of_experts, placed, said
from bisect_tool.faults import Proof, Relation, without_layer
from bisect_tool.index import Index
from bisect_tool.orders import WAYS, Change, reordered
from bisect_tool.places import Tensor
from bisect_tool.quantised import before_packing, scales_rounded
from bisect_tool.sides import Cast

# a matrix with more bytes than this is not searched for a change inside it
LARGEST = 4 << 30
# with fewer numbers than this a rounding fits by chance; more blocks of rows than this are not told one by one
FEW, BLOCKS = 16, 8


@dataclass(frozen=True, slots=True)
class Wrong:
    """A candidate tensor that is not what the table makes of the reference (`expected`, in the dtype it is stored in).

    rows  of the candidate that are compared: its vocabulary may be padded
    """

    rule: Rule
    made: Made
    expected: Tensor
    candidate: Tensor
    compared: Compared
    rows: int


@dataclass(frozen=True)
class Search:
    """What is known besides the tensor: the rest of the reference, and what the candidate's args say of it.

    layer_of  the layer of a made name · ways  tensor parallel sizes to think of · std  of a fresh initialisation
    origin    where neither side is the reference, what the reference has under a made name
    """

    index: Index = field(repr=False)
    layer_of: Callable[[str], int | None] = field(repr=False)
    ways: Sequence[int] = WAYS
    std: tuple[float, ...] = (0.02,)
    origin: Callable[[str], Tensor | None] = field(default=lambda _name: None, repr=False)

    def explain(self, wrong: Wrong) -> tuple[Relation, Proof]:
        """The shortest relation that reproduces every byte, with its proof; `unknown` when none does."""
        for find in (self._constant, self._stale, self._whole, self._experts, self._scales, self._inside, self._before):
            found = find(wrong)
            if found is not None:
                return found
        each = self._by_rows(wrong)
        tried = "no one relation" if each else "no relation tried"
        proof = Proof("put what the table makes of the reference in its place", None, 0.0, f"{tried} reproduces the candidate's bytes")
        return Relation("unknown", where(wrong) | ({"each": each} if each else {})), proof

    def _constant(self, wrong: Wrong) -> Found:
        value = constant(wrong.candidate, 0, wrong.rows)
        return None if value is None else _claimed(constant_change(value))

    def _stale(self, wrong: Wrong) -> Found:
        """An export that holds what the reference does, and not what the candidate made of it."""
        origin = self.origin(wrong.made.name)
        candidate = wrong.candidate
        if origin is None or not same_tensor(Cast(origin, candidate.dtype), candidate):
            return None
        proof = Proof("compare with the reference, every byte", None, 0.0, "what the candidate holds differs from it by {before}")
        return Relation("stale", {"of": "reference"}), proof

    def _whole(self, wrong: Wrong) -> Found:
        """The candidate tensor is, whole, another tensor of the reference: of another layer, or of another kind."""
        own = wrong.made.name
        names = self.index.whole(wrong.candidate, own)
        if not names:
            return None
        layer = self.layer_of(own)
        alike = [name for name in names if without_layer(name) == without_layer(own)]
        chosen = alike[0] if alike and layer is not None else names[0]
        also = tuple({"kind": "other-tensor", "detail": {"name": name}} for name in names if name != chosen)
        other = self.layer_of(chosen)
        if alike and layer is not None and other is not None:
            experiment = f"put the reference's layer {other} in the place of layer {layer}"
            control = f"the tensor of layer {layer} itself differs by {{before}}"
            return Relation("other-layer", {"offset": other - layer}, also), Proof(experiment, None, 0.0, control)
        pair = " = ".join(sorted((without_layer(own), without_layer(chosen))))
        proof = Proof(f"compare with what the table makes for {chosen}, every byte", None, 0.0, "its own tensor differs by {before}")
        return Relation("other-tensor", {"name": chosen}, also, rule=f"{pair} {layer if other == layer else chosen}"), proof

    def _experts(self, wrong: Wrong) -> Found:
        """Each wrong expert is one of the reference's experts, but not its own."""
        if not wrong.made.cut.expert or len(wrong.candidate.shape) != 3:
            return None
        own, count = wrong.made.name, wrong.candidate.shape[0]
        unequal = wrong_experts(wrong)
        sources: dict[int, tuple[str, int]] = {}
        for e in unequal:
            source = self.index.expert(wrong.candidate, e, own)
            if source is None:
                return None
            sources[e] = source
        if any(name != own for name, _ in sources.values()):
            return self._other_layers(wrong, sources)
        mapped = [sources[e][1] if e in sources else e for e in range(count)]
        if sorted(mapped) == list(range(count)):
            proof = Proof("a permutation of the experts reproduces every byte", None, 0.0, f"in order, {len(unequal)} of {count} differ")
            return Relation("permutation", {"axis": 0, "unit": 1, "map": mapped}), proof
        said, modulus = map_of(mapped)
        detail = {"map": said or mapped, "modulus": modulus, "wrong": len(unequal), "of": count}
        if modulus is None:
            text = f"apply 'expert e holds expert {said}' to the reference" if said else "give each expert the one its map names"
            return Relation("duplicate", detail), Proof(
                f"{text}, compare every byte", None, 0.0, f"in their own places {len(unequal)} of {count} differ"
            )
        other = modulus * 2 if modulus * 2 < count else max(1, modulus // 2)
        missed = sum(e % other != f for e, f in enumerate(mapped))
        proof = Proof(
            f"apply 'expert e holds expert {said}' to the reference, compare every byte", None, 0.0,
            f"'e mod {other}' leaves {missed} of {count} experts different",
        )  # fmt: skip
        return Relation("duplicate", detail), proof

    def _other_layers(self, wrong: Wrong, sources: dict[int, tuple[str, int]]) -> Found:
        """Some experts are another layer's."""
        layer = self.layer_of(wrong.made.name)
        offsets = {(self.layer_of(name), f - e) for e, (name, f) in sources.items()}
        if layer is None or len(offsets) != 1:
            return None
        (other, shift) = next(iter(offsets))
        if other is None or shift:
            return None
        detail = {"offset": other - layer, "experts": sorted(sources)}
        proof = Proof(
            f"put {len(sources)} experts of the reference's layer {other} in their places", None, 0.0,
            f"the experts of layer {layer} itself differ by {{before}}",
        )  # fmt: skip
        return Relation("other-layer", detail), proof

    def _inside(self, wrong: Wrong) -> Found:
        """One change inside the tensor, or the same change inside each wrong expert."""
        if wrong.made.cut.expert and len(wrong.candidate.shape) == 3:
            return self._inside_experts(wrong)
        if math.prod(wrong.expected.shape) * wrong.expected.dtype.itemsize > LARGEST:
            return None
        want, got = wrong.expected.rows(0, wrong.rows), wrong.candidate.rows(0, wrong.rows)
        change = reordered(want, got, self.ways)
        if change is not None:
            return _claimed(change)
        found = self._narrow([lambda: (want, got)])
        return None if found is None else _claimed(*found)

    def _inside_experts(self, wrong: Wrong) -> Found:
        unequal = wrong_experts(wrong)
        want, got = wrong.expected.rows(unequal[0], unequal[0] + 1)[0], wrong.candidate.rows(unequal[0], unequal[0] + 1)[0]
        change = reordered(want, got, self.ways) or self._numbers(want, got)
        if change is None:
            return self._inside_each(wrong, unequal)
        if "axis" in change.detail:  # of the whole tensor, experts in front
            change = replace(change, detail=change.detail | {"axis": change.detail["axis"] + 1})
        count = wrong.candidate.shape[0]
        some = {} if len(unequal) == count else of_experts(unequal, count)
        if change.kind == "init" and "std" in change.detail:
            std = float(change.detail["std"])
            alike = all(fresh(wrong.expected.rows(e, e + 1)[0], wrong.candidate.rows(e, e + 1)[0], std) for e in unequal[1:])
            return _claimed(change, some) if alike else None
        for e in unequal[1:]:
            made = change.apply(wrong.expected.rows(e, e + 1)[0])
            if not same_bytes(made.contiguous(), wrong.candidate.rows(e, e + 1)[0].contiguous()):
                return None
        return _claimed(change, some)

    def _inside_each(self, wrong: Wrong, unequal: Sequence[int]) -> Found:
        """The same change to some rows or columns of each wrong expert."""

        def pair(e: int) -> Pair:
            return wrong.expected.rows(e, e + 1)[0], wrong.candidate.rows(e, e + 1)[0]

        found = self._narrow([partial(pair, e) for e in unequal])
        if found is None:
            return None
        change, place = found
        if "axis" in change.detail:  # of the whole tensor, experts in front
            change = replace(change, detail=change.detail | {"axis": change.detail["axis"] + 1})
        return _claimed(change, of_experts(unequal, wrong.candidate.shape[0]) | place)

    def _narrow(self, pairs: Sequence[Callable[[], Pair]]) -> tuple[Change, dict[str, Any]] | None:
        """One change to what differs of each pair: a head's rows, a column, some elements of a vector; and where, if that is one place."""
        want, got = pairs[0]()
        names = MATRIX if want.dim() > 1 else VECTOR
        marks = differing(want, got)
        last = min(want.dim(), len(names)) - 1
        # of a vector the whole comes first: numbers that are alike on both sides are no place
        ways = ((0,), (last,), (0, last)) if last else ((), (0,))
        for axes in dict.fromkeys(tuple(axis for axis in way if not bool(marks[axis].all())) for way in ways):
            change = self._within(_cut(want, marks, axes), _cut(got, marks, axes), axes)
            if change is None:
                continue
            place = placed([marks[axis] for axis in axes], [names[axis] for axis in axes])
            for other in pairs[1:]:
                here, there = other()
                own = differing(here, there)
                if not same_bytes(change.apply(_cut(here, own, axes)).contiguous(), _cut(there, own, axes)):
                    break
                if placed([own[axis] for axis in axes], [names[axis] for axis in axes]) != place:
                    place = {}
            else:
                return change, place
        return None

    def _within(self, want: torch.Tensor, got: torch.Tensor, axes: Sequence[int]) -> Change | None:
        """What was done to a block that was cut out of a tensor along some axes."""
        if axes == (0,) and want.dim() > 1:  # a channel's taps in another order; rows that moved would tell of the whole
            change = reordered(want, got, ())
            if change is not None and change.kind in ("permutation", "halves-swapped") and change.detail["axis"]:
                return change
        change = self._numbers(want, got)
        if want.numel() == 1 and (change is None or change.kind not in ("zero", "nan")):
            return of_one(want, got) if want.dim() == 1 else None
        if change is None or not axes:
            return change
        by_chance = change.kind == "rounded" and want.numel() < FEW
        infinite = change.kind == "init" and math.isinf(change.detail.get("value", 0.0))  # no initialisation: told as what it is
        return None if by_chance or infinite else change

    def _by_rows(self, wrong: Wrong) -> list[dict[str, Any]]:
        """Blocks of rows that each have a relation of their own; none where some block has none."""
        if len(wrong.expected.shape) != 2 or math.prod(wrong.expected.shape) * wrong.expected.dtype.itemsize > LARGEST:
            return []
        want, got = wrong.expected.rows(0, wrong.rows), wrong.candidate.rows(0, wrong.rows)
        ranges = joined((i, i + 1) for i in differing(want, got)[0].nonzero().flatten().tolist())
        if not 1 < len(ranges) <= BLOCKS:
            return []
        changes = [self._numbers(want[start:stop], got[start:stop].contiguous()) for start, stop in ranges]
        if any(change is None for change in changes):
            return []
        return [
            {"kind": change.kind, "detail": change.detail | {"rows": [[start, stop]]}}
            for change, (start, stop) in zip(changes, ranges, strict=True)
            if change is not None
        ]

    def _before(self, wrong: Wrong) -> Found:
        """A rounding that was done before the table put the tensor together."""
        halves = wrong.made.cut.expert and any(parts == 2 for _, _, parts in wrong.made.cut.axes)
        change = before_packing(wrong.expected, wrong.candidate, halves=halves)
        return None if change is None else _claimed(change)

    def _scales(self, wrong: Wrong) -> Found:
        """FP8 that is right but for its scales."""
        change = scales_rounded(wrong.expected, wrong.candidate)
        return None if change is None else _claimed(change)

    def _numbers(self, want: torch.Tensor, got: torch.Tensor) -> Change | None:
        flat = bits(got).flatten()
        if bool((flat == flat[0]).all()):
            return constant_change(float(got.flatten()[0]))
        change = moved(want, got)
        if change is not None:
            return change
        return next((found for std in self.std if (found := fresh(want, got, std)) is not None), None)


Found = tuple[Relation, Proof] | None
Pair = tuple[torch.Tensor, torch.Tensor]


def _claimed(change: Change, more: dict[str, Any] | None = None) -> tuple[Relation, Proof]:
    detail = change.detail | (more or {})
    after = None if change.kind == "init" and "std" in change.detail else 0.0
    rule = f"{change.kind} {change.detail}"
    done, compared, how = change.experiment.partition(", compare")
    return Relation(change.kind, detail, change.also, rule), Proof(f"{done}{said(more or {})}{compared}{how}", None, after, change.control)


def _cut(block: torch.Tensor, marks: Sequence[torch.Tensor], axes: Sequence[int]) -> torch.Tensor:
    """What is marked along some axes."""
    for axis in axes:
        block = block.index_select(axis, marks[axis].nonzero().flatten())
    return block.contiguous()


def wrong_experts(wrong: Wrong) -> list[int]:
    """Experts that are not what they should be, from the row ranges that differ."""
    ranged = [e for start, stop in wrong.compared.unequal for e in range(start, stop)]
    expected, candidate = wrong.expected, wrong.candidate
    if all(stop - start == 1 for start, stop in wrong.compared.unequal):
        return ranged
    return [e for e in ranged if not same_bytes(expected.rows(e, e + 1).contiguous(), candidate.rows(e, e + 1).contiguous())]


def where(wrong: Wrong) -> dict[str, Any]:
    """What can be said of a difference that nothing explains: which part of the tensor it covers."""
    stacked = wrong.made.cut.expert and len(wrong.candidate.shape) == 3
    return extent(wrong.expected, wrong.candidate, wrong.compared.unequal, stacked=stacked)


def map_of(mapped: Sequence[int]) -> tuple[str | None, int | None]:
    """A map of experts in words, e for the expert, and its modulus where it has one; (None, None) for one that no formula gives."""
    modulus = next((m for m in range(1, len(mapped)) if all(f == e % m for e, f in enumerate(mapped))), None)
    return f"e mod {modulus}" if modulus and modulus > 1 else formula(mapped), modulus


def formula(mapped: Sequence[int]) -> str | None:
    """A map of experts in words, e for the expert: blocks that start elsewhere (E14), or hold one expert again and again (E04, E08)."""
    count = len(mapped)
    if len(set(mapped)) == 1:
        return str(mapped[0])
    for n in (size for size in range(2, count + 1) if count % size == 0):
        kept = mapped[0]
        if kept < n and all(f == e - e % n + kept for e, f in enumerate(mapped)):
            return f"e - e mod {n}" + (f" + {kept}" if kept else "")
        if n < count and mapped[0] == 0:
            stride = mapped[n]
            if all(f == e // n * stride + e % n for e, f in enumerate(mapped)):
                return f"(e div {n}) * {stride} + e mod {n}"
    return None
