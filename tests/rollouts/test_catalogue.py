"""Every row of the fault catalogue that is of a rollout or needs an engine's evidence: where it is a case, or why it is none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LOGS, HELD, HEARD, LADDER, SERVER = (
    "test_rollout_cases.py", "test_sync.py", "test_recordings.py", "test_run_rollout.py", "test_server.py",
)  # fmt: skip
# a row → the files that have it as a case: log-probs and text, what an engine holds, its activations, the ladder, a live server
ROWS: dict[str, tuple[str, ...]] = {
    "E02": (LOGS,), "E03": (HELD,), "E15": (HELD,), "A08": (LOGS, HELD), "G05": (LADDER,), "G10": (LOGS, HEARD), "G11": (LOGS, SERVER, HEARD),
    "G15": (LOGS, HEARD), "T05": (HELD,), "T06": (HEARD,), "T09": (LOGS,), "S01": (LOGS,), "S02": (LOGS,), "S03": (LOGS,), "L04": (HELD,),
    "M08": (HELD,), "W01": (HELD,), "W02": (HELD,), "W04": (LOGS, HELD), "W05": (LOGS, HEARD), "W06": (LOGS, HELD), "W07": (LOGS,),
    "W08": (LOGS, HEARD, LADDER), "W09": (LOGS,), "W10": (LOGS, HEARD), "Q04": (HELD,), "D01": (LOGS,), "D02": (LOGS, SERVER), "D03": (LOGS,),
    "D07": (LOGS,), "D08": (LOGS,), "Z04": (LOGS,),
}  # fmt: skip
ABSENT = {"L07": "a crash of Megatron's own inference: it leaves no rollout to judge"}
# what a row asks for beyond its class and place, and evidence does not carry
NOT_CARRIED = {
    "E02, S02, S03: the shard": "a dump of responses does not say which rank spoke: the relation's detail has the EP or TP size that fits",
    "W02 by log-probs": "without rotation the embedded model moves by 0.023 nats, less than a bf16 engine's noise: its buffer's digest shows it",
    "E03: init noise as such": "a digest says other bytes, not which distribution: the names that were never consumed say why",
    "W08: the KV head": "no simulation exchanges heads: by log-probs its class is open, by activations its layer is named",
    "G05 by digest": "an FP8 engine's scales are its own bytes: activations show the components",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_a_case_where_it_is_said_to_be(row: str) -> None:
    for name in ROWS[row]:
        tree = ast.parse((HERE / name).read_text())
        words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        tests = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        assert any(row in word for word in words) or any(row.lower() in test.split("_") for test in tests), f"{row} is not in {name}"


def test_the_list_is_whole() -> None:
    """33 rows of the catalogue have a rollout class or need E."""
    assert len(ROWS) + len(ABSENT) == 33 and not set(ROWS) & set(ABSENT) and all(NOT_CARRIED.values())
