"""What to listen to in a model and how to line it up.  Light: importing this package imports neither transformers nor megatron."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


def record(model: Any, family: Any, out: Path | str, *, lengths: Sequence[int] = ()) -> AbstractContextManager[None]:
    """Records the first forward in the block on this rank of a running Megatron process: `process.record`, imported when asked."""
    from bisect_hooks import process

    return process.record(model, family, out, lengths=lengths)
