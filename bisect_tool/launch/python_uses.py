"""What Python code may do to the lists it names: every appearance of a name but those that are known to only read it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Sequence

# functions that read what they are given, and keep none of it
BUILTINS = set(
    "print len str int float bool repr sorted tuple list set frozenset any all enumerate zip sum min max isinstance reversed range type format "
    "map filter iter".split()
)
MODULES = {"subprocess", "os", "shlex", "json", "logging", "logger", "log", "sys", "pprint", "copy"}
METHODS = {"join", "copy", "index", "count", "split", "strip", "format", "startswith", "endswith", "lower", "upper", "replace"}
STARTERS = re.compile(r"subprocess\.\w+|os\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*)|pty\.spawn")
# they may reach any name at all
ANYTHING = {"exec", "eval", "globals", "locals", "vars", "setattr"}

Functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
These = Callable[[Sequence[ast.AST | None], bool], Iterator[ast.Name]]


def root(node: ast.expr) -> str:
    """The name that `a.b.c` begins with; "" for what begins otherwise."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def reads_only(function: ast.expr, bound: Collection[str]) -> bool:
    """A function known to change nothing that it is given.  bound: names that the script gives another meaning"""
    match function:
        case ast.Name(id=name):
            return name in BUILTINS and name not in bound
        case ast.Attribute(value=value, attr=attr):
            return (root(value) in MODULES and root(value) not in bound) or attr in METHODS
    return False


def starts(function: ast.expr, bound: Collection[str]) -> bool:
    """A function that runs the command it is given."""
    return root(function) not in bound and STARTERS.fullmatch(ast.unparse(function)) is not None


def used(node: ast.AST, bound: Collection[str], followed: Collection[ast.Call] = (), read: bool = False) -> Iterator[ast.Name]:
    """Names that it sets, changes, gives away or gives another name.

    followed  calls of the script's own functions, whose changes are known
    read      what the whole expression comes to is followed
    """

    def these(nodes: Sequence[ast.AST | None], read: bool) -> Iterator[ast.Name]:
        for one in nodes:
            if one is not None:
                yield from used(one, bound, followed, read)

    match node:
        case ast.Name(ctx=ast.Load()) if read:
            return
        case ast.Name():
            yield node
        case ast.Expr(value=value) | ast.FormattedValue(value=value) | ast.UnaryOp(operand=value):
            yield from these([value], True)
        case ast.Starred(ctx=ast.Load(), value=value):
            yield from these([value], True)
        case ast.BinOp(left=left, right=right):
            yield from these([left, right], True)
        case ast.Compare(left=left, comparators=more):
            yield from these([left, *more], True)
        case ast.IfExp(test=test, body=yes, orelse=no):
            yield from these([test], True)
            yield from these([yes, no], read)
        case ast.If(test=test, body=body, orelse=more) | ast.While(test=test, body=body, orelse=more):
            yield from these([test], True)
            yield from these([*body, *more], False)
        case ast.For(target=target, iter=iterated, body=body, orelse=more):
            yield from these([iterated], True)
            yield from these([target, *body, *more], False)
        case ast.Assert(test=test):
            yield from these([test], True)
        case ast.AugAssign(target=ast.Name(id=name) as target, value=value):
            yield target
            yield ast.copy_location(ast.Name(id=name, ctx=ast.Load()), target)
            yield from these([value], True)
        case ast.Subscript(ctx=ast.Load(), value=value, slice=index):
            yield from these([value, index], True)
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
            yield from _comprehended(node, these)
        case ast.Call(func=function, args=arguments, keywords=keywords):
            harmless = reads_only(function, bound)
            given = [*arguments, *(one.value for one in keywords)]
            if node not in followed and not harmless:
                yield from (one for one in ast.walk(function) if isinstance(one, ast.Name))
            elif harmless and isinstance(function, ast.Attribute):
                yield from these([function.value], True)
            yield from these(given, harmless or node in followed)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            yield from _inside(node, these)
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            yield from (ast.Name(id=name, ctx=ast.Store()) for name in names)
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (ast.Name(id=(one.asname or one.name).partition(".")[0], ctx=ast.Store()) for one in names)
        case ast.ExceptHandler(name=str() as name, body=body):
            yield ast.Name(id=name, ctx=ast.Store())
            yield from these(body, False)
        case ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name):
            yield ast.Name(id=name, ctx=ast.Store())
            yield from these(list(ast.iter_child_nodes(node)), False)
        case _:
            yield from these(list(ast.iter_child_nodes(node)), False)


def _comprehended(node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp, these: These) -> Iterator[ast.Name]:
    """A comprehension's own names are its own; what it goes over is read."""
    own = {one.id for generator in node.generators for one in ast.walk(generator.target) if isinstance(one, ast.Name)}
    parts = (
        [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    )  # `[x for x in A]` takes elements, `[x.pop() ...]` more
    for generator in node.generators:
        yield from these([generator.iter], True)
        yield from (one for one in these(generator.ifs, True) if one.id not in own)
    for one in these(parts, False):
        yield from [one] if one.id not in own else (name for generator in node.generators for name in these([generator.iter], False))


def _inside(node: Functions, these: These) -> Iterator[ast.Name]:
    """What a function does to names outside it; its own name is set."""
    body = [node.body] if isinstance(node, ast.Lambda) else node.body
    outside = {name for one in ast.walk(node) if isinstance(one, (ast.Global, ast.Nonlocal)) for name in one.names}
    own = parameters(node) | {
        one.id for part in body for one in ast.walk(part) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    yield from (one for one in these(body, False) if one.id not in own - outside)
    yield from these([*node.args.defaults, *node.args.kw_defaults], False)
    if not isinstance(node, ast.Lambda):
        yield ast.Name(id=node.name, ctx=ast.Store())


def parameters(node: Functions) -> set[str]:
    """The names of a function's parameters."""
    args = node.args
    return {one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg)))}
