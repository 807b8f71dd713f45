"""Ascend msprobe's tensor dumps: `[step<N>/]rank<R>/dump.json` beside `dump_tensor_data/`.

`data` maps `Module.<path>.<Class>.forward.<call>` to its leaves {type, data_name}; a list of models adds a number after `Module`.
A tensor file holds the bare tensor.  Nothing in a dump says how ranks were laid out: that is what --tp and its like are for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError, first_line

from bisect_tool.foreign.dump import Dump, RankDump, as_ids, read_tensors

OPERATION = re.compile(r"Module\.(?:\d+\.)?(?P<path>.+)\.(?P<cls>\w+)\.forward\.(?P<call>\d+)")
EMBEDDING = ("embed_tokens", "embedding", "word_embeddings")


def read(directory: Path) -> Dump:
    """The first call of every module, by rank.  Raises UsageError."""
    pages = sorted(directory.glob("**/dump.json"))
    if not pages:
        raise UsageError(f"{directory} holds no dump.json of msprobe")
    steps = sorted({page.parent.parent for page in pages})
    pages = [page for page in pages if page.parent.parent == steps[0]]
    ranks, ids, again = [], None, 0
    for number, page in enumerate(pages):
        tensors: dict[str, torch.Tensor] = {}
        for operation, entry in _data(page).items():
            match = OPERATION.fullmatch(operation)
            if match is None or not isinstance(entry, dict):
                continue
            if match["call"] != "0":
                again += 1
                continue
            leaves = [leaf for leaf in entry.get("output") or [] if isinstance(leaf, dict) and leaf.get("data_name")]
            for i, leaf in enumerate(leaves):
                tensors[match["path"] + (f":{i}" if len(leaves) > 1 else "")] = _tensor(page, leaf)
            if match["path"].endswith(EMBEDDING) and ids is None:
                given = [one for one in entry.get("input_args") or [] if isinstance(one, dict) and one.get("data_name")]
                ids = _tensor(page, given[0]) if given else None
        found = re.fullmatch(r"rank(\d+)", page.parent.name)
        ranks.append(RankDump(tensors, {"rank": int(found[1]) if found else number}))
    notes = [f"{len(steps) - 1} later steps were left out"] if len(steps) > 1 else []
    notes += [f"{again} later calls of modules were left out"] if again else []
    return Dump(tuple(ranks), as_ids(ids, f"{directory}: the input of the embedding"), notes=tuple(notes))


def _data(page: Path) -> dict[str, Any]:
    try:
        found = json.loads(page.read_text())
        if found["task"] != "tensor":
            raise UsageError(f"{page} is a dump of {found['task']}, which keeps no tensors", hint='dump with "task": "tensor"')
        return dict(found["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{page} is damaged: {first_line(error)}") from error


def _tensor(page: Path, leaf: dict[str, Any]) -> torch.Tensor:
    name = str(leaf["data_name"])
    if Path(name).name != name:
        raise UsageError(f"{page} names {name!r}, a path that leaves the directory; refused")
    found = read_tensors(page.parent / "dump_tensor_data" / name)
    if not isinstance(found, torch.Tensor):
        raise UsageError(f"{page.parent / 'dump_tensor_data' / name} holds a {type(found).__name__}, not a tensor")
    return found
