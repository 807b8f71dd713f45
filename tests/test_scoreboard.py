"""What README claims of accuracy is what the scoreboard measured."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_claim_in_the_readme_is_the_last_line_of_the_scoreboard() -> None:
    claim = (ROOT / "docs/scoreboard.md").read_text().splitlines()[-1]
    assert claim in " ".join((ROOT / "README.md").read_text().split())


def test_how_far_clean_runs_go_is_what_calibration_measured() -> None:
    page = json.loads((ROOT / "golden/calibration.json").read_text())
    largest = max(page["largest"].values())
    furthest = max(size for size in page["clean"]["furthest"].values() if isinstance(size, float))
    said = f"which is {largest:.1f}; on another seed the furthest went to {furthest:.1f} "
    assert said in " ".join((ROOT / "README.md").read_text().split())
