from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bisect_hooks.family import Dimensions, family_of

from bisect_tool.fitting import fit

CONFIG = json.loads((Path(__file__).parent / "data/configs/Qwen3.5-35B-A3B/config.json").read_text())
DIMS: Dimensions = family_of(CONFIG).reference_dimensions(CONFIG)


def sizes(tp: int = 1, pp: int = 1, ep: int = 1, **more: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep, **more}


def flags(args: dict[str, Any], dims: Dimensions = DIMS) -> dict[str, str]:
    return {
        str(one.relation.detail["flag"]): str(one.relation.detail["expected"]) for one in fit(args, dims, "native").findings if one.relation
    }


def test_no_sizes_say_nothing() -> None:
    found = fit({"num_layers": 40}, DIMS, "native")
    assert found.findings == [] and found.notes == [] and found.parallel.one_rank


def test_sizes_that_divide_are_said_a_rank() -> None:
    found = fit(sizes(tp=2, pp=4, ep=8, expert_tensor_parallel_size=1), DIMS, "native")
    assert found.findings == []
    assert found.notes[0] == "TP 2: 8 heads and 1 KV head a rank, EP 8: 32 experts a rank"
    assert found.notes[1].startswith("PP 4: 10 layers each, beginning at layers 0, 10, 20 and 30")


def test_every_axis_names_what_it_does_not_divide() -> None:
    assert flags(sizes(tp=3)) == {
        "--tensor-model-parallel-size": "a divisor of 16 attention heads and 2 KV heads and 16 linear attention key heads and 512 rows of the shared expert",
        "--expert-tensor-parallel-size": "a divisor of 512 rows of an expert",
    }
    assert flags(sizes(ep=7)) == {"--expert-model-parallel-size": "a divisor of 256 experts"}
    assert flags(sizes(pp=7)) == {"--pipeline-model-parallel-size": "a divisor of 40 layers"}


def test_kv_heads_fewer_than_tp_are_held_by_several_ranks() -> None:
    found = fit(sizes(tp=4), DIMS, "native")
    assert found.findings == []
    assert any("TP 4 is more than the 2 KV heads: each is held by 2 ranks" in note and "Megatron-LM#3575" in note for note in found.notes)
    assert not any("3575" in note for note in fit(sizes(tp=4), replace(DIMS, output_gate=False), "native").notes)


def test_stages_of_unequal_size_and_vpp() -> None:
    uneven = fit(sizes(pp=3, decoder_first_pipeline_num_layers=12, decoder_last_pipeline_num_layers=12), DIMS, "native")
    assert (
        uneven.findings == []
        and "12, 16, 12 layers, beginning at layers 0, 12 and 28" in uneven.notes[-1]
        and "period" not in uneven.notes[-1]
    )
    assert "not all multiples of the period 4" in fit(sizes(pp=2, decoder_first_pipeline_num_layers=17), DIMS, "native").notes[-1]
    virtual = fit(sizes(pp=2, num_layers_per_virtual_pipeline_stage=10), DIMS, "native")
    assert virtual.parallel.vpp == 2 and "PP 2 x VPP 2: 10 layers each, beginning at layers 0, 10, 20 and 30" in virtual.notes[-1]
    held = fit(sizes(pp=6, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True), DIMS, "native")
    assert held.parallel.pp_layers == (6, 7, 7, 7, 7, 6)


@pytest.mark.parametrize("kind", [["linear_attention"] * 3 + ["attention"]])
def test_the_kind_that_each_stage_begins_with(kind: list[str]) -> None:
    dims = replace(DIMS, layers=12, kinds=tuple(kind * 3), moe=(True,) * 12)
    assert "(linear attention, attention, linear attention, linear attention)" in fit(sizes(pp=4), dims, "native").notes[-1]


def test_ranks_that_do_not_fit() -> None:
    assert flags(sizes(tp=2, pp=4, actor_num_nodes=3, actor_num_gpus_per_node=4)) == {
        "--actor-num-nodes": "ranks that TP x CP x PP = 8 divides"
    }
    assert flags(sizes(ep=16, actor_num_nodes=1, actor_num_gpus_per_node=8)) == {
        "--actor-num-nodes": "ranks that EP x ETP x PP = 16 divides"
    }
    assert (
        "8 ranks: DP 4, expert DP 1"
        in fit(sizes(tp=2, ep=8, expert_tensor_parallel_size=1, actor_num_nodes=1, actor_num_gpus_per_node=8), DIMS, "native").notes
    )
