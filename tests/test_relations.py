"""A relation is claimed only where it reproduces every byte of the candidate; one flipped bit makes it unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site
from bisect_hooks.table import Cut, Made, Rule

from bisect_tool.compare import compare, same_bytes
from bisect_tool.extent import said
from bisect_tool.faults import Proof, Relation
from bisect_tool.index import Index
from bisect_tool.orders import even_cut
from bisect_tool.relations import Search, Wrong
from bisect_tool.sides import InMemory

FC1 = "decoder.layers.{}.mlp.experts.experts.linear_fc1.weight"
PROJ = "decoder.layers.{}.self_attention.linear_proj.weight"
QKV = "decoder.layers.{}.self_attention.linear_qkv.weight"
BIAS = "decoder.layers.{}.self_attention.linear_qkv.bias"
CONV = "decoder.layers.{}.self_attention.conv1d.weight"
NORM = "decoder.layers.{}.pre_mlp_layernorm.weight"
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
EXPERTS, ROWS = 16, 12


def model(layers: int = 3) -> dict[str, torch.Tensor]:
    """What the table makes of a reference: two square projections and stacked experts in each layer, constant norms."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    made = {EMBEDDING: random(20, 4), HEAD: random(20, 4)}
    for n in range(layers):
        made |= {FC1.format(n): random(EXPERTS, 6, 4), PROJ.format(n): random(ROWS, ROWS), QKV.format(n): random(ROWS, ROWS)}
        made |= {CONV.format(n): random(ROWS, 1, 4)}
        made |= {NORM.format(n): torch.ones(ROWS, dtype=torch.bfloat16)}
        # numbers repeat in a vector: no single one of these tells where it was
        made |= {BIAS.format(n): random(ROWS // 2).repeat_interleave(2)}
    return made


def layer_of(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("decoder.layers.") else None


def rule_of(name: str) -> tuple[Rule, Made]:
    made = Made(name, Cut("ep@0 etp@1/2") if "experts" in name else Cut("tp@0"))
    return Rule(Site("experts", layer_of(name) or 0, "fc1"), (f"reference of {name}",), (made,)), made


def related(name: str, candidate: torch.Tensor, reference: Mapping[str, torch.Tensor]) -> tuple[Relation, Proof]:
    rule, made = rule_of(name)
    expected = {one: InMemory(tensor) for one, tensor in reference.items()}
    here = InMemory(candidate.contiguous())
    compared = compare(name, rule, made.cut, False, expected[name], here, Parallel())
    experts = frozenset(one for one in reference if "experts" in one)
    search = Search(Index(tuple(reference), experts, expected.__getitem__), layer_of)
    return search.explain(Wrong(rule, made, expected[name], here, compared, len(candidate)))


Planted = tuple[str, Callable[[dict[str, torch.Tensor]], torch.Tensor], Relation]
HALF_MOD_4 = [*(e % 4 for e in range(8)), *range(8, EXPERTS)]
SHUFFLED = [3, 0, 1, 2, *range(4, EXPERTS)]
PLANTED: dict[str, Planted] = {
    "duplicate, e mod 4": (
        FC1.format(1),
        lambda made: made[FC1.format(1)][[e % 4 for e in range(EXPERTS)]],
        Relation("duplicate", {"map": "e mod 4", "modulus": 4, "wrong": 12, "of": EXPERTS}),
    ),
    "duplicate, by no modulus": (
        FC1.format(1),
        lambda made: made[FC1.format(1)][HALF_MOD_4],
        Relation("duplicate", {"map": HALF_MOD_4, "modulus": None, "wrong": 4, "of": EXPERTS}),
    ),
    "permutation of experts": (
        FC1.format(0),
        lambda made: made[FC1.format(0)][SHUFFLED],
        Relation("permutation", {"axis": 0, "unit": 1, "map": SHUFFLED}),
    ),
    "permutation of rows in fours": (
        PROJ.format(0),
        lambda made: made[PROJ.format(0)].reshape(3, 4, ROWS)[[1, 0, 2]].reshape(ROWS, ROWS),
        Relation("permutation", {"axis": 0, "unit": 4, "map": [1, 0, 2]}),
    ),
    "permutation of single rows": (
        PROJ.format(0),
        lambda made: made[PROJ.format(0)].flip(0),
        Relation("permutation", {"axis": 0, "unit": 1, "map": list(range(ROWS))[::-1]}),
    ),
    "permutation of a vector's rows": (
        BIAS.format(1),
        lambda made: made[BIAS.format(1)].reshape(3, 4)[[2, 0, 1]].flatten(),
        Relation("permutation", {"axis": 0, "unit": 4, "map": [2, 0, 1]}),
    ),
    "permutation of two channels of a vector": (
        BIAS.format(1),
        lambda made: made[BIAS.format(1)][[0, 1, 8, 3, 4, 5, 6, 7, 2, 9, 10, 11]],
        Relation("permutation", {"axis": 0, "unit": 1, "map": [0, 1, 8, 3, 4, 5, 6, 7, 2, 9, 10, 11]}),
    ),
    "permutation of a convolution's taps": (
        CONV.format(1),
        lambda made: made[CONV.format(1)].flip(2),
        Relation("permutation", {"axis": 2, "unit": 1, "map": [3, 2, 1, 0]}),
    ),
    "halves of rows swapped": (PROJ.format(2), lambda made: made[PROJ.format(2)].roll(6, 0), Relation("halves-swapped", {"axis": 0})),
    "halves of columns swapped": (PROJ.format(2), lambda made: made[PROJ.format(2)].roll(6, 1), Relation("halves-swapped", {"axis": 1})),
    "gate and up of every expert swapped": (
        FC1.format(2),
        lambda made: made[FC1.format(2)].roll(3, 1),
        Relation("halves-swapped", {"axis": 1}),
    ),
    "transpose": (QKV.format(1), lambda made: made[QKV.format(1)].T.contiguous(), Relation("transpose")),
    "zero": (QKV.format(1), lambda made: torch.zeros_like(made[QKV.format(1)]), Relation("zero")),
    "nan": (QKV.format(1), lambda made: torch.full_like(made[QKV.format(1)], torch.nan), Relation("nan")),
    "other layer": (QKV.format(0), lambda made: made[QKV.format(2)].clone(), Relation("other-layer", {"offset": 2})),
    "other layer's experts": (FC1.format(2), lambda made: made[FC1.format(1)].clone(), Relation("other-layer", {"offset": -1})),
    "other tensor": (QKV.format(1), lambda made: made[PROJ.format(1)].clone(), Relation("other-tensor", {"name": PROJ.format(1)})),
    "head is the embedding": (HEAD, lambda made: made[EMBEDDING].clone(), Relation("other-tensor", {"name": EMBEDDING})),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_was_done_to_a_tensor_is_found(planted: str) -> None:
    made = model()
    name, plant, expected = PLANTED[planted]
    relation, proof = related(name, plant(made), made)
    assert (relation.kind, relation.detail, relation.also) == (expected.kind, expected.detail, ())
    assert (proof.before, proof.after) == (None, 0.0)  # what it was before is measured once, for the fault
    assert proof.experiment
    assert proof.control


@pytest.mark.parametrize("planted", [planted for planted in PLANTED if planted != "zero"])
@pytest.mark.parametrize("element", [0, -1])
def test_one_flipped_bit_makes_it_unknown(planted: str, element: int) -> None:
    made = model()
    name, plant, _ = PLANTED[planted]
    candidate = plant(made).contiguous()
    if planted == "nan":
        candidate.view(-1)[element] = 0
    else:
        candidate.view(torch.int16).view(-1)[element] ^= 1
    assert related(name, candidate, made)[0].kind in ("unknown", "nan" if planted != "nan" else "")


def changed(name: str, at: Any, change: Callable[[torch.Tensor], torch.Tensor | float]) -> tuple[str, torch.Tensor]:
    """A tensor of the reference with a change inside it."""
    candidate = model()[name].clone()
    candidate[at] = change(candidate[at])
    return name, candidate


ALL = slice(None)
NARROW: dict[str, tuple[tuple[str, torch.Tensor], Relation]] = {
    "element of a norm": (changed(NORM.format(1), 5, lambda t: t * 1.02), Relation("scale", {"value": 1.02, "elements": [[5, 6]]})),
    "element of a norm, NaN": (changed(NORM.format(1), 5, lambda _: torch.nan), Relation("nan", {"elements": [[5, 6]]})),
    "elements of a vector": (
        changed(BIAS.format(1), slice(2, 6), lambda t: t * 3),
        Relation("scale", {"value": 3.0, "elements": [[2, 6]]}),
    ),
    "columns": (changed(PROJ.format(1), (ALL, slice(4, 6)), lambda _: 0.0), Relation("zero", {"columns": [[4, 6]]})),
    "rows and columns": (
        changed(PROJ.format(1), (slice(1, 7), slice(4, 9)), lambda t: t * 3),
        Relation("scale", {"value": 3.0, "rows": [[1, 7]], "columns": [[4, 9]]}),
    ),
    "taps": (changed(CONV.format(1), (ALL, ALL, slice(3)), lambda t: t * 2), Relation("scale", {"value": 2.0, "taps": [[0, 3]]})),
    "a channel's taps reversed": (
        changed(CONV.format(1), 7, lambda t: t.flip(-1)),
        Relation("permutation", {"axis": 2, "unit": 1, "map": [3, 2, 1, 0], "rows": [[7, 8]]}),
    ),
    "column of an expert": (
        changed(FC1.format(1), (2, ALL, 3), lambda _: 0.0),
        Relation("zero", {"experts": [2], "wrong": 1, "of": EXPERTS, "columns": [[3, 4]]}),
    ),
    "row of two experts": (
        changed(FC1.format(1), ([2, 9], 3), lambda t: t * 3),
        Relation("scale", {"value": 3.0, "experts": [2, 9], "wrong": 2, "of": EXPERTS, "rows": [[3, 4]]}),
    ),
    "element of an expert, NaN": (
        changed(FC1.format(1), (9, 3, 1), lambda _: torch.nan),
        Relation("nan", {"experts": [9], "wrong": 1, "of": EXPERTS, "rows": [[3, 4]], "columns": [[1, 2]]}),
    ),
}


@pytest.mark.parametrize("narrow", NARROW)
def test_a_change_inside_a_tensor_is_claimed_with_its_place(narrow: str) -> None:
    (name, candidate), expected = NARROW[narrow]
    made = model()
    relation, proof = related(name, candidate, made)
    assert (relation.kind, relation.detail) == (expected.kind, expected.detail)
    assert said(expected.detail) in proof.experiment
    candidate.view(torch.int16).view(-1)[-1] ^= 1
    assert related(name, candidate, made)[0].kind == "unknown"


def test_of_one_number_the_shorter_explanation_is_chosen_and_the_other_listed() -> None:
    made = model()
    made[NORM.format(1)] = torch.full((ROWS,), 0.7)

    def of(value: float) -> Relation:
        candidate = made[NORM.format(1)].clone()
        candidate[5] = value
        return related(NORM.format(1), candidate, made)[0]

    place = {"elements": [[5, 6]]}
    assert (of(1.05).kind, of(1.05).detail) == ("scale", {"value": 1.5, **place})
    assert of(1.05).also == ({"kind": "offset", "detail": {"value": 0.35}},)
    assert (of(0.7 + 0.3).kind, of(0.7 + 0.3).detail) == ("offset", {"value": 0.3, **place})
    told = of(0.6174)  # by its numbers: anything would fit
    assert (told.kind, told.detail["elements"], told.detail["counts"]) == ("unknown", [[5, 6]], {"elements": [1, ROWS]})
    assert told.detail["values"] == pytest.approx([0.7, 0.6174])


def test_what_nothing_explains_is_told_by_where_it_is() -> None:
    made = model()
    candidate = made[PROJ.format(1)].clone()
    candidate.view(torch.int16)[3, 5] ^= 77
    place = {"rows": [[3, 4]], "columns": [[5, 6]], "counts": {"rows": [1, ROWS], "columns": [1, ROWS]}}
    values = [float(made[PROJ.format(1)][3, 5]), float(candidate[3, 5])]
    assert related(PROJ.format(1), candidate, made)[0] == Relation("unknown", place | {"values": values})
    candidate[3, 5], candidate[7, 6] = torch.nan, torch.inf
    place = {"rows": [[3, 4], [7, 8]], "columns": [[5, 7]], "counts": {"rows": [2, ROWS], "columns": [2, ROWS]}}
    assert related(PROJ.format(1), candidate, made)[0] == Relation("unknown", place | {"nan": 1, "infinite": 1, "first": [3, 5]})
    _, candidate = changed(FC1.format(1), ([2, 9], 3, 1), lambda t: t * 3 + 1)
    place = {"rows": [[3, 4]], "columns": [[1, 2]], "counts": {"rows": [1, 6], "columns": [1, 4]}}
    assert related(FC1.format(1), candidate, made)[0] == Relation("unknown", place | {"experts": [2, 9], "wrong": 2, "of": EXPERTS})


def test_blocks_of_rows_with_a_relation_each_are_told_one_by_one() -> None:
    made = model()
    candidate = made[QKV.format(1)].clone()
    candidate[1:4] *= 1.25
    candidate[7:9] = 0
    relation, _ = related(QKV.format(1), candidate, made)
    assert (relation.kind, relation.rule) == ("unknown", "")
    assert relation.detail["each"] == [
        {"kind": "scale", "detail": {"value": 1.25, "rows": [[1, 4]]}},
        {"kind": "zero", "detail": {"rows": [[7, 9]]}},
    ]
    candidate.view(torch.int16)[8, 2] ^= 1
    assert "each" not in related(QKV.format(1), candidate, made)[0].detail


def test_one_element_that_is_not_zero_is_enough() -> None:
    made = model()
    candidate = torch.zeros_like(made[QKV.format(1)])
    candidate[3, 4] = 1e-30
    assert related(QKV.format(1), candidate, made)[0].kind == "unknown"


@pytest.mark.parametrize("permutation", [k for k in PLANTED if k.startswith("permutation of ") and "rows" in k])
def test_a_permutation_says_how_to_make_the_candidate(permutation: str) -> None:
    made = model()
    name, plant, _ = PLANTED[permutation]
    detail = related(name, plant(made), made)[0].detail
    blocks = made[name].split(detail["unit"], dim=detail["axis"])
    assert torch.equal(torch.cat([blocks[i] for i in detail["map"]], dim=detail["axis"]), plant(made))


def test_a_constant_tensor_can_not_bear_witness() -> None:
    made = model()
    made[NORM.format(0)] = torch.arange(float(ROWS)).bfloat16()
    assert related(NORM.format(0), made[NORM.format(1)].clone(), made)[0] == Relation(
        "init", {"distribution": "constant", "value": 1.0}, (), "init {'distribution': 'constant', 'value': 1.0}"
    )
    made[NORM.format(2)] = torch.arange(5.0, 5.0 + ROWS).bfloat16()
    assert related(NORM.format(0), made[NORM.format(2)].clone(), made)[0] == Relation("other-layer", {"offset": 2})


def test_rows_that_are_equal_tell_no_order() -> None:
    made = model()
    made[PROJ.format(0)][1] = made[PROJ.format(0)][0]
    assert related(PROJ.format(0), made[PROJ.format(0)].flip(0), made)[0].kind == "unknown"


def test_numbers_that_moved_and_are_equal_tell_no_order() -> None:
    made = model()
    shifted = made[BIAS.format(0)].roll(5)  # each number is there twice
    assert related(BIAS.format(0), shifted, made)[0].kind == "unknown"


def test_an_expert_of_another_layer_is_no_permutation_of_its_own() -> None:
    made = model()
    candidate = made[FC1.format(1)].clone()
    candidate[3] = made[FC1.format(0)][3]
    assert related(FC1.format(1), candidate, made)[0] == Relation("other-layer", {"offset": -1, "experts": [3]})


def test_an_exchange_is_one_rule_seen_from_both_sides() -> None:
    made = model()
    one, _ = related(QKV.format(1), made[PROJ.format(1)].clone(), made)
    other, _ = related(PROJ.format(1), made[QKV.format(1)].clone(), made)
    next_layer, _ = related(PROJ.format(2), made[QKV.format(2)].clone(), made)
    assert one.key == other.key
    assert one.key != next_layer.key


def test_the_other_explanations_are_listed_beside_the_one_chosen() -> None:
    made = model()
    made[PROJ.format(0)] = made[PROJ.format(2)].clone()
    relation, _ = related(PROJ.format(1), made[PROJ.format(0)].clone(), made)
    assert relation == Relation("other-layer", {"offset": -1}, ({"kind": "other-tensor", "detail": {"name": PROJ.format(2)}},))


def test_the_explanation_chosen_is_not_its_own_alternative() -> None:
    made = model()
    made[QKV.format(0)] = made[PROJ.format(0)].clone()
    relation, _ = related(QKV.format(1), made[QKV.format(0)].clone(), made)
    assert relation == Relation("other-layer", {"offset": -1}, ({"kind": "other-tensor", "detail": {"name": PROJ.format(0)}},))


def test_bytes_are_compared_and_not_numbers() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(zero, -zero)
    assert not same_bytes(zero, zero.bfloat16())
    assert not same_bytes(zero, zero[None])


def cut_evenly(parts: list[torch.Tensor], ways: int) -> list[torch.Tensor]:
    """What a converter makes that cuts the packed rows with no regard to their parts, and a loader that has regard."""
    ranks = torch.cat(parts).chunk(ways)
    sizes = [len(part) // ways for part in parts]
    return [torch.cat([rank.split(sizes)[i] for rank in ranks]) for i in range(len(parts))]


@pytest.mark.parametrize("ways", [2, 4])
def test_an_even_cut_is_found_with_its_size(ways: int) -> None:
    parts = [torch.randn(8, 3), torch.randn(8, 3), torch.randn(16, 3), torch.randn(4, 3)]
    wrong = cut_evenly(parts, ways)
    assert any(not torch.equal(one, other) for one, other in zip(parts, wrong, strict=True))
    pairs = list(zip(parts, wrong, strict=True))
    assert even_cut(pairs, [2, 4, 8]) == ("cut", ways)
    assert even_cut(pairs, [6 - ways]) is None
    assert even_cut(pairs, [3]) is None  # does not divide
    pairs[-1] = (parts[-1], wrong[-1] + 1e-7)
    assert even_cut(pairs, [2, 4, 8]) is None
