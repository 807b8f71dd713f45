"""Which coordinates of a layout hold a wrong piece.  Computed from the table; no process has to run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from bisect_hooks.parallel import Coordinates, Parallel
from bisect_hooks.table import Cut

EXPERT_AXES, DENSE_AXES = ("ep", "etp"), ("tp", "cp")


@dataclass(frozen=True, slots=True)
class Shard:
    """Wrong coordinates inside a pipeline stage, and the layout they are coordinates of.

    of       "conversion", "run" or "unknown"
    places   tuples over `axes` whose piece is wrong
    layers   what decides the stages
    """

    parallel: Parallel
    of: str
    expert: bool
    places: frozenset[tuple[int, ...]] = frozenset()
    stages: frozenset[int] = field(default=frozenset())

    @property
    def axes(self) -> tuple[str, ...]:
        return EXPERT_AXES if self.expert else DENSE_AXES

    def joined(self, other: Shard) -> Shard:
        same = self.places | other.places if self.expert == other.expert else self.places
        return Shard(self.parallel, self.of, self.expert, same, self.stages | other.stages)

    def ranks_of(self, axis: str) -> list[int]:
        at = self.axes.index(axis)
        return sorted({place[at] for place in self.places})

    def to_json(self) -> dict[str, Any]:
        """As the contract has it: axes of size 1 left out, `ranks` only where no product of lists says it."""
        page: dict[str, Any] = {"layout": self.parallel.shown(), "of": self.of}
        if self.of == "unknown":
            return page
        named = {axis: self.ranks_of(axis) for axis in self.axes if self.parallel.size(axis) > 1}
        if self.parallel.pp > 1 and self.stages:
            page["pp"] = sorted(self.stages)
        page |= named
        kept = [self.axes.index(axis) for axis in named]
        product = set(itertools.product(*named.values()))
        places = {tuple(place[i] for i in kept) for place in self.places}
        if named and places != product:
            page["ranks"] = [dict(zip(named, place, strict=True)) for place in sorted(places)]
        return page

    def __str__(self) -> str:
        if self.of == "unknown":
            return "the conversion's layout is not known"
        words = []
        if self.parallel.pp > 1 and self.stages:
            words.append(f"PP {_span(sorted(self.stages))}")
        words += [f"{axis.upper()} {_span(self.ranks_of(axis))}" for axis in self.axes if self.parallel.size(axis) > 1]
        what = {"conversion": "converted", "run": "run"}[self.of]
        return f"{', '.join(words) + ' ' if words else ''}({what} at {str(self.parallel).upper().replace('ONE RANK', 'one rank')})"


def wrong_places(cut: Cut, unequal: torch.Tensor, parallel: Parallel, axes: tuple[str, ...]) -> frozenset[tuple[int, ...]]:
    """Coordinates whose piece of `unequal` (True where a global tensor is wrong) has a True in it."""
    found = set()
    for place in itertools.product(*(range(parallel.size(axis)) for axis in axes)):
        at = Coordinates(**({"tp": 0, "pp": 0, "dp": 0, "ep": 0, "etp": 0, "cp": 0} | dict(zip(axes, place, strict=True))))
        if bool(cut.take(unequal, at, parallel).any()):
            found.add(place)
    return frozenset(found)


def everywhere(parallel: Parallel, axes: tuple[str, ...]) -> frozenset[tuple[int, ...]]:
    """Every coordinate over `axes`."""
    return frozenset(itertools.product(*(range(parallel.size(axis)) for axis in axes)))


def stages_of(layers: Iterable[int | None], parallel: Parallel, total: int) -> frozenset[int]:
    """The pipeline stages that hold `layers` (a None is outside the layers and adds none)."""
    return frozenset(parallel.stage_of(layer, total) for layer in layers if layer is not None)


def _span(numbers: list[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return (
        ("rank " if len(numbers) == 1 else "ranks ") + " and ".join(map(str, numbers))
        if len(numbers) < 3
        else "ranks " + ", ".join(map(str, numbers))
    )
