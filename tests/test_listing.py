"""taps: what is listened to on both sides, in both layouts, and which of it fires."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
from bisect_hooks.family import LAYOUTS, CheckpointLayout
from bisect_hooks.site import Site
from bisect_hooks.tap import Tap
from workshop import Workshop

from bisect_tool.__main__ import run
from bisect_tool.golden import folder
from bisect_tool.listing import Column

GOLDEN = folder()
EMBEDDED = str(GOLDEN / "tiny-qwen3.5-moe")


def listed(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, list[str]]:
    """Site → the lines under it; the summaries stand under ''."""
    assert run(["taps", *flags]) == 0
    found: dict[str, list[str]] = {"": []}
    key = ""
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("    "):
            found[key].append(" ".join(line.split()))
        elif " of " in line:
            found[""].append(line)
        else:
            key = line
            found[key] = []
    return found


def test_without_a_candidate_both_layouts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "--reference", EMBEDDED)
    assert found["layers.0.input_norm"] == [
        "transformers output of model.layers.0.input_layernorm 'b s h'",
        "megatron-core, slime output of decoder.layers.0.self_attention.input_layernorm 'b s h'",
        "megatron-core, native output of decoder.layers.0.input_layernorm 's[sp] b h'",
    ]
    assert found["layers.0.shared_expert_gate"][0] == (
        "transformers derived by the reference's formula of layers.0.shared_expert_gate:logit, layers.0.shared_expert.fc2"
    )
    assert list(found)[1:3] == ["tokens", "embedding"] and list(found)[-1] == "lm_head" and found[""] == []


def test_a_family_with_one_layout_needs_only_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1, "vocab_size": 9, "hidden_size": 8, "rms_norm_eps": 1e-6}
    config |= {"num_attention_heads": 2, "intermediate_size": 12, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = listed(capsys, "--reference", str(tmp_path))
    assert found["layers.0.attention.qkv:k"] == [
        "transformers output of model.layers.0.self_attn.k_proj 'b s f'",
        "megatron-core output of decoder.layers.0.self_attention.linear_qkv 's b (g (q:4 k:4 v:4))[tp]'",
    ]


@pytest.mark.ranks
def test_every_tap_of_the_embedded_model_fires_on_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "--fire", "--prompts", str(GOLDEN / "gate-prompts.jsonl"))
    assert found[""] == ["transformers: 192 of 192 taps fired once", "megatron-core: 180 of 180 taps fired once"]
    assert found["lm_head"] == [
        "transformers output of lm_head 'b s v' fired",
        "megatron-core output of output_layer 's b v[tp]' fired",
    ]


@pytest.mark.ranks
@pytest.mark.wide
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_every_tap_of_a_family_fires(
    family: str, layout: CheckpointLayout, workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = tiny.make(family, tmp_path / "reference")
    candidate = Workshop(tmp_path, reference).good(layout, "one")
    found = listed(capsys, "--reference", str(reference), "--candidate", str(candidate), "--fire")
    for summary, side in zip(found[""], ("transformers", "megatron-core"), strict=True):
        fired, of = re.fullmatch(rf"{side}: (\d+) of (\d+) taps fired once", summary).groups()  # type: ignore[union-attr]
        assert fired == of != "0"
    places = [one for key, lines in found.items() if key for one in lines if one[-1] != "-" and " derived by " not in one]
    assert {one.rpartition(" ")[2] for one in places} == {"fired"}


def test_what_did_not_fire_once_is_said_by_name() -> None:
    taps = [Tap(Site("input", n), f"model.layers.{n}", "b s h") for n in range(3)]
    column = Column("transformers", {str(tap.site): tap for tap in taps}, {taps[0].id: 1, taps[1].id: 2})
    assert (
        column.summary == "transformers: 1 of 3 taps fired once; not so: layers.1.input at model.layers.1, layers.2.input at model.layers.2"
    )
    assert [column.shown(str(tap.site)).rpartition("   ")[2] for tap in taps] == ["fired", "fired 2 times", "did not fire"]


def test_prompts_without_a_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["taps", "--prompts", "x"]) == 2
    assert capsys.readouterr().err == "Error: --prompts is what --fire runs: give --fire too\n"
