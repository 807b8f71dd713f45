"""Choices that come out otherwise are counted with their margins; between equals they are said to be so."""

from __future__ import annotations

import pytest
import torch

from bisect_tool.choices import next_tokens, routing

LOGITS = torch.tensor([[4.0, 1.0, 0.0], [2.0, 1.75, 0.0], [0.0, 0.5, 3.0], [1.0, 1.0, 0.0]])


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (None, None),
        (1, "next token: 1 of 4 most likely ones are not the reference's, where it preferred one token to the next by 2.5e-01 at most (usually by 2.5e-01)"),
        (3, "next token: 1 of 4 most likely ones are not the reference's, all of them between tokens that it ranked alike (usually by 2.5e-01)"),
    ],
)  # fmt: skip
def test_the_most_likely_token_is_counted_where_it_changed(token: int | None, said: str | None) -> None:
    candidate = LOGITS.clone()
    if token is not None:
        candidate[token, 1] += 0.5
    assert next_tokens(LOGITS, candidate) == said


def test_the_choice_of_experts_is_counted_over_layers() -> None:
    flipped = torch.tensor([False, True, False, False])
    assert routing([LOGITS, LOGITS], [~flipped & flipped, flipped & ~flipped], 1) is None
    assert routing([], [], 1) is None
    said = routing([LOGITS, LOGITS + 1], [flipped, ~flipped & flipped], 1)
    assert (
        said
        == "routing: 1 of 8 choices of experts are not the reference's, where it preferred one expert to the next by 2.5e-01 at most (usually by 2.5e-01)"
    )
