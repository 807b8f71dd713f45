"""What an assignment makes of a variable: `=`, `+=`, lists and their elements, and what `declare` and its like say of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bisect_tool.launch.shell_tree import Assign, Raw
from bisect_tool.launch.shell_words import LONGEST, Gaps, Scope, Value, expand, indices, single
from bisect_tool.launch.words import Undecided, Where, Word, known, refuse

NAMED = re.compile(r"([A-Za-z_]\w*)(?:\[(.+)\])?")
SETS = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)")
KEYED = re.compile(r"\[([^\]]+)\](\+?)=(.*)", re.DOTALL)


def assigned(node: Assign, old: Value | None, scope: Scope) -> Value:
    """The variable's new value.  Raises UsageError for one that grows without end."""
    try:
        made = _assigned(node, old, scope)
    except Undecided as undecided:
        made = Word(f"${{{node.name}[@]}}", node.where, undecided.why)
    if sum(len(one.text) for one in (made if isinstance(made, list) else [made])) > LONGEST:
        raise refuse(node.where, f"{node.name} grows beyond {LONGEST} characters")
    return made


def _assigned(node: Assign, old: Value | None, scope: Scope) -> Value:
    if isinstance(node.value, tuple):
        if node.index is not None:
            raise Undecided(f"{node.name} has a list in a list")
        return _list(node, old, scope)
    # no file pattern is looked up in an assignment
    new = node.value if isinstance(node.value, Word) else replace(single(node.value, scope), bare=False)
    if node.index is not None:
        return with_element(node.name, old, node.index, new, scope, node.append)
    if isinstance(old, list):  # bash's first element
        return with_element(node.name, old, "0", new, scope, node.append)
    if not node.append or old is None:
        return new
    return old if old.unknown else Word(old.text + new.text, node.where, new.unknown)


def _list(node: Assign, old: Value | None, scope: Scope) -> Value:
    """`name=(...)` and `name+=(...)`: what is there is kept with its numbers, `[3]=x` says a number."""
    held = _elements(old) if node.append and old is not None else {}
    if node.append and isinstance(old, Word) and old.unknown:
        return old
    at = max(held, default=-1) + 1
    assert isinstance(node.value, tuple)
    for raw in node.value:
        keyed = KEYED.fullmatch(raw.text)
        if keyed is None:
            for word in expand(raw, scope):
                if word.unknown and len(node.value) == 1 and raw.text.startswith(("$(", "`")):  # it may be any number of words
                    word = replace(word, text=f"${{{node.name}[@]}}")
                held[at] = word
                at += 1
            continue
        at = scope.calculate(keyed[1])
        value = single(Raw(keyed[3], raw.where), scope)
        before = known([held[at]])[0] if keyed[2] and at in held else ""
        if at < 0:
            raise Undecided(f"{node.name} has a negative index")
        held[at] = replace(value, text=before + value.text)
        at += 1
    return indexed(held)


def _elements(value: Value | None) -> dict[int, Word]:
    """A variable as bash's numbered elements."""
    if isinstance(value, list):
        return dict(zip(indices(value), value, strict=True))
    return {} if value is None else {0: value}


def indexed(elements: Mapping[int, Word]) -> list[Word]:
    """Numbered elements in their order."""
    numbers = sorted(elements)
    words = [elements[one] for one in numbers]
    return words if numbers == list(range(len(numbers))) else Gaps(words, numbers)


def with_element(name: str, old: Value | None, index: str, new: Word, scope: Scope, append: bool = False) -> Value:
    """A list with one element set.  Raises Undecided where its number is not known."""
    if isinstance(old, Word) and old.unknown:
        raise Undecided(old.unknown)
    held = _elements(old)
    at = scope.calculate(index)
    at += max(held, default=-1) + 1 if at < 0 else 0
    if at < 0:
        raise Undecided(f"{name} has no element {index}")
    before = known([held[at]])[0] if append and at in held else ""
    return indexed(held | {at: replace(new, text=before + new.text)})


def without_element(name: str, old: Value, index: str, scope: Scope) -> Value:
    """A list with one element taken out: the others keep their numbers.  Raises Undecided."""
    if isinstance(old, Word) and old.unknown:
        raise Undecided(old.unknown)
    held = _elements(old)
    at = scope.calculate(index)
    at += max(held, default=-1) + 1 if at < 0 else 0
    if index in ("@", "*"):
        return []
    return indexed({number: word for number, word in held.items() if number != at})


def put_named(shell: Any, text: str, new: Word) -> None:
    """Sets what a command names: `printf -v 'A[1]'`, `read x`.  Raises UsageError for what is no name."""
    found = NAMED.fullmatch(text)
    if found is None:
        raise refuse(new.where, f"what is set here ({text[:40]}) is not known")
    name, index = found.groups()
    old = shell.get(name)
    try:
        shell.put(name, with_element(name, old, index or "0", new, shell) if index or isinstance(old, list) else new)
    except Undecided as undecided:
        shell.put(name, Word(f"${{{name}[@]}}", new.where, undecided.why))


def forget_set(shell: Any, text: str, where: Where, why: str) -> None:
    """What an arithmetic text that is not read would have set is not known."""
    for one in SETS.finditer(text):
        name = one[1] or one[2]
        many = "[@]" if isinstance(shell.get(name), list) or "[" in one[0] else ""
        shell.put(name, Word(f"${{{name}{many}}}", where, why))


def said(given: Mapping[str, str], name: str) -> Word:
    """What the environment says of a name."""
    return Word(given[name], Where(Path("--set"), 1, f"{name}={given[name]}"))


def environment(given: Mapping[str, str], name: str, value: Value) -> Value:
    """The script's own value of a name; where that is not known, what the environment says of it."""
    words = [value] if isinstance(value, Word) else value
    return said(given, name) if name in given and words and all(word.unknown for word in words) else value


def declare(shell: Any, command: str, words: list[Word], assigns: Iterable[Assign]) -> None:
    """`local`, `declare`, `export`, `readonly`: assigned, hidden from outside a function, and marked with what they are declared as."""
    options = "".join(word.text[1:] for word in words if re.fullmatch(r"-[A-Za-z]+", word.text))
    made, names = list(assigns), []
    for word in words:
        name, equals, text = word.text.partition("=")
        found = NAMED.fullmatch(name.removesuffix("+"))
        if found is not None and equals:  # in quotes, or made of variables
            made.append(Assign(found[1], found[2], name.endswith("+"), replace(word, text=text), word.where))
        elif found is not None and not word.unknown:
            names.append(name)
    names = list(dict.fromkeys([*(one.name for one in made), *names]))
    hidden = names if command in ("local", "declare", "typeset") and "g" not in options and shell.locals else []
    hidden = [name for name in hidden if name not in shell.locals[-1]]
    # every word is expanded before the first is assigned
    values = [(one, assigned(one, None if one.name in hidden else shell.get(one.name), shell)) for one in made]
    for name in hidden:
        shell.locals[-1][name] = shell.variables.pop(name, None), shell.marks.pop(name, "")
    for one, value in values:
        if "n" in options:
            if isinstance(value, list) or value.unknown or not value.text.isidentifier():
                raise refuse(one.where, f"what {one.name} stands for (declare -n) is not followed")
            shell.marks[one.name] = f"n{value.text}"
        else:
            shell.put(one.name, marked(one.name, value, options + shell.marks.get(one.name, ""), one))
    marks = "r" * (command == "readonly") + "x" * (command == "export") + "".join(one for one in options if one in "Aiulrx")
    for name in names:
        if not shell.marks.get(name, "").startswith("n"):
            shell.marks[name] = shell.marks.get(name, "") + marks


def marked(name: str, value: Value, marks: str, one: Assign) -> Value:
    """A value as its name is declared to take it: what -A, -i, -l and -u make of it is not read, but for plain numbers."""
    plain = isinstance(value, Word) and re.fullmatch(r"0|-?[1-9]\d*", value.text) is not None and not value.unknown
    odd = set(marks) & set("iul") and not (plain and not one.append)
    if "A" not in marks and not odd:
        return value
    return Word(
        f"${{{name}[@]}}", one.where, f"{name} is declared -{''.join(one for one in marks if one in 'Aiul')}, which is not followed"
    )


def exported(shell: Any, assigns: Iterable[Assign]) -> Any:
    """A shell started by this one: it has what is exported to it, and no list."""
    for one in assigns:
        shell.assign(one)
    kept = {*(one.name for one in assigns), *shell.given, *(name for name, marks in shell.marks.items() if "x" in marks)}
    if not shell.exports_all:
        shell.variables = {name: value for name, value in shell.variables.items() if name in kept and isinstance(value, Word)}
    return shell


def adopt(shell: Any, others: Sequence[Any], where: Where, why: str) -> None:
    """Goes on from several states, one of which is the true one: what differs is unknown."""
    first = others[0]
    names = dict.fromkeys(name for one in others for name in one.variables)
    values: dict[str, Value] = {}
    for name in names:
        held = [one.variables.get(name) for one in others]
        if all(_same(one, held[0]) for one in held) and held[0] is not None:
            values[name] = held[0]
            continue
        many = "[@]" if any(isinstance(one, list) or (one is not None and "--" in one.text) for one in held) else ""
        values[name] = environment(shell.given, name, Word(f"${{{name}{many}}}", where, f"{name} depends on {why}"))
    shell.variables, shell.functions = values, first.functions
    shell.marks = {name: marks for one in others for name, marks in one.marks.items()}
    for number, scope in enumerate(shell.locals):
        hidden = dict.fromkeys(name for one in others for name in one.locals[number])
        for name in hidden:
            everywhere = all(name in one.locals[number] for one in others)
            unsure = Word(f"${{{name}[@]}}", where, f"{name} depends on {why}"), ""
            scope[name] = first.locals[number][name] if everywhere else unsure
    shell.missing = list(dict.fromkeys(line for one in others for line in one.missing))
    shell.directory = first.directory if all(one.directory == first.directory for one in others) else None
    shell.steps = max(one.steps for one in others)


def _same(one: Value | None, other: Value | None) -> bool:
    def plain(value: Value | None) -> object:
        if isinstance(value, list):
            return [(number, word.text, word.unknown) for number, word in zip(indices(value), value, strict=True)]
        return value and (value.text, value.unknown)

    return plain(one) == plain(other)


@contextmanager
def function(shell: Any) -> Iterator[None]:
    """A function's own names: as they were, after it."""
    shell.locals.append({})
    try:
        yield
    finally:
        for name, (value, marks) in shell.locals.pop().items():
            shell.variables.pop(name, None)
            shell.marks.pop(name, None)
            if value is not None:
                shell.variables[name] = value
            if marks:
                shell.marks[name] = marks


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
