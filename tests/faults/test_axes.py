"""Weights equal, right on one rank: the axis of the layout whose removal cures a drift is the one that makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bisect_hooks.errors import UsageError
from bisect_hooks.parallel import Parallel
from cases import EVERY, FORWARD, fault
from workshop import Workshop, judge, verdict_of

from bisect_tool.experiments import at_fault
from bisect_tool.planting import plant

COUNTED_TWICE = """
def patch(model, parallel):
    if {there}:
        for layer in model.decoder.layers:
            layer.mlp.shared_experts.linear_fc2.register_forward_hook(lambda module, args, output: (output[0] * 2, *output[1:]))
"""
COMBINED_TWICE = """
def patch(model, parallel):
    for layer in model.decoder.layers if {there} else ():
        dispatcher = layer.mlp.token_dispatcher
        dispatcher.combine_postprocess = lambda rows, right=dispatcher.combine_postprocess: right(rows) * 2
"""
TOGETHER = "Only {} together make it: taking away any of them cures it."


def found(workshop: Workshop, patch: Path, out: Path, under: str) -> dict[str, Any]:
    code, page = judge(workshop.good("slime", "one"), out, under, *FORWARD, "--candidate-patch", str(patch))
    assert (code, page["verdict"], page["minor"]) == (1, "differs", [])
    (only,) = page["faults"]
    assert only["proof"]["before"] > 10 * only["proof"]["after"]
    return dict(only)


@pytest.mark.ranks
@pytest.mark.wide
@pytest.mark.parametrize(
    ("body", "axis", "under", "expected", "said"),
    [
        (
            COUNTED_TWICE, "tp", "tp2ep2", fault("parallel", EVERY, "shared_expert", ["fc2"], None, "run", tp=[0, 1]),
            "TP makes it: it is gone without it, and still there without SP and EP.",
        ),
        (
            COMBINED_TWICE, "ep", "tp2ep2", fault("parallel", EVERY, "experts", ["combine"], None, "run", ep=[0, 1]),
            "EP makes it: it is gone without it, and still there without SP and TP.",
        ),
        (
            COUNTED_TWICE, "sp", "tp2sp", fault("parallel", EVERY, "shared_expert", ["fc2"], None, "run", tp=[0, 1]),
            "SP makes it: it is gone without it.",
        ),
    ],
)  # fmt: skip
def test_a_fault_of_one_axis_is_told_from_the_others(
    body: str, axis: str, under: str, expected: dict[str, Any], said: str, workshop: Workshop, tmp_path: Path
) -> None:
    patch = tmp_path / "patch.py"
    patch.write_text(body.format(there="parallel.sp" if axis == "sp" else f"parallel.{axis} > 1"))
    only = found(workshop, patch, tmp_path / "out", under)
    assert verdict_of(only) == expected
    assert only["axes"] == [axis]
    assert said in only["explanation"]
    assert float(only["proof"]["control"].partition("still ")[2]) > 10 * only["proof"]["after"]


@pytest.mark.ranks
@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "written", "under", "expected", "axes", "said"),
    [
        ("E13", "tp2ep2", "tp2ep2", fault("parallel", EVERY, "experts", ["dispatch"], None, "run", ep=[0, 1]), ["tp", "ep"], TOGETHER.format("TP and EP")),
        (
            "A07", "tp2pp2", "tp2pp2", fault("parallel", [7], "attention", ["core"], None, "run", tp=[0, 1], pp=[1]), ["pp"],
            "PP makes it: it is gone without it, and still there without SP and TP.",
        ),
    ],
)  # fmt: skip
def test_a_fault_of_the_catalogue_is_placed_on_its_axes(
    name: str, written: str, under: str, expected: dict[str, Any], axes: list[str], said: str, workshop: Workshop, tmp_path: Path
) -> None:
    only = found(workshop, workshop.faulty("slime", written, name) / "patch.py", tmp_path / "out", under)
    assert verdict_of(only) == expected
    assert only["axes"] == axes
    assert said in only["explanation"]


def test_e13_needs_both_axes(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="E13 exists only with --ep above 1"):
        plant("E13", workshop.good("slime", "one"), tmp_path / "out", None)


@pytest.mark.parametrize(
    ("parallel", "axes"),
    [
        (Parallel(), ()),
        (Parallel(tp=2), ("tp",)),
        (Parallel(tp=2, ep=2, etp=1, sp=True), ("sp", "tp", "ep")),
        (Parallel(pp=2, vpp=2, pp_layers=(1, 1, 1, 5)), ("vpp", "pp")),
        (Parallel(tp=1, ep=2, etp=2, dispatcher="allgather"), ("ep", "etp")),
    ],
    ids=str,
)
def test_every_axis_can_be_taken_away(parallel: Parallel, axes: tuple[str, ...]) -> None:
    assert parallel.axes == axes
    less = parallel
    for axis in axes:
        smaller = less.without(axis)
        assert smaller.axes != less.axes and axis not in smaller.axes
        less = smaller
    assert less.one_rank
    assert less == parallel.as_one_rank()


@pytest.mark.parametrize(
    ("cured", "axes", "said"),
    [
        ({}, (), ""),
        ({"tp": True}, ("tp",), ""),
        ({"sp": True, "tp": True, "ep": False}, ("sp",), "SP makes it: it is gone without it, and still there without EP."),
        ({"tp": True, "ep": True}, ("tp", "ep"), TOGETHER.format("TP and EP")),
        ({"tp": False, "ep": False}, ("tp", "ep"), "Taking away TP and EP one at a time cures nothing: more than one of them makes it by itself."),
    ],
)  # fmt: skip
def test_what_cures_is_at_fault(cured: dict[str, bool], axes: tuple[str, ...], said: str) -> None:
    assert at_fault(cured) == (axes, said)
