"""Parallel sizes: the world they need, where a rank stands, which layers a stage holds."""

from __future__ import annotations

import itertools

import pytest
from bisect_hooks.errors import UsageError
from bisect_hooks.parallel import Coordinates, Parallel
from hypothesis import given
from hypothesis import strategies as st
from properties import repeatable

LAYOUTS = [
    Parallel(),
    Parallel(tp=2),
    Parallel(pp=4),
    Parallel(ep=8),
    Parallel(tp=2, pp=2, ep=4),
    Parallel(tp=4, ep=2, etp=1, pp=2),
    Parallel(tp=2, cp=2, ep=2, etp=4),
    Parallel(tp=1, etp=2, ep=3, pp=2),
]
IDS = [str(layout) for layout in LAYOUTS]


@st.composite
def layouts(draw: st.DrawFn) -> Parallel:
    size = st.integers(1, 6)
    return Parallel(tp=draw(size), cp=draw(size), pp=draw(size), ep=draw(size), etp=draw(st.none() | size))


@repeatable
@given(layouts())
def test_dp_is_the_least_that_lets_the_experts_divide_the_ranks(parallel: Parallel) -> None:
    dense, expert = parallel.tp * parallel.cp, parallel.ep * parallel.expert_tp
    assert parallel.dp == next(dp for dp in itertools.count(1) if dense * dp % expert == 0)
    assert parallel.world == dense * parallel.dp * parallel.pp


@pytest.mark.parametrize(
    ("parallel", "world", "dp"),
    [
        (Parallel(), 1, 1),
        (Parallel(tp=4), 4, 1),
        (Parallel(ep=8), 8, 8),
        (Parallel(tp=2, ep=4), 8, 4),
        (Parallel(tp=2, ep=4, etp=1), 4, 2),
        (Parallel(tp=4, pp=2, ep=2, etp=1), 8, 1),
        (Parallel(tp=2, ep=3, etp=1, pp=3), 18, 3),
    ],
    ids=str,
)
def test_the_world_is_as_the_contract_counts_it(parallel: Parallel, world: int, dp: int) -> None:
    assert (parallel.world, parallel.dp) == (world, dp)
    assert parallel.one_rank == (world == 1)


def test_etp_is_tp_when_not_given() -> None:
    assert Parallel(tp=4).expert_tp == 4
    assert Parallel(tp=4) == Parallel(tp=4, etp=4)
    assert Parallel(tp=4, etp=1).expert_tp == 1
    assert Parallel(tp=4, etp=1).size("etp") == 1


@pytest.mark.parametrize("parallel", LAYOUTS, ids=IDS)
def test_ranks_are_numbered_as_megatron_does(parallel: Parallel) -> None:
    """Slowest axis outermost: pp, dp, cp, tp for everything, and pp, expert dp, ep, etp for experts."""
    dense = itertools.product(*map(range, (parallel.pp, parallel.dp, parallel.cp, parallel.tp)))
    expert_dp = parallel.world // (parallel.pp * parallel.ep * parallel.expert_tp)
    experts = itertools.product(*map(range, (parallel.pp, expert_dp, parallel.ep, parallel.expert_tp)))
    for rank, ((pp, dp, cp, tp), (expert_pp, _, ep, etp)) in enumerate(zip(dense, experts, strict=True)):
        assert expert_pp == pp
        assert parallel.coordinates(rank) == Coordinates(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp, cp=cp)


def test_a_rank_of_a_mixed_layout_stands_where_counting_by_hand_puts_it() -> None:
    parallel = Parallel(tp=2, pp=2, ep=2, etp=1)
    assert parallel.world == 4
    assert [parallel.coordinates(rank)["ep"] for rank in range(4)] == [0, 1, 0, 1]
    assert [parallel.coordinates(rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    assert [parallel.coordinates(rank)["pp"] for rank in range(4)] == [0, 0, 1, 1]


def test_stages_share_layers_evenly_when_nothing_else_is_said() -> None:
    parallel = Parallel(pp=4)
    assert [list(parallel.layers_of(stage, 8)) for stage in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [parallel.stage_of(layer, 8) for layer in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_uneven_stages_hold_the_layers_they_are_given() -> None:
    parallel = Parallel(pp=3, pp_layers=(1, 5, 2))
    assert [list(parallel.layers_of(stage, 8)) for stage in range(3)] == [[0], [1, 2, 3, 4, 5], [6, 7]]
    assert [parallel.stage_of(layer, 8) for layer in (0, 1, 5, 6, 7)] == [0, 1, 1, 2, 2]


def test_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match=r"8 layers don't divide by --pp 3.*--pp-layers"):
        Parallel(pp=3).layers_of(0, 8)
    with pytest.raises(UsageError, match="holds 7 layers, the model has 8"):
        Parallel(pp=2, pp_layers=(3, 4)).chunk_sizes(8)


@pytest.mark.parametrize("axis", ["tp", "pp", "ep", "etp", "cp", "vpp"])
def test_a_size_below_one_is_refused(axis: str) -> None:
    with pytest.raises(UsageError, match=f"--{axis} must be at least 1, not 0"):
        Parallel(**{axis: 0})  # type: ignore[arg-type]


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(UsageError, match="--pp-layers names 3 stages"):
        Parallel(pp=2, pp_layers=(1, 2, 3))
    with pytest.raises(UsageError, match="--sp needs --tp"):
        Parallel(sp=True)


def test_a_stage_of_less_than_no_layers_is_refused() -> None:
    with pytest.raises(UsageError):
        Parallel(pp=2, pp_layers=(-1, 9)).chunk_sizes(8)


def test_virtual_stages_take_turns() -> None:
    """Megatron hands out chunks round: with pp 2 and vpp 2, stage 0 holds the first and the third quarter."""
    assert [Parallel(pp=2, vpp=2).stage_of(layer, 8) for layer in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_stage_holds_a_run_of_layers_for_each_of_its_turns() -> None:
    parallel = Parallel(pp=2, vpp=2)
    assert [[list(parallel.layers_of(stage, 8, chunk)) for chunk in (0, 1)] for stage in (0, 1)] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    with pytest.raises(UsageError, match="--vpp 2 needs --pp of at least 2"):
        Parallel(vpp=2)


def test_every_layer_has_a_stage_where_chunks_are_named() -> None:
    assert Parallel(pp=2, vpp=2, pp_layers=(1, 3, 2, 2)).stage_of(7, 8) == 1


def test_a_layout_knows_its_one_rank_run() -> None:
    parallel = Parallel(tp=2, pp=2, ep=4, etp=1, sp=True, dispatcher="allgather")
    assert parallel.as_one_rank() == Parallel(dispatcher="allgather")
    assert parallel.as_one_rank().one_rank


def test_a_layout_prints_only_what_is_not_one() -> None:
    assert str(Parallel()) == "one rank"
    assert str(Parallel(tp=2, pp=3, sp=True)) == "tp 2, pp 3, sp"
    assert str(Parallel(tp=2, ep=2, etp=1)) == "tp 2, ep 2, etp 1"
    assert Parallel(tp=2).shown() == {"tp": 2, "pp": 1, "ep": 1, "etp": 2, "cp": 1}
