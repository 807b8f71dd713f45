"""A word of a command line, where it is written, and what is not known about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bisect_hooks.errors import UsageError

HINT = "give the expanded command line instead (a text file), or --set NAME=VALUE for what the environment says"
LARGEST_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Where:
    """A line of a file."""

    file: Path
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line}"


@dataclass(frozen=True, slots=True)
class Word:
    """One argument.

    unknown  why its value is not known ("" when it is); `text` is then what the script has in its place
    unset    it is a variable that nothing in the script sets: nothing at all, unless the environment says it
    bare     it has glob characters outside quotes: a file of that name in the working directory would replace it
    """

    text: str
    where: Where
    unknown: str = ""
    unset: bool = False
    bare: bool = False


class Undecided(Exception):  # noqa: N818 - a result, not an error
    """What is asked for depends on something that only a running shell would know."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Leave(Exception):  # noqa: N818 - control flow of a script, no error
    """`exit`, `return`, `break`, `continue`: left by name, and for `break 2` by how many loops."""

    def __init__(self, kind: str, loops: int = 1) -> None:
        super().__init__(kind)
        self.kind, self.loops = kind, loops


def refuse(where: Where, what: str) -> UsageError:
    """The error for a construct that is not read: which line, what, and what to give instead."""
    return UsageError(f"{where.file}:{where.line}: {what}", hint=HINT)


def read_text(path: Path) -> str:
    """A script's text.  Raises UsageError: not a file, too large, not text."""
    if not path.is_file():
        raise UsageError(f"{path} is not a file", hint="give the launch script, a file of flags, or a run_config.yaml")
    if path.stat().st_size > LARGEST_FILE:
        raise UsageError(f"{path} has {path.stat().st_size} bytes: no launch script is that long")
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text (UTF-8)") from None
    if "\0" in text:
        raise UsageError(f"{path} is not text: it holds zero bytes")
    return text.replace("\r\n", "\n")


def script_text(path: Path) -> str:
    """A shell script's text.  Raises UsageError as read_text does, and for lines that end as Windows ends them."""
    text = read_text(path)
    found = path.read_bytes().partition(b"\r\n")
    if found[1]:
        where = Where(path, found[0].count(b"\n") + 1)
        raise refuse(where, "this line ends in a carriage return (CRLF), which bash takes for part of its last word")
    return text


def known(words: Sequence[Word]) -> list[str]:
    """The texts of words that have to be known.  Raises Undecided with the reason of the first that is not."""
    for word in words:
        if word.unknown:
            raise Undecided(word.unknown)
    return [word.text for word in words]
