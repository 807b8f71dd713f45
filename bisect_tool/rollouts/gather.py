"""All evidence of an engine, read, asked for and checked before any work is done: what can be refused is refused here."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_hooks.family import Dimensions, Family
from bisect_hooks.hf import Tokenizer

from bisect_tool.hf_directory import HuggingFaceDirectory, open_hf
from bisect_tool.ladder import check_device
from bisect_tool.recording import Recording
from bisect_tool.rollouts import evidence, server, tokens
from bisect_tool.rollouts.evidence import Evidence
from bisect_tool.rollouts.listings import Listing, read_hashes, read_names
from bisect_tool.rollouts.sample import Sample
from bisect_tool.unknown import family_in
from bisect_tool.unshard import opened


@dataclass
class Gathered:
    """What an engine left, as objects.  names: (supplied by the sync, taken by the engine)"""

    asked: Evidence
    directory: HuggingFaceDirectory
    family: Family
    dims: Dimensions
    tokenizer: TextOrIds
    samples: list[Sample] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)
    names: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    recordings: list[Recording] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    open: ExitStack = field(default_factory=ExitStack)


def gather(asked: Evidence) -> Gathered:
    """Files are read, a server is asked.  Raises UsageError."""
    asked.check()
    directory = open_hf(asked.reference)
    family = family_in(directory)
    check_device(asked.device)
    dims = family.reference_dimensions(directory.config)
    found = Gathered(asked, directory, family, dims, TextOrIds(asked.reference))
    if asked.hashes:
        found.listings = read_hashes(list(asked.hashes))
    if asked.received and asked.consumed:
        found.names = read_names(asked.received), read_names(asked.consumed)
    found.recordings = [found.open.enter_context(opened(path)) for path in asked.recordings]
    read = evidence.read(asked, found.tokenizer.encode)
    found.samples = evidence.checked(read.samples, dims.vocabulary)
    found.skipped, found.notes = read.skipped, read.notes
    if asked.server is not None:
        _ask(asked.server, read.prompts, found)
    return found


def _ask(url: str, prompts: list[Any], found: Gathered) -> None:
    """The samples with the server's prefill beside them, and its answers to prompts that had none."""
    met = server.meet(url)
    found.notes.append(f"{met.url} is {met.kind} serving {met.model}")
    encode = found.tokenizer.encode
    answered = [met.answer(prompt, f"prompt {number} answered by the server", encode) for number, prompt in enumerate(prompts)]
    found.samples = evidence.checked([met.score(sample) for sample in (*found.samples, *answered)], found.dims.vocabulary)


class TextOrIds:
    """The reference's tokenizer, loaded when something is text.  Without one, text can't be read and ids are shown as ids."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.there = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"))
        self._loaded: Tokenizer | None = None

    @property
    def loaded(self) -> Tokenizer:
        if self._loaded is None:
            self._loaded = Tokenizer(self.path)
        return self._loaded

    def encode(self, text: Any, opens: bool) -> list[int]:
        if not opens:
            return self.loaded.plain(str(text))
        return tokens.expected_ids(text, self.loaded)

    def text(self, ids: list[int]) -> str:
        return self.loaded.text(ids) if self.there else " ".join(map(str, ids))
