"""Ranks of a candidate: processes started by the tool itself and kept alive for a whole run.

Starting four ranks costs 15 to 20 seconds on two cores, a grafted forward less than one; so a World stays up between calls, and
is found again by its size.  Ranks talk to us over a local socket, and to each other over torch.distributed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import BisectError, UsageError

# Our own processes on an authenticated socket, so plain pickles; by bytes, because `send` would share tensors through file
# descriptors that the other side can't have.


def say(connection: Connection, thing: Any) -> None:
    """Sends one thing to our own process at the other end."""
    connection.send_bytes(pickle.dumps(thing))


def listen(connection: Connection) -> Any:
    """Receives one thing from our own process at the other end."""
    return pickle.loads(connection.recv_bytes())


START_SECONDS = 180.0
CALL_SECONDS = 600.0


class World:
    """`size` ranks.  `call` runs a command on every rank and returns their answers by rank."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device
        self._directory = tempfile.TemporaryDirectory(prefix="bisect-ranks-")
        self.path = Path(self._directory.name)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: dict[int, Connection] = {}
        self._calls = 0
        key = secrets.token_bytes(32)
        self._listener = Listener(str(self.path / "socket"), family="AF_UNIX", authkey=key)
        threads = str(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // size)))
        environment = os.environ | {
            "BISECT_AUTHKEY": key.hex(),
            "OMP_NUM_THREADS": threads,
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONWARNINGS": "ignore",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        for rank in range(size):
            log = (self.path / f"rank{rank}.log").open("wb")
            command = [sys.executable, "-m", "bisect_tool.worker", str(self.path), str(rank), str(size), device]
            # a session of their own: Ctrl-C reaches us, and we end them
            started = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            log.close()
            self.processes.append(started)

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.poll() is None for process in self.processes)

    def scratch(self) -> Path:
        """A fresh folder that every rank can write to."""
        return Path(tempfile.mkdtemp(dir=self.path))

    def call(self, command: str, timeout: float = CALL_SECONDS, **arguments: Any) -> list[Any]:
        """Raises what a rank raised; any failure ends the world, because the other ranks wait for the one that failed."""
        try:
            self._connect()
            for rank in range(self.size):
                say(self.connections[rank], (command, arguments))
            return self._answers(command, timeout)
        except BaseException as error:
            if not (isinstance(error, UsageError) and command == "build" and self.size == 1):
                self.close()
            raise

    def _answers(self, command: str, timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        until = time.monotonic() + timeout
        failed: dict[int, BaseException] = {}
        while len(answers) + len(failed) < self.size:
            if time.monotonic() > until:
                waiting = sorted(set(range(self.size)) - set(answers))
                raise BisectError(f"ranks {waiting} gave no answer to {command!r} in {timeout:.0f} s")
            for rank, connection in self.connections.items():
                if rank in answers or rank in failed:
                    continue
                if connection.poll(0.005):
                    try:
                        ok, answer = listen(connection)
                    except (EOFError, ConnectionError):
                        raise self._died(rank, command) from None
                    if ok:
                        answers[rank] = answer
                    else:
                        failed[rank] = answer
                elif self.processes[rank].poll() is not None:
                    raise self._died(rank, command)
            if failed:
                # a moment for the others: a rank that was refused something says more than one that lost its peer
                until = min(until, time.monotonic() + 1.0)
                if (
                    any(isinstance(error, UsageError) for error in failed.values())
                    or len(failed) == self.size
                    or time.monotonic() >= until - 0.9
                ):
                    raise next((e for e in failed.values() if isinstance(e, UsageError)), next(iter(failed.values())))
        return [answers[rank] for rank in range(self.size)]

    def _connect(self) -> None:
        if self.connections:
            return
        until = time.monotonic() + START_SECONDS
        waiting = self._listener._listener._socket  # type: ignore[attr-defined]
        while len(self.connections) < self.size:
            waiting.settimeout(0.5)
            try:
                connection = self._listener.accept()
            except TimeoutError:
                dead = next((rank for rank, process in enumerate(self.processes) if process.poll() is not None), None)
                if dead is not None:
                    raise self._died(dead, "start") from None
                if time.monotonic() > until:
                    raise BisectError(f"{self.size} ranks did not start in {START_SECONDS:.0f} s") from None
                continue
            self.connections[listen(connection)] = connection

    def _died(self, rank: int, command: str) -> BisectError:
        log = self.path / f"rank{rank}.log"
        tail = log.read_text(errors="replace").strip().splitlines()[-1:] if log.is_file() else []
        return BisectError(
            f"rank {rank} ended during {command!r} (exit {self.processes[rank].poll()}): {tail[0] if tail else 'it left no word'}"
        )

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        for process in self.processes:
            # with its whole group: megatron-core's save leaves a manager and write workers behind, 240 MB each
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.connections, self.processes = {}, []
        self._listener.close()
        self._directory.cleanup()


class Worlds:
    """Living worlds by size and device."""

    def __init__(self) -> None:
        self.worlds: dict[tuple[int, str], World] = {}

    def get(self, size: int, device: str = "cpu") -> World:
        """A world of this size, started now if there is none alive.  Returns at once; the first call waits for the ranks."""
        world = self.worlds.get((size, device))
        if world is None or not world.alive:
            world = self.worlds[size, device] = World(size, device)
        return world

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()
        self.worlds.clear()


WORLDS = Worlds()
atexit.register(WORLDS.close)
