"""A trained checkpoint is not a fault: telling training from a wrong conversion, and finding what training can't explain.

Training moves most tensors a little and without structure.  What it never does is make two experts equal, move a row to another
place, or leave one tensor exactly where it was while its neighbours moved.  In a trained checkpoint blocks are therefore matched to
their nearest in the reference, not byte by byte, and what is claimed says how near.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from bisect_hooks.parallel import Parallel

from bisect_tool.arithmetic import constant, constant_change
from bisect_tool.compare import Compared, Row, joined, same_rows
from bisect_tool.faults import Proof, Relation, without_layer
from bisect_tool.orders import Change, order_of
from bisect_tool.places import Tensor, steps
from bisect_tool.relations import Search, Wrong, map_of
from bisect_tool.shards import pieces_of

# most tensors differ, and by less than this (relative rms): more would leave nothing of the model
MOST, SMALL = 0.5, 0.25
# a block further than this from its own place is looked for elsewhere; a block this much like another is that one
FAR, ALIKE = 0.5, 0.9
# a tensor that moved so many times the median is named, though only what training can't do is a fault
FURTHEST = 10.0
WIDTH = 512
# rows that are matched with each other at most: the work grows with the square
ROWS = 16384
# shorter rows are like too many others
SHORT = 16
# relation, proof, and the rows that are wrong (None: all)
Found = tuple[Relation, Proof, list[int] | None]


@dataclass(frozen=True, slots=True)
class Training:
    """How far the checkpoint moved: median relative difference of the tensors that did."""

    median: float
    moved: int
    of: int

    def note(self, iteration: int | None) -> str:
        said = "an iteration that it does not say" if iteration is None else f"iteration {iteration}"
        return (
            f"looks trained ({said}, median relative difference {self.median:.2g}; {self.moved} of {self.of} tensors moved): "
            "byte by byte it can't be compared with the reference"
        )


def looks_trained(compared: Sequence[Compared]) -> Training | None:
    """Whether most tensors differ by a small amount.  Whether it has a structure is for the caller to find out."""
    moved = [one for one in compared if not (one.equal or one.once or one.bf16 or one.coarse)]
    if not moved or len(moved) < MOST * len(compared):
        return None
    median = statistics.median(one.size for one in moved)
    return Training(median, len(moved), len(compared)) if median < SMALL else None


def left_behind(compared: Sequence[Compared], two_dimensional: Mapping[str, bool]) -> list[str]:
    """Tensors that are exactly the reference's while their neighbours moved.

    Neighbours are the same tensor in other layers, half of which have to have moved; a tensor that is there once is held against all
    other matrices of the decoder, or of MTP, which is often not trained at all.  Vectors are let off: a norm's step can be too small
    for bfloat16.
    """
    kinds: dict[str, list[Compared]] = {}
    for one in compared:
        if two_dimensional[one.name]:
            kinds.setdefault(without_layer(one.name), []).append(one)
    found = []
    for kind, alike in kinds.items():
        ahead = kind.startswith("mtp.")
        around = [one for name, some in kinds.items() if name.startswith("mtp.") == ahead for one in some]
        neighbours = alike if len(alike) > 1 else around
        moved = sum(not one.equal for one in neighbours)
        # without the tensor itself, which has not
        if moved and moved * 2 >= len(neighbours) - 1:
            found += [one.name for one in alike if one.equal]
    return found


def explain(wrong: Wrong, search: Search) -> Found | None:
    """What training can't have done to a tensor, or None."""
    value = constant(wrong.candidate, 0, wrong.rows)
    if value is not None:
        change = constant_change(value)
        return Relation(change.kind, change.detail), Proof(change.experiment, None, None, change.control), None
    looked = _look(wrong)
    if looked.blank:
        return _blank(wrong, looked)
    if not looked.far:
        return None
    expert = wrong.made.cut.expert and len(wrong.candidate.shape) == 3
    found = _other_layer(wrong, search) if len(looked.far) * 2 > wrong.rows or len(wrong.expected.shape) == 1 else None
    if found is None and expert:
        found = _experts(wrong) or _inside_experts(wrong, looked.far, search.ways)
    elif found is None and len(wrong.expected.shape) == 2:
        found = _rows(wrong, looked.far, search.ways)
    return found


def matched(packed: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """For each part of a packed projection its rows' numbers in the packing, and those of the rows its own are nearest to."""
    want, got = (torch.cat([pair[i].flatten(1).float() for pair in packed]) for i in range(2))
    if len(want) > ROWS or want.shape[1] < SHORT:
        return None
    found = nearest(want[:, :WIDTH], got[:, :WIDTH])
    sizes = [len(pair[0]) for pair in packed]
    return None if found is None else list(zip(torch.arange(len(want)).split(sizes), torch.tensor(found).split(sizes), strict=True))


def narrowed(compared: Compared, wrong: Wrong, rows: Sequence[int] | None, parallel: Parallel) -> Compared:
    """The comparison of one tensor with the rows that training can't explain as the only ones that differ."""
    if rows is None:
        return compared
    unequal = joined((row, row + 1) for row in rows)
    pieces = pieces_of(wrong.made.cut, (wrong.rows, *wrong.candidate.shape[1:]), parallel)
    places = [
        place
        for place, regions in pieces.items()
        if any(start < region[0].stop and region[0].start < stop for region in regions for start, stop in unequal)
    ]
    numbers = torch.arange(wrong.rows)
    sites = [
        str(site) for site, held in wrong.rule.parts(wrong.made.name, numbers).items() if bool(torch.isin(held, torch.tensor(rows)).any())
    ]
    return replace(compared, unequal=unequal, places=sorted(places), sites=sites)


@dataclass(frozen=True, slots=True)
class _Looked:
    """Rows (experts) that are further from their place than training takes them, and rows that are blank, by the value they hold."""

    far: list[int]
    blank: dict[str, list[int]]


def _look(wrong: Wrong) -> _Looked:
    far: list[int] = []
    blank: dict[str, list[int]] = {}
    row = Row(wrong.expected, wrong.candidate)
    for start, stop in steps(wrong.rows, row.unit, row.bytes):
        want, got = (
            tensor.rows(start, stop).flatten(1).float() if len(tensor.shape) > 1 else tensor.rows(start, stop)[None].float()
            for tensor in (wrong.expected, wrong.candidate)
        )
        odd = (~got.isfinite() & want.isfinite()).any(1)
        flat = (got == got[:, :1]).all(1) & (want != want[:, :1]).any(1) & (got.shape[1] > 1)
        away = (got - want).norm(dim=1) > FAR * want.norm(dim=1)
        for i in (odd | flat).nonzero().flatten().tolist():
            blank.setdefault("nan" if odd[i] else repr(float(got[i, 0])), []).append(start + i)
        far += [start + i for i in (away & ~odd & ~flat).nonzero().flatten().tolist()]
    return _Looked(far, blank)


def _blank(wrong: Wrong, looked: _Looked) -> Found:
    """Rows of one value."""
    value, rows = max(looked.blank.items(), key=lambda item: len(item[1]))
    change = constant_change(float(value))
    whole = len(wrong.expected.shape) == 1
    detail = change.detail if whole else change.detail | {"rows": joined((row, row + 1) for row in rows)[:16]}
    if wrong.made.cut.expert and len(wrong.candidate.shape) == 3:
        detail = change.detail | {"experts": rows[:64], "wrong": len(rows), "of": wrong.rows}
    return (
        Relation(change.kind, detail, rule=f"{change.kind} {change.detail}"),
        Proof(change.experiment, None, None, change.control),
        None if whole else rows,
    )


def _other_layer(wrong: Wrong, search: Search) -> Found | None:
    """The tensor is nearest to the same tensor of another layer."""
    own, layer = wrong.made.name, search.layer_of(wrong.made.name)
    if layer is None or math.prod(wrong.expected.shape) < SHORT:
        return None
    alike = {name: search.index.expected(name) for name in search.index.names if without_layer(name) == without_layer(own) and name != own}
    unit, got = wrong.expected.unit, _sample(wrong.candidate, wrong.rows, wrong.expected.unit)
    near = {name: _relative(_sample(one, wrong.rows, unit), got) for name, one in alike.items() if one.shape == wrong.expected.shape}
    best = min(near, key=lambda name: near[name], default=None)
    other = search.layer_of(best) if best is not None else None
    before = _relative(_sample(wrong.expected, wrong.rows, unit), got)
    if best is None or other is None or near[best] > SMALL or before < FAR:
        return None
    proof = Proof(
        f"hold it against the same tensor of every layer: nearest to the reference's layer {other}", None, near[best],
        f"it is {before:.2g} from its own layer {layer}",
    )  # fmt: skip
    return Relation("other-layer", {"offset": other - layer}), proof, None


def _sample(tensor: Tensor, rows: int, unit: int) -> torch.Tensor:
    """A vector whole, of anything larger the beginnings of a few rows."""
    if len(tensor.shape) == 1:
        return tensor.rows(0, rows).float()
    starts = sorted({row // unit * unit for row in (0, rows // 3, rows // 2, rows - 1)})
    return torch.cat([tensor.rows(start, start + unit)[0].flatten()[:WIDTH].float() for start in starts])


def _rows(wrong: Wrong, far: Sequence[int], ways: Sequence[int]) -> Found | None:
    """Rows or columns of a matrix in another order."""
    want, got = wrong.expected.rows(0, wrong.rows).float(), wrong.candidate.rows(0, wrong.rows).float()
    found = _order(want, got, far, ways)
    if found is None:
        return None
    order, mapped, near = found
    experiment = order.experiment.replace("compare every byte", "compare every row with its nearest")
    rows = [i for i, j in enumerate(mapped) if i != j] if order.detail.get("axis", 0) == 0 else None
    return Relation(order.kind, order.detail, order.also), Proof(experiment, None, near, order.control), rows


def _order(want: torch.Tensor, got: torch.Tensor, far: Sequence[int], ways: Sequence[int]) -> tuple[Change, list[int], float] | None:
    for axis in range(2):
        w, g = (want, got) if axis == 0 else (want.T, got.T)
        if w.shape[1] < SHORT or len(w) > ROWS:
            continue
        moved = list(far) if axis == 0 else list(range(len(w)))
        matched = nearest(w[:, :WIDTH], g[moved][:, :WIDTH])
        if matched is None:
            continue
        mapped = list(range(len(w)))
        for i, j in zip(moved, matched, strict=True):
            mapped[i] = j
        order = order_of(mapped, axis, ways)
        if order is not None:
            return order, mapped, _relative(w[torch.tensor(mapped)], g)
    return None


def _experts(wrong: Wrong) -> Found | None:
    """Experts that are nearer to another of the reference's than to their own, or equal to each other."""
    count, (rows, columns) = wrong.candidate.shape[0], wrong.candidate.shape[1:]
    some = sorted({0, rows // 3, rows // 2, rows - 1})

    def sample(tensor: Tensor) -> torch.Tensor:
        return torch.stack([tensor.peek(e, some, min(columns, WIDTH)).flatten().float() for e in range(count)])

    want, got = sample(wrong.expected), sample(wrong.candidate)
    mapped = nearest(want, got)
    if mapped is None or mapped == list(range(count)):
        return None
    near, own = _relative(want[mapped], got), _relative(want, got)
    moved = [e for e, f in enumerate(mapped) if e != f]
    control = f"in their own places they differ by {own:.2g}"
    if sorted(mapped) == list(range(count)):
        relation = Relation("permutation", {"axis": 0, "unit": 1, "map": mapped})
        return relation, Proof("give each expert the reference's nearest", None, near, control), moved
    said, modulus = map_of(mapped)
    detail = {"map": said or mapped, "modulus": modulus, "wrong": len(moved), "of": count}
    same = sum(same_rows(wrong.candidate, wrong.candidate, f, f + 1, e) for e, f in enumerate(mapped) if e != f)
    experiment = f"match every expert with the reference's nearest: expert e is nearest to expert {said or 'its map names'}"
    if same:
        experiment += f"; {same} of {len(moved)} equal the candidate's own expert of that number, every byte"
    return Relation("duplicate", detail), Proof(experiment, None, near, control), moved


def _inside_experts(wrong: Wrong, far: Sequence[int], ways: Sequence[int]) -> Found | None:
    """The same order of rows or columns in each wrong expert."""
    orders: list[tuple[Change, list[int], float]] = []
    for e in far:
        want, got = (tensor.rows(e, e + 1)[0].float() for tensor in (wrong.expected, wrong.candidate))
        found = _order(want, got, range(len(want)), ways)
        if found is None or (orders and found[0].detail != orders[0][0].detail):
            return None
        orders.append(found)
    order = orders[0][0]
    detail = order.detail | ({"axis": order.detail["axis"] + 1} if "axis" in order.detail else {})
    if len(far) < wrong.rows:
        detail |= {"experts": list(far[:64]), "wrong": len(far), "of": wrong.rows}
    experiment = order.experiment.replace("compare every byte", "compare every row with its nearest")
    near = max(found[2] for found in orders)
    return (
        Relation(order.kind, detail, order.also, rule=f"{order.kind} {order.detail}"),
        Proof(experiment, None, near, order.control),
        list(far),
    )


def nearest(want: torch.Tensor, got: torch.Tensor) -> list[int] | None:
    """For each row of `got` the row of `want` it is most like; None when one is like none."""
    likeness = torch.nn.functional.normalize(got, dim=1) @ torch.nn.functional.normalize(want, dim=1).T
    best = likeness.max(1)
    return best.indices.tolist() if bool((best.values > ALIKE).all()) else None


def _relative(want: torch.Tensor, got: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())
