"""Hostile and broken evidence: one clear line, exit 2, and nothing of it was run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_room import MODEL, ROOT, Row, slime_dump, slime_sample

from bisect_tool.__main__ import run

COMMANDS = {
    "rollout": ["rollout", "--reference", str(MODEL)],
    "run": ["run", "--prompts", str(ROOT / "golden/prompts.jsonl"), "--all-stages"],
}


def refused(out: Path, capsys: pytest.CaptureFixture[str], *arguments: str | Path, command: str = "rollout") -> str:
    assert run([*COMMANDS[command], *map(str, arguments), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("Error: ") and printed.err.count("\n") == 1
    assert printed.out == ""
    return printed.err


class Trap:
    """A pickle with code in it."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.made = (call, arguments)

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("call", [os.system, subprocess.check_output, eval, socket.create_connection])
def test_a_dump_with_code_in_it(call: Any, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = tmp_path / "ran"
    torch.save({"rollout_id": 0, "samples": [Trap(call, f"touch {ran}")]}, tmp_path / "0.pt")
    assert "refused" in refused(tmp_path / "out", capsys, "--rollout", tmp_path / "0.pt", command=command)
    assert not ran.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_half_a_file(command: str, rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = slime_dump(tmp_path / "0.pt", rows)
    dump.write_bytes(dump.read_bytes()[: dump.stat().st_size // 2])
    assert "can't be read as a torch file" in refused(tmp_path / "out", capsys, "--rollout", dump, command=command)


def sample(**changes: Any) -> dict[str, Any]:
    good = Row("7+8=", (1, 25, 13, 26, 31, 7, 8), 5, (-0.5, -0.5))
    return slime_sample(good, 0) | changes


DUMPS: dict[str, tuple[Any, str]] = {
    "no table": ([1, 2], "no dump of slime or miles"),
    "a train dump": ({"rollout_id": 0, "rollout_data": {}}, "give it as --train"),
    "samples of another kind": ({"samples": ["text"]}, "not a list of tables"),
    "no tokens": ({"samples": [{"prompt": "a", "response": "b"}]}, "no sample of slime or miles"),
    "tokens that are text": ({"samples": [sample(tokens=["a", "b", "c"])]}, "not a list of ids"),
    "negative ids": ({"samples": [sample(tokens=[1, -2, 3])]}, "not a list of ids"),
    "an id that is not in the vocabulary": ({"samples": [sample(tokens=[1, 2, 3, 500, 4])]}, "vocabulary has 500"),
    "a response longer than its tokens": ({"samples": [sample(response_length=9)]}, "leaves no prompt"),
    "too few log-probs": ({"samples": [sample(rollout_log_probs=[-1.0])]}, "1 decode log-probs for 2 tokens"),
    "log-probs that are text": ({"samples": [sample(rollout_log_probs=["a", "b"])]}, "which is no number"),
    "a mask of another length": ({"samples": [sample(loss_mask=[1])]}, "loss mask has 1 entries"),
    "nothing but aborted": ({"samples": [sample(response_length=0)]}, "holds no response"),
}


@pytest.mark.parametrize("what", DUMPS)
def test_dumps_that_are_none(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, said = DUMPS[what]
    torch.save(page, tmp_path / "0.pt")
    assert said in refused(tmp_path / "out", capsys, "--rollout", tmp_path / "0.pt")


LINES: dict[str, tuple[str, str]] = {
    "not JSON": ("{", "line 1 is not JSON"),
    "no table": ("[1]", "not a table"),
    "no prompt": (json.dumps({"question": "a"}), "has no prompt"),
    "a prompt that is a number": (json.dumps({"prompt": 5, "response": "a"}), "neither text nor messages"),
    "no response and no server": (json.dumps({"prompt": "7+8="}), "give --server URL"),
    "ids that are text": (json.dumps({"prompt_ids": [1], "response_ids": ["a"]}), "not a list of ids"),
    "log-probs that are a number": (json.dumps({"prompt_ids": [1], "response_ids": [2], "logprobs": 3}), "not a list"),
    "more log-probs than tokens": (json.dumps({"prompt_ids": [1], "response_ids": [2], "logprobs": [-1, -1]}), "2 decode log-probs for 1 tokens"),
    "prompt log-probs of another length": (
        json.dumps({"prompt_ids": [1, 2, 3], "response_ids": [2], "prompt_logprobs": [-1]}), "prompt_logprobs is not a list of 3",
    ),
    "empty": ("", "holds no response"),
    "tokens without a length": (json.dumps({"tokens": [1, 2, 3]}), "no response_length"),
}  # fmt: skip


@pytest.mark.parametrize("what", LINES)
def test_lines_that_are_none(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = LINES[what]
    (tmp_path / "0.jsonl").write_text(text + "\n")
    assert said in refused(tmp_path / "out", capsys, "--rollout", tmp_path / "0.jsonl")


def binary(path: Path) -> list[str]:
    path.write_bytes(b"\xff\xfe\x00")
    return ["--rollout", str(path)]


USAGE: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "nothing": (lambda _: [], "nothing to hold against the reference"),
    "no such file": (lambda path: ["--rollout", str(path / "no.pt")], "no such file"),
    "an empty directory": (lambda path: ["--rollout", str(path)], "holds no .pt and no .jsonl"),
    "bytes": (lambda path: binary(path / "x.jsonl"), "is no text"),
    "received alone": (lambda path: ["--received", str(path / "x")], "give --received and --consumed together"),
    "a server alone": (lambda _: ["--hashes", "x", "--server", "http://localhost:1"], "go with --rollout"),
    "a file without an option": (lambda path: [str(path / "x")], "files go behind --rollout"),
}


@pytest.mark.parametrize("what", [what for what in USAGE if what != "nothing"])
def test_usage_of_run(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said = USAGE[what]
    (tmp_path / "here").mkdir()
    assert said in refused(tmp_path / "out", capsys, *arguments(tmp_path / "here"), command="run")


@pytest.mark.parametrize("what", USAGE)
def test_usage(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said = USAGE[what]
    (tmp_path / "here").mkdir()
    assert said in refused(tmp_path / "out", capsys, *arguments(tmp_path / "here"))


LISTED: dict[str, tuple[str, str]] = {
    "prose": ("the engine was fine\n", "no line of a hash listing"),
    "nothing": ("\n", "lists no tensors"),
    "another model": ("some.tensor  [2]  bfloat16  " + "0" * 32 + "\n", "lists no tensor of"),
    "a rank beyond its size": ("# tp 4/4\nlm_head.weight  [2]  bfloat16  " + "0" * 32 + "\n", "is no rank of that size"),
    "a dtype nobody knows": ("lm_head.weight  [500, 96]  float3  " + "0" * 32 + "\n", "float3"),
}


@pytest.mark.parametrize("what", LISTED)
def test_listings_that_are_none(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = LISTED[what]
    (tmp_path / "hashes").write_text(text)
    assert said in refused(tmp_path / "out", capsys, "--hashes", tmp_path / "hashes")


def test_a_train_dump_of_other_rollouts(rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = slime_dump(tmp_path / "0.pt", rows)
    torch.save({"samples": [{"tokens": torch.tensor([1, 2]), "log_probs": torch.tensor([-1.0])}]}, tmp_path / "train.pt")
    line = refused(tmp_path / "out", capsys, "--rollout", dump, "--train", tmp_path / "train.pt")
    assert "no row of" in line and "same rollout_id" in line
