"""The `slime` layout's linear attention: a gated delta net of our own, written from the paper's recurrence.

Neither side may borrow the other's modules, or the comparison would compare a thing with itself.  So this does not chunk, as
transformers and megatron-core do: in plain torch it steps through the tokens, which is slow and has no shared ancestor.  Where
flash-linear-attention is installed and the tensors are on an accelerator, its kernel takes the steps.

Shapes: B batch, S sequence, K key heads, V value heads (a multiple of K), D key width, E value width, H hidden.
Formula (Yang et al., Gated Delta Networks, eq. 10): state ← α state (I − β k kᵀ) + β v kᵀ, output = state q / √D.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F  # noqa: N812

from bisect_hooks.family import Dimensions

HAVE_FLA = importlib.util.find_spec("fla") is not None


class DeltaRule(torch.nn.Module):
    """(query BSKD, key BSKD, value BSVE, log decay BSV, beta BSV) → output BSVE.  A module, so that hooks can hear it."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        if HAVE_FLA and query.device.type != "cpu":
            return _with_fla(query, key, value, decay, beta)
        repeat = value.shape[2] // key.shape[2]
        q_BSVD, k_BSVD = (_unit(t.float()).repeat_interleave(repeat, dim=2) for t in (query, key))
        q_BSVD = q_BSVD * query.shape[-1] ** -0.5
        v_BSVE, alpha_BSV, beta_BSV = value.float(), decay.float().exp(), beta.float()
        state_BVDE = v_BSVE.new_zeros(*v_BSVE.shape[:1], v_BSVE.shape[2], key.shape[-1], v_BSVE.shape[-1])
        outputs = []
        for q, k, v, alpha, rate in zip(*(t.unbind(1) for t in (q_BSVD, k_BSVD, v_BSVE, alpha_BSV, beta_BSV)), strict=True):
            state_BVDE = state_BVDE * alpha[..., None, None]
            remembered_BVE = torch.einsum("bvde,bvd->bve", state_BVDE, k)
            correction_BVE = rate[..., None] * (v - remembered_BVE)
            state_BVDE = state_BVDE + k[..., None] * correction_BVE[..., None, :]
            outputs.append(torch.einsum("bvde,bvd->bve", state_BVDE, q))
        return torch.stack(outputs, dim=1).to(query.dtype)


class GatedNorm(torch.nn.Module):
    """RMS norm of each head's output, scaled by w, times SiLU of the gate: (output BSVE, gate BSVE) → BSVE."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = output.float()
        normed = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return ((self.weight * normed.to(output.dtype)) * F.silu(gate.float())).to(output.dtype)


class GatedDeltaNet(torch.nn.Module):
    """hidden BSH → BSH, with the parameter names of Hugging Face's modules (and so of slime's checkpoints)."""

    def __init__(self, dims: Dimensions, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.dims = dims
        rows = 2 * dims.key_rows + dims.value_rows

        def linear(inputs: int, outputs: int) -> torch.nn.Linear:
            return torch.nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        if dims.interleaved:
            self.in_proj_qkvz = linear(dims.hidden, rows + dims.value_rows)
            self.in_proj_ba = linear(dims.hidden, 2 * dims.value_heads)
        else:
            self.in_proj_qkv = linear(dims.hidden, rows)
            self.in_proj_z = linear(dims.hidden, dims.value_rows)
            self.in_proj_b = linear(dims.hidden, dims.value_heads)
            self.in_proj_a = linear(dims.hidden, dims.value_heads)
        self.conv1d = torch.nn.Conv1d(rows, rows, dims.kernel, groups=rows, padding=dims.kernel - 1, bias=False, dtype=dtype)
        self.A_log = torch.nn.Parameter(torch.empty(dims.value_heads, dtype=dtype))
        self.dt_bias = torch.nn.Parameter(torch.empty(dims.value_heads, dtype=dtype))
        self.core = DeltaRule()
        self.norm = GatedNorm(dims.value_width, eps, dtype)
        self.out_proj = linear(dims.value_rows, dims.hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dims, (batch, length, _) = self.dims, hidden.shape
        qkv_BSC, z, b, a = self.project(hidden)
        mixed_BCS = self.conv1d(qkv_BSC.transpose(1, 2))[..., :length]
        query, key, value = F.silu(mixed_BCS).transpose(1, 2).split([dims.key_rows, dims.key_rows, dims.value_rows], dim=-1)
        decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        output = self.core(
            query.reshape(batch, length, dims.key_heads, dims.key_width),
            key.reshape(batch, length, dims.key_heads, dims.key_width),
            value.reshape(batch, length, dims.value_heads, dims.value_width),
            decay,
            b.sigmoid(),
        )
        gate = z.reshape(output.shape)
        return self.out_proj(self.norm(output, gate).flatten(2))  # type: ignore[no-any-return]

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """hidden BSH → (q, k, v in one BSC, gate BS(VE), beta BSV, decay BSV).  Interleaved: each key head's parts stand together."""
        if not self.dims.interleaved:
            return self.in_proj_qkv(hidden), self.in_proj_z(hidden), self.in_proj_b(hidden), self.in_proj_a(hidden)
        heads, ratio = self.dims.key_heads, self.dims.value_heads // self.dims.key_heads
        wide = ratio * self.dims.value_width
        by_head = self.in_proj_qkvz(hidden).unflatten(-1, (heads, -1)).split([self.dims.key_width, self.dims.key_width, wide, wide], -1)
        q, k, v, z = (part.flatten(2) for part in by_head)
        b, a = (part.flatten(2) for part in self.in_proj_ba(hidden).unflatten(-1, (heads, -1)).split(ratio, -1))
        return torch.cat([q, k, v], -1), z, b, a


def _unit(vector: torch.Tensor) -> torch.Tensor:
    return vector / torch.sqrt(vector.square().sum(-1, keepdim=True) + 1e-6)


def _with_fla(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    repeat = value.shape[2] // key.shape[2]
    query, key = (t.repeat_interleave(repeat, dim=2) for t in (query, key))
    output, _ = chunk_gated_delta_rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
    return output  # type: ignore[no-any-return]
