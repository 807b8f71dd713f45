"""Planted faults end in the right verdict, the whole verdict, and nothing else; clean checkpoints end in none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import BOTH, CANNOT_EXIST, CLEAN, CLEAN_WIDE, FORWARD_ONLY, HOME, ROUNDED, ROUNDED_WIDE, Case
from workshop import Workshop, judge, verdict_of

pytestmark = pytest.mark.ranks


def check(case: Case, workshop: Workshop, out: Path) -> None:
    candidate = workshop.faulty(case.layout, case.written, *case.faults)
    flags = [str(candidate / flag) if flag == "patch.py" else flag for flag in case.flags]
    code, page = judge(candidate, out, case.under, *flags)
    assert [verdict_of(fault) for fault in page["faults"]] == list(case.expected)
    assert [verdict_of(fault) for fault in page["minor"]] == list(case.minor)
    assert code == (1 if case.expected else 0)
    assert page["verdict"] == ("differs" if case.expected else "agrees")
    assert not page["answers"] or "--no-answers" not in case.flags
    for fault in page["faults"]:
        assert fault["explanation"] and fault["next"] and fault["proof"]["control"]
        assert fault["proof"]["before"] is None or fault["proof"]["before"] > fault["proof"]["after"]


def covering(cases: list[Case], *under: str) -> list[Any]:
    """Cases, those that are not in the covering set marked wide."""
    return [pytest.param(case, marks=() if case.id.endswith(under) else pytest.mark.wide) for case in cases]


@pytest.mark.parametrize("case", HOME, ids=lambda case: case.id)
def test_each_fault_is_found_in_its_home_layout(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    check(case, workshop, tmp_path)


@pytest.mark.parametrize(
    "case", covering(FORWARD_ONLY, "A03-slime", "L01-slime", "ep4", "tp2", "L01-run-native-pp2"), ids=lambda case: case.id
)
def test_each_fault_is_located_by_activations_alone(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    check(case, workshop, tmp_path)


@pytest.mark.parametrize(
    "case", covering([*ROUNDED, *ROUNDED_WIDE], "E01-slime-ep4-bf16", "clean-native-tp2sp-bf16"), ids=lambda case: case.id
)
def test_in_bf16_a_fault_is_still_one_and_rounding_is_none(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    check(case, workshop, tmp_path)


@pytest.mark.parametrize("case", covering(BOTH, "slime-ep4", "native-tp2ep2"), ids=lambda case: case.id)
def test_an_expert_fault_and_a_linear_attention_fault_are_told_apart_in_every_layout(
    case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    check(case, workshop, tmp_path)


@pytest.mark.parametrize(
    "case",
    covering([*CLEAN, *CLEAN_WIDE], "slime-ep4", "native-pp2", "native-tp2ep2", "native-vpp2"),
    ids=lambda case: case.id,
)
def test_a_clean_checkpoint_agrees_in_every_layout(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    check(case, workshop, tmp_path)


def test_the_drill_stays_within_its_size_and_says_what_can_not_exist() -> None:
    assert len(HOME) + len(FORWARD_ONLY) + len(BOTH) + len(CLEAN) + len(ROUNDED) <= 46
    assert all(CANNOT_EXIST.values())
