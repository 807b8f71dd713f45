"""Parallel sizes, and where a rank stands in them.

Megatron numbers ranks with tp fastest, then cp, then dp, then pp; experts with etp fastest, then ep, then expert dp, then pp
(`parallel_state.RankGenerator`, order "tp-cp-ep-dp-pp").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from bisect_hooks.errors import UsageError


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank stands, each counted from 0."""

    tp: int
    pp: int
    dp: int
    ep: int
    etp: int
    cp: int = 0

    def __getitem__(self, axis: str) -> int:
        return int(getattr(self, axis))


@dataclass(frozen=True, slots=True)
class Parallel:
    """The sizes of a layout.  etp defaults to tp, as in Megatron.

    pp_layers  layers of each pipeline stage, or () for an even split
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    vpp: int = 1
    sp: bool = False
    pp_layers: tuple[int, ...] = ()
    dispatcher: str = "alltoall"
    _dp: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "cp", "vpp"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} must be at least 1, not {getattr(self, name)}")
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        if self.expert_tp < 1:
            raise UsageError(f"--etp must be at least 1, not {self.etp}")
        if self.sp and self.tp == 1:
            raise UsageError("--sp needs --tp of at least 2", hint="drop --sp or raise --tp")
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(f"--vpp {self.vpp} needs --pp of at least 2: one stage has nobody to take turns with")
        if self.pp_layers and len(self.pp_layers) != self.pp * self.vpp:
            raise UsageError(f"--pp-layers names {len(self.pp_layers)} stages, --pp {self.pp} x --vpp {self.vpp} has {self.pp * self.vpp}")
        if any(size < 1 for size in self.pp_layers):
            raise UsageError(f"--pp-layers {','.join(map(str, self.pp_layers))}: every stage holds at least one layer")
        dense = self.tp * self.cp
        least = math.lcm(dense, self.ep * self.expert_tp) // dense
        object.__setattr__(self, "_dp", least)

    @property
    def expert_tp(self) -> int:
        assert self.etp is not None
        return self.etp

    @property
    def dp(self) -> int:
        """The least data parallel size that makes tp·cp·dp a multiple of ep·etp."""
        return self._dp

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def one_rank(self) -> bool:
        return self.world == 1

    def size(self, axis: str) -> int:
        return int(
            {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep, "etp": self.expert_tp, "cp": self.cp, "vpp": self.vpp}[axis]
        )

    def coordinates(self, rank: int) -> Coordinates:
        inside = rank % (self.world // self.pp)
        return Coordinates(
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
            dp=inside // (self.tp * self.cp),
            pp=rank // (self.world // self.pp),
            etp=inside % self.expert_tp,
            ep=inside // self.expert_tp % self.ep,
        )

    def layers_of(self, stage: int, layers: int, chunk: int = 0) -> range:
        """The global layers that model chunk `chunk` of pipeline stage `stage` holds (without VPP a stage has one).

        Raises UsageError when the layers don't divide.
        """
        sizes, at = self.chunk_sizes(layers), chunk * self.pp + stage
        return range(sum(sizes[:at]), sum(sizes[: at + 1]))

    def chunk_sizes(self, layers: int) -> tuple[int, ...]:
        """Layers of each model chunk, in layer order; chunk c lies on stage c mod pp."""
        chunks = self.pp * self.vpp
        if self.pp_layers:
            if sum(self.pp_layers) != layers:
                named = ",".join(map(str, self.pp_layers))
                raise UsageError(f"--pp-layers {named} holds {sum(self.pp_layers)} layers, the model has {layers}")
            return self.pp_layers
        if layers % chunks:
            what = f"--pp {self.pp}" + (f" x --vpp {self.vpp}" if self.vpp > 1 else "")
            raise UsageError(f"{layers} layers don't divide by {what}", hint="say how many each stage holds with --pp-layers")
        return (layers // chunks,) * chunks

    def stage_of(self, layer: int, layers: int) -> int:
        """The pipeline stage that holds a layer."""
        end = 0
        for chunk, size in enumerate(self.chunk_sizes(layers)):
            end += size
            if layer < end:
                return chunk % self.pp
        raise UsageError(f"there is no layer {layer}: the model has {layers}")

    def as_one_rank(self) -> Parallel:
        return Parallel(dispatcher=self.dispatcher)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that can be taken away, an axis before the one that it lives on (sp on tp, vpp on pp)."""
        named = {"sp": self.sp, "vpp": self.vpp > 1, "tp": self.tp > 1, "pp": self.pp > 1, "ep": self.ep > 1, "cp": self.cp > 1}
        return tuple(axis for axis, there in named.items() if there) + (("etp",) if self.expert_tp not in (1, self.tp) else ())

    def without(self, axis: str) -> Parallel:
        """This layout with one axis taken away, and with it what can't be without it."""
        changes: dict[str, dict[str, Any]] = {
            "sp": {"sp": False},
            "tp": {"tp": 1, "sp": False, "etp": 1 if self.expert_tp == self.tp else self.expert_tp},
            "vpp": {"vpp": 1, "pp_layers": ()},
            "pp": {"pp": 1, "vpp": 1, "pp_layers": ()},
        }
        return replace(self, **changes.get(axis, {axis: 1}))

    def shown(self) -> dict[str, int]:
        """The sizes as reports print them."""
        sizes = {axis: self.size(axis) for axis in ("tp", "pp", "ep", "etp", "cp")}
        return sizes | ({"vpp": self.vpp} if self.vpp > 1 else {})

    def __str__(self) -> str:
        words = [f"{axis} {size}" for axis, size in self.shown().items() if size > 1 and axis != "etp"]
        if self.expert_tp != self.tp:
            words.append(f"etp {self.expert_tp}")
        return ", ".join(words + (["sp"] if self.sp else [])) or "one rank"
