"""What a bash script is made of: commands and what holds them, each with its line.  Words stay as they are written."""

from __future__ import annotations

from dataclasses import dataclass

from bisect_tool.launch.words import Where, Word


@dataclass(frozen=True, slots=True)
class Raw:
    """A word as it is written, quotes and all."""

    text: str
    where: Where


@dataclass(frozen=True, slots=True)
class Assign:
    """`name=value`, `name+=value`, `name[index]=value`, `name=(value ...)`; the value is a Word where it is expanded already."""

    name: str
    index: str | None
    append: bool
    value: Raw | Word | tuple[Raw, ...]
    where: Where


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its assignments; `declares` holds those of `export` and its like."""

    where: Where
    assigns: tuple[Assign, ...]
    words: tuple[Raw, ...]
    declares: tuple[Assign, ...] = ()
    joined: int = 0


@dataclass(frozen=True, slots=True)
class Arith:
    """`(( ... ))`."""

    where: Where
    text: str


@dataclass(frozen=True, slots=True)
class Test:
    """`[[ ... ]]`."""

    where: Where
    words: tuple[Raw, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """`a && b || c`: the first command, then (operator, command)."""

    where: Where
    first: Node
    rest: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True)
class Pipe:
    """`a | b`, or `! a`."""

    where: Where
    commands: tuple[Node, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Group:
    """`{ ...; }`, or `( ... )` whose changes nobody sees."""

    where: Where
    body: Body
    subshell: bool


@dataclass(frozen=True, slots=True)
class If:
    """(condition, body) of every branch, and the else."""

    where: Where
    branches: tuple[tuple[Body, Body], ...]
    otherwise: Body


@dataclass(frozen=True, slots=True)
class For:
    """`for name in words`; without `in` the words are the arguments."""

    where: Where
    name: str
    words: tuple[Raw, ...]
    body: Body


@dataclass(frozen=True, slots=True)
class Count:
    """`for ((start; test; step))`."""

    where: Where
    start: str
    test: str
    step: str
    body: Body


@dataclass(frozen=True, slots=True)
class While:
    """`while`, or `until`."""

    where: Where
    test: Body
    body: Body
    until: bool


@dataclass(frozen=True, slots=True)
class Case:
    """A word, and (patterns, body) in order."""

    where: Where
    word: Raw
    items: tuple[tuple[tuple[Raw, ...], Body], ...]


@dataclass(frozen=True, slots=True)
class Function:
    """`name() { ... }`."""

    where: Where
    name: str
    body: Node


Node = Simple | Arith | Test | Chain | Pipe | Group | If | For | Count | While | Case | Function
Body = tuple[Node, ...]
