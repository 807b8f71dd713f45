"""Rows and columns are judged by themselves: nothing hides in a mean, and a loud channel hides nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bisect_tool.measure import measure
from bisect_tool.noise import MARGIN, Noise, estimate, weigh

EPS = 2.0**-9
TOKENS, CHANNELS, LOUD = 63, 96, 17
Edit = Callable[[torch.Tensor], None]


def site(seed: int, tokens: int = TOKENS) -> torch.Tensor:
    """Values whose channel 17 is a thousand times as loud as the rest."""
    values = torch.randn(tokens, CHANNELS, generator=torch.Generator().manual_seed(seed))
    values[:, LOUD] *= 1000
    return values


def again(values: torch.Tensor, seed: int) -> torch.Tensor:
    """The same, with arithmetic noise of some units in the last place."""
    return values * (1 + 2 * EPS * torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)))


def noise_of(values: torch.Tensor) -> Noise:
    return estimate(values, [again(values, 100 + i) - values for i in range(4)], EPS)


def worst(values: torch.Tensor, candidate: torch.Tensor, noise: Noise) -> tuple[float, str, int]:
    found = max(weigh(values, candidate, noise), key=lambda one: one.ratio)
    return found.ratio, found.kind, found.index


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 257])
@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_fault(tokens: int, seed: int) -> None:
    values = site(seed, tokens)
    assert worst(values, again(values, 1000 + seed), noise_of(values))[0] < 1


@pytest.mark.parametrize("seed", range(40))
def test_of_one_token_whose_heads_are_not_alike_in_size_noise_is_no_fault(seed: int) -> None:
    """Noise goes with a head, not with a channel, and two of four re-evaluations change no bit where there is but one token."""
    generator = torch.Generator().manual_seed(seed)
    loud = torch.logspace(0, -3, 8).repeat_interleave(24)
    values = loud * torch.randn(1, len(loud), generator=generator)

    def noise() -> torch.Tensor:
        return EPS * loud * torch.randn(1, len(loud), generator=generator) * (torch.rand(1, len(loud), generator=generator) < 0.6)

    found = estimate(values, [torch.zeros_like(values), torch.zeros_like(values), noise(), noise()], EPS / 4)
    assert worst(values, values + noise(), found)[0] < 1


@pytest.mark.parametrize("tokens", [63, 257])
@pytest.mark.parametrize("seed", range(5))
def test_a_scale_below_the_noise_of_each_value_is_found_in_their_sum(tokens: int, seed: int) -> None:
    """1 % off where each value is 0.4 % off by noise, as in bf16."""
    values = site(seed, tokens)
    ratio, kind, _ = worst(values, again(values, 1000 + seed) * 1.01, noise_of(values))
    assert (ratio > 1, kind) == (True, "scale")


@pytest.mark.parametrize("tokens", [1, 63])
def test_a_constant_may_be_rounded_once(tokens: int) -> None:
    values = site(0, tokens)
    assert worst(values, again(values, 1000) * (1 + EPS), noise_of(values))[0] < 1


@pytest.mark.parametrize("shared", [(1, CHANNELS), (TOKENS, 1)], ids=["by tokens", "by channels"])
@pytest.mark.parametrize("seed", range(5))
def test_noise_that_is_shared_is_no_scale(shared: tuple[int, int], seed: int) -> None:
    """A rounded weight is the same for every token, an expert's for every channel: of few of them the whole may be off by much."""

    def one(number: int) -> torch.Tensor:
        return again(values, number) * (1 + 4 * EPS * torch.randn(shared, generator=torch.Generator().manual_seed(number)))

    values = site(seed)
    noise = estimate(values, [one(100 + i) - values for i in range(4)], EPS)
    assert worst(values, one(1000 + seed), noise)[0] < 1
    ratio, kind, _ = worst(values, again(values, 1000 + seed) * 1.01, noise_of(values))
    assert (ratio > 1, kind) == (True, "scale")


def test_what_is_usual_of_a_site_in_all_layers_is_allowed_in_each() -> None:
    layers = [replace(noise_of(site(seed)), scale=scale) for seed, scale in enumerate((1.0, 1.0, 1.0, 19.0))]
    assert [round(one.usual(layers).scale, 2) for one in layers] == [9.54, 9.54, 9.54, 19.0]


def test_how_much_is_shared_is_seen_in_one_evaluation() -> None:
    """Of its projection of the whole, which is of many terms with random signs, there is but one; here it is none by chance."""
    values = torch.ones(TOKENS, CHANNELS)
    signs = torch.tensor([1.0, -1.0]).repeat(CHANNELS // 2)
    noise = estimate(values, [(8 * EPS * signs).expand(values.shape)], EPS)
    assert noise.scale == pytest.approx(math.sqrt(TOKENS), rel=0.01)


def change(rows: slice | int, columns: slice | int, factor: float) -> Edit:
    def edit(candidate: torch.Tensor) -> None:
        candidate[rows, columns] *= factor

    return edit


def swap(one: int, other: int) -> Edit:
    def edit(candidate: torch.Tensor) -> None:
        candidate[:, [one, other]] = candidate[:, [other, one]]

    return edit


@pytest.mark.parametrize(
    ("edit", "kind", "index"),
    [
        (change(slice(None), 40, 1.25), "column", 40),
        (change(62, slice(0, 16), 0.0), "row", 62),
        (change(62, slice(None), 1.3), "row", 62),
        (swap(3, 4), "column", 3),
        (change(slice(None), LOUD, 1.25), "column", LOUD),
    ],
    ids=["a channel", "a token", "all of a token", "two channels swapped", "the loud channel itself"],
)
def test_one_row_or_column_is_found_beside_a_channel_a_thousand_times_as_loud(edit: Edit, kind: str, index: int) -> None:
    values = site(0)
    candidate = again(values, 5)
    edit(candidate)
    ratio, found, at = worst(values, candidate, noise_of(values))
    assert ratio > 1 and (found, at) in ((kind, index), (kind, index + 1))


def test_a_scale_is_found_wherever_noise_is_finer_than_it() -> None:
    values = site(0).double()
    fine = [1e-7 * torch.randn(values.shape, generator=torch.Generator().manual_seed(i)).double() * values for i in range(4)]
    noise = estimate(values, fine, 2.0**-24)
    assert worst(values, values + fine[0], noise)[0] < 1
    assert worst(values, values * 1.02, noise)[0] > 1000


def test_rows_that_could_not_be_compared_say_nothing() -> None:
    values = site(0)
    deltas = [again(values, 100 + i) - values for i in range(4)]
    deltas[0][5] = torch.nan
    noise = estimate(values, deltas, EPS)
    assert bool(noise.rows.isfinite().all() and noise.columns.isfinite().all())
    nothing = estimate(values, [torch.full_like(values, torch.nan)], EPS)
    assert nothing.worst == (1.0, 1.0, 1.0, EPS) and bool(nothing.columns.min() > 0)


def test_where_every_evaluation_is_the_same_half_a_unit_in_the_last_place_is_left() -> None:
    values = torch.ones(4, 6)
    noise = estimate(values, [torch.zeros(4, 6)], EPS)
    assert worst(values, values * (1 + EPS), noise)[0] < 1
    assert worst(values, values * (1 + 100 * EPS), noise)[0] > 1


def test_noise_by_blocks_of_rows_is_the_noise_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    values = site(3)
    deltas = [again(values, 100 + i) - values for i in range(4)]
    deltas[1][5:9] = torch.nan  # rows that can't be compared
    candidate = again(values, 1000)
    whole, far, size = estimate(values, deltas, EPS), weigh(values, candidate, noise_of(values)), measure(values, candidate)
    monkeypatch.setattr("bisect_tool.measure.BLOCK", 7 * CHANNELS)
    blocks = estimate(values, deltas, EPS)
    for one, other in ((whole.rows, blocks.rows), (whole.columns, blocks.columns)):
        torch.testing.assert_close(one, other)
    assert blocks.worst == pytest.approx(whole.worst)
    for extreme, same in zip(far, weigh(values, candidate, noise_of(values)), strict=True):
        assert (same.kind, same.index) == (extreme.kind, extreme.index) and same.size == pytest.approx(extreme.size)
    again_measured = measure(values, candidate)
    assert again_measured.relative_rms == pytest.approx(size.relative_rms)
    assert (again_measured.index, again_measured.largest, again_measured.compared) == (size.index, size.largest, size.compared)


def test_the_margin_is_the_next_power_of_two_above_the_furthest_clean_run() -> None:
    page = json.loads((Path(__file__).parents[1] / "golden/calibration.json").read_text())
    assert 2 ** math.ceil(math.log2(2 * max(page["largest"].values()))) == MARGIN == page["allowed"]
    assert not page["clean"]["alarms"]
