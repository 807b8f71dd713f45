"""Listings that an engine left: its weights by digest (docs/engine-hash.md), names it received, names it consumed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bisect_hooks.errors import UsageError

from bisect_tool.hf_directory import canonical

ROW = re.compile(r"(\S+)\s+\[([\d, ]*)\]\s+(\w+)\s+([0-9a-f]{32})")
HEAD = re.compile(r"#\s*(sync|engine|tp)\s+(\S+)")
# a word of a log that can be a tensor's name: dotted, and not a file or a number
NAME = re.compile(r"(?<![\w./-])[A-Za-z_]\w*(?:\.\w+)+(?![\w/])")
ENDINGS = ("weight", "bias", "A_log", "dt_bias", "gate_up_proj", "down_proj", "w13_weight", "w2_weight")
MADE = ("_scale_inv", "_scale", "_packed", "_shape", "_zero_point")


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor that an engine holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclass(frozen=True)
class Listing:
    """What one rank of one engine held after one sync."""

    source: str
    sync: int = 0
    engine: str = "0"
    tp: int = 1
    rank: int = 0
    rows: dict[str, Row] = field(default_factory=dict)


def read_hashes(paths: list[Path]) -> list[Listing]:
    """Every section of every file, by sync.  A section begins with `# sync N`, `# engine E` or `# tp RANK/SIZE`."""
    found = [listing for path in paths for listing in _sections(path)]
    return sorted(found, key=lambda one: (one.sync, one.engine, one.rank))


def _sections(path: Path) -> Iterator[Listing]:
    said: dict[str, str] = {}
    current: Listing | None = None
    for number, line in enumerate(_lines(path), 1):
        heads = HEAD.findall(line) if line.startswith("#") else []
        if heads:
            if current is not None:
                yield current
                current = None
            said |= dict(heads)
        elif line.strip() and not line.startswith("#"):
            row = ROW.fullmatch(line.strip())
            if row is None:
                raise UsageError(
                    f"{path} line {number} is no line of a hash listing: {line.strip()[:60]!r}",
                    hint="name  [shape]  dtype  digest, as `bisect-tool hash` and docs/engine-hash.md write them",
                )
            current = current or _listing(path, said)
            shape = tuple(int(size) for size in row[2].split(",") if size.strip())
            current.rows[canonical(row[1])] = Row(canonical(row[1]), shape, row[3], row[4])
    if current is not None:
        yield current
    elif not said:
        raise UsageError(f"{path} lists no tensors")


def _listing(path: Path, said: dict[str, str]) -> Listing:
    rank, _, size = said.get("tp", "0/1").partition("/")
    try:
        listing = Listing(str(path), int(said.get("sync", 0)), said.get("engine", "0"), int(size or 1), int(rank))
    except ValueError:
        raise UsageError(f"{path}: a section is headed by no numbers ({said})", hint="# sync 1, # engine 0, # tp 0/4") from None
    if not 0 <= listing.rank < listing.tp:
        raise UsageError(f"{path}: # tp {said['tp']} is no rank of that size", hint="# tp 0/4 to # tp 3/4")
    return listing


def read_names(path: Path) -> tuple[str, ...]:
    """Tensor names of a listing or a log, each once.  Raises UsageError when there are none."""
    names: dict[str, None] = {}
    for line in _lines(path):
        for word in NAME.findall(line):
            if word.split(".")[-1] in ENDINGS or word.endswith(MADE):
                names[word] = None
    if not names:
        raise UsageError(f"{path} names no tensor", hint="a log or a list with names such as model.layers.0.mlp.gate.weight")
    return tuple(names)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        return path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text: {error}") from error
