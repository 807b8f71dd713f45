"""Every kind of launch file gives the same model; what is not understood names its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bisect_hooks.errors import UsageError

from bisect_tool.launch.read import read_launch

DATA = Path(__file__).parent / "data/launch"
SHAPE = {
    "num_layers": 40, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 2, "kv_channels": 256, "norm_epsilon": 1e-6,
    "rotary_base": 1e7, "rotary_percent": 0.25, "num_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 512, "swiglu": True,
    "apply_layernorm_1p": True, "attention_output_gate": True, "moe_shared_expert_gate": True, "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "group_query_attention": True, "vocab_size": 248320, "normalization": "RMSNorm",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "whole", "unsaid", "program"),
    [
        ("scripts/run-35b.sh", "bash script", True, "megatron", "train.py"),
        ("scripts/models/35b.sh", "bash lists", False, "megatron", ""),
        ("miles_35b.txt", "list of flags", False, "megatron", ""),
        ("torchrun_35b.txt", "bash script", True, "megatron", "pretrain_gpt.py"),
        (
            "run_config.yaml",
            "run_config.yaml",
            True,
            "reference",
            "megatron.bridge.models.qwen_vl.qwen35_vl_provider.Qwen35VLMoEModelProvider",
        ),
    ],
)
def test_every_kind_of_file_says_the_same_model(name: str, kind: str, whole: bool, unsaid: str, program: str) -> None:
    launch = read_launch(DATA / name)
    assert (launch.kind, launch.whole, launch.unsaid, launch.program) == (kind, whole, unsaid, program)
    assert {arg: launch.args[arg] for arg in SHAPE} == SHAPE
    assert launch.args.get("moe_layer_freq") in (1, [1] * 40)
    assert set(launch.args) <= set(launch.said)


def test_args_know_the_line_that_gives_them() -> None:
    said = read_launch(DATA / "scripts/run-35b.sh").said
    assert str(said["rotary_base"]) == "35b.sh:24" and said["rotary_base"].text.startswith("--rotary-base")
    assert str(said["tensor_model_parallel_size"]) == "run-35b.sh:26"
    assert str(read_launch(DATA / "run_config.yaml").said["num_experts"]) == "run_config.yaml:38"


def test_a_run_scripts_own_surroundings_do_not_matter() -> None:
    launch = read_launch(DATA / "scripts/run-35b.sh")
    assert launch.args["context_parallel_size"] == 1 and launch.args["num_layers"] == 40  # not the 7 of the here-document
    assert any("EVAL_ARGS; taken as empty" in note for note in launch.notes)
    assert any("slime#1689" in note for note in launch.notes)


def test_the_environment_changes_what_the_script_leaves_open() -> None:
    assert read_launch(DATA / "scripts/run-35b.sh", {"ROPE_THETA": "10000"}).args["rotary_base"] == 10000


def test_hydra_overrides_are_the_actors_own() -> None:
    launch = read_launch(DATA / "verl_35b.sh", {"DEVICE": "gpu"})
    assert (launch.kind, launch.unsaid, launch.program) == ("bash script, Hydra overrides", "reference", "verl.trainer.main_ppo")
    assert launch.args == {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1,
        "moe_router_dtype": "fp32", "moe_grouped_gemm": True, "bf16": True, "fp16": False,
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"verl_35b\.sh:\d+: .* depends on .*line 32.*--set NAME=VALUE"):
        read_launch(DATA / "verl_35b.sh")


def written(tmp_path: Path, name: str, text: str) -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


def test_commands_in_other_shells_and_pipes_are_found(tmp_path: Path) -> None:
    for line in (
        'docker exec box bash -c "cd /x && torchrun train.py --num-layers 4 --swiglu"',
        'ssh host "cd /x && torchrun train.py --num-layers 4 --swiglu"',
        "nohup torchrun train.py --num-layers 4 --swiglu 2>&1 | tee log &",
        'CMD="torchrun train.py --num-layers 4"\neval $CMD --swiglu',
        'go() { python3 train.py --num-layers $1 "${@:2}" || exit 1; }\ngo 4 --swiglu',
        "if ! command -v ray &>/dev/null; then exit 1; fi\nexec python3 -m train --num-layers $((2 * 2)) $([[ a == a ]] && echo --swiglu)",
    ):
        assert read_launch(written(tmp_path, "run.sh", line)).args == {"num_layers": 4, "swiglu": True}, line


def test_the_last_of_several_commands_is_read_and_said(tmp_path: Path) -> None:
    launch = read_launch(written(tmp_path, "run.sh", "python3 convert.py --num-layers 4\npython3 train.py --num-layers 8\n"))
    assert launch.args == {"num_layers": 8} and "2 commands carry Megatron flags" in launch.notes[0]


def test_ray_takes_quotes_off_and_opens_patterns_again(tmp_path: Path) -> None:
    launch = read_launch(written(tmp_path, "run.sh", "ray job submit -- python3 train.py --moe-layer-freq \"'([1]*4)'\" --num-layers 4\n"))
    assert launch.args["moe_layer_freq"] == [1, 1, 1, 1] and launch.notes == []
    launch = read_launch(written(tmp_path, "run.sh", 'ray job submit -- python3 train.py --moe-layer-freq "[1,1]" --num-layers 4\n'))
    assert launch.args["moe_layer_freq"] == [1, 1] and "slime#1689" in launch.notes[0]


@pytest.mark.parametrize("quote", ["", '"'])
def test_an_unquoted_list_is_a_trap(quote: str, tmp_path: Path) -> None:
    launch = read_launch(written(tmp_path, "run.sh", f'F="[1,1]"\npython3 train.py --moe-layer-freq {quote}$F{quote}\n'))
    assert launch.args["moe_layer_freq"] == [1, 1]
    assert [note for note in launch.notes if "not quoted" in note] == ([] if quote else launch.notes)
    assert quote or launch.notes


def test_other_lists_and_configs(tmp_path: Path) -> None:
    assert read_launch(written(tmp_path, "flags.json", json.dumps(["--num-layers", "4", "--swiglu"]))).args == {
        "num_layers": 4,
        "swiglu": True,
    }
    config = {
        "num_layers": 4,
        "layernorm_epsilon": 1e-6,
        "num_moe_experts": 8,
        "share_embeddings_and_output_weights": True,
        "kv_channels": None,
    }
    launch = read_launch(written(tmp_path, "transformer_config.json", json.dumps(config)))
    assert launch.args == {"num_layers": 4, "norm_epsilon": 1e-6, "num_experts": 8, "untie_embeddings_and_output_weights": False}
    overrides = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2\n+actor_rollout_ref.actor.megatron.override_transformer_config.layernorm_epsilon=1e-5\n"
    assert read_launch(written(tmp_path, "verl.txt", overrides)).args == {"tensor_model_parallel_size": 2, "norm_epsilon": 1e-5}


def test_numbers_and_patterns_of_yaml(tmp_path: Path) -> None:
    model = "model:\n  rotary_base: 1e7\n  moe_layer_freq: ([0]*1+[1]*3)\n  num_layers: 4.0\n"
    assert read_launch(written(tmp_path, "run_config.yaml", model)).args == {
        "rotary_base": 1e7,
        "moe_layer_freq": [0, 1, 1, 1],
        "num_layers": 4,
    }


REFUSED = {
    "a substitution": ("run.sh", "N=$(touch {mark}; echo 4)\npython3 train.py \\\n --num-layers $N\n", r"run\.sh:1: --num-layers is .*touch is not run"),
    "an unset size": ("run.sh", "python3 train.py --num-layers 4 --tensor-model-parallel-size ${TP}\n", r"run\.sh:1: --tensor-model-parallel-size is \$\{TP\}, and nothing in the script sets TP"),
    "flags of a substitution": ("run.sh", "python3 train.py --num-layers 4 --swiglu \\\n  $(touch {mark}; cat flags)\n", r"run\.sh:2: .* may hold flags"),
    "a missing source": ("run.sh", "source models/gone.sh\npython3 train.py --num-layers 4 --swiglu ${MODEL_ARGS[@]}\n", r"run\.sh:2: .*run\.sh:1 sources models/gone\.sh, which is not there"),
    "only a missing source": ("run.sh", "source models/gone.sh\nsleep 1\n", r"no command line.*run\.sh:1 sources models/gone\.sh, which is not there"),
    "a list that depends on an argument": (
        "run.sh", 'A=(--num-layers 4)\nif [[ "$1" == big ]]; then A+=(--hidden-size 8); fi\n', r"run\.sh:2: the list A is not known: A depends on a condition on line 2",
    ),
    "no flags": ("run.sh", "echo hello\n", "no command line and no list in it has a Megatron flag"),
    "no flags in a list": ("flags.txt", "--lr 1e-6\n", "none of its 2 words is a Megatron flag"),
    "no flags in Python": ("run.py", "import os\nos.system('touch {mark}')\n", "no list in it has a Megatron flag"),
    "a Python value": ("run.py", 'A = ["--num-layers", str(f("touch {mark}"))]\n', r"run\.py:1: --num-layers is .*f\(\) is not called"),
    "half a YAML": ("run_config.yaml", "model: [", "is not YAML"),
    "YAML that makes objects": ("run_config.yaml", "model: !!python/object/apply:os.system ['touch {mark}']\n", "is not YAML that can be read safely"),
    "YAML without a model": ("run_config.yaml", "train: {}\n", "has no `model:` section"),
    "a size that is none": ("run_config.yaml", "model:\n  num_layers: 4\n  hidden_size: [wide]\n", r"run_config\.yaml:3: hidden_size is \['wide'\], which is no whole number"),
    "a base that is none": ("run_config.yaml", "model:\n  rotary_base: true\n", r"run_config\.yaml:2: rotary_base is True, which is no number"),
    "half a JSON": ("flags.json", "[", "is not JSON"),
    "another JSON": ("flags.json", "{}", "neither a list of flags nor"),
    "a deep nest": ("run.sh", "X=$((" + "(" * 3000 + "1" + ")" * 3000 + "))\n", "nested too deeply"),
    "zero bytes": ("run.sh", "echo\0", "zero bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_understood_names_its_line_and_runs_nothing(what: str, tmp_path: Path) -> None:
    name, text, said = REFUSED[what]
    mark = tmp_path / "mark"
    with pytest.raises(UsageError, match=said):
        read_launch(written(tmp_path, name, text.replace("{mark}", str(mark))))
    assert not mark.exists()


def test_what_is_no_text_or_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    for path, said in ((tmp_path / "binary.sh", "is not text"), (tmp_path, "is not a file"), (tmp_path / "gone.sh", "is not a file")):
        with pytest.raises(UsageError, match=said):
            read_launch(path)
