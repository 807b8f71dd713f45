from __future__ import annotations

from pathlib import Path

import pytest
from bisect_hooks.errors import UsageError

from bisect_tool.launch.flags import FLAGS, HARMLESS, CommandLine, harmless, nearest
from bisect_tool.launch.words import Where, Word

HERE = Where(Path("run.sh"), 7)


def words(line: str) -> list[Word]:
    return [Word(one, HERE) for one in line.split()]


def args(line: str) -> dict[str, object]:
    return CommandLine().read(words(line)).args


def test_switches_values_and_words() -> None:
    assert args("--swiglu --disable-bias-linear --num-layers 4 --norm-epsilon=1e-6 --spec a.b c --bf16 --normalization RMSNorm") == {
        "swiglu": True,
        "add_bias_linear": False,
        "num_layers": 4,
        "norm_epsilon": 1e-6,
        "spec": ["a.b", "c"],
        "bf16": True,
        "normalization": "RMSNorm",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("[0,1,1]", [0, 1, 1]), ("[0]*1+[1]*2", [0, 1, 1]), ("([1]*3)", [1, 1, 1]), ("2*[0]+[1]", [0, 0, 1]), ("[1,", "[1,"), ("[1]*999999999", "[1]*999999999")],
)  # fmt: skip
def test_patterns_are_read_and_never_evaluated(text: str, value: object) -> None:
    assert args(f"--moe-layer-freq {text}") == {"moe_layer_freq": value}


def test_the_last_of_two_counts_and_is_said() -> None:
    line = CommandLine().read(words("--moe-router-topk 8 --moe-router-topk 10"))
    assert line.args == {"moe_router_topk": 10}
    assert line.notes == ["--moe-router-topk is given twice: 8 in run.sh:7, then 10 in run.sh:7; the last one counts"]


def test_unknown_flags_take_their_values_with_them() -> None:
    line = CommandLine().read([*words("--sglang-x"), Word("${A}", HERE, "why"), *words("--lr 1e-6 --num-layers 2")])
    assert line.args == {"num_layers": 2}
    assert [name for name, _ in line.unknown] == ["--sglang-x", "--lr"]


def test_an_unset_list_is_empty_and_an_unknown_one_is_refused() -> None:
    unset = Word("${EVAL_ARGS}", HERE, "nothing in the script sets EVAL_ARGS", unset=True)
    assert CommandLine().read([*words("--swiglu"), unset]).notes == ["run.sh:7: nothing in the script sets EVAL_ARGS; taken as empty"]
    with pytest.raises(UsageError, match=r"run\.sh:7: \$\{ARGS\} may hold flags, and its value is not known: because"):
        CommandLine().read([*words("--swiglu"), Word("${ARGS}", HERE, "because")])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--num-layers", "has no value"),
        ("--num-layers six", "no whole number"),
        ("--rotary-base ten", "no number"),
        ("--num-layers --swiglu", "has no value"),
    ],
)
def test_values_that_are_none_are_refused_with_their_line(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=rf"run\.sh:7: --.*{said}"):
        args(line)


def test_a_value_that_matters_must_be_known() -> None:
    with pytest.raises(UsageError, match=r"run\.sh:7: --num-layers is \$N, and who knows"):
        CommandLine().read([*words("--num-layers"), Word("$N", HERE, "who knows")])
    assert CommandLine().read([*words("--hf-checkpoint"), Word("$N", HERE, "who knows")]).args == {}


def test_misspelled_flags_have_a_nearest() -> None:
    assert nearest("--rotary-bsae") == "--rotary-base"
    assert nearest("--rotary_base") == "--rotary-base"
    assert nearest("--sglang-mem-fraction-static") is None


@pytest.mark.parametrize(
    "name",
    [
        "--use-checkpoint-args",
        "--bias-linear",
        "--model-parallel-size",
        "--padded-vocab-size",
        "--fp8-format",
        "--q-lora-rank",
        "--moe-router-new",
    ],
)
def test_a_flag_that_may_change_the_model_is_not_harmless(name: str) -> None:
    assert not harmless(name)


def test_no_beginning_of_the_harmless_hides_a_flag_of_the_model() -> None:
    hidden = {name for name in FLAGS if harmless(name)}
    assert hidden <= {"--load", "--ref-load", "--actor-num-nodes", "--actor-num-gpus-per-node"} and HARMLESS
