"""Where the embedded model lies: in a checkout's golden/, or inside an installed wheel."""

from __future__ import annotations

from pathlib import Path

from bisect_hooks.errors import UsageError


def folder() -> Path:
    """golden/ of the checkout or of the wheel.  Raises UsageError."""
    here = Path(__file__).parent
    for path in (here.parent / "golden", here / "golden"):
        if (path / "tiny-qwen3.5-moe").is_dir():
            return path
    raise UsageError("the embedded model is not there", hint="give --reference and --candidate, or run make train and make golden")


def reference() -> Path:
    """The embedded model."""
    return folder() / "tiny-qwen3.5-moe"


def candidate() -> Path:
    """Its conversion (slime layout, one rank)."""
    return folder() / "tiny-qwen3.5-moe-torch_dist"
