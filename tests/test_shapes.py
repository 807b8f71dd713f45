"""The shape of an error over tokens: each shape is told from its neighbours."""

from __future__ import annotations

import math

import pytest
import torch

from bisect_tool.cuts import TokenCut, feature_axes, token_cut
from bisect_tool.recording import Provenance
from bisect_tool.shapes import permutation_of, shape_of, token_errors

LENGTHS = (16, 100, 80)


def errors(*wrong: tuple[int, range]) -> torch.Tensor:
    """1 at positions of prompts, a thousandth elsewhere."""
    found = torch.full((sum(LENGTHS),), 1e-3)
    for prompt, positions in wrong:
        found[[sum(LENGTHS[:prompt]) + at for at in positions]] = 1.0
    return found


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ([(i, range(n)) for i, n in enumerate(LENGTHS)], "everywhere", "on nearly every token"),
        ([(1, range(100)), (2, range(80))], "segments", "only in prompts 1 and 2"),
        ([(2, range(80))], "segments", "only in prompt 2"),
        ([(1, range(100))], "segments", "only in prompt 1"),
        ([(1, range(3)), (2, range(3))], "segments", "only in prompts 1 and 2, there only in the first 3 tokens of a prompt"),
        ([(i, range(3)) for i in range(3)], "start", "only in the first 3 tokens of a prompt"),
        ([(1, range(64, 100)), (2, range(64, 80))], "from-token", "starts at token 64"),
        ([(1, range(64, 65)), (2, range(64, 65))], "span", "only at token 64"),
        ([(1, range(64, 67)), (2, range(64, 66))], "span", "only at tokens 64 to 66"),
        ([(1, range(10, 11))], "few", "on 1 of 196 tokens: prompt 1, token 10"),
        ([(0, range(5, 6)), (1, range(40, 42))], "few", "on 3 of 196 tokens: prompt 0, token 5; prompt 1, token 40 and 41"),
        ([(0, range(2, 16, 7)), (1, range(30, 60, 7)), (2, range(11, 12))], "scattered", "on 8 of 196 tokens"),
        ([(0, range(15, 16)), (1, range(99, 100)), (2, range(79, 80))], "last", "only at the last token of each prompt"),
    ],
)
def test_where_tokens_are_wrong_is_said(wrong: list[tuple[int, range]], kind: str, text: str) -> None:
    found = shape_of(errors(*wrong), 0.1, LENGTHS)
    assert (found.kind, found.text) == (kind, text)
    assert found.weights_are_right == (kind not in ("everywhere", "scattered"))


def test_an_error_that_grows_with_position_is_told_from_one_that_is_everywhere() -> None:
    position = torch.cat([torch.arange(n) for n in LENGTHS]).double()
    assert shape_of(position / 100, 1e-3, LENGTHS).text == "grows with position, zero at position 0"
    assert shape_of(0.5 + position / 100, 1e-3, LENGTHS).text == "grows with position"
    short = torch.cat([torch.arange(n) for n in (1, 7, 70)]).double()
    assert shape_of(short / 100, 1e-3, (1, 7, 70)).text == "grows with position, zero at position 0"
    noise = torch.rand(len(position), generator=torch.Generator().manual_seed(0)).double() + 1
    assert shape_of(noise, 1e-3, LENGTHS).kind == "everywhere"


def flat(lengths: tuple[int, ...], first: dict[int, int]) -> torch.Tensor:
    """Errors of half to one and a half from position `first[length]` of each prompt on, none before."""
    position = torch.cat([torch.arange(n) for n in lengths])
    start = torch.cat([torch.full((n,), first.get(n, n)) for n in lengths])
    noise = torch.rand(len(position), generator=torch.Generator().manual_seed(0)) + 0.5
    return torch.where(position >= start, noise, 0).double()


def test_an_error_that_begins_at_the_second_token_and_stays_as_large_does_not_grow() -> None:
    """The past taps of a convolution meet nothing at the first token."""
    lengths = (1, 7, 144)
    errors = flat(lengths, {7: 1, 144: 1})
    found = shape_of(errors, 1e-3, lengths)
    assert (found.kind, found.text) == ("from-token", "from the second token of each prompt on, none at the first")
    assert not found.weights_are_right
    # of an angle that goes with the position, no more can be seen once it has gone round
    assert shape_of(errors, 1e-3, lengths, rotation=True).text == "grows with position, zero at position 0"
    # where another prompt shows nothing, it is not of each
    assert shape_of(flat((7, 144, 20), {7: 1, 144: 1}), 1e-3, (7, 144, 20)).kind not in ("from-token", "grows")


def test_a_constant_error_of_one_ranks_half_of_each_prompt_does_not_grow() -> None:
    assert shape_of(flat((15, 144), {15: 8, 144: 72}), 1e-3, (15, 144)).text == "on 79 of 159 tokens"


def test_what_is_packed_is_called_segments() -> None:
    wrong = errors((1, range(3)), (2, range(3)))
    assert shape_of(wrong, 0.1, LENGTHS, unit="segment").text == "only in segments 1 and 2, there only in the first 3 tokens of a segment"


def test_a_prompt_too_short_to_show_it_is_not_called_clean() -> None:
    position = torch.cat([torch.arange(n) for n in (1, 40, 40)]).double()
    assert shape_of(position / 10, 1e-3, (1, 40, 40)).kind == "grows"


def test_an_error_that_fades_in_later_prompts_says_so() -> None:
    faded = errors((1, range(100)), (2, range(80)))
    faded[16:] *= torch.cat([torch.arange(n, 0, -1) for n in LENGTHS[1:]])
    assert shape_of(faded, 0.1, LENGTHS).text == "only in prompts 1 and 2, strongest at their start and fading"


def cut_of(cp: int, tp: int = 1) -> TokenCut:
    rows = tuple(tuple(range(n)) for n in (16, 32))
    packed = {"cu_seqlens": [0, 16, 48]}
    found = token_cut(Provenance("candidate", "", "", "float32", rows, {"cp": cp, "tp": tp, "sp": tp > 1}, packed=packed))
    assert found is not None
    return found


def test_tokens_of_one_context_parallel_rank_are_told() -> None:
    cut = cut_of(2)
    found = shape_of((cut.cp == 1).double(), 0.1, (16, 32), cut)
    assert (found.kind, found.text) == ("cp-ranks", "only on tokens of CP rank 1")


def test_whole_chunks_of_context_parallel_are_told_from_other_ranges() -> None:
    cut = cut_of(2)
    second = torch.arange(48) >= 16
    found = shape_of(((cut.chunk > 0) & second).double(), 0.1, (16, 32), cut)
    assert (found.kind, found.detail["chunks"], found.detail["segments"]) == ("chunks", [1, 2, 3], [1])
    halves = second & (torch.arange(48) > 20)
    assert shape_of(halves.double(), 0.1, (16, 32), cut).kind != "chunks"


def test_the_ends_of_tensor_parallel_chunks_are_told() -> None:
    cut = cut_of(1, tp=4)
    assert cut.edge.nonzero().flatten().tolist() == [0, 11, 12, 23, 24, 35, 36, 47]
    found = shape_of(cut.edge.double(), 0.1, (16, 32), cut)
    assert (found.kind, found.text) == ("chunk-ends", "only at the ends of TP chunks")


def test_features_that_are_cut_group_by_group_are_known_to_be_cut() -> None:
    assert feature_axes("s b (g (q:16 gate:16 k:8 v:8))[tp]") == ("tp",)
    assert feature_axes("(s[cp,sp] b) e") == ()


def test_tokens_that_stand_in_anothers_place_are_found() -> None:
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    moved = whole[[0, 2, 1, 3, 5, 4]]
    assert permutation_of(whole, moved, torch.tensor([0, 1, 1, 0, 1, 1]).bool(), 1e-6) == [0, 2, 1, 3, 5, 4]
    assert permutation_of(whole, moved + torch.eye(6, 4), torch.ones(6).bool(), 1e-6) is None
    assert permutation_of(whole, whole, torch.zeros(6).bool(), 1e-6) is None


def test_token_errors_are_in_units_of_a_typical_token() -> None:
    whole = torch.ones(4, 9)
    other = whole.clone()
    other[1] += 0.5
    other[2, 0] = math.nan
    assert token_errors(whole, other).tolist() == [0, 0.5, math.inf, 0]
