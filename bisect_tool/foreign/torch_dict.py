"""A dict of name → tensor in a .pt or .safetensors file, one a rank; what `bisect_hooks/engine.py` leaves is one.

Beside tensors it may hold `input_ids`, `seq_lens` and `positions`, and `meta` with parallel sizes, where the rank stands, and, where decode
steps stand behind the prefill, the first token that came out of one (`decoded`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError

from bisect_tool.foreign.dump import Dump, RankDump, as_ids, read_tensors

INPUTS = ("input_ids", "seq_lens", "positions", "tokens")


def read(path: Path) -> Dump:
    """A file, or a directory of files by rank.  Raises UsageError."""
    files = sorted(file for file in path.iterdir() if file.suffix in (".pt", ".safetensors")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path} holds neither .pt nor .safetensors")
    ranks: list[RankDump] = []
    first: dict[str, Any] | None = None
    sizes: dict[str, int] = {}
    decoded: int | None = None
    for number, file in enumerate(files):
        page = read_tensors(file)
        if not isinstance(page, dict):
            raise UsageError(f"{file} holds a {type(page).__name__}, not a dict of tensors")
        first = first or page
        raw = page.get("meta")
        meta: dict[str, Any] = raw if isinstance(raw, dict) else {}
        sizes |= {axis: int(value) for axis, value in (meta.get("sizes") or {}).items()}
        tensors = {name: value for name, value in page.items() if isinstance(value, torch.Tensor) and name not in INPUTS}
        ranks.append(RankDump(tensors, {axis: int(value) for axis, value in (meta.get("at") or {"rank": number}).items()}))
        decoded = meta.get("decoded") if isinstance(meta.get("decoded"), int) else decoded
    assert first is not None
    ids = as_ids(first.get("input_ids", first.get("tokens")), f"{files[0]}: input_ids")
    lengths = first.get("seq_lens")
    counts = tuple(lengths.tolist()) if isinstance(lengths, torch.Tensor) else ()
    return Dump(tuple(ranks), ids, counts, first.get("positions"), sizes, decoded=decoded)
