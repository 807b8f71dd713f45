"""Words as written → arguments: quotes removed, variables and arithmetic expanded, split where bash splits.

A value that only a running shell would know stays an unknown word that says why; it is refused where it matters, not before.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bisect_tool.launch.shell_braces import braces
from bisect_tool.launch.shell_lexer import Lexer
from bisect_tool.launch.shell_tree import Raw
from bisect_tool.launch.words import Undecided, Where, Word, known, refuse

GLOBS = re.compile(r"[*?\[]")
LONGEST = 1 << 18
Value = Word | list[Word]


class Gaps(list[Word]):
    """A list whose elements are not numbered 0, 1, 2: one of them was taken out, or set beyond the end."""

    def __init__(self, words: Sequence[Word], numbers: list[int]) -> None:
        super().__init__(words)
        self.numbers = numbers


def indices(value: Sequence[Word]) -> Sequence[int]:
    """The numbers of a list's elements."""
    return value.numbers if isinstance(value, Gaps) else range(len(value))


class Scope(Protocol):
    """Where names get their values."""

    def get(self, name: str) -> Value | None: ...
    def put(self, name: str, value: Value) -> None: ...
    def positional(self) -> list[Word]: ...
    def substitute(self, text: str, where: Where) -> str: ...
    def calculate(self, text: str) -> int: ...
    def why_unset(self, name: str) -> str: ...


@dataclass
class Field:
    """A word being built: its text, and what is known about it."""

    text: str = ""
    quoted: bool = False
    unknown: str = ""
    unset: bool = True
    bare: bool = False
    whole: Word | None = None
    pieces: int = 0

    def add(self, word: Word, quoted: bool) -> None:
        self.pieces += 1
        self.whole = word if self.pieces == 1 else None
        self.text += word.text
        self.quoted |= quoted
        if word.unknown and (not self.unknown or not word.unset):
            self.unknown = word.unknown
        self.unset &= word.unset
        self.bare |= not quoted and bool(GLOBS.search(word.text)) and not word.unknown


def expand(raw: Raw, scope: Scope, split: bool = True) -> list[Word]:
    """The arguments that one word becomes.  `split` is off in assignments and `[[ ]]`, where bash does not split."""
    found: list[Word] = []
    try:
        texts = braces(raw.text) if split else [raw.text]
    except Undecided as undecided:
        raise refuse(raw.where, undecided.why) from None
    for one in texts:
        found += _Expansion(one, raw.where, scope, split).words()
    if sum(len(word.text) for word in found) > LONGEST:
        raise refuse(raw.where, f"this word grows beyond {LONGEST} characters")
    return found


def single(raw: Raw, scope: Scope) -> Word:
    """A word where bash does not split: always one."""
    found = expand(raw, scope, split=False)
    if len(found) == 1:
        return found[0]
    return joined(found, " ", raw.where)


def joined(words: Sequence[Word], between: str, where: Where) -> Word:
    """Several words as one text."""
    unknown = next((word.unknown for word in words if word.unknown), "")
    return Word(between.join(word.text for word in words), where, unknown)


@dataclass
class _Expansion:
    """One word on its way."""

    text: str
    where: Where
    scope: Scope
    split: bool
    vanished: bool = False
    quoting: bool = False
    made: bool = False
    loose: bool = False  # it stands in an expansion: what is not quoted is split

    def words(self) -> list[Word]:
        self.fields = [Field()]
        self._scan(self.text, quoted=False)
        return [self._finished(one) for one in self.fields if one.pieces and (one.text or one.quoted or one.unknown)]

    def _finished(self, one: Field) -> Word:
        if one.whole is not None:
            return replace(one.whole, bare=one.bare or one.whole.bare)
        return Word(one.text, self.where, one.unknown, bool(one.unknown) and one.unset, one.bare)

    def _literal(self, text: str, quoted: bool) -> None:
        if self.loose and not quoted:
            self._pieces(Word(text, self.where), quoted)
        else:
            self.fields[-1].add(Word(text, self.where), quoted)

    def _scan(self, text: str, quoted: bool) -> None:
        at, plain = 0, ""
        lexer = Lexer(text, self.where.file, self.where.line)
        while at < len(text):
            char = text[at]
            special = char in "$`" or char == "\\" or (not quoted and char in "'\"")
            if not special:
                plain, at = plain + char, at + 1
                continue
            if char == "\\":
                escaped = text[at + 1 : at + 2]
                if quoted and escaped not in '$`"\\\n':
                    plain += "\\"
                if plain:
                    self._literal(plain, quoted)
                if escaped != "\n":
                    self._literal(escaped, True)
                plain, at = "", at + 2
                continue
            if plain:
                self._literal(plain, quoted)
                plain = ""
            end = self._special(lexer, text, at, quoted)
            at = end
        if plain or (quoted and not self.fields[-1].pieces and not self.vanished):
            self._literal(plain, quoted)

    def _special(self, lexer: Lexer, text: str, at: int, quoted: bool) -> int:
        """Expands what begins at `at`; returns where it ends."""
        self.quoting = quoted
        if text.startswith("$'", at) and not quoted:
            end = lexer.quoted(at)
            self._literal(_ansi(text[at + 2 : end - 1]), True)
        elif text[at] == "'":
            end = lexer.quoted(at)
            self._literal(text[at + 1 : end - 1], True)
        elif text[at] == '"' or (text.startswith('$"', at) and not quoted):
            at += text[at] == "$"
            end = lexer.quoted(at)
            inside = text[at + 1 : end - 1]
            self._literal("", True) if not inside else self._scan(inside, quoted=True)
        elif text.startswith("$((", at) and (end := lexer.quoted(at)) and text[end - 2] == ")":
            self._insert(self._calculated(text[at + 3 : end - 2]), quoted)
        elif text.startswith("$(", at) or text[at] == "`":
            end = lexer.quoted(at)
            script = text[at + 2 : end - 1] if text[at] == "$" else text[at + 1 : end - 1].replace("\\`", "`")
            self._insert(self._substituted(script), quoted)
        elif text.startswith("${", at):
            end = lexer.quoted(at)
            self._insert(self._parameter(text[at + 2 : end - 1]), quoted, text[at:end])
        elif found := re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(text, at):
            end = found.end()
            self._insert(self._parameter(found[1]), quoted, found[0])
        else:
            end = at + 1
            self._literal("$", quoted)
        return end

    def _insert(self, value: Value, quoted: bool, shown: str = "") -> None:
        """An expansion's value: a list gives a field an element, text outside quotes is split."""
        made, self.made = self.made, False
        if isinstance(value, list):
            for number, word in enumerate(value):
                if number:
                    self.fields.append(Field())
                self._pieces(word, quoted or made)
            self.vanished |= not value
            return
        # what would be a list is shown as one: it may be any number of words
        several = bool(re.search(r"[@*]\]\}$|^\$[@*]", shown))
        self._pieces(replace(value, text=shown if several else value.text or shown) if value.unknown else value, quoted)

    def _pieces(self, word: Word, quoted: bool) -> None:
        if quoted or word.unknown or not self.split:
            self.fields[-1].add(word, quoted)
            return
        blanks = self._ifs()
        parts = [one for one in re.split(f"[{re.escape(blanks)}]+", word.text) if one] if blanks else [word.text]
        if parts == [word.text]:
            self.fields[-1].add(word, False)
            return
        if word.text[:1] in blanks and self.fields[-1].pieces:
            self.fields.append(Field())
        for number, part in enumerate(parts):
            if number:
                self.fields.append(Field())
            self.fields[-1].add(Word(part, word.where), False)
        if parts and word.text[-1:] in blanks:
            self.fields.append(Field())

    def _ifs(self) -> str:
        value = self.scope.get("IFS")
        return " \t\n" if value is None or isinstance(value, list) or value.unknown else value.text

    def _calculated(self, text: str) -> Word:
        try:
            return Word(str(self.scope.calculate(text)), self.where)
        except Undecided as undecided:
            return Word(f"$(({text}))", self.where, undecided.why)

    def _substituted(self, script: str) -> Word:
        try:
            return Word(self.scope.substitute(script, self.where), self.where)
        except Undecided as undecided:
            return Word(f"$({script})", self.where, undecided.why)

    # -- ${...} ----------------------------------------------------------------------------------------------------------------

    def _parameter(self, inside: str) -> Value:
        """The value of what stands between `${` and `}`."""
        found = re.fullmatch(r"([#!]?)([A-Za-z_]\w*|\d+|[@*?$!-]|#)(?:\[([^\]]*)\])?(.*)", inside, re.DOTALL)
        if inside in ("#", "?", "$", "!", "-"):
            return Word(str(len(self.scope.positional())), self.where) if inside == "#" else self._unread(inside)
        if found is None or found[1] == "!":  # `${!name}` may be a list
            return replace(self._unread(inside), text=f"${{{inside}{'[@]' * inside.startswith('!')}}}")
        length, name, index, rest = found.groups()
        value = self._named(name, index)
        if length:
            return self._length(value, name, index) if not rest else self._unread(inside)
        if not rest:
            return self._unset(name) if value is None else value
        try:
            if index not in (None, "@", "*", "0") and re.match(":?=", rest) and value is None:
                unknown = Word(f"${{{name}[@]}}", self.where, f"${{{inside}}} is not read")
                self.scope.put(name, unknown)
                return unknown
            return self._operated(value, name, rest)
        except Undecided as undecided:
            return Word("${" + inside + "}", self.where, undecided.why)

    def _unread(self, inside: str) -> Word:
        return Word("${" + inside + "}", self.where, f"${{{inside}}} is not read")

    def _unset(self, name: str) -> Word:
        return Word("${" + name + "}", self.where, self.scope.why_unset(name), unset=True)

    def _named(self, name: str, index: str | None) -> Value | None:
        """The value of a name; None when nothing sets it.  A list without an index is its first element."""
        if name in ("@", "*"):
            value: Value | None = self.scope.positional()
            index = name
        elif name.isdigit() and name != "0":
            words = self.scope.positional()
            value = words[int(name[:6]) - 1] if int(name[:6]) <= len(words) else None
        else:
            value = self.scope.get(name)
        if value is None:
            return None
        if isinstance(value, Word):
            return value if index is None or index in ("@", "*", "0") or value.unknown else None
        if index == "@":
            return value
        if index == "*":
            return joined(value, self._ifs()[:1], self.where)
        try:
            number = self.scope.calculate(index) if index else 0
        except Undecided as undecided:
            return Word(f"${{{name}[{index}]}}", self.where, undecided.why)
        number += max(indices(value), default=-1) + 1 if number < 0 else 0
        return dict(zip(indices(value), value, strict=True)).get(number)

    def _length(self, value: Value | None, name: str, index: str | None) -> Value:
        if value is None:
            return self._unset(name)
        if isinstance(value, list):
            return Word(str(len(value)), self.where)
        if index == "*":
            every = self.scope.get(name)
            return Word(str(len(every) if isinstance(every, list) else 1), self.where)
        return value if value.unknown else Word(str(len(value.text)), self.where)

    def _operated(self, value: Value | None, name: str, rest: str) -> Value:
        """`:-` and its like, `#` `%` `/` on text, `:offset:length`.  Raises Undecided for the others."""
        if found := re.match(r"(:?[-=+?])(.*)", rest, re.DOTALL):
            return self._default(value, name, found[1], found[2])
        if value is None:
            raise Undecided(self.scope.why_unset(name))
        if isinstance(value, list):
            if rest[0] == ":":
                start, length = self._span(rest)
                if length is not None and length < 0:
                    raise Undecided(f"{rest} is not read")
                # the arguments of a script count from 1; what is before them is the script itself
                numbers = [one + (name in ("@", "*")) for one in indices(value)]
                start += max(numbers, default=-1) + 1 if start < 0 else 0
                cut = [word for number, word in zip(numbers, value, strict=True) if number >= start]
                return cut if length is None else cut[: length - (name in ("@", "*") and start == 0 and length > 0)]
            return [self._edited(word, rest) for word in value]
        return self._edited(value, rest)

    def _span(self, rest: str) -> tuple[int, int | None]:
        """`:offset:length`.  Raises Undecided."""
        offset, colon, length = rest[1:].partition(":")
        return self.scope.calculate(offset), self.scope.calculate(length) if colon else None

    def _default(self, value: Value | None, name: str, operator: str, text: str) -> Value:
        if isinstance(value, Word) and value.unknown and not value.unset and operator[-1] != "?":
            raise Undecided(value.unknown)
        empty = (isinstance(value, list) and not value) or (isinstance(value, Word) and not value.text and operator[0] == ":")
        absent = value is None or empty or (isinstance(value, Word) and value.unset)
        if operator[-1] == "+":
            return Word("", self.where) if absent else self._alternative(text)
        if not absent and value is not None:
            return value
        if operator[-1] == "?":
            return self._unset(name)
        other = self._alternative(text)
        if operator[-1] == "=":
            self.scope.put(name, other)
        return other

    def _alternative(self, text: str) -> Value:
        """What stands after `:-`: in quotes one word, in which only double quotes are quotes; else words of its own."""
        inner = _Expansion(text, self.where, self.scope, self.split)
        if not self.quoting:
            inner.loose = self.split
            found = inner.words()
            self.made = self.split
            return found if self.split else joined(found, " ", self.where)
        inner.fields = [Field()]
        inner._scan(re.sub(r'(?<!\\)"', "", text), quoted=True)
        return joined([inner._finished(one) for one in inner.fields], " ", self.where)

    def _edited(self, value: Word, rest: str) -> Word:
        text = known([value])[0]
        if rest[0] == ":":
            start, length = self._span(rest)
            start = max(start + len(text), 0) if start < 0 else start
            return Word(text[start:] if length is None else text[start:][:length], value.where)
        if found := re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL):
            return Word(_trimmed(text, found[1], self._pattern(found[2])), value.where)
        if found := re.fullmatch(r"(//?)((?:[^/\\]|\\.)+)(?:/(.*))?", rest, re.DOTALL):
            new = known([single(Raw(found[3] or "", self.where), self.scope)])[0]
            if "&" in new:
                raise Undecided(f"${{...{rest}}} is not read")
            if found[1] == "/" and found[2][0] in "#%":  # only at the start, or at the end
                front = found[2][0] == "#"
                rest = _trimmed(text, 2 * found[2][0], self._pattern(found[2][1:]))
                return Word(text if rest == text else new + rest if front else rest + new, value.where)
            return Word(_pattern(self._pattern(found[2])).sub(lambda _: new, text, count=found[1] == "/"), value.where)
        changes = {"^^": text.upper(), ",,": text.lower(), "^": text[:1].upper() + text[1:], ",": text[:1].lower() + text[1:]}
        if rest in changes:
            return Word(changes[rest], value.where)
        raise Undecided(f"${{...{rest}}} is not read")

    def _pattern(self, text: str) -> str:
        word = single(Raw(text, self.where), self.scope)
        return known([word])[0] if word.bare else glob.escape(known([word])[0])


def matches(text: str, pattern: str) -> bool:
    """Whether a text is of a shell's pattern, in which `[^a]` is what Python's fnmatch calls `[!a]`."""
    return fnmatch.fnmatchcase(text, pattern.replace("[^", "[!"))


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(text.replace("[^", "[!")).removesuffix(r"\Z").removesuffix(r"\z"), re.DOTALL)


def _trimmed(text: str, operator: str, pattern: str) -> str:
    """`${x#pattern}` and its like."""
    cuts = range(len(text) + 1)
    front = operator[0] == "#"
    shortest = len(operator) == 1
    for cut in cuts if front == shortest else reversed(cuts):
        piece = text[:cut] if front else text[cut:]
        if matches(piece, pattern):
            return text[cut:] if front else text[:cut]
    return text


def _ansi(text: str) -> str:
    """The inside of `$'...'`."""
    plain = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}

    def char(found: re.Match[str]) -> str:
        hexadecimal, octal, other = found.groups()
        return chr(int(hexadecimal[1:], 16)) if hexadecimal else chr(int(octal, 8) % 256) if octal else plain.get(other, other)

    return re.sub(r"\\(?:(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4})|([0-7]{1,3})|(.))", char, text, flags=re.DOTALL)
