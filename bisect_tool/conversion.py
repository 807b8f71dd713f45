"""convert: Hugging Face → torch_dist, from the one weight table, written by megatron-core's own dist_checkpointing."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError, by_kind
from bisect_hooks.family import CheckpointLayout, Dimensions, Family, check_sizes
from bisect_hooks.parallel import Parallel
from bisect_hooks.table import check_total

from bisect_tool.args import conversion_args
from bisect_tool.candidate import Built
from bisect_tool.checkpoint import TRACKER
from bisect_tool.hf_directory import HuggingFaceDirectory, open_hf
from bisect_tool.ranks import WORLDS
from bisect_tool.rewrite import without_path
from bisect_tool.unknown import family_in

RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written, and what was left out on purpose."""

    out: Path
    layout: CheckpointLayout
    parallel: Parallel
    tensors: int
    left_out: Mapping[str, int]

    def shown(self) -> str:
        lines = [f"wrote {self.out}: {self.tensors} tensors, {self.layout} layout, {self.parallel}"]
        return "\n".join(lines + [f"left out {count} reference tensors: {why}" for why, count in self.left_out.items()])


def convert(reference: Path, out: Path, layout: CheckpointLayout, parallel: Parallel, mtp: bool | None) -> Converted:
    """Raises UsageError, before anything is written, for a tensor on either side that the table does not mention."""
    directory = open_hf(reference)
    family = family_in(directory)
    dims = family.reference_dimensions(directory.config)
    has_mtp = bool(family.mtp_tensors(directory.names, dims))
    if mtp and not has_mtp:
        raise UsageError(f"--mtp: {reference} has no MTP tensors")
    mtp = has_mtp and mtp is not False
    left_out = check_table(family, dims, directory, layout, mtp)
    dtype = main_dtype(directory)
    args = conversion_args(family, directory.config, dims, layout, parallel, dtype, mtp)
    check_sizes(family.candidate_dimensions(args), parallel)
    check_sayable(args)
    check_empty(out)
    world = WORLDS.get(parallel.world)
    world.call("build", what=Built(family.name, args, layout, parallel, dtype, mtp=mtp), checkpoint=None)
    with whole(out) as partial:
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
        answers = world.call("save", reference=reference.resolve(), out=partial / RELEASE, common=common)
        unmade = sorted({key for answer in answers for key in answer["unmade"]})
        if unmade:
            made = [candidate.name for rule in family.rules(dims, layout, directory.names, mtp) for candidate in rule.candidates]
            near = difflib.get_close_matches(unmade[0], made, n=3)
            raise UsageError(
                f"megatron-core wants {unmade[0]} and no row of the table makes it ({len(unmade)} such)", hint=f"nearest: {', '.join(near)}"
            )
        without_path(partial / RELEASE)
        (partial / TRACKER).write_text(RELEASE)
    keys = {key for answer in answers for key in answer["keys"]}
    return Converted(out, layout, parallel, len(keys), left_out)


def check_sayable(args: Mapping[str, Any]) -> None:
    """Raises UsageError for a router that megatron-core can't be told: one expert a token, its weight renormalised to 1."""
    softmax = args.get("moe_router_score_function") == "softmax" and not args.get("moe_router_pre_softmax")
    if args.get("num_experts") and args.get("moe_router_topk") == 1 and softmax:
        raise UsageError(
            "config.json sends a token to one expert and renormalises its weight (norm_topk_prob), which makes it 1 always, and "
            "megatron-core has no such router: with --moe-router-topk 1 it takes --moe-router-pre-softmax only, where the weight is the probability"
        )


def check_table(family: Family, dims: Dimensions, directory: HuggingFaceDirectory, layout: CheckpointLayout, mtp: bool) -> dict[str, int]:
    """Every reference tensor is read by a row or left out for a reason; every row's tensors are there.  Raises UsageError."""
    rules = family.rules(dims, layout, directory.names, mtp)
    check_total(rules)
    read = {name for rule in rules for name in rule.references}
    left_out: dict[str, int] = {}
    unread = []
    for name in directory.names:
        if name in read:
            continue
        why = family.left_out(name, dims)
        if why is None:
            unread.append(name)
        else:
            left_out[why] = left_out.get(why, 0) + 1
    absent = sorted(read - set(directory.names))
    if unread or absent:
        said = [f"{directory.path} has no {one}, which the table of {family.name} reads" for one in by_kind(absent)]
        said += [f"{one} is not in the table of {family.name}" for one in by_kind([directory.on_disk(name) for name in unread])]
        near = difflib.get_close_matches((unread or absent)[0], read if unread else directory.names, n=3)
        raise UsageError("; ".join(said), hint=f"nearest: {', '.join(near) or 'none'}")
    for rule in rules:
        shapes = [tuple(directory.read(name).shape) for name in rule.references[:1]]
        if not shapes[0]:
            raise UsageError(f"{directory.on_disk(rule.references[0])} is a scalar")
    return left_out


def main_dtype(directory: HuggingFaceDirectory) -> torch.dtype:
    """The dtype most tensors have."""
    counts: dict[torch.dtype, int] = {}
    for dtype in directory.dtypes.values():
        counts[dtype] = counts.get(dtype, 0) + 1
    return max(counts, key=lambda dtype: counts[dtype])


def check_empty(out: Path) -> None:
    """Raises UsageError for a directory that holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise UsageError(f"--out {out} {what}", hint="give an empty or new directory")


class whole:  # noqa: N801 - reads as a word: `with whole(out) as partial`
    """A directory that is there only when the block ended well; what fails leaves nothing."""

    def __init__(self, out: Path) -> None:
        self.out = out.resolve()
        self.partial = self.out.with_name(self.out.name + ".partial")

    def __enter__(self) -> Path:
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return self.partial

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            if self.out.exists():
                self.out.rmdir()
            self.partial.rename(self.out)
        else:
            shutil.rmtree(self.partial, ignore_errors=True)
