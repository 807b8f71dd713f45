"""How a checkpoint was converted, read off its files: which rank wrote which chunk, and how chunks cut a tensor."""

from __future__ import annotations

import re

from bisect_hooks.errors import UsageError
from bisect_hooks.family import Dimensions
from bisect_hooks.parallel import Parallel

from bisect_tool.checkpoint import Checkpoint
from bisect_tool.places import Stored

RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")


def written_by(checkpoint: Checkpoint, dims: Dimensions) -> Parallel | None:
    """The layout that the files tell of, or None when they don't tell one.

    tp from the cut of `linear_proj`'s columns, pp from the ranks that hold each layer, ep from the ranks that hold each expert.
    """
    ranks: list[set[int]] = []
    tp = ep = 1
    for layer in range(dims.layers):
        own = {key: stored for key, stored in checkpoint.tensors.items() if key.startswith(f"decoder.layers.{layer}.")}
        found = [(stored, _ranks(stored)) for stored in own.values()]
        if not found or any(held is None for _, held in found):
            return None
        ranks.append({rank for _, held in found for rank in held or ()})
        for key, stored in own.items():
            if key.endswith(("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")):
                tp = max(tp, len({piece.offset[1] for piece in stored.pieces}))
            if key.endswith("experts.experts.linear_fc2.weight"):
                ep = max(ep, len(_ranks(stored) or ()) // max(1, len({piece.offset[2] for piece in stored.pieces})))
    stages = [held for i, held in enumerate(ranks) if i == 0 or held != ranks[i - 1]]
    if any(one & other for i, one in enumerate(stages) for other in stages[i + 1 :]):
        return None
    sizes = tuple(sum(held == stage for held in ranks) for stage in stages)
    try:
        parallel = Parallel(tp=tp, pp=len(stages), ep=ep, etp=1 if ep > 1 else None, pp_layers=sizes if len(set(sizes)) > 1 else ())
    except UsageError:
        return None
    return parallel if parallel.world == len(set().union(*stages)) else None


def _ranks(stored: Stored) -> set[int] | None:
    found = set()
    for piece in stored.pieces:
        match = RANK_FILE.fullmatch(piece.file.name)
        if match is None:
            return None
        found.add(int(match[1]))
    return found
