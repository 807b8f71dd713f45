"""One family of errors.  Each knows its exit code and what to do next; the command line prints it once."""

from __future__ import annotations

import re
from collections.abc import Sequence


class BisectError(Exception):
    """An error of ours (exit 70).  `hint` says what to do next and is printed on the same line."""

    exit_code = 70

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.hint = hint


def first_line(error: BaseException) -> str:
    """What an exception says, on one line; its name when it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def first_sentence(error: BaseException, most: int = 160) -> str:
    """What an exception says first, cut where it goes on for longer than `most` characters."""
    said = re.split(r"\.(?=\s|[A-Z][a-z]+\s|$)", first_line(error), maxsplit=1)[0]
    return said if len(said) <= most else f"{said[:most].partition(' (')[0].rstrip()} .."


def by_kind(names: Sequence[str], what: str = "tensors") -> list[str]:
    """Dotted names, those that differ by a number of a layer or an expert said once with their count."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+(?!\w)", ".*", name), []).append(name)
    return [found[0] if len(found) == 1 else f"{kind} ({len(found)} {what})" for kind, found in kinds.items()]


class UsageError(BisectError):
    """A usage, or an input that can't be read or does not fit (exit 2)."""

    exit_code = 2
