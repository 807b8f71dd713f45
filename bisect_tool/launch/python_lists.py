"""Python launch scripts: lists of flags, read from the syntax tree.  Nothing is executed and nothing is imported.

Assignments of strings, numbers, lists and what joins them are followed; any other value is unknown, and refused only where a flag
that matters takes it.
"""

from __future__ import annotations

import ast
import operator as operators
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_hooks.errors import UsageError

from bisect_tool.launch.flags import shapes
from bisect_tool.launch.words import HINT, Undecided, Where, Word, refuse

LONGEST = 100_000
CALCULATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Sub: operators.sub, ast.FloorDiv: operators.floordiv, ast.Div: operators.truediv, ast.Mod: operators.mod,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operators.lt, ast.LtE: operators.le, ast.Gt: operators.gt, ast.GtE: operators.ge, ast.Eq: operators.eq, ast.NotEq: operators.ne,
}  # fmt: skip
CONVERSIONS: dict[str, Callable[[Any], Any]] = {"str": str, "int": int, "len": len, "float": float}


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that is not read, and why."""

    why: str
    name: str
    unset: bool = False


@dataclass
class Script:
    """A Python file's names, assignment by assignment."""

    file: Path
    given: Mapping[str, str]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    lines: list[str] = field(default_factory=list)
    lists: list[tuple[str, list[Word]]] = field(default_factory=list)

    def run(self, text: str) -> None:
        """Follows the file's top level, and functions that only return flags."""
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            raise UsageError(f"{self.file}:{line or 1}: not Python: {getattr(error, 'msg', error)}", hint=HINT) from None
        self.lines = text.splitlines()
        self.body(body)

    def body(self, body: list[ast.stmt]) -> None:
        for node in body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    self.keep(name, self.value(value), node)
                case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                    self.keep(name, self.added(self.names.get(name, Unknown(f"nothing sets {name}", name)), self.value(value)), node)
                case ast.Expr(
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="extend" | "append" as how), args=[argument])
                ):
                    more = self.value(argument)
                    self.keep(name, self.added(self.names.get(name), more if how == "extend" else [self.element(argument, more)]), node)
                case ast.Return(value=ast.expr() as value):
                    self.keep("return", self.value(value), node)
                case ast.FunctionDef(body=inner):
                    self.body(inner)
                case ast.If(test=test, body=yes, orelse=no) if isinstance(decided := self.value(test), (bool, int, str)):
                    self.body(yes if decided else no)
                case ast.If() | ast.For() | ast.While() | ast.With() | ast.Try():
                    self.forget(node)
                case _ if any(name == changed_in_place(node) for name, _ in self.lists):
                    raise refuse(
                        self.where(node), f"{changed_in_place(node)} is changed in place ({ast.unparse(node)[:60]}), which is not followed"
                    )

    def forget(self, node: ast.stmt) -> None:
        """What a block changes is unknown after it; its lists are not read."""
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                self.names[one.id] = Unknown(f"{one.id} is set in a block on line {node.lineno}, which is not followed", one.id)
            elif (
                isinstance(one, ast.Call)
                and isinstance(one.func, ast.Attribute)
                and isinstance(one.func.value, ast.Name)
                and one.func.attr in ("extend", "append", "insert")
            ):
                name = one.func.value.id
                self.names[name] = Unknown(f"{name} is changed in a block on line {node.lineno}, which is not followed", name)

    def keep(self, name: str, value: Any, node: ast.stmt) -> None:
        if name in self.given:
            value = self.given[name]
        self.names[name] = value
        words = self.words(value, node)
        if words and shapes(words):
            self.lists.append((name, words))

    def where(self, node: ast.AST) -> Where:
        line = getattr(node, "lineno", 1)
        return Where(self.file, line, self.lines[line - 1].strip() if line <= len(self.lines) else "")

    def words(self, value: Any, node: ast.AST) -> list[Word]:
        """A list of arguments, or a command line in one string, as words."""
        if isinstance(value, str) and "--" in value:
            try:
                return [Word(one, self.where(node)) for one in shlex.split(value)]
            except ValueError:
                return []
        return [self.word(one, node) for one in value] if isinstance(value, list) else []

    def word(self, value: Any, node: ast.AST) -> Word:
        if isinstance(value, Word):
            return value
        if isinstance(value, Unknown):
            return Word(f"${{{value.name}}}", self.where(node), value.why, unset=value.unset)
        return Word(str(value), self.where(node))

    # -- expressions -----------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or Unknown."""
        try:
            found = self._value(node)
        except Undecided as undecided:
            return Unknown(undecided.why, ast.unparse(node)[:40])
        except (TypeError, ValueError, IndexError, KeyError, ArithmeticError, AttributeError) as error:
            return Unknown(f"{ast.unparse(node)[:40]} can't be evaluated ({type(error).__name__})", ast.unparse(node)[:40])
        if isinstance(found, (str, list)) and len(found) > LONGEST:
            raise refuse(self.where(node), f"a value grows beyond {LONGEST}")
        return found

    def element(self, node: ast.expr, value: Any) -> Any:
        """An element of a list: a word that knows its line."""
        return self.word(value, node) if isinstance(value, (str, Unknown)) else value

    def added(self, left: Any, right: Any) -> Any:
        if isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(left, list) and isinstance(right, Unknown):
            return [*left, right]
        if isinstance(left, Unknown) and isinstance(right, list):
            return [left, *right]
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return left if isinstance(left, Unknown) else right
        return left + right

    def _known(self, node: ast.expr) -> Any:
        found = self.value(node)
        if isinstance(found, Unknown):
            raise Undecided(found.why)
        return found

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return (
                    self.names[name]
                    if name in self.names
                    else self.given.get(name, Unknown(f"nothing in the script sets {name}", name, True))
                )
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                found: list[Any] = []
                for one in elements:
                    if isinstance(one, ast.Starred):
                        found = self.added(found, self.value(one.value))
                    else:
                        found.append(self.element(one, self.value(one)))
                return found
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.added(self.value(left), self.value(right))
            case ast.BinOp(left=left, op=operator, right=right):
                return self._calculated(self._known(left), operator, self._known(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._known(operand)
            case ast.JoinedStr(values=values):
                return "".join(str(self._plain(one)) for one in values)
            case ast.FormattedValue(value=value, format_spec=None):
                return self._plain(value)
            case ast.IfExp(test=test, body=yes, orelse=no):
                return self.value(yes if self._known(test) else no)
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                return self._compared(self._known(left), operator, self._known(right))
            case ast.ListComp(elt=element, generators=[one]) | ast.GeneratorExp(elt=element, generators=[one]):
                return self._comprehended(element, one)
            case ast.Call():
                return self._called(node)
            case ast.Subscript(value=value, slice=index):
                return self._known(value)[self._known(index)]
        raise Undecided(f"{ast.unparse(node)[:40]} is not read")

    def _plain(self, node: ast.expr) -> Any:
        found = self._known(node)
        return found.text if isinstance(found, Word) else found

    def _calculated(self, left: Any, operator: ast.operator, right: Any) -> Any:
        if isinstance(operator, ast.Mult):
            size = len(left) * right if isinstance(left, (list, str)) else len(right) * left if isinstance(right, (list, str)) else 0
            if size > LONGEST:
                raise Undecided("it grows beyond what is read")
            return left * right
        if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
            raise Undecided("only numbers are calculated with")
        calculate = CALCULATIONS.get(type(operator))
        if calculate is None:
            raise Undecided("this calculation is not read")
        return calculate(left, right)

    def _compared(self, left: Any, operator: ast.cmpop, right: Any) -> bool:
        compare = COMPARISONS.get(type(operator))
        if compare is None:
            raise Undecided("this comparison is not read")
        return bool(compare(left, right))

    def _comprehended(self, element: ast.expr, one: ast.comprehension) -> list[Any]:
        if not isinstance(one.target, ast.Name):
            raise Undecided("this comprehension is not read")
        name, outside, found = one.target.id, self.names.get(one.target.id), []
        for value in self._known(one.iter):
            self.names[name] = value
            if all(self._known(test) for test in one.ifs):
                found.append(self._known(element))
        if outside is None:
            self.names.pop(name, None)
        else:
            self.names[name] = outside
        return found

    def _called(self, node: ast.Call) -> Any:
        match node:
            case ast.Call(func=ast.Name(id="range"), args=arguments):
                numbers = [self._known(one) for one in arguments]
                if len(range(*numbers)) > LONGEST:
                    raise Undecided("the range is longer than what is read")
                return list(range(*numbers))
            case ast.Call(func=ast.Name(id="str" | "int" | "len" | "float" as name), args=[argument]):
                value = self._plain(argument)
                return CONVERSIONS[name](value)
            case ast.Call(func=ast.Attribute(value=value, attr="join"), args=[argument]):
                return str(self._known(value)).join(one.text if isinstance(one, Word) else one for one in self._known(argument))
            case ast.Call(func=ast.Attribute(value=value, attr="split"), args=[]):
                return [self.element(node, one) for one in str(self._known(value)).split()]
            case ast.Call(func=ast.Attribute(value=value, attr="strip" | "lower" | "upper" as name), args=[]):
                return getattr(str(self._known(value)), name)()
            case (
                ast.Call(func=ast.Attribute(attr="getenv"), args=[ast.Constant(value=str() as name), *rest])
                | ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get"), args=[ast.Constant(value=str() as name), *rest]
                )
            ):
                if name in self.given:
                    return self.given[name]
                return self.value(rest[0]) if rest else Unknown(f"nothing in the script sets {name}", name, True)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="shlex"), attr="split"), args=[argument]):
                return [self.element(node, one) for one in shlex.split(str(self._known(argument)))]
        raise Undecided(f"{ast.unparse(node.func)[:40]}() is not called")


def changed_in_place(node: ast.stmt) -> str | None:
    """The name whose list a statement changes otherwise than by adding to its end."""
    match node:
        case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name))]) | ast.AugAssign(target=ast.Subscript(value=ast.Name(id=name))):
            return name
        case ast.AugAssign(target=ast.Name(id=name)) | ast.Delete(targets=[ast.Subscript(value=ast.Name(id=name))]):
            return name
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name  # remove, pop, insert, sort: whatever it is, it is not read
    return None
