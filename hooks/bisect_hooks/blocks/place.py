"""Where a layer stands on both sides, and the ways its tensors are cut: what all blocks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bisect_hooks.site import Site
from bisect_hooks.table import Cut

ROWS, COLUMNS, HALVES = Cut("tp@0"), Cut("tp@1"), Cut("tp@0/2")


@dataclass(frozen=True, slots=True)
class Place:
    """One layer: prefix of its tensors in the reference (`source`) and in the candidate (`target`).

    mtp  whether it is an MTP layer: every Site of one is `mtp.<n>.layer`
    """

    n: int
    source: str
    target: str
    mtp: bool = False

    def site(self, module: str, part: str | None = None) -> Site:
        return Site("mtp", self.n, "layer") if self.mtp else Site(module, self.n, part)


def at(layers: Sequence[int], module: str, part: str | None = None) -> tuple[Site, ...]:
    """The same place in several layers."""
    return tuple(Site(module, n, part) for n in layers)
