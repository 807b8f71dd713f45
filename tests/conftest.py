from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# before anything imports torch, as the command line does it: threads that wait for work sleep
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent / "faults"))
sys.path.insert(0, str(Path(__file__).parent / "rollouts"))

from engine_room import Engine, Row
from workshop import Workshop

from bisect_tool.ranks import WORLDS


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
