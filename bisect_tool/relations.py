"""Which relation explains wrong tensors: candidate = relation(reference), said forwards and checked on every byte.

A relation is claimed only when applying it to the reference reproduces the candidate's bytes, all of them.  Blocks are found
again by their hashes, so nothing is searched by trying.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from bisect_hooks.table import Made, Rule

from bisect_tool.faults import Proof, Relation, without_layer
from bisect_tool.measure import Difference


@dataclass(frozen=True, slots=True)
class Wrong:
    """A candidate tensor that is not what the table makes of the reference (both in the stored dtype)."""

    rule: Rule
    made: Made
    stored: str
    expected: torch.Tensor
    candidate: torch.Tensor
    difference: Difference


Expected = Callable[[str], torch.Tensor]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of its width, so that equality is equality of bytes, NaN included."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality of shape, dtype and every byte."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def digest(tensor: torch.Tensor) -> bytes:
    """A hash of a tensor's bytes."""
    return hashlib.blake2b(bits(tensor).numpy().tobytes(), digest_size=16).digest()


class Blocks:
    """Hashes of everything the table makes of the reference: whole tensors and, for experts, one slice each."""

    def __init__(self, keys: Sequence[tuple[Rule, Made]], expected: Expected) -> None:
        self.whole: dict[tuple[tuple[int, ...], bytes], list[str]] = {}
        self.slices: dict[tuple[str, bytes], list[tuple[str, int]]] = {}
        self.tail: dict[str, str] = {made.name: without_layer(made.name) for _, made in keys}
        for _, made in keys:
            tensor = expected(made.name)
            if _constant(tensor):
                continue  # constant tensors can't bear witness
            self.whole.setdefault((tuple(tensor.shape), digest(tensor)), []).append(made.name)
            if made.cut.expert:
                for e, block in enumerate(tensor):
                    self.slices.setdefault((self.tail[made.name], digest(block)), []).append((made.name, e))


def explain(wrong: Wrong, blocks: Blocks, expected: Expected, layer_of: Callable[[str], int | None]) -> tuple[Relation, Proof]:
    """The shortest relation that reproduces every byte of the candidate, with its proof; `unknown` when none does."""
    for find in (_constant_relation, _whole, _experts, _rows, _halves):
        found = find(wrong, blocks, expected, layer_of)
        if found is not None:
            return found
    before = wrong.difference.relative_rms
    proof = Proof(
        "put what the table makes of the reference in its place", before, 0.0, "no relation tried reproduces the candidate's bytes"
    )
    return Relation("unknown"), proof


Found = tuple[Relation, Proof] | None


def _constant(tensor: torch.Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def _constant_relation(wrong: Wrong, *_: object) -> Found:
    tensor, before = wrong.candidate, wrong.difference.relative_rms
    if bool((tensor == 0).all()):
        return Relation("zero"), Proof("every element compared with 0", before, 0.0, "the reference's tensor is not zero")
    if tensor.is_floating_point() and bool(tensor.isnan().all()):
        return Relation("nan"), Proof("every element is NaN", before, 0.0, "the reference's tensor is finite")
    return None


def _whole(wrong: Wrong, blocks: Blocks, expected: Expected, layer_of: Callable[[str], int | None]) -> Found:
    """The candidate tensor is, whole, another tensor of the reference: of another layer, or of another kind."""
    names = blocks.whole.get((tuple(wrong.candidate.shape), digest(wrong.candidate)), [])
    names = [name for name in names if name != wrong.made.name and same_bytes(expected(name), wrong.candidate)]
    if not names:
        return None
    own, before = wrong.made.name, wrong.difference.relative_rms
    same_kind = [name for name in names if blocks.tail[name] == blocks.tail[own]]
    layer = layer_of(own)
    chosen = same_kind[0] if same_kind and layer is not None else names[0]
    also = tuple({"kind": "other-tensor", "detail": {"name": name}} for name in names if name != chosen)
    if same_kind and layer is not None:
        other = layer_of(same_kind[0])
        assert other is not None
        offset = other - layer
        control = f"the tensor of layer {layer} itself differs by {before:.2g}"
        return Relation("other-layer", {"offset": offset}, also), Proof(
            f"put the reference's layer {other} in the place of layer {layer}", before, 0.0, control
        )
    name = names[0]
    pair = " = ".join(sorted((blocks.tail[own], blocks.tail[name])))
    control = f"its own tensor differs by {before:.2g}"
    proof = Proof(f"compare with what the table makes for {name}, every byte", before, 0.0, control)
    return Relation(
        "other-tensor", {"name": name}, also, rule=f"{pair} {layer_of(own) if layer_of(name) == layer_of(own) else name}"
    ), proof


def _experts(wrong: Wrong, blocks: Blocks, expected: Expected, layer_of: Callable[[str], int | None]) -> Found:
    """Each expert is one of the reference's experts, but not its own."""
    if not wrong.made.cut.expert:
        return None
    own, tail, count = wrong.made.name, blocks.tail[wrong.made.name], wrong.candidate.shape[0]
    sources: list[tuple[str, int]] = []
    for e, block in enumerate(wrong.candidate):
        places = blocks.slices.get((tail, digest(block)), [])
        places = [(name, f) for name, f in places if same_bytes(expected(name)[f], block)]
        if not places:
            return None
        sources.append(min(places, key=lambda place, e=e: (place != (own, e), place[0] != own, place[1])))  # type: ignore[misc]
    if any(name != own for name, _ in sources):
        return None
    mapped = [f for _, f in sources]
    wrong_ones = [e for e, f in enumerate(mapped) if e != f]
    before = wrong.difference.relative_rms
    if sorted(mapped) == list(range(count)):
        shown = "a permutation of the experts reproduces every byte"
        return Relation("permutation", {"axis": 0, "unit": 1, "map": mapped}), Proof(
            shown, before, 0.0, f"in order, {len(wrong_ones)} of {count} differ"
        )
    modulus = next((m for m in range(1, count) if all(f == e % m for e, f in enumerate(mapped))), None)
    detail = {"map": f"e mod {modulus}" if modulus else mapped, "modulus": modulus, "wrong": len(wrong_ones), "of": count}
    if modulus is None:
        return Relation("duplicate", detail), Proof(
            "give each expert the one its map names, compare every byte", before, 0.0, "its own expert differs"
        )
    other = modulus * 2 if modulus * 2 < count else max(1, modulus // 2)
    missed = sum(e % other != f for e, f in enumerate(mapped))
    proof = Proof(
        f"apply 'expert e holds expert e mod {modulus}' to the reference, compare every byte", before, 0.0,
        f"'e mod {other}' leaves {missed} of {count} experts different",
    )  # fmt: skip
    return Relation("duplicate", detail), proof


def _rows(wrong: Wrong, *_: object) -> Found:
    """The rows are the reference's rows in another order."""
    if wrong.candidate.dim() < 2 or wrong.candidate.shape != wrong.expected.shape or wrong.made.cut.expert:
        return None
    at: dict[bytes, int] = {}
    for i, row in enumerate(wrong.expected):
        if at.setdefault(digest(row), i) != i:
            return None  # two equal rows: no order can be told
    mapped = [at.get(digest(row), -1) for row in wrong.candidate]
    if sorted(mapped) != list(range(len(mapped))):
        return None
    assert same_bytes(wrong.expected[mapped], wrong.candidate)
    moved = sum(i != j for i, j in enumerate(mapped))
    before = wrong.difference.relative_rms
    half = len(mapped) // 2
    if mapped == [*range(half, 2 * half), *range(half)]:
        proof = Proof("exchange the two halves, compare every byte", before, 0.0, "in order, every row differs")
        return Relation("halves-swapped", {"axis": 0}), proof
    unit = _unit(mapped)
    blocks = [j // unit for j in mapped[::unit]]
    proof = Proof(
        "put the reference's rows in the order of the map, compare every byte",
        before,
        0.0,
        f"in their own order {moved} of {len(mapped)} rows differ",
    )
    return Relation("permutation", {"axis": 0, "unit": unit, "map": blocks}), proof


def _unit(mapped: list[int]) -> int:
    """The largest block of rows that moves as one."""
    for unit in range(len(mapped) // 2, 1, -1):
        if len(mapped) % unit == 0 and all(
            mapped[i] % unit == 0 and mapped[i : i + unit] == list(range(mapped[i], mapped[i] + unit)) for i in range(0, len(mapped), unit)
        ):
            return unit
    return 1


def _halves(wrong: Wrong, *_: object) -> Found:
    """Experts' or shared expert's gate and up rows exchanged, and square transposes."""
    before = wrong.difference.relative_rms
    for dim in range(wrong.candidate.dim()):
        parts = wrong.expected.chunk(2, dim)
        if len(parts) == 2 and parts[0].shape == parts[1].shape and same_bytes(torch.cat(parts[::-1], dim), wrong.candidate):
            return Relation("halves-swapped", {"axis": dim}), Proof(
                "exchange the two halves, compare every byte", before, 0.0, "in order, they differ"
            )
    if wrong.candidate.dim() >= 2 and same_bytes(wrong.expected.transpose(-1, -2).contiguous(), wrong.candidate):
        return Relation("transpose"), Proof("transpose the reference, compare every byte", before, 0.0, "as it is, it differs")
    return None


def even_cut(packed: Sequence[Wrong | tuple[torch.Tensor, torch.Tensor]], ways: Sequence[int]) -> int | None:
    """The tensor parallel size under which a packed projection, cut evenly with no regard to its parts, gives the candidate's parts.

    packed  every part in packing order, as Wrong or as (expected, candidate) where that part happens to be right
    """
    pairs = [(one.expected, one.candidate) if isinstance(one, Wrong) else one for one in packed]
    whole = torch.cat([expected for expected, _ in pairs])
    for size in ways:
        if len(whole) % size or any(len(expected) % size for expected, _ in pairs):
            continue
        local = [block.split([len(expected) // size for expected, _ in pairs]) for block in whole.chunk(size)]
        if all(same_bytes(torch.cat([rank[i] for rank in local]), candidate) for i, (_, candidate) in enumerate(pairs)):
            return size
    return None
