"""`bisect-tool config` as a user runs it: the seed's scripts are clean, and one wrong flag is one fault with the whole verdict."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bisect_tool.__main__ import run

DATA = Path(__file__).parent / "data"
MODEL = DATA / "configs/Qwen3.5-397B-A17B"
SEED = DATA / "launch/qwen3.5-397B-A17B.sh"
EVERY = list(range(60))
FULL = [n for n in EVERY if n % 4 == 3]
NORMS = ["input_norm", "attention", "pre_mlp_norm", "final_norm"]


def judged(out: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run(["config", *arguments, "--out", str(out)]) == code
    page: dict[str, Any] = json.loads((out / "report.json").read_text())
    return page


def config_of(page: dict[str, Any]) -> dict[str, Any]:
    (stage,) = [stage for stage in page["stages"] if stage["name"] == "config"]
    assert [one["verdict"] for one in page["stages"] if one["name"] != "config"] == [None] * 4
    found: dict[str, Any] = stage
    return found


def launched(script: Path, tmp_path: Path, *more: str, code: int = 0, model: Path = MODEL) -> dict[str, Any]:
    return judged(tmp_path / "out", "--reference", str(model), "--launch", str(script), *more, code=code)


@pytest.mark.parametrize("name", ["qwen3.5-397B-A17B.sh", "run_397b_args.py", "convert_397b.txt"])
def test_the_seeds_own_scripts_have_nothing_wrong(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = launched(DATA / "launch" / name, tmp_path)
    assert (page["verdict"], page["faults"], page["minor"], page["first"]) == ("agrees", [], [], None)
    notes = "\n".join(config_of(page)["notes"])
    for flag, why in (
        ("--use-gated-attention", "--attention-output-gate does the work"),
        ("--moe-token-drop-policy probs", "no --moe-expert-capacity-factor is given"),
        ("--ffn-hidden-size 1024", "no layer is dense"),
        ("--moe-token-dispatcher-type alltoall", "each computes the same sum"),
    ):
        assert re.search(rf"inert here: {flag} \(.*:\d+\), because .*{why}", notes)
    assert config_of(page)["skipped"] == [{"what": "mtp", "why": "left out by the launch (no --mtp-num-layers): the text is not touched"}]
    assert len(capsys.readouterr().out.splitlines()) < 40


def test_the_seeds_layouts_are_said(tmp_path: Path) -> None:
    notes = config_of(launched(DATA / "launch/run_397b_args.py", tmp_path))["notes"]
    assert "TP 2: 16 heads and 1 KV head a rank, EP 8: 64 experts a rank" in notes
    assert any("PP 6: 10 layers each, beginning at layers 0, 10, 20, 30, 40 and 50" in note and "period 4" in note for note in notes)
    assert "96 ranks: DP 8, expert DP 2" in notes
    notes = config_of(launched(DATA / "launch/convert_397b.txt", tmp_path))["notes"]
    assert any(note.startswith("this converts at EP 16") and "slime#1799" in note for note in notes)


# what is changed in the seed's model flags → flag, modules, parts, layers, value, expected
def wrong(old: str, new: str, flag: str, modules: list[str], parts: list[str], layers: list[int], value: Any, expected: Any) -> Any:
    return pytest.param(old, new, flag, modules, parts, layers, value, expected, id=f"{old.split()[0]} {new}".strip())


PLANTS = [
    wrong("--rotary-base 10000000", "--rotary-base 10000", "--rotary-base", ["attention"], ["rope"], FULL, 10000, 10000000),
    wrong("--rotary-base 10000000", "", "--rotary-base", ["attention"], ["rope"], FULL, 10000, 10000000),
    wrong("--rotary-percent 0.25", "--rotary-percent 1.0", "--rotary-percent", ["attention"], ["rope"], FULL, 1.0, 0.25),
    wrong("--position-embedding-type rope", "", "--position-embedding-type", ["attention"], ["rope"], FULL, "learned_absolute", "rope"),
    wrong("--swiglu", "--swiglu --use-rope-scaling", "--use-rope-scaling", ["attention"], ["rope"], FULL, True, False),
    wrong("--apply-layernorm-1p", "", "--apply-layernorm-1p", NORMS, ["q_norm", "k_norm"], EVERY, False, True),
    wrong("--norm-epsilon 1e-6", "--norm-epsilon 1e-5", "--norm-epsilon", NORMS, ["q_norm", "k_norm"], EVERY, 1e-5, 1e-6),
    wrong("--norm-epsilon 1e-6", "", "--norm-epsilon", NORMS, ["q_norm", "k_norm"], EVERY, 1e-5, 1e-6),
    wrong("--normalization RMSNorm", "", "--normalization", NORMS, ["q_norm", "k_norm"], EVERY, "LayerNorm", "RMSNorm"),
    wrong("--qk-layernorm", "", "--qk-layernorm", ["attention"], ["q_norm"], FULL, False, True),
    wrong("--attention-output-gate", "", "--attention-output-gate", ["attention_gate"], [], FULL, False, True),
    wrong("--num-attention-heads 32", "--num-attention-heads 16", "--num-attention-heads", ["attention"], ["qkv"], FULL, 16, 32),
    wrong("--num-query-groups 2", "--num-query-groups 4", "--num-query-groups", ["attention"], ["qkv"], FULL, 4, 2),
    wrong("--group-query-attention", "", "--group-query-attention", ["attention"], ["qkv"], FULL, False, True),
    wrong("--kv-channels 256", "", "--kv-channels", ["attention"], ["qkv"], FULL, 128, 256),
    wrong("--disable-bias-linear", "", "--disable-bias-linear", ["attention"], ["qkv"], FULL, True, False),
    wrong("--moe-router-topk 10", "--moe-router-topk 8", "--moe-router-topk", ["router"], ["topk"], EVERY, 8, 10),
    wrong("--moe-router-score-function softmax", "--moe-router-score-function sigmoid", "--moe-router-score-function", ["router"], ["probs"], EVERY, "sigmoid", "softmax"),
    wrong("--swiglu", "--swiglu --moe-router-pre-softmax", "--moe-router-pre-softmax", ["router"], ["probs"], EVERY, True, False),
    wrong("--swiglu", "--swiglu --moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type", ["router"], ["topk"], EVERY, ["sinkhorn"], None),
    wrong("--swiglu", "--swiglu --moe-router-force-load-balancing", "--moe-router-force-load-balancing", ["router"], ["topk"], EVERY, True, False),
    wrong("--swiglu", "--swiglu --moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor", ["experts"], ["dispatch"], EVERY, 1.0, None),
    wrong("--swiglu", "", "--swiglu", ["experts"], ["fc1"], EVERY, False, True),
    wrong("--num-experts 512", "--num-experts 256", "--num-experts", ["experts"], [], EVERY, 256, 512),
    wrong("--moe-ffn-hidden-size 1024", "--moe-ffn-hidden-size 512", "--moe-ffn-hidden-size", ["experts"], [], EVERY, 512, 1024),
    wrong("--moe-shared-expert-intermediate-size 1024", "", "--moe-shared-expert-intermediate-size", ["shared_expert"], [], EVERY, None, 1024),
    wrong("--moe-shared-expert-gate", "", "--moe-shared-expert-gate", ["shared_expert_gate"], [], EVERY, False, True),
    wrong("FIRST_K_DENSE_REPLACE=0", "FIRST_K_DENSE_REPLACE=2", "--moe-layer-freq", ["experts"], [], [0, 1], [0, 0] + [1] * 58, [1] * 60),
    wrong('--moe-layer-freq "$MOE_LAYER_FREQ"', "--moe-layer-freq [1, 1, 1]", "--moe-layer-freq", ["experts"], [], EVERY, "[1,", [1] * 60),
    wrong('--moe-layer-freq "$MOE_LAYER_FREQ"', "--moe-layer-freq 2", "--moe-layer-freq", ["experts"], [], EVERY[1::2], 2, [1] * 60),
    wrong("--untie-embeddings-and-output-weights", "", "--untie-embeddings-and-output-weights", ["lm_head"], [], [], False, True),
    wrong("--vocab-size 248320", "--vocab-size 151936", "--vocab-size", ["embedding", "lm_head"], [], [], 151936, 248320),
    wrong("--num-layers 60", "--num-layers 48", "--num-layers", ["input_norm"], [], EVERY, 48, 60),
    wrong("--hidden-size 4096", "--hidden-size 2048", "--hidden-size", ["input_norm"], [], EVERY, 2048, 4096),
    wrong("--swiglu", "--swiglu --mtp-num-layers 2", "--mtp-num-layers", ["mtp"], [], [], 2, 1),
    wrong("--swiglu", "--swiglu --window-size 128 0", "--window-size", ["attention"], ["core"], FULL, ["128", "0"], None),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "flag", "modules", "parts", "layers", "value", "expected"), PLANTS)
def test_one_wrong_flag_is_one_fault(
    old: str, new: str, flag: str, modules: list[str], parts: list[str], layers: list[int], value: Any, expected: Any, tmp_path: Path
) -> None:
    text = SEED.read_text()
    assert text.count(old + "\n") == 1
    script = tmp_path / "model.sh"
    script.write_text(text.replace(old + "\n", new + "\n"))
    page = launched(script, tmp_path, code=1)
    (fault,) = page["faults"]
    assert (fault["class"], fault["between"]) == ("model-definition", ["reference", "candidate"])
    assert (fault["modules"], fault["parts"], fault["layers"], fault["layer"]) == (modules, parts, layers, layers[0] if layers else None)
    assert fault["relation"] == {"kind": "config", "detail": {"flag": flag, "value": value, "expected": expected}, "also": []}
    assert flag in fault["next"] and flag in fault["explanation"]
    assert page["verdict"] == "differs" and page["minor"] == []
    (probe,) = config_of(page)["probes"]
    assert probe.startswith(flag)
    if new.strip().startswith(flag):
        assert f"(model.sh:{text[: text.index(old)].count(chr(10)) + 1})" in probe


@pytest.mark.parametrize(
    ("flags", "flag", "value", "modules"),
    [
        ("--pipeline-model-parallel-size 7", "--pipeline-model-parallel-size", 7, ["input_norm"]),
        ("--expert-model-parallel-size 48", "--expert-model-parallel-size", 48, ["experts"]),
        (
            "--tensor-model-parallel-size 3 --expert-tensor-parallel-size 1",
            "--tensor-model-parallel-size",
            3,
            ["attention", "shared_expert"],
        ),
        ("--actor-num-nodes 3 --actor-num-gpus-per-node 8 --pipeline-model-parallel-size 5", "--actor-num-nodes", 3, ["tokens"]),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else None,
)
def test_a_size_that_does_not_divide_is_a_fault_of_the_layout(
    flags: str, flag: str, value: int, modules: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "model.sh"
    script.write_text(SEED.read_text().replace("--swiglu\n", f"--swiglu {flags}\n"))
    page = launched(script, tmp_path, code=1)
    (fault,) = page["faults"]
    assert (fault["class"], fault["modules"], fault["relation"]["kind"]) == ("parallel", modules, "config")
    assert (fault["relation"]["detail"]["flag"], fault["relation"]["detail"]["value"]) == (flag, value)


@pytest.mark.parametrize(
    ("old", "new", "said", "do"),
    [
        ("--disable-bias-linear", "", "--disable-bias-linear is off", "Give --disable-bias-linear."),
        ("--swiglu", "--swiglu --moe-router-pre-softmax", "--moe-router-pre-softmax is on", "Drop --moe-router-pre-softmax."),
        ("--normalization RMSNorm", "", "--normalization is LayerNorm", "Give --normalization RMSNorm."),
        ("FIRST_K_DENSE_REPLACE=0", "FIRST_K_DENSE_REPLACE=1", "--moe-layer-freq is [0]*1+[1]*59", "Give --moe-layer-freq '[1]*60'."),
        (
            "--swiglu",
            "--swiglu --moe-expert-capacity-factor 1.0",
            "--moe-expert-capacity-factor is 1.0",
            "Drop --moe-expert-capacity-factor.",
        ),
    ],
)
def test_what_is_said_and_what_to_do(old: str, new: str, said: str, do: str, tmp_path: Path) -> None:
    script = tmp_path / "model.sh"
    script.write_text(SEED.read_text().replace(old + "\n", new + "\n"))
    (fault,) = launched(script, tmp_path, code=1)["faults"]
    assert said in fault["explanation"] and fault["next"] == do


def test_two_wrong_flags_are_two_faults(tmp_path: Path) -> None:
    script = tmp_path / "model.sh"
    script.write_text(
        SEED.read_text().replace("--moe-ffn-hidden-size 1024", "--moe-ffn-hidden-size 512").replace("--num-experts 512", "--num-experts 8")
    )
    page = launched(script, tmp_path, code=1)
    assert [fault["relation"]["detail"]["flag"] for fault in page["faults"]] == ["--num-experts", "--moe-ffn-hidden-size"]


def test_the_globbing_trap_is_said_where_it_sprang(tmp_path: Path) -> None:
    script = tmp_path / "model.sh"
    script.write_text(SEED.read_text().replace('"$MOE_LAYER_FREQ"', "[1, 1]"))
    notes = config_of(launched(script, tmp_path, code=1))["notes"]
    assert any("model.sh:45: --moe-layer-freq [1, is no pattern" in note and "slime#1689" in note for note in notes)


def test_the_older_name_of_the_gate_alone_is_said(tmp_path: Path) -> None:
    script = tmp_path / "model.sh"
    script.write_text(SEED.read_text().replace("--attention-output-gate\n", "\n"))
    notes = config_of(launched(script, tmp_path, code=1))["notes"]
    assert any(
        "--use-gated-attention (model.sh:27) is an older name of --attention-output-gate, which is not given" in note for note in notes
    )


def test_a_checkpoint_that_says_otherwise_is_a_fault(tmp_path: Path, workshop_args: Any) -> None:
    candidate = workshop_args(norm_epsilon=1e-5)
    script = tmp_path / "flags.txt"
    tiny = Path(__file__).parent.parent / "golden/tiny-qwen3.5-moe"
    script.write_text("--norm-epsilon 1e-6 --num-layers 8\n")
    page = launched(script, tmp_path, "--candidate", str(candidate), code=1, model=tiny)
    (fault,) = [one for one in page["faults"] if one["relation"]["detail"]["flag"] == "--norm-epsilon"]
    assert fault["relation"]["detail"] == {"flag": "--norm-epsilon", "value": 1e-5, "expected": 1e-6}
    assert "the checkpoint's args say so; the launch says 1e-06" in fault["explanation"]


def test_a_checkpoints_args_alone_are_judged(tmp_path: Path, workshop_args: Any) -> None:
    tiny = Path(__file__).parent.parent / "golden/tiny-qwen3.5-moe"
    page = judged(tmp_path / "good", "--reference", str(tiny), "--candidate", str(workshop_args()))
    assert page["verdict"] == "agrees"
    page = judged(tmp_path / "bad", "--reference", str(tiny), "--candidate", str(workshop_args(rotary_base=10000)), code=1)
    assert [fault["relation"]["detail"]["flag"] for fault in page["faults"]] == ["--rotary-base"]


TINY = Path(__file__).parent.parent / "golden/tiny-qwen3.5-moe"
ALL, GATED = list(range(8)), [3, 7]


# what a checkpoint's args say, as Megatron keeps it → flag, modules, parts, layers, value and expected in the report
def said(arg: str, kept: Any, modules: list[str], parts: list[str], layers: list[int], value: Any, expected: Any) -> Any:
    return pytest.param(arg, kept, f"--{arg.replace('_', '-')}", modules, parts, layers, value, expected, id=arg)


@pytest.mark.parametrize(
    ("arg", "kept", "flag", "modules", "parts", "layers", "value", "expected"),
    [
        said("use_rope_scaling", True, ["attention"], ["rope"], GATED, True, False),
        said("rotary_seq_len_interpolation_factor", 4, ["attention"], ["rope"], GATED, 4, None),
        said("no_rope_freq", [0] * 7 + [1], ["attention"], ["rope"], [7], [0] * 7 + [1], None),
        said("window_size", (4, 0), ["attention"], ["core"], GATED, [4, 0], None),
        said("multi_latent_attention", True, ["attention"], ["core"], GATED, True, False),
        said("softmax_type", "learnable", ["attention"], ["core"], GATED, "learnable", None),
        said("softmax_scale", 1.0, ["attention"], ["core"], GATED, 1.0, None),
        said("apply_residual_connection_post_layernorm", True, ["input_norm"], [], ALL, True, False),
        said("squared_relu", True, ["experts"], ["fc1"], ALL, True, False),
        said("moe_expert_capacity_factor", 1.0, ["experts"], ["dispatch"], ALL, 1.0, None),
        said("moe_apply_probs_on_input", True, ["experts"], ["fc1"], ALL, True, False),
        said("moe_latent_size", 24, ["experts"], ["fc1"], ALL, 24, None),
        said("moe_router_force_load_balancing", True, ["router"], ["topk"], ALL, True, False),
        said("moe_router_load_balancing_type", "sinkhorn", ["router"], ["topk"], ALL, "sinkhorn", None),
        said("moe_router_num_groups", 5, ["router"], ["topk"], ALL, 5, None),
        said("moe_input_jitter_eps", 0.1, ["router"], ["logits"], ALL, 0.1, None),
    ],
)
def test_a_checkpoints_args_are_judged_by_the_table_of_flags(
    arg: str, kept: Any, flag: str, modules: list[str], parts: list[str], layers: list[int], value: Any, expected: Any,
    tmp_path: Path, workshop_args: Any,
) -> None:  # fmt: skip
    page = judged(tmp_path / "out", "--reference", str(TINY), "--candidate", str(workshop_args(**{arg: kept})), code=1)
    (fault,) = page["faults"]
    assert (page["verdict"], page["minor"], fault["class"], fault["between"]) == (
        "differs", [], "model-definition", ["reference", "candidate"],
    )  # fmt: skip
    assert (fault["modules"], fault["parts"], fault["layers"]) == (modules, parts, layers)
    assert fault["relation"] == {"kind": "config", "detail": {"flag": flag, "value": value, "expected": expected}, "also": []}
    assert fault["next"] == f"Drop {flag}." and "the checkpoint's args say so" in fault["explanation"]


def test_args_with_megatrons_defaults_are_right(tmp_path: Path, workshop_args: Any) -> None:
    kept = workshop_args(
        use_rope_scaling=False, rotary_seq_len_interpolation_factor=None, no_rope_freq=[0] * 8, window_size=(-1, 0), softmax_type="vanilla",
        multi_latent_attention=False, moe_expert_capacity_factor=None, moe_router_num_groups=None, moe_router_load_balancing_type=["aux_loss"],
        apply_residual_connection_post_layernorm=False, squared_relu=False, moe_input_jitter_eps=None, glu_linear_offset=0.0, vocab_size=None,
    )  # fmt: skip
    page = judged(tmp_path / "out", "--reference", str(TINY), "--candidate", str(kept))
    assert (page["verdict"], page["faults"], page["minor"]) == ("agrees", [], [])


@pytest.mark.parametrize(
    ("flags", "flag", "modules", "parts", "value"),
    [
        ("--moe-latent-size 24", "--moe-latent-size", ["experts"], ["fc1"], 24),
        ("--moe-input-jitter-eps 0.1", "--moe-input-jitter-eps", ["router"], ["logits"], 0.1),
    ],
)
def test_flags_that_few_know_change_the_model(
    flags: str, flag: str, modules: list[str], parts: list[str], value: Any, tmp_path: Path
) -> None:
    script = tmp_path / "model.sh"
    script.write_text(SEED.read_text().replace("--swiglu\n", f"--swiglu {flags}\n"))
    (fault,) = launched(script, tmp_path, code=1)["faults"]
    assert (fault["class"], fault["modules"], fault["parts"], fault["layers"]) == ("model-definition", modules, parts, EVERY)
    assert fault["relation"]["detail"] == {"flag": flag, "value": value, "expected": None} and fault["next"] == f"Drop {flag}."


def test_flags_that_nobody_knows_are_listed(tmp_path: Path) -> None:
    script = tmp_path / "model.sh"
    script.write_text(SEED.read_text().replace("--swiglu\n", "--swiglu --mup-scaling --lr 1e-6 --save-interval 20 --residual-gain 2\n"))
    page = launched(script, tmp_path)
    (note,) = [one for one in config_of(page)["notes"] if "not known, not judged" in one]
    line = script.read_text().split("--mup-scaling")[0].count("\n") + 1
    assert note.startswith(f"not known, not judged: --mup-scaling (model.sh:{line}), --residual-gain (model.sh:{line});")
    assert page["verdict"] == "agrees" and "--lr" not in note and "--save-interval" not in note


@pytest.mark.parametrize("name", ["qwen3.5-397B-A17B.sh", "run_397b_args.py", "convert_397b.txt"])
def test_every_flag_of_the_seeds_scripts_is_known(name: str, tmp_path: Path) -> None:
    notes = config_of(launched(DATA / "launch" / name, tmp_path))["notes"]
    assert not [note for note in notes if "not known" in note]


# as Megatron's own parser leaves them in every checkpoint
EVERYDAY = {
    "adam_beta1": 0.9, "align_grad_reduce": True, "apply_query_key_layer_scaling": False, "async_tensor_model_parallel_allreduce": True,
    "barrier_with_L1_time": True, "bias_dropout_fusion": True, "bias_swiglu_fusion": True, "ckpt_format": "torch_dist", "consumed_train_samples": 0,
    "cp_comm_type": ["p2p"], "data_parallel_size": 1, "dino_teacher_temp": 0.07, "eval_iters": 100, "fp8": None, "fp8_amax_history_len": 1,
    "fp8_recipe": "delayed", "hybrid_attention_ratio": 0.0, "img_h": 224, "inference_max_batch_size": 8, "inprocess_granularity": "node",
    "iteration": 0, "kv_lora_rank": 32, "mamba_head_dim": 64, "mask_prob": 0.15, "mscale": 1.0, "num_classes": 1000, "padded_vocab_size": 96,
    "params_dtype": "bf16", "perform_initialization": True, "rank": 0, "retro_encoder_layers": 2, "rotary_scaling_factor": 1.0, "tiktoken_num_special_tokens": 1000,
    "torch_fsdp2_reshard_after_forward": True, "transformer_pipeline_model_parallel_size": 1, "v_head_dim": 128, "vision_backbone_type": "vit", "world_size": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({}, None),
        ({"residual_gain": 2.0}, "residual_gain=2.0; whether it changes"),
        ({"residual_gain": 0.0, "mup": False}, None),
        ({"fp8": "e4m3", "mup": 2}, "fp8=e4m3, mup=2; whether they change"),
        ({f"new_{i}": 1 for i in range(14)}, "and 2 more; whether they change"),
    ],
)
def test_kept_args_that_nobody_knows_are_listed(kept: dict[str, Any], said: str | None, tmp_path: Path, workshop_args: Any) -> None:
    page = judged(tmp_path / "out", "--reference", str(TINY), "--candidate", str(workshop_args(**(EVERYDAY | kept))))
    notes = [one for one in config_of(page)["notes"] if "not known" in one]
    assert (page["verdict"], page["faults"], page["minor"]) == ("agrees", [], [])
    assert len(notes) == (said is not None) and all(
        one.startswith("not known, not judged in the checkpoint's args: ") and str(said) in one for one in notes
    )


def test_a_kept_size_below_one_is_refused(tmp_path: Path, workshop_args: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "config",
        "--reference",
        str(TINY),
        "--candidate",
        str(workshop_args(expert_model_parallel_size=0)),
        "--out",
        str(tmp_path / "out"),
    ]
    assert run(arguments) == 2 and "--expert-model-parallel-size is 0: a size is at least 1" in capsys.readouterr().err


@pytest.fixture
def workshop_args(tmp_path: Path) -> Any:
    """Copies of the embedded checkpoint whose args say something else."""
    from argparse import Namespace

    import torch

    def make(**values: Any) -> Path:
        copy = tmp_path / f"candidate{len(list(tmp_path.iterdir()))}"
        shutil.copytree(Path(__file__).parent.parent / "golden/tiny-qwen3.5-moe-torch_dist", copy)
        file = copy / "release/common.pt"
        common = torch.load(file, weights_only=False)
        common["args"] = Namespace(**(vars(common["args"]) | values))
        torch.save(common, file)
        return copy

    return make


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to compare with config.json; give --launch"),
        (["--launch", "nowhere.sh"], "nowhere.sh is not a file"),
        (["--launch", str(SEED), "--set", "X"], "--set X: give NAME=VALUE"),
    ],
)
def test_usage(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--reference", str(MODEL), *arguments, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
