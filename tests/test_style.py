"""House rules that run: what may import what, who may print, what the command line offers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from bisect_tool.cli import cli

ROOT = Path(__file__).parent.parent
TOOL = sorted((ROOT / "bisect_tool").rglob("*.py"))
HOOKS = sorted((ROOT / "hooks").rglob("*.py"))
SCRIPTS = sorted((ROOT / "golden").glob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MOST_LINES = 420

PARALLEL = ["--cp", "--dispatcher", "--ep", "--etp", "--pp", "--pp-layers", "--sp", "--tp", "--vpp"]
ROLLOUT = [
    *("--consumed", "--hashes", "--received", "--rollout", "--rollout-recording", "--samples", "--server", "--train"),
    "more",
]
# A knob that nobody needed yet is not a flag: growing this list is a decision.
OFFERED = {
    "audit": [
        *(
            "--candidate",
            "--export",
            "--jobs",
            "--out",
            "--reference",
            "--repair",
            "--sibling-candidate",
            "--sibling-reference",
            "--strict",
        ),
        *PARALLEL,
    ],
    "compare": ["--out", "--strict", "candidate", "reference"],
    "config": ["--candidate", "--export", "--launch", "--out", "--reference", "--set", "--strict"],
    "convert": ["--layout", "--mtp", "--no-mtp", "--out", "--reference", *PARALLEL],
    "gate": ["--candidate", "--golden", "--out", "--spec", *PARALLEL],
    "hash": ["directory"],
    "import": ["--decode", "--map", "--out", "--reference", "form", "path", *PARALLEL],
    "plant": ["--candidate", "--list", "--out", "fault", *PARALLEL],
    "record": ["--candidate", "--device", "--dtype", "--input-key", "--out", "--prompts", "--reference", "--side", "--spec", *PARALLEL],
    "report": ["--format", "--out", "directory"],
    "rollout": ["--device", "--export", "--out", "--reference", "--strict", *ROLLOUT],
    "run": [
        *(
            "--all-stages",
            "--candidate",
            "--candidate-patch",
            "--device",
            "--dtype",
            "--export",
            "--golden",
            "--input-key",
            "--launch",
            "--no-answers",
            "--out",
        ),
        *("--padding", "--prompts"),
        *("--reference", "--spec", "--stages", "--strict"),
        *PARALLEL,
        *ROLLOUT,
    ],
    "taps": ["--candidate", "--fire", "--prompts", "--reference"],
}


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module a file imports, anywhere in it; `from a import b` counts as a and as a.b."""
    return frozenset(imported(path))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def importers(files: list[Path], package: str) -> set[str]:
    return {path.name for path in files if any(name == package or name.startswith(f"{package}.") for name in imports(path))}


@cache
def calls(path: Path) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)}


def test_there_is_something_to_look_at() -> None:
    assert len(TOOL) > 20
    assert len(HOOKS) > 10
    assert "click" in imports(ROOT / "bisect_tool" / "cli.py")
    assert "click.echo" in calls(ROOT / "bisect_tool" / "cli.py")


def test_nothing_but_the_entry_point_imports_the_command_line() -> None:
    assert importers(TOOL + HOOKS, "bisect_tool.cli") == {"__main__.py"}


def test_hooks_know_nothing_of_the_tool() -> None:
    assert importers(HOOKS, "bisect_tool") == set()


@pytest.mark.parametrize(
    ("package", "allowed"), [("transformers", {"hf.py"}), ("megatron", {"mcore.py", "mcore_weights.py", "cpu.py", "core_versions.py"})]
)
def test_each_side_is_imported_where_it_lives_and_nowhere_else(package: str, allowed: set[str]) -> None:
    assert importers(HOOKS, package) == allowed
    assert importers(TOOL, package) == set()


def test_search_and_judgement_are_apart_from_what_they_print() -> None:
    assert {path.name for path in TOOL + HOOKS if "print" in calls(path)} == set()
    assert {path.name for path in TOOL + HOOKS if "click.echo" in calls(path)} <= {"cli.py", "__main__.py"}


def test_help_answers_without_torch() -> None:
    code = "import sys; import bisect_tool.cli; print(sorted({'torch', 'numpy', 'transformers', 'megatron'} & set(sys.modules)))"
    path = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'hooks')]!r}; "
    found = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_commands_and_their_flags_are_these() -> None:
    offered = {
        name: sorted(
            word
            for one in command.params
            for word in ((*one.opts, *one.secondary_opts) if one.param_type_name == "option" else (one.name,))
        )
        for name, command in cli.commands.items()
    }
    assert offered == {name: sorted(flags) for name, flags in OFFERED.items()}


@pytest.mark.parametrize("name", cli.commands)
def test_every_command_and_every_flag_has_help(name: str) -> None:
    command = cli.commands[name]
    assert command.help
    assert [one.name for one in command.params if isinstance(one, click.Option) and not one.help] == []


@pytest.mark.parametrize("name", cli.commands)
def test_every_command_is_in_the_readme(name: str) -> None:
    assert re.search(rf"bisect-tool {name}\b", (ROOT / "README.md").read_text())


def test_every_command_of_the_readme_is_there() -> None:
    named = set(re.findall(r"bisect-tool ([a-z]+)\b", (ROOT / "README.md").read_text()))
    assert named <= set(cli.commands)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=shown(path)) for path in TOOL + HOOKS],
)
def test_a_module_says_its_idea_and_is_not_too_long(path: Path) -> None:
    assert ast.get_docstring(tree(path))
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", [pytest.param(path, id=shown(path)) for path in TOOL + HOOKS + SCRIPTS + TESTS])
def test_nothing_is_left_to_do_and_no_machine_is_named(path: Path) -> None:
    words = ["TO" + "DO", "FIX" + "ME", "XX" + "X"]
    machines = [f"/{name}/" for name in ("work", "root", "home", "Users", "mnt")]
    found = [line for line in path.read_text().splitlines() if any(re.search(rf"\b{word}\b", line) for word in words)]
    found += [line for line in path.read_text().splitlines() if any(machine in line for machine in machines)]
    assert found == []


@pytest.mark.parametrize("path", [pytest.param(path, id=shown(path)) for path in TESTS])
def test_tests_are_functions_and_read_no_private_names(path: Path) -> None:
    classes = [node.name for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    private = [
        name
        for name in imports(path)
        if name.startswith("bisect_") and any(word.startswith("_") and word != "__main__" for word in name.split("."))
    ]
    assert classes == []
    assert private == []
