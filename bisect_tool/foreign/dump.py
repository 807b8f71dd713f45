"""What every reader of a foreign dump yields: named tensors of one forward pass, by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError
from safetensors import SafetensorError
from safetensors.torch import load_file

from bisect_tool.pickles import load_torch


@dataclass(frozen=True, slots=True)
class RankDump:
    """One rank's tensors by module path; a module with several outputs has a number behind its path (`layers.0:1`)."""

    tensors: Mapping[str, torch.Tensor]
    at: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dump:
    """One forward pass of all ranks that left something.

    ids      token ids of the pass, [t] or [b s]     lengths  tokens of each sequence, () for one, or for the rows of [b s]
    sizes    parallel sizes that the dump tells of, {} where it tells of none
    notes    what was left aside
    decoded  the first token that came out of a decode step, where those stand behind the prefill
    """

    ranks: tuple[RankDump, ...]
    ids: torch.Tensor
    lengths: tuple[int, ...] = ()
    positions: torch.Tensor | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    layout: str = ""
    decoded: int | None = None


def read_tensors(file: Path) -> Any:
    """The object in a .pt or .safetensors file.  No pickle is executed.  Raises UsageError."""
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file} can't be read: {error}") from error
    return load_torch(file)


def as_ids(value: Any, where: str) -> torch.Tensor:
    """Token ids as integers.  Raises UsageError where there are none: without them nothing can be aligned."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0 or value.is_floating_point():
        raise UsageError(f"{where} holds no token ids, so nothing can be lined up with it", hint="dump input_ids too")
    return value.long()
