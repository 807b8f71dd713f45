"""Several faults at once: each is placed and proved for itself, and what one of them carries along is not accused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from bisect_hooks.parallel import Parallel
from cases import FORWARD, Verdict, fault
from safetensors.torch import load_file, save_file
from test_small import found, judged, made
from workshop import REFERENCE, ROOT, Workshop, judge

from bisect_tool.conversion import convert

pytestmark = pytest.mark.ranks
QUICK = (*FORWARD, "--no-answers")

# ranks that should hold the same and do not: rank 1's copy alone is off
NORM_OF_ONE = "layers[3].pre_mlp_layernorm.register_forward_hook(lambda module, args, output: output * (1.01 if rank == 1 else 1.0))"
ROUTER_OF_ONE = (
    "layers[6].mlp.router.register_forward_hook(lambda module, args, output: (output[0] * (1.1 if rank == 1 else 1.0), *output[1:]))"
)
# sums that no site hears: what attention gives as it is added, and what the MLP gives
AFTER_ATTENTION = "layers[4].self_attention.register_forward_hook(lambda module, args, output: (output[0] * 1.02, *output[1:]))"
ONE_LESS, ONE_MORE = "layers[2].mlp.router.topk = 3", "layers[6].mlp.router.topk = 5"
AFTER_MLP = "layers[5].mlp.register_forward_hook(lambda module, args, output: (output[0] * 1.02, *output[1:]))"


def captured(layer: int, module: str, *parts: str) -> Verdict:
    return made([layer], module, *parts, cls="capture", tp=[0, 1])


def test_replicas_that_differ_are_named_in_every_layer_and_what_they_feed_is_not_accused(workshop: Workshop, tmp_path: Path) -> None:
    page = judged(workshop.good("slime", "one"), tmp_path, "tp2", NORM_OF_ONE, ROUTER_OF_ONE, more=QUICK)
    assert found(page) == [captured(3, "pre_mlp_norm"), captured(6, "router", "probs")]
    assert "What it feeds differs, and is not judged: layers.3.shared_expert.fc1" in page["first"]["explanation"]


def test_a_difference_between_replicas_is_not_taken_for_cured(workshop: Workshop, tmp_path: Path) -> None:
    """Under SP each rank has tokens of its own; without it both have all, and only their replicas tell that one is off."""
    page = judged(workshop.good("slime", "one"), tmp_path, "tp2sp", ROUTER_OF_ONE, more=QUICK)
    assert found(page) == [made([6], "router", "probs", cls="parallel", tp=[0, 1])]
    assert page["first"]["axes"] == ["tp"]


def test_a_sum_that_is_off_is_not_the_fault_of_the_modules_beside_it(workshop: Workshop, tmp_path: Path) -> None:
    page = judged(workshop.good("slime", "one"), tmp_path, "one", AFTER_ATTENTION, AFTER_MLP, more=QUICK)
    assert found(page) == [made([4], "pre_mlp_norm"), made([5], "mlp")]
    first, second = page["faults"]
    assert "it is the sum before it" in first["explanation"] and "it is their sum" in second["explanation"]
    for one in page["faults"]:  # its own formula, because grafting the reference's value there proves nothing
        assert one["proof"]["after"] < 1e-6 < one["proof"]["before"]


@pytest.mark.parametrize(("line", "layer", "counts"), [(ONE_LESS, 2, (3, 4)), (ONE_MORE, 6, (5, 4))])
def test_another_number_of_experts_is_one_fault_of_the_choice(
    line: str, layer: int, counts: tuple[int, int], workshop: Workshop, tmp_path: Path
) -> None:
    page = judged(workshop.good("slime", "one"), tmp_path, "one", line, more=QUICK)
    assert found(page) == [made([layer], "router", "topk")]
    assert "It chooses {} experts a token where the reference chooses {}.".format(*counts) in page["first"]["explanation"]


def test_two_faults_of_one_layer_are_proved_apart(workshop: Workshop, tmp_path: Path) -> None:
    """Each with the other cured: what grafting one leaves is not what the other makes."""
    lines = (
        "layers[4].self_attention.linear_attn.out_proj.weight.mul_(1.5)",
        "layers[4].mlp.shared_experts.linear_fc2.weight.zero_()",
    )
    page = judged(workshop.good("slime", "one"), tmp_path, "one", *lines, more=QUICK)
    assert found(page) == [made([4], "linear_attention", "out_proj"), made([4], "shared_expert", "fc2")]
    first, second = (one["proof"] for one in page["faults"])
    assert first["before"] != second["before"] and max(first["after"], second["after"]) < 1e-6 < min(first["before"], second["before"])
    assert "with the cure of layers.4.shared_expert.fc2;" in first["experiment"]


def test_a_token_that_is_no_number_is_one_fault_where_it_is_made(workshop: Workshop, tmp_path: Path) -> None:
    line = "gating = layers[5].mlp.router.gating; layers[5].mlp.router.gating = lambda x: gating(x) * scale_of(x, 2, float('nan'))"
    page = judged(workshop.good("slime", "one"), tmp_path, "one", line, more=QUICK)
    assert found(page) == [made([5], "router", "logits")]
    first = page["first"]
    assert first["shape"]["text"] == "only at token 2"
    assert (first["proof"]["before"], first["shows_at"]) == ("nan", "layers.5.router.probs")
    assert first["proof"]["after"] < 1e-6


def exchanged_columns(folder: Path, name: str, one: int, other: int) -> Path:
    """The embedded model with two columns of a tensor in each other's place, converted."""
    shutil.copytree(REFERENCE, folder / "reference")
    for file in (folder / "reference").glob("*.safetensors"):
        tensors = load_file(file)
        for matrix in (tensor for key, tensor in tensors.items() if key.endswith(name)):
            matrix[:, [one, other]] = matrix[:, [other, one]]
        save_file(tensors, file, metadata={"format": "pt"})
    convert(folder / "reference", folder / "candidate", "slime", Parallel(), None)
    return folder / "candidate"


def test_wrong_columns_of_what_ranks_add_up_are_placed_by_their_bytes(tmp_path: Path) -> None:
    """And each fault is shown where it shows by itself, whatever an earlier one does to the free run."""
    candidate = exchanged_columns(tmp_path, "layers.7.self_attn.o_proj.weight", 200, 201)
    line = "layers[3].self_attention.core_attention.register_forward_hook(lambda module, args, output: output * 1.02)"
    page = judged(candidate, tmp_path, "tp2", line, more=QUICK)
    assert found(page) == [
        made([3], "attention", "core", tp=[0, 1]),
        fault("conversion", [7], "attention", ["out_proj"], "permutation", "run", None, tp=[1]),
    ]
    assert [one["shows_at"] for one in page["faults"]] == ["layers.3.attention.out_proj", "layers.7.pre_mlp_norm"]


def test_one_token_shows_no_positions_and_clears_no_definition(workshop: Workshop, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"input_ids": [17]}) + "\n")
    page = judged(workshop.faulty("slime", "one", "P01"), tmp_path, "one", prompts=prompts)
    assert (page["verdict"], page.get("cleared", [])) == ("agrees", [])
    left = {one["what"]: one["why"] for one in page["stages"][3]["skipped"]}
    assert left["rows of the embedding"].startswith("1 of 500 tokens")
    assert left["positions, attention to other tokens, the past of a convolution or a recurrence"] == "no prompt has more than one token"


def test_a_spoiled_recording_is_doubted_before_the_reference_is(workshop: Workshop, tmp_path: Path) -> None:
    golden = tmp_path / "golden"
    shutil.copytree(ROOT / "golden/recording", golden / "recording")
    file = golden / "recording/layers.004.safetensors"
    tensors = load_file(file)
    tensors["layers.4.experts.combine"] = tensors["layers.4.experts.combine"] * 1.01
    save_file(tensors, file, metadata={"format": "pt"})
    code, page = judge(workshop.good("slime", "one"), tmp_path / "out", "one", *QUICK, "--golden", str(golden))
    assert (code, page["first"]["class"], page["first"]["site"]) == (1, "reference", "layers.4.experts.combine")
    assert page["first"]["next"].startswith("Record the reference again")


def test_what_lies_outside_the_layers_is_placed_there(workshop: Workshop, tmp_path: Path) -> None:
    lines = ("model.embedding.word_embeddings.weight.mul_(1.02)", "model.decoder.final_layernorm.weight[5].add_(0.01)")
    page = judged(workshop.good("slime", "one"), tmp_path, "one", *lines, more=QUICK)
    assert found(page) == [made([], "embedding"), made([], "final_norm")]


def test_a_fault_in_bf16_is_not_called_normal(workshop: Workshop, tmp_path: Path) -> None:
    line = "layers[2].pre_mlp_layernorm.weight[40].add_(0.5)"
    page = judged(workshop.good("slime", "one"), tmp_path, "one", line, more=(*QUICK, "--dtype", "bf16"))
    assert found(page) == [made([2], "pre_mlp_norm")]
    assert any("is this normal? the size is, but there is a fault" in note for note in page["stages"][3]["notes"])
