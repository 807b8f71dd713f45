from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# before anything imports torch, as the command line does it: threads that wait for work sleep
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# tests are spread over processes, each with ranks of its own: with more threads than cores the suite takes twice as long
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "faults"))
sys.path.insert(0, str(Path(__file__).parent / "rollouts"))

import drill_table
from engine_room import Engine, Row
from workshop import Workshop

from bisect_tool.ranks import WORLDS

STARTED = time.monotonic()


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """Good and faulty checkpoints, each made once; the ranks stay alive until the last test."""
    yield Workshop(tmp_path_factory.mktemp("workshop"))
    WORLDS.close()


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The model that every engine of the rollout tests is made of."""
    return Engine()


@pytest.fixture(scope="session")
def rows(engine: Engine) -> list[Row]:
    """What a healthy engine says."""
    return engine.generate()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--drill-table", type=Path, help="where the drill's table goes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread over processes by file, where nothing else is said: fixtures and ranks are made once a file."""
    for item in items:
        if not any(item.iter_markers("xdist_group")):
            item.add_marker(pytest.mark.xdist_group(item.path.name))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Writes the drill's table of every cell that ran."""
    out = config.getoption("--drill-table")
    if out:
        reports = [one for outcome in ("passed", "failed") for one in terminalreporter.stats.get(outcome, [])]
        cells = [(dict(one.user_properties).get("cell"), one) for one in reports if one.when == "call"]
        out.write_text(drill_table.page({str(cell): one.outcome for cell, one in cells if cell}, time.monotonic() - STARTED))
