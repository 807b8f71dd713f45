"""Tensors of a batch kept on disk, a few prompts' worth a file: all that a model says of them is more than memory need hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


class Spilled(Mapping[str, torch.Tensor]):
    """key → [tokens f], all parts of the batch one after another; `part` gives one of them with every key."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.files: list[Path] = []
        self.keys_of_parts: tuple[str, ...] = ()

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes the next part, which has the keys of the parts before it."""
        file = self.folder / f"{len(self.files)}.safetensors"
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, file)
        self.keys_of_parts = tuple(tensors)
        self.files.append(file)

    def drop(self, keys: Iterable[str]) -> None:
        """Forgets keys, as those that some part lacks."""
        gone = set(keys)
        self.keys_of_parts = tuple(key for key in self.keys_of_parts if key not in gone)

    def part(self, number: int, device: torch.device) -> dict[str, torch.Tensor]:
        return load_file(self.files[number], device=str(device))

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self.keys_of_parts:
            raise KeyError(key)
        found = []
        for file in self.files:
            with safe_open(file, framework="pt") as opened:
                found.append(opened.get_tensor(key))
        return found[0] if len(found) == 1 else torch.cat(found)

    def __contains__(self, key: object) -> bool:
        return key in self.keys_of_parts  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_of_parts)

    def __len__(self) -> int:
        return len(self.keys_of_parts)
