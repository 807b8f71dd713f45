"""Everything that a `bisect-tool rollout` was given, read and checked before the reference is loaded."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_hooks.errors import UsageError

from bisect_tool.faults import counted, verb
from bisect_tool.rollouts import dumps, lines
from bisect_tool.rollouts.sample import Sample

DUMPS, LINES = (".pt", ".pth"), (".jsonl", ".json")
# empty responses that are named
NAMED = 8


@dataclass(frozen=True)
class Evidence:
    """What the command line named.  base: the command and what it reads beside this evidence, to be written before more flags"""

    reference: Path
    rollouts: tuple[Path, ...] = ()
    train: tuple[Path, ...] = ()
    server: str | None = None
    hashes: tuple[Path, ...] = ()
    export: Path | None = None
    received: Path | None = None
    consumed: Path | None = None
    samples: int | None = None
    recordings: tuple[Path, ...] = ()
    device: str = "cpu"
    strict: bool = False
    command: str = ""
    base: str = ""
    progress: Callable[[str], None] = lambda _text: None

    def check(self) -> None:
        """Raises UsageError for evidence that is none, or half of what it needs."""
        if not (self.rollouts or self.hashes or self.received or self.recordings):
            raise UsageError(
                "nothing to hold against the reference",
                hint="give --rollout FILE, --rollout-recording DIR, --hashes FILE, or --received FILE with --consumed FILE",
            )
        if (self.received is None) != (self.consumed is None):
            raise UsageError("give --received and --consumed together: names that were supplied, and names that were taken")
        if self.samples is not None and not self.rollouts:
            raise UsageError("--samples chooses among the responses of --rollout FILE")
        if not self.rollouts and (self.train or self.server):
            raise UsageError("--train and --server go with --rollout FILE", hint="a JSONL file of prompts will do for --server")

    def rerun(self, flags: str) -> str:
        """The same command with more flags."""
        files = [word for path in self.rollouts for word in ("--rollout", shlex.quote(str(path)))]
        base = self.base or f"bisect-tool rollout --reference {shlex.quote(str(self.reference))}"
        return " ".join([base, *files, flags])


@dataclass
class Read:
    """Samples of every file, and what to say about them."""

    samples: list[Sample] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    text_only: bool = False


def read(evidence: Evidence, encode: lines.Encode) -> Read:
    """Every file, the trainer's log-probs beside them.  Raises UsageError."""
    found = Read()
    empty: list[str] = []
    for path in files(evidence.rollouts):
        if path.suffix in DUMPS:
            samples, without = dumps.read_rollout(path)
        else:
            samples, prompts, without = lines.read_lines(path, encode)
            found.prompts += prompts
        found.samples += samples
        empty += without
    if found.prompts and evidence.server is None:
        raise UsageError(
            f"{len(found.prompts)} lines have a prompt and no response", hint="give --server URL to have an engine answer them"
        )
    if evidence.rollouts and not found.samples and not found.prompts:
        raise UsageError(f"{evidence.rollouts[0]} holds no response", hint="were all of them aborted?")
    if empty:
        count = counted(len(empty), "response", of=len(empty) + len(found.samples))
        more = f" and {len(empty) - NAMED} more" if len(empty) > NAMED else ""
        found.skipped.append((count, f"{verb(len(empty), 'it has', 'they have')} no token: {', '.join(empty[:NAMED])}{more}"))
    if evidence.samples is not None and len(found.samples) > evidence.samples:
        step = len(found.samples) / evidence.samples
        found.skipped.append((f"{len(found.samples) - evidence.samples} of {len(found.samples)} responses", "left out by --samples"))
        found.samples = [found.samples[int(i * step)] for i in range(evidence.samples)]
    if evidence.train:
        found.samples, spare = dumps.join_train(found.samples, files(evidence.train))
        joined = sum(bool(sample.trained) for sample in found.samples)
        found.notes.append(
            f"the trainer's log-probs were found for {joined} of {len(found.samples)} responses"
            + (f"; {spare} train rows have no response here" if spare else "")
        )
    found.text_only = any(not sample.exact for sample in found.samples)
    return found


def files(paths: Sequence[Path]) -> list[Path]:
    """The files, directories opened (verl writes one file a step).  Raises UsageError for what is not there."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [one for one in path.iterdir() if one.suffix in (*DUMPS, *LINES)]
            if not inside:
                raise UsageError(f"{path} holds no .pt and no .jsonl file")
            found += sorted(inside, key=lambda one: (int(one.stem) if one.stem.isdecimal() else -1, one.name))
        elif not path.is_file():
            raise UsageError(f"{path}: no such file")
        else:
            found.append(path)
    return found


def checked(samples: Sequence[Sample], vocabulary: int) -> list[Sample]:
    """Raises UsageError for ids that the reference does not have."""
    for sample in samples:
        worst = max(sample.tokens)
        if worst >= vocabulary:
            raise UsageError(
                f"{sample.where} has token id {worst}; the reference's vocabulary has {vocabulary}", hint="is it of another model?"
            )
    return list(samples)
