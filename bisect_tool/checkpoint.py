"""A Megatron checkpoint as the rest of the tool sees it: tensors by global name, unread, and the candidate's own words.

Readers differ by format (`torch_dist.py`, `legacy.py`); what they give back does not.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout

from bisect_tool.places import Stored

TRACKER = "latest_checkpointed_iteration.txt"
Format = Literal["torch_dist", "legacy"]


@dataclass(frozen=True)
class Checkpoint:
    """tensors  the model's tensors by global key, layers and experts counted globally
    skipped  entries that are no weights (byte entries, optimizer state), by key, with the reason
    common   what the ranks have in common: args, iteration
    """

    path: Path
    format: Format
    tensors: Mapping[str, Stored] = field(repr=False)
    skipped: Mapping[str, str] = field(repr=False, default_factory=dict)
    common: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @cached_property
    def args(self) -> dict[str, Any]:
        """The candidate's own words: args in the checkpoint, else the config file beside it; empty when there is neither."""
        args = self.common.get("args")
        if args is None:
            return beside(self.path)
        if isinstance(args, dict):
            return dict(args)
        if not hasattr(args, "__dict__"):
            raise UsageError(f"{self.path} keeps args as a {type(args).__name__}, not as a table")
        return dict(vars(args))

    @cached_property
    def core_reads(self) -> bool:
        """Whether the megatron-core that is installed loads it: torch_dist with a common.pt, one tensor a key."""
        whole = all(stored.on_disk == name for name, stored in self.tensors.items())
        return self.format == "torch_dist" and (self.path / "common.pt").is_file() and whole

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """What each tensor is stored as."""
        return {name: stored.dtype for name, stored in self.tensors.items()}

    @property
    def iteration(self) -> int | None:
        found = self.common.get("iteration")
        return found if isinstance(found, int) else None

    @cached_property
    def layout(self) -> CheckpointLayout:
        """Read off the keys alone."""
        return "slime" if any(".self_attention.linear_attn." in key for key in self.tensors) else "native"

    def tensor(self, key: str) -> Stored:
        """One tensor, unread.  Raises UsageError for a key that is not there, or pieces that don't cover it."""
        if key not in self.tensors:
            near = difflib.get_close_matches(key, self.tensors, n=3)
            raise UsageError(f"{self.path} has no tensor {key}", hint=f"nearest: {', '.join(near) or 'none'}")
        stored = self.tensors[key]
        if not stored.covered:
            raise UsageError(
                f"{self.path}: the chunks of {stored.on_disk} do not cover its {stored.shape} once each",
                hint="was every rank's file copied?",
            )
        return stored

    def read(self, key: str) -> torch.Tensor:
        """A whole global tensor, a copy of its own."""
        return self.tensor(key).read()

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key in self.tensors:
            yield key, self.read(key)


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint of either format without reading a tensor.  Raises UsageError naming what is missing or damaged."""
    from bisect_tool.legacy import is_legacy, open_legacy
    from bisect_tool.torch_dist import open_torch_dist

    root = find_checkpoint(path)
    return open_legacy(root) if is_legacy(root) else open_torch_dist(root)


def find_checkpoint(path: Path) -> Path:
    """The directory with `.metadata` or `mp_rank_*`: this one, the one its tracker file names, or verl's `dist_ckpt` in it."""
    from bisect_tool.legacy import is_legacy

    if not path.is_dir():
        raise UsageError(f"{path} is not a directory", hint="give the checkpoint's directory (the one with .metadata, or its parent)")

    def found(root: Path) -> bool:
        return (root / ".metadata").is_file() or is_legacy(root)

    for inner in (path, path / "dist_ckpt", path / "actor" / "dist_ckpt"):
        if inner.is_dir() and found(inner):
            return inner
    tracker = path / TRACKER
    if tracker.is_file():
        word = tracker.read_text(errors="replace").strip()
        if word != "release" and not (word.isascii() and word.isdigit()):
            raise UsageError(f"{tracker} says {word[:40]!r}, neither `release` nor an iteration")
        names = [word] if word == "release" else [f"iter_{int(word):07d}", f"global_step_{int(word)}", f"global_step_{int(word)}/actor"]
        for name in names:
            for inner in (path / name, path / name / "dist_ckpt"):
                if inner.is_dir() and found(inner):
                    return inner
        raise UsageError(f"{tracker} names {names[0]}, which has no .metadata and no mp_rank_*", hint="is the checkpoint complete?")
    seen = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing"
    if (path / "config.json").is_file():
        seen += ": a Hugging Face directory, which goes to --reference or --export"
    raise UsageError(
        f"{path} is no Megatron checkpoint: no .metadata (torch_dist), no mp_rank_* (legacy) and no {TRACKER} in it",
        hint=f"it holds {seen}",
    )


def beside(path: Path) -> dict[str, Any]:
    """The config that lies beside a checkpoint without args, in Megatron's argument names; empty when none does.

    Megatron-Bridge writes run_config.yaml into the iteration's directory, verl transformer_config.json beside `dist_ckpt`.
    """
    from bisect_tool.launch.read import read_launch

    for file in (folder / name for folder in (path, path.parent) for name in ("run_config.yaml", "transformer_config.json")):
        if file.is_file():
            return dict(read_launch(file).args)
    return {}
