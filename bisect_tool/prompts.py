"""Prompts, and the batch of token ids that both sides are given."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError

KEYS = ("input_ids", "prompt", "text", "messages")
# letters of a wrong value that are shown
SHOWN = 60
# tokens of one forward, padding counted: everything that is said in it is held at once
FORWARD_TOKENS = 512
# padding on the left goes up to the next multiple of this, whatever a layout wants sequences to divide by
LEFT = 16


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids of every prompt.  Padded to the right when made a tensor, or to the left; padding is never compared.

    width  the least length of a padded row: positions count from its start, so on the left it is the same in every part
    """

    rows: tuple[tuple[int, ...], ...]
    pad: int = 0
    left: bool = False
    width: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(row) for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()

    def padded_left(self) -> Batch:
        """The same prompts with padding before every one of them."""
        return replace(self, left=True, width=(max(self.lengths) // LEFT + 1) * LEFT)

    def padded_right(self) -> Batch:
        return replace(self, left=False, width=0)

    def _real(self, row: int, length: int) -> slice:
        """Where the real tokens of a row stand."""
        count = len(self.rows[row % len(self.rows)])
        return slice(length - count, length) if self.left else slice(0, count)

    def ids(self, rows: int = 0, length: int = 0) -> torch.Tensor:
        """[b s], prompts repeated to `rows` rows and padded to `length` when those are given."""
        rows, length = max(rows, len(self.rows)), max(length, self.width, *self.lengths)
        padded = torch.full((rows, length), self.pad)
        for i in range(rows):
            padded[i, self._real(i, length)] = torch.tensor(self.rows[i % len(self.rows)])
        return padded

    def mask(self, length: int = 0, rows: int = 0) -> torch.Tensor:
        """[b s], 1 where a token is real."""
        rows, length = max(rows, len(self.rows)), max(length, self.width, *self.lengths)
        mask = torch.zeros(rows, length, dtype=torch.long)
        for i in range(rows):
            mask[i, self._real(i, length)] = 1
        return mask

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """[b s ...] → [tokens ...]: real tokens only, prompt after prompt; repeated prompts are dropped."""
        return torch.cat([padded[i, self._real(i, padded.shape[1])] for i in range(len(self.rows))])

    def unpack(self, packed: torch.Tensor, rows: int, length: int) -> torch.Tensor:
        """[tokens ...] → [b s ...], with prompts repeated to `rows`.

        Padding behind a row is zero, which nothing real can see; before a row it is what the first token has, which nothing may see.
        """
        padded = packed.new_zeros(rows, length, *packed.shape[1:])
        parts = packed.split(list(self.lengths))
        for i in range(rows):
            part = parts[i % len(parts)]
            if self.left:
                padded[i] = part[0]
            padded[i, self._real(i, length)] = part
        return padded

    def parts(self, most: int | None = None) -> list[tuple[int, Batch]]:
        """Consecutive rows that make at most `most` tokens with their padding (always one row), each with its first token's number.

        most  FORWARD_TOKENS where it is None
        """
        most = FORWARD_TOKENS if most is None else most
        parts: list[list[tuple[int, ...]]] = []
        widest = 0
        for row in self.rows:
            widest = max(widest, self.width, len(row))
            if not parts or (len(parts[-1]) + 1) * widest > most:
                parts.append([])
                widest = max(self.width, len(row))
            parts[-1].append(row)
        starts = [0]
        for rows in parts[:-1]:
            starts.append(starts[-1] + sum(map(len, rows)))
        return [(start, replace(self, rows=tuple(rows))) for start, rows in zip(starts, parts, strict=True)]

    def where(self, token: int) -> tuple[int, int]:
        """(prompt, position) of a packed token."""
        for i, n in enumerate(self.lengths):
            if token < n:
                return i, token
            token -= n
        raise IndexError(token)


def read_prompts(path: str, key: str | None = None) -> list[Any]:
    """Prompts of a text file (one a line), a JSONL file or "-" for standard input: strings, message lists or id lists."""
    if path == "-":
        text, jsonl = sys.stdin.read(), False
    else:
        file = Path(path)
        if not file.is_file():
            raise UsageError(f"{path}: {'a directory, not a' if file.is_dir() else 'no such'} prompts file")
        try:
            text = file.read_text()
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is no text: {error}") from error
        jsonl = file.suffix in (".jsonl", ".json")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{path} holds no prompts", hint="one prompt a line, or JSONL with prompt, messages, text or input_ids")
    jsonl = jsonl or (path == "-" and lines[0][1].lstrip().startswith("{"))
    return [_prompt_of(path, number, line, key) for number, line in lines] if jsonl else [line for _, line in lines]


def _prompt_of(path: str, number: int, line: str, key: str | None) -> Any:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path} line {number} is not JSON: {error}") from error
    found = next((name for name in ((key,) if key else KEYS) if isinstance(record, dict) and record.get(name) is not None), None)
    if found is None:
        seen = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise UsageError(
            f"{path} line {number} has none of {', '.join((key,) if key else KEYS)}", hint=f"it has {seen}; name another with --input-key"
        )
    value = record[found]
    if isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        if not value:
            raise UsageError(f"{path} line {number}: {found} is empty")
        return value
    if found == KEYS[0]:
        shown = json.dumps(value)
        raise UsageError(
            f"{path} line {number}: {found} is no list of token ids (whole numbers): {shown if len(shown) <= SHOWN else shown[:SHOWN] + ' ..'}",
            hint="text goes under prompt" if isinstance(value, str) else "",
        )
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        return value
    raise UsageError(f"{path} line {number}: {found} is neither text, messages nor token ids")


def make_batch(prompts: list[Any], tokenizer: Any, *, vocabulary: int, positions: int | None) -> Batch:
    """Tokenises and checks.  `tokenizer` is asked for only when a prompt is text (a callable that loads it).

    Raises UsageError for no tokenizer, an empty prompt, ids out of range, or a prompt longer than the model's positions.
    """
    loaded: Any = tokenizer() if any(not _is_ids(prompt) for prompt in prompts) else None
    rows = []
    for number, prompt in enumerate(prompts):
        ids = prompt if _is_ids(prompt) else loaded.ids(prompt)
        if not ids:
            raise UsageError(f"prompt {number} has no tokens")
        worst = max(ids, key=lambda token: token if token >= 0 else vocabulary - token)
        if not 0 <= worst < vocabulary:
            raise UsageError(f"prompt {number} has token id {worst}; the vocabulary has {vocabulary} (0 to {vocabulary - 1})")
        if positions is not None and len(ids) > positions:
            raise UsageError(
                f"prompt {number} has {len(ids)} tokens, the model {positions} positions", hint="shorten it, or drop it from the file"
            )
        rows.append(tuple(ids))
    return Batch(tuple(rows))


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
