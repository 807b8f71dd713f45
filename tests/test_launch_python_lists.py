from __future__ import annotations

import re
from pathlib import Path

import pytest
from bisect_hooks.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from bisect_tool.launch.python_lists import Script
from bisect_tool.launch.read import read_launch

FILE = Path("run.py")
IDIOMS = {
    "a comprehension": ('N = 4\nF = [0 if i < 1 else 1 for i in range(N)]\nA = ["--moe-layer-freq", "[" + ",".join(str(x) for x in F) + "]"]', "--moe-layer-freq [0,1,1,1]"),
    "lists joined": ('M = ["--swiglu"]\nP = ["--num-layers", "4"]\nA = ["python3"] + M + P', "python3 --swiglu --num-layers 4"),
    "starred": ('M = ["--swiglu"]\nA = ["python3", *M]', "python3 --swiglu"),
    "appended": ('A = ["--swiglu"]\nA += ["--num-layers", str(2 * 3)]\nA.append("--bf16")\nA.extend(["--fp16"])', "--swiglu --num-layers 6 --bf16 --fp16"),
    "f-strings": ('N = 3\nA = f"--num-layers {N} " "--swiglu"', "--num-layers 3 --swiglu"),
    "a function that returns flags": ('def model_args() -> str:\n    return (\n        "--swiglu "\n        "--num-layers 4 "\n    )', "--swiglu --num-layers 4"),
    "defaults of the environment": ('import os\nA = ["--num-layers", os.environ.get("N", "5"), "--hidden-size", os.getenv("H", "6")]', "--num-layers 5 --hidden-size 6"),
    "split": ('A = "--num-layers 4 --swiglu".split()', "--num-layers 4 --swiglu"),
    "main": ('if __name__ == "__main__":\n    A = ["--num-layers", "4"]', "--num-layers 4"),
}  # fmt: skip


def read(text: str, **given: str) -> Script:
    script = Script(FILE, given)
    script.run(text)
    return script


@pytest.mark.parametrize("what", IDIOMS)
def test_idioms_are_read(what: str) -> None:
    text, expected = IDIOMS[what]
    _, found = read(text).lists[-1]
    assert " ".join(word.text for word in found) == expected
    assert [word.unknown for word in found] == [""] * len(found)


def test_words_know_their_line() -> None:
    _, found = read('A = [\n"--num-layers",\n"4",\n]').lists[-1]
    assert [(word.text, str(word.where), word.where.text) for word in found] == [
        ("--num-layers", "run.py:2", '"--num-layers",'),
        ("4", "run.py:3", '"4",'),
    ]


def test_names_that_nothing_sets_are_unset(tmp_path: Path) -> None:
    _, found = read('A = ["--hf-checkpoint", MODEL, "--swiglu"] + WANDB').lists[-1]
    assert [(word.text, word.unset) for word in found] == [
        ("--hf-checkpoint", False),
        ("${MODEL}", True),
        ("--swiglu", False),
        ("${WANDB}", True),
    ]
    _, given = read('A = ["--num-layers", N]', N="7").lists[-1]
    assert given[1].text == "7"


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f'__import__("os").system("touch {mark}")\nopen("{mark}", "w")\nA = ["--num-layers", str(open("{mark}", "w")), "--swiglu", eval("1")]'
    _, found = read(text).lists[-1]
    assert not mark.exists()
    assert found[1].unknown == "open() is not called" and found[3].unknown == "eval() is not called"


def test_blocks_leave_their_names_unknown() -> None:
    _, found = read('L = ["--num-layers", "4"]\nfor i in range(2):\n    L.append("x")\n    N = i\nA = ["--swiglu", N, *L]').lists[-1]
    assert found[1].unknown == "N is set on line 4 (N = i), which is not followed"
    assert found[2].unknown == 'L is changed or given away on line 3 (L.append("x")), which is not followed'


@pytest.mark.parametrize("text", ['A = ["--swiglu"', "A = (" * 300, "\0"])
def test_what_is_no_python_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"run\.py:\d+: not Python"):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        'A = ["--swiglu"] * 10 ** 9',
        'A = ["--swiglu", "x" * 999999999]',
        'A = ["--swiglu", *range(10 ** 12)]',
        'A = ["--swiglu", 9 ** 9 ** 9]',
    ],
)
def test_values_without_end_are_not_made(text: str) -> None:
    read(text)


@pytest.mark.parametrize("change", ['A[1] = "61"', 'A.remove("--swiglu")', "del A[0]", "A.pop()", 'A.insert(0, "x")', "A *= 2"])
def test_a_list_that_is_changed_in_place_is_refused_with_its_line(change: str, tmp_path: Path) -> None:
    file = tmp_path / "run.py"
    file.write_text(f'A = ["--num-layers", "4", "--swiglu"]\n{change}\n')
    with pytest.raises(UsageError, match=rf"run\.py:2: .*{re.escape(change)}.*is not followed"):
        read_launch(file)


PIECES = ["A = ", "B = A\n", '["--num-layers", "4"]', "\n", "+ A", "A += ", "A.append(", ")", "def f(x=A):\n", "  ", "return A\n", "f(A)", "if A:\n", "for x in A:\n", "[", "]", "*A", "lambda x: ",
          "with f() as A:\n", "try:\n", "except E as A:\n", "class C:\n", "global A\n", "del A\n", "A[0]", " = 1\n", "import A\n", "x for x in A", "f'{A} --num-layers {N}'", "(A := 1)",
          "match A:\n",
          " case [*A]:\n",
          "subprocess.run(A)\n", "yield A\n", "pass\n", "A, B = ", "-1", ":", "%", "== ", "not ", "@f\n", "exec('')\n", "while A:\n",
          "os.system(\"--swiglu '\")\n", "'--num-layers $N'"]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_is_followed_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.py"
    file.write_text(text)
    try:
        read_launch(file)
    except UsageError as error:
        assert "any.py" in str(error)
