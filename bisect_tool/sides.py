"""The two sides of an audit, tensor by tensor, under the names that the weight table makes.

Whatever stands on a side (a Hugging Face directory read through the table, a Megatron checkpoint, an export read through the table),
it answers two questions: what is the tensor of this row, unread, and what is it called on disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.table import Made, Rule, Same, Stack

from bisect_tool.checkpoint import Checkpoint
from bisect_tool.hf_directory import HuggingFaceDirectory
from bisect_tool.places import Place, Shape, Stored, Tensor, one_part

# how many names of an expert's hundreds a finding shows
SHOWN = 4


@dataclass(frozen=True)
class Expected:
    """What a rule makes of the reference: its candidate tensor number `index`, a few rows at a time.

    Raises UsageError when made, where the reference's tensors are not of the sizes that the table says.
    """

    rule: Rule
    index: int
    sources: tuple[Tensor, ...] = field(repr=False)

    def __post_init__(self) -> None:
        shapes = self._shapes
        if not self._fits(shapes):
            named = ", ".join(f"{name} {list(shape)}" for name, shape in list(zip(self.rule.references, shapes, strict=True))[:3])
            raise UsageError(
                f"{named}: not what {self.made.name} is made of by config.json", hint="does config.json belong to these tensors?"
            )

    def _fits(self, shapes: list[Shape]) -> bool:
        """Whether the references have the sizes of the table: everything is used, and what is made has as many elements."""
        if len({len(shape) for shape in shapes}) > 1 or not shapes[0]:
            return False
        made = self.rule.op.shapes(shapes)
        return sum(map(math.prod, made)) == sum(map(math.prod, shapes)) and not any(self._left_over(shapes))

    def _left_over(self, shapes: list[Shape]) -> Iterable[int]:
        op = self.rule.op
        left = [shape[0] for shape in shapes]
        for index, made in enumerate(op.shapes(shapes)):
            for k, start, stop in op.spans(index, 0, made[0], shapes):
                left[k] -= stop - start
        return left

    @property
    def made(self) -> Made:
        return self.rule.candidates[self.index]

    @cached_property
    def _shapes(self) -> list[Shape]:
        return [source.shape for source in self.sources]

    @cached_property
    def shape(self) -> Shape:
        return self.rule.op.shapes(self._shapes)[self.index]

    @property
    def dtype(self) -> torch.dtype:
        return self.sources[0].dtype

    @property
    def unit(self) -> int:
        return self.rule.op.unit

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.rule.op.make([self.sources[k].rows(a, b) for k, a, b in self.rule.op.spans(self.index, start, stop, self._shapes)])

    def parts(self, start: int, stop: int) -> Iterable[tuple[Place, torch.Tensor]]:
        return one_part(self.rows(start, stop))

    def empty(self, start: int, stop: int) -> bool:
        spans = self.rule.op.spans(self.index, start, stop, self._shapes)
        return not self.rule.op.lossy and all(self.sources[k].empty(a, b) for k, a, b in spans)

    def peek(self, index: int, rows: Sequence[int], width: int) -> torch.Tensor:
        op = self.rule.op
        if isinstance(op, Stack):
            found = torch.empty(len(rows), width, dtype=self.dtype)
            before = 0
            for k in range(index * op.each, (index + 1) * op.each):
                size = self._shapes[k][0]
                for i, row in enumerate(rows):
                    if before <= row < before + size:
                        found[i] = self.sources[k].rows(row - before, row - before + 1)[0, :width]
                before += size
            return found
        if len(self.sources) == 1 and not op.lossy:
            ((_, start, _),) = op.spans(self.index, index, index + 1, self._shapes)
            return self.sources[0].peek(start, rows, width)
        return self.rows(index, index + 1)[0, list(rows), :width]


@dataclass(frozen=True)
class Cast:
    """A tensor rounded once to another dtype."""

    tensor: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def unit(self) -> int:
        return self.tensor.unit

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor.rows(start, stop).to(self.dtype)

    def parts(self, start: int, stop: int) -> Iterable[tuple[Place, torch.Tensor]]:
        return [(place, part.to(self.dtype)) for place, part in self.tensor.parts(start, stop)]

    def empty(self, start: int, stop: int) -> bool:
        return self.tensor.empty(start, stop)

    def peek(self, index: int, rows: Sequence[int], width: int) -> torch.Tensor:
        return self.tensor.peek(index, rows, width).to(self.dtype)


@dataclass(frozen=True)
class First:
    """The first `count` rows of a tensor: a vocabulary without its padding."""

    tensor: Tensor
    count: int

    @property
    def shape(self) -> Shape:
        return (self.count, *self.tensor.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def unit(self) -> int:
        return self.tensor.unit

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor.rows(start, stop)

    def parts(self, start: int, stop: int) -> Iterable[tuple[Place, torch.Tensor]]:
        return self.tensor.parts(start, stop)

    def empty(self, start: int, stop: int) -> bool:
        return self.tensor.empty(start, stop)

    def peek(self, index: int, rows: Sequence[int], width: int) -> torch.Tensor:
        return self.tensor.peek(index, rows, width)


@dataclass(frozen=True)
class InMemory:
    """A tensor that is already there: a reference's few rows read backwards, or a test's."""

    tensor: torch.Tensor
    unit: int = 1

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    def parts(self, start: int, stop: int) -> Iterable[tuple[Place, torch.Tensor]]:
        return one_part(self.rows(start, stop))

    def empty(self, start: int, stop: int) -> bool:
        return False

    def peek(self, index: int, rows: Sequence[int], width: int) -> torch.Tensor:
        return self.tensor[index, list(rows), :width]


class Side(Protocol):
    """word  what reports call it: reference, candidate or export"""

    @property
    def word(self) -> str: ...
    def tensor(self, name: str) -> Tensor | None: ...
    def names(self, name: str) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class TableSide:
    """A Hugging Face directory, read through the weight table.

    whole  a tensor that is not there is an error (a reference), not an absence that an audit reports (an export)
    """

    word: str
    directory: HuggingFaceDirectory
    rules: Sequence[Rule] = field(repr=False)
    whole: bool = True

    @cached_property
    def _rule_of(self) -> Mapping[str, tuple[Rule, int]]:
        return {made.name: (rule, i) for rule in self.rules for i, made in enumerate(rule.candidates)}

    def tensor(self, name: str) -> Tensor | None:
        if name not in self._rule_of:
            return None
        rule, index = self._rule_of[name]
        if not self.whole and any(one not in self.directory.stored for one in rule.references):
            return None
        return Expected(rule, index, tuple(self.directory.tensor(one) for one in rule.references))

    def names(self, name: str) -> tuple[str, ...]:
        """Names on disk of the tensors that make it; of a missing one the name it would have."""
        references = self._rule_of[name][0].references if name in self._rule_of else (name,)
        stored = self.directory.stored
        return tuple(stored[one].on_disk if one in stored else self._prefixed(one) for one in references[:SHOWN])

    def _prefixed(self, name: str) -> str:
        """The name a missing tensor would have, with the prefix its neighbours have on disk."""
        other = next((one for one in self.directory.names if one.startswith("model.layers.")), None)
        if other is None or not name.startswith("model."):
            return name
        return self.directory.on_disk(other).removesuffix(other.removeprefix("model.")) + name.removeprefix("model.")


@dataclass(frozen=True)
class StoredSide:
    """A Megatron checkpoint.  Transformer Engine fuses norms into the linear that follows: those are the rules' aliases.

    backwards  read rows that round backwards: what an export should hold, and not what the checkpoint does
    """

    word: str
    checkpoint: Checkpoint
    rules: Sequence[Rule] = field(repr=False)
    backwards: bool = False

    @cached_property
    def _aliases(self) -> Mapping[str, tuple[str, ...]]:
        return {
            made.name: (made.name, *(alias for name, alias in rule.aliases if name == made.name))
            for rule in self.rules
            for made in rule.candidates
        }

    @cached_property
    def _lossy(self) -> Mapping[str, Rule]:
        return {made.name: rule for rule in self.rules if rule.op.lossy for made in rule.candidates}

    def stored(self, name: str) -> Stored | None:
        found = next((one for one in self._aliases.get(name, (name,)) if one in self.checkpoint.tensors), None)
        return None if found is None else self.checkpoint.tensor(found)

    def tensor(self, name: str) -> Tensor | None:
        found = self.stored(name)
        if found is not None and self.backwards and name in self._lossy:
            return InMemory(self._lossy[name].op.backward([found.read()])[0])
        return found

    def names(self, name: str) -> tuple[str, ...]:
        found = next((one for one in self._aliases.get(name, (name,)) if one in self.checkpoint.tensors), None)
        return (self.checkpoint.tensors[found].on_disk if found else name,)

    @cached_property
    def known(self) -> frozenset[str]:
        """Every name that a row of the table makes, aliases included."""
        return frozenset(name for names in self._aliases.values() for name in names)


def without_rounding(rules: Sequence[Rule]) -> list[Rule]:
    """A table that compares two directories, or a checkpoint and its export: what would round on the way is taken as it is."""
    return [replace(rule, op=Same()) if rule.op.lossy else rule for rule in rules]
