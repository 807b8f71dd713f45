"""Evidence with holes: log-probs that are null, responses that are empty.  What is not there is said, and agrees with nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_room import MODEL, Engine, Row, experts_mod, judged, rewritten, said, slime_dump

from bisect_tool.__main__ import run

pytestmark = pytest.mark.wide


def told(path: Path, rows: list[Row], logs: list[list[float | None]], **more: list[Any]) -> Path:
    """Plain lines with log-probs of which some are null."""
    page = [
        {"prompt": row.text, "prompt_ids": row.prompt, "response_ids": row.answer, "logprobs": own, **{key: values[i] for key, values in more.items()}}
        for i, (row, own) in enumerate(zip(rows, logs, strict=True))
    ]  # fmt: skip
    path.write_text("".join(json.dumps(one) + "\n" for one in page))
    return path


def holed(rows: list[Row], hole: Callable[[int, int], bool]) -> list[list[float | None]]:
    return [[None if hole(i, k) else log for k, log in enumerate(row.logs)] for i, row in enumerate(rows)]


def open_notes(page: dict[str, Any]) -> list[str]:
    return [note for note in page["stages"][4]["notes"] if note.startswith("open: ")]


def test_null_where_the_bad_log_probs_would_stand_is_no_agreement(engine: Engine, tmp_path: Path) -> None:
    bad = engine.generate(fault=rewritten(experts_mod(4)))
    right = [engine.score(row.tokens)[row.start :].tolist() for row in bad]
    logs = holed(bad, lambda i, k: abs(bad[i].logs[k] - right[i][k]) > 0.05)
    count = sum(log is None for row in logs for log in row)
    assert 0 < count < 160
    code, page = judged(tmp_path / "out", "--rollout", told(tmp_path / "0.jsonl", bad, logs))
    assert (code, page["verdict"], page["faults"]) == (125, "incomparable", [])
    assert f"open: {count} of 160 log-probs of the engine decode are null, first 0.jsonl line 1 at token " in said(page)
    assert "the engine's decode" not in said(page)


@pytest.mark.parametrize("side", ["logprobs", "prefill_logprobs", "trainer_logprobs"])
def test_a_single_null_is_named_with_its_place(side: str, rows: list[Row], tmp_path: Path) -> None:
    whole, one = holed(rows, lambda i, k: False), holed(rows, lambda i, k: (i, k) == (3, 4))
    more = {} if side == "logprobs" else {side: one}
    code, page = judged(tmp_path / "out", "--rollout", told(tmp_path / "0.jsonl", rows, whole if more else one, **more))
    assert (code, page["verdict"], page["faults"]) == (125, "incomparable", [])
    word = {"logprobs": "engine decode", "prefill_logprobs": "engine prefill", "trainer_logprobs": "trainer"}[side]
    (note,) = open_notes(page)
    assert note.startswith(f"open: 1 of 160 log-probs of the {word} is null, first 0.jsonl line 4 at token 4: that token was not compared")
    suspects = [entry["suspect"] for entry in page["cleared"]]
    assert ("the engine's decode" in suspects) == (side != "logprobs") and "the engine's prefill" not in suspects


def test_a_decode_that_is_null_from_end_to_end_beside_a_prefill(rows: list[Row], tmp_path: Path) -> None:
    dump = told(tmp_path / "0.jsonl", rows, holed(rows, lambda i, k: True), prefill_logprobs=holed(rows, lambda i, k: False))
    code, page = judged(tmp_path / "out", "--rollout", dump)
    assert (code, page["faults"]) == (125, [])
    assert "160 of 160 log-probs of the engine decode are null" in said(page)


def test_nulls_that_the_format_explains_are_no_holes(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    """Nobody predicts the first token of a prompt, and an engine does not say what a tool's tokens were worth."""
    before = [[None, *engine.score(row.tokens)[1 : row.start].tolist()] for row in rows]
    keep = [[int(k not in (5, 6)) for k in range(len(row.answer))] for row in rows]
    logs = holed(rows, lambda i, k: k in (5, 6))
    code, page = judged(tmp_path / "out", "--rollout", told(tmp_path / "0.jsonl", rows, logs, prompt_logprobs=before, loss_mask=keep))
    assert (code, page["faults"], open_notes(page)) == (0, [], [])
    assert {one["suspect"] for one in page["cleared"]} == {"tokenisation and template", "the engine's decode"}


def aborted(rows: list[Row]) -> list[Row]:
    return [replace(row, tokens=row.tokens[: row.start], logs=()) if i in (2, 5) else row for i, row in enumerate(rows)]


@pytest.mark.parametrize("kind", ["ids", "text", "slime"])
def test_responses_without_a_token_are_left_out_and_named(kind: str, engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    made = aborted(rows)
    if kind == "slime":
        none = {"response_length": 0, "status": "aborted", "rollout_log_probs": []}
        made = [row.plus(**none) if i in (2, 5) else row for i, row in enumerate(rows)]
        dump, places = slime_dump(tmp_path / "0.pt", made), "0.pt sample 2, 0.pt sample 5"
    elif kind == "ids":
        dump, places = told(tmp_path / "0.jsonl", made, holed(made, lambda i, k: False)), "0.jsonl line 3, 0.jsonl line 6"
    else:
        dump, places = tmp_path / "0.jsonl", "0.jsonl line 3, 0.jsonl line 6"
        lines = [{"input": row.text, "output": engine.tokenizer.text(row.answer)} for row in made]
        dump.write_text("".join(json.dumps(one) + "\n" for one in lines))
    code, page = judged(tmp_path / "out", "--rollout", dump)
    assert (code, page["faults"], page["stages"][4]["compared"]["responses"]) == (125 if kind == "text" else 0, [], 6)
    assert {"what": "2 of 8 responses", "why": f"they have no token: {places}"} in page["stages"][4]["skipped"]


def test_nothing_but_responses_without_a_token(rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [replace(row, tokens=row.tokens[: row.start], logs=()) for row in rows]
    dump = told(tmp_path / "0.jsonl", made, holed(made, lambda i, k: False))
    assert run(["rollout", "--reference", str(MODEL), "--rollout", str(dump), "--out", str(tmp_path / "out")]) == 2
    assert "holds no response" in capsys.readouterr().err


def test_log_probs_of_no_response_are_refused(rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dump that lost its ids is no dump of aborted responses."""
    made = [replace(row, tokens=row.tokens[: row.start]) if i == 2 else row for i, row in enumerate(rows)]
    dump = told(tmp_path / "0.jsonl", made, holed(made, lambda i, k: False))
    assert run(["rollout", "--reference", str(MODEL), "--rollout", str(dump), "--out", str(tmp_path / "out")]) == 2
    assert "0.jsonl line 3: log-probs of an empty response" in capsys.readouterr().err
