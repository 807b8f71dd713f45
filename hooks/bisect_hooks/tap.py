"""A Tap is a Site bound to one model; `listening` records taps, or replaces what passes them, for the length of a `with` block.

Listening knows modules and layouts, never numbers.  What it keeps it copies; what it does not graft it leaves alone, so outputs
with and without it are bit-equal.  On the way out every hook is off, also after an exception, and a tap that did not fire, or
fired twice, is an error that names it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from bisect_hooks.errors import BisectError, UsageError
from bisect_hooks.layout import Layout, parse_layout
from bisect_hooks.parallel import Coordinates, Parallel
from bisect_hooks.site import Site

At = Literal["output", "input", "method", "function", "parameter"]


@dataclass(frozen=True, slots=True)
class Tap:
    """Where a Site is heard on one side.

    path      dotted path of the module (for `method`: of any object that has it; for `function`: of the module that calls it)
    at        its output, its input, the result of its method, a call it makes of a module-level function, or a vector it holds
              while it is called (`parameter`: given out once a token of the selected argument; never grafted)
    select    which of several outputs or arguments: positions or names, first one that is there
    name      method, parameter or function name (function: "package.module:name")
    call      which call of the function inside one forward of `path`, or -1 when there is just one
    result    whether a function tap hears the result (True) or an argument (False)
    piece     name of the only piece; layouts with sections name their own
    transform from all that was heard (the output, or every argument) to a tensor of `layout`, where that is not one of them; such a
              tap can't be grafted
    """

    site: Site
    path: str
    layout: str
    at: At = "output"
    select: tuple[int | str, ...] = ()
    name: str = ""
    call: int = -1
    result: bool = True
    piece: str = ""
    transform: Callable[[Any], torch.Tensor] | None = None
    graftable: bool = True

    @property
    def parsed(self) -> Layout:
        return parse_layout(self.layout)

    @property
    def keys(self) -> tuple[str, ...]:
        """`site` or `site:piece` for every canonical tensor this tap yields."""
        pieces = self.parsed.pieces if self.parsed.pieces != ("",) else (self.piece,)
        return tuple(key_of(self.site, piece) for piece in pieces)

    @property
    def id(self) -> str:
        """A name that no other tap of the side has, and that does not depend on how a pipeline stage counts its layers."""
        words = (str(self.site), self.piece, self.at, self.name, ",".join(map(str, self.select)), str(self.call))
        return "|".join(word for word in words if word)


def key_of(site: Site, piece: str = "") -> str:
    """`site` or `site:piece`."""
    return f"{site}:{piece}" if piece else str(site)


def split_key(key: str) -> tuple[str, str]:
    """(site, piece) of a key."""
    site, _, piece = key.partition(":")
    return site, piece


@dataclass(slots=True)
class Heard:
    """What one rank heard: tap id → its local tensors, in order of the calls."""

    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)

    def one(self, tap: Tap) -> torch.Tensor:
        return self.tensors[tap.id][0]

    def times(self, taps: tuple[Tap, ...]) -> dict[str, int]:
        """tap id → how often it fired."""
        return {tap.id: len(self.tensors.get(tap.id, ())) for tap in taps}


@dataclass(frozen=True, slots=True)
class Graft:
    """Canonical values to put in the place of what passes a tap, and what is needed to cut this rank's part out of them."""

    values: Mapping[str, torch.Tensor]
    coordinates: Coordinates
    sizes: Mapping[str, int]
    parallel: Parallel

    def into(self, tap: Tap, local: torch.Tensor) -> torch.Tensor:
        pieces = {}
        for piece, key in zip(tap.parsed.pieces, tap.keys, strict=True):
            if key in self.values:
                pieces[piece] = self.values[key].to(device=local.device, dtype=local.dtype)
        return tap.parsed.cut(pieces, local, self.coordinates, self.sizes, self.parallel)

    def wants(self, tap: Tap) -> bool:
        return tap.graftable and tap.transform is None and tap.at != "parameter" and any(key in self.values for key in tap.keys)


NO_GRAFT = Graft({}, Coordinates(0, 0, 0, 0, 0), {}, Parallel())


@contextmanager
def listening(
    root: torch.nn.Module,
    taps: tuple[Tap, ...],
    graft: Graft = NO_GRAFT,
    *,
    where: str = "",
    record: bool = True,
    first: bool = False,
    strict: bool = True,
) -> Iterator[Heard]:
    """Records every tap of `taps` while the block runs (nothing but grafts when `record` is False).

    first  somebody else's process, which may run any number of forwards: keep what is heard first, and ask for nothing

    A grafted tap records what the model itself made, then hands on the graft.  Raises UsageError for a path that names nothing,
    BisectError when a tap did not fire exactly once (`strict`); `where` (side and rank) goes into the message.
    """
    ids = [tap.id for tap in taps]
    if len(ids) != len(set(ids)):
        twice = sorted({tap_id for tap_id in ids if ids.count(tap_id) > 1})
        raise UsageError(f"two taps are the same: {', '.join(twice)}")
    heard = Heard()
    fired: dict[str, int] = dict.fromkeys(ids, 0)

    def hear(tap: Tap, thing: Any) -> torch.Tensor | None:
        """Counts and copies; returns what to hand on instead, or None."""
        fired[tap.id] += 1
        tensor = tap.transform(thing) if tap.transform else thing
        if not isinstance(tensor, torch.Tensor):
            raise BisectError(f"tap {tap.site}{where} heard {type(thing).__name__}, not a tensor, at {tap.path}")
        if record and (fired[tap.id] == 1 or not first):
            heard.tensors.setdefault(tap.id, []).append(tensor.detach().clone())
        return graft.into(tap, tensor) if graft.wants(tap) else None

    with ExitStack() as stack:
        for tap in taps:
            if tap.at in ("output", "input", "parameter"):
                _hook_module(stack, root, tap, hear)
            elif tap.at == "method":
                _wrap_method(stack, root, tap, hear)
        _wrap_functions(stack, root, [tap for tap in taps if tap.at == "function"], hear)
        yield heard
    if first or not strict:
        return
    wrong = [f"{tap.site} at {tap.path} ({fired[tap.id]} times)" for tap in taps if fired[tap.id] != 1]
    if wrong:
        raise BisectError(
            f"{len(wrong)} tap(s) did not fire exactly once{where}: {'; '.join(wrong[:4])}",
            hint="the module exists but was not called, or was called again; see `bisect-tool taps`",
        )


Hear = Callable[[Tap, Any], torch.Tensor | None]


def _pick(things: Any, select: tuple[int | str, ...]) -> tuple[int | None, Any]:
    """The selected one of a tuple (or the thing itself), and where it stood."""
    if not isinstance(things, (tuple, list)):
        return None, things
    index = next((word for word in select if isinstance(word, int)), 0)
    return index, things[index]


def _put(things: Any, index: int | None, value: Any) -> Any:
    if index is None:
        return value
    replaced = list(things)
    replaced[index] = value
    return tuple(replaced)


def _hook_module(stack: ExitStack, root: torch.nn.Module, tap: Tap, hear: Hear) -> None:
    module = find(root, tap.path)
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"tap {tap.site}: {tap.path} is a {type(module).__name__}, not a module")

    def after(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
        if tap.transform:
            hear(tap, output)
            return None
        index, thing = _pick(output, tap.select)
        new = hear(tap, thing)
        return None if new is None else _put(output, index, new)

    def before(_module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if tap.transform:
            hear(tap, (*args, *kwargs.values()))
            return None
        position, word = _argument(args, kwargs, tap)
        thing = args[position] if position is not None else kwargs[word]
        new = hear(tap, thing)
        if new is None:
            return None
        return (_put(args, position, new), kwargs) if position is not None else (args, kwargs | {word: new})

    def holding(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        position, word = _argument(args, kwargs, tap)
        tokens = args[position] if position is not None else kwargs[word]
        hear(tap, find(module, tap.name).expand(*tokens.shape[:-1], -1))

    if tap.at == "parameter":
        stack.callback(module.register_forward_pre_hook(holding, with_kwargs=True).remove)
    elif tap.at == "output":
        stack.callback(module.register_forward_hook(after).remove)
    else:
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)


def _argument(args: Any, kwargs: Any, tap: Tap) -> tuple[int | None, str]:
    for word in tap.select or (0,):
        if isinstance(word, int) and word < len(args):
            return word, ""
        if isinstance(word, str) and word in kwargs:
            return None, word
    raise BisectError(f"tap {tap.site}: {tap.path} was called with {len(args)} arguments and {sorted(kwargs)}, none is {tap.select}")


def _wrap_method(stack: ExitStack, root: torch.nn.Module, tap: Tap, hear: Hear) -> None:
    owner = find(root, tap.path)
    original = getattr(owner, tap.name, None)
    if original is None:
        raise UsageError(f"tap {tap.site}: {tap.path} has no method {tap.name}")

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        index, thing = _pick(output, tap.select)
        new = hear(tap, thing)
        return output if new is None else _put(output, index, new)

    # On the instance, so that only this one is heard, and so that taking it off is deleting it.
    had = vars(owner).get(tap.name)
    object.__setattr__(owner, tap.name, wrapped)
    stack.callback(lambda: object.__setattr__(owner, tap.name, had) if had is not None else object.__delattr__(owner, tap.name))


def _wrap_functions(stack: ExitStack, root: torch.nn.Module, taps: list[Tap], hear: Hear) -> None:
    """Module-level functions have no module of their own: a stack of running callers says on whose behalf they are called."""
    if not taps:
        return
    running: list[tuple[str, dict[str, int]]] = []

    def enter(path: str) -> None:
        module = find(root, path)
        assert isinstance(module, torch.nn.Module)
        stack.callback(module.register_forward_pre_hook(lambda *_: running.append((path, {}))).remove)
        # always_call, so that a forward that raises leaves no caller behind for the next one to be mistaken for
        stack.callback(module.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True).remove)

    for path in dict.fromkeys(tap.path for tap in taps):
        enter(path)
    for name in dict.fromkeys(tap.name for tap in taps):
        module_name, function = name.split(":")
        owner = __import__(module_name, fromlist=[function])
        original = getattr(owner, function)
        wrapped = _listened(original, [tap for tap in taps if tap.name == name], function, running, hear)
        setattr(owner, function, wrapped)
        stack.callback(setattr, owner, function, original)


def _listened(
    original: Callable[..., Any], taps: list[Tap], function: str, running: list[tuple[str, dict[str, int]]], hear: Hear
) -> Callable[..., Any]:
    by_path: dict[str, list[Tap]] = {}
    for tap in taps:
        by_path.setdefault(tap.path, []).append(tap)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        path, calls = running[-1] if running else ("", {})
        number = calls.get(function, 0)
        calls[function] = number + 1
        here = [tap for tap in by_path.get(path, ()) if tap.call in (-1, number)]
        for tap in (tap for tap in here if not tap.result):
            position, word = _argument(args, kwargs, tap)
            new = hear(tap, args[position] if position is not None else kwargs[word])
            if new is not None and position is not None:
                args = _put(args, position, new)
            elif new is not None:
                kwargs = kwargs | {word: new}
        output = original(*args, **kwargs)
        for tap in (tap for tap in here if tap.result):
            index, thing = _pick(output, tap.select)
            new = hear(tap, thing)
            output = output if new is None else _put(output, index, new)
        return output

    return wrapped


def find(root: torch.nn.Module, path: str) -> Any:
    """The object at a dotted path; numbers index.  Raises UsageError naming the nearest names that are there."""
    here: Any = root
    walked: list[str] = []
    for word in path.split(".") if path else []:
        inner = here[int(word)] if word.isdigit() and hasattr(here, "__getitem__") and int(word) < len(here) else getattr(here, word, None)
        if inner is None:
            names = (
                [name for name, _ in here.named_children()] if isinstance(here, torch.nn.Module) else [n for n in dir(here) if n[0] != "_"]
            )
            near = difflib.get_close_matches(word, names, n=3, cutoff=0.3) or names[:6]
            at = ".".join(walked) or type(root).__name__
            raise UsageError(f"{path}: {at} has no {word!r}", hint=f"nearest: {', '.join(near) or 'nothing'}")
        here = inner
        walked.append(word)
    return here
