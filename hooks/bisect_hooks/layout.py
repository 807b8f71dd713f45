"""A Layout is one string that says what the dims of a tapped tensor mean and which are sharded.

    "s[sp] b h"                            sequence first, cut over tp where sequence parallel is on
    "(s[sp] b) e"                          tokens flattened into one dim, sequence outermost
    "s b (q:64 k:64 v:192)[tp]"            one dim made of named sections, each cut over tp on its own
    "s b (g[tp] (q:128 gate:128 k:32))"    group-major packing: sections inside each of the groups g
    "s[cp,sp] b h"                         sequence cut over cp in zigzag (zigzag.py), each rank's part over tp once more

`b` is always cut over dp.  Whatever a layout does not cut is replicated, and replicas are compared with each other on the way.
The canonical order is `b s ...` (or `e t ...` for probed experts) with everything after those two flattened into one dim, which
is the order of the Hugging Face side; a layout with sections yields one canonical tensor a section.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from bisect_hooks.errors import BisectError, UsageError
from bisect_hooks.parallel import Coordinates, Parallel
from bisect_hooks.zigzag import unzigzag, zigzag

LEADING = (("b", "s"), ("e", "t"))
AXES = ("sp", "tp", "dp", "ep", "etp", "cp")


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim, and the parallel axis it is cut over."""

    name: str
    axis: str | None = None


@dataclass(frozen=True, slots=True)
class Sections:
    """One dim made of named runs; each is cut over the axis on its own."""

    sizes: tuple[tuple[str, int], ...]
    axis: str | None = None

    @property
    def total(self) -> int:
        return sum(size for _, size in self.sizes)


@dataclass(frozen=True, slots=True)
class Flat:
    """Several dims flattened into one, outermost first."""

    items: tuple[Item, ...]


Item = Dim | Sections | Flat
Shards = Iterable[tuple[Coordinates, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Piece:
    """One section of one rank's tensor with every dim spelled out."""

    name: str
    dims: tuple[Dim, ...]
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Gathered:
    """A canonical tensor, and the largest relative rms found between its replicas (nan if one has what others lack)."""

    tensor: torch.Tensor
    replicas: int
    replica_difference: float


@dataclass(frozen=True, slots=True)
class Layout:
    """A parsed layout string: how to take a rank's tensor apart, put all ranks' together, and cut a whole one again."""

    text: str
    items: tuple[Item, ...]

    @property
    def pieces(self) -> tuple[str, ...]:
        """Names of the sections, or ("",) for a layout without."""
        sections = _sections(self.items)
        return tuple(name for name, _ in sections.sizes) if sections else ("",)

    def features_over(self, axis: str) -> bool:
        """Whether the features are cut over `axis`, so that each coordinate holds one run of them in canonical order."""
        leaves = [leaf for item in self.items for leaf in _leaves(item)]
        names = {name for pair in LEADING for name in pair}
        return any(axis in _axes(leaf.axis) for leaf in leaves if isinstance(leaf, Sections) or leaf.name not in names)

    def split(self, local: torch.Tensor, sizes: Mapping[str, int], parallel: Parallel) -> list[Piece]:
        """One rank's tensor as pieces.  `sizes` gives the local sizes of dims that a flattened dim hides.

        Raises BisectError when the tensor does not fit the layout.
        """
        dims, tensor = self._expand(local, sizes, parallel)
        index = next((i for i, dim in enumerate(dims) if isinstance(dim, Sections)), None)
        if index is None:
            return [Piece("", tuple(dim for dim in dims if isinstance(dim, Dim)), tensor)]
        sections = dims[index]
        assert isinstance(sections, Sections)
        over = _ways(sections.axis, parallel)
        found, start = [], 0
        for name, size in sections.sizes:
            length = _divide(size, over, f"section {name} of {self.text!r}")
            named = tuple(Dim("f", sections.axis) if i == index else dim for i, dim in enumerate(dims))
            found.append(Piece(name, named, tensor.narrow(index, start, length)))  # type: ignore[arg-type]
            start += length
        return found

    def gather(self, shards: Shards, sizes: Mapping[str, int], parallel: Parallel, segments: Sequence[int] = ()) -> dict[str, Gathered]:
        """Every rank's tensor put together in canonical order, by piece.  `segments` are the lengths of packed sequences.

        Raises BisectError naming the axis and the ranks seen when a shard is missing.
        """
        by_piece: dict[str, list[tuple[Coordinates, Piece]]] = {}
        for coordinates, local in shards:
            for piece in self.split(local, sizes, parallel):
                by_piece.setdefault(piece.name, []).append((coordinates, piece))
        if not by_piece:
            raise BisectError(f"nothing to gather for layout {self.text!r}")
        return {name: self._join(found, parallel, segments) for name, found in by_piece.items()}

    def cut(
        self,
        canonical: Mapping[str, torch.Tensor],
        local: torch.Tensor,
        coordinates: Coordinates,
        sizes: Mapping[str, int],
        parallel: Parallel,
    ) -> torch.Tensor:
        """`local` with its pieces replaced by this rank's part of the canonical tensors given; other pieces stay."""
        result = local.clone()
        for piece in self.split(result, sizes, parallel):
            if piece.name not in canonical:
                continue
            full = [size * _ways(dim.axis, parallel) for size, dim in zip(piece.tensor.shape, piece.dims, strict=True)]
            order = _canonical_order(piece.dims)
            whole = canonical[piece.name]
            if whole.numel() != math.prod(full):
                raise BisectError(f"can't graft {tuple(whole.shape)} into layout {self.text!r} of full shape {tuple(full)}")
            whole = whole.reshape([full[i] for i in order]).permute([order.index(i) for i in range(len(order))])
            for i, dim in enumerate(piece.dims):
                if _ways(dim.axis, parallel) > 1:
                    length = piece.tensor.shape[i]
                    if dim.name == "s" and "cp" in _axes(dim.axis):
                        whole = zigzag(whole, i, (), parallel.cp)
                    whole = whole.narrow(i, _coordinate(dim.axis, coordinates, parallel) * length, length)
            piece.tensor.copy_(whole)
        return result

    def _expand(self, local: torch.Tensor, sizes: Mapping[str, int], parallel: Parallel) -> tuple[list[Dim | Sections], torch.Tensor]:
        dims: list[Dim | Sections] = []
        shape: list[int] = []
        if len(self.items) != local.dim():
            raise BisectError(f"layout {self.text!r} has {len(self.items)} dims, the tensor is {tuple(local.shape)}")
        for item, size in zip(self.items, local.shape, strict=True):
            leaves = list(_leaves(item))
            known = [_known_size(leaf, sizes, parallel) if len(leaves) > 1 else size for leaf in leaves]
            if known.count(None) > 1:
                raise BisectError(f"layout {self.text!r}: more than one unknown size inside a flattened dim")
            product = math.prod(value for value in known if value is not None)
            if product == 0 or size % product or (None not in known and product != size):
                raise BisectError(f"layout {self.text!r} does not fit a tensor {tuple(local.shape)} (dim of {size}, known sizes {known})")
            shape += [size // product if value is None else value for value in known]
            dims += leaves
        return dims, local.reshape(shape) if list(local.shape) != shape else local

    def _join(self, found: list[tuple[Coordinates, Piece]], parallel: Parallel, segments: Sequence[int]) -> Gathered:
        dims = found[0][1].dims
        cut = [(i, dim.axis) for i, dim in enumerate(dims) if _ways(dim.axis, parallel) > 1]
        grid: dict[tuple[int, ...], torch.Tensor] = {}
        difference, replicas = 0.0, 0
        for coordinates, piece in found:
            place = tuple(_coordinate(axis, coordinates, parallel) for _, axis in cut)
            if place in grid:
                replicas += 1
                difference = _worst(difference, grid[place], piece.tensor)
            else:
                grid[place] = piece.tensor
        for place in itertools.product(*(range(_ways(axis, parallel)) for _, axis in cut)):
            if place not in grid:
                where = ", ".join(f"{axis} {at}" for (_, axis), at in zip(cut, place, strict=True))
                raise BisectError(f"layout {self.text!r} can't be gathered: no shard for {where}; seen {sorted(grid)}")
        for at in range(len(cut) - 1, -1, -1):
            outer = sorted({place[:at] for place in grid})
            ways = range(_ways(cut[at][1], parallel))
            grid = {place: torch.cat([grid[(*place, way)] for way in ways], dim=cut[at][0]) for place in outer}
        for i, axis in cut:
            if dims[i].name == "s" and "cp" in _axes(axis):
                grid[()] = unzigzag(grid[()], i, segments, parallel.cp)
        whole = grid[()].permute(_canonical_order(dims))
        leading = next((len(names) for names in LEADING if names[0] in {dim.name for dim in dims}), 1)
        flat = [*whole.shape[:leading], -1] if whole.dim() > leading else [*whole.shape, 1]
        return Gathered(whole.reshape(flat), replicas, difference)


@cache
def parse_layout(text: str) -> Layout:
    """Parses a layout once and refuses early.  Raises UsageError."""
    tokens = re.findall(r"\(|\)(?:\[[\w,]+\])?|\w+:\d+|\w+(?:\[[\w,]+\])?|\S", text)
    items, rest = _parse_items(tokens, text)
    if rest:
        raise UsageError(f"layout {text!r}: unexpected {rest[0]!r}")
    leaves = [leaf for item in items for leaf in _leaves(item)]
    sections = [leaf for leaf in leaves if isinstance(leaf, Sections)]
    names = [leaf.name for leaf in leaves if isinstance(leaf, Dim)] + [name for leaf in sections for name, _ in leaf.sizes]
    if not items:
        raise UsageError("an empty layout says nothing")
    if len(names) != len(set(names)):
        raise UsageError(f"layout {text!r}: a dim is named twice")
    if len(sections) > 1:
        raise UsageError(f"layout {text!r}: only one dim can be made of sections")
    return Layout(text, tuple(items))


def _parse_items(tokens: list[str], text: str) -> tuple[list[Item], list[str]]:
    items: list[Item] = []
    while tokens and not tokens[0].startswith(")"):
        token, tokens = tokens[0], tokens[1:]
        if token == "(":
            item, tokens = _parse_group(tokens, text)
            items.append(item)
        else:
            match = re.fullmatch(r"(\w+)(?:\[([\w,]+)\])?", token)
            if not match:
                raise UsageError(f"layout {text!r}: unexpected {token!r}")
            axis = _axis(match[2], text)
            if match[1] == "b" and axis not in (None, "dp"):
                raise UsageError(f"layout {text!r}: b is always cut over dp, not over {axis}")
            items.append(Dim(match[1], "dp" if match[1] == "b" else axis))
    return items, tokens


def _parse_group(tokens: list[str], text: str) -> tuple[Item, list[str]]:
    if tokens and ":" in tokens[0]:
        sizes = []
        while tokens and ":" in tokens[0]:
            name, size = tokens[0].split(":")
            sizes.append((name, int(size)))
            tokens = tokens[1:]
        inner: Item = Sections(tuple(sizes))
    else:
        items, tokens = _parse_items(tokens, text)
        if not items:
            raise UsageError(f"layout {text!r}: an empty bracket")
        inner = Flat(tuple(items))
    if not tokens or not tokens[0].startswith(")"):
        raise UsageError(f"layout {text!r}: a bracket is not closed")
    axis = _axis(tokens[0][2:-1] or None, text)
    if isinstance(inner, Sections):
        inner = Sections(inner.sizes, axis)
    elif axis:
        raise UsageError(f"layout {text!r}: only sections and single dims can be sharded")
    return inner, tokens[1:]


def _axis(word: str | None, text: str) -> str | None:
    for one in _axes(word):
        if one not in AXES:
            raise UsageError(f"layout {text!r}: unknown axis {one!r}", hint=f"known: {', '.join(AXES)}")
    return word


def _axes(axis: str | None) -> list[str]:
    """The axes that a dim is cut over, outermost first."""
    return axis.split(",") if axis else []


def _leaves(item: Item) -> Iterable[Dim | Sections]:
    if isinstance(item, Flat):
        for inner in item.items:
            yield from _leaves(inner)
    else:
        yield item


def _sections(items: Iterable[Item]) -> Sections | None:
    return next((leaf for item in items for leaf in _leaves(item) if isinstance(leaf, Sections)), None)


def _ways(axis: str | None, parallel: Parallel) -> int:
    return math.prod((parallel.tp if parallel.sp else 1) if one == "sp" else parallel.size(one) for one in _axes(axis))


def _coordinate(axis: str | None, coordinates: Coordinates, parallel: Parallel) -> int:
    at = 0
    for one in _axes(axis):
        ways = _ways(one, parallel)
        at = at * ways + (coordinates["tp" if one == "sp" else one] if ways > 1 else 0)
    return at


def _divide(size: int, ways: int, what: str) -> int:
    if size % ways:
        raise UsageError(f"{what}: {size} does not divide by {ways}")
    return size // ways


def _known_size(leaf: Dim | Sections, sizes: Mapping[str, int], parallel: Parallel) -> int | None:
    if isinstance(leaf, Sections):
        return sum(_divide(size, _ways(leaf.axis, parallel), f"section {name}") for name, size in leaf.sizes)
    return sizes.get(leaf.name)


def _canonical_order(dims: tuple[Dim, ...]) -> list[int]:
    names = [dim.name for dim in dims]
    leading = next((pair for pair in LEADING if pair[0] in names), ())
    first = [names.index(name) for name in leading if name in names]
    return first + [i for i in range(len(names)) if i not in first]


def _worst(so_far: float, one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return math.nan
    if bool(((one == other) | (one.isnan() & other.isnan())).all()):
        return so_far
    norm = one.double().norm().item()
    here = (one.double() - other.double()).norm().item() / norm if norm else math.inf
    return math.nan if math.isnan(here) or math.isnan(so_far) else max(so_far, here)
