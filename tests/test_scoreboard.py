"""What README claims of accuracy is what the scoreboard measured."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_claim_in_the_readme_is_the_last_line_of_the_scoreboard() -> None:
    claim = (ROOT / "docs/scoreboard.md").read_text().splitlines()[-1]
    assert claim in " ".join((ROOT / "README.md").read_text().split())
