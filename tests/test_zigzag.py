"""Context parallel's zigzag: what ranks hold is what Megatron cuts, and it comes back in order."""

from __future__ import annotations

import pytest
import torch
from bisect_hooks.errors import BisectError
from bisect_hooks.layout import parse_layout
from bisect_hooks.parallel import Parallel
from bisect_hooks.zigzag import unzigzag, zigzag, zigzag_order
from hypothesis import given
from hypothesis import strategies as st
from properties import repeatable


def test_a_rank_holds_a_chunk_and_its_mirror_image() -> None:
    assert zigzag_order(8, (), 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def test_packed_sequences_are_cut_one_by_one() -> None:
    assert zigzag_order(12, (4, 8), 2).tolist() == [0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9]


@repeatable
@given(cp=st.integers(1, 4), chunks=st.lists(st.integers(1, 3), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_what_is_cut_comes_back(cp: int, chunks: list[int], seed: int) -> None:
    segments = [2 * cp * n for n in chunks]
    whole = torch.randn(3, sum(segments), 2, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(unzigzag(zigzag(whole, 1, segments, cp), 1, segments, cp), whole)


@pytest.mark.parametrize(("length", "segments", "said"), [(6, (), "can't be cut in 4"), (12, (4, 4), "8 tokens in a sequence of 12")])
def test_what_does_not_divide_is_refused(length: int, segments: tuple[int, ...], said: str) -> None:
    with pytest.raises(BisectError, match=said):
        zigzag_order(length, segments, 2)


def test_sequence_parallel_cuts_what_context_parallel_left() -> None:
    parallel = Parallel(tp=2, cp=2, sp=True)
    whole = torch.arange(8.0).reshape(1, 8, 1)
    layout = parse_layout("s[cp,sp] b h")
    cut = [layout.cut({"": whole}, torch.zeros(2, 1, 1), parallel.coordinates(rank), {}, parallel) for rank in range(4)]
    assert [one.flatten().tolist() for one in cut] == [[0, 1], [6, 7], [2, 3], [4, 5]]
    shards = [(parallel.coordinates(rank), one) for rank, one in enumerate(cut)]
    assert torch.equal(layout.gather(shards, {}, parallel)[""].tensor, whole)


def test_features_cut_over_context_parallel_are_in_order() -> None:
    """Linear attention cuts heads, not tokens, once it has exchanged them: no zigzag there."""
    parallel = Parallel(cp=2)
    shards = [(parallel.coordinates(rank), torch.full((3, 1, 2), float(rank))) for rank in (0, 1)]
    assert parse_layout("s b f[cp]").gather(shards, {}, parallel)[""].tensor[0, 0].tolist() == [0, 0, 1, 1]
