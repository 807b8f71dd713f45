"""Arithmetic of a script: what an expression comes to, with the script's variables."""

from __future__ import annotations

from typing import Any

from bisect_tool.launch.arithmetic import Arithmetic
from bisect_tool.launch.shell_assign import forget_set
from bisect_tool.launch.shell_tree import Raw
from bisect_tool.launch.shell_words import single
from bisect_tool.launch.words import Undecided, Where, Word, known


def calculated(shell: Any, text: str) -> int:
    """The value of an arithmetic expression.  Raises Undecided."""
    where = Where(shell.files[-1] if shell.files else shell.script, 1)
    try:
        if "$" in text or "`" in text:
            text = known([single(Raw(text.replace('"', ""), where), shell)])[0]
        return Arithmetic(text, lambda name: _number(shell, name), lambda name, value: shell.put(name, Word(str(value), where))).value()
    except Undecided as undecided:
        forget_set(shell, text, where, undecided.why)
        raise


def _number(shell: Any, name: str) -> int:
    """A variable as arithmetic sees it.  Raises Undecided: unset is what the environment has, not 0."""
    value = shell.get(name)
    if value is None:
        raise Undecided(shell.why_unset(name))
    first = value if isinstance(value, Word) else value[0] if value else Word("0", Where(shell.script, 1))
    text = known([first])[0].strip()
    try:
        if text.startswith("0") and text != "0":
            raise ValueError("octal")
        return int(text or "0")
    except ValueError:
        raise Undecided(f"{name} is {text[:40]!r}, no number") from None
