"""Work in units: over processes, over torchrun ranks, and over interruptions.

A unit's answer is strict JSON.  Every answer is written down as it comes, so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bisect_hooks.errors import BisectError

from bisect_tool.report import JOURNAL

WAIT = timedelta(hours=12)
Unit = tuple[str, Any]
Work = Callable[[str, Any], Any]


class Journal:
    """Answers on disk, one line each.  A journal of other inputs, and a line cut short by a kill, are as if they were not there."""

    def __init__(self, folder: Path | None, inputs: Mapping[str, Any], rank: int = 0) -> None:
        self.done: dict[str, Any] = {}
        self.file = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        header = hashlib.blake2b(json.dumps(inputs, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
        own = folder / f"{JOURNAL}.{rank}"
        for file in sorted(folder.glob(f"{JOURNAL}.*")):
            if not self._read(file, header) and file == own:  # another rank's is that rank's to drop
                file.unlink()
        new = not own.exists() or not own.stat().st_size
        self.file = own.open("a")
        if new:
            self._line({"inputs": header})
        else:
            self.file.write("\n")  # closes a line that was cut short

    def _read(self, file: Path, header: str) -> bool:
        found: dict[str, Any] = {}
        try:
            lines = file.read_text(errors="replace").splitlines()
        except FileNotFoundError:  # another rank has just dropped it
            return True
        for i, line in enumerate(lines):
            try:
                page = json.loads(line)
            except ValueError:
                page = {}
            if i == 0 and page != {"inputs": header}:
                return False
            if "unit" in page:
                found[page["unit"]] = page["answer"]
        self.done |= found
        return True

    def add(self, unit: str, answer: Any) -> None:
        self.done[unit] = answer
        self._line({"unit": unit, "answer": answer})

    def _line(self, page: Any) -> None:
        if self.file is not None:
            self.file.write(json.dumps(page) + "\n")
            self.file.flush()

    def close(self) -> None:
        """Closes the file, which stays there until the report is (report.py)."""
        if self.file is not None:
            self.file.close()


@dataclass
class Crew:
    """Answers units by `work(step, argument)`.

    make    called once in each process: returns `work`; has to be picklable
    jobs    processes, this one among them: it begins at once, while the others are still importing torch
    """

    make: Callable[[], Work]
    journal: Journal
    jobs: int = 1
    progress: Callable[[str], None] = lambda _text: None
    _work: Work | None = field(default=None, repr=False)
    _others: list[_Other] = field(default_factory=list, repr=False)

    def answers(self, step: str, units: Sequence[Unit]) -> dict[str, Any]:
        """unit's name → answer, in the order of `units`, whoever answered."""
        rank, world = rank_of()
        mine = [(name, argument) for i, (name, argument) in enumerate(units) if i % world == rank]
        left = [unit for unit in mine if f"{step} {unit[0]}" not in self.journal.done]
        started = time.monotonic()
        for done, (name, answer) in enumerate(self._each(step, left), start=1):
            self.journal.add(f"{step} {name}", answer)
            rest = (time.monotonic() - started) / done * (len(left) - done)
            self.progress(f"{step}: {done} of {len(left)} tensors, about {rest:.0f} s left; {name}")
        found = {name: self.journal.done[f"{step} {name}"] for name, _ in mine}
        if world > 1:
            everyone: list[dict[str, Any]] = [{} for _ in range(world)]
            dist.all_gather_object(everyone, found)
            found = {name: answer for one in everyone for name, answer in one.items()}
        return {name: found[name] for name, _ in units}

    def _each(self, step: str, units: Sequence[Unit]) -> Iterator[Unit]:
        self._work = self._work or self.make()
        if len(units) > 1:
            self._others += [_Other(self.make) for _ in range(self.jobs - 1 - len(self._others))]
        left = iter(units)
        while True:
            for other in self._others:
                while other.free and (unit := next(left, None)) is not None:
                    other.begin(step, unit)
            own = next(left, None)
            if own is not None:
                yield own[0], self._work(step, own[1])
            elif not any(other.doing for other in self._others):
                return
            lines = {other.line: other for other in self._others}
            for line in wait(list(lines), timeout=0 if own is not None else None):
                answered = lines[line].answer()  # type: ignore[index]
                if answered is not None:
                    yield answered

    def close(self) -> None:
        for other in self._others:
            other.close()


class _Other:
    """Another process of the crew.  doing: names of the units it has, at most two, so that an interruption loses little"""

    def __init__(self, make: Callable[[], Work]) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(make, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False
        self.doing: list[str] = []

    @property
    def free(self) -> bool:
        return self.ready and len(self.doing) < 2

    def begin(self, step: str, unit: Unit) -> None:
        self.doing.append(unit[0])
        self.line.send((step, unit[1]))

    def answer(self) -> Unit | None:
        """What it says: its first word is that it is there.  Raises what its work raised, and BisectError when it died."""
        try:
            found = self.line.recv()
        except EOFError:
            self.process.join()
            raise BisectError(f"a process of the audit ended with {self.process.exitcode}", hint="was it killed for its memory?") from None
        if isinstance(found, Exception):
            raise found
        if self.ready:
            return self.doing.pop(0), found
        self.ready = True
        return None

    def close(self) -> None:
        self.process.kill()  # it only reads
        self.process.join()
        self.line.close()


def _serve(make: Callable[[], Work], line: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one is interrupted too, and ends it
    threading.Thread(target=_follow, daemon=True).start()
    torch.set_num_threads(1)
    try:
        work = make()
        line.send(None)
        while True:
            line.send(work(*line.recv()))
    except EOFError:
        return
    except Exception as error:
        error.add_note(traceback.format_exc())
        line.send(error)


def _follow() -> None:
    """Ends this process when the one that started it is gone, however that one ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def rank_of() -> tuple[int, int]:
    """(rank, world) under torchrun; (0, 1) otherwise."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


@contextmanager
def joined_ranks() -> Iterator[None]:
    """Under torchrun, its ranks share the work of what is inside."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield
        return
    dist.init_process_group("gloo", timeout=WAIT)
    try:
        yield
    finally:
        dist.destroy_process_group()
