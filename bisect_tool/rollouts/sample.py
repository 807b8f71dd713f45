"""A Sample: one response of a rollout engine with everything its dump says about it.  Formats are read elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bisect_hooks.errors import UsageError

# a log-prob that nobody computed: the first token of a prompt, a token that a tool wrote
Logs = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Prompt and response as one row of ids; the response begins at `start`.

    where     file and number, for messages                 prompt    its text or messages, where the dump keeps them
    exact     ids are the engine's own, not made from text  response  its text
    decode    the engine's log-prob of each response token, said while it generated
    prefill   the engine's log-prob of every token, said in one pass over prompt and response
    trained   the trainer's log-prob of each response token
    versions  weight versions that took part                rollout   number of the rollout (or step)
    engine    which engine or DP rank                       cached    prompt tokens that came from a prefix cache
    drafted   for each response token, whether a draft proposed it (None: not said)
    masked    response tokens that the loss mask leaves out
    complete  whether the dump says that it ended by itself (None: not said)
    """

    where: str
    tokens: tuple[int, ...]
    start: int
    prompt: Any = None
    response: str = ""
    exact: bool = True
    decode: Logs = ()
    prefill: Logs = ()
    trained: Logs = ()
    versions: tuple[str, ...] = ()
    rollout: int | None = None
    engine: str = ""
    cached: int | None = None
    drafted: tuple[bool, ...] | None = None
    masked: frozenset[int] = frozenset()
    complete: bool | None = None

    @property
    def length(self) -> int:
        """Tokens of the response."""
        return len(self.tokens) - self.start

    @property
    def mixed(self) -> bool:
        """Whether weights were updated while it was generated."""
        return len(set(self.versions)) > 1

    @property
    def age(self) -> tuple[int, str]:
        """Which weights it was made with, as far as the dump says: those of one age may be compared with each other."""
        version = self.versions[0] if self.versions else ""
        if version.isdecimal():
            return int(version), ""
        return (self.rollout or 0), version


def made(
    where: str, *, tokens: Sequence[Any], start: int, logs: Mapping[str, Sequence[Any]], mask: Sequence[Any] | None, **more: Any
) -> Sample:
    """A checked Sample.  logs: decode, prefill and trained as the dump has them.  Raises UsageError naming what does not fit."""
    row = ids_of(tokens, where)
    if not 0 < start <= len(row):
        raise UsageError(f"{where}: a response of {len(row) - start} tokens in {len(row)} leaves no prompt")
    length = len(row) - start
    if mask is not None and len(mask) != length:
        raise UsageError(f"{where}: its loss mask has {len(mask)} entries, its response {length} tokens")
    found: dict[str, Any] = {}
    for name, values in logs.items():
        said = logs_of(values, f"{where}: {name} log-probs")
        expected = len(row) if name == "prefill" else length
        if said and len(said) != expected:
            raise UsageError(f"{where} has {len(said)} {name} log-probs for {expected} tokens", hint="is the dump of one kind?")
        if said and mask is not None and name == "decode":  # a tool's tokens were not generated: the dump fills in zeros
            said = tuple(one if keep else None for one, keep in zip(said, mask, strict=True))
        found[name] = said
    left_out = frozenset(k for k, keep in enumerate(mask or ()) if not keep)
    return Sample(where, row, start, **found, **more, masked=left_out)


def ended(said: Any) -> bool | None:
    """Whether a finish reason or a status is one of a response that ended by itself; None for what is neither that nor its opposite."""
    word = str(said.get("type") if isinstance(said, dict) else said).lower()
    return True if word in ("stop", "completed", "eos") else False if word in ("length", "truncated", "abort", "aborted") else None


def ids_of(values: Any, where: str) -> tuple[int, ...]:
    """Token ids.  Raises UsageError for anything else."""
    if not isinstance(values, list | tuple) or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in values):
        raise UsageError(f"{where}: its tokens are not a list of ids")
    return tuple(values)


def logs_of(values: Sequence[Any], what: str) -> Logs:
    """Log-probs as numbers, whether bare, as SGLang's [log-prob, id, text] or as vLLM's {"logprob": ..}."""
    found: list[float | None] = []
    for value in values:
        if isinstance(value, list | tuple) and value:
            value = value[0]
        elif isinstance(value, dict):
            value = value.get("logprob")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UsageError(f"{what} hold {value!r}, which is no number")
        found.append(None if value is None else float(value))
    return tuple(found)
