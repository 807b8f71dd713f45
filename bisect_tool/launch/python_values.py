"""Values of Python expressions, read from the syntax tree: strings, numbers, lists and what joins them.  Any other value is unknown."""

from __future__ import annotations

import ast
import operator as operators
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from bisect_tool.launch.flags import FLAGS, says_flags, shapes
from bisect_tool.launch.words import Undecided, Where, Word, refuse

LONGEST = 100_000
CALCULATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Sub: operators.sub, ast.FloorDiv: operators.floordiv, ast.Div: operators.truediv, ast.Mod: operators.mod,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operators.lt, ast.LtE: operators.le, ast.Gt: operators.gt, ast.GtE: operators.ge, ast.Eq: operators.eq, ast.NotEq: operators.ne,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
CONVERSIONS: dict[str, Callable[[Any], Any]] = {"str": str, "int": int, "len": len, "float": float}
# of these both sides of a choice may run or not: nothing in them is looked at for calls
PERHAPS = (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp, ast.IfExp, ast.BoolOp, ast.NamedExpr)


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that is not read, and why.  flags: it may hold Megatron's; None where it surely holds none"""

    why: str
    name: str
    unset: bool = False
    flags: bool | None = False


class Held(list[Any]):
    """A list of the script.  All its names share it: what one of them changes, or loses, the others do too.

    lost   why it is not known any more, "" while it is; at: where that was
    fixed  a tuple, which nothing changes
    """

    lost = ""
    at: Where | None = None
    fixed = False

    def lose(self, why: str, at: Where) -> None:
        if not self.lost:
            self.lost, self.at = why, at
        for one in self:
            if isinstance(one, Held) and not one.lost:
                one.lose(why, at)


@dataclass
class Values:
    """A Python file's names, and the values of expressions of them."""

    file: Path
    given: Mapping[str, str]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    lines: list[str] = field(default_factory=list)
    holes: dict[str, Word] = field(default_factory=dict)
    star: str = ""

    def called(self, node: ast.Call) -> Any:
        """A call of what is not Python's own.  Raises Undecided."""
        raise Undecided(f"{ast.unparse(node.func)[:40]}() is not called")

    def where(self, node: ast.AST) -> Where:
        line = getattr(node, "lineno", 1)
        return Where(self.file, line, self.lines[line - 1].strip() if line <= len(self.lines) else "")

    # -- words -----------------------------------------------------------------------------------------------------------------

    def words(self, value: Any, node: ast.AST) -> list[Word]:
        """A list of arguments, or a command line in one string, as words."""
        if isinstance(value, Unknown):
            return [self.word(value if value.unset else replace(value, name=f"{value.name}[@]"), node)] if value.flags else []
        if isinstance(value, str):
            return self._split(value, self.where(node)) if "--" in value else []
        words = [self.word(one, node) for one in value] if isinstance(value, list) else []
        return [
            part
            for word in words
            for part in (self._split(word.text, word.where) if not word.unknown and says_flags(word.text) else [word])
        ]

    def _split(self, text: str, where: Where) -> list[Word]:
        """A text as a shell splits it; its variables are the shell's."""
        try:
            texts = shlex.split(text)
        except ValueError:
            return [Word("${...[@]}", where, "its quotes do not close")]
        return [self._shells(one, where) if "$" in one else Word(one, where) for one in texts]

    def _shells(self, text: str, where: Where) -> Word:
        """A word with a variable in it: one that Python would have put there (a hole), or the shell's."""
        (shown, name), *_ = [*re.findall(r"(\$\{?([^}$\s]*)\}?)", text)]
        if shown in self.holes:
            return replace(self.holes[shown], text=text, where=where)
        unset = name.isidentifier()
        return Word(text, where, f"nothing in the script sets {name}" if unset else f"{shown} is left to a shell", unset=unset)

    def hole(self, word: Word) -> str:
        """An unknown word as a part of a text."""
        if word.unknown:
            self.holes[word.text] = word
        return word.text

    def word(self, value: Any, node: ast.AST) -> Word:
        if isinstance(value, Word):
            return value
        if isinstance(value, Held):
            value = Unknown("it is a list in a list", "...[@]")
        if isinstance(value, Unknown):
            name = re.sub(r"[\s'\"\\{}$]", "", value.name)
            return Word(f"${{{name}}}", self.where(node), value.why, unset=value.unset)
        return Word(str(value), self.where(node))

    def flagged(self, value: Any) -> bool:
        """Whether a value has flags of Megatron's in it, or may have."""
        if isinstance(value, Unknown):
            return bool(value.flags)
        if isinstance(value, Held) and value.lost:
            return True
        return isinstance(value, (Held, str)) and (
            shapes(words := self.words(value, ast.Pass())) > 0 or any(word.text.endswith("[@]}") for word in words)
        )

    def may_flag(self, node: ast.AST) -> bool:
        """Whether an expression says a flag, or a name that may hold some."""
        return any(
            self.flagged(self.names.get(one.id)) if isinstance(one, ast.Name) else says_flag(one)
            for one in ast.walk(node)
            if isinstance(one, (ast.Name, ast.Constant))
        )

    # -- expressions -----------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or Unknown."""
        try:
            found = self._value(node)
        except Undecided as undecided:
            found = Unknown(undecided.why, ast.unparse(node)[:40])
        except (TypeError, ValueError, IndexError, KeyError, ArithmeticError, AttributeError) as error:
            found = Unknown(f"{ast.unparse(node)[:40]} can't be evaluated ({type(error).__name__})", ast.unparse(node)[:40])
        if isinstance(found, (str, list)) and len(found) > LONGEST:
            raise refuse(self.where(node), f"a value grows beyond {LONGEST}")
        if isinstance(found, Held) and found.lost:
            found = Unknown(found.lost, ast.unparse(node)[:40], flags=True)
        if isinstance(found, Unknown) and found.flags is False and self.may_flag(node):
            found = replace(found, flags=True)
        return found

    def element(self, node: ast.expr, value: Any) -> Any:
        """An element of a list: a word that knows its line."""
        return self.word(value, node) if isinstance(value, (str, Unknown)) else value

    def added(self, left: Any, right: Any) -> Any:
        """`left + right`, and what `left` becomes when it is extended."""
        if isinstance(left, list) and isinstance(right, list):
            made = Held(left + right)
            made.fixed = getattr(left, "fixed", False)
            return made
        if isinstance(left, list) and isinstance(right, Unknown):
            return Held([*left, right if right.unset else replace(right, name=f"{right.name}[@]")])
        if isinstance(left, Unknown) and isinstance(right, list):
            return Held([left if left.unset else replace(left, name=f"{left.name}[@]"), *right])
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return left if isinstance(left, Unknown) else right
        return self.plain(left) + self.plain(right)

    def plain(self, value: Any) -> Any:
        """A value with the texts of its words.  Raises Undecided for one that has unknown parts."""
        if isinstance(value, (Word, Unknown)):
            why = value.unknown if isinstance(value, Word) else value.why
            if why:
                raise Undecided(why)
        if isinstance(value, Held):
            return (tuple if value.fixed else list)(self.plain(one) for one in value)
        return value.text if isinstance(value, Word) else value

    def _known(self, node: ast.expr) -> Any:
        found = self.value(node)
        if isinstance(found, Unknown):
            raise Undecided(found.why)
        return found

    def _plain(self, node: ast.expr) -> Any:
        return self.plain(self.value(node))

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                missing = Unknown(self.star or f"nothing in the script sets {name}", name, unset=not self.star)
                return self.names[name] if name in self.names else self.given.get(name, missing)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                found = Held()
                for one in elements:
                    if isinstance(one, ast.Starred):
                        found = self.added(found, self.value(one.value))
                    else:
                        found.append(self.element(one, self.value(one)))
                found.fixed = isinstance(node, ast.Tuple)
                return found
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.added(self.value(left), self.value(right))
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return self._repeated(self._known(left), self._known(right))
            case ast.BinOp(left=left, op=operator, right=right):
                return self._calculated(self._plain(left), operator, self._plain(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._plain(operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._plain(operand)
            case ast.JoinedStr(values=values):
                return "".join([self._formatted(one) for one in values])
            case ast.IfExp(test=test, body=yes, orelse=no):
                return self.value(yes if self._plain(test) else no)
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                return self._compared(self._plain(left), operator, self._plain(right))
            case ast.ListComp(elt=element, generators=[one]) | ast.GeneratorExp(elt=element, generators=[one]):
                return self._comprehended(element, one)
            case ast.Call():
                return self._called(node)
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="sys"), attr="argv"), slice=ast.Slice(upper=None)):
                return Held()  # what the script is started with, as "$@" of a shell
            case ast.Subscript(value=value, slice=ast.Slice(lower=None, upper=None, step=None)):
                return _copied(self._known(value))
            case ast.Subscript(value=value, slice=index):
                return self._part(self._known(value), index)
        if not isinstance(node, PERHAPS):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.value(child)
        raise Undecided(f"{ast.unparse(node)[:40]} is not read")

    def _formatted(self, node: ast.expr) -> str:
        """A piece of an f-string; one that is not known is a hole."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        assert isinstance(node, ast.FormattedValue)
        found = self.value(node.value)
        if isinstance(found, Held) or node.format_spec is not None or node.conversion != -1:
            found = Unknown(f"{ast.unparse(node)[:40]} is not read", ast.unparse(node.value)[:40], flags=self.flagged(found))
        if isinstance(found, Unknown) and found.flags:
            found = replace(found, name=f"{found.name}[@]")
        return self.hole(self.word(found, node))

    def _part(self, value: Any, index: ast.expr) -> Any:
        if isinstance(value, Held):
            self.plain(Held([one for one in value if not isinstance(one, Held)]))  # after an unknown one, no place is sure
        if not isinstance(index, ast.Slice):
            return value[self._plain(index)]
        lower, upper, step = (None if one is None else self._plain(one) for one in (index.lower, index.upper, index.step))
        return Held(value[lower:upper:step]) if isinstance(value, Held) else value[lower:upper:step]

    def _repeated(self, left: Any, right: Any) -> Any:
        many, times = (right, left) if isinstance(right, (list, str)) else (left, right)
        if isinstance(many, (list, str)) and len(many) * times > LONGEST:
            raise Undecided("it grows beyond what is read")
        return Held(many * times) if isinstance(many, list) else self.plain(left) * self.plain(right)

    def _calculated(self, left: Any, operator: ast.operator, right: Any) -> Any:
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

    def _comprehended(self, element: ast.expr, one: ast.comprehension) -> Held:
        if not isinstance(one.target, ast.Name):
            raise Undecided("this comprehension is not read")
        over = self._known(one.iter)
        outside, found = self.names, Held()
        try:
            for value in self.plain(over):
                self.names = outside | {one.target.id: value}
                if all(self._plain(test) for test in one.ifs):
                    found.append(self.element(element, self._known(element)))
        finally:
            self.names = outside
        return found

    def _called(self, node: ast.Call) -> Any:
        own = isinstance(node.func, ast.Name) and node.func.id in self.names
        match node if not own and not node.keywords else None:
            case ast.Call(func=ast.Name(id="range"), args=arguments):
                numbers = [self._plain(one) for one in arguments]
                if len(range(*numbers)) > LONGEST:
                    raise Undecided("the range is longer than what is read")
                return Held(range(*numbers))
            case ast.Call(func=ast.Name(id="str" | "int" | "len" | "float" as name), args=[argument]):
                return CONVERSIONS[name](self._plain(argument))
            case (
                ast.Call(func=ast.Name(id="list" | "tuple"), args=[argument])
                | ast.Call(func=ast.Attribute(value=ast.Name(id="copy"), attr="copy" | "deepcopy"), args=[argument])
                | ast.Call(func=ast.Attribute(value=argument, attr="copy"), args=[])
            ):
                return _copied(self._known(argument))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="shlex"), attr="join"), args=[argument]):
                return " ".join(
                    [
                        self.hole(one) if one.unknown else shlex.quote(one.text)
                        for one in map(self.word, self._known(argument), repeat(argument))
                    ]
                )
            case ast.Call(func=ast.Attribute(value=value, attr="join"), args=[argument]):
                return str(self._plain(value)).join([self.hole(self.word(one, argument)) for one in self._known(argument)])
            case ast.Call(func=ast.Name(id="map"), args=[ast.Name(id="str"), argument]) if "str" not in self.names:
                return Held(self.word(one, argument) for one in self._known(argument))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="shlex"), attr="quote"), args=[argument]):
                return shlex.quote(str(self._plain(argument)))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="shlex"), attr="split"), args=[argument]):
                return Held(self._split(str(self._plain(argument)), self.where(node)))
            case ast.Call(func=ast.Attribute(value=value, attr="split"), args=[]):
                return Held(self.element(node, one) for one in str(self._plain(value)).split())
            case ast.Call(func=ast.Attribute(value=value, attr="strip" | "lower" | "upper" as name), args=[]):
                return getattr(str(self._plain(value)), name)()
            case ast.Call(func=ast.Attribute(value=value, attr="replace"), args=[old, new]):
                return str(self._plain(value)).replace(self._plain(old), self._plain(new))
            case (
                ast.Call(func=ast.Attribute(attr="getenv"), args=[ast.Constant(value=str() as name), *rest])
                | ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get"), args=[ast.Constant(value=str() as name), *rest]
                )
            ):
                if name in self.given:
                    return self.given[name]
                return self.value(rest[0]) if rest else Unknown(f"nothing in the script sets {name}", name, True)
        return self.called(node)


def _copied(value: Any) -> Any:
    """Another list of the same words."""
    return Held(value) if isinstance(value, list) else value


def says_flag(node: ast.AST) -> bool:
    """A text with a flag of Megatron's in it."""
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and any(one.partition("=")[0] in FLAGS for one in value.split())
