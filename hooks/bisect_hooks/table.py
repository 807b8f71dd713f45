"""The language of the weight table: how each Megatron tensor is made of reference tensors.

A Rule makes some candidate tensors of some reference tensors and knows the way back.  Read forwards the table converts, read
backwards it exports, evaluated on both sides it audits, a few rows at a time, so that a tensor larger than memory can be compared.  Names are those of the *global* tensors on disk, as megatron-core's
`sharded_state_dict` keys them, so cutting for a layout is megatron-core's own work and never ours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from bisect_hooks.errors import UsageError
from bisect_hooks.parallel import Coordinates, Parallel
from bisect_hooks.site import Site

Tensors = list[torch.Tensor]
Shape = tuple[int, ...]
# rows start..stop of the k-th reference tensor
Span = tuple[int, int, int]


class Op(Protocol):
    """How candidate tensors are made of reference tensors, a few rows at a time, and back.

    shapes    of the candidate tensors, from those of the references
    unit      rows of a candidate tensor that can only be made together
    spans     which rows of which references make rows start..stop of candidate tensor `index` (both multiples of `unit`)
    make      those rows, from the references' rows in the order of `spans`; a view of them wherever it can be
    lossy     forward rounds
    """

    @property
    def lossy(self) -> bool: ...
    @property
    def unit(self) -> int: ...
    def shapes(self, references: Sequence[Shape]) -> list[Shape]: ...
    def spans(self, index: int, start: int, stop: int, references: Sequence[Shape]) -> list[Span]: ...
    def make(self, parts: Tensors) -> torch.Tensor: ...
    def backward(self, tensors: Tensors) -> Tensors: ...


@dataclass(frozen=True, slots=True)
class Same:
    """candidate = reference"""

    lossy: bool = False
    unit: int = 1

    def shapes(self, references: Sequence[Shape]) -> list[Shape]:
        return [references[0]]

    def spans(self, index: int, start: int, stop: int, references: Sequence[Shape]) -> list[Span]:
        return [(0, start, stop)]

    def make(self, parts: Tensors) -> torch.Tensor:
        return parts[0]

    def backward(self, tensors: Tensors) -> Tensors:
        return tensors


@dataclass(frozen=True, slots=True)
class Split(Same):
    """One reference tensor cut along dim 0 into `sizes` rows: one candidate tensor each."""

    sizes: tuple[int, ...] = ()

    def shapes(self, references: Sequence[Shape]) -> list[Shape]:
        return [(size, *references[0][1:]) for size in self.sizes]

    def spans(self, index: int, start: int, stop: int, references: Sequence[Shape]) -> list[Span]:
        before = sum(self.sizes[:index])
        return [(0, before + start, before + stop)]

    def backward(self, tensors: Tensors) -> Tensors:
        return [torch.cat(tensors)]


@dataclass(frozen=True, slots=True)
class Join(Same):
    """Reference tensors of `sizes` rows put one under the other: `linear_fc1` is [gate; up]."""

    sizes: tuple[int, ...] = ()

    def shapes(self, references: Sequence[Shape]) -> list[Shape]:
        return [(sum(self.sizes), *references[0][1:])]

    def spans(self, index: int, start: int, stop: int, references: Sequence[Shape]) -> list[Span]:
        found, before = [], 0
        for k, size in enumerate(self.sizes):
            first, last = max(start - before, 0), min(stop - before, size)
            if first < last:
                found.append((k, first, last))
            before += size
        return found

    def make(self, parts: Tensors) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def backward(self, tensors: Tensors) -> Tensors:
        return list(tensors[0].split(list(self.sizes)))


@dataclass(frozen=True, slots=True)
class Stack(Same):
    """Per-expert tensors, `each` of them an expert, joined along their rows and stacked over experts: [E, rows, columns]."""

    each: int = 1

    def shapes(self, references: Sequence[Shape]) -> list[Shape]:
        rows = sum(shape[0] for shape in references[: self.each])
        return [(len(references) // self.each, rows, *references[0][1:])]

    def spans(self, index: int, start: int, stop: int, references: Sequence[Shape]) -> list[Span]:
        return [(k, 0, references[k][0]) for k in range(start * self.each, stop * self.each)]

    def make(self, parts: Tensors) -> torch.Tensor:
        experts = [parts[i] if self.each == 1 else torch.cat(parts[i : i + self.each]) for i in range(0, len(parts), self.each)]
        return experts[0][None] if len(experts) == 1 else torch.stack(experts)

    def backward(self, tensors: Tensors) -> Tensors:
        return [part for expert in tensors[0] for part in expert.chunk(self.each)]


@dataclass(frozen=True, slots=True)
class GroupHeads:
    """`linear_qkv`: for each KV group its query heads, then (with an output gate) their gates, then k, then v.

    Hugging Face packs q_proj per head as [query, gate]; Megatron wants all queries of a group before all its gates
    (megatron-core attention.py, `get_query_key_value_tensors`).
    """

    groups: int
    heads: int
    width: int
    gated: bool
    lossy: bool = False

    @property
    def parts(self) -> dict[str, int]:
        """Rows of each part inside one group, in order."""
        queries = self.heads // self.groups * self.width
        gate = {"gate": queries} if self.gated else {}
        return {"q": queries} | gate | {"k": self.width, "v": self.width}

    @property
    def unit(self) -> int:
        return sum(self.parts.values())

    def shapes(self, references: Sequence[Shape]) -> list[Shape]:
        return [(self.groups * self.unit, *references[0][1:])]

    def spans(self, index: int, start: int, stop: int, references: Sequence[Shape]) -> list[Span]:
        first, last = start // self.unit, stop // self.unit
        rows = (shape[0] // self.groups for shape in references)
        return [(k, first * each, last * each) for k, each in enumerate(rows)]

    def make(self, parts: Tensors) -> torch.Tensor:
        q_proj, k_proj, v_proj = parts
        groups = len(k_proj) // self.width
        kinds = 2 if self.gated else 1
        rest = q_proj.shape[1:]
        query = q_proj.reshape(groups, self.heads // self.groups, kinds, self.width, *rest).transpose(1, 2)
        query = query.reshape(groups, -1, *rest)
        return torch.cat([query, *(t.reshape(groups, self.width, *rest) for t in (k_proj, v_proj))], dim=1).flatten(0, 1)

    def backward(self, tensors: Tensors) -> Tensors:
        parts = self.named(tensors[0])
        kinds = [parts["q"], parts["gate"]] if self.gated else [parts["q"]]
        rest = tensors[0].shape[1:]
        query = torch.stack([kind.reshape(-1, self.width, *rest) for kind in kinds], dim=1).reshape(-1, *rest)
        return [query, parts["k"], parts["v"]]

    def named(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows of a packed tensor (whole groups of it) by part, heads in order."""
        grouped = packed.reshape(-1, self.unit, *packed.shape[1:])
        split = grouped.split(list(self.parts.values()), dim=1)
        return {name: part.flatten(0, 1) for name, part in zip(self.parts, split, strict=True)}


@dataclass(frozen=True, slots=True)
class MinusOne(Same):
    """candidate = reference − 1, in the stored dtype: megatron-core's zero-centred gamma also reaches GatedDeltaNet's out_norm.

    Rounds: bf16(w − 1) loses half of all values in [0.25, 0.5) and more below.
    """

    lossy: bool = True

    def make(self, parts: Tensors) -> torch.Tensor:
        return (parts[0].double() - 1).to(parts[0].dtype)

    def backward(self, tensors: Tensors) -> Tensors:
        return [(tensors[0].double() + 1).to(tensors[0].dtype)]


def forward(op: Op, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Whole candidate tensors of whole reference tensors."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    found = []
    for index, shape in enumerate(op.shapes(shapes)):
        spans = op.spans(index, 0, shape[0], shapes)
        found.append(op.make([tensors[k][start:stop] for k, start, stop in spans]))
    return found


@dataclass(frozen=True, slots=True)
class Cut:
    """How one candidate tensor is sharded: "tp@0", "tp@0/2" (each half on its own), "ep@0 etp@1/2"; "" is replicated."""

    text: str

    @property
    def axes(self) -> tuple[tuple[str, int, int], ...]:
        """(axis, dim, parts) for each."""
        found = []
        for word in self.text.split():
            match = re.fullmatch(r"(\w+)@(\d+)(?:/(\d+))?", word)
            if not match:
                raise UsageError(f"unknown way to shard {word!r}")
            found.append((match[1], int(match[2]), int(match[3] or 1)))
        return tuple(found)

    @property
    def expert(self) -> bool:
        return self.text.startswith("ep@")

    def take(self, tensor: torch.Tensor, at: Coordinates, parallel: Parallel) -> torch.Tensor:
        """The piece of a global tensor that the rank at `at` holds (a copy)."""
        for axis, dim, parts in self.axes:
            ways = parallel.size(axis)
            pieces = []
            for part in tensor.chunk(parts, dim):
                if part.shape[dim] % ways:
                    raise UsageError(f"{part.shape[dim]} does not divide by {axis} {ways}")
                length = part.shape[dim] // ways
                pieces.append(part.narrow(dim, at[axis] * length, length))
            tensor = torch.cat(pieces, dim)
        return tensor


REPLICATED = Cut("")


@dataclass(frozen=True, slots=True)
class Made:
    """One candidate tensor of a Rule.  `part` overrides the rule's; `fp32` marks what the family keeps in float32."""

    name: str
    cut: Cut = REPLICATED
    fp32: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """`candidates` are made of `references` by `op`; together they are the tensors of `site`.

    aliases  other names a candidate tensor may have on disk (Transformer Engine fuses norms into the linear that follows)
    """

    site: Site
    references: tuple[str, ...]
    candidates: tuple[Made, ...]
    op: Op = field(default_factory=Same)
    aliases: tuple[tuple[str, str], ...] = ()

    def forward(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every candidate tensor of the rule, whole."""
        made = forward(self.op, tensors)
        return {candidate.name: tensor.contiguous() for candidate, tensor in zip(self.candidates, made, strict=True)}

    def parts(self, name: str, tensor: torch.Tensor) -> dict[Site, torch.Tensor]:
        """The rows of one candidate tensor by the Site they belong to."""
        if not isinstance(self.op, GroupHeads):
            return {self.site: tensor}
        named = self.op.named(tensor)
        gate = named.pop("gate", None)
        found = {self.site: torch.cat(list(named.values()))}
        return found if gate is None else found | {Site("attention_gate", self.site.layer): gate}


def check_total(rules: Sequence[Rule]) -> None:
    """Raises AssertionError when a table names a tensor twice (an error of ours: tables are total and unambiguous)."""
    made = Counter(candidate.name for rule in rules for candidate in rule.candidates)
    read = Counter(name for rule in rules for name in rule.references)
    for names in (made, read):
        twice = [name for name, count in names.items() if count > 1]
        assert not twice, f"the weight table names {twice[:3]} twice"
