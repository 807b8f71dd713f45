"""Discrete choices that come out otherwise, and by how narrow a margin the reference made its own.

A choice needs no threshold: it follows by the reference's rule from numbers that are judged.  So this only tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def told(choices: str, one: str, flipped: torch.Tensor, margins: torch.Tensor) -> str | None:
    """The sentence on choices [n] of which some are `flipped`; `margins` [n] by how much the reference preferred its own to the next."""
    count = int(flipped.sum())
    if not count:
        return None
    most = float(margins[flipped].max())
    by = f"where it preferred one {one} to the next by {most:.1e} at most" if most else f"all of them between {one}s that it ranked alike"
    what, _, which = choices.partition(": ")
    return f"{what}: {count} of {flipped.numel()} {which} are not the reference's, {by} (usually by {float(margins.median()):.1e})"


def next_tokens(reference: torch.Tensor, candidate: torch.Tensor, *, where: str = "") -> str | None:
    """The most likely next token, of logits [t v] on both sides; None where it is the same everywhere."""
    first, second = reference.float().topk(2, -1).values.unbind(-1)
    flipped = reference.argmax(-1) != candidate.argmax(-1)
    return told(f"next token{where}: most likely ones", "token", flipped, first - second)


def routing(ranked: Sequence[torch.Tensor], flipped: Sequence[torch.Tensor], top_k: int) -> str | None:
    """The experts of each token, layer after layer: what the reference ranked them by [t e], and where the choice differs [t]."""
    if not ranked:
        return None
    margins = []
    for scores in ranked:
        top = scores.topk(min(top_k + 1, scores.shape[-1]), dim=-1).values
        margins.append(top[:, top_k - 1] - top[:, -1])
    return told("routing: choices of experts", "expert", torch.cat(list(flipped)), torch.cat(margins))
