"""A live engine, asked over the real protocols; the stand-in is only the server, its numbers are the tiny model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_room import MODEL, ROOT, Engine, Row, experts_mod, judged, rewritten, said, slime_dump, verdict
from stand_in import Answers, serving

from bisect_tool.__main__ import run
from bisect_tool.rollouts import server

pytestmark = pytest.mark.wide

KINDS = ["sglang", "vllm", "openai"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PAUSE", 0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_scores_what_it_said(kind: str, engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    dump = slime_dump(tmp_path / "0.pt", rows[:3])
    with serving(Answers(engine, kind)) as url:
        code, page = judged(tmp_path / "out", "--rollout", dump, "--server", url)
    assert (code, page["faults"]) == (0, [])
    assert "engine prefill - reference" in page["stages"][4]["probes"][0]
    assert f"is {'sglang' if kind == 'sglang' else 'openai'} serving tiny" in said(page)


@pytest.mark.parametrize("kind", KINDS)
def test_g11_decode_wrong_and_prefill_right(kind: str, engine: Engine, tmp_path: Path) -> None:
    bad = engine.generate(length=12, fault=rewritten(experts_mod(4)))
    with serving(Answers(engine, kind)) as url:
        code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", bad), "--server", f"{url}/v1")
    assert code == 1
    assert [(one["class"], one["relation"]) for one in verdict(page)] == [("rollout", "unknown")]
    assert "disagrees with itself" in page["first"]["explanation"] and "cleared: the conversion" in said(page)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_prompts_alone_are_answered_by_the_engine(kind: str, engine: Engine, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("7+8=", "12+34=", "3+4=7;55+5=")))
    with serving(Answers(engine, kind)) as url:
        code, page = judged(tmp_path / "out", "--rollout", prompts, "--server", url)
    assert (code, page["faults"]) == (0, [])
    assert page["stages"][4]["compared"] == {"responses": 3, "tokens": 18}
    assert "cleared: tokenisation" in said(page)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_d02_an_engine_that_adds_a_second_bos_to_text(kind: str, engine: Engine, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "12+34="}) + "\n")
    with serving(Answers(engine, kind, bos=1)) as url:
        code, page = judged(tmp_path / "out", "--rollout", prompts, "--server", url)
    assert code == 1
    assert [(one["class"], one["module"], one["relation"]) for one in verdict(page)] == [("rollout-config", "tokens", "shifted-tokens")]
    assert "BOS stands twice" in page["first"]["explanation"]


BROKEN = {
    "hang": "did not answer within",
    "500": "answers 500",
    "junk": "answers what is no JSON",
    "endless": "goes on after",
    "late 500": "answers 500",
    "late junk": "answers what is no JSON",
    "late hang": "did not answer within",
    "late no numbers": "gives no log-probs",
    "late endless": "was still answering after",
}


@pytest.mark.parametrize(
    "command", [["rollout", "--reference", str(MODEL)], ["run", "--prompts", str(ROOT / "golden/prompts.jsonl")]], ids=["rollout", "run"]
)
@pytest.mark.parametrize("how", BROKEN)
def test_a_server_that_misbehaves_is_one_clear_error(
    how: str,
    command: list[str],
    engine: Engine,
    rows: list[Row],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(server, "HELLO", 0.5)
    monkeypatch.setattr(server, "READ", 0.5)
    monkeypatch.setattr(server, "WHOLE", 1.0)
    if how == "endless":
        monkeypatch.setattr(server, "LARGEST_ANSWER", 1 << 18)
    dump = slime_dump(tmp_path / "0.pt", rows[:1])
    with serving(Answers(engine, "sglang"), how) as url:
        assert run([*command, "--rollout", str(dump), "--server", url, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ") and error.count("\n") == 1 and BROKEN[how] in error


@pytest.mark.parametrize(
    ("url", "what"), [("http://127.0.0.1:9", "can't be asked"), ("ftp://x", "no http address"), ("localhost:30000", "no http address")]
)
def test_an_address_that_is_none(url: str, what: str, rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = slime_dump(tmp_path / "0.pt", rows[:1])
    assert run(["rollout", "--reference", str(MODEL), "--rollout", str(dump), "--server", url, "--out", str(tmp_path / "out")]) == 2
    assert what in capsys.readouterr().err


def test_a_server_that_is_no_engine(rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = slime_dump(tmp_path / "0.pt", rows[:1])
    with serving(None) as url:
        assert run(["rollout", "--reference", str(MODEL), "--rollout", str(dump), "--server", url, "--out", str(tmp_path / "out")]) == 2
    assert "is no engine that is known" in capsys.readouterr().err
