"""A Recording is what one side said for one batch: a directory that any program can read (format: golden/README.md).

`recording.json` says where it came from; `<group>.safetensors` files, one a layer, hold the tensors.  Tensors are
[tokens, features] with the real tokens of prompt after prompt, except the probed experts, which are [experts, rows, features].
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError, first_line
from bisect_hooks.shard_file import FUSED
from bisect_hooks.site import parse_site
from bisect_hooks.tap import split_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bisect_tool.noise import Noise
from bisect_tool.prompts import Batch

SCHEMA = "bisect-tool/recording/1"
PAGE = "recording.json"
NOISE = "noise.safetensors"
# kept by expert, and not by token
PROBED = re.compile(r"layers\.\d+\.experts\.fc[12](:rows)?$")
# why a key is absent that its side can't have: such are not expected
NOWHERE = "the imported dump has no such site in any layer"
UNHEARD = (FUSED, NOWHERE)


@dataclass(frozen=True)
class Provenance:
    """Where a Recording came from.

    rows               token ids of each prompt
    fingerprint        tells the weights of a reference from others
    replica_difference relative rms between replicas, for keys where they were not bit-equal
    floor, free_floor  relative rms a re-evaluation of the same function differs by (grafted, free-running), by key
    free_tokens        how far off the worst token of a free re-evaluation is, in units of the usual token, by key
    worst              the largest a row, a column and the scale of a re-evaluation are, in units of the noise kept in noise.safetensors;
                       and the factor that rounding one constant makes
    positions          position of each token of each row, where it was recorded
    packed             what a packed batch said of itself (cu_seqlens, ..), where rows were packed into one sequence
    absent             keys that were expected and are not here, and why
    imported           the foreign format it comes from
    decoded            of each row, the first token that came out of a decode step; () where all were computed in one pass
    rounded            tensors that the candidate stores in a dtype the reference was rounded to, and which
    layouts            how a key's tensor lay on the ranks it was put together from
    """

    side: str
    family: str
    model: str
    dtype: str
    rows: tuple[tuple[int, ...], ...]
    parallel: Mapping[str, Any] = field(default_factory=dict)
    layout: str = ""
    grafted: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    fingerprint: str = ""
    replica_difference: Mapping[str, float] = field(default_factory=dict)
    floor: Mapping[str, float] = field(default_factory=dict)
    free_floor: Mapping[str, float] = field(default_factory=dict)
    free_tokens: Mapping[str, float] = field(default_factory=dict)
    worst: Mapping[str, tuple[float, float, float, float]] = field(default_factory=dict)
    positions: tuple[tuple[int, ...], ...] = ()
    packed: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    imported: str = ""
    decoded: tuple[int, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)
    rounded: Mapping[str, str] = field(default_factory=dict)


# fields that are written only where they say something
OPTIONAL = ("positions", "packed", "absent", "imported", "decoded", "layouts", "rounded")


class Recording:
    """Reads a recording directory lazily."""

    def __init__(self, path: Path) -> None:
        page = path / PAGE
        if not page.is_file():
            raise UsageError(f"{path} is no recording: it has no {PAGE}")
        try:
            found = json.loads(page.read_text())
            if found.pop("schema", None) != SCHEMA:
                raise UsageError(f"{page}: schema is not {SCHEMA}", hint="was it written by another version?")
            self.files: dict[str, str] = found.pop("keys")
            found["rows"] = tuple(map(tuple, found["rows"]))
            found["positions"] = tuple(map(tuple, found.get("positions", ())))
            found["decoded"] = tuple(found.get("decoded", ()))
            self.provenance = Provenance(**found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{page} is damaged: {first_line(error)}") from error
        outside = [name for name in self.files.values() if Path(name).name != name]
        if outside:
            raise UsageError(f"{page} names {outside[0]!r}, a path that leaves the directory; refused")
        self.path = path
        self._files: dict[str, Any] = {}

    @property
    def batch(self) -> Batch:
        return Batch(self.provenance.rows)

    @property
    def keys(self) -> list[str]:
        """In compute order."""
        return in_order(self.files)

    def __contains__(self, key: str) -> bool:
        return key in self.files

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self.files:
            raise UsageError(f"{self.path} has no {key}")
        found = self._read(self.files[key], key)
        if not PROBED.match(key) and len(found) != self.batch.tokens:
            raise UsageError(
                f"{self.path / self.files[key]} is of another recording: {key} has {len(found)} rows, and {PAGE} {self.batch.tokens} tokens",
                hint="record it again",
            )
        return found

    def width(self, key: str) -> tuple[int, ...]:
        """The shape of a key's tensor behind its tokens, unread."""
        with self._opened(self.files[key]) as file:
            return tuple(file.get_slice(key).get_shape()[1:])

    def noise(self, key: str) -> Noise | None:
        """The reference's own noise at a key, where it was measured by row and column."""
        if key not in self.provenance.worst:
            return None
        rows, columns = (self._read(NOISE, f"{key}|{axis}") for axis in ("rows", "columns"))
        worst = self.provenance.worst[key]
        if len(worst) != 4:
            raise UsageError(f"{self.path} keeps {len(worst)} statistics of its noise, this version asks for 4", hint="record it again")
        if not all(bool(one.isfinite().all()) for one in (rows, columns)) or not all(map(math.isfinite, worst)):
            raise UsageError(
                f"{self.path} keeps a noise at {key} that is not finite, so nothing says what is allowed", hint="record it again"
            )
        return Noise(rows, columns, *worst)

    def _read(self, name: str, key: str) -> torch.Tensor:
        with self._opened(name) as file:
            return file.get_tensor(key)  # type: ignore[no-any-return]

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """One file, its header parsed once: a judge asks for hundreds of keys, one by one."""
        file = self.path / name
        try:
            if name not in self._files:
                self._files[name] = safe_open(file, framework="pt")
            yield self._files[name]
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file} can't be read: {error}") from error


class Writer:
    """Writes groups as they come; `recording.json` comes last, so half a recording is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, str] = {}

    def add(self, group: str, tensors: Mapping[str, torch.Tensor]) -> None:
        if not tensors:
            return
        file = f"{group}.safetensors"
        number = 0
        while (self.path / file).exists():
            number += 1
            file = f"{group}.{number}.safetensors"
        contiguous = {key: tensors[key].contiguous() for key in sorted(tensors)}
        # one metadata key: with several, safetensors writes them in another order every time
        save_file(contiguous, self.path / file, metadata={"format": "pt"})
        self.keys |= dict.fromkeys(contiguous, file)

    def add_noise(self, noises: Mapping[str, Noise]) -> None:
        found = {f"{key}|{axis}": getattr(noise, axis).contiguous() for key, noise in noises.items() for axis in ("rows", "columns")}
        save_file(found, self.path / NOISE, metadata={"format": "pt"})

    def close(self, provenance: Provenance) -> None:
        said = {name: value for name, value in asdict(provenance).items() if value or name not in OPTIONAL}
        page = {"schema": SCHEMA, **said, "keys": {key: self.keys[key] for key in in_order(self.keys)}}
        (self.path / PAGE).write_text(json.dumps(page, indent=1, sort_keys=True) + "\n")


@contextmanager
def writing(path: Path) -> Iterator[Writer]:
    """A Writer whose directory is there only when the block ended well.  Raises UsageError for a directory in use."""
    path = path.resolve()
    if path.exists():
        held = {entry.name for entry in path.iterdir()} if path.is_dir() else {path.name}
        foreign = {name for name in held if name != PAGE and not name.endswith(".safetensors")}
        if foreign or (held and PAGE not in held):
            raise UsageError(f"{path} holds something else ({sorted(foreign or held)[0]})", hint="give an empty or new directory")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield Writer(partial)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def group_of(key: str) -> str:
    """The file a key lives in: one a layer, one for what is outside the layers."""
    site = parse_site(split_key(key)[0])
    return f"layers.{site.layer:03d}" if site.in_layer else "outside"


def kind_of(key: str) -> str:
    """A key without its layer."""
    return ".".join(key.split(".")[2:]) if key.startswith("layers.") else key


def by_group(keys: Iterable[str]) -> dict[str, list[str]]:
    """Keys by the file they live in."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(group_of(key), []).append(key)
    return groups


def in_order(keys: Iterable[str]) -> list[str]:
    """Keys in compute order of their sites."""

    def order(key: str) -> tuple[Any, str]:
        site, piece = split_key(key)
        return parse_site(site).order, piece

    return sorted(keys, key=order)
