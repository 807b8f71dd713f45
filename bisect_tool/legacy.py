"""Megatron's legacy format: one `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` a rank, its tensors cut and its layers counted locally."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_hooks.errors import UsageError
from bisect_hooks.table import Made, Rule

from bisect_tool.checkpoint import Checkpoint
from bisect_tool.compare import same_tensor
from bisect_tool.places import Piece, Shape, Stored
from bisect_tool.torch_file import Placed, open_torch

FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
FILE = "model_optim_rng.pt"
CHUNK = re.compile(r"model(\d*)")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EXPERT = (
    re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(linear_fc[12]\.\w+)"),
    re.compile(r"(.*\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)"),
)
EMBEDDING = "embedding.word_embeddings.weight"
NOT_WEIGHTS = ("_extra_state",)
Rank = tuple[int, int, int]


@dataclass(frozen=True)
class LegacyCheckpoint(Checkpoint):
    """ranks  (tp, pp, ep) → chunk → the tensors of one rank by their local names, unread

    Its `tensors` are those of every rank by folder; `joined` makes global ones of them.
    """

    ranks: Mapping[Rank, Mapping[int, Mapping[str, Placed]]] = field(repr=False, default_factory=dict)

    @property
    def holds_mtp(self) -> bool:
        return any("mtp.layers." in key for key in self.tensors)

    def joined(self, rules: Sequence[Rule], shapes: Mapping[str, Shape]) -> Checkpoint:
        """The checkpoint with global tensors.  shapes: what each made tensor should be, which is how packed rows are told apart"""
        ranks = _Ranks(self.path, self.ranks)
        found = {made.name: stored for rule in rules for made in rule.candidates if (stored := ranks.join(rule, made, shapes)) is not None}
        found |= ranks.left_over()
        return Checkpoint(self.path, "legacy", found, self.skipped, self.common)


def is_legacy(root: Path) -> bool:
    """Whether a directory holds ranks' folders."""
    return any(FOLDER.fullmatch(entry.name) for entry in root.glob("mp_rank_*"))


def open_legacy(root: Path) -> LegacyCheckpoint:
    """Opens every rank's file without reading a tensor.  Raises UsageError naming a file that is missing or damaged."""
    folders = {entry: match for entry in sorted(root.glob("mp_rank_*")) if (match := FOLDER.fullmatch(entry.name))}
    pages = {}
    for folder in folders:
        if not (folder / FILE).is_file():
            raise UsageError(f"{folder} has no {FILE}", hint="was every rank's folder copied?")
        pages[folder] = open_torch(folder / FILE)
        if not isinstance(pages[folder], dict):
            raise UsageError(f"{folder / FILE} holds a {type(pages[folder]).__name__}, not a table")
    first = next(iter(pages.values()))
    args = getattr(first.get("args"), "__dict__", {})
    ranks, tensors, skipped = {}, {}, {}
    for folder, match in folders.items():
        rank = _rank(match, args)
        chunks: dict[int, dict[str, Placed]] = {}
        for key, entry in pages[folder].items():
            chunk = CHUNK.fullmatch(str(key))
            if chunk and isinstance(entry, dict):
                held = chunks.setdefault(int(chunk[1] or 0), {})
                for name, placed in entry.items():
                    if isinstance(placed, Placed) and not any(word in name for word in NOT_WEIGHTS):
                        name = name.removeprefix("module.").replace(".mtp_model_layer.", ".transformer_layer.")  # as 0.19 calls it
                        held[name] = placed
                        tensors[f"{folder.name}/{key}/{name}"] = _bare(f"{folder.name}/{key}/{name}", placed)
            elif key == "optimizer":
                skipped[f"{folder.name}/{key}"] = "optimizer state"
        if not any(chunks.values()):
            raise UsageError(f"{folder / FILE} holds no model tensors (keys: {', '.join(map(str, pages[folder]))[:80]})")
        ranks[rank] = chunks
    _complete(root, ranks)
    common = {key: value for key, value in first.items() if not CHUNK.fullmatch(str(key)) and key != "optimizer"}
    return LegacyCheckpoint(root, "legacy", tensors, skipped, common, ranks)


def _rank(match: re.Match[str], args: Mapping[str, Any]) -> Rank:
    """The folder's numbers; a second number alone is the stage, unless the args say that there is one stage and several EP ranks."""
    tp, second, third = int(match[1]), match[2], match[3]
    if third is not None:
        return tp, int(second), int(third)
    if second is None:
        return tp, 0, 0
    expert = int(args.get("expert_model_parallel_size") or 1) > 1 and int(args.get("pipeline_model_parallel_size") or 1) == 1
    return (tp, 0, int(second)) if expert else (tp, int(second), 0)


def _complete(root: Path, ranks: Mapping[Rank, Any]) -> None:
    tps, pps = (max(rank[axis] for rank in ranks) + 1 for axis in range(2))
    for tp in range(tps):
        for pp in range(pps):
            if not any(rank[:2] == (tp, pp) for rank in ranks):
                raise UsageError(f"{root} has no folder of tensor rank {tp}, pipeline rank {pp}", hint="was every rank's folder copied?")


def _bare(name: str, placed: Placed) -> Stored:
    return Stored(name, placed.shape, placed.dtype, (Piece((0,) * len(placed.shape), placed.shape, placed.file, placed.start),))


class _Ranks:
    """Joins ranks' tensors; remembers which it took."""

    def __init__(self, root: Path, ranks: Mapping[Rank, Mapping[int, Mapping[str, Placed]]]) -> None:
        self.root, self.ranks = root, ranks
        self.tps, self.pps = (max(rank[axis] for rank in ranks) + 1 for axis in range(2))
        self.chunks = max(max(chunks) for chunks in ranks.values()) + 1
        self.taken: set[tuple[Rank, int, str]] = set()
        self.sizes = [self._layers(stage, chunk) for chunk in range(self.chunks) for stage in range(self.pps)]

    def _layers(self, stage: int, chunk: int) -> int:
        """Layers that a stage holds in one of its chunks, counted from its names."""
        held = next(chunks.get(chunk, {}) for rank, chunks in self.ranks.items() if rank[1] == stage)
        return max((int(match[1]) + 1 for name in held if (match := LAYER.fullmatch(name))), default=0)

    def place(self, name: str) -> tuple[int, int, str] | None:
        """(stage, chunk, local name) of a global name: chunk c of stage s is the (c · stages + s)-th run of layers."""
        match = LAYER.fullmatch(name)
        if match is None:
            first = name.startswith("embedding.")
            return (0, 0, name) if first else (self.pps - 1, self.chunks - 1, name)
        layer = int(match[1])
        for run, size in enumerate(self.sizes):
            if layer < size:
                return run % self.pps, run // self.pps, f"decoder.layers.{layer}.{match[2]}"
            layer -= size
        return None

    def join(self, rule: Rule, made: Made, shapes: Mapping[str, Shape]) -> Stored | None:
        for name in (made.name, *(alias for own, alias in rule.aliases if own == made.name)):
            place = self.place(name)
            if place is None:
                continue
            found = self._experts(*place, made, shapes) if made.cut.expert else self._dense(*place, made, shapes)
            if found is not None:
                return found
        return None

    def _held(self, rank: Rank, chunk: int, name: str) -> Placed | None:
        found = self.ranks[rank].get(chunk, {}).get(name)
        if found is not None:
            self.taken.add((rank, chunk, name))
        return found

    def _dense(self, stage: int, chunk: int, local: str, made: Made, shapes: Mapping[str, Shape]) -> Stored | None:
        """One shard a tensor rank (the first expert rank's: the others hold the same)."""
        shards = []
        for tp in range(self.tps):
            ranks = sorted(rank for rank in self.ranks if rank[:2] == (tp, stage))
            held = [self._part(rank, chunk, local, made, shapes) for rank in ranks]
            if not held or held[0] is None:
                return None
            shards.append(held[0])
        pieces, shape = _assembled([(0, shard) for shard in shards], made, "tp")
        return Stored(made.name, shape, shards[0].dtype, pieces, local if local == made.name else f"{made.name} ({local} of stage {stage})")

    def _part(self, rank: Rank, chunk: int, local: str, made: Made, shapes: Mapping[str, Shape]) -> Placed | None:
        found = self._held(rank, chunk, local)
        if found is not None or made.name not in shapes:
            return found
        # native in_proj and conv1d: a rank packs its rows of every part under one name
        packed, _, part = made.name.rpartition(".")
        parts = [name for name in shapes if name.rpartition(".")[0] == packed]
        whole = self._held(rank, chunk, local.rpartition(".")[0])
        if whole is None or part in ("weight", "bias"):
            return None
        rows = [shapes[name][0] // self.tps for name in parts]
        if sum(rows) != whole.shape[0]:
            return None
        before = sum(rows[: parts.index(made.name)])
        size = math.prod(whole.shape[1:]) * whole.dtype.itemsize
        return Placed(whole.file, whole.start + before * size, whole.dtype, (rows[parts.index(made.name)], *whole.shape[1:]))

    def _experts(self, stage: int, chunk: int, local: str, made: Made, shapes: Mapping[str, Shape]) -> Stored | None:
        """Experts one by one, numbered within their rank."""
        prefix, _, weight = local.partition(".experts.experts.")
        numbered: dict[int, dict[int, Placed]] = {}
        eps = sorted({rank[2] for rank in self.ranks if rank[1] == stage})
        count = 0
        for ep in eps:
            for rank in sorted(rank for rank in self.ranks if rank[1:] == (stage, ep)):
                own = 0
                while (placed := self._expert(rank, chunk, prefix, weight, own)) is not None:
                    numbered.setdefault(count + own, {})[rank[0]] = placed
                    own += 1
            count = max(numbered, default=-1) + 1
        if not numbered:
            return None
        pieces: list[Piece] = []
        shape: Shape = ()
        for e, shards in numbered.items():
            held = [(e, shards[tp]) for tp in sorted(shards)]
            whole = held[0][1].shape == shapes.get(made.name, ())[1:]  # expert tensor parallel size 1: every rank holds it whole
            found, shape = _assembled(held[:1] if whole else held, made, "etp")
            pieces += found
        dtype = next(iter(numbered[0].values())).dtype
        return Stored(
            made.name, (len(numbered), *shape), dtype, tuple(pieces), f"{made.name} ({self._name(prefix, weight, 0)} of each rank)"
        )

    def _expert(self, rank: Rank, chunk: int, prefix: str, weight: str, e: int) -> Placed | None:
        return self._held(rank, chunk, f"{prefix}.experts.local_experts.{e}.{weight}") or self._held(
            rank, chunk, f"{prefix}.experts.{weight}{e}"
        )

    def _name(self, prefix: str, weight: str, e: int) -> str:
        sequential = f"{prefix}.experts.local_experts.{e}.{weight}"
        return sequential if any(name == sequential for _, _, name in self.taken) else f"{prefix}.experts.{weight}{e}"

    def left_over(self) -> dict[str, Stored]:
        """Tensors that no row took, by folder and local name."""
        found = {}
        for rank, chunks in self.ranks.items():
            for chunk, held in chunks.items():
                for name, placed in held.items():
                    if (rank, chunk, name) not in self.taken and not self._replica(rank, chunk, name):
                        key = f"{name} (tp {rank[0]}, pp {rank[1]}, ep {rank[2]})"
                        found[key] = _bare(key, placed)
        return found

    def _replica(self, rank: Rank, chunk: int, name: str) -> bool:
        """What is not read because another rank holds the same: expert ranks, and the embedding that a last stage keeps a copy of."""
        if any((other, chunk, name) in self.taken for other in self.ranks if other[1] == rank[1]):
            return True
        if not name.startswith(("embedding.", "output_layer.")):
            return False
        first = next(
            (held.get(EMBEDDING) for other, chunks in self.ranks.items() if other[:2] == (rank[0], 0) for held in chunks.values()), None
        )
        here = self.ranks[rank][chunk][name]
        return first is not None and same_tensor(_bare(name, here), _bare(name, first))


def _assembled(shards: Sequence[tuple[int, Placed]], made: Made, axis: str) -> tuple[tuple[Piece, ...], Shape]:
    """Pieces of a global tensor (or of one expert, with its number in front) and its shape, from the shards of one axis in order."""
    expert = made.cut.expert
    first = shards[0][1]
    cut = next(((dim - expert, parts) for name, dim, parts in made.cut.axes if name == axis), None)
    shape = list(first.shape)
    if cut is None or len(shards) == 1:
        e, placed = shards[0]
        offset = (0,) * len(shape)
        piece = (
            Piece((e, *offset), (1, *shape), placed.file, placed.start)
            if expert
            else Piece(offset, tuple(shape), placed.file, placed.start)
        )
        return (piece,), tuple(shape)
    dim, parts = cut
    local = shape[dim] // parts
    shape[dim] *= len(shards)
    pieces = []
    for i, (e, placed) in enumerate(shards):
        row = math.prod(placed.shape[1:]) * placed.dtype.itemsize
        for part in range(parts):
            at, size = [0] * len(shape), list(placed.shape)
            at[dim], size[dim] = part * local * len(shards) + i * local, local
            start = placed.start + (part * local * row if dim == 0 else 0)
            assert dim == 0 or parts == 1, "columns are never cut part by part"
            here = Piece(tuple(at), tuple(size), placed.file, start)
            pieces.append(Piece((e, *here.offset), (1, *here.shape), here.file, here.start) if expert else here)
    return tuple(pieces), tuple(shape)
