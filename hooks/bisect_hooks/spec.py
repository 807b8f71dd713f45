"""The user's own layer spec: `--spec MODULE FUNCTION`, called as Megatron and slime call it, and what it made of the model.

Megatron (`--spec` of its training scripts): the attribute is a spec, or a function (config) or (config, vp_stage) that makes one.
slime: a function (args, config, vp_stage).  Nothing here imports megatron; the module that the user names does.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from bisect_hooks.errors import UsageError, first_line
from bisect_hooks.table import Rule
from bisect_hooks.tap import Tap, find

Spec = tuple[str, str]
CALLED = "Megatron calls (config) or (config, vp_stage), slime (args, config, vp_stage)"


def import_spec(spec: Spec) -> Any:
    """The attribute that the user named.  Raises UsageError with what went wrong in one line."""
    module, name = spec
    try:
        return getattr(import_module(module), name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--spec {module} {name} can't be imported: {type(error).__name__}: {first_line(error)}") from error


def layers_by(spec: Spec, args: Mapping[str, Any], config: Any, layers: int, vp_stage: int | None = None) -> Any:
    """What GPTModel takes as its transformer_layer_spec.  Raises UsageError for what is no spec, or one of other layers."""
    found = import_spec(spec)
    said = f"--spec {spec[0]} {spec[1]}"
    # a ModuleSpec is callable too: calling it builds what it specifies
    if callable(found) and not _is_spec(found):
        found = _called(said, found, {"args": Namespace(**args), "config": config, "vp_stage": vp_stage})
    if not _is_spec(found):
        what = "None" if found is None else f"a value of type {type(found).__name__}"
        raise UsageError(f"{said} gives {what}, neither a ModuleSpec nor TransformerBlockSubmodules")
    each = getattr(found, "layer_specs", None)
    if each is not None and len(each) != layers:
        raise UsageError(f"{said} gives {len(each)} layers where this rank has {layers}")
    return found


def _is_spec(found: Any) -> bool:
    return hasattr(found, "layer_specs") or hasattr(found, "submodules")


def _called(said: str, function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    asked = [one for one in inspect.signature(function).parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    unknown = [one.name for one in asked if one.name not in offered and one.default is one.empty]
    if unknown:
        raise UsageError(f"{said} asks for {', '.join(unknown)}", hint=CALLED)
    try:
        return function(**{one.name: offered[one.name] for one in asked if one.name in offered})
    except (Exception, SystemExit) as error:
        raise UsageError(f"{said} fails: {type(error).__name__}: {first_line(error)}") from error


@dataclass(frozen=True, slots=True)
class Settled:
    """What a spec's model can be asked.

    taps     those that it has a place for       unbound  keys of the others, with what is missing
    fused    sites that it computes inside another module (Transformer Engine norms inside the linear that follows)
    """

    taps: tuple[Tap, ...]
    unbound: Mapping[str, str]
    fused: frozenset[str]


def settle(model: torch.nn.Module, taps: tuple[Tap, ...], rules: list[Rule], keys: frozenset[str]) -> Settled:
    """Lines a built model up with the family's taps.  `keys` are the names its tensors have on disk.

    A submodule that the spec left out (None) becomes an identity, which computes the same and is heard where it would be.
    """
    # local specs keep Transformer Engine's names on disk too: only a place without weights of its own is fused
    aliased = {str(rule.site) for rule in rules for own, alias in rule.aliases if own not in keys and alias in keys}
    kept, unbound, fused = [], dict[str, str](), set[str]()
    for tap in taps:
        owner, _, leaf = tap.path.rpartition(".")
        try:
            parent = find(model, owner)
            if tap.at == "output" and leaf in vars(parent).get("_modules", {}) | vars(parent) and getattr(parent, leaf) is None:
                setattr(parent, leaf, torch.nn.Identity())
            place = find(model, tap.path)
        except UsageError as error:
            unbound |= dict.fromkeys(tap.keys, f"the spec's model has no such place: {error.message}")
            continue
        if str(tap.site) in aliased and not any(True for _ in place.parameters()):
            fused.add(str(tap.site))
        else:
            kept.append(tap)
    return Settled(tuple(kept), unbound, frozenset(fused))
