"""Bash text → words, operators and reserved words, one at a time.  Quotes and brackets are matched, never looked into."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from bisect_tool.launch.shell_tree import Raw
from bisect_tool.launch.words import Where, refuse

OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", "&", "|", ";", "\n", "(", ")")
PLAIN = re.compile(r"[^\s;&|<>()\"'$`\\]+")
REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-?|>>|>\||<>|>&|<&|<|>|&>>|&>)")


@dataclass
class Lexer:
    """A place in a script.  What it does not know is refused with file and line (UsageError)."""

    text: str
    file: Path
    first_line: int = 1
    at: int = 0
    heredocs: list[tuple[str, bool]] = field(default_factory=list)
    documents: list[Raw] = field(default_factory=list)
    targets: list[Raw] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = [0, *(found.end() for found in re.finditer("\n", self.text))]

    def where(self, at: int | None = None) -> Where:
        number = bisect_right(self.lines, min(self.at if at is None else at, len(self.text))) - 1
        return Where(self.file, number + self.first_line, self._line(number))

    def _line(self, number: int) -> str:
        end = self.lines[number + 1] if number + 1 < len(self.lines) else len(self.text)
        return self.text[self.lines[number] : end].strip()

    def error(self, what: str, at: int | None = None) -> Exception:
        return refuse(self.where(at), what)

    def blanks(self) -> None:
        """Skips blanks, continuations and comments, up to a newline."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = end if end >= 0 else len(self.text)
            else:
                return

    def newlines(self) -> None:
        """Skips blanks, newlines and `;`."""
        while True:
            self.blanks()
            if self.text.startswith("\n", self.at):
                self.newline()
            elif self.text.startswith(";", self.at) and not self.text.startswith((";;", ";&"), self.at):
                self.at += 1
            else:
                return

    def newline(self) -> None:
        """One newline, and the here-documents that begin after it."""
        self.at += 1
        for end, tabs in self.heredocs:
            start = self.at
            while True:
                if self.at >= len(self.text):
                    raise self.error(f"the here-document {end!r} does not end")
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[self.at : stop]
                self.at = min(stop + 1, len(self.text))
                if (line.lstrip("\t") if tabs else line) == end:
                    break
            self.documents.append(Raw(self.text[start : self.at], self.where(start)))
        self.heredocs.clear()

    def operator(self) -> str:
        """The operator that comes next, or ""; it is not taken."""
        self.blanks()
        return next((one for one in OPERATORS if self.text.startswith(one, self.at)), "")

    def next_word(self) -> str:
        """The plain word that comes next, not taken: how reserved words are known."""
        self.blanks()
        found = PLAIN.match(self.text, self.at)
        return found[0] if found else ""

    def take_word(self, *expected: str) -> str:
        word = self.next_word()
        if word not in expected:
            raise self.error(f"expected {' or '.join(expected)}, found {word or self.operator() or 'the end'!r}")
        self.at += len(word)
        return word

    def quoted(self, at: int) -> int:
        """The end of the quote, expansion or substitution that begins at `at`."""
        text, opened = self.text, self.text[at]
        if opened == "'":
            end = text.find("'", at + 1)
        elif text.startswith("$'", at):
            end = at + 2
            while end < len(text) and text[end] != "'":
                end += 2 if text[end] == "\\" else 1
        elif opened in '"`':
            end = at + 1
            while end < len(text) and text[end] != opened:
                if text[end] == "\\":
                    end += 2
                elif opened == '"' and (text.startswith(("$(", "${"), end) or text[end] == "`"):
                    end = self.quoted(end)
                else:
                    end += 1
        else:
            end = self.balanced(at + 1, *(("{", "}") if text.startswith("${", at) else ("(", ")")))
        if end < 0 or end >= len(text):
            raise self.error("a quote or bracket that is opened here does not close", at)
        return end + 1

    def balanced(self, at: int, opens: str, closes: str) -> int:
        """Where the bracket at `at` closes; quotes inside are skipped."""
        depth, text = 0, self.text
        while at < len(text):
            if text[at] == "\\":
                at += 2
                continue
            if text[at] in "'\"`" or text.startswith(("$(", "${", "$'"), at):
                at = self.quoted(at)
                continue
            if text[at] == "#" and text[at - 1] in " \t\n" and opens == "(":
                at = text.find("\n", at)
                if at < 0:
                    break
            depth += (text[at] == opens) - (text[at] == closes)
            if depth == 0:
                return at
            at += 1
        return -1

    def word(self) -> Raw | None:
        """The next word as it is written, or None at an operator."""
        self.blanks()
        start = at = self.at
        text = self.text
        while at < len(text):
            if text[at] == "\\":
                at += 2
            elif text[at] in "'\"`" or text.startswith(("$(", "${", "$'", '$"'), at):
                at = self.quoted(at + (text.startswith('$"', at)))
            elif text.startswith(("<(", ">("), at) and at == start:
                at = self.balanced(at + 1, "(", ")") + 1 or len(text)
            elif text[at] in "@?*+!" and text.startswith("(", at + 1) and at > start:
                at = self.balanced(at + 1, "(", ")") + 1 or len(text)
            elif text[at] in " \t\n;&|<>()":
                break
            else:
                at += 1
        if at == start:
            return None
        self.at = min(at, len(text))
        return Raw(text[start : self.at], self.where(start))

    def redirection(self) -> bool:
        """Takes a redirection, which changes nothing here."""
        self.blanks()
        found = REDIRECTION.match(self.text, self.at)
        if found is None or self.text.startswith(("<(", ">("), self.at):
            return False
        self.at = found.end()
        target = self.word()
        if target is None:
            raise self.error("a redirection without a target")
        if ">" in found[1]:
            self.targets.append(target)
        if found[1] in ("<<", "<<-"):
            self.heredocs.append((re.sub(r"[\"'\\]", "", target.text), found[1] == "<<-"))
        return True
