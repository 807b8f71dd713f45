"""The candidate as the driver sees it: ranks that build it from its own words, and what they heard put back into one piece.

Does not import megatron; the ranks do.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import BisectError
from bisect_hooks.family import CheckpointLayout, Dimensions, Family, check_sizes
from bisect_hooks.layout import Gathered
from bisect_hooks.parallel import Coordinates, Parallel
from bisect_hooks.site import Site
from bisect_hooks.spec import Spec
from bisect_hooks.tap import Tap
from safetensors import safe_open

from bisect_tool.prompts import Batch
from bisect_tool.ranks import WORLDS, World
from bisect_tool.spilled import Spilled


@dataclass(frozen=True, slots=True)
class Built:
    """What a rank is asked to build: the candidate's own words and how to lay them out."""

    family: str
    args: dict[str, Any]
    layout: CheckpointLayout
    parallel: Parallel
    dtype: torch.dtype
    mtp: bool = False
    spec: Spec | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """One forward of the candidate: canonical tensors by key, [tokens f].

    replicas  keys whose replicas were not bit-equal, with the largest relative rms between them
    absent    keys that could not be put together, with the reason
    folder    where the tensors wait, where they are more than memory need hold
    """

    tensors: Mapping[str, torch.Tensor]
    replicas: Mapping[str, float]
    absent: Mapping[str, str]
    folder: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)


@dataclass(slots=True)
class CandidateRun:
    """A candidate under one layout.  Cheap to make again: ranks of the same number are found alive.

    Of a build by the user's spec: keys that it has no place for, sites that it fuses away, tensors on disk that it has no use for.
    """

    family: Family
    args: dict[str, Any]
    layout: CheckpointLayout
    checkpoint: Path
    parallel: Parallel
    dtype: torch.dtype
    device: str
    batch: Batch
    patch: Path | None = None
    spec: Spec | None = None
    dims: Dimensions = field(init=False)
    taps: tuple[Tap, ...] = field(init=False, repr=False)
    unbound: dict[str, str] = field(init=False, default_factory=dict)
    fused: frozenset[str] = field(init=False, default=frozenset())
    unread: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.dims = self.family.candidate_dimensions(self.args)
        check_sizes(self.dims, self.parallel)
        self.taps = self.family.candidate_taps(self.dims, self.layout)

    @property
    def world(self) -> World:
        return WORLDS.get(self.parallel.world, self.device)

    def fed(self, batch: Batch) -> torch.Tensor:
        """Token ids [b s]: prompts repeated to a multiple of dp, as long as the longest, up to a multiple of tp under --sp."""
        dp, tp = self.parallel.dp, self.parallel.tp if self.parallel.sp else 1
        return batch.ids(-(-len(batch.rows) // dp) * dp, -(-max(batch.width, *batch.lengths) // tp) * tp)

    def build(self) -> list[str]:
        """Builds, loads, patches.  Returns the parameters that the checkpoint had nothing for."""
        what = Built(self.family.name, self.args, self.layout, self.parallel, self.dtype, spec=self.spec)
        answers = self.world.call("build", what=what, checkpoint=self.checkpoint, patch=self.patch)
        self.unbound = {key: why for answer in answers for key, why in answer["unbound"].items()}
        self.fused = frozenset(site for answer in answers for site in answer["fused"])
        self.unread = tuple(sorted(set.intersection(*(set(answer["unread"]) for answer in answers))))
        return sorted({name for answer in answers for name in answer["missing"]})

    def put_reference(self, reference: Path, keys: list[str] | None) -> list[str]:
        """Puts the reference's weights in the place of the named tensors, in memory."""
        return sorted({key for answer in self.world.call("put_reference", reference=reference, keys=keys) for key in answer})

    def edit(self, key: str, rows: tuple[int, int] | None = None, factor: float | None = None) -> None:
        """Spoils a named tensor in memory: scales rows of it, or turns its last dim round.  `put_reference` mends it."""
        self.world.call("edit", key=key, rows=rows, factor=factor)

    def record(self, graft: tuple[Path, list[str]] | None = None) -> Said:
        """Forwards of the whole batch, a few prompts each, with the named values of a Recording grafted in.

        What is held at once is what is said of a few prompts; what is said of the others waits on disk.
        """
        parts = self.batch.parts()
        if len(parts) == 1:
            return self._record_part(*parts[0], graft)
        folder = tempfile.TemporaryDirectory(prefix="bisect-said-")
        tensors, said = Spilled(Path(folder.name) / "said"), []
        for start, part in parts:
            one = self._record_part(start, part, graft)
            tensors.add(one.tensors)
            said.append(replace(one, tensors={}))
        absent = {key: why for one in said for key, why in one.absent.items()}
        tensors.drop(absent)
        return Said(tensors, _worst([one.replicas for one in said]), absent, folder)

    def _record_part(self, start: int, part: Batch, graft: tuple[Path, list[str]] | None) -> Said:
        scratch = self.world.scratch()
        ids = self.fed(part)
        try:
            self.world.call("record", rows=part, start=start, ids=ids, graft=graft, out=scratch)
            return self._gather(scratch, part, ids)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def fired(self) -> dict[str, int]:
        """One forward: tap id → how often it fired, on the rank where it fired most."""
        answers = self.world.call("fired", ids=self.fed(self.batch))
        return {tap: max(answer.get(tap, 0) for answer in answers) for tap in {tap for answer in answers for tap in answer}}

    def probe(self, rows: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Gathered]:
        """Every expert of every MoE layer on the same rows: key → [e t f]."""
        answers = self.world.call("probe", rows=dict(rows))
        layouts = {
            "fc1": Tap(Site("experts", 0, "fc1"), "", f"e[ep] t (gate:{self.dims.routed} up:{self.dims.routed})[etp]"),
            "fc2": Tap(Site("experts", 0, "fc2"), "", "e[ep] t h"),
        }
        found = {}
        for layer in rows:
            held = [(self._at(rank), answer[layer]) for rank, answer in enumerate(answers) if layer in answer]
            first = layouts["fc1"].parsed.gather([(at, parts[0]) for at, parts in held], {}, self.parallel)
            found[f"layers.{layer}.experts.fc1"] = Gathered(torch.cat([first["gate"].tensor, first["up"].tensor], -1), 0, 0.0)
            found[f"layers.{layer}.experts.fc2"] = layouts["fc2"].parsed.gather(_summed(held, self.parallel), {}, self.parallel)[""]
        return found

    def logits(self, rows: list[list[int]]) -> torch.Tensor:
        """The logits after the last token of each row, [b v]."""
        ids = self.fed(Batch(tuple(map(tuple, rows))))
        positions = [len(rows[i % len(rows)]) - 1 for i in range(len(ids))]
        answers = self.world.call("logits", ids=ids, positions=positions)
        shards = [(self._at(rank), answer) for rank, answer in enumerate(answers) if answer is not None]
        gathered = Tap(Site("lm_head"), "", "b v[tp]").parsed.gather(shards, {}, self.parallel)
        return gathered[""].tensor.flatten(1)[: len(rows)]

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """ids, mask [b s] → logits [b s v], asked as a reference is."""
        fed = self.fed(Batch(tuple(tuple(row[: int(n)].tolist()) for row, n in zip(ids, mask.sum(1), strict=True))))
        answers = self.world.call("logits", ids=fed, positions=None)
        shards = [(self._at(rank), answer) for rank, answer in enumerate(answers) if answer is not None]
        gathered = Tap(Site("lm_head"), "", "b s v[tp]").parsed.gather(shards, {}, self.parallel)
        return gathered[""].tensor[: len(ids), : ids.shape[1], : self.dims.vocabulary]

    def _at(self, rank: int) -> Coordinates:
        return self.parallel.coordinates(rank)

    def _gather(self, scratch: Path, batch: Batch, ids: torch.Tensor) -> Said:
        sizes = {"b": ids.shape[0] // self.parallel.dp, "s": ids.shape[1] // (self.parallel.tp if self.parallel.sp else 1)}
        tensors: dict[str, torch.Tensor] = {}
        replicas: dict[str, float] = {}
        absent: dict[str, str] = {}
        files = [safe_open(scratch / f"rank{rank}.safetensors", framework="pt") for rank in range(self.parallel.world)]
        held = [set(file.keys()) for file in files]

        def shards_of(name: str) -> list[tuple[Coordinates, torch.Tensor]]:
            return [(self._at(rank), file.get_tensor(name)) for rank, file in enumerate(files) if name in held[rank]]

        def take(keys: tuple[str, ...], gathered: Mapping[str, Gathered]) -> None:
            for key, piece in zip(keys, gathered.values(), strict=True):
                tensors[key] = batch.pack(piece.tensor)
                if piece.replica_difference != 0:
                    replicas[key] = piece.replica_difference

        for tap in self.taps:
            if str(tap.site) in self.fused:
                continue
            try:
                take(tap.keys, tap.parsed.gather(shards_of(tap.id), sizes, self.parallel))
            except BisectError as error:
                absent |= {key: self.unbound.get(key, error.message) for key in tap.keys}
        for layer in range(self.dims.layers):
            if self.dims.moe[layer]:
                key = f"layers.{layer}.experts.dispatch"
                try:
                    take((f"{key}:rows", f"{key}:probs"), self._dispatched(layer, shards_of, sizes))
                except BisectError as error:
                    absent |= {f"{key}:rows": error.message, f"{key}:probs": error.message}
        for made in self.family.derived(self.dims, "candidate"):
            tensors[made.key] = made.formula(*(tensors[key] for key in made.sources))
        return Said(tensors, replicas, absent)

    def _dispatched(self, layer: int, shards_of: Any, sizes: Mapping[str, int]) -> dict[str, Gathered]:
        """What the experts were handed, put back to the tokens it belongs to: rows [b s k·h] and probabilities [b s k], k by expert.

        An expert gets rows by source rank of its group, then in that rank's token order; each source's routing says which.
        """
        parallel = self.parallel
        topk = next(tap for tap in self.taps if tap.site == Site("router", layer, "topk"))
        maps = {at: chosen.bool() for at, chosen in shards_of(topk.id)}
        width = self.dims.experts // parallel.ep
        rows_of: dict[Coordinates, dict[int, torch.Tensor]] = {at: {} for at in maps}
        probs_of: dict[Coordinates, dict[int, torch.Tensor]] = {at: {} for at in maps}
        for expert in range(self.dims.experts):
            received = dict(shards_of(f"dispatch|{layer}|{expert}|rows"))
            probabilities = dict(shards_of(f"dispatch|{layer}|{expert}|probs"))
            for at, rows in received.items():
                sources = sorted((one for one in maps if _same_group(one, at, parallel)), key=lambda one: (one.ep, one.etp))
                counts = [int(maps[source][:, expert].sum()) for source in sources]
                if sum(counts) != rows.shape[0]:
                    raise BisectError(f"expert {expert} of layer {layer} was handed {rows.shape[0]} rows, the routing says {sum(counts)}")
                assert at.ep == expert // width
                for source, part, prob in zip(sources, rows.split(counts), probabilities[at].split(counts), strict=True):
                    if source.etp == at.etp:
                        rows_of[source][expert], probs_of[source][expert] = part, prob
        local_rows, local_probs = [], []
        for at, chosen in maps.items():
            tokens, experts = chosen.nonzero(as_tuple=True)
            if chosen.sum(-1).unique().numel() != 1:
                raise BisectError(f"tokens of layer {layer} go to different numbers of experts")
            filled = torch.empty(len(tokens), next(iter(rows_of[at].values())).shape[-1])
            weights = torch.empty(len(tokens))
            for expert in range(self.dims.experts):
                here = experts == expert
                filled[here], weights[here] = rows_of[at][expert].float(), probs_of[at][expert].float()
            local_rows.append((at, filled.reshape(chosen.shape[0], -1)))
            local_probs.append((at, weights.reshape(chosen.shape[0], -1)))
        layout = Tap(Site("experts", layer, "dispatch"), "", "(s[sp] b) f").parsed
        return {
            "rows": layout.gather(local_rows, sizes, parallel)[""],
            "probs": layout.gather(local_probs, sizes, parallel)[""],
        }


def _worst(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest difference between replicas in any part, NaN above all."""
    found: dict[str, list[float]] = {}
    for part in parts:
        for key, difference in part.items():
            found.setdefault(key, []).append(difference)
    return {key: max(every, key=lambda one: (math.isnan(one), one)) for key, every in found.items()}


def _same_group(source: Coordinates, at: Coordinates, parallel: Parallel) -> bool:
    """Whether a rank's tokens reach the experts of `at`: same pipeline stage, same expert data parallel group."""
    ranks = [rank for rank in range(parallel.world) if parallel.coordinates(rank) in (source, at)]
    group = parallel.ep * parallel.expert_tp
    stage = parallel.world // parallel.pp
    return len({(rank // stage, rank % stage // group) for rank in ranks}) == 1


def _summed(held: list[tuple[Coordinates, Any]], parallel: Parallel) -> list[tuple[Coordinates, torch.Tensor]]:
    """fc2 under expert tensor parallel is a partial sum a rank: added up over etp, once for each replica group."""
    if parallel.expert_tp == 1:
        return [(at, parts[1]) for at, parts in held]
    sums: dict[tuple[int, int], tuple[Coordinates, torch.Tensor]] = {}
    seen: set[tuple[int, int, int]] = set()
    for at, parts in held:
        if (at.pp, at.ep, at.etp) in seen:
            continue
        seen.add((at.pp, at.ep, at.etp))
        first, total = sums.get((at.pp, at.ep), (at, torch.zeros_like(parts[1])))
        sums[at.pp, at.ep] = (first, total + parts[1])
    return list(sums.values())
