"""Every cell of the matrix: a fault, run under a layout, in a checkpoint layout and a dtype, is named whole, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drill_table import name_of
from matrix import Cells, Place, case_of, cells
from test_drill import check
from workshop import Workshop

pytestmark = [pytest.mark.ranks, pytest.mark.wide]


def parameters() -> list[Any]:
    return [
        pytest.param(made, at, id=f"{made.plant}-{at.layout}-{at.under}-{at.dtype}", marks=pytest.mark.xdist_group(at.layout))
        for made, at, absent in cells()
        if not absent
    ]


@pytest.mark.parametrize(("made", "at"), parameters())
def test_a_cell(made: Cells, at: Place, workshop: Workshop, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    record_property("cell", name_of(made.plant, at))
    check(case_of(made, at), workshop, tmp_path)
