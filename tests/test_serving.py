"""An export as engines read it: what is said, and what is a fault.  The embedded model stands for a good export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from safetensors.torch import load_file, save_file

from bisect_tool.__main__ import run

REFERENCE = Path(__file__).parent.parent / "golden/tiny-qwen3.5-moe"
INDEX = "model.safetensors.index.json"
Change = Callable[[Path], None]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    copy = tmp_path / "export"
    shutil.copytree(REFERENCE, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return copy


def judged(export: Path, reference: Path = REFERENCE, code: int = 0) -> dict[str, Any]:
    out = export.parent / "out"
    assert run(["config", "--reference", str(reference), "--export", str(export), "--out", str(out)]) == code
    page: dict[str, Any] = json.loads((out / "report.json").read_text())
    return page


def notes(page: dict[str, Any]) -> str:
    return "\n".join(note for stage in page["stages"] for note in stage["notes"])


def set_config(export: Path, inner: dict[str, Any] | None = None, **values: Any) -> None:
    config = json.loads((export / "config.json").read_text()) | values
    config["text_config"] |= inner or {}
    (export / "config.json").write_text(json.dumps(config))


def rename(export: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Writes every tensor again under other names, in one file without an index."""
    tensors = {name: tensor for file in export.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in [*export.glob("*.safetensors"), export / INDEX]:
        file.unlink(missing_ok=True)
    save_file({name: tensor.clone() for name, tensor in change(tensors).items()}, export / "model.safetensors")


def without(part: str) -> Change:
    return lambda export: rename(export, lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name})


def test_a_good_export_agrees_and_its_settings_are_said(export: Path) -> None:
    page = judged(export)
    assert (page["verdict"], page["faults"], page["minor"]) == ("agrees", [], [])
    said = notes(page)
    assert "settings of its config.json compared" in said
    assert "vLLM loads it with --language-model-only" in said and "Text is not affected" in said
    assert "tokenizer is not copied" not in said and "generation_config" not in said


def test_mtp_that_is_promised_and_not_there_is_minor(export: Path) -> None:
    without("mtp.")(export)
    page = judged(export)
    (minor,) = page["minor"]
    assert (minor["module"], minor["relation"]["kind"], minor["between"]) == ("mtp", "missing", ["reference", "export"])
    assert page["verdict"] == "agrees"
    set_config(export, {"mtp_num_hidden_layers": 0})
    assert judged(export)["minor"] == []


def test_mtp_that_is_one_more_layer_of_the_decoder_is_known_by_its_family(tmp_path: Path) -> None:
    reference = tiny.make("glm4-moe", tmp_path / "reference")
    export = tmp_path / "export"
    shutil.copytree(reference, export)
    assert judged(export, reference)["minor"] == []
    without("model.layers.4.")(export)
    (minor,) = judged(export, reference)["minor"]
    assert (minor["module"], minor["relation"]["kind"]) == ("mtp", "missing")
    assert minor["relation"]["detail"] == {"key": "num_nextn_predict_layers"} and "Set num_nextn_predict_layers to 0" in minor["next"]


def test_mtp_that_only_an_index_lists_is_said(tmp_path: Path) -> None:
    reference = tiny.make("glm4-moe", tmp_path / "reference")
    export = tmp_path / "export"
    shutil.copytree(reference, export)
    names = list(load_file(export / "model.safetensors"))
    without("model.layers.4.")(export)
    (export / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert "the index lists 52 tensors that no file holds, such as model.layers.4." in notes(judged(export, reference))


def shard_gone(export: Path) -> None:
    sorted(export.glob("*.safetensors"))[1].unlink()


def twice(export: Path) -> None:
    def both(tensors: dict[str, Any]) -> dict[str, Any]:
        own = "model.language_model.layers.2.mlp.experts."
        fused, down = tensors[f"{own}gate_up_proj"], tensors[f"{own}down_proj"]
        half = fused.shape[1] // 2
        for e in range(fused.shape[0]):
            tensors[f"{own}{e}.gate_proj.weight"], tensors[f"{own}{e}.up_proj.weight"] = fused[e, :half], fused[e, half:]
            tensors[f"{own}{e}.down_proj.weight"] = down[e]
        return tensors

    rename(export, both)


FAULTS: dict[str, tuple[Change, str, str | None, str, list[int] | None]] = {
    "a missing tensor": (without("layers.3.self_attn.q_norm"), "conversion", "attention", "missing", [3]),
    "no head": (without("lm_head"), "conversion", "lm_head", "missing", []),
    "a flat prefix under ConditionalGeneration": (
        lambda export: rename(export, lambda tensors: {name.replace("language_model.", ""): tensor for name, tensor in tensors.items()}),
        "conversion", "embedding", "names-only", None,
    ),
    "a nested prefix under CausalLM": (lambda export: set_config(export, architectures=["Qwen3_5MoeForCausalLM"]), "conversion", "embedding", "names-only", None),
    "another rope_theta": (
        lambda export: set_config(export, {"rope_parameters": {"rope_theta": 10000, "partial_rotary_factor": 0.25, "rope_type": "default"}}),
        "model-definition", "attention", "config", [3, 7],
    ),
    "experts in both forms": (twice, "conversion", "experts", "extra", [2]),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_what_makes_an_engine_read_another_model_is_a_fault(what: str, export: Path) -> None:
    change, cls, module, relation, layers = FAULTS[what]
    change(export)
    (fault,) = judged(export, code=1)["faults"]
    assert (fault["class"], fault["module"], fault["relation"]["kind"], fault["between"]) == (
        cls,
        module,
        relation,
        ["reference", "export"],
    )
    assert layers is None or fault["layers"] == layers
    assert fault["explanation"] and fault["next"]


def test_an_index_that_lists_an_absent_file_names_it(export: Path) -> None:
    shard_gone(export)
    page = judged(export, code=1)
    assert {fault["relation"]["kind"] for fault in page["faults"]} == {"missing"}
    assert {fault["relation"]["detail"]["file"] for fault in page["faults"]} == {"model-00002-of-00002.safetensors"}
    assert "copy model-00002" in page["first"]["next"].lower()


def test_a_head_that_a_tied_model_does_not_read_is_a_fault(export: Path) -> None:
    set_config(export, {"tie_word_embeddings": True}, tie_word_embeddings=True)
    tied = export.parent / "tied"
    tied.mkdir()
    shutil.copy(export / "config.json", tied / "config.json")
    (fault,) = judged(export, tied, code=1)["faults"]
    assert (fault["module"], fault["relation"]["detail"]["flag"]) == ("lm_head", "tie_word_embeddings")
    assert "text is affected" in fault["explanation"]


def test_a_tie_that_the_reference_has_not_is_one_fault(export: Path) -> None:
    set_config(export, {"tie_word_embeddings": True}, tie_word_embeddings=True)
    (fault,) = judged(export, code=1)["faults"]
    assert (fault["class"], fault["module"], fault["relation"]["detail"]["flag"]) == (
        "model-definition",
        "lm_head",
        "--untie-embeddings-and-output-weights",
    )


def test_a_tie_that_is_said_twice_differently_is_noted(export: Path) -> None:
    set_config(export, {"tie_word_embeddings": True})
    assert "tie_word_embeddings is False at the top of config.json and True in text_config" in notes(judged(export))


NOTES: dict[str, tuple[Change, str]] = {
    "no tokenizer": (lambda export: (export / "tokenizer.json").unlink(), "vLLM takes --tokenizer REFERENCE"),
    "no generation_config": (lambda export: (export / "generation_config.json").unlink(), "vLLM takes --generation-config REFERENCE"),
    "no architectures": (lambda export: set_config(export, architectures=None), 'names no "architectures"'),
}  # fmt: skip


@pytest.mark.parametrize("what", NOTES)
def test_what_a_setting_makes_up_for_is_a_note(what: str, export: Path) -> None:
    change, said = NOTES[what]
    change(export)
    page = judged(export)
    assert page["verdict"] == "agrees" and said in notes(page)


def test_a_chat_template_is_missed_only_where_the_reference_has_one(export: Path, tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    shutil.copytree(REFERENCE, reference)
    (reference / "chat_template.jinja").write_text("{{ messages }}")
    (reference / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    for file in export.glob("chat_template*"):
        file.unlink()
    table = json.loads((export / "tokenizer_config.json").read_text())
    table.pop("chat_template", None)
    (export / "tokenizer_config.json").write_text(json.dumps(table))
    said = notes(judged(export, reference))
    assert "no chat template" in said and "--chat-template FILE" in said
    assert "generation_config.json differs from the reference's in eos_token_id" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda export: [file.unlink() for file in [*export.glob("*.safetensors"), export / INDEX]], "has no *.safetensors files"),
        (lambda export: (export / INDEX).write_text("{"), "is damaged"),
        (lambda export: (export / INDEX).write_text(json.dumps({"weight_map": {"a": "../../x.safetensors"}})), "leaves the directory"),
        (lambda export: sorted(export.glob("*.safetensors"))[0].write_bytes(b"junk"), "can't be read"),
        (lambda export: (export / "config.json").unlink(), "has no config.json"),
        (lambda export: (export / "generation_config.json").write_text("{"), "is not JSON"),
    ],
    ids=["no weights", "half an index", "a path that leaves", "junk", "no config", "half a table"],
)
def test_damaged_exports_are_refused(change: Change, said: str, export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (export.parent / "reference").mkdir()
    (export.parent / "reference/generation_config.json").write_text("{}")
    shutil.copy(REFERENCE / "config.json", export.parent / "reference/config.json")
    change(export)
    assert (
        run(["config", "--reference", str(export.parent / "reference"), "--export", str(export), "--out", str(export.parent / "out")]) == 2
    )
    assert said in capsys.readouterr().err
