"""A directory of ranks' shards, put together into a Recording by the layouts that its pages name.

What is padding is dropped, packed sequences become rows, context parallel's zigzag is undone, data parallel ranks' batches stand
one after another.  A key whose ranks can't be put together is absent, with the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import BisectError, UsageError
from bisect_hooks.layout import Gathered, parse_layout
from bisect_hooks.parallel import Coordinates, Parallel
from bisect_hooks.shard_file import ShardPage, cut_segments, read_pages
from safetensors import SafetensorError, safe_open

from bisect_tool.recording import PAGE, Provenance, Recording, by_group, writing


@contextmanager
def opened(path: Path) -> Iterator[Recording]:
    """The Recording at `path`, ours or imported; or that of the ranks whose shards it holds."""
    if (path / PAGE).is_file() or not any(path.glob("rank*.json")):
        yield Recording(path)
        return
    with tempfile.TemporaryDirectory(prefix="bisect-unsharded-") as folder:
        yield unshard(path, Path(folder) / "recording")


def unshard(
    directory: Path, out: Path, imported: str = "", decoded: tuple[int, ...] = (), absent: Mapping[str, str] | None = None
) -> Recording:
    """Writes the Recording of all ranks' shards in `directory`.  Raises UsageError for pages that don't belong together.

    imported  the foreign format that the shards were made of · decoded  where decode begins in each row
    absent    keys that were expected of the shards and are in none, and why
    """
    pages = read_pages(directory)
    if not pages:
        raise UsageError(f"{directory} holds no ranks' shards (rank00000.json)")
    absent = {site: why for page in pages for site, why in page.absent.items()} | dict(absent or {})
    lost = sorted(set(range(pages[0].world)) - {page.rank for page in pages})
    if lost:
        absent[f"rank {lost[0]}"] = f"{len(lost)} of {pages[0].world} ranks left no page"
    with ExitStack() as stack:
        replicas = [
            _Replica(directory, [page for page in pages if page.at["dp"] == dp], stack) for dp in sorted({p.at["dp"] for p in pages})
        ]
        rows = [row for replica in replicas for row in replica.rows]
        positions = [row for replica in replicas for row in replica.positions]
        differ: dict[str, float] = {}
        with writing(out) as writer:
            for group, keys in by_group(replicas[0].keys).items():
                tensors = {}
                for key in keys:
                    try:
                        parts = [replica.key(key) for replica in replicas]
                    except BisectError as error:
                        absent[key] = error.message
                        continue
                    tensors[key] = torch.cat([part.tensor for part in parts])
                    worst = max((part.replica_difference for part in parts), key=lambda one: (one != one, one))
                    if worst != 0:
                        differ[key] = worst
                writer.add(group, tensors)
            first = pages[0]
            writer.close(
                Provenance(
                    side=first.side, family=first.family, model=first.model, dtype=first.dtype, rows=tuple(map(tuple, rows)),
                    parallel=dict(first.sizes), layout=first.layout, versions=dict(first.versions), device=first.device,
                    replica_difference=differ, positions=tuple(map(tuple, positions)), packed=dict(first.packed), absent=absent, imported=imported,
                    decoded=decoded,
                    layouts={key: part.layout for page in pages for part in page.taps.values() for key in part.keys if key != "positions"},
                )
            )  # fmt: skip
    return Recording(out)


@dataclass(slots=True)
class _Replica:
    """The ranks of one data parallel replica: a batch of its own."""

    pages: Sequence[ShardPage]
    parallel: Parallel
    files: list[Any]
    holders: dict[str, str]
    segments: Sequence[int]
    index: torch.Tensor
    rows: list[list[int]]
    positions: list[list[int]]

    def __init__(self, directory: Path, pages: Sequence[ShardPage], stack: ExitStack) -> None:
        self.pages, sizes = pages, pages[0].sizes
        # within one replica nothing is cut over dp, and no tap of a forward pass is cut over experts
        self.parallel = Parallel(tp=sizes["tp"], pp=sizes["pp"], cp=sizes["cp"], sp=bool(sizes["sp"]))
        self.files = [_open(directory / page.file, stack) for page in pages]
        self.holders = {key: name for page in pages for name, part in page.taps.items() for key in part.keys}
        packed = next((page.packed for page in pages if page.packed), {})
        self.segments, real = cut_segments(packed) if packed else ((), ())
        if "tokens" not in self.holders:
            raise UsageError(f"{directory}: no rank recorded the token ids", hint="is the first pipeline stage's file there?")
        tokens = self._whole("tokens").tensor
        lengths = next((page.lengths for page in pages if page.lengths), ())
        self.index = _real_tokens(tokens, self.segments, real, lengths)
        count = real or lengths or [tokens.shape[1]] * tokens.shape[0]
        self.rows = [row.tolist() for row in self._picked(tokens).long().flatten().split(list(count))]
        self.positions = []
        if "positions" in self.holders:
            self.positions = [row.tolist() for row in self._picked(self._whole("positions").tensor).long().flatten().split(list(count))]

    @property
    def keys(self) -> list[str]:
        return [key for key in self.holders if key != "positions"]

    def key(self, key: str) -> Gathered:
        """[tokens f] of one key.  Raises BisectError when the ranks can't be put together."""
        whole = self._whole(key)
        return Gathered(self._picked(whole.tensor), whole.replicas, whole.replica_difference)

    def _picked(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten(0, 1)[self.index]

    def _whole(self, key: str) -> Gathered:
        name = self.holders[key]
        shards, part, local = [], None, {}
        for page, file in zip(self.pages, self.files, strict=True):
            if name in page.taps:
                part, local = page.taps[name], dict(page.local)
                shards.append((Coordinates(**page.at), _tensor(file, name, page)))
        assert part is not None
        pieces = part.keys.index(key)
        return list(parse_layout(part.layout).gather(shards, local, self.parallel, self.segments).values())[pieces]


def _open(file: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} can't be read: {error}") from error


def _tensor(file: Any, name: str, page: ShardPage) -> torch.Tensor:
    try:
        return file.get_tensor(name)  # type: ignore[no-any-return]
    except SafetensorError as error:
        raise UsageError(f"{page.file} has no {name}: {error}") from error


def _real_tokens(tokens: torch.Tensor, segments: Sequence[int], real: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Places of real tokens in [b s], flattened."""
    rows, length = tokens.shape[:2]
    if segments:
        starts = [sum(segments[:i]) for i in range(len(segments))]
        return torch.cat([torch.arange(start, start + size) for start, size in zip(starts, real, strict=True)])
    sizes = lengths or [length] * rows
    if len(sizes) != rows or max(sizes) > length:
        raise UsageError(f"{len(sizes)} lengths up to {max(sizes)} for {rows} rows of {length} tokens")
    return torch.cat([torch.arange(i * length, i * length + size) for i, size in enumerate(sizes)])
