"""Which coordinates of a layout hold a wrong piece.  Computed from the table; no process has to run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site
from bisect_hooks.table import Cut

EXPERT_AXES, DENSE_AXES = ("ep", "etp"), ("tp", "cp")


Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Wrong coordinates, and the layout they are coordinates of.

    of      "conversion", "run", "engine" or "unknown"
    expert  experts are placed by pp, ep and etp, everything else by pp, tp and cp
    places  coordinates over `axes` whose piece is wrong
    """

    parallel: Parallel
    of: str
    expert: bool
    places: frozenset[Place]

    @property
    def axes(self) -> tuple[str, ...]:
        return ("pp", *(EXPERT_AXES if self.expert else DENSE_AXES))

    def joined(self, other: Shard) -> Shard:
        """Both; of a shard with other axes only the stages are taken over."""
        if self.expert == other.expert:
            return replace(self, places=self.places | other.places)
        inside = {place[1:] for place in self.places}
        return replace(self, places=self.places | {(stage, *rest) for stage in other.ranks_of("pp") for rest in inside})

    def ranks_of(self, axis: str) -> list[int]:
        at = self.axes.index(axis)
        return sorted({place[at] for place in self.places})

    @property
    def named(self) -> dict[str, list[int]]:
        """Wrong coordinates by axis; axes of size 1 are left out."""
        return {axis: self.ranks_of(axis) for axis in self.axes if self.parallel.size(axis) > 1}

    def to_json(self) -> dict[str, Any]:
        """As the contract has it: `ranks` only where no product of lists says it."""
        page: dict[str, Any] = {"layout": self.parallel.shown(), "of": self.of}
        if self.of == "unknown":
            return page
        kept = [self.axes.index(axis) for axis in self.named]
        places = {tuple(place[i] for i in kept) for place in self.places}
        page |= self.named
        if places != set(itertools.product(*self.named.values())):
            page["ranks"] = [dict(zip(self.named, place, strict=True)) for place in sorted(places)]
        return page

    def __str__(self) -> str:
        if self.of == "unknown":
            return "the conversion's layout is not known"
        words = [f"{axis.upper()} {_span(ranks)}" for axis, ranks in self.named.items()]
        what = {"conversion": "converted", "run": "run"}[self.of]
        return f"{', '.join(words) + ' ' if words else ''}({what} at {str(self.parallel).upper().replace('ONE RANK', 'one rank')})"


def shard_of(
    site: Site, parallel: Parallel, of: str, layers: int, inside: Iterable[Place] | None = None, *, expert: bool | None = None
) -> Shard:
    """The wrong coordinates of one site: `inside` its pipeline stage (None: all of them), on the stage that holds it.

    layers  of the model; what lies outside the decoder layers is on the first stage (embedding) or the last
    """
    expert = site.module == "experts" if expert is None else expert
    if site.in_layer and site.layer is not None:
        stage = parallel.stage_of(site.layer, layers)
    else:
        stage = 0 if site.module in ("embedding", "tokens") else parallel.pp - 1
    axes = EXPERT_AXES if expert else DENSE_AXES
    every = itertools.product(*(range(parallel.size(axis)) for axis in axes)) if inside is None else inside
    return Shard(parallel, of, expert, frozenset((stage, *place) for place in every))


def pieces_of(cut: Cut, shape: tuple[int, ...], parallel: Parallel) -> dict[Place, list[tuple[slice, ...]]]:
    """Coordinates inside a stage → the regions of a global tensor that the rank there holds.

    A size that does not divide is rounded up, as a vocabulary is before it is padded.
    """
    axes = EXPERT_AXES if cut.expert else DENSE_AXES
    found = {}
    for place in itertools.product(*(range(parallel.size(axis)) for axis in axes)):
        at = dict(zip(axes, place, strict=True))
        regions = [tuple(slice(0, size) for size in shape)]
        for axis, dim, parts in cut.axes:
            whole, ways = shape[dim] // parts, parallel.size(axis)
            length = -(-whole // ways)
            starts = [part * whole + at[axis] * length for part in range(parts)]
            ends = [min(start + length, (part + 1) * whole) for part, start in enumerate(starts)]
            regions = [
                (*region[:dim], slice(start, end), *region[dim + 1 :])
                for region in regions
                for start, end in zip(starts, ends, strict=True)
                if start < end
            ]
        found[place] = regions
    return found


def _span(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
