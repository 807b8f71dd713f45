"""Scripts that end in another model than config.json: none of them agrees.  Ordinary ones do, however they are written."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bisect_tool.__main__ import run

DATA = Path(__file__).parent / "data"
FLAGS = shlex.split((DATA / "launch/torchrun_35b.txt").read_text().partition("pretrain_gpt.py")[2])
AT = FLAGS.index("--rotary-base") + 1
LIST = f"A=({shlex.join(FLAGS)})\n"
START = '\ntorchrun pretrain_gpt.py "${A[@]}"\n'
PYTHON = f"import os, shlex, subprocess, sys\nA = {json.dumps(FLAGS)}\n"
CALL = '\nsubprocess.run(["torchrun", "pretrain_gpt.py", *A])\n'
WRONG = '["--rotary-base", "10000"]'
VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
CONFIG = "+actor_rollout_ref.model.override_config"
TRANSFORMER = "+actor_rollout_ref.actor.megatron.override_transformer_config"

# script → the flag that is wrong
DIFFER = {
    "an element set": (LIST + f"A[{AT}]=10000" + START, "--rotary-base"),
    "an element printed": (LIST + f'printf -v "A[{AT}]" 10000' + START, "--rotary-base"),
    "an element taken out and set": (LIST + f"unset 'A[{AT}]'\nA[{AT}]=10000" + START, "--rotary-base"),
    "an element declared in quotes": (LIST + f'declare "A[{AT}]=10000"' + START, "--rotary-base"),
    "a local list beside it": (LIST + "f() { local A=(--num-layers 4); }\nf\nA+=(--rotary-base 10000)" + START, "--rotary-base"),
    "a function that adds": (LIST + "f() { A+=(--rotary-base 10000); }\nf" + START, "--rotary-base"),
    "a name for another": (LIST + "declare -n R=A\nR+=(--rotary-base 10000)" + START, "--rotary-base"),
    "a name that stays": (LIST + "readonly N=10000\nN=10000000\nA+=(--rotary-base $N)" + START, "--rotary-base"),
    "a keyed list": (LIST + "B=([1]=10000 [0]=--rotary-base)\nA+=(${B[@]})" + START, "--rotary-base"),
    "a class of letters": (LIST + "[[ a == [^b] ]] && A+=(--rotary-base 10000)" + START, "--rotary-base"),
    "a script that exec ends": (LIST + 'exec torchrun pretrain_gpt.py "${A[@]}" --rotary-base 10000' + START, "--rotary-base"),
    "an alias": (PYTHON + f"B = A\nB.extend({WRONG})" + CALL, "--rotary-base"),
    "a function's parameter": (PYTHON + f"def f(x):\n    x += {WRONG}\nf(A)" + CALL, "--rotary-base"),
    "two lists of which one is used": (PYTHON + f'B = {WRONG}\nC = ["--rotary-base", "10000000"]\nA += B' + CALL, "--rotary-base"),
    "a shell's line": (PYTHON + 'os.system("torchrun pretrain_gpt.py " + " ".join(A) + " --rotary-base 10000")\n', "--rotary-base"),
    "verl's own config.json": (f"{VERL}{CONFIG}.num_experts_per_tok=2", "--moe-router-topk"),
    "verl's own config.json at once": (f"{VERL}{CONFIG}={{num_experts_per_tok:2}}", "--moe-router-topk"),
    "verl's own config.json, newer": (f"{VERL}{CONFIG}.model_config.num_experts_per_tok=2", "--moe-router-topk"),
    "verl's own config.json, inside": (f"{VERL}{CONFIG}.text_config.rms_norm_eps=1e-5", "--norm-epsilon"),
    "verl's own config.json, deeper": (f"{VERL}{CONFIG}.rope_parameters.rope_theta=10000", "--rotary-base"),
    "verl's own depth": (f"{VERL}{CONFIG}.num_hidden_layers=4", "num_hidden_layers"),
    "verl's transformer config at once": (f"{VERL}{TRANSFORMER}={{moe_router_topk:2}}", "--moe-router-topk"),
    "no number": (LIST + "A+=(--norm-epsilon nan)" + START, "--norm-epsilon"),
    "an infinite number": (LIST + "A+=(--rotary-base inf)" + START, "--rotary-base"),
    "a default of several words": (LIST + 'torchrun pretrain_gpt.py "${A[@]}" ${EXTRA:---rotary-base 10000}\n', "--rotary-base"),
    "an alternative of several words": (LIST + 'W=1\ntorchrun pretrain_gpt.py "${A[@]}" ${W:+--rotary-base 10000 --bf16}\n', "--rotary-base"),
    "a default with a quoted word in it": (LIST + 'torchrun pretrain_gpt.py "${A[@]}" ${EXTRA:---lr "1 2" --rotary-base 10000}\n', "--rotary-base"),
}  # fmt: skip
# script → what is said to be not known
REFUSED = {
    "a list read": (LIST + 'read -ra X <<< "--rotary-base 10000"' + START.replace('"${A[@]}"', '"${A[@]}" "${X[@]}"'), "X is read from the outside"),
    "lines after a switch": (LIST + "mapfile -t X < flags" + START.replace('"${A[@]}"', '"${A[@]}" --use-dynamic-batch-size "${X[@]}"'), "X is read from the outside"),
    "a sum": (LIST + "declare -i N=9999+1\nA+=(--rotary-base $N)" + START, "N is declared -i"),
    "what a command prints": (LIST + 'source <(echo "A+=(--rotary-base 10000)")' + START, "what a command prints is sourced"),
    "an element calculated": (LIST + f"((A[{AT}]=10000))" + START, "is not read"),
    "a list in another shell": (LIST + "bash -c 'torchrun pretrain_gpt.py ${A[@]}'", "no list is given to a shell"),
    "a here-document": (LIST + "bash <<EOF\ntorchrun pretrain_gpt.py ${A[@]} --rotary-base 10000\nEOF\n", "this here-document has flags"),
    "xargs": (LIST + 'echo --rotary-base 10000 | xargs torchrun pretrain_gpt.py "${A[@]}"\n', "xargs reads it from the outside"),
    "a line with an unknown word": (LIST + 'tmux send-keys "torchrun pretrain_gpt.py ${A[*]} --rotary-base $(cat base)" Enter\n', "is a command line, and is not known"),
    "an element in Python": (PYTHON + f'A[{AT}] = "10000"' + CALL, f'line 3 (A[{AT}] = "10000")'),
    "an undecided if": (PYTHON + f'if os.path.exists("x"):\n    A += {WRONG}' + CALL, "is set on line 4"),
    "a loop": (PYTHON + 'for k, v in {"--rotary-base": "10000"}.items():\n    A += [k, v]' + CALL, "is set on line 4"),
    "a try": (PYTHON + f"try:\n    A += {WRONG}\nfinally:\n    pass" + CALL, "is set on line 4"),
    "a function of a library": (PYTHON + "import random\nrandom.shuffle(A)" + CALL, "random.shuffle(A)"),
    "an imported list": (PYTHON + "from conf import B\nA += B" + CALL, "from conf import B"),
    "a list from anywhere": (PYTHON + "from conf import *\nA = A + B" + CALL, "from conf import *"),
    "a command's words": (PYTHON + 'A += subprocess.check_output(["cat", "flags"]).split()' + CALL, "it is what a command says"),
    "two lists that say otherwise": (f"A = {json.dumps(FLAGS)}\nB = {WRONG}\n", "nothing here says which is used"),
    "verl's unset value": (f"{VERL}{TRANSFORMER}.moe_router_topk=${{TOPK}}", "nothing in the script sets TOPK"),
    "no ranks": ("torchrun pretrain_gpt.py --tensor-model-parallel-size 0", "--tensor-model-parallel-size is '0', which is no whole number from 1 up"),
    "less than none": (LIST + "A+=(--expert-model-parallel-size -1)" + START, "which is no whole number from 1 up"),
    "half a rank": (LIST + "A+=(--pipeline-model-parallel-size 1.5)" + START, "which is no whole number from 1 up"),
    "verl without ranks": (f"{VERL}actor_rollout_ref.actor.megatron.expert_model_parallel_size=0", "which is no whole number from 1 up"),
    "verl with half a rank": (f"{VERL}actor_rollout_ref.actor.megatron.expert_model_parallel_size=1.5", "which is no whole number from 1 up"),
    "verl's overrides after a comment": (f'B=({VERL[33:]})\n{VERL[:32]} \\\n# x=1 \\\n"${{B[@]}}"\n', "line 4 begins with an override and is no command"),
    "a list that a pipeline makes": ("A=(--rotary-base 1)\nB=($(echo \"${A[@]}\" | sed s/1/2/))\npython3 train.py --bf16 --colocate \"${B[@]}\"\n", "${B[@]} may hold flags, and its value"),
    "what depends on a variable": (LIST + 'B=()\nif [ "$FULLROPE" = 1 ]; then B=(--rotary-percent 1); fi\ntorchrun pretrain_gpt.py "${A[@]}" "${B[@]}"\n', "--set FULLROPE="),
}  # fmt: skip
# script → what is left out, where nothing decides
UNDECIDED = {
    "a bridge that is told nothing": ("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.megatron.use_mbridge=True", "the launch says nothing of it"),
    "a value of config.json that nothing is known of": (f"{VERL}{CONFIG}.residual_gain=2", "residual_gain=2 (run.sh:1)"),
    "the checkpoint's own args": (LIST + "A+=(--use-checkpoint-args)" + START, "run.sh:2 gives --use-checkpoint-args"),
    "two commands that differ": (LIST + 'torchrun pretrain_gpt.py "${A[@]}" --rotary-base 10000' + START, "run.sh:2 and run.sh:3 start models that differ in --rotary-base"),
    "two commands, the last is wrong": (LIST + START + 'torchrun pretrain_gpt.py "${A[@]}" --rotary-base 10000\n', "start models that differ in --rotary-base"),
    "one command of a loop differs": (LIST + 'for b in 10000 10000000; do torchrun pretrain_gpt.py "${A[@]}" --rotary-base $b; done\n', "start models that differ in --rotary-base"),
    "two Python commands that differ": (PYTHON + 'subprocess.run(["torchrun", "pretrain_gpt.py", *A, "--rotary-base", "10000"])' + CALL, "start models that differ in --rotary-base"),
    "what a source may set": (LIST + 'source /opt/x.env 2>/dev/null || true\ntorchrun pretrain_gpt.py "${A[@]}" ${EXTRA}\n', "run.sh:2 sources /opt/x.env, which is not read: it may set EXTRA"),
    "what a guarded source may set": (LIST + '[ -f /opt/c.env ] && . /opt/c.env\ntorchrun pretrain_gpt.py "${A[@]}" ${EXTRA}\n', "run.sh:2 sources /opt/c.env, which is not read: it may set EXTRA"),
    "code on standard input": (LIST + "python3 - \"${A[@]}\" <<'EOF'\nimport sys\nEOF\n", "python3 - is code that may change them"),
    "code in a word": (LIST + "python3 -u -c 'import train; train.main()' \"${A[@]}\"\n", "python3 -c is code that may change them"),
    "a shell's code": (LIST + "bash -s -- \"${A[@]}\" <<'EOF'\ntorchrun pretrain_gpt.py $@ --bf16\nEOF\n", "bash -s is code that may change them"),
    "a mistyped flag": (LIST + "A+=(--rotary-pct 0.5)" + START, "--rotary-pct is no flag that we know; --rotary-percent is"),
    "a flag of a kind that is not judged": (LIST + "A+=(--fp8-format hybrid)" + START, "--fp8-format makes another model, of a kind that is not judged"),
    "another role's transformer config": (f"{VERL}+actor_rollout_ref.ref.megatron.override_transformer_config.moe_router_topk=2", "start models that differ in --moe-router-topk"),
}  # fmt: skip
AGREE = {
    "a list": LIST + START,
    "declared": f'declare -a A=({shlex.join(FLAGS)})\nreadonly A\nexec torchrun pretrain_gpt.py "${{A[@]}}" 2>&1 | tee log\n',
    "a function's local list": f'main() {{ local args=({shlex.join(FLAGS)}); torchrun pretrain_gpt.py "${{args[@]}}" & wait; }}\nmain "$@"\n',
    "an element set right": LIST + f"unset 'A[{AT}]'\nA[{AT}]=10000000" + START,
    "strict": LIST + 'set -euo pipefail\nif [ -n "${DEBUG:-}" ]; then set -x; fi\n"${LAUNCH:-torchrun}" pretrain_gpt.py "${A[@]}" "$@"\n',
    "a local list that is not used": LIST + "f() { local A=(--num-layers 4); printf '%s\\n' \"${A[@]}\"; }\nf" + START,
    "Python that prints": PYTHON + 'print(" ".join(A), len(A))\nif not A:\n    raise SystemExit(1)' + CALL,
    "Python in functions": PYTHON.replace("A = ", "def args():\n    return ")
    + 'def run(cmd):\n    print("+", *cmd)\n    subprocess.run(cmd, check=True, env=os.environ)\n'
    'def main():\n    cmd = ["torchrun", "pretrain_gpt.py", *args(), *sys.argv[1:]]\n    run(cmd)\nif __name__ == "__main__":\n    main()\n',
    "Python that quotes": PYTHON + 'os.system("torchrun pretrain_gpt.py " + " ".join(shlex.quote(one) for one in map(str, A)))\n',
    "Python in a branch": PYTHON + 'if os.environ.get("DRY"):\n    print(A)\nelse:\n    os.execvp("torchrun", ["torchrun", "pretrain_gpt.py", *A])\n',
    "Python lists": PYTHON + 'B = ["--context-parallel-size", "1"]\nC = ["python3", "pretrain_gpt.py"] + A + B\n',
    "verl": f"{VERL}{CONFIG}.num_experts_per_tok=8 {TRANSFORMER}.moe_router_topk=8",
    "a default in quotes": LIST + 'torchrun pretrain_gpt.py "${A[@]}" --wandb-group "${GROUP:-a --rotary-base 10000}"\n',
    "a plain command line that lost its backslashes": "torchrun pretrain_gpt.py\n" + "\n".join(shlex.join(FLAGS).replace(" --", "\n--").split("\n")) + "\n",
    "a conversion and a run": LIST + 'python3 tools/convert.py "${A[@]}" --expert-model-parallel-size 2 --save x\npython3 eval.py --load x --bf16' + START,
    "a source and a variable with a default": LIST + 'source ~/.bashrc\ntorchrun pretrain_gpt.py "${A[@]}" --lr ${LR}\n',
    "a flag that is near nothing": LIST + "A+=(--my-own-reward-thing 2)" + START,
    "another role as the actor": f"{VERL}{TRANSFORMER}.moe_router_topk=8 +actor_rollout_ref.ref.megatron.override_transformer_config.moe_router_topk=8",
}  # fmt: skip


def judged(text: str, tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    script = tmp_path / ("run.py" if text.startswith(("import", "A =")) else "run.sh")
    script.write_text(text)
    out = tmp_path / "out"
    code = run(["config", "--reference", str(DATA / "configs/Qwen3.5-35B-A3B"), "--launch", str(script), "--out", str(out), *options])
    return code, json.loads((out / "report.json").read_text()) if out.exists() else {}


@pytest.mark.parametrize("what", DIFFER)
def test_another_model_is_the_fault_of_one_flag(what: str, tmp_path: Path) -> None:
    text, flag = DIFFER[what]
    code, page = judged(text, tmp_path)
    (fault,) = page["faults"]
    assert (code, page["verdict"], page["minor"], fault["class"]) == (1, "differs", [], "model-definition")
    assert (fault["relation"]["kind"], fault["relation"]["detail"]["flag"]) == ("config", flag)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_named(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = REFUSED[what]
    code, page = judged(text, tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert (code, page) == (2, {}) and line.startswith("Error: ") and said in line


@pytest.mark.parametrize("what", UNDECIDED)
def test_where_nothing_decides_nothing_agrees(what: str, tmp_path: Path) -> None:
    text, said = UNDECIDED[what]
    code, page = judged(text, tmp_path)
    (stage,) = [one for one in page["stages"] if one["name"] == "config"]
    assert (code, page["verdict"], page["faults"], page["minor"]) == (125, "incomparable", [], [])
    assert any(said in one["why"] for one in stage["skipped"])


@pytest.mark.parametrize("what", AGREE)
def test_ordinary_scripts_agree(what: str, tmp_path: Path) -> None:
    code, page = judged(AGREE[what], tmp_path)
    assert (code, page["verdict"], page["faults"], page["minor"]) == (0, "agrees", [], [])


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
def test_a_variable_set_for_sourcing_alone_is_gone_after_it(tmp_path: Path) -> None:
    (tmp_path / "base.sh").write_text("A+=(--rotary-base ${BASE:-10000000})\n")
    file = tmp_path / "run.sh"
    lines = LIST + "BASE=10000 source ./base.sh\nB=(--rotary-base ${BASE:-10000000})\n"
    file.write_text(f"{lines}echo ${{A[@]: -1}} ${{B[1]}}\n")
    found = subprocess.run(["bash", "run.sh"], cwd=tmp_path, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert found.stdout == "10000 10000000\n"
    code, page = judged(lines + START, tmp_path)
    assert code == 1 and [fault["relation"]["detail"]["value"] for fault in page["faults"]] == [10000]
    shutil.rmtree(tmp_path / "out")
    code, page = judged(lines + 'torchrun pretrain_gpt.py "${A[@]}" "${B[@]}"\n', tmp_path)
    assert (code, page["faults"]) == (0, [])


def test_a_flag_that_is_no_number_is_written_as_a_word(tmp_path: Path) -> None:
    code, page = judged(LIST + "A+=(--norm-epsilon nan)" + START, tmp_path)
    (fault,) = page["faults"]
    assert code == 1 and fault["relation"]["detail"] == {"flag": "--norm-epsilon", "value": "nan", "expected": 1e-6}


LOST = {
    "lost at a line's end": (LIST + 'torchrun pretrain_gpt.py "${A[@]}" \\\n  --rotary-base 10000\n  --rotary-base 10000000\n', 4, "--rotary-base"),
    "a comment between": (LIST + f'torchrun pretrain_gpt.py {shlex.join(FLAGS)} --rotary-base 10000 \\\n# --debug \\\n"${{A[@]}}"\n', 4, "--rotary-base"),
    "a blank after it": (LIST + f'torchrun pretrain_gpt.py {shlex.join(FLAGS)} --rotary-base 10000 \\ \n"${{A[@]}}"\n', 3, "--rotary-base"),
    "a comment after it": (LIST + 'torchrun pretrain_gpt.py "${A[@]}" --rotary-base 10000 \\  # as before\n --rotary-base 10000000\n', 3, "--rotary-base"),
    "flags that are then missing": (LIST.replace(" --attention-output-gate", "") + 'torchrun pretrain_gpt.py "${A[@]}"\n  --attention-output-gate\n', 3, "--attention-output-gate"),
}  # fmt: skip


@pytest.mark.parametrize("what", LOST)
def test_a_line_that_begins_with_a_flag_is_no_part_of_the_command_before_it(what: str, tmp_path: Path) -> None:
    text, line, flag = LOST[what]
    code, page = judged(text, tmp_path)
    (fault,) = page["faults"]
    assert (code, page["verdict"], page["minor"], fault["relation"]["detail"]["flag"]) == (1, "differs", [], flag)
    (stage,) = [one for one in page["stages"] if one["name"] == "config"]
    lost = f"line {line} begins with a flag and is no command: the backslash before it is missing"
    assert any(lost in note for note in stage["notes"])
    assert (lost in json.dumps(fault)) == (what == "flags that are then missing")


# script, what --set says → the exit code
SAID = {
    "the script's own value": (LIST + "BASE=10000\nA+=(--rotary-base $BASE)" + START, "BASE=10000000", 1),
    "the script's own list": (LIST + 'python3 x.py "${B[@]}"' + START, "B=--rotary-base 10000", 0),
    "a default": (LIST + "A+=(--rotary-base ${BASE:-10000})" + START, "BASE=10000000", 0),
    "what a command prints": (LIST + "BASE=$(date)\nA+=(--rotary-base $BASE)" + START, "BASE=10000000", 0),
    "what depends on a condition": (LIST + "B=10000000\nif ping -c 1 x; then B=10000; fi\nA+=(--rotary-base $B)" + START, "B=10000000", 0),
    "a local value": (LIST + "f() { local B=10000; A+=(--rotary-base $B); }\nf" + START, "B=10000000", 1),
    "Python's own value": (PYTHON + 'B = "10000"\nA += ["--rotary-base", B]' + CALL, "B=10000000", 1),
    "Python's environment": (PYTHON + 'B = os.environ.get("B", "10000")\nA += ["--rotary-base", B]' + CALL, "B=10000000", 0),
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_the_environment_does_not_outdo_the_script(what: str, tmp_path: Path) -> None:
    text, said, expected = SAID[what]
    code, page = judged(text, tmp_path, "--set", said)
    assert (code, [fault["relation"]["detail"]["flag"] for fault in page["faults"]]) == (expected, ["--rotary-base"] * expected)


@pytest.mark.parametrize(
    "text", [LIST + "A+=(--rotary-base ${ROTARY:-10000})" + START, PYTHON + 'print(os.environ["ROTARY"])' + CALL, shlex.join(FLAGS)]
)
def test_a_name_that_nothing_reads_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, page = judged(text, tmp_path, "--set", "ROTRAY=10000000")
    (line,) = capsys.readouterr().err.splitlines()
    assert (code, page) == (2, {}) and "nothing in run." in line and "reads ROTRAY" in line
    assert ("ROTARY" in line) == ("ROTARY" in text)


@pytest.mark.parametrize("how", ["--config-path=cfg --config-name=mine.yaml", "-cp cfg -cn mine", "--config-path ./cfg --config-name mine"])
def test_a_hydra_config_beside_the_script_is_not_read_and_not_passed_over(how: str, tmp_path: Path) -> None:
    text = f"{VERL.replace('main_ppo', f'main_ppo {how}')}\n"
    code, page = judged(text, tmp_path)
    assert (code, page["faults"]) == (0, [])
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "cfg").mkdir()
    (tmp_path / "cfg/mine.yaml").write_text("actor_rollout_ref: {actor: {megatron: {override_transformer_config: {moe_router_topk: 2}}}}\n")
    code, page = judged(text, tmp_path)
    (stage,) = [one for one in page["stages"] if one["name"] == "config"]
    assert (code, page["faults"]) == (125, []) and any("cfg/mine.yaml, which is not read" in one["why"] for one in stage["skipped"])


def test_a_scaled_rope_of_a_bridge_is_not_judged(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for value, expected in ((False, 0), (True, 125)):
        file.write_text(f"model:\n  num_layers: 40\n  rope_scaling: {str(value).lower()}\n")
        reference = str(DATA / "configs/Qwen3.5-35B-A3B")
        assert run(["config", "--reference", reference, "--launch", str(file), "--out", str(tmp_path / str(value))]) == expected


def test_a_script_with_carriage_returns_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    file.write_bytes((LIST + START).replace("\n", "\r\n").encode())
    assert run(["config", "--reference", str(DATA / "configs/Qwen3.5-35B-A3B"), "--launch", str(file), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "run.sh:1: this line ends in a carriage return (CRLF), which bash takes for part of its last word" in line


WRITES = {
    "sed": "sed -i s/8/4/ ${D}/model.sh",
    "cp": 'cp other.sh "${D}/model.sh"',
    "a here-document": "cat > model.sh <<EOF\nA=()\nEOF",
    "added to": 'echo "A+=(--rotary-base 10000)" >> ${D}/model.sh',
    "a pipeline": "echo x | tee -a model.sh",
}


@pytest.mark.parametrize("what", WRITES)
def test_a_sourced_file_that_the_script_writes_is_not_known(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.sh").write_text(LIST)
    begin, source = 'D="$(cd "$(dirname "$0")" && pwd)"\n', 'source "${D}/model.sh"'
    code, page = judged(f"{begin}{WRITES[what]}\n{source}{START}", tmp_path)
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("Error")]
    assert (code, page) == (2, {}) and "run.sh:2 writes model.sh before it is sourced" in line


def test_a_sourced_file_that_the_script_only_reads_or_writes_later_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text(LIST)
    text = f"cat model.sh; grep -c x model.sh; cp model.sh kept.sh; bash other.sh > log\nsource ./model.sh{START}echo > model.sh\n"
    assert judged(text, tmp_path)[0] == 0


def test_the_model_that_a_python_launcher_names_is_read_in_front(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'import x as U\nT = "35b"\nU.execute_train(train_args="--bf16 --rotary-base 10000 ", megatron_model_type=T)\n'
    assert judged(text, tmp_path) == (2, {})
    assert "run.py:3: the model's flags are those of scripts/models/35b.sh, which is not there" in capsys.readouterr().err
    (tmp_path / "scripts/models").mkdir(parents=True)
    (tmp_path / "scripts/models/35b.sh").write_text(f"MODEL_{LIST.replace('A=', 'ARGS=', 1)}")
    code, page = judged(text, tmp_path)
    assert (code, [fault["relation"]["detail"]["flag"] for fault in page["faults"]]) == (1, ["--rotary-base"])
