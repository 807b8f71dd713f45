"""Bash's braces, before anything else is expanded: `a{1..3}`, `{x,y}`."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from bisect_tool.launch.shell_lexer import Lexer
from bisect_tool.launch.words import Undecided

MOST = 1 << 18


def braces(text: str) -> list[str]:
    """`a{1..3}`, `{x,y}` and what is made of them.  Braces that bash would not expand stay as they are.  Raises Undecided: too many."""
    for start in _unquoted(text, "{") if "{" in text else []:
        end, commas = _closing(text, start)
        if end < 0:
            continue
        inside = text[start + 1 : end]
        if commas:
            cuts = [start, *commas, end]
            parts = [text[a + 1 : b] for a, b in itertools.pairwise(cuts)]
        else:
            parts = _sequence(inside)
        if parts:
            inner, rests = [one for part in parts for one in braces(part)], braces(text[end + 1 :])
            if len(inner) * len(rests) > MOST:
                raise Undecided(f"its braces make more than {MOST} words")
            return [text[:start] + one + rest for one in inner for rest in rests]
    return [text]


def _unquoted(text: str, chars: str) -> list[int]:
    """Where these characters stand outside quotes and expansions."""
    found, at, lexer = [], 0, Lexer(text, Path())
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] in "'\"`" or text.startswith(("$(", "${", "$'"), at):
            at = lexer.quoted(at)
        else:
            found += [at] if text[at] in chars else []
            at += 1
    return found


def _closing(text: str, start: int) -> tuple[int, list[int]]:
    """Where a brace closes (-1 if it does not), and the commas between."""
    depth, commas = 0, []
    for at in _unquoted(text, "{},"):
        if at < start:
            continue
        depth += {"{": 1, "}": -1, ",": 0}[text[at]]
        if text[at] == "," and depth == 1:
            commas.append(at)
        if depth == 0:
            return at, commas
    return -1, []


def _sequence(inside: str) -> list[str]:
    """`1..3`, `01..03`, `0..8..2`, `a..c`."""
    if re.fullmatch(r"[a-zA-Z]\.\.[a-zA-Z]", inside):
        first, last = ord(inside[0]), ord(inside[-1])
        return [chr(one) for one in range(first, last + (1 if last >= first else -1), 1 if last >= first else -1)]
    found = re.fullmatch(r"(-?\d{1,6})\.\.(-?\d{1,6})(?:\.\.(-?\d{1,6}))?", inside)
    if found is None:
        return []
    first, last, step = int(found[1]), int(found[2]), abs(int(found[3] or 1)) or 1
    padded = any(re.match(r"-?0\d", one) for one in found.groups()[:2])
    width = max(len(found[1]), len(found[2])) if padded else 0
    return [f"{one:0{width}d}" for one in range(first, last + (1 if last >= first else -1), step if last >= first else -step)]
