"""Engine faults that are known, done to the reference: the one that turns its log-probs into the engine's is the one the engine has.

Each simulation changes what some modules give and says where that is.  They are tried on a few responses that nothing simpler explains,
and one is claimed only when what it leaves is an engine's arithmetic and no other comes near.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from bisect_hooks.family import Dimensions
from bisect_hooks.site import Site
from bisect_hooks.tap import Tap, find

from bisect_tool.rollouts.definitions import GAIN, LEFT

FACTORS = (2.0, 4.0, 8.0, 16.0, 0.5, 0.25, 1.5, 2.5)
SIZES = (2, 4, 8, 16)
# does something to a module, given where the response begins; returns how to undo it
Change = Callable[[torch.nn.Module, int], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Simulation:
    """A fault.  paths: modules of the reference that `change` is done to · kind, detail: its relation · said: in words"""

    sites: tuple[Site, ...]
    kind: str
    detail: dict[str, Any]
    said: str
    next: str
    paths: tuple[str, ...]
    change: Change

    @contextmanager
    def on(self, model: torch.nn.Module, start: int) -> Iterator[None]:
        """The fault in the model, until the block ends."""
        with ExitStack() as stack:
            for path in self.paths:
                stack.callback(self.change(find(model, path), start))
            yield


def simulations(model: torch.nn.Module, taps: Sequence[Tap], dims: Dimensions) -> list[Simulation]:
    """Every fault that this model can have."""
    experts = {
        tap.site.layer: tap.path
        for tap in taps
        if tap.site.module == "experts" and tap.site.part == "combine" and tap.site.layer is not None
    }
    blocks = {layer: path.rpartition(".")[0] for layer, path in experts.items()}
    linear = {
        tap.site.layer: tap.path.rpartition(".")[0]
        for tap in taps
        if tap.site.module == "linear_attention" and tap.site.part == "out_proj" and tap.site.layer is not None
    }
    found: list[Simulation] = []
    combined = tuple(Site("experts", n, "combine") for n in experts)
    for factor in FACTORS if experts else ():
        found.append(Simulation(
            tuple(Site("mlp", n) for n in blocks), "scale", {"value": factor}, f"what every mixture of experts gives is {factor:g} times what it should be",
            "It is reduced twice: look at fused all-reduce and at who reduces last (sglang#20110).", tuple(blocks.values()), _times(factor),
        ))  # fmt: skip
        found.append(Simulation(
            combined, "scale", {"value": factor}, f"the routed experts' sum is {factor:g} times what it should be",
            "A routed scaling factor is missing, or applied twice on this path (sglang#8511).", tuple(experts.values()), _times(factor),
        ))  # fmt: skip
    for ways in SIZES:
        if dims.experts > ways and dims.experts % ways == 0:
            kept = dims.experts // ways
            found.append(Simulation(
                combined, "zero", {"experts": list(range(kept, dims.experts)), "ep": ways}, f"experts {kept} to {dims.experts - 1} give nothing: those of every EP rank but 0 of {ways}",
                "The kernel wants local expert numbers and is given global ones (vllm-gaudi#1796).", tuple(experts.values()), _first_experts(kept),
            ))  # fmt: skip
    for layer, path in blocks.items():
        for ways in (2, 4) if layer < dims.layers - 1 else SIZES:
            for rank in range(ways) if layer == dims.layers - 1 else (0,):
                found.append(Simulation(
                    (Site("mlp", layer),), "unknown", {"partial": True, "tp": ways, "rank": rank}, f"it is the partial sum of TP rank {rank} of {ways}: nobody reduced it",
                    "A deferred all-reduce is lost there (sglang#19411 for the last layer, sglang#28619 at a pipeline boundary).", (path,), _partial(rank, ways),
                ))  # fmt: skip
    if linear:
        found.append(Simulation(
            tuple(Site("linear_attention", n, "core") for n in linear), "zero", {"state": "decode"}, "its state is not carried from one decode step to the next",
            "The engine has no incremental path for linear attention, or looks for its state in the wrong slot (NeMo-RL#3010).", tuple(linear.values()), _no_state,
        ))  # fmt: skip
    rotary = tuple(name for name, module in model.named_modules() if name.endswith("rotary_emb"))
    if rotary:
        full = tuple(Site("attention", n, "rope") for n, kind in enumerate(dims.kinds) if kind == "attention")
        found.append(Simulation(
            full, "zero", {"buffer": "inv_freq"}, "nothing is rotated: its frequencies are zero",
            "A buffer was dropped by sleep or release and not restored on resume (vllm#16564).", rotary, _unrotated,
        ))  # fmt: skip
    return [one for one in found if one.sites]


def _times(factor: float) -> Change:
    def change(module: torch.nn.Module, _start: int) -> Callable[[], None]:
        return module.register_forward_hook(lambda _module, _inputs, output: output * factor).remove

    return change


def _first_experts(kept: int) -> Change:
    """Experts take (hidden, chosen ids, weights): what is chosen beyond `kept` weighs nothing."""

    def before(_module: Any, inputs: tuple[Any, ...]) -> Any:
        hidden, chosen, weights, *rest = inputs
        return (hidden, chosen, torch.where(chosen < kept, weights, torch.zeros_like(weights)), *rest)

    return lambda module, _start: module.register_forward_pre_hook(before).remove


def _partial(rank: int, ways: int) -> Change:
    """Only the columns of `rank` in every projection down, routed and shared."""

    def change(module: torch.nn.Module, _start: int) -> Callable[[], None]:
        kept = {name: one.data for name, one in module.named_parameters() if name.removesuffix(".weight").endswith("down_proj")}
        for name, data in kept.items():
            own = torch.zeros_like(data)
            width = data.shape[-1] // ways
            own[..., rank * width : (rank + 1) * width] = data[..., rank * width : (rank + 1) * width]
            module.get_parameter(name).data = own

        def undo() -> None:
            for name, data in kept.items():
                module.get_parameter(name).data = data

        return undo

    return change


def _no_state(module: torch.nn.Module, start: int) -> Callable[[], None]:
    """Tokens behind the prompt see only themselves."""
    alone = False

    def after(_module: Any, inputs: tuple[Any, ...], words: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        nonlocal alone
        hidden = inputs[0] if inputs else words["hidden_states"]
        if alone or hidden.shape[1] <= start:
            return output
        alone = True
        single = module(hidden[0, start:, None])
        alone = False
        return torch.cat([output[:, :start], single[None, :, 0]], 1)

    return module.register_forward_hook(after, with_kwargs=True).remove


def _unrotated(module: torch.nn.Module, _start: int) -> Callable[[], None]:
    def after(_module: Any, _inputs: Any, output: Any) -> Any:
        cos, sin = output
        return torch.ones_like(cos), torch.zeros_like(sin)

    return module.register_forward_hook(after).remove


@dataclass(frozen=True, slots=True)
class Explained:
    """A simulation that explains what is seen.  before, after: mean distance in nats a token; other: of the next best"""

    simulation: Simulation
    before: float
    after: float
    other: Simulation
    other_after: float


def explain(found: Sequence[tuple[Simulation, float]], before: float) -> Explained | None:
    """The one that leaves an engine's arithmetic, a third or less of what was there and of what the next best leaves."""
    ordered = sorted(found, key=lambda one: one[1])
    if len(ordered) < 2:
        return None
    (best, after), (other, other_after) = ordered[:2]
    if after > LEFT or after * GAIN > before or after * GAIN > other_after:
        return None
    return Explained(best, before, after, other, other_after)
