"""Shell arithmetic, `$((N * 4))` and `((i++))`: 64-bit integers, names, assignments.  Nothing else is evaluated."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from bisect_tool.launch.words import Undecided

TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<=|>>=|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),])"
)
LEVELS = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"), ("**",),
)  # fmt: skip
WORD = 1 << 64

BINARY: dict[str, Callable[[int, int], int]] = {
    "||": lambda a, b: int(bool(a or b)), "&&": lambda a, b: int(bool(a and b)),
    "|": lambda a, b: a | b, "^": lambda a, b: a ^ b, "&": lambda a, b: a & b,
    "==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b), "<=": lambda a, b: int(a <= b), ">": lambda a, b: int(a > b), ">=": lambda a, b: int(a >= b),
    "<<": lambda a, b: a << (b % 64), ">>": lambda a, b: a >> (b % 64),
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "**": lambda a, b: pow(a, b, WORD),
}  # fmt: skip


def wrapped(value: int) -> int:
    """A number as the shell's 64 bits hold it."""
    return (value + WORD // 2) % WORD - WORD // 2


@dataclass
class Arithmetic:
    """Evaluates one expression; names are read and written through `get` and `put`.  Raises Undecided for what it can't read."""

    text: str
    get: Callable[[str], int]
    put: Callable[[str, int], None]

    def __post_init__(self) -> None:
        self.tokens: list[str] = []
        at = 0
        stripped = self.text.rstrip()
        while at < len(stripped):
            found = TOKEN.match(stripped, at)
            if found is None:
                raise Undecided(f"the arithmetic {self.text.strip()!r} is not read")
            self.tokens.append(found[1])
            at = found.end()
        self.at = 0
        self.live = True

    def value(self) -> int:
        if not self.tokens:
            return 0
        found = self._comma()
        if self.at < len(self.tokens):
            raise Undecided(f"the arithmetic {self.text.strip()!r} is not read")
        return found

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self.at += 1
        return token

    def _comma(self) -> int:
        value = self._assignment()
        while self._peek() == ",":
            self._take()
            value = self._assignment()
        return value

    def _assignment(self) -> int:
        name = self._peek()
        following = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ""
        if _is_name(name) and re.fullmatch(r"=|\+=|-=|\*=|/=|%=|&=|\|=|\^=|<<=|>>=", following):
            self.at += 2
            value = self._assignment()
            if following != "=":
                value = self._apply(following[:-1], self.get(name), value)
            return self._put(name, value)
        return self._choice()

    def _choice(self) -> int:
        test = self._binary(0)
        if self._peek() != "?":
            return test
        self._take()
        first = self._if(bool(test), self._assignment)
        if self._take() != ":":
            raise Undecided(f"the arithmetic {self.text.strip()!r} is not read")
        second = self._if(not test, self._assignment)
        return first if test else second

    def _if(self, live: bool, read: Callable[[], int]) -> int:
        """Reads on; a branch that the shell would not take changes nothing."""
        before, self.live = self.live, self.live and live
        value = read()
        self.live = before
        return value

    def _binary(self, level: int) -> int:
        if level == len(LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self._peek() in LEVELS[level]:
            operator = self._take()
            if operator in ("&&", "||"):
                right = self._if(bool(left) == (operator == "&&"), lambda: self._binary(level + 1))
            else:
                right = self._binary(level if operator == "**" else level + 1)
            left = self._apply(operator, left, right)
        return left

    def _unary(self) -> int:
        token = self._take()
        if token in ("++", "--"):
            name = self._take()
            return self._put(name, self.get(name) + (1 if token == "++" else -1))
        if token in ("+", "-", "!", "~"):
            value = self._unary()
            return {"+": value, "-": -value, "!": int(not value), "~": ~value}[token]
        if token == "(":
            value = self._comma()
            if self._take() != ")":
                raise Undecided(f"the arithmetic {self.text.strip()!r} is not read")
            return value
        if token[:1].isdigit():
            return self._number(token)
        if not _is_name(token):
            raise Undecided(f"the arithmetic {self.text.strip()!r} is not read")
        value = self.get(token) if self.live else 0
        if self._peek() in ("++", "--"):
            self._put(token, value + (1 if self._take() == "++" else -1))
        return value

    def _number(self, token: str) -> int:
        base = 16 if token[:2].lower() == "0x" else 8 if token[0] == "0" else 10
        try:
            return wrapped(int(token, base))
        except ValueError:  # a digit that the base has not, or more digits than anyone means
            raise Undecided(f"the number {token[:40]} is not read") from None

    def _put(self, name: str, value: int) -> int:
        value = wrapped(value)
        if self.live:
            self.put(name, value)
        return value

    def _apply(self, operator: str, a: int, b: int) -> int:
        if operator in ("/", "%"):
            if b == 0:
                if not self.live:
                    return 0
                raise Undecided(f"the arithmetic {self.text.strip()!r} divides by 0")
            quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            return wrapped(quotient if operator == "/" else a - b * quotient)
        if operator == "**" and b < 0:
            raise Undecided(f"the arithmetic {self.text.strip()!r} has a negative exponent")
        return wrapped(BINARY[operator](a, b))


def _is_name(token: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z_]\w*", token))
