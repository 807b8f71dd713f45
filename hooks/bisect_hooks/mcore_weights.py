"""What a built candidate's parameters are on disk: loading, filling, saving, by megatron-core's own account of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.validation import StrictHandling

from bisect_hooks.cpu import running_on
from bisect_hooks.errors import BisectError

if TYPE_CHECKING:
    from bisect_hooks.mcore import Candidate

NAN = float("nan")


def _states(candidate: Candidate) -> dict[str, Any]:
    """megatron-core's sharded state of every chunk, under the names it gives them itself."""
    return {f"model{i}": chunk.model.sharded_state_dict(metadata={}) for i, chunk in enumerate(candidate.chunks)}


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A view into this rank's parameters and the part of which global tensor on disk it is."""

    key: str
    view: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


def local_tensors(candidate: Candidate) -> Iterator[LocalTensor]:
    """megatron-core's own account of what each parameter is on disk; views, so writing to them writes the model."""
    for entry in nested_values(_states(candidate)):
        shards = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
        for shard in shards:
            if not isinstance(shard, ShardedTensor) or shard.data is None:
                continue
            # experts and layers are leading axes that the local tensor does not have
            view = shard.data.reshape((1,) * shard.prepend_axis_num + tuple(shard.data.shape))
            yield LocalTensor(shard.key, view, tuple(shard.global_shape), tuple(shard.global_offset))


def fill(candidate: Candidate, made: Callable[[str], torch.Tensor | None], padded: tuple[str, ...] = ()) -> list[str]:
    """Writes `made(key)` (a global tensor) into this rank's parameters; None leaves one alone.  Returns the keys written.

    Rows that only pad the vocabulary (keys in `padded`) become zero.  Raises BisectError for a shape that does not fit.
    """
    written = []
    with torch.no_grad():
        for local in local_tensors(candidate):
            whole = made(local.key)
            if whole is None:
                continue
            if local.key in padded and whole.shape[0] < local.global_shape[0]:
                whole = torch.cat([whole, whole.new_zeros(local.global_shape[0] - whole.shape[0], *whole.shape[1:])])
            if tuple(whole.shape) != local.global_shape:
                raise BisectError(f"{local.key}: the table makes {tuple(whole.shape)}, the model has {local.global_shape}")
            part = whole[tuple(slice(start, start + size) for start, size in zip(local.offset, local.view.shape, strict=True))]
            local.view.copy_(part)
            written.append(local.key)
    return written


def unfilled(candidate: Candidate) -> list[str]:
    """Parameters and kept buffers that nothing was loaded into (still NaN everywhere)."""
    return [name for chunk in candidate.chunks for name, tensor in stored_tensors(chunk.model) if bool(tensor.isnan().all())]


def stored_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything floating that a checkpoint holds by name: parameters, and buffers that are kept (the router's expert bias)."""
    kept = set(model.state_dict(keep_vars=True))
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point())


def load(candidate: Candidate, directory: Path, renamed: Mapping[str, str]) -> list[str]:
    """Loads a torch_dist checkpoint with megatron-core's own loader; `renamed` says which keys it keeps under another name.

    A key that the checkpoint lacks stays NaN.  Returns those keys.
    """
    state = _states(candidate)
    for entry in nested_values(state):
        if getattr(entry, "key", None) in renamed:
            entry.key = renamed[entry.key]
    with running_on(candidate.device), torch.no_grad():
        values, missing, _ = dist_checkpointing.load(state, str(directory), strict=StrictHandling.RETURN_ALL)
        for i, chunk in enumerate(candidate.chunks):
            tensors = {key: value for key, value in values[f"model{i}"].items() if isinstance(value, torch.Tensor)}
            chunk.model.load_state_dict(tensors, strict=False)
    return sorted(map(str, missing))


def save(candidate: Candidate, directory: Path, common: Mapping[str, Any]) -> None:
    """Saves with megatron-core's own torch_dist writer; `common` goes to common.pt."""
    with running_on(candidate.device), torch.no_grad():
        dist_checkpointing.save({**_states(candidate), **common}, str(directory))


def set_dtypes(candidate: Candidate, dtype_of: Callable[[str], torch.dtype | None]) -> None:
    """Gives every parameter the dtype its tensor has on disk, so that a save rounds nothing."""
    for chunk in candidate.chunks:
        named = dict(chunk.model.named_parameters())
        for name, entry in chunk.model.sharded_state_dict(metadata={}).items():
            _set_dtype(named, name, entry, dtype_of)


def _set_dtype(named: Mapping[str, torch.nn.Parameter], name: str, entry: Any, dtype_of: Callable[[str], torch.dtype | None]) -> None:
    keys = [entry.key] if isinstance(entry, ShardedTensor) else []
    if isinstance(entry, ShardedTensorFactory):
        keys = [shard.key for shard in nested_values(entry.build()) if isinstance(shard, ShardedTensor)]
    wanted = {dtype_of(key) for key in keys} - {None}
    if len(wanted) == 1 and name in named:
        named[name].data = named[name].data.to(wanted.pop())
