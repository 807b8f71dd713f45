"""Rows of a tensor, wherever its pieces lie: bare or in blobs, in order or not, in holes of sparse files or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from bisect_hooks.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st

from bisect_tool.places import Piece, Stored, covers, in_hole, steps

WHOLE = torch.arange(6 * 8 * 4, dtype=torch.float32).reshape(6, 8, 4)


def in_pieces(file: Path, edges: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], before: int = 0) -> Stored:
    """WHOLE cut at the edges of each dimension, its pieces one after another in a file, the last first."""
    pieces, blob = [], b"x" * before
    for i in reversed(range(len(edges[0]) - 1)):
        for j in range(len(edges[1]) - 1):
            for k in range(len(edges[2]) - 1):
                region = tuple(slice(edge[n], edge[n + 1]) for edge, n in zip(edges, (i, j, k), strict=True))
                part = WHOLE[region].contiguous()
                pieces.append(Piece(tuple(one.start for one in region), tuple(part.shape), file, len(blob)))
                blob += part.numpy().tobytes()
    file.write_bytes(blob)
    return Stored("whole", tuple(WHOLE.shape), torch.float32, tuple(pieces))


@pytest.mark.parametrize("before", [0, 1, 3, 4096])
@pytest.mark.parametrize(
    "edges",
    [((0, 6), (0, 8), (0, 4)), ((0, 2, 6), (0, 8), (0, 4)), ((0, 1, 2, 3, 4, 5, 6), (0, 4, 8), (0, 4)), ((0, 3, 6), (0, 8), (0, 1, 4))],
)
def test_rows_are_rows_however_the_tensor_is_cut(
    edges: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], before: int, tmp_path: Path
) -> None:
    stored = in_pieces(tmp_path / "file", edges, before)
    assert covers(stored)
    assert torch.equal(stored.read(), WHOLE)
    for start in range(6):
        for stop in range(start + 1, 7):
            assert torch.equal(stored.rows(start, stop), WHOLE[start:stop])
            put = torch.full((stop - start, 8, 4), -1.0)
            for place, part in stored.parts(start, stop):
                put[place] = part
            assert torch.equal(put, WHOLE[start:stop])
    assert torch.equal(stored.peek(4, [0, 7, 3], 3), WHOLE[4, [0, 7, 3], :3])


def test_pieces_that_leave_a_hole_or_lie_on_each_other_do_not_cover(tmp_path: Path) -> None:
    good = in_pieces(tmp_path / "file", ((0, 2, 4, 6), (0, 8), (0, 4)))
    assert covers(good)
    assert not covers(Stored("gap", good.shape, good.dtype, good.pieces[:-1]))
    assert not covers(Stored("twice", good.shape, good.dtype, (*good.pieces, good.pieces[0])))
    outside = Piece((5, 0, 0), (2, 8, 4), good.pieces[0].file, 0)
    assert not covers(Stored("outside", good.shape, good.dtype, (*good.pieces[1:], outside)))


def test_a_file_that_ends_too_early_is_refused_with_both_numbers(tmp_path: Path) -> None:
    stored = in_pieces(tmp_path / "file", ((0, 6), (0, 8), (0, 4)))
    os.truncate(tmp_path / "file", 700)
    with pytest.raises(UsageError, match=r"ends at byte 700, a tensor in it at 768"):
        stored.read()
    assert torch.equal(stored.rows(0, 5), WHOLE[:5])


def test_holes_are_known_without_being_read(tmp_path: Path) -> None:
    file, page = tmp_path / "sparse", 1 << 16
    with file.open("wb") as raw:
        raw.truncate(8 * page)
        raw.seek(3 * page)
        raw.write(b"\1" * page)
    if file.stat().st_blocks * 512 >= 8 * page:
        pytest.skip("this file system keeps no holes")
    assert [in_hole(file, i * page, (i + 1) * page) for i in range(8)] == [i != 3 for i in range(8)]
    assert not in_hole(file, 0, 8 * page) and in_hole(file, 4 * page, 8 * page)
    stored = Stored("sparse", (8, page), torch.uint8, (Piece((0, 0), (8, page), file, 0),))
    assert stored.empty(0, 3) and not stored.empty(2, 4) and stored.empty(4, 8)
    assert int(stored.rows(0, 8).sum()) == page


@given(st.integers(1, 500), st.integers(1, 7), st.integers(1, 1 << 25))
def test_steps_cover_every_row_once_and_keep_units_whole(count: int, unit: int, row_bytes: int) -> None:
    rows = count * unit
    found = list(steps(rows, unit, row_bytes))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == rows
    assert all(start % unit == 0 for start, _ in found)
