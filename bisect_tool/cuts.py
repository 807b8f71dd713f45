"""Which rank each token and each feature of a Recording lay on, as far as its provenance says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.layout import Dim, Flat, Sections, parse_layout
from bisect_hooks.parallel import Parallel
from bisect_hooks.shard_file import cut_segments
from bisect_hooks.zigzag import zigzag_order

from bisect_tool.recording import Provenance


@dataclass(frozen=True, slots=True)
class TokenCut:
    """For every real token: its cp rank, the chunk of its segment (of 2·cp), its tp rank under sequence parallel, and whether it is
    the first or the last of what that rank holds."""

    cp: torch.Tensor
    chunk: torch.Tensor
    sp: torch.Tensor
    edge: torch.Tensor


def parallel_of(come: Provenance) -> Parallel:
    """The layout a Recording was made under, one rank where it does not say.  Data parallel replicas are left out."""
    sizes = come.parallel
    return Parallel(
        tp=int(sizes.get("tp") or 1), pp=int(sizes.get("pp") or 1), ep=int(sizes.get("ep") or 1), etp=int(sizes.get("etp") or sizes.get("tp") or 1),
        cp=int(sizes.get("cp") or 1), sp=bool(sizes.get("sp")),
    )  # fmt: skip


def token_cut(come: Provenance) -> TokenCut | None:
    """Where the tokens lay, or None when they were not cut, or the sizes that they were padded to are not known."""
    parallel = parallel_of(come)
    ways = parallel.tp if parallel.sp else 1
    lengths = [len(row) for row in come.rows]
    if parallel.cp * ways == 1:
        return None
    try:
        padded, real = cut_segments(come.packed) if come.packed else ([max(lengths)], lengths)
    except UsageError:
        return None
    total, chunks = sum(padded), 2 * parallel.cp if parallel.cp > 1 else 1
    if any(size % chunks for size in padded) or total % (parallel.cp * ways):
        return None
    order = zigzag_order(total, padded, parallel.cp) if parallel.cp > 1 else torch.arange(total)
    held = total // parallel.cp
    place = order.argsort()  # where each token stands among all ranks' tokens
    within = place % held
    width = held // ways
    chunk = torch.cat([torch.arange(size) * chunks // size for size in padded])
    edge = (within % width == 0) | (within % width == width - 1)
    whole = TokenCut(place // held, chunk, within // width, edge)
    index = _real(padded, real, packed=bool(come.packed))
    return TokenCut(*(getattr(whole, name)[index] for name in ("cp", "chunk", "sp", "edge")))


def feature_axes(layout: str) -> tuple[str, ...]:
    """The axes that a layout cuts features over, outermost first."""
    axes = [axis for item in parse_layout(layout).items for axis in _feature_axes(item)]
    return tuple(axes[0].split(",")) if axes else ()


def _feature_axes(item: Dim | Sections | Flat) -> list[str]:
    own = [item.axis] if item.axis and not (isinstance(item, Dim) and item.name in ("b", "s")) else []
    return own + [axis for inner in (item.items if isinstance(item, Flat) else ()) for axis in _feature_axes(inner)]


def sequence_axes(layout: str) -> tuple[str, ...]:
    """The axes that a layout cuts the sequence over."""
    leaves = [leaf for item in parse_layout(layout).items for leaf in _leaves(item)]
    found = next((leaf.axis for leaf in leaves if isinstance(leaf, Dim) and leaf.name == "s"), None)
    return tuple(found.split(",")) if found else ()


def _leaves(item: Dim | Sections | Flat) -> list[Dim | Sections]:
    return [leaf for inner in item.items for leaf in _leaves(inner)] if isinstance(item, Flat) else [item]


def _real(padded: Sequence[int], real: Sequence[int], *, packed: bool) -> torch.Tensor:
    if not packed:  # every row was cut alike
        return torch.cat([torch.arange(size) for size in real])
    starts = [sum(padded[:i]) for i in range(len(padded))]
    return torch.cat([torch.arange(start, start + size) for start, size in zip(starts, real, strict=True)])
