"""How property tests draw: the same examples every time, and a busy machine fails none of them."""

from __future__ import annotations

from hypothesis import settings

repeatable = settings(max_examples=60, deadline=None, derandomize=True, database=None)
