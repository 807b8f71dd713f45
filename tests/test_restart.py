"""An audit that is killed goes on where it was, leaves no process behind, and says the same however its work is shared."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from bisect_hooks.parallel import Parallel

from bisect_tool.crew import Crew, Journal, Work
from bisect_tool.planting import plant
from bisect_tool.weights import Sides, inputs_of

ROOT = Path(__file__).parent.parent
REFERENCE, GOOD = ROOT / "golden/tiny-qwen3.5-moe", ROOT / "golden/tiny-qwen3.5-moe-torch_dist"
# how many places of the journal it is killed at, for each number of jobs: `make drill-kill` asks for more
KILLS = int(os.environ.get("KILLS", "1"))
SOON = 60.0


@dataclass(frozen=True)
class Pair:
    """The embedded model and a faulty copy of its conversion; what an audit of them says when nothing disturbs it."""

    reference: Path
    candidate: Path
    page: dict[str, Any]
    journal: int

    def command(self, out: Path, jobs: int = 1) -> list[str]:
        sides = ["--reference", str(self.reference), "--candidate", str(self.candidate)]
        return ["-m", "bisect_tool", "audit", *sides, "--jobs", str(jobs), "--out", str(out)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("restart")
    plant("G04", GOOD, folder / "minor", None)
    plant("A03", folder / "minor", folder / "faulty", None)
    shutil.copytree(REFERENCE, folder / "reference")
    found = Pair(folder / "reference", folder / "faulty", {}, 0)
    lines, page = finish(found, folder / "whole", 1)
    assert page["verdict"] == "differs"
    return Pair(found.reference, found.candidate, page, sum(len(line) + 1 for line in lines))


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "hooks")])}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def written(out: Path, rank: int = 0) -> list[str]:
    """Whole lines of a journal so far."""
    try:
        text = (out / f"journal.{rank}").read_text()
    except FileNotFoundError:
        return []
    return [line for line in text.split("\n")[:-1] if line]


def units(lines: list[str]) -> list[str]:
    return [page["unit"] for line in lines if "unit" in (page := json.loads(line))]


def told(out: Path) -> dict[str, Any]:
    """The report, without what no two runs share."""
    page: dict[str, Any] = json.loads((out / "report.json").read_text())
    for stage in page["stages"]:
        stage["seconds"] = 0
    page["provenance"]["command"] = ""
    return page


def finish(pair: Pair, out: Path, jobs: int) -> tuple[list[str], dict[str, Any]]:
    """Lets an audit run to its end: (the last that was seen of its journal, the report)."""
    process, lines = start(pair.command(out, jobs)), list[str]()

    def over() -> bool:
        lines[:] = written(out) or lines
        return process.poll() is not None

    ending(process, over)
    assert process.returncode == 1
    assert [entry.name for entry in out.iterdir()] == ["report.json"]
    return lines, told(out)


def until(what: Callable[[], Any]) -> None:
    end = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < end


def ending(process: subprocess.Popen[bytes], over: Callable[[], bool]) -> None:
    """Waits until it is over; whatever comes, the process does not outlive the test."""
    try:
        until(over)
    finally:
        for one in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
            one.kill()
        process.wait()


def worker(pid: int) -> psutil.Process | None:
    """The process that an audit shares its work with."""
    return next((child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())), None)


def spent(process: psutil.Process) -> float:
    """Seconds of a processor."""
    times = process.cpu_times()
    return float(times.user + times.system)


def idle(process: psutil.Process) -> bool:
    """Whether a process does nothing for a while."""
    before = spent(process)
    time.sleep(0.3)
    return spent(process) == before


def held(audit: psutil.Process) -> bool:
    """Stops an audit until its worker waits for work; whether it does. If not, the audit goes on.

    A worker that came to rest before it had imported anything waits for what the audit was sending when it was stopped.
    """
    audit.suspend()
    other = worker(audit.pid)
    assert other is not None
    until(lambda: idle(other))
    if spent(other) < 0.5:
        audit.resume()
        return False
    return True


def killed(pair: Pair, out: Path, jobs: int, size: int) -> list[str]:
    """Kills an audit as soon as its journal has that many bytes; nothing that it started may outlive it for long."""
    process = start(pair.command(out, jobs))
    try:
        file = out / "journal.0"
        until(file.exists)
        if jobs > 1:  # held until the other process waits for work, so that both are at it when the end comes
            until(lambda: worker(process.pid))
            until(lambda: held(psutil.Process(process.pid)))
            psutil.Process(process.pid).resume()
        children = psutil.Process(process.pid).children(recursive=True)
        until(lambda: file.stat().st_size >= size)
    finally:
        process.kill()
        process.wait()
    assert not psutil.wait_procs(children, timeout=SOON)[1]
    assert process.returncode == -signal.SIGKILL
    return written(out)


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("at", range(KILLS))
def test_a_killed_audit_goes_on_where_it_was(at: int, jobs: int, pair: Pair, tmp_path: Path) -> None:
    before = killed(pair, tmp_path / "out", jobs, pair.journal * (2 * at + jobs) // (2 * KILLS + 1))
    assert not (tmp_path / "out" / "report.json").exists()
    after, page = finish(pair, tmp_path / "out", jobs)
    assert page == pair.page
    assert after[: len(before)] == before
    assert len(units(after)) == len(set(units(after)))
    assert len(units(before)) < len(units(after))


def test_what_was_found_of_other_files_is_forgotten(pair: Pair, tmp_path: Path) -> None:
    candidate, out = tmp_path / "candidate", tmp_path / "out"
    shutil.copytree(GOOD, candidate)
    changed = Pair(pair.reference, candidate, {}, 0)
    assert len(units(killed(changed, out, 1, pair.journal // 2))) > 10
    shutil.rmtree(candidate)
    shutil.copytree(pair.candidate, candidate)
    _, page = finish(changed, out, 1)
    page["provenance"]["candidate"] = pair.page["provenance"]["candidate"]
    assert page == pair.page


@pytest.mark.ranks
def test_ranks_share_the_work_and_one_of_them_reports(pair: Pair, tmp_path: Path) -> None:
    process, seen = start(torchrun(pair, tmp_path / "out")), dict[int, list[str]]()

    def over() -> bool:
        seen.update({rank: lines for rank in (0, 1) if (lines := written(tmp_path / "out", rank))})
        return process.poll() is not None

    ending(process, over)
    assert process.returncode == 1
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["report.json"]
    assert told(tmp_path / "out") == pair.page
    shares = [set(units(seen[rank])) for rank in (0, 1)]
    assert all(shares) and not shares[0] & shares[1]


@pytest.mark.ranks
def test_the_death_of_a_rank_ends_the_others_with_an_error(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process, everyone = start(torchrun(pair, out)), list[psutil.Process]()

    def over() -> bool:
        if not everyone and all(written(out, one) for one in (0, 1)):
            everyone.extend(psutil.Process(process.pid).children(recursive=True))
            next(one for one in everyone if one.environ().get("RANK") == "1").kill()
        return process.poll() is not None

    ending(process, over)
    assert process.returncode not in (0, 125)
    assert not (out / "report.json").exists()
    assert not psutil.wait_procs(everyone, timeout=SOON)[1]


def torchrun(pair: Pair, out: Path) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *pair.command(out)]


def test_a_journal_is_read_up_to_the_line_that_was_cut_short(tmp_path: Path) -> None:
    first = Journal(tmp_path, {"version": 1})
    first.add("one", [1])
    first.add("two", None)
    first.close()
    file = tmp_path / "journal.0"
    whole = file.read_text()
    for end in range(len(whole)):
        file.write_text(whole[:end])
        again = Journal(tmp_path, {"version": 1})
        done = {
            name: answer
            for name, answer in (("one", [1]), ("two", None))
            if whole[:end].count("\n") + (whole[end] == "\n") > 1 + (name == "two")
        }
        assert again.done == done
        again.add("three", 3)
        again.close()
        assert Journal(tmp_path, {"version": 1}).done == done | {"three": 3}


@pytest.mark.parametrize("header", ["", "{", '{"inputs": "of other files"}', '{"unit": "one", "answer": 1}'])
def test_a_journal_of_something_else_is_dropped(header: str, tmp_path: Path) -> None:
    (tmp_path / "journal.0").write_text(header + '\n{"unit": "one", "answer": 1}\n')
    assert Journal(tmp_path, {"version": 1}).done == {}
    assert "one" not in (tmp_path / "journal.0").read_text()


def test_a_journal_belongs_to_files_flags_and_version(pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(GOOD, tmp_path / "candidate")
    sides = Sides(pair.reference, tmp_path / "candidate")
    own = inputs_of(sides)
    assert inputs_of(Sides(pair.reference, tmp_path / "candidate")) == own
    assert inputs_of(Sides(pair.reference, tmp_path / "candidate", converted=Parallel(ep=4))) != own
    assert inputs_of(Sides(pair.reference, tmp_path / "candidate", export=pair.reference)) != own
    os.utime(tmp_path / "candidate" / "release" / ".metadata", ns=(1, 1))
    touched = inputs_of(sides)
    assert touched != own
    monkeypatch.setattr("bisect_tool.weights.__version__", "another")
    assert inputs_of(sides) != touched


def raising() -> Work:
    def work(step: str, argument: Any) -> Any:
        if os.environ.get("RAISES") == step:
            raise ValueError(f"{step} {argument}")
        return os.getpid()

    return work


def test_units_are_answered_in_order_by_several_processes(tmp_path: Path) -> None:
    crew = Crew(raising, Journal(None, {}), jobs=3)
    try:
        end = time.monotonic() + SOON
        names, answered = [str(i) for i in range(200)], set[int]()
        for i in range(10_000):
            found = crew.answers(f"step {i}", [(name, name) for name in names])
            assert list(found) == names
            answered |= set(found.values())
            if len(answered) == 3:
                break
            assert time.monotonic() < end
    finally:
        crew.close()
    assert len(answered) == 3
    assert not [child for child in psutil.Process().children() if child.pid in answered]
