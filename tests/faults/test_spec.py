"""--spec: the candidate is built by the user's own layer spec, in Megatron's and in slime's calling convention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from cases import fault
from workshop import Workshop, judge, verdict_of

from bisect_tool.__main__ import run
from bisect_tool.ranks import WORLDS

pytestmark = [pytest.mark.ranks, pytest.mark.wide]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, workshop: Workshop) -> Workshop:
    folder = tmp_path_factory.mktemp("llama")
    return Workshop(folder, tiny.make("llama", folder / "reference"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory, workshop: Workshop) -> Workshop:
    folder = tmp_path_factory.mktemp("qwen3")
    return Workshop(folder, tiny.make("qwen3", folder / "reference"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """specs.py is found as a user's module is: by PYTHONPATH, which ranks take over when they start."""
    WORLDS.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield
    WORLDS.close()


def built_by(name: str) -> tuple[str, ...]:
    return ("--spec", "specs", name)


def notes_of(page: dict[str, Any]) -> list[str]:
    found: list[str] = page["stages"][3]["notes"]
    return found


def test_a_spec_that_is_no_function_builds_a_llama_that_agrees(llama: Workshop, prompts: Path, tmp_path: Path) -> None:
    good = llama.good("native", "one")
    code, page = judge(good, tmp_path, "one", *built_by("PLAIN"), reference=llama.reference, prompts=prompts)
    assert (code, page["faults"]) == (0, [])
    assert "the candidate was built by --spec specs PLAIN" in notes_of(page)
    assert page["provenance"]["spec"] == "specs PLAIN"
    assert page["stages"][3]["compared"]["sites"] == 39


def test_slimes_convention_builds_the_hybrid_moe_in_a_layout(workshop: Workshop, tmp_path: Path) -> None:
    code, page = judge(workshop.good("native", "one"), tmp_path, "tp2sp", *built_by("hybrid"))
    assert (code, page["faults"]) == (0, [])
    assert notes_of(page)[-1] == "the candidate was built by --spec specs hybrid"


def test_a_norm_that_the_spec_leaves_out_is_the_models_definition(qwen: Workshop, prompts: Path, tmp_path: Path) -> None:
    good = qwen.good("native", "one")
    code, page = judge(good, tmp_path, "one", *built_by("queries_not_normed"), reference=qwen.reference, prompts=prompts)
    assert code == 1
    assert [verdict_of(fault) for fault in page["faults"]] == [
        fault("model-definition", [0, 1, 2, 3], "attention", ["q_norm"], None, "run")
    ]  # fmt: skip
    unread = "the spec's model has no place for decoder.layers.*.self_attention.q_layernorm.weight (4 tensors) of the checkpoint"
    assert unread in notes_of(page)


def test_norms_inside_linears_read_a_checkpoint_that_has_them_apart(llama: Workshop, prompts: Path, tmp_path: Path) -> None:
    """What is computed inside another module is skipped by name; everything else is compared, and a fault beside it is found."""
    flags = built_by("fused")
    code, page = judge(llama.good("native", "one"), tmp_path / "good", "tp2sp", *flags, reference=llama.reference, prompts=prompts)
    forward = page["stages"][3]
    assert (code, page["faults"], forward["compared"]["sites"]) == (0, [], 31)
    assert [one["what"] for one in forward["skipped"]] == sorted(
        f"layers.{n}.{norm}" for n in range(4) for norm in ("input_norm", "pre_mlp_norm")
    )
    wrong = llama.faulty("native", "one", "S05")
    flags = (*flags, "--stages", "inputs,forward")
    code, page = judge(wrong, tmp_path / "wrong", "tp2sp", *flags, reference=llama.reference, prompts=prompts)
    assert [verdict_of(found) for found in page["faults"]] == [
        fault("conversion", [0, 1, 2, 3], "mlp", ["fc1"], "halves-swapped", "run", tp=[0, 1])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            ("no_such_module", "x"),
            "Error: --spec no_such_module x can't be imported: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (("specs", "nothing"), "Error: --spec specs nothing can't be imported: AttributeError: module 'specs' has no attribute 'nothing'"),
        (("specs", "broken"), "Error: --spec specs broken fails: ValueError: this spec needs an attention backend"),
        (
            ("specs", "of_another_kind"),
            "Error: --spec specs of_another_kind asks for model; Megatron calls (config) or (config, vp_stage), slime (args, config, vp_stage)",
        ),
        (("specs", "leaves"), "Error: --spec specs leaves fails: SystemExit: no kernels here"),
        (("specs", "nothing_said"), "Error: --spec specs nothing_said gives None, neither a ModuleSpec nor TransformerBlockSubmodules"),
        (
            ("specs", "normed_behind"),
            "Error: --spec specs normed_behind builds decoder.layers.*.post_norm.weight (4 tensors), which the table of llama does not know; "
            "a model with other modules is a family of its own (docs/add-a-family.md)",
        ),
        (("specs", "torch"), "Error: --spec specs torch gives a value of type module, neither a ModuleSpec nor TransformerBlockSubmodules"),
    ],
    ids=lambda one: one[1] if isinstance(one, tuple) else "",
)
def test_a_spec_that_gives_no_model_is_refused_in_one_line(
    spec: tuple[str, str], said: str, llama: Workshop, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--stages", "inputs,forward", "--spec", *spec, "--out", str(tmp_path / "out")]
    given = ["--prompts", str(prompts), "--reference", str(llama.reference), "--candidate", str(llama.good("native", "one"))]
    assert run(["run", *given, *flags]) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if " s  " not in line] == [said]


def test_record_and_gate_build_by_a_spec_too(llama: Workshop, prompts: Path, tmp_path: Path) -> None:
    given = ["--prompts", str(prompts), "--reference", str(llama.reference), "--candidate", str(llama.good("native", "one"))]
    assert run(["record", "--side", "reference", *given, "--out", str(tmp_path / "golden")]) == 0
    assert run(["record", "--side", "candidate", *given, *built_by("local"), "--out", str(tmp_path / "candidate")]) == 0
    flags = ["--candidate", str(llama.good("native", "one")), *built_by("local"), "--out", str(tmp_path / "out")]
    assert run(["gate", "--golden", str(tmp_path / "golden"), *flags]) == 0
