"""Layouts: what is cut for ranks comes back whole, and what can't come back whole is an error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from bisect_hooks.errors import BisectError, UsageError
from bisect_hooks.layout import Gathered, Layout, Shards, parse_layout
from bisect_hooks.parallel import Coordinates, Parallel
from hypothesis import given
from hypothesis import strategies as st
from properties import repeatable

B, S, E, T = 8, 8, 8, 3  # canonical batch and sequence, or experts and rows
Shape = tuple[int, ...]
Local = Callable[[Parallel, int, int, int], Shape]

# layout → (shape of each canonical tensor, local shape from (parallel, local batch, sequence under sp, tp))
CASES: dict[str, tuple[dict[str, Shape], Local]] = {
    "b s": ({"": (B, S, 1)}, lambda _, b, sp, tp: (b, S)),
    "b s h": ({"": (B, S, 5)}, lambda _, b, sp, tp: (b, S, 5)),
    "s[sp] b h": ({"": (B, S, 5)}, lambda _, b, sp, tp: (sp, b, 5)),
    "s b f[tp]": ({"": (B, S, 8)}, lambda _, b, sp, tp: (S, b, 8 // tp)),
    "(s[sp] b) e": ({"": (B, S, 6)}, lambda _, b, sp, tp: (sp * b, 6)),
    "(b s) h": ({"": (B, S, 6)}, lambda _, b, sp, tp: (b * S, 6)),
    "s b n[tp] d": ({"": (B, S, 12)}, lambda _, b, sp, tp: (S, b, 4 // tp, 3)),
    "b n s d": ({"": (B, S, 12)}, lambda _, b, sp, tp: (b, 4, S, 3)),
    "s n b d": ({"": (B, S, 12)}, lambda _, b, sp, tp: (S, 4, b, 3)),
    "(b s n) d": ({"": (B, S, 12)}, lambda _, b, sp, tp: (b * S * 4, 3)),
    "b s (q:4 k:4 v:8)": ({"q": (B, S, 4), "k": (B, S, 4), "v": (B, S, 8)}, lambda _, b, sp, tp: (b, S, 16)),
    "s b (q:4 k:4 v:12)[tp]": ({"q": (B, S, 4), "k": (B, S, 4), "v": (B, S, 12)}, lambda _, b, sp, tp: (S, b, 20 // tp)),
    "s b (g[tp] (q:4 gate:4 k:2 v:3))": (
        {"q": (B, S, 16), "gate": (B, S, 16), "k": (B, S, 8), "v": (B, S, 12)},
        lambda _, b, sp, tp: (S, b, 4 // tp * 13),
    ),
    "s b (g (q:4 gate:4 k:2 v:2))[tp]": (
        {"q": (B, S, 8), "gate": (B, S, 8), "k": (B, S, 4), "v": (B, S, 4)},
        lambda _, b, sp, tp: (S, b, 2 * 12 // tp),
    ),
    "s b n[tp:2] d": ({"": (B, S, 6)}, lambda _, b, sp, tp: (S, b, 2 // min(tp, 2), 3)),
    "b s (n (q:4 gate:4))": ({"q": (B, S, 12), "gate": (B, S, 12)}, lambda _, b, sp, tp: (b, S, 24)),
    "e[ep] t f": ({"": (E, T, 5)}, lambda parallel, b, sp, tp: (E // parallel.ep, T, 5)),
    "e[ep] t f[etp]": ({"": (E, T, 8)}, lambda parallel, b, sp, tp: (E // parallel.ep, T, 8 // parallel.expert_tp)),
}
PARALLELS = [
    Parallel(),
    Parallel(tp=2),
    Parallel(tp=4, sp=True),
    Parallel(ep=2),
    Parallel(ep=4, etp=2),
    Parallel(tp=2, ep=4, etp=1, sp=True),
    Parallel(tp=2, ep=4, pp=1, sp=True),
]


def canonical_of(text: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in CASES[text][0].items()}


def sizes_of(parallel: Parallel) -> dict[str, int]:
    """What a flattened dim hides: the local batch; where `n` hides too, the whole sequence."""
    return {"b": B // parallel.dp}


def shards_of(text: str, parallel: Parallel, canonical: dict[str, torch.Tensor]) -> list[tuple[Coordinates, torch.Tensor]]:
    layout, local = parse_layout(text), CASES[text][1]
    sp = S // parallel.tp if parallel.sp else S
    zeros = torch.zeros(local(parallel, B // parallel.dp, sp, parallel.tp))
    sizes = sizes_of(parallel) | ({"s": S} if text == "(b s n) d" else {})
    ranks = [parallel.coordinates(rank) for rank in range(parallel.world)]
    return [(at, layout.cut(canonical, zeros, at, sizes, parallel)) for at in ranks]


def gather(text: str, parallel: Parallel, shards: Shards) -> dict[str, Gathered]:
    return parse_layout(text).gather(shards, sizes_of(parallel) | ({"s": S} if text == "(b s n) d" else {}), parallel)


@pytest.mark.parametrize("text", CASES)
@repeatable
@given(parallel=st.sampled_from(PARALLELS), seed=st.integers(0, 2**31))
def test_what_is_cut_for_every_rank_gathers_to_the_same_tensor(text: str, parallel: Parallel, seed: int) -> None:
    canonical = canonical_of(text, seed)
    shards = shards_of(text, parallel, canonical)
    gathered = gather(text, parallel, shards)
    assert gathered.keys() == canonical.keys() == set(parse_layout(text).pieces)
    for name, found in gathered.items():
        assert torch.equal(found.tensor, canonical[name])
        assert found.replica_difference == 0


def test_sequence_first_is_cut_by_hand_as_megatron_does() -> None:
    whole = torch.arange(4.0).reshape(1, 4, 1)  # b s h
    parallel = Parallel(tp=2, sp=True)
    cut = [parse_layout("s[sp] b h").cut({"": whole}, torch.zeros(2, 1, 1), parallel.coordinates(rank), {}, parallel) for rank in (0, 1)]
    assert [one.flatten().tolist() for one in cut] == [[0, 1], [2, 3]]


def test_flattened_tokens_have_the_sequence_outermost() -> None:
    rows = torch.tensor([[0.0], [10.0], [1.0], [11.0], [2.0], [12.0]])  # token s of prompt b is 10 b + s
    gathered = parse_layout("(s b) e").gather([(Parallel().coordinates(0), rows)], {"b": 2}, Parallel())
    assert gathered[""].tensor[..., 0].tolist() == [[0, 1, 2], [10, 11, 12]]


def test_each_section_is_cut_over_tp_on_its_own() -> None:
    parallel = Parallel(tp=2)
    local = [torch.tensor([[[0.0, 4.0, 5.0]]]), torch.tensor([[[1.0, 6.0, 7.0]]])]
    gathered = parse_layout("s b (q:2 v:4)[tp]").gather([(parallel.coordinates(i), one) for i, one in enumerate(local)], {}, parallel)
    assert gathered["q"].tensor.flatten().tolist() == [0, 1]
    assert gathered["v"].tensor.flatten().tolist() == [4, 5, 6, 7]


def test_group_major_packing_is_taken_apart_group_by_group() -> None:
    parallel = Parallel(tp=2)
    local = [torch.tensor([[[1.0, 2.0, 30.0, 400.0]]]), torch.tensor([[[3.0, 4.0, 31.0, 401.0]]])]
    layout = parse_layout("s b (g[tp] (q:2 k:1 v:1))")
    gathered = layout.gather([(parallel.coordinates(i), one) for i, one in enumerate(local)], {}, parallel)
    assert {name: found.tensor.flatten().tolist() for name, found in gathered.items()} == {
        "q": [1, 2, 3, 4],
        "k": [30, 31],
        "v": [400, 401],
    }


def test_a_piece_that_is_not_given_stays_as_it_was() -> None:
    local = torch.arange(6.0).reshape(1, 1, 6)
    put = parse_layout("b s (q:2 k:2 v:2)").cut({"k": torch.tensor([[[8.0, 9.0]]])}, local, Parallel().coordinates(0), {}, Parallel())
    assert put.flatten().tolist() == [0, 1, 8, 9, 4, 5]
    assert local.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_of_a_run_that_is_cut_inside_a_group_only_the_given_piece_is_put_in_place() -> None:
    parallel, layout = Parallel(tp=4), parse_layout("s b (g (q:2 k:1 v:1))[tp]")
    put = [layout.cut({"k": torch.tensor([[[8.0, 9.0]]])}, torch.zeros(1, 1, 2), parallel.coordinates(i), {}, parallel) for i in range(4)]
    assert [one.flatten().tolist() for one in put] == [[0, 0], [8, 0], [0, 0], [9, 0]]
    kept = layout.cut({}, torch.ones(1, 1, 2), parallel.coordinates(0), {}, parallel)
    assert kept.flatten().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("text", "parallel", "axis"),
    [
        ("s[sp] b h", Parallel(tp=2, sp=True), "sp 1"),
        ("s b n[tp] d", Parallel(tp=4), "tp 3"),
        ("b s h", Parallel(ep=4), "dp 3"),
        ("e[ep] t f", Parallel(ep=4), "ep 3"),
        ("s b (g[tp] (q:4 gate:4 k:2 v:3))", Parallel(tp=2), "tp 1"),
    ],
)
def test_a_missing_shard_is_an_error_that_names_the_axis(text: str, parallel: Parallel, axis: str) -> None:
    shards = shards_of(text, parallel, canonical_of(text))
    with pytest.raises(BisectError, match=f"no shard for {axis}; seen"):
        gather(text, parallel, shards[:-1])


def test_nothing_at_all_can_not_be_gathered() -> None:
    with pytest.raises(BisectError, match="nothing to gather"):
        parse_layout("b s h").gather([], {}, Parallel())


def test_replicas_that_differ_are_reported_with_how_much() -> None:
    parallel, text = Parallel(tp=2), "s b h"
    one = torch.full((2, 1, 4), 2.0)
    shards = [(parallel.coordinates(0), one), (parallel.coordinates(1), one * 1.5)]
    found = parse_layout(text).gather(shards, {}, parallel)[""]
    assert found.replicas == 1
    assert found.replica_difference == pytest.approx(0.5)
    shards[1] = (parallel.coordinates(1), one.clone())
    assert parse_layout(text).gather(shards, {}, parallel)[""].replica_difference == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_replica_that_alone_is_not_finite_never_looks_equal(value: float) -> None:
    parallel = Parallel(tp=4)
    ones = [torch.ones(1, 1, 2) for _ in range(4)]
    ones[1] = torch.tensor([[[1.0, value]]])
    found = parse_layout("s b h").gather([(parallel.coordinates(i), one) for i, one in enumerate(ones)], {}, parallel)[""]
    assert not found.replica_difference < 1e30


def test_replicas_of_the_same_bytes_agree_also_when_they_hold_nan() -> None:
    parallel = Parallel(tp=2)
    one = torch.tensor([[[1.0, math.nan]]])
    found = parse_layout("s b h").gather([(parallel.coordinates(i), one.clone()) for i in (0, 1)], {}, parallel)[""]
    assert found.replica_difference == 0


def test_a_tensor_that_does_not_fit_is_an_error_with_its_shape() -> None:
    at = Parallel().coordinates(0)
    with pytest.raises(BisectError, match=re.escape("has 3 dims, the tensor is (2, 3)")):
        parse_layout("s b h").gather([(at, torch.zeros(2, 3))], {}, Parallel())
    with pytest.raises(BisectError, match=re.escape("does not fit a tensor (7, 3)")):
        parse_layout("(s b) h").gather([(at, torch.zeros(7, 3))], {"b": 2}, Parallel())
    with pytest.raises(BisectError, match="more than one unknown size"):
        parse_layout("(s b) h").gather([(at, torch.zeros(6, 3))], {}, Parallel())
    with pytest.raises(BisectError, match="can't graft"):
        parse_layout("b s h").cut({"": torch.zeros(2, 3, 5)}, torch.zeros(2, 3, 4), at, {}, Parallel())


def test_a_section_that_tp_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match=r"section k .*3 does not divide by 2"):
        parse_layout("s b (q:4 k:3)[tp]").split(torch.zeros(1, 1, 3), {}, Parallel(tp=2))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s b (q:4 k:4", "a bracket is not closed"),
        ("(s b e", "a bracket is not closed"),
        ("s b) e", "unexpected"),
        ("s s h", "named twice"),
        ("(s b) s", "named twice"),
        ("s[xp] b h", "unknown axis 'xp'"),
        ("s b (q:4 k:4)[pp]", "unknown axis 'pp'"),
        ("(s b)[tp] h", "what is cut as one run"),
        ("s b (g[tp] (q:4 k:4))[tp]", "what is cut as one run"),
        ("s b (g (q:4 k:4))[tp] h", "what is cut as one run"),
        ("s-b h", "unexpected '-'"),
        ("s b h[]", "unexpected '['"),
    ],
)
def test_a_bad_string_is_refused_early(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_layout(text)


@pytest.mark.parametrize("text", ["", "s b ()", "s b (q:2 q:2)", "s b (q:2) (k:2)", "s b[tp] h"])
def test_a_string_that_can_mean_nothing_is_refused_early(text: str) -> None:
    with pytest.raises(UsageError):
        parse_layout(text)


def test_a_layout_knows_its_pieces_and_what_cuts_its_features() -> None:
    def said(text: str, piece: str, width: int, parallel: Parallel) -> list[list[int]] | None:
        layout: Layout = parse_layout(text)
        assert piece in layout.pieces
        found = layout.columns(piece, width, "tp", parallel)
        return None if found is None else [columns.tolist() for columns in found]

    two, four = Parallel(tp=2), Parallel(tp=4)
    assert said("s[sp] b h", "", 4, two) is None
    assert said("s b n[tp] d", "", 4, two) == [[0, 1], [2, 3]]
    assert said("s b n[tp:2] d", "", 4, four) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert said("s b (q:4 k:2)[tp]", "k", 2, two) == [[0], [1]]
    assert said("s b (g[tp] (q:2 k:1))", "q", 4, two) == [[0, 1], [2, 3]]
    assert said("s b (g (q:2 gate:2 k:1 v:1))[tp]", "gate", 4, two) == [[0, 1], [2, 3]]
    assert said("s b (g (q:2 gate:2 k:1 v:1))[tp]", "gate", 4, four) == [[0], [1], [2], [3]]
    assert said("s b (g (q:2 gate:2 k:1 v:1))[tp]", "v", 2, four) == [[], [0], [], [1]]
