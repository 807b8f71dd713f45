"""How context parallel cuts a sequence: into 2·cp chunks, rank r holding chunks r and 2·cp − 1 − r, so that causal work is even.

Packed sequences are cut one by one, each into its own 2·cp chunks (Transformer Engine's THD format; Megatron's
`get_batch_on_this_cp_rank` for one sequence).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bisect_hooks.errors import BisectError


def zigzag_order(length: int, segments: Sequence[int], cp: int) -> torch.Tensor:
    """Places of the whole sequence, [length], in the order in which ranks 0, 1, .. hold them.

    segments  lengths of packed sequences, () for one.  Raises BisectError where they don't divide by 2·cp.
    """
    segments = tuple(segments) or (length,)
    if sum(segments) != length:
        raise BisectError(f"segments of {sum(segments)} tokens in a sequence of {length}")
    uneven = [size for size in segments if size % (2 * cp)]
    if uneven:
        raise BisectError(f"a segment of {uneven[0]} tokens can't be cut in {2 * cp} chunks for cp {cp}")
    ranks: list[list[torch.Tensor]] = [[] for _ in range(cp)]
    start = 0
    for size in segments:
        chunks = torch.arange(start, start + size).chunk(2 * cp) if size else ()
        for rank, held in enumerate(ranks):
            held += [chunks[rank], chunks[2 * cp - 1 - rank]] if chunks else []
        start += size
    return torch.cat([chunk for held in ranks for chunk in held])


def zigzag(whole: torch.Tensor, dim: int, segments: Sequence[int], cp: int) -> torch.Tensor:
    """The sequence as ranks 0, 1, .. hold it, one behind the other."""
    return whole.index_select(dim, zigzag_order(whole.shape[dim], segments, cp).to(whole.device))


def unzigzag(held: torch.Tensor, dim: int, segments: Sequence[int], cp: int) -> torch.Tensor:
    """What ranks 0, 1, .. hold, one behind the other, put back in the order of the sequence."""
    return held.index_select(dim, zigzag_order(held.shape[dim], segments, cp).argsort().to(held.device))
