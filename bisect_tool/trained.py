"""A trained checkpoint is not a fault: telling training from a wrong conversion, and finding what training can't explain.

Training moves most tensors a little and without structure.  What it never does is make two experts equal, move a row to another
place, or leave one tensor exactly where it was while its neighbours moved.  In a trained checkpoint blocks are therefore matched to
their nearest in the reference, not byte by byte, and what is claimed says how near.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bisect_tool.arithmetic import constant, constant_change
from bisect_tool.compare import Compared
from bisect_tool.faults import Proof, Relation, without_layer
from bisect_tool.orders import order_of
from bisect_tool.places import Tensor
from bisect_tool.relations import Wrong, map_of

# most tensors differ, and by less than this (relative rms): more would leave nothing of the model
MOST, SMALL = 0.5, 0.25
# a tensor further than this from its own place is looked for elsewhere; a block this much like another is that one
FAR, ALIKE = 0.5, 0.9
WIDTH = 512
# rows that are matched with each other at most: the work grows with the square
ROWS = 16384


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
    other matrices.  Vectors are let off: a norm's step can be too small for bfloat16.
    """
    kinds: dict[str, list[Compared]] = {}
    for one in compared:
        if two_dimensional[one.name]:
            kinds.setdefault(without_layer(one.name), []).append(one)
    matrices = [one for found in kinds.values() for one in found]
    found = []
    for alike in kinds.values():
        neighbours = alike if len(alike) > 1 else matrices
        if sum(not one.equal for one in neighbours) * 2 > len(neighbours):
            found += [one.name for one in alike if one.equal]
    return found


def explain(wrong: Wrong, training: Training, ways: Sequence[int]) -> tuple[Relation, Proof] | None:
    """What training can't have done to a tensor, or None."""
    value = constant(wrong.candidate, 0, wrong.rows)
    if value is not None:
        change = constant_change(value)
        return Relation(change.kind, change.detail), Proof(change.experiment, None, None, change.control)
    if wrong.made.cut.expert and len(wrong.candidate.shape) == 3:
        return _experts(wrong)
    if wrong.compared.size < FAR or len(wrong.expected.shape) != 2:
        return None
    want, got = wrong.expected.rows(0, wrong.rows).float(), wrong.candidate.rows(0, wrong.rows).float()
    for axis in range(2):
        w, g = (want, got) if axis == 0 else (want.T, got.T)
        if len(w) > ROWS:
            continue
        matched = nearest(w[:, :WIDTH], g[:, :WIDTH])
        if matched is None:
            continue
        order = order_of(matched, axis, ways)
        if order is not None:
            near = _relative(w[torch.tensor(matched)], g)
            proof = Proof(order.experiment.replace("compare every byte", "compare every row with its nearest"), None, near, order.control)
            return Relation(order.kind, order.detail, order.also), proof
    return None


def _experts(wrong: Wrong) -> tuple[Relation, Proof] | None:
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
        return relation, Proof("give each expert the reference's nearest", None, near, control)
    said, modulus = map_of(mapped)
    detail = {"map": said or mapped, "modulus": modulus, "wrong": len(moved), "of": count}
    same = sum(torch.equal(got[e], got[f]) for e, f in enumerate(mapped) if e != f)
    experiment = f"match every expert with the reference's nearest: expert e is nearest to expert {said or 'its map names'}"
    if same:
        experiment += f"; {same} of {len(moved)} equal, every byte looked at, another expert of the candidate itself"
    return Relation("duplicate", detail), Proof(experiment, None, near, control)


def nearest(want: torch.Tensor, got: torch.Tensor) -> list[int] | None:
    """For each row of `got` the row of `want` it is most like; None when one is like none."""
    likeness = torch.nn.functional.normalize(got, dim=1) @ torch.nn.functional.normalize(want, dim=1).T
    best = likeness.max(1)
    return best.indices.tolist() if bool((best.values > ALIKE).all()) else None


def _relative(want: torch.Tensor, got: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())
