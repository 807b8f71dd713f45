"""Running a candidate that is built: forwards with taps and grafts, and probes of its experts.

Stages of a pipeline are driven by hand: megatron-core's schedule allocates on CUDA (pipeline_parallel/schedules.py:2138).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from bisect_hooks.cpu import running_on
from bisect_hooks.mcore import Candidate
from bisect_hooks.tap import Graft, Heard, Tap, find, listening


def forward(candidate: Candidate, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor | None:
    """ids [b s] of this data parallel rank → logits [s b v/tp] on the last stage, None before it.

    padding  [b s] what comes before a row and must not be seen; positions count it, as megatron-core's rope does
    Stages are driven by hand: megatron-core's schedule allocates on CUDA (pipeline_parallel/schedules.py:2138).
    """
    batch, length = ids.shape
    ids = ids.to(candidate.device)
    position_ids = torch.arange(length, device=candidate.device).expand(batch, -1)
    mask = torch.ones(length, length, dtype=torch.bool, device=candidate.device).triu(1).expand(1, 1, -1, -1)
    if padding is not None:
        mask = mask | padding.to(candidate.device)[:, None, None, :]
    rows = length // candidate.parallel.tp if candidate.parallel.sp else length
    with running_on(candidate.device), torch.no_grad():
        for chunk in candidate.chunks:
            if not chunk.first:
                hidden = torch.empty(rows, batch, candidate.dims.hidden, dtype=candidate.dtype, device=candidate.device)
                dist.recv(hidden, _neighbour(candidate, -1))
                chunk.model.set_input_tensor(hidden)
            output = chunk.model(ids, position_ids, mask)
            if chunk.last:
                return output.transpose(0, 1)  # type: ignore[no-any-return]
            dist.send(output.contiguous(), _neighbour(candidate, 1))
    return None


def fired(candidate: Candidate, ids: torch.Tensor) -> dict[str, int]:
    """One forward: how often each tap of this rank fired, by its id."""
    with listening(candidate.models, candidate.taps, strict=False) as heard:
        forward(candidate, ids)
    return heard.times(candidate.taps)


def record(candidate: Candidate, ids: torch.Tensor, taps: tuple[Tap, ...], graft: Graft, padding: torch.Tensor | None = None) -> Heard:
    """One forward of this rank with its taps listening and its grafts in place."""
    where = f" on the candidate, rank {dist.get_rank()}"
    with listening(candidate.models, taps, graft, where=where) as heard:
        forward(candidate, ids, padding)
    return heard


@contextmanager
def listening_to_experts(candidate: Candidate) -> Iterator[dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]]:
    """What each local expert is handed while the block runs: (layer, global expert) → (rows [t h], probabilities [t]).

    Rows come by source rank of the expert group, then in the order of that rank's tokens.
    """
    heard: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    handles = []

    def listen(layer: int, expert: int) -> Callable[..., None]:
        def before(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            heard[layer, expert] = (args[0].detach().clone(), args[1].detach().clone())

        return before

    for layer in candidate.layers:
        if candidate.dims.moe[layer]:
            moe = find(candidate.models, f"{candidate.path(layer)}.mlp")
            for expert, module in zip(moe.local_expert_indices, moe.experts.local_experts, strict=True):
                handles.append(module.register_forward_pre_hook(listen(layer, expert)))
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def probe_experts(candidate: Candidate, layer: int, rows: torch.Tensor, inner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every local expert on the same rows, without the router: (fc1 of `rows` [t h] → [e t f/etp], fc2 of `inner` → [e t h]).

    `inner` [e t f] is the reference's activation for all experts, so that fc2 is judged apart from fc1.
    """
    moe = find(candidate.models, f"{candidate.path(layer)}.mlp")
    rows = rows.to(candidate.device, candidate.dtype)
    size, first, second = candidate.parallel.expert_tp, [], []
    with running_on(candidate.device), torch.no_grad():
        for expert, module in zip(moe.local_expert_indices, moe.experts.local_experts, strict=True):
            wide, _ = module.linear_fc1(rows)
            first.append(wide)
            width = inner.shape[-1] // size
            part = inner[expert, :, candidate.at.etp * width : (candidate.at.etp + 1) * width]
            partial, _ = module.linear_fc2(part.contiguous().to(candidate.device, candidate.dtype))
            second.append(partial)
    return torch.stack(first), torch.stack(second)


def _neighbour(candidate: Candidate, step: int) -> int:
    """The rank one pipeline stage on: stages are the outermost axis of Megatron's rank order.  Under VPP the last is before the first."""
    world = candidate.parallel.world
    return (dist.get_rank() + step * (world // candidate.parallel.pp)) % world
