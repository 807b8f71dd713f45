"""Work in units: over processes, over torchrun ranks, and over interruptions.

A unit's answer is strict JSON.  Every answer is written down as it comes, so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bisect_tool.report import JOURNAL

WAIT = timedelta(hours=12)
Unit = tuple[str, Any]
Work = Callable[[str, Any], Any]


class Journal:
    """Answers on disk, one line each.  A journal of other inputs, and a line cut short by a kill, are as if they were not there."""

    def __init__(self, folder: Path | None, inputs: Mapping[str, Any], rank: int = 0) -> None:
        self.done: dict[str, Any] = {}
        self.folder, self.file = folder, None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        header = hashlib.blake2b(json.dumps(inputs, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
        for file in sorted(folder.glob(f"{JOURNAL}.*")):
            if not self._read(file, header):
                file.unlink()
        own = folder / f"{JOURNAL}.{rank}"
        new = not own.exists()
        self.file = own.open("a")
        if new:
            self._line({"inputs": header})
        else:
            self.file.write("\n")  # closes a line that was cut short

    def _read(self, file: Path, header: str) -> bool:
        found: dict[str, Any] = {}
        for i, line in enumerate(file.read_text(errors="replace").splitlines()):
            try:
                page = json.loads(line)
            except ValueError:
                continue
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

    def close(self, *, finished: bool) -> None:
        """Closes the file; of a run that is finished nothing is kept."""
        if self.file is not None:
            self.file.close()
        if finished and self.folder is not None:
            for file in self.folder.glob(f"{JOURNAL}.*"):
                file.unlink(missing_ok=True)


@dataclass
class Crew:
    """Answers units by `work(step, argument)`.

    make    called once in each process: returns `work`; has to be picklable
    jobs    processes; 1 works in this one
    """

    make: Callable[[], Work]
    journal: Journal
    jobs: int = 1
    progress: Callable[[str], None] = lambda _text: None
    _work: Work | None = field(default=None, repr=False)
    _pool: ProcessPoolExecutor | None = field(default=None, repr=False)

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
        if self.jobs == 1 or len(units) < 2:
            self._work = self._work or self.make()
            for name, argument in units:
                yield name, self._work(step, argument)
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn"), _begin, (self.make,))
        left = iter(units)
        running: dict[Future[Any], str] = {}
        try:
            while True:
                # few units in flight: an interruption loses little
                while len(running) < 2 * self.jobs and (unit := next(left, None)) is not None:
                    running[self._pool.submit(_answer, step, unit[1])] = unit[0]
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            for future in running:
                future.cancel()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


_WORK: list[Work] = []


def _begin(make: Callable[[], Work]) -> None:
    torch.set_num_threads(1)
    _WORK[:] = [make()]


def _answer(step: str, argument: Any) -> Any:
    return _WORK[0](step, argument)


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
