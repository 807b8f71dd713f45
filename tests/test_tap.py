"""Listening hears everything once, changes nothing but what is grafted, and leaves no trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from bisect_hooks.errors import BisectError, UsageError
from bisect_hooks.parallel import Coordinates, Parallel
from bisect_hooks.site import Site
from bisect_hooks.tap import Graft, Heard, Tap, find, key_of, listening, split_key


def mix(left: torch.Tensor, right: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A module-level function, as the delta rule and the rotation are."""
    return (left + right) * scale, left - right


class Mixer(torch.nn.Module):
    """Projects, mixes twice through a module-level function, and finishes in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)
        self.fails = False

    def finish(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x * 2, "finished"

    def forward(self, hidden: torch.Tensor, *, bias: torch.Tensor) -> tuple[torch.Tensor, None]:
        projected = self.proj(hidden)
        projected.add_(1)  # in place: a recorded view would change with it
        if self.fails:
            raise RuntimeError("the forward fails")
        first, _ = mix(projected, right=bias)
        _, second = mix(first, bias, scale=3.0)
        return self.finish(first + second)[0], None


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Linear(3, 4)
        self.layers = torch.nn.ModuleList([Mixer(), Mixer()])
        self.unused = torch.nn.Linear(4, 4)
        self.times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(x)
        for layer in self.layers:
            for _ in range(self.times):
                hidden, _ = layer(hidden, bias=hidden.flip(-1))
        mix(hidden, hidden)  # on nobody's behalf: no tap may hear it
        return hidden


MIX = f"{__name__}:mix"
ENTERS = Tap(Site("input", 0), "layers.0", "b s h", "input", (0,))
BIAS = Tap(Site("attention", 0, "rope"), "layers.0", "b s h", "input", ("bias",))
PROJECTED = Tap(Site("attention", 0, "qkv"), "layers.0.proj", "b s h")
ARGUMENT = Tap(Site("attention", 0, "q_norm"), "layers.0", "b s h", "function", (1, "right"), MIX, 0, result=False)
RESULT = Tap(Site("attention", 0, "core"), "layers.0", "b s h", "function", (1,), MIX, 1)
METHOD = Tap(Site("attention", 0, "out_proj"), "layers.0", "b s h", "method", (0,), "finish")
LEAVES = Tap(Site("output", 0), "layers.0", "b s h", select=(0,))
SQUARED = Tap(Site("router", 0, "probs"), "layers.0.proj", "b s h", transform=lambda output: output.square())
NEXT = Tap(Site("output", 1), "layers.1", "b s h", select=(0,))
TAPS = (ENTERS, BIAS, PROJECTED, ARGUMENT, RESULT, METHOD, LEAVES, SQUARED, NEXT)
GRAFTABLE = (ENTERS, BIAS, PROJECTED, ARGUMENT, RESULT, METHOD, LEAVES)
INPUT = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))


def record(model: Model, taps: tuple[Tap, ...] = TAPS, values: Mapping[str, torch.Tensor] | None = None) -> tuple[torch.Tensor, Heard]:
    graft = Graft(values or {}, Coordinates(0, 0, 0, 0, 0), {}, Parallel())
    with torch.no_grad(), listening(model, taps, graft, where=" on the candidate (rank 1)") as heard:
        return model(INPUT), heard


def names(taps: tuple[Tap, ...]) -> list[str]:
    return [str(tap.site) for tap in taps]


def assert_no_trace(model: Model, original: object) -> None:
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "finish" not in vars(module)
    assert mix is original


def test_what_is_recorded_is_what_was_there() -> None:
    model = Model()
    mixer = model.layers[0]
    assert isinstance(mixer, Mixer)
    _, heard = record(model)
    with torch.no_grad():
        hidden = model.embed(INPUT)
        projected = mixer.proj(hidden)
        bias = hidden.flip(-1)
        first = projected + 1 + bias
        second = first - bias
    expected = [hidden, bias, projected, bias, second, (first + second) * 2, (first + second) * 2, projected.square()]
    for tap, tensor in zip(TAPS, expected, strict=False):
        assert torch.equal(heard.one(tap), tensor), tap.site
    assert all(len(tensors) == 1 for tensors in heard.tensors.values())


def test_recordings_are_copies() -> None:
    model = Model()
    _, heard = record(model)
    before = heard.one(PROJECTED).clone()
    assert not torch.equal(heard.one(PROJECTED) + 1, before)
    with torch.no_grad():
        output = model(INPUT)
        output.zero_()
        assert torch.equal(before, model.layers[0].proj(model.embed(INPUT)))  # type: ignore[operator]


def test_listening_changes_no_bit_of_the_output() -> None:
    model = Model()
    with torch.no_grad():
        without = model(INPUT)
    listened, _ = record(model)
    assert torch.equal(without, listened)


def test_nothing_is_kept_where_only_grafts_are_wanted() -> None:
    model = Model()
    with torch.no_grad(), listening(model, TAPS, record=False) as heard:
        model(INPUT)
    assert heard.tensors == {}


def test_no_hook_survives_the_block() -> None:
    model, original = Model(), mix
    with listening(model, TAPS) as heard:
        assert mix is not original
        model(INPUT)
    assert not heard.one(PROJECTED).requires_grad
    assert_no_trace(model, original)


def test_no_hook_survives_an_exception_in_the_forward() -> None:
    model, original = Model(), mix
    model.layers[0].fails = True  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="the forward fails"):
        record(model)
    assert_no_trace(model, original)


@pytest.mark.parametrize("path", ["layers.0.porj", "layers.2", "layers.0.proj.weights"])
def test_no_hook_survives_a_tap_that_can_not_be_placed(path: str) -> None:
    model, original = Model(), mix
    with pytest.raises(UsageError):
        record(model, (*TAPS, Tap(Site("lm_head"), path, "b s h")))
    assert_no_trace(model, original)


def test_a_forward_that_failed_is_not_mistaken_for_the_caller_of_the_next_function() -> None:
    model = Model()
    with listening(model, (RESULT,)) as heard:
        model.layers[0].fails = True  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="the forward fails"):
            model(INPUT)
        for _ in range(3):
            mix(INPUT, INPUT)
        model.layers[0].fails = False  # type: ignore[assignment]
        model(INPUT)
    assert len(heard.tensors[RESULT.id]) == 1


def test_a_tap_that_never_fired_is_an_error_that_names_it_and_its_side() -> None:
    tap = Tap(Site("attention", 3, "core"), "unused", "b s h")
    with pytest.raises(BisectError, match=r"on the candidate \(rank 1\): layers.3.attention.core at unused \(0 times\)"):
        record(Model(), (ENTERS, tap))


@pytest.mark.parametrize("tap", [PROJECTED, METHOD, RESULT, ENTERS], ids=lambda tap: tap.at)
def test_a_tap_that_fired_twice_is_an_error(tap: Tap) -> None:
    model = Model()
    model.times = 2
    with pytest.raises(BisectError, match=rf"{tap.site} at {tap.path} \(2 times\)"):
        record(model, (tap,))


@pytest.mark.parametrize("tap", GRAFTABLE, ids=names(GRAFTABLE))
def test_a_graft_takes_effect_and_changes_nothing_before_it(tap: Tap) -> None:
    model = Model()
    output, plain = record(model)
    value = torch.full((2, 3, 4), 0.25)
    grafted, heard = record(model, values={str(tap.site): value})
    assert not torch.equal(grafted, output)
    assert torch.equal(heard.one(tap), plain.one(tap))  # what the model itself made is recorded
    for earlier in TAPS[: TAPS.index(tap)]:
        assert torch.equal(heard.one(earlier), plain.one(earlier)), earlier.site


def test_a_graft_is_handed_on_as_it_is() -> None:
    model = Model()
    value = torch.randn(2, 3, 4)
    hand_over = {str(LEAVES.site): value}
    _, heard = record(model, (LEAVES, Tap(Site("input", 1), "layers.1", "b s h", "input", (0,))), hand_over)
    assert torch.equal(heard.tensors["layers.1.input|input|0|-1"][0], value)
    same, _ = record(model, values={str(LEAVES.site): record(model)[1].one(LEAVES)})
    assert torch.equal(same, record(model)[0])


def test_a_transform_is_given_every_argument() -> None:
    told = Tap(Site("router", 0, "topk"), "layers.0", "b s h", "input", transform=lambda told: told[0] - told[1])
    model = Model()
    _, heard = record(model, (told,))
    hidden = model.embed(INPUT)
    assert torch.equal(heard.one(told), hidden - hidden.flip(-1))


@pytest.mark.parametrize("tap", [SQUARED, replace(LEAVES, graftable=False)], ids=["transformed", "said so"])
def test_a_tap_that_can_not_be_grafted_is_heard_and_left_alone(tap: Tap) -> None:
    model = Model()
    grafted, heard = record(model, (tap,), {str(tap.site): torch.zeros(2, 3, 4)})
    assert torch.equal(grafted, record(model, ())[0])
    assert heard.one(tap).any()


def test_a_function_is_heard_only_on_behalf_of_the_module_that_calls_it() -> None:
    other = Tap(Site("attention", 1, "core"), "layers.1", "b s h", "function", (1,), MIX, 1)
    _, heard = record(Model(), (RESULT, other))
    assert not torch.equal(heard.one(RESULT), heard.one(other))


def test_two_taps_that_are_the_same_are_refused() -> None:
    with pytest.raises(UsageError, match=r"two taps are the same: layers\.0\.output"):
        record(Model(), (LEAVES, LEAVES))


def test_a_tap_on_what_is_no_module_or_has_no_such_method_is_refused() -> None:
    with pytest.raises(UsageError, match="is a Parameter, not a module"):
        record(Model(), (Tap(Site("lm_head"), "embed.weight", "v h"),))
    with pytest.raises(UsageError, match="has no method finnish"):
        record(Model(), (Tap(Site("lm_head"), "layers.0", "v h", "method", name="finnish"),))
    with pytest.raises(BisectError, match=r"none is \('biass',\)"):
        record(Model(), (Tap(Site("lm_head"), "layers.0", "b s h", "input", ("biass",)),))
    with pytest.raises(BisectError, match="heard tuple, not a tensor"):
        record(Model(), (Tap(Site("lm_head"), "layers.0", "b s h", transform=lambda output: output),))


@pytest.mark.parametrize(
    ("path", "said"),
    [("embbed", "nearest: embed"), ("layers.0.porj", "layers.0 has no 'porj'; nearest: proj"), ("layers.7.proj", "layers has no '7'")],
)
def test_an_unknown_path_is_refused_with_the_nearest_children(path: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find(Model(), path)


def test_a_key_is_a_site_and_a_piece() -> None:
    assert key_of(Site("attention", 3, "qkv"), "gate") == "layers.3.attention.qkv:gate"
    assert split_key("layers.3.attention.qkv:gate") == ("layers.3.attention.qkv", "gate")
    assert split_key("final_norm") == ("final_norm", "")
    assert Tap(Site("attention", 3, "qkv"), "x", "b s (q:1 k:1)").keys == ("layers.3.attention.qkv:q", "layers.3.attention.qkv:k")
