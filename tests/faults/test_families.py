"""Every family: a clean conversion agrees in every layout, and what is planted comes out with the whole verdict and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from cases import Case
from family_cases import CASES, COVERING, FAMILIES, Traits, cannot, cases_of
from workshop import Workshop, judge, verdict_of

from bisect_tool.plants import PLANTS

pytestmark = pytest.mark.ranks
Shops = Callable[[str], Workshop]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="session")
def shops(tmp_path_factory: pytest.TempPathFactory, workshop: Workshop) -> Shops:
    """A workshop for each family's tiny model, made when it is first asked for.  (`workshop` takes the ranks down in the end.)"""
    made: dict[str, Workshop] = {}

    def shop(family: str) -> Workshop:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = Workshop(folder, tiny.make(family, folder / "reference"))
        return made[family]

    return shop


@pytest.mark.parametrize(
    ("t", "case"),
    [pytest.param(t, case, id=name, marks=() if name in COVERING else pytest.mark.wide) for name, (t, case) in CASES.items()],
)
def test_a_family_is_judged_right(t: Traits, case: Case, shops: Shops, prompts: Path, tmp_path: Path) -> None:
    shop = shops(t.family)
    candidate = shop.faulty(case.layout, case.written, *case.faults)
    flags = [str(candidate / flag) if flag == "patch.py" else flag for flag in case.flags]
    code, page = judge(candidate, tmp_path / "report", case.under, *flags, reference=shop.reference, prompts=prompts)
    assert [verdict_of(fault) for fault in page["faults"]] == list(case.expected)
    assert [verdict_of(fault) for fault in page["minor"]] == list(case.minor)
    assert (code, page["verdict"]) == ((1, "differs") if case.expected else (0, "agrees"))


@pytest.mark.parametrize("t", FAMILIES, ids=lambda t: t.family)
def test_every_plant_is_made_in_each_family_or_can_not_exist(t: Traits) -> None:
    planted = {case.faults[0] for case in cases_of(t)}
    assert len(planted) >= 8
    assert planted.isdisjoint(cannot(t))
    assert planted | set(cannot(t)) == {plant.id for plant in PLANTS}
