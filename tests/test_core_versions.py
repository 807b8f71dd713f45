"""Other releases of megatron-core: what one lacks is said, and what one puts right is left alone.  They are run by make versions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bisect_hooks.core_versions import config_of
from bisect_hooks.cpu import SlicedGate
from bisect_hooks.errors import UsageError

SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}


def test_a_word_that_a_release_lacks_is_left_out_where_it_is_off_and_refused_where_it_is_not() -> None:
    assert config_of(**SIZES, a_word_of_tomorrow=None, another=0).hidden_size == 8
    with pytest.raises(UsageError, match=r"megatron-core [\d.]+ has no a_word_of_tomorrow that this candidate's args ask for"):
        config_of(**SIZES, a_word_of_tomorrow=True, another=0)


class Upstream:
    """megatron-core's attention on rank 3 of 4 that share 2 KV heads: the gate of the whole group, or (0.19) sliced already."""

    def __init__(self, heads: int) -> None:
        self.found = tuple(torch.randn(2, 1, n, 4) for n in (2, 1, 1, heads))
        self.world_size, self.config = 4, SimpleNamespace(num_query_groups=2)
        self.pg_collection = SimpleNamespace(tp=SimpleNamespace(rank=lambda: 3))

    def get_query_key_value_tensors(self) -> tuple[torch.Tensor, ...]:
        return self.found


class Sliced(SlicedGate, Upstream):
    pass


@pytest.mark.parametrize(("heads", "start"), [(4, 2), (2, 0)], ids=["0.16", "0.19"])
def test_a_gate_is_sliced_once(heads: int, start: int) -> None:
    attention: Any = Sliced(heads)
    gate = attention.get_query_key_value_tensors()[3]
    assert torch.equal(gate, attention.found[3][:, :, start : start + 2])
