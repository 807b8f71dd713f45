"""Every idiom is held against bash itself, where bash is there; ours must never do what the script says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from bisect_hooks.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from bisect_tool.launch.shell import Shell

# script → the words that OUT then holds
IDIOMS: dict[str, tuple[str, list[str]]] = {
    "assignment": ("X=3\nOUT=(a $X ${X}b)", ["a", "3", "3b"]),
    "quotes": ("OUT=('a  b' \"c $((1+1))\" d\\ e $'f\\tg' \"\" h\"i\"'j')", ["a  b", "c 2", "d e", "f\tg", "", "hij"]),
    "word splitting": ('X="a b  c"\nOUT=($X "$X" x$X)', ["a", "b", "c", "a b  c", "xa", "b", "c"]),
    "lists": ('A=(1 "2 3")\nA+=(4)\nOUT=("${A[@]}" ${A[@]} "x${A[@]}y" ${#A[@]} ${A[1]})', ["1", "2 3", "4", "1", "2", "3", "4", "x1", "2 3", "4y", "3", "2", "3"]),
    "an empty list is no word": ('A=()\nOUT=("${A[@]}" a ${A[@]})', ["a"]),
    "joined lists": ('A=(1 2 3)\nIFS=,\nX="[${A[*]}]"\nunset IFS\nOUT=("$X" "${A[*]}")', ["[1,2,3]", "1 2 3"]),
    "the seed's pattern": (
        'N=4\nK=1\narr=()\nfor ((i=0; i<N; i++)); do\nif (( i < K )); then\narr+=(0)\nelse\narr+=(1)\nfi\ndone\n'
        'printf -v F "[%s]" "$(IFS=\', \'; echo "${arr[*]}")"\nOUT=(--moe-layer-freq "$F")',
        ["--moe-layer-freq", "[0,1,1,1]"],
    ),
    "a pattern as an expression": ("N=3\nM=57\nOUT=([0]*$N+[1]*$((M+1)))", ["[0]*3+[1]*58"]),
    "defaults": ('Y=\nOUT=("${X:-a b}" ${Y:-c} "${Y-d}" ${Z:=e}$Z ${Z:+f} "${Q:+g}")', ["a b", "c", "", "ee", "f", ""]),
    "nested defaults": ('B=2\nOUT=(${X:-${B}} ${X:-"$B c"} "${X:-"$B"}")', ["2", "2 c", "2"]),
    "cut and replaced": ('L=a,b,c,\nP=x/y/z.tar.gz\nOUT=(${L%,} ${P##*/} ${P%%.*} ${P#*/} ${L//,/-} ${L/,/} ${L:2:3} ${#L} ${P^^})',
                         ["a,b,c", "z.tar.gz", "x/y/z", "y/z.tar.gz", "a-b-c-", "ab,c,", "b,c", "6", "X/Y/Z.TAR.GZ"]),
    "replaced at an end": ("A=(1e-6 x1e-6)\nOUT=(${A[@]/#1e-6/1e-5} ${A[0]/%6/7})", ["1e-5", "x1e-6", "1e-7"]),
    "an element taken out": ("A=(a b c)\nunset 'A[1]'\nOUT=(${A[@]})", ["a", "c"]),
    "variables for a function": ('X=1\nf() { OUT=(${X:-0}); }\nX=2 f\nOUT+=($X)', ["2", "1"]),
    "slices": ('A=(a b c d)\nOUT=("${A[@]:1:2}" "${A[@]:3}")', ["b", "c", "d"]),
    "arithmetic": ("N=7\nOUT=($((N/2)) $((-7/2)) $((N%4)) $((2**5)) $((N>3 ? 10 : 20)) $(((1+2)*3)) $((N<<2)) $((!N)) $((010)) $((N==7 && N!=8)))",
                   ["3", "-3", "3", "32", "10", "9", "28", "0", "8", "1"]),
    "counting": ("i=1\n((i++))\n((i+=3))\nlet i=i*2\nj=$((i--))\nOUT=($i $j)", ["9", "10"]),
    "branches that are not taken": ("N=0\nOUT=($((N && 1/N)) $((1 || (N=5))) $N)", ["0", "1", "0"]),
    "for over words": ('L=\nfor i in 1 2 "3 4"; do L+="<$i>"; done\nOUT=("$L")', ["<1><2><3 4>"]),
    "for over a range": ("L=()\nfor i in {1..4}; do L+=($i); done\nfor i in $(seq 5 6); do L+=($i); done\nOUT=(${L[@]} {a,b}x)", ["1", "2", "3", "4", "5", "6", "ax", "bx"]),
    "while, break and continue": ("i=0\nL=()\nwhile true; do\n((i++))\nif ((i==2)); then continue; fi\nif ((i>4)); then break; fi\nL+=($i)\ndone\nOUT=(${L[@]})", ["1", "3", "4"]),
    "until": ("i=0\nuntil [ $i -ge 3 ]; do i=$((i+1)); done\nOUT=($i)", ["3"]),
    "if, elif, else": ('X=b\nif [ "$X" = a ]; then Y=1; elif [[ $X == b* && -n "$X" ]]; then Y=2; else Y=3; fi\nOUT=($Y)', ["2"]),
    "tests": ('X=5\nA=0; B=0; C=0; D=0\n[ -z "" ] && A=1\n[[ $X -gt 4 ]] && B=1\n[[ ! $X == 5 ]] || C=1\ntest 1 -eq 2 || D=1\nOUT=($A $B $C $D)', ["1", "1", "1", "1"]),
    "quoted patterns are plain": ('A=0; B=0\n[[ abc == "a*" ]] && A=1\n[[ abc == a* ]] && B=1\nOUT=($A $B)', ["0", "1"]),
    "case": ('X=npu\ncase "$X" in\n gpu) Y=1 ;;\n npu|tpu) Y=2 ;;\n *) Y=3 ;;\nesac\nOUT=($Y)', ["2"]),
    "functions": ('f() { local a=$1; R="$a-$2-$#"; }\nfunction g { f "$@"; }\ng x "y z"\nOUT=("$R")', ["x-y z-2"]),
    "subshells change nothing": ("X=1\n(X=2)\nY=$(X=3; echo $X)\nOUT=($X $Y)", ["1", "3"]),
    "printing": ("OUT=($(echo a b) \"$(printf '%s,' 1 2 3)\" $(printf '1,%.0s' {1..3}) $(basename /x/y.sh) $(dirname /x/y.sh))", ["a", "b", "1,2,3,", "1,1,1,", "y.sh", "/x"]),
    "comments and continuations": ("OUT=(a # b\n  c \\\n  d\n  # e\n  f#g)", ["a", "c", "d", "f#g"]),
    "here-documents": ("cat <<EOF > /dev/null\n--num-layers 7\nOUT=(no)\nEOF\ncat <<-'X' > /dev/null\n\t) done\n\tX\nOUT=(yes)", ["yes"]),
    "eval": ("X=a\neval \"OUT=($X b)\"", ["a", "b"]),
    "arguments": ('set -- a "b c" d\nshift\nOUT=("$@" $# $1)', ["b c", "d", "2", "b", "c"]),
    "slices of arguments": ('f() { OUT=("${@:2}" "${@:1:1}"); }\nf a "b c" d', ["b c", "d", "a"]),
    "escapes in quotes": (r'''OUT=("a\"b" "c\\d" "e\$f" "g\h" 'i\j')''', ['a"b', r"c\d", "e$f", r"g\h", r"i\j"]),
    "elements": ("A=(1 2 3)\nA[1]=x\nA[3]=y\nOUT=(${A[@]} ${A[-1]})", ["1", "x", "3", "y", "y"]),
    "declared": ("declare -a A=(1 2)\nexport B=3\nreadonly C=\"4 5\"\nOUT=(${A[@]} $B \"$C\")", ["1", "2", "3", "4 5"]),
    "exit in a branch not taken": ('X=1\nif [ -z "$X" ]; then exit 1; fi\nOUT=(there)', ["there"]),
    "pipelines and lists": ("true && X=1\nfalse || Y=2\n! false && Z=3\nOUT=($X $Y $Z)", ["1", "2", "3"]),
}  # fmt: skip


def followed(script: str, tmp_path: Path, **given: str) -> Shell:
    file = tmp_path / "run.sh"
    file.write_text(script)
    shell = Shell(file, given=given)
    shell.run()
    return shell


def texts(shell: Shell, name: str) -> list[str]:
    value = shell.variables[name]
    words = value if isinstance(value, list) else [value]
    assert [word.unknown for word in words] == [""] * len(words)
    return [word.text for word in words]


@pytest.mark.parametrize("what", IDIOMS)
def test_idioms_are_read(what: str, tmp_path: Path) -> None:
    script, expected = IDIOMS[what]
    assert texts(followed(script, tmp_path), "OUT") == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
@pytest.mark.parametrize("what", IDIOMS)
def test_bash_reads_them_the_same(what: str, tmp_path: Path) -> None:
    script, expected = IDIOMS[what]
    file = tmp_path / "run.sh"
    file.write_text(script + "\nprintf '%s\\0' \"${OUT[@]}\"\n")
    found = subprocess.run(["bash", str(file)], capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})
    assert found.stdout.split("\0")[:-1] == expected


def test_commands_to_the_outside_are_listed_and_nothing_is_run(tmp_path: Path) -> None:
    marks = [tmp_path / f"mark{i}" for i in range(9)]
    ways = [
        "touch {}",
        "X=$(touch {})",
        "X=`touch {}`",
        "cat <(touch {})",
        'eval "touch {}"',
        "echo $(($(touch {}; echo 1)+1))",
        "x > {}",
        "trap 'touch {}' EXIT",
        "( touch {} ) | tee {}",
    ]
    shell = followed("\n".join(way.replace("{}", str(mark)) for way, mark in zip(ways, marks, strict=True)), tmp_path)
    assert [mark.exists() for mark in marks] == [False] * 9
    assert shell.commands[0].words[0].text == "touch"


def test_files_are_sourced_from_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/a.sh").write_text('HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nA=(1)\n')
    (tmp_path / "beside.sh").write_text("B=2\n")
    shell = followed(
        'SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource "${SCRIPT_DIR}/models/a.sh"\n. "$(dirname "$0")/beside.sh"\n'
        'cd "$UNSET"\nsource somewhere/else/beside.sh\nOUT=(${A[@]} $B)\n',
        tmp_path,
    )
    assert texts(shell, "OUT") == ["1", "2"]
    assert texts(shell, "HERE") == [str(tmp_path / "models")]


def test_what_only_a_running_shell_knows_is_unknown_and_says_why(tmp_path: Path) -> None:
    shell = followed(
        'A=$(nvidia-smi | wc -l)\nB=${NNODES}\nC="x-$A"\nif [ "$A" -gt 0 ]; then D=1; E=same; else D=2; E=same; fi\n'
        "for i in $(cat hosts); do F+=x; done\nread G\nH=$((B * 8))\n[ -f file ] && I=1 || I=2\n",
        tmp_path,
    )
    why = {name: getattr(shell.variables[name], "unknown", "") for name in "ABCDEFGHI"}
    assert why["A"] == why["C"] == "a pipeline is not run"
    assert why["B"] == why["H"] == "nothing in the script sets NNODES"
    assert "a condition on line 4" in why["D"] and why["E"] == ""
    assert "the loop on line 5" in why["F"] and "read from the outside" in why["G"] and "line 8" in why["I"]


def test_the_environment_can_be_said(tmp_path: Path) -> None:
    script = 'DEVICE=${DEVICE:-$(python3 -c "import torch_npu" && echo npu)}\ncase $DEVICE in gpu) EP=8;; npu) EP=4;; esac\nOUT=($EP)\n'
    assert texts(followed(script, tmp_path, DEVICE="gpu"), "OUT") == ["8"]
    assert texts(followed("X=1\nOUT=($X)\n", tmp_path, X="2"), "OUT") == ["1"]
    assert texts(followed("X=$(date)\nOUT=($X)\n", tmp_path, X="2"), "OUT") == ["2"]


def test_a_guard_on_the_environment_is_passed(tmp_path: Path) -> None:
    assert texts(followed('if [ -z "$BASE" ]; then echo "set BASE"; exit 1; fi\nOUT=(on)\n', tmp_path), "OUT") == ["on"]


def test_continuations_lost_in_pasting_are_mended_and_said(tmp_path: Path) -> None:
    shell = followed("torchrun\n--nproc-per-node 8\ntrain.py\n--tp 2\n", tmp_path)
    assert [word.text for word in shell.commands[0].words] == ["torchrun", "--nproc-per-node", "8", "train.py", "--tp", "2"]
    assert list(shell.notes) == ["lines 1 to 4: the backslashes at the line ends are missing; read as one command"]


ENDLESS = {
    "a loop": "while true; do x=1; done",
    "doubling": "X=aaaaaaaaaaaaaaaa\nwhile true; do X=$X$X; done",
    "recursion": "f() { f; }\nf",
    "a source of itself": "source run.sh",
    "a range": "for i in {1..999999}; do for j in {1..999999}; do :; done; done",
    "brackets": "{ " * 300,
    "braces": "A=({1..99999}{1..99999})",
    "a list": "A=(x)\nwhile true; do A+=(${A[@]}); done",
}
NOT_READ = {
    "an if without fi": ("if true; then\necho", 2, "expected elif or else or fi"),
    "an open quote": ('echo\nX="abc\n', 2, "does not close"),
    "an open list": ("\nA=(1 2\n", 2, "list does not close"),
    "select": ("select x in a b; do echo; done", 1, "select is not read"),
    "done without do": ("echo\ndone", 2, "done is not read here"),
    "eval of the unknown": ("\n\neval $(cat flags)", 3, "eval of a text that is not known"),
    "fall-through": ("case a in a) X=1 ;& b) X=2;; esac", 1, ";& is not read"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_scripts_without_end_are_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.sh:\d+: .*(goes on|grows|without end|too deeply|more than)"):
        followed(ENDLESS[what], tmp_path)


@pytest.mark.parametrize("what", NOT_READ)
def test_what_is_not_read_is_refused_with_its_line(what: str, tmp_path: Path) -> None:
    script, line, said = NOT_READ[what]
    with pytest.raises(UsageError, match=rf"run\.sh:{line}: .*{said}.*expanded command line"):
        followed(script, tmp_path)


PIECES = ["if ", "then ", "fi\n", "for i in a b; do ", "done\n", "$(", ")", "((", "))", "[[ ", " ]]", "'", '"', "${", "}", "X=", "A+=(", "\n", ";", " ", "|", "&&", "\\", "<<E\n",
          "E\n", "$X", "echo ", "case a in ", "esac", "1", "--num-layers ", "{", "`", "#", "*", "!", "~", "$'", "f() ", "return\n", "<(", "i++", "=="]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_any_text_is_followed_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.sh"
    file.write_text(text)
    try:
        Shell(file).run()
    except UsageError as error:
        assert "any.sh:" in str(error)
