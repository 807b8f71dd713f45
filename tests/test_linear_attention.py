"""Our gated delta net steps through the tokens; transformers' works in chunks.  Both compute one function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bisect_hooks.blocks.linear_attention import each_once
from bisect_hooks.family import Dimensions
from bisect_hooks.linear_attention import DeltaRule, GatedDeltaNet
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

EPS = 1e-6
DIMS = Dimensions(
    layers=1, hidden=32, heads=2, groups=1, head_width=16, vocabulary=50, kinds=("linear_attention",), moe=(True,), output_gate=True,
    tied=False, mtp=0, positions=512, key_heads=2, key_width=8, value_heads=6, value_width=12, kernel=4,
)  # fmt: skip
# one token, less than the convolution sees, a chunk of 64 exactly, one more, and two chunks with a rest
LENGTHS = (1, 3, 5, 64, 65, 130)


def both_sides(interleaved: bool = False) -> tuple[torch.nn.Module, GatedDeltaNet]:
    config_class, module = (Qwen3NextConfig, Qwen3NextGatedDeltaNet) if interleaved else (Qwen3_5MoeTextConfig, Qwen3_5MoeGatedDeltaNet)
    config = config_class(
        hidden_size=DIMS.hidden, linear_num_key_heads=DIMS.key_heads, linear_key_head_dim=DIMS.key_width, linear_num_value_heads=DIMS.value_heads,
        linear_value_head_dim=DIMS.value_width, linear_conv_kernel_dim=DIMS.kernel, rms_norm_eps=EPS, dtype="float32", num_hidden_layers=1,
    )  # fmt: skip
    reference = module(config, layer_idx=0)
    candidate = GatedDeltaNet(replace(DIMS, interleaved=interleaved), EPS, torch.float32)
    generator = torch.Generator().manual_seed(3)
    weights = {name: 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in reference.state_dict().items()}
    reference.load_state_dict(weights)
    candidate.load_state_dict(weights)  # strict: also the names are the same
    return reference.eval(), candidate.eval()


def apart(reference: torch.nn.Module, candidate: torch.nn.Module, length: int) -> float:
    hidden = torch.randn(2, length, DIMS.hidden, generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        r, c = reference(hidden).double(), candidate(hidden).double()
    assert r.shape == c.shape == hidden.shape
    assert float(r.norm()) > 0
    return float((c - r).norm() / r.norm())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_it_computes_what_transformers_computes(length: int, interleaved: bool) -> None:
    assert apart(*both_sides(interleaved), length) < 1e-5


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "conv1d.weight", "in_proj_b.weight", "in_proj_z.weight", "norm.weight"])
def test_a_wrong_weight_is_seen(name: str) -> None:
    reference, candidate = both_sides()
    with torch.no_grad():
        candidate.state_dict()[name].mul_(1.01)
    assert apart(reference, candidate, 65) > 1e-4


def test_it_looks_at_no_later_token() -> None:
    _, candidate = both_sides()
    hidden = torch.randn(1, 20, DIMS.hidden, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, begun = candidate(hidden), candidate(hidden[:, :11])
    assert float((whole[:, :11] - begun).norm() / begun.norm()) < 1e-5


def test_with_full_decay_and_no_past_the_rule_answers_with_the_value_it_was_just_told() -> None:
    """Formula by hand for one head: state = β v kᵀ, output = v β (k·q) / √D."""
    key = torch.tensor([[[[3.0, 4.0]]], [[[0.0, 2.0]]]])
    value = torch.tensor([[[[5.0]]], [[[7.0]]]])
    output = DeltaRule()(key, key, value, torch.zeros(2, 1, 1), torch.full((2, 1, 1), 0.5))
    torch.testing.assert_close(output, value * 0.5 / 2**0.5, rtol=1e-5, atol=0)


def test_heads_that_are_repeated_before_the_rule_are_heard_once() -> None:
    own = torch.randn(2, 5, 3, 4)
    assert torch.equal(each_once(3, own.repeat_interleave(2, dim=2)), own)
    assert torch.equal(each_once(3, own), own)
