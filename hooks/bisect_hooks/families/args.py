"""Reading numbers and patterns out of Megatron's args, with an error that names the flag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bisect_hooks.errors import UsageError


@dataclass(frozen=True, slots=True)
class Args:
    """A candidate's own words.  None counts as not given, as in Megatron's Namespace."""

    args: Mapping[str, Any]

    def number(self, name: str, default: int) -> int:
        """Raises UsageError for a value that is no whole number."""
        value = self.args.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or int(value) != value:
            raise UsageError(f"the candidate's args say {flag(name)} {value!r}, which is no whole number")
        return int(value)

    def need(self, name: str) -> int:
        """A number without a default that building needs.  Raises UsageError with its flag."""
        if self.args.get(name) is None:
            raise UsageError(
                f"the candidate's args say no {name} ({flag(name)})", hint="nothing else says it, and it is never taken from the reference"
            )
        value = self.number(name, 0)
        if value < 1:
            raise UsageError(f"the candidate's args say {flag(name)} {value}")
        return value

    def pattern(self, name: str, layers: int, *, every: Callable[[int, int], bool], default: int | None = None) -> tuple[bool, ...]:
        """A flag a layer, from a list of flags or from "every N layers".  Raises UsageError."""
        value = self.args.get(name, default)
        value = default if value is None else value
        if isinstance(value, (list, tuple)):
            if len(value) != layers:
                raise UsageError(f"the candidate's args give {len(value)} entries in {flag(name)} for {layers} layers")
            return tuple(bool(one) for one in value)
        if value is None:
            self.need(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"the candidate's args say {flag(name)} {value!r}, neither a list nor a number of layers")
        return tuple(every(i, value) for i in range(layers))


def flag(name: str) -> str:
    """An arg as it is written on a command line."""
    return "--" + name.replace("_", "-")


def close(a: Any, b: Any) -> bool:
    """Equality of settings that are fractions."""
    return isinstance(a, (int, float)) and abs(float(a) - float(b)) <= 1e-9 * max(1.0, abs(float(b)))
