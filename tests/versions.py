"""Other versions of transformers and megatron-core than the pinned ones: what still comes out right, family by family.

    python tests/versions.py [NAME..]

Each environment is a virtual environment of its own under .versions/, made when it is not there.  In it every family's tiny model
is converted and held against its reference in every checkpoint layout it has, and has one fault planted that is to be found by
activations alone on two ranks; the whole verdict is asserted, as the drill does it.  Writes docs/versions.md of the last run in
each; exits 1 when something came out otherwise than it should.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cases import Case

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".versions"
MODELS = FOLDER / "models"
PAGE = ROOT / "docs/versions.md"
INSTALL_SECONDS, RUN_SECONDS = 1800, 1800
DEPENDENCIES = "torch megatron-core transformers tokenizers safetensors numpy click pyyaml httpx psutil".split()
# what a release of transformers or megatron-core bounds for itself
FOLLOWS = ("tokenizers", "safetensors", "numpy")
EMBEDDED = "qwen3.5-moe"
GATED = (EMBEDDED, "qwen3.5", "qwen3.5-tied", "qwen3-next")


@dataclass(frozen=True)
class Environment:
    """name  of its directory · python  the release it needs · pins  what stands in the place of constraints.txt's

    refused  families that this release can't be, and a word of the sentence that says so
    """

    name: str
    pins: Mapping[str, str]
    python: str = "3.11"
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def interpreter(self) -> Path:
        return FOLDER / self.name / "bin/python"

    @property
    def answers(self) -> Path:
        return FOLDER / self.name / "answers.json"


ENVIRONMENTS = (
    Environment("transformers-5.3", {"transformers": "5.3.0"}),
    Environment("core-0.15", {"megatron-core": "0.15.3"}, refused=dict.fromkeys(GATED, "has no attention_output_gate")),
    Environment("core-0.19", {"megatron-core": "0.19.2"}, python="3.12"),
)


@dataclass(frozen=True)
class Answer:
    """What came out of one case.  wrong  what is not as it should be, empty when all is · refused  the sentence that was asked for"""

    family: str
    case: str
    planted: bool
    seconds: float
    wrong: str
    refused: str = ""


@dataclass
class Answers:
    """All of one environment, and the versions that were there."""

    versions: dict[str, str]
    answers: list[Answer] = field(default_factory=list)


# -- outside ------------------------------------------------------------------------------------------------------------------


def make(environment: Environment) -> None:
    """Installs what pyproject.toml asks for, the project itself aside: its bounds are what is tried."""
    home = FOLDER / environment.name
    stamp, constraints = home / ".installed", home / "constraints.txt"
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name: version for name, version in pinned.items() if name not in FOLLOWS} | dict(environment.pins)
    wanted = "".join(f"{name}=={version}\n" for name, version in pins.items())
    if stamp.is_file() and constraints.read_text() == wanted:
        return
    print(f"{environment.name}: installing", flush=True)
    own = environment.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    # a shim of pyenv stands for every release that is installed, and starts the one that is chosen
    chosen = os.environ | {"PYENV_VERSION": environment.python}
    command = sys.executable if own else f"python{environment.python}"
    run([command, "-m", "venv", "--clear", str(home)], INSTALL_SECONDS, os.environ if own else chosen)
    constraints.write_text(wanted)
    pip = [str(environment.interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(constraints)]
    # torch first and by itself, as in the Makefile
    run([*pip, "torch"], INSTALL_SECONDS)
    run([*pip, *DEPENDENCIES], INSTALL_SECONDS)
    stamp.touch()


def make_models() -> None:
    """The tiny models, saved by the pinned transformers: every environment is given the same files."""
    import tiny

    shutil.rmtree(MODELS, ignore_errors=True)
    for family in tiny.CONFIGS:
        tiny.make(family, MODELS / family)
    tiny.prompts(MODELS / "prompts.jsonl")


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> None:
    subprocess.run(command, check=True, timeout=seconds, env=environment, cwd=ROOT)


def ask(environment: Environment) -> Answers:
    """Runs every case inside an environment."""
    make(environment)
    environment.answers.unlink(missing_ok=True)
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "hooks", "tests", "tests/faults"))
    inside = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    run([str(environment.interpreter), __file__, "--inside", environment.name], RUN_SECONDS, inside)
    return kept(environment)


def kept(environment: Environment) -> Answers:
    """What the last run inside an environment left."""
    page = json.loads(environment.answers.read_text())
    return Answers(page["versions"], [Answer(**one) for one in page["answers"]])


def shown(found: Sequence[tuple[Environment, Answers]]) -> str:
    """docs/versions.md: a column an environment, a row a family."""
    families = list(dict.fromkeys(one.family for _, answers in found for one in answers.answers))
    heads = [
        f"transformers {a.versions['transformers']}, megatron-core {a.versions['megatron-core']}, Python {a.versions['python']}"
        for _, a in found
    ]
    lines = [
        "# Other versions",
        "",
        "Written by `make versions` (`tests/versions.py`). Each cell: clean runs that agree, of those made (one a checkpoint layout,",
        "one rank, fp32), and whether the fault planted for activations alone, on two ranks (the embedded model's, qwen3.5-moe, on one),",
        "comes out with its whole verdict.",
        "",
        f"| family | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
        *(f"| {family} | {' | '.join(_cell(family, answers) for _, answers in found)} |" for family in families),
    ]  # fmt: skip
    wrong = [f"- {environment.name}, {one.case}: {one.wrong}" for environment, a in found for one in a.answers if one.wrong]
    lines += ["", *(["What came out otherwise:", "", *wrong] if wrong else ["Nothing came out otherwise."])]
    seconds = ", ".join(f"{environment.name} {sum(one.seconds for one in a.answers):.0f} s" for environment, a in found)
    return "\n".join([*lines, "", f"Time on two shared cores, installing aside: {seconds}.", ""])


def _cell(family: str, answers: Answers) -> str:
    own = [one for one in answers.answers if one.family == family]
    if own[0].refused:
        return f"refused: {own[0].refused}"
    clean, planted = ([one for one in own if one.planted is which] for which in (False, True))
    agree = f"{sum(not one.wrong for one in clean)} of {len(clean)} clean"
    return f"{agree}, fault {'right' if planted and not any(one.wrong for one in planted) else '**wrong**'}"


def main(names: Sequence[str]) -> int:
    unknown = set(names) - {environment.name for environment in ENVIRONMENTS}
    if unknown:
        print(f"no environment is called {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in ENVIRONMENTS)}")
        return 2
    make_models()
    found = [(one, ask(one)) for one in ENVIRONMENTS if not names or one.name in names]
    print(shown(found))
    if all(one.answers.is_file() for one in ENVIRONMENTS):
        PAGE.write_text(shown([(one, kept(one)) for one in ENVIRONMENTS]))
    return int(any(one.wrong for _, answers in found for one in answers.answers))


# -- inside -------------------------------------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[str, Case]]:
    """Every family clean in every layout on one rank, and the first fault of its drill that activations alone find on two."""
    from cases import CLEAN, FORWARD, FORWARD_ONLY
    from family_cases import FAMILIES, cases_of, clean_of

    for t in FAMILIES:
        yield from ((t.family, case) for case in clean_of(t) if case.under == "one")
        yield t.family, next(case for case in cases_of(t) if case.flags == FORWARD and case.under != "one")
    yield from ((EMBEDDED, case) for case in CLEAN if case.under == "one")
    yield EMBEDDED, next(case for case in FORWARD_ONLY if case.faults == ("A03",))


def inside(environment: Environment) -> int:
    """Runs every case here.  A case that fails is an answer, not the end."""
    from workshop import REFERENCE, Workshop

    from bisect_tool.ladder import package_version
    from bisect_tool.ranks import WORLDS

    python = ".".join(map(str, sys.version_info[:2]))
    found = Answers({name: package_version(name) for name in ("torch", "transformers", "megatron-core")} | {"python": python})
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shops: dict[str, Workshop] = {}
        for number, (family, case) in enumerate(cases()):
            if family not in shops:
                shops[family] = Workshop(root / family, REFERENCE if family == EMBEDDED else MODELS / family)
            started = time.monotonic()
            said, wrong = "", failing(case, shops[family], root / f"report-{number}")
            if environment.refused.get(family, "\0") in wrong:
                said, wrong = wrong.removeprefix("UsageError: "), ""
            elif family in environment.refused:
                wrong = f"not refused: {wrong or 'all is right'}"
            found.answers.append(Answer(family, case.id, bool(case.faults), time.monotonic() - started, wrong, said))
            print(f"{family} {case.id}: {wrong or said or 'right'}", flush=True)
    WORLDS.close()
    environment.answers.write_text(json.dumps({"versions": found.versions, "answers": [asdict(one) for one in found.answers]}, indent=1))
    return 0


def failing(case: Case, shop: Any, out: Path) -> str:
    """What of a case's verdict is not as it should be, in one line."""
    from workshop import judge, verdict_of

    said = io.StringIO()
    try:
        candidate = shop.faulty(case.layout, case.written, *case.faults)
        with contextlib.redirect_stderr(said):
            code, page = judge(candidate, out, case.under, *case.flags, reference=shop.reference, prompts=MODELS / "prompts.jsonl")
    except FileNotFoundError:  # no report was written
        return next((line for line in said.getvalue().splitlines() if line.startswith("Error: ")), "no report was written")
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    expected = {
        "exit code": (code, 1 if case.expected else 0),
        "verdict": (page["verdict"], "differs" if case.expected else "agrees"),
        "faults": ([verdict_of(fault) for fault in page["faults"]], list(case.expected)),
        "minor": ([verdict_of(fault) for fault in page["minor"]], list(case.minor)),
    }
    return "; ".join(f"{what} is {is_}, not {wanted}" for what, (is_, wanted) in expected.items() if is_ != wanted)


if __name__ == "__main__":
    named = {one.name: one for one in ENVIRONMENTS}
    sys.exit(inside(named[sys.argv[2]]) if sys.argv[1:2] == ["--inside"] else main(sys.argv[1:]))
