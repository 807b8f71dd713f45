"""Follows a bash script without running anything: variables, lists, loops, conditions, sourced files, and the commands it comes to.

Where a condition can't be known both ways are followed, and what they make different is unknown from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from bisect_hooks.errors import UsageError

from bisect_tool.launch import hydra, shell_builtins
from bisect_tool.launch.flags import is_flag
from bisect_tool.launch.shell_assign import adopt, assigned, declare, environment, exported, function, lent, marked, said
from bisect_tool.launch.shell_numbers import calculated
from bisect_tool.launch.shell_syntax import DECLARES, parsed
from bisect_tool.launch.shell_tests import Condition
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
from bisect_tool.launch.shell_words import Value, expand, matches, single
from bisect_tool.launch.words import Leave, Undecided, Where, Word, refuse, script_text

MOST_STEPS = 100_000
DEEPEST = 20


@dataclass(frozen=True, slots=True)
class Command:
    """An external command that the script comes to."""

    words: tuple[Word, ...]
    where: Where


@dataclass
class Shell:
    """A script's state.  `run` reads a file; afterwards `commands` and `variables` hold what it came to."""

    script: Path
    variables: dict[str, Value] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    functions: dict[str, Node] = field(default_factory=dict)
    arguments: list[Word] = field(default_factory=list)
    directory: str | None = None
    missing: list[str] = field(default_factory=list)
    output: list[str] | None = None
    files: list[Path] = field(default_factory=list)
    documents: list[Raw] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    targets: list[Raw] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    marks: dict[str, str] = field(default_factory=dict)
    locals: list[dict[str, tuple[Value | None, str]]] = field(default_factory=list)
    substituted: bool | None = True
    exports_all: bool = False
    asked: str = ""
    lost: list[tuple[Where, str]] = field(default_factory=list)
    steps: int = 0
    depth: int = 0

    def __post_init__(self) -> None:
        for name in self.given:
            self.variables.setdefault(name, said(self.given, name))

    def run(self) -> None:
        """Reads the script to its end.  Raises UsageError naming the line that it can't follow."""
        try:
            self.read(script_text(self.script), self.script)
        except Leave:
            pass

    def read(self, text: str, file: Path, first_line: int = 1) -> bool | None:
        """Follows a script's text in this state."""
        reader, body = parsed(text, file, first_line, not self.files)
        self.documents += reader.documents
        self.targets += reader.targets
        self.texts.append(text)
        self.files.append(file)
        with self.deeper(Where(file, first_line)):
            status = self.all(body)
        self.files.pop()
        return status

    # -- what words ask for (Scope) --------------------------------------------------------------------------------------------

    def get(self, name: str) -> Value | None:
        if name == "BASH_SOURCE":
            return [Word(str(one.absolute()), Where(one, 1)) for one in reversed(self.files)]
        if name == "0":
            return Word(str(self.script.absolute()), Where(self.script, 1))
        if name == "PWD" and self.directory is not None:
            return Word(self.directory, Where(self.script, 1))
        return self.variables.get(self._meant(name))

    def put(self, name: str, value: Value) -> None:
        name = self._meant(name)
        if "r" not in self.marks.get(name, ""):
            self.variables[name] = environment(self.given, name, value)

    def _meant(self, name: str) -> str:
        """The name itself, or what it is declared to stand for (`declare -n`)."""
        marks = self.marks.get(name, "")
        return marks[1:] if marks.startswith("n") else name

    def positional(self) -> list[Word]:
        return self.arguments

    def why_unset(self, name: str) -> str:
        if self.missing:
            return f"{name} is not set, and {self.missing[0]}, which is not there"
        return f"{self.passed[0]}, which is not read: it may set {name}" if self.passed else f"nothing in the script sets {name}"

    def calculate(self, text: str) -> int:
        return calculated(self, text)

    def substitute(self, text: str, where: Where) -> str:
        """What `$(text)` prints, for the few commands that only print.  Raises Undecided: nothing is run."""
        inner = self.copy()
        inner.output = []
        try:
            self.substituted = inner.read(text, where.file, where.line)
        except UsageError as error:
            raise Undecided(f"$({text.split(chr(10))[0][:60]}) is not read: {error.message}") from None
        except Leave:
            pass
        self.steps = inner.steps
        return "".join(inner.output).rstrip("\n")

    # -- states ----------------------------------------------------------------------------------------------------------------

    def copy(self) -> Shell:
        return replace(
            self,
            variables=dict(self.variables),
            marks=dict(self.marks),
            locals=[dict(one) for one in self.locals],
            functions=dict(self.functions),
            missing=list(self.missing),
            files=list(self.files),
        )

    def branches(self, bodies: list[Body], where: Where, why: str) -> None:
        """Follows every body from here; those that leave the script are no way on."""
        if self.output is not None:
            raise Undecided(f"it depends on {why}")
        ends, left = [], Leave("exit")
        for body in bodies:
            one = self.copy()
            try:
                one.all(body)
                ends.append(one)
            except Leave as leave:
                left = leave
            self.steps = max(self.steps, one.steps)
        if not ends:
            raise left
        adopt(self, ends, where, why)

    def apart(self, body: Body) -> bool | None:
        """Follows commands whose changes nobody sees: a subshell, the parts of a pipeline."""
        inner = self.copy()
        try:
            return inner.all(body)
        except Leave:
            return None
        finally:
            self.steps = inner.steps

    @contextmanager
    def deeper(self, where: Where) -> Iterator[None]:
        self.depth += 1
        if self.depth > DEEPEST:
            raise refuse(where, "sourced files, functions or substitutions call each other without end")
        yield
        self.depth -= 1

    def step(self, where: Where) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise refuse(where, f"the script goes on after {MOST_STEPS} steps")

    # -- commands ----------------------------------------------------------------------------------------------------------------

    def all(self, body: Body) -> bool | None:
        """Follows commands one after the other; the status of the last: True, False or None (not known)."""
        status: bool | None = True
        for node in body:
            status = self.follow(node)
        return status

    def follow(self, node: Node) -> bool | None:
        self.step(node.where)
        match node:
            case Simple():
                return self.simple(node)
            case Chain():
                return self.chain(node)
            case Arith():
                return self.decided(lambda: self.calculate(node.text) != 0)
            case Test():
                return self.decided(lambda: Condition([self._operand(raw) for raw in node.words], True).value())
            case Pipe():
                return self.pipe(node)
            case Group():
                if not node.subshell:
                    return self.all(node.body)
                return self.apart(node.body)
            case If():
                return self.choose(node)
            case For() | Count() | While():
                return self.loop(node)
            case Case():
                return self.case(node)
            case Function():
                self.functions[node.name] = node.body
        return True

    def decided(self, value: Callable[[], bool]) -> bool | None:
        """A condition: True, False, or None where only a running shell would know."""
        try:
            return value()
        except Undecided as undecided:
            self.asked = undecided.why.removeprefix("nothing in the script sets ")
            return None

    def _operand(self, raw: Raw) -> Word:
        return Word(raw.text, raw.where) if raw.text in ("&&", "||", "(", ")", "<", ">", "!") else single(raw, self)

    def chain(self, node: Chain) -> bool | None:
        status = self.follow(node.first)
        for operator, following in node.rest:
            if status is None:
                self.branches([(), (following,)], node.where, f"the command on line {node.where.line}")
            elif status == (operator == "&&"):
                status = self.follow(following)
        return status

    def pipe(self, node: Pipe) -> bool | None:
        if len(node.commands) > 1:
            if self.output is not None:
                raise Undecided("a pipeline is not run")
            for one in node.commands:
                self.apart((one,))
            return None
        status = self.follow(node.commands[0])
        return status if status is None else status != node.negated

    def choose(self, node: If) -> bool | None:
        """`if`: the branch taken; every branch that may be taken where that can't be known."""
        possible: list[Body] = []
        self.asked = ""
        for test, body in node.branches:
            status = self.all(test)
            if status is True and not possible:
                return self.all(body)
            if status is not False:
                possible.append(body)
            if status is True:
                break
        else:
            if not possible:
                return self.all(node.otherwise)
            possible.append(node.otherwise)
        said = f" (--set {self.asked}=...)" if self.asked.isidentifier() else ""
        self.branches(possible, node.where, f"a condition on line {node.where.line} that only a running shell knows{said}")
        return None

    def case(self, node: Case) -> bool | None:
        word = single(node.word, self)
        patterns = [[single(pattern, self) for pattern in items] for items, _ in node.items]
        if word.unknown or any(one.unknown for items in patterns for one in items):
            why = f"the case on line {node.where.line} ({word.unknown or 'its patterns'})"
            self.branches([*(body for _, body in node.items), ()], node.where, why)
            return None
        for items, (_, body) in zip(patterns, node.items, strict=True):
            if any(matches(word.text, one.text) if one.bare else word.text == one.text for one in items):
                return self.all(body)
        return True

    def loop(self, node: For | Count | While) -> bool | None:
        why = f"the loop on line {node.where.line}"
        for status in self._rounds(node):
            if status is None:
                self.branches([(), node.body], node.where, why)
                return None
            try:
                self.all(node.body)
            except Leave as leave:
                if leave.kind in ("break", "continue") and leave.loops > 1:
                    raise Leave(leave.kind, leave.loops - 1) from None
                if leave.kind == "break":
                    break
                if leave.kind != "continue":
                    raise
            if isinstance(node, Count):
                self.decided(lambda: self.calculate(node.step) != 0)
        return True

    def _rounds(self, node: For | Count | While) -> Iterator[bool | None]:
        """True for every round of a loop; None where it can't be known if there is one."""
        if isinstance(node, For):
            words = [word for raw in node.words for word in expand(raw, self)]
            for word in words:
                self.step(node.where)
                self.put(node.name, word)
                yield None if word.unknown else True
                if word.unknown:
                    return
            return
        if isinstance(node, Count):
            self.decided(lambda: self.calculate(node.start) != 0)
        while True:
            self.step(node.where)
            test = self.decided(lambda: self.calculate(node.test or "1") != 0) if isinstance(node, Count) else self.all(node.test)
            if test is not None and isinstance(node, While) and node.until:
                test = not test
            if test is False:
                return
            yield test

    # -- simple commands -----------------------------------------------------------------------------------------------------------

    def assign(self, node: Assign) -> None:
        marks = self.marks.get(self._meant(node.name), "")
        self.put(node.name, marked(node.name, assigned(node, self.get(node.name), self), marks, node))

    def simple(self, node: Simple) -> bool | None:
        if not node.words:
            self.substituted = True
            for one in node.assigns:
                self.assign(one)
            return self.substituted
        words = [word for raw in node.words for word in expand(raw, self)]
        if node.joined:
            self.notes[
                f"lines {node.where.line} to {node.where.line + node.joined}: the backslashes at the line ends are missing; read as one command"
            ] = None
        if not words:
            return True
        name = words[0].text
        if is_flag(name) or hydra.is_override(name):
            kind = "a flag" if is_flag(name) else "an override"
            why = f"line {node.where.line} begins with {kind} and is no command: the backslash before it is missing"
            self.lost.append((node.where, why))
            return False
        if name in DECLARES:
            declare(self, name, words[1:], node.declares)
            return True
        if name in self.functions and not words[0].unknown:
            with lent(self, node.assigns):
                return self.call(name, words, node.where)
        builtin = shell_builtins.BUILTINS.get(name)
        if builtin is not None:
            try:
                with lent(self, node.assigns):
                    return builtin(self, words[1:], node.where)
            except Undecided:
                if self.output is not None:
                    raise
                return None
        if self.output is not None:
            raise Undecided(f"{name} is not run")
        script = shell_builtins.inner_script(words)
        if script is not None:  # bash -c "...": another shell follows the same text, and its variables stay there
            with suppress(Leave):
                exported(self.copy(), node.assigns).read(script, node.where.file, node.where.line)
            return None
        self.commands.append(Command(tuple(words), node.where))
        if name == "exec" and len(words) > 1:  # it takes the script's place
            raise Leave("exit")
        return None

    def call(self, name: str, words: list[Word], where: Where) -> bool | None:
        outside, self.arguments = self.arguments, words[1:]
        with self.deeper(where), function(self):
            try:
                return self.follow(self.functions[name])
            except Leave as leave:
                if leave.kind != "return":
                    raise
                return None
            finally:
                self.arguments = outside
