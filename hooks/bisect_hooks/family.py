"""A Family is one architecture: how its config reads on both sides, its weight table, and its taps on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any, Literal, NamedTuple, Protocol

import torch

from bisect_hooks.errors import UsageError, first_line
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site
from bisect_hooks.table import Rule
from bisect_hooks.tap import Tap

Side = Literal["reference", "candidate"]
CheckpointLayout = Literal["slime", "native"]
LAYOUTS: tuple[CheckpointLayout, ...] = ("slime", "native")


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What shapes a model, in the field's words.  Each side makes its own: from config.json, or from Megatron's args.

    kinds        of each layer: "attention" or "linear_attention"
    moe          whether each layer has routed experts; the others have a dense MLP of `dense` rows
    zero_centred norms scale by 1 + w
    interleaved  linear attention's projections are packed key head by key head
    sigmoid      experts are scored by a sigmoid, else by a softmax; `renormalised`: over the chosen ones
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_width: int
    vocabulary: int
    kinds: tuple[str, ...]
    moe: tuple[bool, ...]
    output_gate: bool
    tied: bool
    mtp: int
    positions: int | None
    experts: int = 0
    top_k: int = 0
    routed: int = 0
    shared: int = 0
    shared_gate: bool = False
    dense: int = 0
    key_heads: int = 0
    key_width: int = 0
    value_heads: int = 0
    value_width: int = 0
    kernel: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False
    zero_centred: bool = False
    epsilon: float = 1e-6
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    interleaved: bool = False
    sigmoid: bool = False
    renormalised: bool = True
    scaling: float = 1.0
    expert_bias: bool = False

    @property
    def key_rows(self) -> int:
        return self.key_heads * self.key_width

    @property
    def value_rows(self) -> int:
        return self.value_heads * self.value_width


def check_conversion(dims: Dimensions, parallel: Parallel) -> None:
    """Refuses a layout that no checkpoint of this model can have been written under.  Raises UsageError."""
    parallel.chunk_sizes(dims.layers)
    if parallel.ep > 1 and not dims.experts:
        raise UsageError(f"--ep {parallel.ep}: this model has no experts to lay out")
    if dims.experts % parallel.ep:
        raise UsageError(f"{dims.experts} experts don't divide by --ep {parallel.ep}")


def check_sizes(dims: Dimensions, parallel: Parallel) -> None:
    """Refuses sizes that don't divide, before megatron-core does it with an assertion.  Raises UsageError."""
    check_conversion(dims, parallel)
    for what, size, axis in (
        ("attention heads", dims.heads, "tp"),
        ("vocabulary rows", dims.vocabulary, "tp"),
        ("linear attention key heads", dims.key_heads, "tp"),
        ("MLP rows", dims.dense * (not all(dims.moe)), "tp"),
        ("shared expert rows", dims.shared, "tp"),
        ("expert rows", dims.routed, "etp"),
    ):
        if size % parallel.size(axis):
            raise UsageError(f"{size} {what} don't divide by --{axis} {parallel.size(axis)}")
    if dims.groups % parallel.tp and parallel.tp % dims.groups:
        raise UsageError(f"{dims.groups} KV heads neither divide by --tp {parallel.tp} nor divide it")
    if parallel.cp > 1:
        raise UsageError("--cp above 1 needs Transformer Engine: megatron-core's own attention asserts it (dot_product_attention.py:58)")
    if parallel.expert_tp > 1 and parallel.ep > 1 and parallel.dispatcher == "alltoall":
        raise UsageError(
            "--etp above 1 with --ep above 1 does not run with the alltoall dispatcher on gloo (uneven all-gather)",
            hint="add --dispatcher allgather, or --etp 1",
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One Megatron argument and the value that config.json asks for.

    arg      name in Megatron's args          flag   as written on a command line
    default  what Megatron does when the flag is not given (None: building needs it, so it is asked for)
    site     what goes wrong first when it is off, in which layers
    modules  everything it reaches
    effect   one clause for a person
    """

    arg: str
    flag: str
    expected: Any
    sites: tuple[Site, ...]
    effect: str
    default: Any = None
    needed: bool = False
    same: Callable[[Any, Any], bool] = lambda a, b: bool(a == b)


@dataclass(frozen=True, slots=True)
class Derived:
    """A Site that no module of a side yields: made of other recorded keys by the reference's own formula."""

    key: str
    sources: tuple[str, ...]
    formula: Callable[..., torch.Tensor]


class Routing(NamedTuple):
    """What a router makes of logits [.. e]: probabilities (zero where not chosen), choice as 0 and 1, and what was ranked."""

    probs: torch.Tensor
    chosen: torch.Tensor
    ranked: torch.Tensor


class Family(Protocol):
    """What a family file offers.  Everything that names a model lives behind this."""

    name: str
    model_types: tuple[str, ...]

    def read(self, config: Mapping[str, Any]) -> tuple[Dimensions, list[str]]: ...
    def reference_dimensions(self, config: Mapping[str, Any]) -> Dimensions: ...
    def candidate_dimensions(self, args: Mapping[str, Any]) -> Dimensions: ...
    def read_by_spec(self, args: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]: ...
    def settings(self, config: Mapping[str, Any], layout: CheckpointLayout) -> Sequence[Setting]: ...
    def rules(self, dims: Dimensions, layout: CheckpointLayout, names: Sequence[str], mtp: bool) -> list[Rule]: ...
    def mtp_tensors(self, names: Iterable[str], dims: Dimensions) -> list[str]: ...
    def mtp_key(self, config: Mapping[str, Any]) -> str | None: ...
    def left_out(self, name: str, dims: Dimensions) -> str | None: ...
    def reference_taps(self, dims: Dimensions) -> tuple[Tap, ...]: ...
    def reference_modules(self, dims: Dimensions) -> frozenset[str]: ...
    def candidate_taps(self, dims: Dimensions, layout: CheckpointLayout) -> tuple[Tap, ...]: ...
    def derived(self, dims: Dimensions, side: Side) -> tuple[Derived, ...]: ...
    def route(
        self, logits: torch.Tensor, dims: Dimensions, bias: torch.Tensor | None = None, chosen: torch.Tensor | None = None
    ) -> Routing: ...


ENTRY_POINTS = "bisect_tool.families"


@cache
def families() -> dict[str, Family]:
    """Every known family, by name: the files of `bisect_hooks.families`, and whatever packages offer as entry points.

    Raises UsageError for one that can't be loaded, or that takes the name or a model_type of another.
    """
    package = import_module("bisect_hooks.families")
    found = [import_module(f"{package.__name__}.{module.name}").FAMILY for module in iter_modules(package.__path__)]
    for point in entry_points(group=ENTRY_POINTS):
        try:
            found.append(point.load())
        except Exception as error:
            raise UsageError(f"the family {point.name} ({point.value}) can't be loaded: {first_line(error)}") from error
    known: dict[str, Family] = {}
    taken: dict[str, str] = {}
    for family in found:
        for word in (family.name, *family.model_types):
            if family.name in known or taken.get(word, family.name) != family.name:
                raise UsageError(f"two families are called {word!r}", hint=f"entry points of the group {ENTRY_POINTS} are read too")
            taken[word] = family.name
        known[family.name] = family
    return known


def family_of(config: Mapping[str, Any]) -> Family:
    """The family whose config.json this is.  Raises UsageError that lists the known ones."""
    known = families()
    model_type = config.get("model_type")
    for family in known.values():
        if model_type in family.model_types:
            return family
    listed = "; ".join(f"{family.name} (model_type {', '.join(family.model_types)})" for family in known.values())
    raise UsageError(f"unknown family: config.json has model_type {model_type!r}", hint=f"known: {listed}")


def family_of_tensors(args: Mapping[str, Any], layout: CheckpointLayout, keys: Iterable[str]) -> Family:
    """The family whose weight table, under these args, makes these tensors: none too many, none too few, or else the fewest.

    Megatron's args name no model.  Two families that fit alike build the same candidate.  Raises UsageError when none reads the args.
    """
    there = set(keys)
    mtp = any(key.startswith("mtp.") for key in there)
    best: tuple[int, Family] | None = None
    for family in families().values():
        try:
            dims = family.candidate_dimensions(args)
        except UsageError:
            continue
        made = {candidate.name for rule in family.rules(dims, layout, (), mtp) for candidate in rule.candidates}
        if best is None or len(made ^ there) < best[0]:
            best = len(made ^ there), family
    if best is None:
        raise UsageError("no known family can read the candidate's args", hint="bisect-tool run --stages config says what is off")
    return best[1]
