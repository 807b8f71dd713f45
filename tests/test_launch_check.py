from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bisect_hooks.family import family_of

from bisect_tool.launch.launch import Launch
from bisect_tool.launch.read import read_launch
from bisect_tool.launch.words import Where
from bisect_tool.launch_check import Judged, judge
from bisect_tool.model_args import narrowed

DATA = Path(__file__).parent / "data"
CONFIG: dict[str, Any] = json.loads((DATA / "configs/Qwen3.5-35B-A3B/config.json").read_text())
FAMILY = family_of(CONFIG)
DIMS = FAMILY.reference_dimensions(CONFIG)
GOOD = read_launch(DATA / "launch/torchrun_35b.txt")
HERE = Where(Path("run.sh"), 1)


def launch(
    drop: tuple[str, ...] = (), whole: bool = True, unsaid: Any = "megatron", program: str = "pretrain_gpt.py", **args: Any
) -> Launch:
    held = {name: value for name, value in GOOD.args.items() if name not in drop} | args
    return Launch(Path("run.sh"), "bash script", held, dict.fromkeys(held, HERE), whole=whole, unsaid=unsaid, program=program)


def flags(found: Judged) -> list[str]:
    return [one.setting.flag for one in found.mismatches]


KINDS = ("experimental_attention_variant", *(name for name in GOOD.args if name.startswith("linear_")))


def test_a_whole_command_line_without_linear_attention_is_another_model() -> None:
    assert flags(judge(FAMILY, CONFIG, launch())) == []
    assert flags(judge(FAMILY, CONFIG, launch(drop=KINDS))) == ["--linear-attention-freq"]


@pytest.mark.parametrize("plugin", ["slime_plugins", "miles_plugins"])
def test_a_spec_that_reads_config_json_says_the_layer_kinds(plugin: str) -> None:
    found = judge(FAMILY, CONFIG, launch(drop=KINDS, spec=[f"{plugin}.models.qwen3_5", "get_qwen3_5_spec"]))
    assert flags(found) == [] and any(f"{plugin}.models.qwen3_5 reads them" in note for note in found.notes)


def test_another_spec_or_a_part_of_a_command_leaves_the_layer_kinds_out() -> None:
    for one, why in (
        (launch(drop=KINDS, spec=["mine", "spec"]), "the launch's own spec (mine spec)"),
        (launch(drop=KINDS, whole=False), "name no layer spec"),
    ):
        found = judge(FAMILY, CONFIG, one)
        assert flags(found) == [] and any(what == "layer kinds, linear attention" and why in reason for what, reason in found.skipped)


def test_a_bridge_is_judged_by_what_it_is_told_alone() -> None:
    told = Launch(Path("run.sh"), "overrides", {"norm_epsilon": 1e-5}, {"norm_epsilon": HERE}, unsaid="reference")
    found = judge(FAMILY, CONFIG, told)
    assert flags(found) == ["--norm-epsilon"] and found.compared == 1


def test_sectioned_positions_are_plain_ones_for_text() -> None:
    assert flags(judge(FAMILY, CONFIG, launch(position_embedding_type="mrope"))) == []
    assert flags(judge(FAMILY, CONFIG, launch(position_embedding_type="none"))) == ["--position-embedding-type"]


def test_defaults_that_are_made_of_other_flags() -> None:
    assert flags(judge(FAMILY, CONFIG, launch(drop=("moe_ffn_hidden_size",), ffn_hidden_size=512))) == []
    assert flags(judge(FAMILY, CONFIG, launch(drop=("moe_ffn_hidden_size",), ffn_hidden_size=6144))) == ["--moe-ffn-hidden-size"]
    assert flags(judge(FAMILY, CONFIG, launch(drop=("position_embedding_type",), use_rotary_position_embeddings=True))) == []
    (one,) = judge(FAMILY, CONFIG, launch(drop=("kv_channels",))).mismatches
    assert one.value == 2048 // 16


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"use_gated_attention": True}, "--use-gated-attention"),
        ({"moe_token_drop_policy": "position"}, "--moe-token-drop-policy position"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
        ({"fp16": True}, "--fp16"),
        ({"hidden_dropout": 0.1}, "--hidden-dropout 0.1"),
        ({"make_vocab_size_divisible_by": 64}, "--make-vocab-size-divisible-by"),
    ],
)
def test_what_is_inert_is_a_note_with_its_reason(args: dict[str, Any], said: str) -> None:
    found = judge(FAMILY, CONFIG, launch(**args))
    assert flags(found) == []
    assert any(note.startswith(f"inert here: {said} (run.sh:1), because ") for note in found.notes)


def test_a_drop_policy_with_a_capacity_drops() -> None:
    found = judge(FAMILY, CONFIG, launch(moe_token_drop_policy="probs", moe_expert_capacity_factor=1.0))
    assert flags(found) == ["--moe-expert-capacity-factor"] and not any("drop-policy" in note for note in found.notes)
    assert flags(judge(FAMILY, CONFIG, launch(moe_expert_capacity_factor=-1.0))) == []


def test_dropout_by_default_is_said_of_training_alone() -> None:
    silent = ("attention_dropout", "hidden_dropout")
    assert any("--hidden-dropout 0.1 (Megatron's default)" in note for note in judge(FAMILY, CONFIG, launch(drop=silent)).notes)
    assert not any("dropout" in note for note in judge(FAMILY, CONFIG, launch(drop=silent, program="tools/convert.py")).notes)


def test_padding_rows_are_a_note() -> None:
    notes = judge(FAMILY, CONFIG, launch(make_vocab_size_divisible_by=1000)).notes
    assert "vocabulary 248320 is padded to 250000 rows (a multiple of 2000): 1680 rows that no token has" in notes


def test_mtp_is_left_out_given_or_too_deep() -> None:
    assert ("mtp", "left out by the launch (no --mtp-num-layers): the text is not touched") in judge(
        FAMILY, CONFIG, launch(drop=("mtp_num_layers",))
    ).skipped
    assert flags(judge(FAMILY, CONFIG, launch(mtp_num_layers=1))) == []
    assert flags(judge(FAMILY, CONFIG, launch(mtp_num_layers=3))) == ["--mtp-num-layers"]


def test_a_pattern_reaches_the_layers_it_differs_in() -> None:
    (setting,) = [one for one in FAMILY.settings(CONFIG, "native") if one.arg == "moe_layer_freq"]
    assert [site.layer for site in narrowed(setting, [0, 0, *[1] * 38], DIMS).sites] == [0, 1]
    assert len(narrowed(setting, "[1,", DIMS).sites) == 40


def test_misspelled_flags_are_said() -> None:
    one = launch(drop=("rotary_base",))
    found = judge(FAMILY, CONFIG, Launch(one.path, one.kind, one.args, one.said, [("--rotary-bsae", HERE)]))
    assert ("--rotary-bsae", "run.sh:1: --rotary-bsae is no flag that we know; --rotary-base is, and is not given") in found.skipped
    assert found.undecided
    assert flags(found) == ["--rotary-base"]
