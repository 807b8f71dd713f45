"""What a launch says: Megatron's args with the line that gives each, and what becomes of those that nobody gives."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bisect_tool.launch.words import Where

Unsaid = Literal["megatron", "reference"]


@dataclass(frozen=True)
class Launch:
    """A launch, read.

    args     Megatron's names; only what is given
    said     where each of them is given
    unknown  flags that are not in our table, with their lines
    whole    a command line was found: what is not given is not given anywhere else
    unsaid   who says what is not given: Megatron's defaults, or a bridge that reads config.json
    changed  values of config.json itself that it changes, by their place in it (`rope_parameters.rope_theta`), and where: the model is built from the changed one
    doubts   what it says of the model that is not read: (what, why)
    others   (where, where this one is, what is started there) of its other commands, or roles: which is the candidate is not known
    lost     lines that were to give more flags, and do not: why
    program  what the command line starts, "" when there is none
    """

    path: Path
    kind: str
    args: dict[str, Any] = field(default_factory=dict)
    said: dict[str, Where] = field(default_factory=dict)
    unknown: Sequence[tuple[str, Where]] = ()
    notes: Sequence[str] = ()
    whole: bool = True
    unsaid: Unsaid = "megatron"
    program: str = ""
    changed: Mapping[str, tuple[Any, Where]] = field(default_factory=dict)
    lost: Sequence[str] = ()
    doubts: Sequence[tuple[str, str]] = ()
    others: Sequence[tuple[str, str, Launch]] = ()

    @property
    def spec(self) -> str:
        """The layer spec that the launch names, as one text."""
        return shlex.join(map(str, self.args.get("spec") or ()))

    @property
    def converts(self) -> bool:
        """It writes a checkpoint from a Hugging Face directory."""
        return "convert" in self.program
