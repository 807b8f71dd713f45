"""What real bash and real Python start, against what is read of their scripts: the same flags, or a refusal, never others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bisect_hooks.errors import UsageError

from bisect_tool.launch.flags import CommandLine
from bisect_tool.launch.read import read_launch
from bisect_tool.launch.words import Where, Word

# what the scripts start: it writes down the words that it was given
TRAIN = "import json, sys\njson.dump(sys.argv[1:], open('argv.json', 'w'))\n"
START = '\nimport subprocess\nsubprocess.run(["python3", "train.py", *A])\n'

# scripts that are read as Python runs them
PYTHON = {
    "lists joined": 'M = ["--num-layers", "40"]\nA = M + ["--bf16"]' + START,
    "an alias that is added to": 'A = ["--num-layers", "40"]\nB = A\nB.append("--bf16")' + START,
    "an alias that is another list": 'A = ["--num-layers", "40"]\nB = A + []\nB += ["--bf16"]' + START,
    "a tuple that grows is another": 'A = ("--num-layers", "40")\nB = A\nB += ("--bf16",)' + START,
    "a copy": 'M = ["--num-layers", "40"]\nA = list(M)\nB = M.copy()\nC = M[:]\nA += ["--bf16"]\nB.append("--fp16")\nC.append("--swiglu")' + START,
    "reads change nothing": 'A = ["--num-layers", "40"]\nprint(A, len(A), A[0], sorted(A))\nfor a in A:\n    print(a)\nif A:\n    print(" ".join(A))\nassert len(A) == 2' + START,
    "two targets": 'A = B = ["--num-layers", "40"]\nB.append("--bf16")' + START,
    "main": 'import subprocess\ndef flags(n):\n    out = ["--num-layers", str(n)]\n    out.append("--bf16")\n    return out\ndef main(extra=("--swiglu",)):\n'
            '    cmd = ["python3", "train.py"] + flags(40)\n    cmd += extra\n    subprocess.run(cmd, check=True)\nif __name__ == "__main__":\n    main()\n',
    "a helper that runs": 'import subprocess\ndef run(cmd):\n    print("+", " ".join(cmd))\n    subprocess.run(cmd, check=True)\nA = ["--num-layers", "40"]\nrun(["python3", "train.py", *A])\n',
    "a function that adds": 'A = ["--num-layers", "40"]\ndef more(to):\n    to.append("--bf16")\nmore(A)' + START,
    "a function that adds to the global": 'A = ["--num-layers", "40"]\ndef more():\n    A.append("--bf16")\nmore()\nmore()' + START,
    "a function nobody calls": 'A = ["--num-layers", "40"]\ndef more():\n    A[1] = "61"' + START,
    "names where they are defined": 'N = "40"\ndef flags():\n    return ["--num-layers", N]\ndef main():\n    N = "41"\n    return flags() + ["--bf16"]\nA = main()' + START,
    "os.system": 'import os\nN = 40\nos.system(f"python3 train.py --num-layers {N} --bf16")\n',
    "a shell's line": 'import subprocess\nA = ["--num-layers", "40"]\nsubprocess.run("python3 train.py " + " ".join(A), shell=True)\n',
    "bash -c": 'import subprocess\nsubprocess.run(["bash", "-c", "python3 train.py --num-layers 40 --bf16"])\n',
    "a list beside it": 'B = ["--num-layers", "41"]\nA = ["--num-layers", "40"]' + START,
    "in a try": 'import subprocess\nA = ["--num-layers", "40"]\ntry:\n    subprocess.run(["python3", "train.py", *A])\nexcept OSError as error:\n    print(error)\n',
    "with a log": 'import subprocess\nA = ["--num-layers", "40"]\nwith open("log", "w") as log:\n    subprocess.run(["python3", "train.py", *A], stdout=log)\n',
    "a word is its text": 'M = ["--num-layers", "40"]\nA = M + (["--bf16"] if M[1] == "40" else ["--fp16"])' + START,
    "what the script is given": 'import sys\nA = ["--num-layers", "40"] + sys.argv[1:]' + START,
}  # fmt: skip
# scripts that change a list where it is not followed: each must be refused, or be read as Python runs it
IN_PLACE = {
    "an undecided if": 'import os\nif os.path.exists("train.py"):\n    A.remove("--swiglu")',
    "a loop": 'for i in (1,):\n    A[i] = "61"',
    "a pop in an assignment": "x = A.pop()",
    "an unpacked element": 'A[1], y = "61", 2',
    "two deletions": "del A[0], A[0]",
    "a slice": 'A[1:2] = ["61"]',
    "sorted in place": "A.sort()",
    "an unread alias": "B, C = A, 1\nB.pop()",
    "an alias in a tuple": "B = (A, 1)\nB[0].pop()",
    "an alias in a dict": 'B = {"a": A}\nB["a"].pop()',
    "an alias by a choice": "B = A or []\nB.pop()",
    "an alias of an undecided choice": 'import os\nB = A if os.path.exists("train.py") else []\nB.pop()',
    "a walrus": "(B := A).pop()",
    "an attribute": "class C: pass\nC.a = A\nC.a.pop()",
    "a class": "class C:\n    a = A\n    a.pop()",
    "a function of a library": "import random\nrandom.shuffle(A)",
    "heapq": 'import heapq\nheapq.heappush(A, "--a")',
    "a function that pops": "def f(x):\n    x.pop()\nf(A)",
    "a function that pops the global": "def f():\n    A.pop()\nf()",
    "a function in a loop": 'def f():\n    A.append("--bf16")\nfor i in range(2):\n    f()',
    "a function that is passed on": 'def f(i):\n    A.append("--bf16")\nlist(map(f, [1]))',
    "a lambda": "f = lambda: A.pop()\nf()",
    "a lambda of a parameter": "f = lambda x: x.pop()\nf(A)",
    "a method": "class C:\n    def f(self, x):\n        x.pop()\nC().f(A)",
    "a decorator": "def now(f):\n    f()\n    return f\n@now\ndef g():\n    A.pop()",
    "a global": 'def f():\n    global A\n    A = ["--num-layers", "61"]\nf()',
    "a global of an undecided call": 'import os\ndef f():\n    global A\n    A = ["--num-layers", "61"]\nif os.path.exists("train.py"):\n    f()',
    "a comprehension": "[A.pop() for i in range(1)]",
    "the elements of a list of lists": "G = [A]\nfor g in G:\n    g.pop()",
    "the elements in a comprehension": "G = [A]\n[g.pop() for g in G]",
    "exec": 'exec("A.pop()")',
    "globals": 'globals()["A"] = ["--num-layers", "61"]',
    "a match": 'import sys\nmatch sys.platform:\n    case "linux":\n        A = ["--num-layers", "61"]\n    case _:\n        pass',
    "a with": 'with open("log", "w") as log:\n    A[1] = "61"',
    "a try": 'try:\n    A[1] = "61"\nfinally:\n    pass',
    "a while": 'while len(A) < 9:\n    A += ["--num-layers", "61"]',
    "multiplied": "A *= 2\nA.pop()",
    "reversed by assignment": "A[:] = A[::-1]",
    "a return in a branch": 'import os\ndef f():\n    if os.path.exists("train.py"):\n        return ["--num-layers", "61"]\n    return ["--num-layers", "40"]\nA = f()',
    "a default that is kept": 'def f(x=[]):\n    x.append("--bf16")\n    return x\nf()\nA = f() + A',
    "extended by a text": 'A += "x"',
    "an iterator": "B = iter([A])\nnext(B).pop()",
    "a nested function": "def f():\n    def g():\n        A.pop()\n    return g\nf()()",
    "an import of the same name": "from shutil import which as A\nA = []",
    "operator": 'import operator\noperator.setitem(A, 1, "61")',
    "a bound method": "p = A.pop\np()",
    "functools": 'import functools\nfunctools.partial(A.append, "--bf16")()',
    "print of its own": "def print(x):\n    x.pop()\nprint(A)",
    "a module of its own": "class subprocess_:\n    run = staticmethod(lambda x: x.pop())\nos = subprocess_\nos.run(A)",
}  # fmt: skip


def started(file: Path, *command: str) -> dict[str, object] | None:
    """The args of the command line that a script really starts; None when it is none that Megatron would take."""
    (file.parent / "train.py").write_text(TRAIN)
    found = subprocess.run(
        [*command, file.name], cwd=file.parent, capture_output=True, text=True, env={"PATH": "/usr/local/bin:/usr/bin:/bin"}
    )
    argv = file.parent / "argv.json"
    assert argv.exists(), found.stderr
    try:
        return CommandLine().read([Word(one, Where(file, 1)) for one in json.loads(argv.read_text())]).args
    except UsageError:
        return None


def written(tmp_path: Path, name: str, text: str) -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


@pytest.mark.parametrize("what", PYTHON)
def test_python_is_read_as_it_runs(what: str, tmp_path: Path) -> None:
    file = written(tmp_path, "run.py", PYTHON[what])
    launch = read_launch(file)
    assert launch.args == started(file, sys.executable) and launch.whole


@pytest.mark.parametrize("what", IN_PLACE)
def test_a_list_that_python_changes_is_never_read_as_it_was(what: str, tmp_path: Path) -> None:
    file = written(tmp_path, "run.py", 'A = ["--num-layers", "40", "--swiglu", "--bf16"]\n' + IN_PLACE[what] + START)
    truth = started(file, sys.executable)
    try:
        launch = read_launch(file)
    except UsageError as error:
        assert "run.py:" in str(error)
        return
    assert launch.args == truth
