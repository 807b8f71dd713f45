"""A candidate that stores the reference rounded once, and one that can't be built of its own words: the whole verdict of each."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from bisect_hooks.errors import UsageError, first_sentence
from bisect_hooks.family import family_of
from bisect_hooks.parallel import Parallel
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from weights_edits import FC2, PROJ
from workshop import verdict_of

from bisect_tool.__main__ import run
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.conversion import convert
from bisect_tool.hf_directory import open_hf
from bisect_tool.rounding import Rounding, rounded_once

LAYER = "decoder.layers.2."


State = dict[str, torch.Tensor]


def edited(good: Path, out: Path, edit: Callable[[State], State] = dict, **args: Any) -> Path:
    """A conversion written anew with other tensors, or other args."""
    source = open_checkpoint(good)
    tensors = edit({key: source.read(key) for key in source.tensors})
    save({key: tensor.contiguous() for key, tensor in tensors.items()}, storage_writer=FileSystemWriter(out), no_dist=True)
    torch.save(dict(source.common) | {"args": Namespace(**(source.args | args))}, out / "common.pt")
    shutil.copy(source.path / "metadata.json", out)
    return out


def in_bf16(tensors: State) -> State:
    return {key: tensor.bfloat16() for key, tensor in tensors.items()}


def changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    return lambda tensors: tensors | {key: change(tensors[key])}


def in_fp32(reference: Path) -> Path:
    """The same model with values that bfloat16 can't hold."""
    file, generator = reference / "model.safetensors", torch.Generator().manual_seed(5)
    wider = {name: tensor.float() * (1 + 1e-3 * torch.randn(tensor.shape, generator=generator)) for name, tensor in load_file(file).items()}
    save_file(wider, file, metadata={"format": "pt"})
    return reference


class Model:
    """An fp32 reference and its conversion."""

    def __init__(self, family: str, folder: Path) -> None:
        self.reference, self.good = in_fp32(tiny.make(family, folder / "reference")), folder / "good"
        self.prompts = tiny.prompts(folder / "prompts.jsonl")
        convert(self.reference, self.good, "native" if family == "llama" else "slime", Parallel(), None)

    def run(self, candidate: Path, out: Path, *more: str) -> int:
        asked = ["run", "--reference", str(self.reference), "--candidate", str(candidate), "--prompts", str(self.prompts)]
        return run([*asked, *more, "--out", str(out)])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield Model("llama", tmp_path_factory.mktemp("llama"))


def stage(out: Path, name: str = "forward") -> dict[str, Any]:
    page = json.loads((out / "report.json").read_text())
    return next(one for one in page["stages"] if one["name"] == name)


@pytest.mark.ranks
def test_an_fp32_reference_agrees_with_its_bf16_checkpoint(llama: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    candidate, golden = edited(llama.good, tmp_path / "x", in_bf16), tmp_path / "golden"
    assert llama.run(candidate, tmp_path / "out", "--all-stages") == 0
    (note,) = [note for note in stage(tmp_path / "out")["notes"] if "stores them" in note]
    assert note.startswith("embedding.word_embeddings.weight and 25 more: the candidate stores them in bfloat16, the reference has them in")
    assert json.loads((tmp_path / "out/report.json").read_text())["minor"] == []
    # a recording of the rounded reference is of use to no candidate that is stored otherwise, and the other way round
    asked = ["--reference", str(llama.reference), "--prompts", str(llama.prompts)]
    assert run(["record", "--side", "reference", "--candidate", str(candidate), *asked, "--out", str(golden / "recording")]) == 0
    assert llama.run(candidate, tmp_path / "again", "--golden", str(golden)) == 0
    capsys.readouterr()
    assert llama.run(llama.good, tmp_path / "other", "--golden", str(golden)) == 2
    assert "was not rounded as this candidate's dtypes round it" in capsys.readouterr().err
    assert llama.run(llama.good, tmp_path / "fp32") == 0


@pytest.mark.ranks
def test_a_fault_in_a_rounded_checkpoint_is_placed_and_proved(llama: Model, tmp_path: Path) -> None:
    swapped = changed(LAYER + PROJ, lambda tensor: tensor.flip(0))
    candidate = edited(llama.good, tmp_path / "x", lambda tensors: in_bf16(swapped(tensors)))
    assert llama.run(candidate, tmp_path / "out", "--stages", "inputs,forward") == 1
    (fault,) = json.loads((tmp_path / "out/report.json").read_text())["faults"]
    found = verdict_of(fault)
    assert (found["of"], found["class"], found["layers"], found["module"], found["relation"]) == (
        "run", "conversion", [2], "attention", "permutation",
    )  # fmt: skip
    assert fault["proof"]["after"] < 1e-5 < fault["proof"]["before"]


@pytest.mark.ranks
def test_where_nothing_agrees_the_proof_says_that_it_has_no_neighbour(llama: Model, tmp_path: Path) -> None:
    patch = tmp_path / "patch.py"
    patch.write_text("def patch(model, parallel):\n    for one in model.parameters():\n        one.mul_(1.01)\n")
    assert llama.run(llama.good, tmp_path / "out", "--stages", "inputs,forward", "--candidate-patch", str(patch)) == 1
    faults = json.loads((tmp_path / "out/report.json").read_text())["faults"]
    assert faults and any("no neighbour agrees" in fault["proof"]["control"] for fault in faults)


@pytest.mark.ranks
def test_a_fault_outranks_a_candidate_that_can_not_be_built(llama: Model, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    candidate = edited(llama.good, tmp_path / "x", num_query_groups=3)
    assert llama.run(candidate, tmp_path / "out", "--all-stages") == 1
    (fault,) = json.loads((tmp_path / "out/report.json").read_text())["faults"]
    assert (fault["class"], fault["relation"]["kind"]) == ("model-definition", "config")
    forward = stage(tmp_path / "out")
    assert forward["verdict"] == "incomparable"
    assert forward["notes"][-1].startswith("not compared: the stored shape and the args disagree: decoder.layers.0.self_attention")
    capfd.readouterr()
    assert llama.run(candidate, tmp_path / "alone", "--stages", "inputs,forward") == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert "the stored shape and the args disagree" in line


@pytest.mark.ranks
@pytest.mark.wide
@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"moe_layer_freq": [1, 0, 1, 1]}, "megatron-core can't load"),
        ({"moe_shared_expert_intermediate_size": 20}, "megatron-core can't load"),
        ({"moe_router_enable_expert_bias": True}, "no model can be built of the candidate's args: ValueError: Expert bias"),
        ({}, "the stored shape and the args disagree"),
    ],
)
def test_what_megatron_refuses_is_no_crash_of_ours(
    said: dict[str, Any], why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Model("qwen3-moe", tmp_path)
    transposed = changed(LAYER + FC2, lambda tensor: tensor.transpose(1, 2))
    candidate = edited(model.good, tmp_path / "x", **said) if said else edited(model.good, tmp_path / "x", transposed)
    assert model.run(candidate, tmp_path / "out", "--all-stages") == 1
    assert stage(tmp_path / "out")["notes"][-1].startswith(f"not compared: {why}")
    capfd.readouterr()
    assert model.run(candidate, tmp_path / "alone", "--stages", "inputs,forward") == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert why in line and len(line) < 500


@pytest.mark.ranks
@pytest.mark.wide
def test_what_the_family_keeps_in_fp32_stays_minor(tmp_path: Path) -> None:
    model = Model("qwen3-next", tmp_path)
    assert model.run(edited(model.good, tmp_path / "x", in_bf16), tmp_path / "out", "--all-stages") == 0
    page = json.loads((tmp_path / "out/report.json").read_text())
    assert [(one["parts"], one["relation"]["kind"]) for one in page["minor"]] == [(["a_log", "dt_bias"], "rounded")]


@pytest.mark.parametrize("family", ["qwen3-next", "glm4-moe"])
def test_only_the_dtype_is_taken_and_not_of_what_is_kept_in_fp32(family: str, tmp_path: Path) -> None:
    directory = open_hf(in_fp32(tiny.make(family, tmp_path / "reference")))
    known = family_of(directory.config)
    rules = known.rules(known.reference_dimensions(directory.config), "native", directory.names, mtp=False)
    stored = {made.name: torch.bfloat16 for rule in rules for made in rule.candidates}
    rounding = Rounding.of(directory, known, "native", stored)
    fp32 = {made.name for rule in rules for made in rule.candidates if made.fp32}
    assert fp32 and rounding.dtypes.keys() == stored.keys() - fp32
    for rule in rules:
        if not rule.op.lossy:
            for name in rule.references:
                before, after = directory.read(name), rounding.read(name)
                assert torch.equal(after, before if rule.candidates[0].fp32 else before.bfloat16().float()), name
    assert not Rounding.of(directory, known, "native", dict.fromkeys(stored, torch.float32)).dtypes
    assert not Rounding.of(directory, known, "native").dtypes


def test_what_overflows_is_no_rounding() -> None:
    large = torch.tensor([1.0, 1e6, 0.1])
    assert rounded_once(large, torch.float16).tolist() == [1.0, 1e6, torch.tensor(0.1).half().item()]


def test_a_sentence_of_another_library_is_cut() -> None:
    assert first_sentence(ValueError("Only sigmoid.Please set it.")) == "Only sigmoid"
    assert first_sentence(ValueError(f"Different keys ({'x, ' * 200})")) == "Different keys .."


def test_one_expert_with_its_weight_renormalised_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    reference = tiny.make("qwen3-moe", tmp_path / "reference")
    config = json.loads((reference / "config.json").read_text())
    (reference / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    with pytest.raises(UsageError, match="one expert and renormalises its weight"):
        convert(reference, tmp_path / "out", "native", Parallel(), None)
    assert not (tmp_path / "out").exists()
