"""A Layout is one string that says what the dims of a tapped tensor mean and which are sharded.

    "s[sp] b h"                            sequence first, cut over tp where sequence parallel is on
    "(s[sp] b) e"                          tokens flattened into one dim, sequence outermost
    "s b (q:64 k:64 v:192)[tp]"            one dim made of named sections, each cut over tp on its own
    "s b (g (q:128 gate:128 k:32))[tp]"    group-major packing, sections inside each of the groups g, cut as one run of features:
                                           with more ranks than groups a cut goes through a group
    "s b n[tp:2] d"                        cut in two; with more ranks than that, neighbours hold the same
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
from dataclasses import dataclass, replace
from functools import cache

import torch

from bisect_hooks.errors import BisectError, UsageError
from bisect_hooks.parallel import Coordinates, Parallel
from bisect_hooks.zigzag import unzigzag, zigzag

LEADING = (("b", "s"), ("e", "t"))
AXES = ("sp", "tp", "dp", "ep", "etp", "cp")


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim, and the parallel axis it is cut over (at most `most` times: 0 is no limit)."""

    name: str
    axis: str | None = None
    most: int = 0

    def ways(self, parallel: Parallel) -> int:
        size = _ways(self.axis, parallel)
        return min(size, self.most) if self.most else size

    def place(self, coordinates: Coordinates, parallel: Parallel) -> int:
        """Which of the `ways` pieces a rank holds."""
        return _coordinate(self.axis, coordinates, parallel) // (_ways(self.axis, parallel) // self.ways(parallel))


@dataclass(frozen=True, slots=True)
class Sections:
    """One dim made of named runs; each is cut over the axis on its own."""

    sizes: tuple[tuple[str, int], ...]
    axis: str | None = None

    @property
    def total(self) -> int:
        return sum(size for _, size in self.sizes)

    def slot(self, name: str) -> tuple[int, int]:
        """(where a section starts, how long it is)."""
        names = [one for one, _ in self.sizes]
        at = names.index(name)
        return sum(size for _, size in self.sizes[:at]), self.sizes[at][1]


@dataclass(frozen=True, slots=True)
class Flat:
    """Several dims flattened into one, outermost first; with an axis, cut over it as one run, whatever it holds."""

    items: tuple[Item, ...]
    axis: str | None = None


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

    @property
    def run(self) -> Flat | None:
        """The dim that is cut as one run, where there is one."""
        return next((item for item in self.items if isinstance(item, Flat) and item.axis), None)

    @property
    def outer(self) -> Layout:
        """With the run taken as plain features: how its pieces on the ranks make the whole."""
        return Layout(self.text, tuple(Dim("f", item.axis) if isinstance(item, Flat) and item.axis else item for item in self.items))

    @property
    def inner(self) -> Layout:
        """With the run whole: what it is made of."""
        assert self.run is not None
        return Layout(self.text, (Dim("b"), Dim("s"), Flat(self.run.items)))

    def columns(self, piece: str, width: int, axis: str, parallel: Parallel) -> list[torch.Tensor] | None:
        """Which of the `width` canonical features of a piece each coordinate of `axis` holds; None where they are not cut over it."""
        size, every = parallel.size(axis), torch.arange(width)
        run = self.run
        if run is not None and run.axis == axis:
            sections = _sections(run.items)
            assert sections is not None
            start, length = sections.slot(piece)
            rows = torch.arange(width // length * sections.total).reshape(-1, sections.total)
            owner = rows[:, start : start + length].flatten() // (rows.numel() // size)
            return [every[owner == at] for at in range(size)]
        names = {name for pair in LEADING for name in pair}
        for leaf in (leaf for item in self.items for leaf in _leaves(item)):
            if axis in _axes(leaf.axis) and (isinstance(leaf, Sections) or leaf.name not in names):
                ways = leaf.ways(parallel) if isinstance(leaf, Dim) else size
                return [every.chunk(ways)[at // (size // ways)] for at in range(size)] if width % ways == 0 else None
        return None

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
            named = tuple(dim if isinstance(dim, Dim) else Dim("f", sections.axis) for dim in dims)
            found.append(Piece(name, named, tensor.narrow(index, start, length)))
            start += length
        return found

    def gather(self, shards: Shards, sizes: Mapping[str, int], parallel: Parallel, segments: Sequence[int] = ()) -> dict[str, Gathered]:
        """Every rank's tensor put together in canonical order, by piece.  `segments` are the lengths of packed sequences.

        Raises BisectError naming the axis and the ranks seen when a shard is missing.
        """
        if self.run is not None:
            whole = self.outer.gather(shards, sizes, parallel)[""]
            parts = self.inner.gather([(Coordinates(0, 0, 0, 0, 0), whole.tensor)], {}, Parallel())
            return {name: replace(whole, tensor=part.tensor) for name, part in parts.items()}
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
        if self.run is not None:
            return self._cut_run(canonical, local, coordinates, sizes, parallel)
        result = local.clone()
        for piece in self.split(result, sizes, parallel):
            if piece.name not in canonical:
                continue
            full = [size * dim.ways(parallel) for size, dim in zip(piece.tensor.shape, piece.dims, strict=True)]
            order = _canonical_order(piece.dims)
            whole = canonical[piece.name]
            if whole.numel() != math.prod(full):
                raise BisectError(f"can't graft {tuple(whole.shape)} into layout {self.text!r} of full shape {tuple(full)}")
            whole = whole.reshape([full[i] for i in order]).permute([order.index(i) for i in range(len(order))])
            for i, dim in enumerate(piece.dims):
                if dim.ways(parallel) > 1:
                    length = piece.tensor.shape[i]
                    if dim.name == "s" and "cp" in _axes(dim.axis):
                        whole = zigzag(whole, i, (), parallel.cp)
                    whole = whole.narrow(i, dim.place(coordinates, parallel) * length, length)
            piece.tensor.copy_(whole)
        return result

    def _cut_run(
        self,
        canonical: Mapping[str, torch.Tensor],
        local: torch.Tensor,
        coordinates: Coordinates,
        sizes: Mapping[str, int],
        parallel: Parallel,
    ) -> torch.Tensor:
        """Packs the whole run and cuts this rank's part out of it; a mask packed the same way keeps the pieces that are not given."""
        assert self.run is not None
        if not canonical:
            return local.clone()
        given = next(iter(canonical.values()))
        run = local.new_zeros(*given.shape[:2], local.shape[-1] * _ways(self.run.axis, parallel))
        one, alone = Coordinates(0, 0, 0, 0, 0), Parallel()
        packed = self.inner.cut(canonical, run, one, {}, alone)
        mask = self.inner.cut({name: torch.ones_like(tensor) for name, tensor in canonical.items()}, run, one, {}, alone)
        own, kept = (self.outer.cut({"": whole}, local, coordinates, sizes, parallel) for whole in (packed, mask))
        return torch.where(kept.bool(), own, local)

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
        cut = [(i, dim) for i, dim in enumerate(dims) if dim.ways(parallel) > 1]
        grid: dict[tuple[int, ...], torch.Tensor] = {}
        difference, replicas = 0.0, 0
        for coordinates, piece in found:
            place = tuple(dim.place(coordinates, parallel) for _, dim in cut)
            if place in grid:
                replicas += 1
                difference = _worst(difference, grid[place], piece.tensor)
            else:
                grid[place] = piece.tensor
        for place in itertools.product(*(range(dim.ways(parallel)) for _, dim in cut)):
            if place not in grid:
                where = ", ".join(f"{dim.axis} {at}" for (_, dim), at in zip(cut, place, strict=True))
                raise BisectError(f"layout {self.text!r} can't be gathered: no shard for {where}; seen {sorted(grid)}")
        for at in range(len(cut) - 1, -1, -1):
            outer = sorted({place[:at] for place in grid})
            ways = range(cut[at][1].ways(parallel))
            grid = {place: torch.cat([grid[(*place, way)] for way in ways], dim=cut[at][0]) for place in outer}
        for i, dim in cut:
            if dim.name == "s" and "cp" in _axes(dim.axis):
                grid[()] = unzigzag(grid[()], i, segments, parallel.cp)
        whole = grid[()].permute(_canonical_order(dims))
        leading = next((len(names) for names in LEADING if names[0] in {dim.name for dim in dims}), 1)
        flat = [*whole.shape[:leading], -1] if whole.dim() > leading else [*whole.shape, 1]
        return Gathered(whole.reshape(flat), replicas, difference)


@cache
def parse_layout(text: str) -> Layout:
    """Parses a layout once and refuses early.  Raises UsageError."""
    tokens = re.findall(r"\(|\)(?:\[[\w,]+\])?|\w+:\d+|\w+(?:\[[\w,]+(?::\d+)?\])?|\S", text)
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
    for item in items:
        if isinstance(item, Flat) and item.axis and (item is not items[-1] or not _sections(item.items) or _cut_inside(item)):
            raise UsageError(f"layout {text!r}: what is cut as one run stands last, holds sections, and is not cut inside")
    return Layout(text, tuple(items))


def _parse_items(tokens: list[str], text: str) -> tuple[list[Item], list[str]]:
    items: list[Item] = []
    while tokens and not tokens[0].startswith(")"):
        token, tokens = tokens[0], tokens[1:]
        if token == "(":
            item, tokens = _parse_group(tokens, text)
            items.append(item)
        else:
            match = re.fullmatch(r"(\w+)(?:\[([\w,]+)(?::(\d+))?\])?", token)
            if not match:
                raise UsageError(f"layout {text!r}: unexpected {token!r}")
            axis = _axis(match[2], text)
            if match[1] == "b" and axis not in (None, "dp"):
                raise UsageError(f"layout {text!r}: b is always cut over dp, not over {axis}")
            items.append(Dim(match[1], "dp" if match[1] == "b" else axis, int(match[3] or 0)))
    return items, tokens


def _parse_group(tokens: list[str], text: str) -> tuple[Item, list[str]]:
    if tokens and ":" in tokens[0]:
        sizes = []
        while tokens and ":" in tokens[0]:
            name, size = tokens[0].split(":")
            sizes.append((name, int(size)))
            tokens = tokens[1:]
        inner: Sections | Flat = Sections(tuple(sizes))
    else:
        items, tokens = _parse_items(tokens, text)
        if not items:
            raise UsageError(f"layout {text!r}: an empty bracket")
        inner = Flat(tuple(items))
    if not tokens or not tokens[0].startswith(")"):
        raise UsageError(f"layout {text!r}: a bracket is not closed")
    axis = _axis(tokens[0][2:-1] or None, text)
    return replace(inner, axis=axis), tokens[1:]


def _cut_inside(item: Flat) -> bool:
    return any(leaf.axis for leaf in _leaves(item))


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
