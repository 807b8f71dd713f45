"""A Family is one architecture: how its config reads on both sides, its weight table, and its taps on both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from bisect_hooks.errors import UsageError
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

    kinds    of each layer: "attention" or "linear_attention"
    moe      whether each layer has routed experts
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

    @property
    def key_rows(self) -> int:
        return self.key_heads * self.key_width

    @property
    def value_rows(self) -> int:
        return self.value_heads * self.value_width


def check_sizes(dims: Dimensions, parallel: Parallel) -> None:
    """Refuses sizes that don't divide, before megatron-core does it with an assertion.  Raises UsageError."""
    parallel.chunk_sizes(dims.layers)
    for what, size, axis in (
        ("attention heads", dims.heads, "tp"),
        ("KV heads", dims.groups, "tp"),
        ("vocabulary rows", dims.vocabulary, "tp"),
        ("linear attention key heads", dims.key_heads, "tp"),
        ("shared expert rows", dims.shared, "tp"),
        ("experts", dims.experts, "ep"),
        ("expert rows", dims.routed, "etp"),
    ):
        if size % parallel.size(axis):
            raise UsageError(f"{size} {what} don't divide by --{axis} {parallel.size(axis)}")
    if parallel.cp > 1:
        raise UsageError("--cp above 1 needs Transformer Engine: megatron-core's own attention asserts it (dot_product_attention.py:58)")
    if parallel.vpp > 1:
        raise UsageError("--vpp above 1 is not run yet: this build drives pipeline stages by hand, one chunk a rank")
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


class Family(Protocol):
    """What a family file offers.  Everything that names a model lives behind this."""

    name: str
    model_types: tuple[str, ...]

    def reference_dimensions(self, config: Mapping[str, Any]) -> Dimensions: ...
    def candidate_dimensions(self, args: Mapping[str, Any]) -> Dimensions: ...
    def read_by_spec(self, args: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]: ...
    def settings(self, config: Mapping[str, Any], layout: CheckpointLayout) -> Sequence[Setting]: ...
    def rules(self, dims: Dimensions, layout: CheckpointLayout, names: Sequence[str], mtp: bool) -> list[Rule]: ...
    def left_out(self, name: str) -> str | None: ...
    def reference_taps(self, dims: Dimensions) -> tuple[Tap, ...]: ...
    def candidate_taps(self, dims: Dimensions, layout: CheckpointLayout) -> tuple[Tap, ...]: ...
    def derived(self, dims: Dimensions, side: Side) -> tuple[Derived, ...]: ...
    def route(self, logits: torch.Tensor, dims: Dimensions) -> tuple[torch.Tensor, torch.Tensor]: ...


def families() -> dict[str, Family]:
    """Every known family, by name."""
    from bisect_hooks.families.qwen3_5_moe import Qwen35Moe

    return {family.name: family for family in (Qwen35Moe(),)}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family whose config.json this is.  Raises UsageError that lists the known ones."""
    known = families()
    model_type = config.get("model_type")
    for family in known.values():
        if model_type in family.model_types:
            return family
    listed = "; ".join(f"{family.name} (model_type {', '.join(family.model_types)})" for family in known.values())
    raise UsageError(f"unknown family: config.json has model_type {model_type!r}", hint=f"known: {listed}")
