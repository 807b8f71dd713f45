"""Measuring holds no opinion; judging lets nothing pass that was not compared."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from bisect_hooks.errors import BisectError
from hypothesis import given
from hypothesis import strategies as st
from properties import repeatable

from bisect_tool.judge import EXACT, Tolerance, Verdict, judge, worst
from bisect_tool.measure import Difference, measure

AGREES, DIFFERS, INCOMPARABLE = Verdict.AGREES, Verdict.DIFFERS, Verdict.INCOMPARABLE
NAN, INF = math.nan, math.inf
LOOSE = Tolerance(1e9, "anything goes")
NUMBERS = st.floats(-1e6, 1e6, width=32)


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values)


@repeatable
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=20))
def test_relative_rms_is_as_the_contract_defines_it(pairs: list[tuple[float, float]]) -> None:
    reference, candidate = of(*(r for r, _ in pairs)), of(*(c for _, c in pairs))
    off = math.fsum((c - r) ** 2 for r, c in pairs)
    norm = math.fsum(r**2 for r, _ in pairs)
    expected = 0.0 if off == 0 else INF if norm == 0 else math.sqrt(off) / math.sqrt(norm)
    found = measure(reference, candidate)
    assert found.relative_rms == pytest.approx(expected, rel=1e-9)
    assert found.largest == max(abs(c - r) for r, c in pairs)
    assert found.compared == len(pairs)
    assert (found.nonfinite, found.both) == (0, 0)
    assert found.zero == (off == 0)


def test_sums_are_made_in_fp64() -> None:
    reference = torch.full((1000, 1000), 1.0)
    assert measure(reference, reference + 2**-10).relative_rms == 2**-10
    large = torch.full((4,), 3e38, dtype=torch.bfloat16)
    assert measure(large, -large).relative_rms == 2


def test_nothing_over_nothing_is_nothing_and_something_over_nothing_is_infinite() -> None:
    assert measure(torch.zeros(3), torch.zeros(3)).relative_rms == 0
    assert measure(torch.zeros(3), of(0, 1, 0)).relative_rms == INF


def test_the_largest_difference_is_named_with_both_values() -> None:
    reference, candidate = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    reference[1, 2, 0], candidate[1, 2, 0], candidate[0, 1, 1] = 5.0, 2.0, 1.0
    found = measure(reference, candidate)
    assert (found.index, found.reference_value, found.candidate_value, found.largest) == ((1, 2, 0), 5.0, 2.0, 3.0)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_what_is_finite_on_one_side_only_differs(value: float, side: str) -> None:
    good, bad = of(1, 200, 3), of(1, 2, value)
    found = measure(bad, good) if side == "reference" else measure(good, bad)
    assert found.nonfinite == 1
    assert found.index == (2,)
    assert judge(found, LOOSE) is DIFFERS
    assert not found.zero


@pytest.mark.parametrize(("one", "other"), [(NAN, NAN), (INF, INF), (INF, -INF), (NAN, INF)])
def test_what_is_finite_on_neither_side_is_nothing_to_go_by(one: float, other: float) -> None:
    found = measure(of(1, one), of(1, other))
    assert (found.both, found.nonfinite) == (1, 0)
    assert judge(found, LOOSE) is INCOMPARABLE
    assert not found.zero


def test_a_one_sided_nan_outranks_a_shared_one() -> None:
    found = measure(of(NAN, 1, 1), of(NAN, NAN, 1))
    assert (found.both, found.nonfinite, found.index) == (1, 1, (1,))
    assert judge(found, LOOSE) is DIFFERS


@pytest.mark.parametrize(
    ("reference", "candidate", "said"),
    [
        (torch.zeros(0), torch.zeros(0), "nothing to compare"),
        (torch.zeros(2, 0), torch.zeros(2, 0), "nothing to compare"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "shapes differ"),
        (torch.zeros(1), torch.zeros(1, 1), "shapes differ"),
        (torch.zeros(3), torch.zeros(1), "shapes differ"),
    ],
)
def test_what_can_not_be_compared_raises(reference: torch.Tensor, candidate: torch.Tensor, said: str) -> None:
    with pytest.raises(BisectError, match=said):
        measure(reference, candidate)


def test_a_difference_is_judged_by_its_tolerance() -> None:
    found = measure(of(1, 1), of(1.25, 1.25))
    assert judge(found, Tolerance(0.25, "the border is allowed")) is AGREES
    assert judge(found, Tolerance(0.2499, "below")) is DIFFERS
    assert judge(found, EXACT) is DIFFERS
    assert judge(measure(of(1, 1), of(1, 1)), EXACT) is AGREES


@pytest.mark.parametrize(("rms", "allowed"), [(NAN, 1.0), (NAN, INF), (0.0, NAN), (NAN, NAN), (INF, 1e300)])
def test_nan_never_passes(rms: float, allowed: float) -> None:
    plain: Difference = measure(of(1), of(1))
    assert judge(replace(plain, relative_rms=rms), Tolerance(allowed, "")) is DIFFERS


def test_the_worst_of_several_verdicts_counts_and_none_is_no_agreement() -> None:
    assert worst([]) is INCOMPARABLE
    for three in itertools.product((AGREES, DIFFERS, INCOMPARABLE), repeat=3):
        expected = DIFFERS if DIFFERS in three else INCOMPARABLE if INCOMPARABLE in three else AGREES
        assert worst(list(three)) is expected
