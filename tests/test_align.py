"""Rows are found by their token ids; what differs is named, and nothing is compared on top of it."""

from __future__ import annotations

from typing import Any

import pytest

from bisect_tool.align import Aligned, Mismatch, align
from bisect_tool.recording import Provenance

ROWS = ((5, 6, 7), (8, 9), (8, 9, 10, 11))


def come(*rows: tuple[int, ...], **more: Any) -> Provenance:
    return Provenance("candidate", "qwen3.5-moe", "", "float32", rows, **more)


def index_of(*rows: tuple[int, ...]) -> list[int]:
    found = align(come(*ROWS), come(*rows))
    assert isinstance(found, Aligned)
    return found.index.tolist()


def mismatch(candidate: Provenance, reference: Provenance | None = None) -> Mismatch:
    found = align(reference or come(*ROWS), candidate)
    assert isinstance(found, Mismatch)
    return found


def test_rows_are_found_in_any_order_and_behind_padding() -> None:
    assert index_of(*ROWS) == list(range(9))
    assert index_of(*reversed(ROWS)) == [6, 7, 8, 4, 5, 0, 1, 2, 3]
    assert index_of((5, 6, 7, 0, 0), (8, 9, 0, 0, 0), (8, 9, 10, 11, 0)) == [0, 1, 2, 5, 6, 10, 11, 12, 13]
    assert index_of((0, 5, 6, 7), (0, 0, 8, 9), (8, 9, 10, 11)) == [1, 2, 3, 6, 7, 8, 9, 10, 11]  # one length: a padded batch


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (((5, 6, 7), (8, 9)), "fewer rows"),
        (((1, 5, 6, 7), (1, 8, 9), (1, 8, 9, 10, 11)), "one token more at its start on the candidate (1 where the reference has 5)"),
        (((6, 7), (8, 9), (8, 9, 10, 11)), "one token less at its start"),
        (((5, 6, 3), (8, 9), (8, 9, 10, 11)), "differs at index 2 ([5, 6, 7] against [5, 6, 3])"),
    ],
)
def test_ids_that_differ_are_named_with_their_place(rows: tuple[tuple[int, ...], ...], said: str) -> None:
    assert said in mismatch(come(*rows)).text


def test_a_doubled_first_token_is_a_relation() -> None:
    found = mismatch(come((1, 5, 6, 7), (1, 8, 9), (1, 8, 9, 10, 11)))
    assert (found.kind, found.detail) == ("shifted-tokens", {"row": 0, "by": 1})


def test_positions_are_compared_where_the_candidate_recorded_them() -> None:
    right = ((0, 1, 2), (0, 1), (0, 1, 2, 3))
    assert isinstance(align(come(*ROWS), come(*ROWS, positions=right)), Aligned)
    packed = come(*ROWS, positions=((0, 1, 2), (3, 4), (5, 6, 7, 8)), packed={"cu_seqlens": [0, 3, 5, 9]})
    assert "off by +3: they go on over the packed sequence" in mismatch(packed).text
    assert (
        "the positions of row 2 are 0 where the reference has 1, at index 1"
        in mismatch(come(*ROWS, positions=((0, 1, 2), (0, 1), (0, 0, 1, 2)))).text
    )
