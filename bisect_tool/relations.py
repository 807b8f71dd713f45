"""Which relation explains a wrong tensor: candidate = relation(reference), said forwards and checked on every byte.

A relation is claimed only when applying it to the reference reproduces the candidate's bytes, all of them.  Whole tensors and experts
are found again by their samples, rows by their hashes, so nothing is searched by trying.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from bisect_hooks.table import Made, Rule

from bisect_tool.arithmetic import constant, constant_change, fresh, moved
from bisect_tool.compare import Compared, bits, joined, same_bytes, same_tensor
from bisect_tool.faults import Proof, Relation, without_layer
from bisect_tool.index import Index
from bisect_tool.orders import WAYS, Change, reordered
from bisect_tool.places import Tensor
from bisect_tool.quantised import before_packing, scales_rounded
from bisect_tool.sides import Cast

# a matrix with more bytes than this is not searched for a change inside it
LARGEST = 4 << 30


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
        proof = Proof(
            "put what the table makes of the reference in its place", None, 0.0, "no relation tried reproduces the candidate's bytes"
        )
        return Relation("unknown", where(wrong)), proof

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
        rows = _differing(want, got)
        if bool(rows.all()):
            change = self._numbers(want, got)
            return None if change is None else _claimed(change)
        # part of the rows: a head, a block
        change = self._numbers(want[rows], got[rows])
        if change is None:
            return None
        ranges = joined((i, i + 1) for i in rows.nonzero().flatten().tolist())
        return _claimed(change, {"rows": ranges[:16]})

    def _inside_experts(self, wrong: Wrong) -> Found:
        unequal = wrong_experts(wrong)
        want, got = wrong.expected.rows(unequal[0], unequal[0] + 1)[0], wrong.candidate.rows(unequal[0], unequal[0] + 1)[0]
        change = reordered(want, got, self.ways) or self._numbers(want, got)
        if change is None:
            return self._rows_of_experts(wrong, unequal)
        if "axis" in change.detail:  # of the whole tensor, experts in front
            change = replace(change, detail=change.detail | {"axis": change.detail["axis"] + 1})
        count = wrong.candidate.shape[0]
        some: dict[str, object] = {} if len(unequal) == count else {"experts": unequal[:64], "wrong": len(unequal), "of": count}
        if change.kind == "init" and "std" in change.detail:
            std = float(change.detail["std"])
            alike = all(fresh(wrong.expected.rows(e, e + 1)[0], wrong.candidate.rows(e, e + 1)[0], std) for e in unequal[1:])
            return _claimed(change, some) if alike else None
        for e in unequal[1:]:
            made = change.apply(wrong.expected.rows(e, e + 1)[0])
            if not same_bytes(made.contiguous(), wrong.candidate.rows(e, e + 1)[0].contiguous()):
                return None
        return _claimed(change, some)

    def _rows_of_experts(self, wrong: Wrong, unequal: Sequence[int]) -> Found:
        """The same change to some rows of each wrong expert."""
        pairs = []
        for e in unequal:
            want, got = (side.rows(e, e + 1)[0] for side in (wrong.expected, wrong.candidate))
            rows = _differing(want, got)
            pairs.append((e, rows, want[rows], got[rows].contiguous()))
        change = self._numbers(pairs[0][2], pairs[0][3])
        if change is None or any(not same_bytes(change.apply(want).contiguous(), got) for _, _, want, got in pairs[1:]):
            return None
        some: dict[str, object] = {"experts": list(unequal[:64]), "wrong": len(unequal), "of": wrong.candidate.shape[0]}
        if len(pairs) == 1:
            some["rows"] = joined((i, i + 1) for i in pairs[0][1].nonzero().flatten().tolist())[:16]
        return _claimed(change, some)

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


def _claimed(change: Change, more: dict[str, object] | None = None) -> tuple[Relation, Proof]:
    detail = change.detail | (more or {})
    after = None if change.kind == "init" and "std" in change.detail else 0.0
    rule = f"{change.kind} {change.detail}"
    return Relation(change.kind, detail, change.also, rule), Proof(change.experiment, None, after, change.control)


def wrong_experts(wrong: Wrong) -> list[int]:
    """Experts that are not what they should be, from the row ranges that differ."""
    ranged = [e for start, stop in wrong.compared.unequal for e in range(start, stop)]
    expected, candidate = wrong.expected, wrong.candidate
    if all(stop - start == 1 for start, stop in wrong.compared.unequal):
        return ranged
    return [e for e in ranged if not same_bytes(expected.rows(e, e + 1).contiguous(), candidate.rows(e, e + 1).contiguous())]


def where(wrong: Wrong) -> dict[str, object]:
    """What can be said of a difference that nothing explains: how much of the tensor it covers."""
    count = sum(stop - start for start, stop in wrong.compared.unequal)
    if wrong.made.cut.expert and len(wrong.candidate.shape) == 3:
        unequal = wrong_experts(wrong)
        return {"experts": unequal[:64], "wrong": len(unequal), "of": wrong.rows}
    return {} if count == wrong.rows else {"rows": wrong.compared.unequal[:16]}


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


def _differing(want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Rows whose bytes differ; of a vector all, because one value explains nothing."""
    return (bits(want) != bits(got)).flatten(1).any(1) if want.dim() > 1 else torch.ones(len(want), dtype=torch.bool)
