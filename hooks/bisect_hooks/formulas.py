"""Each kind of module as its formula, in float64 and in plain sums: a third opinion where two implementations disagree.

Written from the papers and the documented definitions, and sharing no code with either side (`model.double()` would not do: norms,
softmax, rope and the delta rule of transformers cast to float32).  A tensor is [tokens ...], segments one after another; nothing that
looks back looks over the start of a segment.

Shapes: T tokens, H hidden, N query heads, G KV heads, D head width, K key heads, V value heads (a multiple of K), E value width,
X experts, F expert width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812

Segments = Sequence[int]
ROWS = 8192


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, on the CPU."""
    return tensor.detach().to("cpu", torch.float64)


def positions_of(segments: Segments) -> torch.Tensor:
    """0, 1, 2 .. in every segment, [T]."""
    return torch.cat([torch.arange(length) for length in segments])


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, zero_centred: bool = False) -> torch.Tensor:
    """x / √(mean(x²) + eps) · w, or · (1 + w)."""
    x, scale = wide(x_TH), wide(weight_H) + (1 if zero_centred else 0)
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * scale


def linear(x_TH: torch.Tensor, weight_FH: torch.Tensor, bias_F: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b, some rows of W at a time: in float64 a whole head is four times its file."""
    x = wide(x_TH)
    out = torch.cat([x @ wide(rows).T for rows in weight_FH.split(ROWS)], -1)
    return out if bias_F is None else out + wide(bias_F)


def rope(x_TND: torch.Tensor, positions_T: torch.Tensor, base: float, width: int) -> torch.Tensor:
    """Rotates dims i and i + width/2 of the first `width` dims by position · base^(−2i/width); the rest stays."""
    x, half = wide(x_TND), width // 2
    frequency = torch.tensor([base ** (-2 * i / width) for i in range(half)], dtype=torch.float64)
    angle_T1F = wide(positions_T)[:, None, None] * frequency
    one, other = x[..., :half], x[..., half:width]
    turned = (one * angle_T1F.cos() - other * angle_T1F.sin(), other * angle_T1F.cos() + one * angle_T1F.sin())
    return torch.cat([*turned, x[..., width:]], -1)


def attention(q_TND: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Causal softmax(q kᵀ / √D) v; query head n reads KV head n · G / N → [T N D]."""
    repeat, found = q_TND.shape[1] // k_TGD.shape[1], []
    for q, k, v in zip(*(wide(tensor).split(list(segments)) for tensor in (q_TND, k_TGD, v_TGD)), strict=True):
        k, v = (tensor.repeat_interleave(repeat, 1) for tensor in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q, k) / math.sqrt(q.shape[-1])
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        found.append(torch.einsum("nqk,knd->qnd", scores.masked_fill(later, -math.inf).softmax(-1), v))
    return torch.cat(found)


def gate(output_TF: torch.Tensor, gate_TF: torch.Tensor) -> torch.Tensor:
    """The output of attention, or of the shared expert, times the sigmoid of its gate."""
    return wide(output_TF) * torch.sigmoid(wide(gate_TF))


def conv(x_TC: torch.Tensor, weight_CJ: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Causal depthwise convolution over the last J tokens of a segment, then SiLU."""
    kernel, found = wide(weight_CJ.reshape(weight_CJ.shape[0], -1)), []
    for x in wide(x_TC).split(list(segments)):
        reach = kernel.shape[1]
        before = torch.cat([x.new_zeros(reach - 1, x.shape[1]), x])
        found.append(sum(before[j : j + len(x)] * kernel[:, j] for j in range(reach)))
    return F.silu(torch.cat([torch.as_tensor(one) for one in found]))


def decay(alpha_TV: torch.Tensor, a_log_V: torch.Tensor, dt_bias_V: torch.Tensor) -> torch.Tensor:
    """The logarithm of what is kept of the state: −exp(A) · softplus(α + dt)."""
    return -wide(a_log_V).exp() * torch.log1p((wide(alpha_TV) + wide(dt_bias_V)).exp())


def delta_rule(
    q_TKD: torch.Tensor, k_TKD: torch.Tensor, v_TVE: torch.Tensor, decay_TV: torch.Tensor, beta_TV: torch.Tensor, segments: Segments
) -> torch.Tensor:
    """S ← e^decay S; S ← S + β k (v − Sᵀk)ᵀ; out = Sᵀ q / √D, with q and k of unit length → [T V E]."""
    repeat = v_TVE.shape[1] // q_TKD.shape[1]
    unit = [wide(t) / torch.sqrt(wide(t).square().sum(-1, keepdim=True) + 1e-6) for t in (q_TKD, k_TKD)]
    q, k = (tensor.repeat_interleave(repeat, 1) for tensor in unit)
    v, keep, beta, found = wide(v_TVE), wide(decay_TV).exp(), wide(beta_TV), []
    firsts = {sum(segments[:i]) for i in range(len(segments))}
    for t in range(len(v)):
        if t in firsts:
            state_VDE = v.new_zeros(v.shape[1], q.shape[-1], v.shape[-1])
        state_VDE = state_VDE * keep[t, :, None, None]
        surprise_VE = v[t] - (state_VDE * k[t, :, :, None]).sum(1)
        state_VDE = state_VDE + beta[t, :, None, None] * k[t, :, :, None] * surprise_VE[:, None, :]
        found.append((state_VDE * q[t, :, :, None]).sum(1) / math.sqrt(q.shape[-1]))
    return torch.stack(found)


def gated_norm(core_TVE: torch.Tensor, z_TVE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm of each head's output, times SiLU of its gate."""
    return rms_norm(core_TVE, weight_E, eps) * F.silu(wide(z_TVE))


def route(
    logits_TX: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias_X: torch.Tensor | None = None,
    scale: float = 1.0,
    renormalised: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [T X], zero where not chosen and, renormalised, adding up to `scale`; chosen [T X] as 0 and 1).

    score  "softmax" over all experts, or "sigmoid" of each; a bias chooses and does not weigh
    """
    scores = wide(logits_TX).softmax(-1) if score == "softmax" else torch.sigmoid(wide(logits_TX))
    ranked = scores if bias_X is None else scores + wide(bias_X)
    chosen = torch.zeros_like(scores).scatter(-1, ranked.topk(top_k, -1).indices, 1.0)
    kept = scores * chosen
    return (kept / kept.sum(-1, keepdim=True) if renormalised else kept) * scale, chosen


def swiglu(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) · up."""
    return F.silu(wide(gate_TF)) * wide(up_TF)


def expert(x_TH: torch.Tensor, gate_up_2FH: torch.Tensor, down_HF: torch.Tensor) -> torch.Tensor:
    """One expert: down(SiLU(gate x) · up x)."""
    one, other = linear(x_TH, gate_up_2FH).chunk(2, -1)
    return linear(swiglu(one, other), down_HF)


def experts(x_TH: torch.Tensor, gate_up_X2FH: torch.Tensor, down_XHF: torch.Tensor, weights_TX: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the experts chosen for each token."""
    x, weights = wide(x_TH), wide(weights_TX)
    out = torch.zeros_like(x)
    for number, (first, second) in enumerate(zip(gate_up_X2FH, down_XHF, strict=True)):
        tokens = weights[:, number].nonzero().flatten()
        out[tokens] += weights[tokens, number, None] * expert(x[tokens], first, second)
    return out
