"""Who is blamed, from who agrees with whom: what is known elsewhere decides what the distances alone leave open."""

from __future__ import annotations

import pytest

from bisect_tool.rollouts.judging import Blame, blame
from bisect_tool.rollouts.known import Known
from bisect_tool.rollouts.patterns import Pattern

FAR = {("decode", "reference"): 2.0}
CANDIDATE = FAR | {("decode", "candidate"): 0.01, ("candidate", "reference"): 2.0}
RIGHT = FAR | {("decode", "candidate"): 2.0, ("candidate", "reference"): 0.0}


def judged(found: dict[tuple[str, str], float], kind: str = "every", known: Known | None = None) -> Blame:
    return blame(found, Pattern(kind, "", {}), known or Known(), False)


def test_first_tokens_that_are_right_do_not_clear_the_conversion() -> None:
    """A sum's first digit survives weights that lose the others: E01 looks so on an easy task."""
    one = judged(FAR, "decode")
    assert (one.cls, one.candidates, one.cleared) == (None, ("rollout", "conversion"), ())
    assert "--server URL" in one.next
    assert judged(FAR, "decode", Known(conversion="its bytes are equal")).cls == "rollout"


@pytest.mark.parametrize(
    ("found", "known", "cls", "between", "cleared"),
    [
        (FAR, Known(), None, ("reference", "engine"), []),
        (FAR, Known(held=True), "rollout", ("reference", "engine"), ["the conversion"]),
        (FAR, Known(conversion="bytes"), "rollout", ("reference", "engine"), ["the conversion"]),
        (RIGHT, Known(), "rollout", ("reference", "engine"), ["the conversion"]),
        (CANDIDATE, Known(), None, ("reference", "candidate"), ["the engine"]),
        (CANDIDATE | {("decode", "prefill"): 2.0, ("prefill", "reference"): 0.0}, Known(), "rollout", ("reference", "engine"), ["the conversion"]),
    ],
    ids=["nothing known", "held", "bytes equal", "candidate right", "candidate the same", "not itself"],
)  # fmt: skip
def test_what_is_known_decides(
    found: dict[tuple[str, str], float], known: Known, cls: str | None, between: tuple[str, str], cleared: list[str]
) -> None:
    one = judged(found, known=known)
    assert (one.cls, one.between, [suspect for suspect, _ in one.cleared]) == (cls, between, cleared)
    assert one.next
