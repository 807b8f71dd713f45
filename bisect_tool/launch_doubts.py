"""What a launch or a checkpoint says that is not judged: what leaves the comparison undecided, and what is only noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bisect_hooks.family import Setting

from bisect_tool.config_check import short
from bisect_tool.launch.flags import FLAGS, UNJUDGED, harmless, harmless_arg, nearest, unjudged
from bisect_tool.launch.launch import Launch

MOST_SHOWN = 12
OTHER_KIND = "makes another model, of a kind that is not judged"


def doubts(launch: Launch) -> list[tuple[str, str]]:
    """(what, why) of everything that the launch says of the model, and that is not compared."""
    found = list(launch.doubts)
    for name, where in launch.unknown:
        near = nearest(name)
        if unjudged(name):
            found.append((name, f"{where}: {name} {OTHER_KIND}"))
        elif near is not None and not harmless(name):
            found.append((name, f"{where}: {name} is no flag that we know; {near} is, and is {_said(launch, near)}"))
    for name, value in launch.args.items():
        if name in UNJUDGED and FLAGS.get(f"--{name.replace('_', '-')}") is None and value not in (None, False, "", [], UNJUDGED[name]):
            found.append((name, f"{launch.said.get(name, launch.path)}: {name}={short(value)} {OTHER_KIND}"))
    return found


def not_judged(launch: Launch) -> list[str]:
    """Flags that are neither in our table nor known to leave the model alone, all in one line."""
    found = {name: where for name, where in launch.unknown if not harmless(name) and not unjudged(name) and nearest(name) is None}
    if not found:
        return []
    listed = ", ".join(f"{name} ({where})" for name, where in found.items())
    return [f"not known, not judged: {listed}; whether {'it changes' if len(found) == 1 else 'they change'} the model is not said here"]


def kept_not_judged(args: Mapping[str, Any], settings: Sequence[Setting]) -> list[str]:
    """Args of a checkpoint that are set, and that neither our tables nor Megatron's own arguments know, in one line."""
    known = {setting.arg for setting in settings} | {flag.arg for flag in FLAGS.values()}
    found = {
        name: value
        for name, value in args.items()
        if name not in known
        and not name.startswith("_")
        and not harmless_arg(name)
        and value not in (None, False, "", [], UNJUDGED.get(name))
    }
    if not found:
        return []
    shown = [f"{name}={short(value)}" for name, value in sorted(found.items())]
    more = f" and {len(shown) - MOST_SHOWN} more" if len(shown) > MOST_SHOWN else ""
    return [
        f"not known, not judged in the checkpoint's args: {', '.join(shown[:MOST_SHOWN])}{more}; "
        f"whether {'it changes' if len(found) == 1 else 'they change'} the model is not said here"
    ]


def _said(launch: Launch, flag: str) -> str:
    arg = FLAGS[flag].arg
    return f"given in {launch.said[arg]}" if arg in launch.said else "not given"
