"""What engines write for log-probs: tokens that no arithmetic moves, tails that noise lacks, values that are none, numbers of other units."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_room import MODEL, Engine, Row, judged, lines, noisy, said, verdict

from bisect_tool.__main__ import run

pytestmark = pytest.mark.wide


def fault(cls: str | None, module: str | None, relation: str) -> dict[str, Any]:
    return {"class": cls, "between": ["reference", "engine"], "layers": [], "module": module, "parts": [], "relation": relation}


def written(tmp_path: Path, rows: Sequence[Row]) -> tuple[int, dict[str, Any]]:
    return judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", rows))


def put(rows: Sequence[Row], at: dict[tuple[int, int], float]) -> list[Row]:
    """Rows with other numbers at (response, token)."""
    return [row.with_logs([at.get((i, k), log) for k, log in enumerate(row.logs)]) for i, row in enumerate(rows)]


def test_a_mean_below_the_line_with_tokens_that_are_nats_apart_clears_nothing(rows: list[Row], tmp_path: Path) -> None:
    code, page = written(tmp_path, put(rows, {(i, 7): rows[i].logs[7] - 2.0 for i in range(6)}))
    assert (code, page["verdict"], page["faults"]) == (125, "incomparable", [])
    assert "not as noise is" in said(page) and "--train TRAIN_DUMP tells whose it is" in said(page)
    assert "decode" not in [one["suspect"].split()[-1] for one in page["stages"][4]["cleared"]]


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_one_token_that_no_arithmetic_moves_is_a_fault(noise: float, rows: list[Row], tmp_path: Path) -> None:
    code, page = written(tmp_path, put(noisy(rows, noise), {(2, 3): -60.0}))
    assert (code, verdict(page)) == (1, [fault("rollout", None, "unknown")])
    assert page["first"]["relation"]["detail"]["seen"] == "some" and "56 at the furthest token" in page["first"]["explanation"]
    assert "0.jsonl line 3" in page["stages"][4]["probes"][0] and "engine's decode" not in said(page)


NONE = {"NaN": math.nan, "-inf": -math.inf, "-1e+308": -1e308, "-9999": -9999.0, "5": 5.0}


@pytest.mark.parametrize("word", NONE)
def test_one_value_that_is_no_log_prob_is_named_with_its_place(
    word: str, rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page = written(tmp_path, put(rows, {(3, 4): NONE[word]}))
    assert (code, verdict(page)) == (1, [fault("rollout", None, "nan")])
    text = page["first"]["explanation"]
    assert "1 of its values is no log-prob (" in text and word in text and "in 0.jsonl line 4 at token 4" in text
    assert "1 of its 20 values is no log-prob (" in page["stages"][4]["probes"][0] and "engine's decode" not in said(page)
    assert page["stages"][4]["compared"]["tokens"] == 159
    assert "relative rms" not in capsys.readouterr().out  # what its other tokens are apart is no measure of it


def test_nothing_but_nan(rows: list[Row], tmp_path: Path) -> None:
    code, page = written(tmp_path, [row.with_logs([math.nan] * len(row.answer)) for row in rows])
    assert (code, verdict(page)) == (1, [fault(None, None, "nan")])
    assert (
        "8 of 8 responses are wrong: 160 of their values are no log-probs (NaN in 0.jsonl line 1 at token 0" in page["first"]["explanation"]
    )


UNITS: dict[str, Callable[[float], float]] = {
    "negated": lambda log: -log,
    "probability": math.exp,
    "base 2": lambda log: log / math.log(2),
    "base 10": lambda log: log / math.log(10),
}


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("unit", UNITS)
def test_numbers_of_another_unit(unit: str, noise: float, rows: list[Row], tmp_path: Path) -> None:
    code, page = written(tmp_path, [row.with_logs([UNITS[unit](log) for log in row.logs]) for row in noisy(rows, noise)])
    assert (code, verdict(page)) == (1, [fault("rollout-config", "lm_head", "config")])
    assert page["first"]["relation"]["detail"] == {"flag": "log-prob", "value": unit, "expected": "natural logarithm"}
    assert page["first"]["proof"]["after"] < 0.03 and page["first"]["proof"]["before"] > 0.1
    assert f"apart after {unit}" in page["stages"][4]["probes"][0]
    assert ("above 0" in page["first"]["proof"]["control"]) == (unit in ("negated", "probability"))


@pytest.mark.parametrize("temperature", [0.7, 1.44])
def test_a_temperature_is_no_unit(temperature: float, engine: Engine, tmp_path: Path) -> None:
    code, page = written(tmp_path, noisy(engine.generate(temperature=temperature), 0.01))
    assert (code, verdict(page)) == (1, [fault("rollout-config", "lm_head", "scale")])


@pytest.mark.parametrize("offset", [-1, 1])
def test_rows_that_are_cut_one_off(offset: int, rows: list[Row], tmp_path: Path) -> None:
    code, page = written(tmp_path, [row.with_logs([0.0, *row.logs[:-1]] if offset < 0 else [*row.logs[1:], 0.0]) for row in rows])
    assert (code, verdict(page)) == (1, [fault("rollout-config", "tokens", "shifted-tokens")])
    assert page["first"]["relation"]["detail"] == {"offset": offset, "of": "rows"}


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_log_probs_of_other_responses(noise: float, rows: list[Row], tmp_path: Path) -> None:
    noise_of = noisy(rows, noise)
    code, page = written(tmp_path, [row.with_logs(noise_of[i - 3].logs) for i, row in enumerate(rows)])
    assert (code, verdict(page)) == (1, [fault("rollout-config", "tokens", "permutation")])
    assert page["first"]["relation"]["detail"] == {"map": [5, 6, 7, 0, 1, 2, 3, 4], "of": "responses"}
    assert "each carries those of the one 3 before it" in page["first"]["explanation"]


def test_json_that_is_nested_too_deep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0.jsonl").write_text("[" * 100_000 + "\n")
    assert run(["rollout", "--reference", str(MODEL), "--rollout", str(tmp_path / "0.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "0.jsonl line 1" in capsys.readouterr().err


def test_a_bos_too_many_without_a_template(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    made = []
    for row in rows:
        tokens = (1, 1, *row.tokens)
        plain = {"prompt": row.text, "prompt_ids": list(tokens[: row.start + 2]), "response_ids": row.answer}
        made.append(plain | {"logprobs": engine.score(tokens)[row.start + 2 :].tolist()})
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made))
    code, page = judged(tmp_path / "out", "--rollout", tmp_path / "0.jsonl")
    assert (code, verdict(page)) == (1, [fault("rollout-config", "tokens", "shifted-tokens")])
    assert "BOS stands 3 times" in page["first"]["explanation"] and "No template is at work" in page["first"]["next"]
