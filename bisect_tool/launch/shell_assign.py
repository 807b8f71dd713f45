"""What an assignment makes of a variable: `=`, `+=`, lists, and elements of lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from bisect_tool.launch.shell_tree import Assign
from bisect_tool.launch.shell_words import LONGEST, Scope, Value, expand, single
from bisect_tool.launch.words import Undecided, Word, refuse


def assigned(node: Assign, old: Value | None, scope: Scope) -> Value:
    """The variable's new value.  Raises UsageError for one that grows without end."""
    new: Value = [word for raw in node.value for word in expand(raw, scope)] if isinstance(node.value, tuple) else single(node.value, scope)
    if node.index is not None:
        made = _element(node, old, new, scope)
    elif node.append and old is not None:
        made = _appended(node, old, new)
    else:
        made = new
    if sum(len(one.text) for one in (made if isinstance(made, list) else [made])) > LONGEST:
        raise refuse(node.where, f"{node.name} grows beyond {LONGEST} characters")
    return made


@contextmanager
def lent(shell: Any, assigns: Iterable[Assign]) -> Iterator[None]:
    """Variables that stand before a command (`X=1 source file`): there while it runs, and then as they were."""
    kept = {one.name: shell.variables.get(one.name) for one in assigns}
    for one in assigns:
        shell.assign(one)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                shell.variables.pop(name, None)
            else:
                shell.variables[name] = value


def _appended(node: Assign, old: Value, new: Value) -> Value:
    if isinstance(old, Word) and old.unknown:
        return old
    if isinstance(old, list) or isinstance(new, list):
        return [*(old if isinstance(old, list) else [old]), *(new if isinstance(new, list) else [new])]
    return Word(old.text + new.text, node.where, new.unknown)


def _element(node: Assign, old: Value | None, new: Value, scope: Scope) -> Value:
    """`name[index]=value`; a list with gaps, or with names for numbers, is not read."""
    held = list(old) if isinstance(old, list) else []
    try:
        at = scope.calculate(node.index or "0")
        if not 0 <= at <= len(held) or isinstance(new, list):
            raise Undecided(f"{node.name} has gaps")
    except Undecided as undecided:
        return Word(f"${{{node.name}}}", node.where, undecided.why)
    return [*held[:at], new, *held[at + 1 :]]
