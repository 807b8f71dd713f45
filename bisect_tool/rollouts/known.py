"""What is known before an engine's words are looked at: what other stages cleared or found, and the commands that would tell more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bisect_tool.rollouts.scoring import Model


def _flags(flags: str) -> str:
    return f"bisect-tool rollout {flags}"


@dataclass(frozen=True)
class Known:
    """Of the same model, from elsewhere.

    conversion  why the conversion is cleared ("" where it is not)
    held        whether the engine holds, byte by byte, what it should
    found       what an earlier stage found in candidate or export ("" where nothing): an engine that agrees with those shows it
    models      what computes the log-probs of "candidate" and "export", where they are there
    rerun       flags → the command that was given, with those flags added
    audit       the command that looks at the weights
    """

    conversion: str = ""
    held: bool = False
    found: str = ""
    models: Mapping[str, Model] = field(default_factory=dict)
    rerun: Callable[[str], str] = field(default=_flags)
    audit: str = "bisect-tool audit --reference DIR --candidate MEGATRON_DIR"
