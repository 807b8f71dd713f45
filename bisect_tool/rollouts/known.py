"""What is known before an engine's words are looked at: what other stages cleared or found, and the commands that would tell more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bisect_tool.rollouts.scoring import Model


def _flags(flags: str) -> str:
    return f"bisect-tool rollout {flags}"


@dataclass(frozen=True)
class Known:
    """Of the same model, from elsewhere.

    conversion  why the conversion is cleared ("" where it is not)
    held        whether the engine holds, byte by byte, what it should
    found       what an earlier stage found in the candidate ("" where nothing): an engine that agrees with the candidate shows it
    model       what computes the candidate's log-probs; None where no candidate is built
    rerun       flags → the command that was given, with those flags added
    audit       the command that looks at the weights
    """

    conversion: str = ""
    held: bool = False
    found: str = ""
    model: Model | None = None
    rerun: Callable[[str], str] = field(default=_flags)
    audit: str = "bisect-tool audit --reference DIR --candidate MEGATRON_DIR"
