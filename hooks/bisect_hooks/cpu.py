"""What lets the unmodified megatron-core run on a CPU.  Every shim stands here, with the line of 0.16 that it replaces.

None of them changes what is computed: they stand in for CUDA bookkeeping (devices, streams, host copies), for a norm that
upstream offers only through Transformer Engine, and for one kernel helper that upstream offers only through
flash-linear-attention; one puts a bug right that stops a layout.  On an accelerator `running_on` leaves all but these alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from bisect_hooks.core_versions import prepare_delta_net


class NoStream:
    """Stands in for torch.cuda.Stream (moe/token_dispatcher.py:445, a stream for host copies that a CPU does not need)."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _other: object) -> None: ...
    def record_event(self, *_: object) -> NoStream:
        return self

    def synchronize(self) -> None: ...


def prepare_megatron(device: torch.device) -> None:
    """Once a process, before a model is built."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    prepare_delta_net(l2norm)
    if not hasattr(moe_utils, "te_general_gemm"):
        # moe_utils.py:1192 reads this name, which is imported only where Transformer Engine is installed (upstream bug)
        moe_utils.te_general_gemm = None
    upstream = WrappedTorchNorm.__new__

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **more: Any) -> Any:
        if config.normalization == "RMSNorm":
            return RMSNorm(config, hidden_size, eps)
        return upstream(cls, config, hidden_size, eps, **more)

    # torch_norm.py:26 refuses zero-centred gamma and sequence parallel; a user's own spec asks for its norms by this name
    WrappedTorchNorm.__new__ = norm
    if device.type == "cpu":
        # moe_utils.py:1093 turns split sizes into host integers only for CUDA tensors; gloo's all_to_all needs them too
        token_dispatcher.maybe_move_tensor_to_cpu = to_host


def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """fla.modules.l2norm in the model's dtype: x / √(Σx² + eps) over the last dim."""
    return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)


def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """maybe_move_tensor_to_cpu for tensors that are on the CPU already."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextlib.contextmanager
def running_on(device: torch.device) -> Iterator[None]:
    """Around every build, forward, save and load.  On a CPU, names that megatron-core hard-codes to CUDA mean the CPU.

    torch.cuda.current_device   gated_delta_net.py:173, router.py:90, rotary_pos_embedding.py:162, tensor_parallel/layers.py
    torch.cuda.Stream & co      moe/token_dispatcher.py:445, :871-895
    torch.cuda.synchronize      dist_checkpointing/strategies/filesystem_async.py:230
    Tensor.cuda                 models/common/language_module/language_module.py:244 (embeddings shared between stages)
    """
    if device.type != "cpu":
        yield
        return
    no_stream = NoStream()
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "Stream", NoStream),
            (torch.cuda, "current_stream", lambda *_: no_stream),
            (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


class SlicedGate:
    """Goes before megatron-core's SelfAttention: with more tensor parallel ranks than KV heads, slices the gate like the query.

    attention.py:1465 gives a rank its own heads of the group's queries and leaves it the gates of the whole group, which
    attention.py:1221 then can't view as its output (upstream bug in 0.16, put right in 0.19).
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get_query_key_value_tensors(*args, **kwargs)  # type: ignore[misc]
        if len(found) != 4 or found[3].shape[2] == found[0].shape[2]:
            return found
        query, key, value, gate = found
        share = self.world_size // self.config.num_query_groups  # type: ignore[attr-defined]
        start = self.pg_collection.tp.rank() % share * query.shape[2]  # type: ignore[attr-defined]
        return query, key, value, gate[:, :, start : start + query.shape[2]]


class RMSNorm(torch.nn.Module):
    """RMS norm with an optional zero-centred gamma.

    torch_norm.py:26 refuses zero-centred gamma and sequence parallel for torch's own norm; Transformer Engine's has both.
    Formula as Transformer Engine documents it: x / √(mean(x²) + eps) · (1 + w), or · w, in float32.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centred = bool(config.layernorm_zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = self.weight.float() + 1 if self.zero_centred else self.weight.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * scale).to(x.dtype)
