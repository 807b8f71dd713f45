"""slime's layer dumps (`SLIME_LAYERWISE_ALIGNMENT_DUMP_DIR`): `rank<r>/<prefix>_Pass<n>.pt` of its Megatron side.

Each holds {store_prefix, layers {global number: tensor}, modules {name: tensor}, input_ids, cu_seqlens}; a tensor is that rank's part,
and nothing says how ranks were laid out: that is what --tp and its like are for.  The first pass is taken.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from bisect_hooks.errors import UsageError

from bisect_tool.foreign.dump import Dump, RankDump, as_ids, read_tensors

PASS = re.compile(r"(?P<prefix>.*)_?Pass(?P<number>\d+)\.pt")


def read(directory: Path) -> Dump:
    """The first pass of every rank.  Raises UsageError."""
    ranks: list[RankDump] = []
    ids, lengths, passes = None, (), 0
    for folder in sorted(directory.glob("rank*")):
        number = re.fullmatch(r"rank(\d+)", folder.name)
        files = sorted((int(match["number"]), file) for file in folder.glob("*.pt") if (match := PASS.fullmatch(file.name)))
        if number is None or not files:
            continue
        passes = max(passes, len(files))
        page = read_tensors(files[0][1])
        if not isinstance(page, dict) or not isinstance(page.get("layers"), dict):
            raise UsageError(f"{files[0][1]} is no layer dump of slime: it has no layers")
        tensors = {f"decoder.layers.{layer}": value for layer, value in page["layers"].items() if isinstance(value, torch.Tensor)}
        tensors |= {name: value for name, value in (page.get("modules") or {}).items() if isinstance(value, torch.Tensor)}
        ranks.append(RankDump(tensors, {"rank": int(number[1])}))
        if ids is None:
            ids = as_ids(page.get("input_ids"), str(files[0][1]))
            bounds = page.get("cu_seqlens")
            lengths = tuple((bounds[1:] - bounds[:-1]).tolist()) if isinstance(bounds, torch.Tensor) else ()
    if ids is None:
        raise UsageError(f"{directory} holds no layer dump of slime (rank00000/..Pass00000.pt)")
    notes = (f"the first pass was taken; {passes - 1} later ones were left out",) if passes > 1 else ()
    return Dump(tuple(ranks), ids, lengths, notes=notes)
