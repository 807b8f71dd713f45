"""`run` with a launch script, an export, or both beside the checkpoint: each piece of evidence adds its stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import slime_cases as packed

from bisect_tool.__main__ import run

DATA = Path(__file__).parent.parent / "data"
FLAGS = """
MODEL_ARGS=(
  --num-layers 8 --hidden-size 96 --num-attention-heads 8 --group-query-attention --num-query-groups 2 --kv-channels 32
  --normalization RMSNorm --apply-layernorm-1p --norm-epsilon 1e-6 --qk-layernorm --attention-output-gate
  --position-embedding-type rope --rotary-base {base} --rotary-percent 0.25 --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --num-experts 16 --moe-layer-freq "[1,1,1,1,1,1,1,1]" --moe-ffn-hidden-size 40
  --moe-router-topk 4 --moe-shared-expert-intermediate-size 56 {gate} --vocab-size 500
  --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
)
python3 train.py "${{MODEL_ARGS[@]}}" --tensor-model-parallel-size 1
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return packed.unpacked(DATA / "cases", tmp_path_factory.mktemp("cases"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"input_ids": [1, 5, 9, 13, 2, 40, 100, 200, 7]}\n{"input_ids": [3, 8, 11, 12]}\n')
    return file


def script(folder: Path, base: int = 10000000, gate: str = "--moe-shared-expert-gate") -> Path:
    file = folder / "run.sh"
    file.write_text(FLAGS.format(base=base, gate=gate))
    return file


def judged(prompts: Path, cases: dict[str, Path], out: Path, *more: str | Path) -> tuple[int, dict[str, Any]]:
    code = run(["run", "--prompts", str(prompts), "--reference", str(cases[packed.REFERENCE]), *map(str, more), "--out", str(out)])
    page: dict[str, Any] = json.loads((out / "report.json").read_text())
    return code, page


def verdicts(page: dict[str, Any]) -> dict[str, str | None]:
    return {stage["name"]: stage["verdict"] for stage in page["stages"]}


def test_an_export_alone_is_read_as_an_engine_would_and_audited(cases: dict[str, Path], prompts: Path, tmp_path: Path) -> None:
    code, page = judged(prompts, cases, tmp_path / "out", "--export", cases["export-ep4-hf"])
    assert code == 1
    assert verdicts(page) == {"inputs": None, "config": "agrees", "weights": "differs", "forward": None, "engine": None}
    assert [(fault["between"], fault["relation"]["kind"]) for fault in page["faults"]] == [(["reference", "export"], "duplicate")]
    assert [fault["module"] for fault in page["minor"]] == ["linear_attention", "mtp"]


def test_a_wrong_flag_of_the_launch_ends_the_run_at_the_config_stage(cases: dict[str, Path], prompts: Path, tmp_path: Path) -> None:
    launch = script(tmp_path, base=10000)
    code, page = judged(prompts, cases, tmp_path / "out", "--candidate", cases["slime-0.2.4-ep1"], "--launch", launch)
    (fault,) = page["faults"]
    assert code == 1
    assert (fault["class"], fault["module"], fault["parts"], fault["layers"]) == ("model-definition", "attention", ["rope"], [3, 7])
    assert fault["relation"]["detail"] == {"flag": "--rotary-base", "value": 10000.0, "expected": 10000000}
    assert "run.sh:5; the checkpoint's args say 10000000" in fault["explanation"]


@pytest.mark.ranks
def test_the_candidate_is_built_as_the_launch_says_and_not_as_its_checkpoint_does(
    cases: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    wrong = script(tmp_path, base=10000)
    given = ("--candidate", cases["slime-fixed-ep4"], "--stages", "inputs,forward")
    code, page = judged(prompts, cases, tmp_path / "wrong", *given, "--launch", wrong)
    assert code == 1
    assert [(fault["class"], fault["site"], fault["layers"]) for fault in page["faults"]] == [
        ("model-definition", "layers.3.attention.rope", [3, 7])
    ]
    assert page["first"]["proof"]["experiment"] == "build the candidate with --rotary-base as config.json has it"
    code, page = judged(prompts, cases, tmp_path / "right", *given, "--launch", script(tmp_path))
    assert (code, page["faults"]) == (0, [])


@pytest.mark.ranks
def test_a_switch_that_the_launch_does_not_give_is_off(cases: dict[str, Path], prompts: Path, tmp_path: Path) -> None:
    launch = script(tmp_path, gate="")
    given = ("--candidate", cases["slime-0.2.4-ep1"], "--launch", launch, "--stages", "inputs,forward")
    code, page = judged(prompts, cases, tmp_path / "out", *given)
    assert code == 1
    assert [(fault["class"], fault["module"], fault["layers"]) for fault in page["faults"]] == [
        ("model-definition", "shared_expert_gate", list(range(8)))
    ]
