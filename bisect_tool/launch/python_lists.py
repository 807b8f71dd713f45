"""Python launch scripts: lists of flags and the commands made of them, read from the syntax tree.  Nothing is executed or imported.

Assignments, additions to the end of a list, and calls of the script's own functions are followed.  Any other statement that names a
list otherwise than to read it makes it unknown from there on (python_uses.py says what only reads).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bisect_hooks.errors import UsageError

from bisect_tool.launch.flags import shapes
from bisect_tool.launch.python_uses import ANYTHING, MODULES, parameters, reads_only, root, starts, used
from bisect_tool.launch.python_values import Held, Unknown, Values, says_flag
from bisect_tool.launch.words import HINT, Undecided, Where, Word, refuse

DEEPEST = 20
MOST_STEPS = 20_000
# calls that say flags to something else than a command
NO_COMMANDS = {"append", "extend", "insert", "remove", "index", "count", "add_argument", "add_option", "option"}


@dataclass(frozen=True, slots=True)
class Own:
    """A function of the script, and the names where it is defined."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    scope: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Called:
    """A call to the outside that is given flags.  starts: it is known to run a command.  model: a model script it is told to take"""

    words: Sequence[Word]
    where: Where
    starts: bool
    model: Any = None


@dataclass
class Script(Values):
    """A Python file, followed statement by statement."""

    lists: list[tuple[str, list[Word]]] = field(default_factory=list)
    commands: list[Called] = field(default_factory=list)
    behind: dict[str, Held] = field(default_factory=dict)
    own: list[Own] = field(default_factory=list)
    followed: set[ast.Call] = field(default_factory=set)
    losing: set[ast.AST] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    seen: set[ast.AST] = field(default_factory=set)
    aside: bool = False
    returned: Any = None
    function: str = ""
    steps: int = 0
    depth: int = 0

    def run(self, text: str) -> None:
        """Follows the file's top level; functions where they are called, and at the end those that nothing in the script calls."""
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            raise UsageError(f"{self.file}:{line or 1}: not Python: {getattr(error, 'msg', error)}", hint=HINT) from None
        self.lines = text.splitlines()
        self.body(body)
        for one in self.own:  # which grows meanwhile
            if one.node not in self.seen:
                reason = f"a parameter of {one.node.name}, which nothing in the script calls"
                self.inside(one, {name: Unknown(f"{name} is {reason}", name) for name in parameters(one.node)})

    def body(self, body: list[ast.stmt]) -> bool:
        """Follows statements; whether they leave the function."""
        return any(self.statement(node) for node in body)

    def statement(self, node: ast.stmt) -> bool:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise refuse(self.where(node), f"the script goes on after {MOST_STEPS} steps")
        match node:
            case ast.Assign(targets=targets, value=value) if all(isinstance(one, ast.Name) for one in targets):
                found = self.taken(value)
                for one in targets:
                    assert isinstance(one, ast.Name)
                    self.keep(one.id, found, node)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.keep(name, self.taken(value), node)
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                self.grow(name, self.taken(value), node)
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append" | "extend" as how), args=[argument])
            ) if isinstance(self.names.get(name), (Held, Unknown)):
                more = self.taken(argument)
                self.grow(name, more if how == "extend" else Held([self.element(argument, more)]), node)
            case ast.Expr(value=value):
                self.taken(value)
                return isinstance(value, ast.Call) and ast.unparse(value.func) in ("exit", "quit", "sys.exit", "os._exit")
            case ast.Return(value=value):
                found = None if value is None else self.taken(value)
                if not isinstance(self.returned, Unknown):
                    self.returned = found
                self.listed(f"{self.function}()", found, node)
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.names[node.name] = Own(node, self.names)
                self.own.append(self.names[node.name])
                if node.decorator_list:  # which may call it at once
                    self.lost(ast.Name(id=node.name, ctx=ast.Load()), node)
            case ast.If(test=test, body=yes, orelse=no) if (decided := self.decided(test)) is not None:
                return self.body(yes if decided else no)
            case ast.With(items=items, body=body):
                for item in items:
                    self.taken(item.context_expr)
                    if item.optional_vars is not None:
                        self.lose(item.optional_vars)
                return self.body(body)
            case ast.Import(names=names):
                for alias in names:
                    if alias.asname or alias.name.partition(".")[0] not in MODULES:
                        self.lose(node)
            case ast.ImportFrom(names=[ast.alias(name="*")], module=module):
                self.star = f"it may come from {module or '.'} (line {node.lineno}), which is not read"
                for name in self.names:
                    self.lost(ast.Name(id=name, ctx=ast.Store()), node)
            case ast.Raise():
                return True
            case ast.Pass() | ast.AnnAssign(value=None):
                pass
            case ast.Global(names=names) if self.function:
                self.shared |= set(names)
            case _:
                self.lose(node)
        return False

    # -- what is known -----------------------------------------------------------------------------------------------------------

    def keep(self, name: str, value: Any, node: ast.stmt) -> None:
        if isinstance(value, Unknown):
            value = self.given.get(name, value)
        self.names[name] = value
        self.listed(name, value, node)

    def listed(self, name: str, value: Any, node: ast.stmt) -> None:
        """Remembers a list that has flags, or may have."""
        words = self.words(value, node)
        name = f"{name} in {self.function}()" if self.function and not name.endswith(")") else name
        if shapes(words) or (isinstance(value, Unknown) and value.flags) or any(one == name for one, _ in self.lists):
            self.lists.append((name, words))
            if isinstance(value, Held):
                self.behind[name] = value

    def grow(self, name: str, more: Any, node: ast.stmt) -> None:
        """`name += more`: a list is changed in place, under all its names."""
        held = self.names.get(name, Unknown(f"nothing sets {name}", name))
        if isinstance(held, Held) and held.lost:
            return
        try:
            made = self.added(held, more)
        except (TypeError, Undecided):
            made = Unknown(
                f"{ast.unparse(node)[:60]} on line {node.lineno} is not read", name, flags=self.flagged(held) or self.flagged(more)
            )
        if isinstance(held, Held) and isinstance(made, Held) and not held.fixed:
            held[:] = made
            made = held
        self.keep(name, made, node)

    def taken(self, node: ast.expr) -> Any:
        """The value of an expression; what it changes or gives away beside that is lost."""
        outer, self.followed = self.followed, set()
        try:
            found = self.value(node)
            names = list(used(node, self.names, self.followed, read=isinstance(found, Held)))
        finally:
            self.followed = outer
        for one in names:
            self.lost(one, node)
        return found

    def decided(self, test: ast.expr) -> bool | None:
        """A condition: True, False, or None where only a running Python would know."""
        try:
            return bool(self.plain(self.taken(test)))
        except Undecided:
            return None

    def held(self, name: str) -> Held:
        """The list of a name; an empty one where it is none."""
        found = self.names.get(name)
        return found if isinstance(found, Held) else Held()

    def lose(self, node: ast.AST) -> None:
        """A statement that is not followed: nothing that it may change is known after it."""
        names = list(used(node, self.names))
        # the elements of a list of lists have no names of their own
        mentioned = [ast.Name(id=one.id, ctx=ast.Load()) for one in ast.walk(node) if isinstance(one, ast.Name)]
        names += [one for one in mentioned if any(isinstance(inner, Held) for inner in self.held(one.id))]
        for one in names:
            self.lost(one, node)
        if any(isinstance(one, ast.Return) and one.value is not None for one in ast.walk(node)):
            self.returned = Unknown(f"what {self.function} returns depends on line {getattr(node, 'lineno', 1)}", self.function, flags=True)
        if _flags_of_its_own(node):
            why = f"the block on line {getattr(node, 'lineno', 1)} has flags, and is not followed"
            self.lists.append((f"line {getattr(node, 'lineno', 1)}", [Word("${...[@]}", self.where(node), why)]))
        self.set_aside(node)

    def set_aside(self, node: ast.AST) -> None:
        """The calls that a block may come to, with what is known after it."""
        outer, self.aside = self.aside, True
        for one in ast.walk(node):
            if isinstance(one, ast.Call):
                self.value(one)
        self.aside = outer

    def lost(self, name: ast.Name, node: ast.AST) -> None:
        """One name that is set, changed or given away where it is not followed."""
        held, line = self.names.get(name.id), getattr(name, "lineno", getattr(node, "lineno", 1))
        said = f"line {line} ({self.where(name if hasattr(name, 'lineno') else node).text[:60]})"
        if isinstance(name.ctx, ast.Load):
            if isinstance(held, Held) and not held.fixed:
                held.lose(f"{name.id} is changed or given away on {said}, which is not followed", self.where(name))
            elif isinstance(held, Own) and held.node not in self.losing:
                self.losing.add(held.node)
                outer, self.names = self.names, held.scope
                for one in used(held.node, self.names):
                    if one.id != held.node.name:
                        self.lost(one, node)
                self.names = outer
                self.losing.discard(held.node)
            elif name.id in ANYTHING and name.id not in self.names:
                for other in self.names.values():
                    if isinstance(other, Held):
                        other.lose(f"{name.id}() is called on {said}, and may change anything", self.where(node))
            return
        flags = self.flagged(held) or self.may_flag(node)
        why = f"{name.id} is set on {said}, which is not followed"
        self.names[name.id] = self.given.get(name.id, Unknown(why, name.id, flags=flags))
        if flags and name.id not in self.given:
            self.lists.append((name.id, self.words(self.names[name.id], node)))

    # -- calls -------------------------------------------------------------------------------------------------------------------

    def called(self, node: ast.Call) -> Any:
        """A call: the script's own function is followed; any other is remembered if it is given flags.  Raises Undecided."""
        own = self.names.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if isinstance(own, Own) and not self.aside:
            return self.followed_into(own, node)
        if isinstance(node.func, ast.Attribute):
            self.value(node.func.value)
        words, given = [], [*node.args, *(one.value for one in node.keywords)]
        values = [self.value(one.value if isinstance(one, ast.Starred) else one) for one in given]
        for one, value in zip(given, values, strict=True):
            words += self.words(value, one)
        started = starts(node.func, self.names)
        plain = reads_only(node.func, self.names) or (isinstance(node.func, ast.Attribute) and node.func.attr in NO_COMMANDS)
        if (started or not plain) and (shapes(words) or any(self.flagged(value) for value in values)):
            model = next((self.value(one.value) for one in node.keywords if one.arg == "megatron_model_type"), None)
            self.commands.append(Called(words, self.where(node), started or model is not None or _program(words), model))
        elif started and root(node.func) == "subprocess" and isinstance(values[0] if values else None, Unknown):
            self.commands.append(Called([], self.where(node), False))
        if started or _named(node.func) in ("print", "index", "count"):
            return Unknown("it is what a command says", ast.unparse(node)[:40], flags=None)
        raise Undecided(f"{ast.unparse(node.func)[:40]}() is not called")

    def followed_into(self, own: Own, node: ast.Call) -> Any:
        args, plain = own.node.args, not own.node.decorator_list and isinstance(own.node, ast.FunctionDef)
        positional = [one.arg for one in (*args.posonlyargs, *args.args)]
        odd = (
            args.vararg or args.kwarg or any(isinstance(one, ast.Starred) for one in node.args) or any(not one.arg for one in node.keywords)
        )
        if not plain or odd or len(node.args) > len(positional) or self.depth > DEEPEST or _yields(own.node):
            raise Undecided(f"{own.node.name}() is not followed")
        bound = {name: self.value(one) for name, one in zip(positional, node.args, strict=False)}
        bound |= {str(one.arg): self.value(one.value) for one in node.keywords}
        defaults = dict(zip(reversed(positional), reversed(args.defaults), strict=False))
        defaults |= {one.arg: value for one, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is not None}
        bound |= {name: self.value(value) for name, value in defaults.items() if name not in bound}
        if set(bound) != parameters(own.node):
            raise Undecided(f"{own.node.name}() is called with other arguments than it has")
        self.followed.add(node)
        return self.inside(own, bound)

    def inside(self, own: Own, bound: dict[str, Any]) -> Any:
        """A function's body, with its parameters; what it returns."""
        outer = self.names, self.returned, self.function, self.shared
        self.names, self.returned, self.function, self.shared = (
            own.scope | {k: self.given.get(k, v) if isinstance(v, Unknown) else v for k, v in bound.items()},
            None,
            own.node.name,
            set(),
        )
        self.seen.add(own.node)
        self.depth += 1
        try:
            self.body(own.node.body)
            for name in self.shared:
                own.scope[name] = self.names.get(name)
            return self.returned
        finally:
            self.depth -= 1
            self.names, self.returned, self.function, self.shared = outer


def _named(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _flags_of_its_own(node: ast.AST) -> bool:
    """Whether a block says flags in something else than a call, or an error."""
    if isinstance(node, (ast.Call, ast.Raise, ast.Assert)):
        return False
    return says_flag(node) or any(_flags_of_its_own(one) for one in ast.iter_child_nodes(node))


def _program(words: Sequence[Word]) -> bool:
    return any(word.text.endswith(".py") or word.text == "-m" for word in words)


def _yields(node: ast.AST) -> bool:
    return any(isinstance(one, (ast.Yield, ast.YieldFrom, ast.Await)) for one in ast.walk(node))
