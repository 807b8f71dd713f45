"""plant: writes a copy of a checkpoint with one known fault of the catalogue (`plants.py`) in it."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import Family, check_sizes, family_of_tensors
from bisect_hooks.parallel import Parallel

from bisect_tool.args import parallel_args, parallel_of, plain
from bisect_tool.candidate import Built
from bisect_tool.checkpoint import TRACKER, Checkpoint, open_checkpoint
from bisect_tool.conversion import RELEASE, check_empty, whole
from bisect_tool.plants import PLANTS, Copy
from bisect_tool.ranks import WORLDS
from bisect_tool.rewrite import Rewriting, without_path


def listing() -> str:
    """One line a fault: id, carrier, what it needs, what it is."""
    return "\n".join(f"{one.id:<8} {one.carrier:<8} {'--' + one.needs + ' > 1' if one.needs else '':<9} {one.what}" for one in PLANTS)


def plant(fault: str, candidate: Path, out: Path, parallel: Parallel | None) -> str:
    """Writes the copy and returns a line about it.  The good checkpoint is never touched."""
    known = {one.id: one for one in PLANTS}
    if fault not in known:
        raise UsageError(f"unknown fault {fault!r}", hint=f"known: {', '.join(known)} (bisect-tool plant --list)")
    one = known[fault]
    checkpoint = open_checkpoint(candidate)
    args = plain(checkpoint.args)
    if not args:
        raise UsageError(f"{checkpoint.path} keeps no args, so nothing says how it was converted")
    family = family_of_tensors(args, checkpoint.layout, checkpoint.tensors)
    dims = family.candidate_dimensions(args)
    written = parallel_of(args, dims.layers) or Parallel()
    under = parallel or written
    if one.needs and under.size(one.needs) == 1:
        raise UsageError(
            f"{fault} exists only with --{one.needs} above 1; this copy would be written under {under}", hint=f"add --{one.needs} 2"
        )
    check_sizes(dims, under)
    check_empty(out)
    with whole(out) as unfinished:
        target = unfinished / RELEASE
        if _same_cut(under, written):
            shutil.copytree(checkpoint.path, target)
        else:
            _write_under(checkpoint, family, args, under, target)
        (unfinished / TRACKER).write_text(RELEASE)
        copy = Copy(open_checkpoint(target), family, dims, under, args=parallel_args(under))
        one.edit(copy)
        apply(copy)
        if copy.patch:
            (unfinished / "patch.py").write_text(copy.patch)
    changed = (
        f"{len(copy.changed)} tensors changed, {len(copy.dropped)} dropped"
        if one.carrier != "code"
        else "no file changed; patch.py written"
    )
    return f"wrote {out}: {fault} ({one.carrier}), {under}; {changed}"


def _same_cut(one: Parallel, other: Parallel) -> bool:
    names = ("tp", "pp", "ep", "expert_tp", "cp", "pp_layers")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _write_under(checkpoint: Checkpoint, family: Family, args: dict[str, Any], parallel: Parallel, target: Path) -> None:
    """The same tensors written by as many ranks as the layout has, with megatron-core's own loader and writer."""
    what = Built(family.name, args, checkpoint.layout, parallel, torch.bfloat16, mtp=bool(args.get("mtp_num_layers")))
    world = WORLDS.get(parallel.world)
    world.call("build", what=what, checkpoint=None)
    common = {"args": args | parallel_args(parallel), "checkpoint_version": 3.0, "iteration": 0}
    world.call("save_again", checkpoint=checkpoint.path, out=target, common=common)
    without_path(target)


def apply(copy: Copy) -> None:
    """Writes the edits into the copy's files: chunks in place, args in common.pt, dropped tensors out of .metadata."""
    rewriting = Rewriting(copy.checkpoint.path, dropped=copy.dropped)
    for key, tensor in copy.changed.items():
        stored = copy.checkpoint.tensors[key]
        if tuple(tensor.shape) != stored.shape or tensor.dtype != stored.dtype:
            raise UsageError(f"{key} is {stored.dtype} {stored.shape}; a plant may not change that")
        rewriting.change(stored, partial(_part, tensor))
    rewriting.finish(copy.args)


def _part(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]
