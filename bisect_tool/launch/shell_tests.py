"""Conditions of a script: `[ ... ]` and `[[ ... ]]`.  Files, patterns of `=~` and unknown values leave them undecided."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bisect_tool.launch.shell_words import matches
from bisect_tool.launch.words import Undecided, Word, known

NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b, "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip


@dataclass
class Condition:
    """One test.  `double` is `[[ ]]`, where `==` takes patterns."""

    words: Sequence[Word]
    double: bool
    at: int = 0

    def value(self) -> bool:
        """True or false.  Raises Undecided."""
        if not self.words:
            return False
        found = self._either()
        if self.at < len(self.words):
            raise Undecided("this test is not read")
        return found

    def _peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.words[at].text if at < len(self.words) and not self.words[at].unknown else ""

    def _either(self) -> bool:
        return self._joined(("||", "-o"), self._both, True)

    def _both(self) -> bool:
        return self._joined(("&&", "-a"), self._one, False)

    def _joined(self, operators: tuple[str, str], read: Callable[[], bool], decides: bool) -> bool:
        """Operands joined by one operator: one that decides outweighs those that are not known."""
        results: list[bool | Undecided] = []
        while True:
            try:
                results.append(read())
            except Undecided as undecided:
                results.append(undecided)
            if self._peek() not in operators:
                break
            self.at += 1
        if decides in results:
            return decides
        for one in results:
            if isinstance(one, Undecided):
                raise one
        return not decides

    def _one(self) -> bool:
        if self._peek() == "!" and self.at + 1 < len(self.words):
            self.at += 1
            return not self._one()
        if self._peek() == "(":
            self.at += 1
            found = self._either()
            self.at += 1
            return found
        operator = self._peek(1)
        if operator in ("=", "==", "!=", "=~", "<", ">") or operator in NUMBERS:
            left, right = self.words[self.at], self.words[self.at + 2] if self.at + 2 < len(self.words) else self.words[self.at + 1]
            self.at += 3
            return self._compare(left, operator, right)
        if self._peek().startswith("-") and len(self._peek()) == 2 and self.at + 1 < len(self.words):
            operator, word = self._peek(), self.words[self.at + 1]
            self.at += 2
            if operator not in ("-z", "-n"):
                raise Undecided(f"{operator} asks the file system")
            return (known([word])[0] == "") == (operator == "-z")
        word = self.words[self.at]
        self.at += 1
        return known([word])[0] != ""

    def _compare(self, left: Word, operator: str, right: Word) -> bool:
        if operator == "=~":
            raise Undecided("=~ is not read")
        a, b = known([left, right])
        if operator in NUMBERS:
            try:
                if self.double and any(re.match(r"[-+]?0\d", one.strip()) for one in (a, b)):
                    raise ValueError("octal")
                return NUMBERS[operator](int(a), int(b))
            except ValueError:
                raise Undecided(f"{a!r} {operator} {b!r} compares no numbers") from None
        if operator in ("<", ">"):
            return a < b if operator == "<" else a > b
        equal = matches(a, b) if self.double and right.bare else a == b
        return equal == (operator != "!=")
