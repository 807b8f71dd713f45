"""Bash text → commands, by recursive descent.  What it does not know is refused with file and line; nothing is expanded here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bisect_tool.launch.flags import is_flag
from bisect_tool.launch.shell_lexer import Lexer
from bisect_tool.launch.shell_tree import (
    Arith,
    Assign,
    Body,
    Case,
    Chain,
    Count,
    For,
    Function,
    Group,
    If,
    Node,
    Pipe,
    Raw,
    Simple,
    Test,
    While,
)
from bisect_tool.launch.words import Where

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\s]*)\])?(\+?=)")
DECLARES = ("export", "declare", "typeset", "local", "readonly")
# words that begin or end what is not read, or are not expected where a command begins
OUT_OF_PLACE = ("select", "coproc", "then", "else", "elif", "fi", "do", "done", "esac", "in")
DEEPEST = 60


@dataclass
class Reader(Lexer):
    """Reads one script.  lenient: a line that begins with a flag goes on with the command before it"""

    depth: int = 0
    lenient: bool = False

    def script(self) -> Body:
        body = self.body(())
        if self.at < len(self.text):
            raise self.error(f"{self.text[self.at : self.at + 20].split()[0]!r} is not expected here")
        return body

    def body(self, ends: tuple[str, ...]) -> Body:
        """Commands up to a reserved word or bracket of `ends`, which is not taken."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error("this is nested too deeply")
        found: list[Node] = []
        while True:
            self.newlines()
            if self.at >= len(self.text) or self.next_word() in ends or (self.operator() and self.operator() in ends):
                self.depth -= 1
                return tuple(found)
            if self.operator() == ")":
                self.depth -= 1
                return tuple(found)
            found.append(self.chain())
            if self.operator() == "&":  # in the background: nobody sees what it changes
                found[-1] = Group(found[-1].where, (found[-1],), True)
                self.at += 1

    def chain(self) -> Node:
        where = self.where()
        first = self.pipe()
        rest = []
        while self.operator() in ("&&", "||"):
            operator = self.operator()
            self.at += 2
            self.newlines()
            rest.append((operator, self.pipe()))
        return Chain(where, first, tuple(rest)) if rest else first

    def pipe(self) -> Node:
        where, negated = self.where(), False
        while self.next_word() in ("!", "time"):
            negated ^= self.take_word("!", "time") == "!"
        commands = [self.command()]
        while self.operator() in ("|", "|&"):
            self.at += len(self.operator())
            self.newlines()
            commands.append(self.command())
        return Pipe(where, tuple(commands), negated) if len(commands) > 1 or negated else commands[0]

    def command(self) -> Node:
        node = self.compound()
        if node is None:
            return self.simple()
        while self.redirection():
            pass
        return node

    def compound(self) -> Node | None:
        where, word = self.where(), self.next_word()
        if self.text.startswith("((", self.at):
            end = self.balanced(self.at, "(", ")")
            if end < 0 or self.text[end - 1] != ")":
                raise self.error("(( does not close")
            text, self.at = self.text[self.at + 2 : end - 1], end + 1
            return Arith(where, text)
        if self.text.startswith("(", self.at):
            self.at += 1
            body = self.body((")",))
            self._close(")")
            return Group(where, body, True)
        if word == "{":
            self.at += 1
            body = self.body(("}",))
            self._close("}")
            return Group(where, body, False)
        if word == "[[":
            return self._test(where)
        if word == "function" or re.match(r"[A-Za-z_][\w-]*[ \t]*\([ \t]*\)", self.text[self.at : self.at + 200]):
            return self._function(where, word)
        readers = {"if": self._if, "for": self._for, "while": self._while, "until": self._while, "case": self._case}
        return readers[word](where) if word in readers else None

    def _close(self, bracket: str) -> None:
        self.newlines()
        if not self.text.startswith(bracket, self.at):
            raise self.error(f"expected {bracket}")
        self.at += 1

    def _test(self, where: Where) -> Test:
        self.at += 2
        words: list[Raw] = []
        while True:
            self.blanks()
            if self.at >= len(self.text):
                raise self.error("[[ does not close")
            if self.text.startswith("\n", self.at):
                self.newline()
                continue
            if self.next_word() == "]]":
                self.at += 2
                return Test(where, tuple(words))
            operator = next((one for one in ("&&", "||", "(", ")", "<", ">") if self.text.startswith(one, self.at)), "")
            if operator:
                words.append(Raw(operator, self.where()))
                self.at += len(operator)
                continue
            word = self.word()
            if word is None:
                raise self.error("this test is not read")
            words.append(word)
            if word.text == "=~":  # a pattern of its own grammar, up to ]]
                end = self.text.find("]]", self.at)
                if end < 0:
                    raise self.error("[[ does not close")
                words.append(Raw(self.text[self.at : end].strip(), self.where()))
                self.at = end

    def _function(self, where: Where, word: str) -> Function:
        if word == "function":
            self.at += len(word)
        name = self.word()
        if name is None:
            raise self.error("a function without a name")
        self.blanks()
        brackets = re.compile(r"\([ \t]*\)").match(self.text, self.at)
        self.at = brackets.end() if brackets else self.at
        self.newlines()
        return Function(where, name.text, self.command())

    def _if(self, where: Where) -> If:
        self.take_word("if")
        branches: list[tuple[Body, Body]] = []
        otherwise: Body = ()
        while True:
            test = self.body(("then",))
            self.take_word("then")
            branches.append((test, self.body(("elif", "else", "fi"))))
            word = self.take_word("elif", "else", "fi")
            if word == "else":
                otherwise = self.body(("fi",))
                word = self.take_word("fi")
            if word == "fi":
                return If(where, tuple(branches), otherwise)

    def _do(self) -> Body:
        self.newlines()
        self.take_word("do")
        body = self.body(("done",))
        self.take_word("done")
        return body

    def _for(self, where: Where) -> Node:
        self.take_word("for")
        self.blanks()
        if self.text.startswith("((", self.at):
            end = self.balanced(self.at, "(", ")")
            parts = self.text[self.at + 2 : end - 1].split(";")
            if end < 0 or len(parts) != 3:
                raise self.error("for (( is not read")
            self.at = end + 1
            return Count(where, parts[0], parts[1], parts[2], self._do())
        name = self.word()
        if name is None or not NAME.fullmatch(name.text):
            raise self.error("for without a name")
        self.newlines()
        words = [Raw('"$@"', where)]
        if self.next_word() == "in":
            self.at += 2
            words = []
            while (word := self.word()) is not None:
                words.append(word)
        return For(where, name.text, tuple(words), self._do())

    def _while(self, where: Where) -> While:
        until = self.take_word("while", "until") == "until"
        test = self.body(("do",))
        return While(where, test, self._do(), until)

    def _case(self, where: Where) -> Case:
        self.take_word("case")
        word = self.word()
        if word is None:
            raise self.error("case without a word")
        self.newlines()
        self.take_word("in")
        items: list[tuple[tuple[Raw, ...], Body]] = []
        while True:
            self.newlines()
            if self.next_word() == "esac":
                self.at += 4
                return Case(where, word, tuple(items))
            self.at += self.text.startswith("(", self.at)
            patterns = []
            while (pattern := self.word()) is not None:
                patterns.append(pattern)
                self.at += self.operator() == "|"
            if not patterns or self.operator() != ")":
                raise self.error("this case pattern is not read")
            self.at += 1
            body = self.body((";;", ";&", ";;&", "esac"))
            if self.operator() in (";&", ";;&"):
                raise self.error(f"{self.operator()} is not read")
            self.at += 2 * (self.operator() == ";;")
            items.append((tuple(patterns), body))

    # -- simple commands -------------------------------------------------------------------------------------------------------

    def assignment(self) -> Assign | None:
        self.blanks()
        found = ASSIGNMENT.match(self.text, self.at)
        if found is None:
            return None
        where, self.at = self.where(), found.end()
        append = found[3] == "+="
        if self.text.startswith("(", self.at):
            self.at += 1
            return Assign(found[1], found[2], append, self._array(), where)
        glued = self.at < len(self.text) and self.text[self.at] not in " \t\n;&|<>()#" and not self.text.startswith("\\\n", self.at)
        value = self.word() if glued else None
        return Assign(found[1], found[2], append, value or Raw("", where), where)

    def _array(self) -> tuple[Raw, ...]:
        opened = self.at
        words: list[Raw] = []
        while True:
            self.blanks()
            if self.text.startswith("\n", self.at):
                self.newline()
            elif self.text.startswith(")", self.at):
                self.at += 1
                return tuple(words)
            elif (word := self.word()) is not None:
                words.append(word)
            else:
                raise self.error(
                    "this list does not close" if self.at >= len(self.text) else "this is not a word of a list", min(self.at, opened)
                )

    def simple(self) -> Simple:
        where, start = self.where(), self.at
        if self.next_word() in OUT_OF_PLACE:
            raise self.error(f"{self.next_word()} is not read here")
        assigns: list[Assign] = []
        declares: list[Assign] = []
        words: list[Raw] = []
        while (assign := self.assignment()) is not None:
            assigns.append(assign)
        joined = 0
        while True:
            if self.redirection():
                continue
            if words and words[0].text in DECLARES and (assign := self.assignment()) is not None:
                declares.append(assign)
                continue
            word = self.word()
            if word is not None:
                words.append(word)
            elif words and self._continues(joined):
                joined += 1
                self.newline()
            else:
                break
        if self.at == start:
            raise self.error(f"{self.operator() or self.text[self.at : self.at + 1]!r} is not expected here")
        return Simple(where, tuple(assigns), tuple(words), tuple(declares), joined)

    def _continues(self, joined: int) -> bool:
        """A line that begins with a flag is no command: the backslash before it was lost when the script was pasted.

        Once one was lost, the command goes on to the next empty line.
        """
        if not self.lenient or self.heredocs or not self.text.startswith("\n", self.at):
            return False
        following = self.text[self.at + 1 :].split("\n", 1)[0].strip()
        return bool(following) if joined else bool(re.match(r"--?[A-Za-z]", following))


def parsed(text: str, file: Path, first_line: int = 1, may_be_pasted: bool = False) -> tuple[Reader, Body]:
    """A script's commands, and their reader.

    Lines that begin with a flag belong to the command before them only in what no shell was given as it is: one command line that was
    pasted without its backslashes, or a whole script that was pasted without its backslashes and the # of its first line.
    """
    reader = Reader(text, file, first_line)
    body = reader.script()
    if (
        may_be_pasted
        and not text.startswith("#!")
        and any(isinstance(one, Simple) and one.words and is_flag(one.words[0].text) for one in body)
    ):
        mended = Reader(text, file, first_line, lenient=True)
        whole = mended.script()
        if len(whole) == 1 or text.startswith("!/"):
            return mended, whole
    return reader, body
