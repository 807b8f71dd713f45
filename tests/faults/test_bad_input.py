"""Bad input: one clear error that says where, exit 2, and nothing half-written.  No rank is started for any of it."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from workshop import PROMPTS, REFERENCE, ROOT

from bisect_tool.__main__ import run

CANDIDATE = ROOT / "golden/tiny-qwen3.5-moe-torch_dist"
Copies = tuple[Path, Path]


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    """A reference and a candidate that a test may damage."""
    reference, candidate = tmp_path / "reference", tmp_path / "candidate"
    shutil.copytree(REFERENCE, reference)
    shutil.copytree(CANDIDATE, candidate)
    return reference, candidate


def refused(arguments: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one error line of a command that is refused; its out directory must not come to be."""
    capsys.readouterr()
    assert run([*arguments, "--out", str(out)]) == 2
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if line.startswith("Error: ")]
    assert not out.exists() and not list(out.parent.glob("*.partial"))
    return line


def run_on(reference: Path, candidate: Path, *more: str, prompts: Path = PROMPTS) -> list[str]:
    return ["run", "--prompts", str(prompts), "--reference", str(reference), "--candidate", str(candidate), *more]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def set_args(candidate: Path, **values: Any) -> None:
    file = candidate / "release/common.pt"
    common = torch.load(file, weights_only=False)
    common["args"] = Namespace(**(vars(common["args"]) | values))
    torch.save(common, file)


def set_config(reference: Path, **values: Any) -> None:
    file = reference / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def set_text_config(reference: Path, **values: Any) -> None:
    set_config(reference, text_config=json.loads((reference / "config.json").read_text())["text_config"] | values)


def empty(directory: Path) -> Path:
    shutil.rmtree(directory)
    directory.mkdir()
    return directory


def only(directory: Path, *names: str) -> None:
    """Leaves the named files alone in a directory, and makes those that are not there."""
    for file in directory.iterdir():
        if file.name not in names:
            file.unlink()
    for name in names:
        (directory / name).touch()


def no_tokenizer(reference: Path) -> None:
    for file in reference.glob("tokenizer*"):
        file.unlink()


DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a directory that is no checkpoint": (
        lambda _, candidate: shutil.rmtree(candidate / "release"),
        "names release, which has no .metadata",
    ),
    "an empty directory": (lambda _, candidate: empty(candidate), "is no Megatron checkpoint"),
    "a truncated safetensors file": (lambda reference, _: truncate(sorted(reference.glob("*.safetensors"))[0]), "can't be read"),
    "a missing shard": (lambda reference, _: sorted(reference.glob("*.safetensors"))[1].unlink(), "which is not there"),
    "a missing .distcp file": (lambda _, candidate: (candidate / "release/__0_1.distcp").unlink(), "__0_1.distcp is not there"),
    "a truncated .distcp file": (lambda _, candidate: truncate(candidate / "release/__0_1.distcp"), "ends at byte"),
    "no common.pt": (lambda _, candidate: (candidate / "release/common.pt").unlink(), "keeps no args"),
    "an args value that is missing": (lambda _, candidate: set_args(candidate, num_layers=None), "say no num_layers (--num-layers)"),
    "an args value that is no number": (lambda _, candidate: set_args(candidate, hidden_size="wide"), "--hidden-size 'wide'"),
    "a hidden size of another model": (
        lambda reference, _: set_text_config(reference, hidden_size=104),
        "says vocab_size 500 and hidden_size 104, but model.embed_tokens.weight is [500, 96]",
    ),
    "a vocabulary of another model": (
        lambda reference, _: set_text_config(reference, vocab_size=512),
        "says vocab_size 512 and hidden_size 96",
    ),
    "no tokenizer": (lambda reference, _: no_tokenizer(reference), "has no tokenizer"),
    "an unknown family": (lambda reference, _: set_config(reference, model_type="gpt5"), "known: "),
    "no config.json": (lambda reference, _: (reference / "config.json").unlink(), "has no config.json"),
    "a GGUF": (lambda reference, _: only(reference, "model.gguf"), "it holds model.gguf: let transformers read it"),
    "weights that are no safetensors": (
        lambda reference, _: only(reference, "pytorch_model.bin", "config.json"),
        "has no *.safetensors files; it holds pytorch_model.bin: save it as safetensors",
    ),
    "nothing but config.json": (lambda reference, _: only(reference, "config.json"), "config.json alone says nothing of weights"),
    "a checkpoint for the reference": (
        lambda reference, candidate: shutil.copytree(candidate, empty(reference), dirs_exist_ok=True),
        "it is a Megatron checkpoint: are --reference and --candidate exchanged?",
    ),
    "a reference for the checkpoint": (
        lambda reference, candidate: shutil.copytree(reference, empty(candidate), dirs_exist_ok=True),
        "a Hugging Face directory, which goes to --reference or --export",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_directories_are_refused(what: str, copies: Copies, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, said = DAMAGE[what]
    damage(*copies)
    assert said in refused(run_on(*copies), tmp_path / "out", capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompts"),
        (json.dumps({"input_ids": [500]}), "token id 500; the vocabulary has 500"),
        (json.dumps({"input_ids": [-1]}), "token id -1"),
        (json.dumps({"input_ids": [5] * 513}), "513 tokens, the model 512 positions"),
        (json.dumps({"question": "1+1="}), "none of input_ids, prompt, text, messages"),
        ("{", "line 1 is not JSON"),
        (json.dumps({"messages": [{"role": "user", "content": "1+1="}]}), "messages need a chat template, and this tokenizer has none"),
    ],
    ids=["empty", "id out of range", "negative id", "too long", "unknown field", "not JSON", "messages without a template"],
)
def test_bad_prompts_are_refused(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text + "\n")
    assert said in refused(run_on(REFERENCE, CANDIDATE, prompts=prompts), tmp_path / "out", capsys)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tp", "3"], "8 attention heads don't divide by --tp 3"),
        (["--ep", "5"], "16 experts don't divide by --ep 5"),
        (["--pp", "3"], "8 layers don't divide by --pp 3"),
        (["--pp", "2", "--pp-layers", "3,4"], "holds 7 layers"),
        (["--cp", "2"], "--cp above 1 needs Transformer Engine"),
        (["--vpp", "2"], "--vpp 2 needs --pp of at least 2"),
        (["--vpp", "3", "--pp", "2"], "8 layers don't divide by --pp 2 x --vpp 3"),
        (["--tp", "2", "--ep", "2"], "does not run with the alltoall dispatcher"),
        (["--sp"], "--sp needs --tp"),
        (["--candidate-patch", "nowhere.py"], "--candidate-patch nowhere.py: no such file"),
        (["--device", "gpu"], "--device gpu is none that torch knows; give cpu, cuda or npu"),
        (["--device", "vulkan"], "finds no vulkan here; leave --device out"),
        (["--stages", "weigths"], "unknown stage weigths"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_sizes_that_do_not_fit_are_refused_before_any_rank_starts(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(run_on(REFERENCE, CANDIDATE, *flags), tmp_path / "out", capsys)


def test_a_layout_that_no_conversion_can_have_had_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["audit", "--reference", str(REFERENCE), "--candidate", str(CANDIDATE), "--ep", "3"]
    assert "16 experts don't divide by --ep 3" in refused(asked, tmp_path / "out", capsys)


def test_an_out_directory_in_use_is_refused_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "out" / "thesis.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    for command in (
        run_on(REFERENCE, CANDIDATE),
        ["convert", "--reference", str(REFERENCE)],
        ["plant", "P01", "--candidate", str(CANDIDATE)],
    ):
        capsys.readouterr()
        assert run([*command, "--out", str(kept.parent)]) == 2
        assert capsys.readouterr().err.startswith("Error: ")
        assert [entry.name for entry in kept.parent.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("kind", ["extra", "missing"])
def test_a_tensor_the_table_does_not_know_stops_a_conversion(
    kind: str, copies: Copies, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference, _ = copies
    tensors = {name: tensor for file in reference.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in [*reference.glob("*.safetensors"), reference / "model.safetensors.index.json"]:
        file.unlink()
    name = "model.language_model.layers.0.mlp.gate.weight"
    if kind == "extra":
        tensors["model.language_model.layers.0.mlp.gate.bias"] = torch.zeros(16)
    else:
        tensors.pop(name)
    save_file(tensors, reference / "model.safetensors")
    line = refused(["convert", "--reference", str(reference)], tmp_path / "out", capsys)
    assert ("mlp.gate.bias is not in the table" if kind == "extra" else "has no model.layers.0.mlp.gate.weight") in line
    assert "nearest: " in line
    # an audit goes on, and says what it could not compare (or what is missing)
    report = tmp_path / "report"
    code = run(["audit", "--reference", str(reference), "--candidate", str(CANDIDATE), "--out", str(report)])
    assert code == (125 if kind == "extra" else 2)


def test_a_fault_that_a_layout_can_not_have_is_not_planted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "exists only with --ep above 1" in refused(["plant", "E01", "--candidate", str(CANDIDATE)], tmp_path / "out", capsys)
    assert "known: E01" in refused(["plant", "E99", "--candidate", str(CANDIDATE)], tmp_path / "out", capsys)
