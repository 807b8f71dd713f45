"""Faults of some responses only, and of how responses end: evidence of the real tiny model, each with its exact verdict and its control."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_room import (
    END,
    MODEL,
    PROMPTS,
    Engine,
    Fault,
    Row,
    experts_mod,
    hooked,
    judged,
    lines,
    noisy,
    rewritten,
    said,
    slime_dump,
    train_dump,
    verdict,
)

pytestmark = pytest.mark.wide

SOME = (1, 4, 6)


def config_fault(relation: str, module: str = "lm_head") -> list[dict[str, Any]]:
    between = ["reference", "engine"]
    return [{"class": "rollout-config", "between": between, "layers": [], "module": module, "parts": [], "relation": relation}]


def rescored(engine: Engine, row: Row, temperature: float = 1.0, top_k: int = 0) -> Row:
    """The same text with log-probs of another definition."""
    logs = (engine.logits([row.tokens])[0][:-1] / temperature).log_softmax(-1)
    own = logs.gather(1, torch.tensor(row.tokens[1:])[:, None])[:, 0]
    kept = logs.topk(top_k, -1).values.logsumexp(-1) if top_k else torch.zeros(())
    return row.with_logs((own - kept).clamp(max=0)[row.start - 1 :].tolist())


def some(engine: Engine, rows: list[Row], which: Collection[int], **how: Any) -> list[Row]:
    return [rescored(engine, row, **how) if i in which else row for i, row in enumerate(rows)]


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize(
    ("which", "how", "relation", "detail"),
    [
        (SOME, {"temperature": 0.8}, "scale", {"temperature": 0.8}),
        (SOME, {"temperature": 1.3}, "scale", {"temperature": 1.3}),
        ((4,), {"temperature": 0.6}, "scale", {"temperature": 0.6}),
        ((0, 1, 2, 4, 5, 6), {"temperature": 0.8}, "scale", {"temperature": 0.8}),
    ],
    ids=str,
)
def test_a_temperature_of_some_responses(
    noise: float,
    which: tuple[int, ...],
    how: dict[str, float],
    relation: str,
    detail: dict[str, float],
    engine: Engine,
    rows: list[Row],
    tmp_path: Path,
) -> None:
    made = noisy(some(engine, rows, which, **how), noise)
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", made))
    assert (code, verdict(page)) == (1, config_fault(relation))
    found = page["first"]["relation"]["detail"]
    assert found["temperature"] == pytest.approx(detail["temperature"], rel=0.04)
    assert (found["seen"], found["wrong"], found["of"]) == ("some", len(which), 8)
    assert f"of {len(which)} of 8 responses are" in page["first"]["explanation"]


def test_a_support_that_was_cut_in_some_responses_below_the_noise_of_engines(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", some(engine, rows, SOME, top_k=5)))
    assert (code, verdict(page)) == (1, config_fault("config"))
    assert page["first"]["relation"]["detail"] == {"flag": "top_k", "value": 5, "expected": -1, "seen": "some", "wrong": 3, "of": 8}


def test_a_temperature_of_one_engine_is_said_to_be_that_engines(
    engine: Engine, rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [row.plus(engine=i % 2) for i, row in enumerate(some(engine, rows, (1, 3, 5, 7), temperature=0.8))]
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", made))
    assert (code, verdict(page)) == (1, config_fault("scale"))
    assert page["first"]["relation"]["detail"]["engines"] == ["1"]
    assert "only on engine 1" in page["first"]["explanation"]
    printed = capsys.readouterr().out  # in nats a token, before and after: the allowance is for numbers of one definition
    assert "  proof " in printed and "relative rms" not in printed


def test_one_wrong_response_is_counted_as_one(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    bad = engine.generate(fault=rewritten(experts_mod(4)))
    made = [bad[3] if i == 3 else row for i, row in enumerate(rows)]
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", made))
    expected = {"class": "rollout", "between": ["reference", "engine"], "layers": [], "module": None, "parts": [], "relation": "unknown"}
    assert (code, verdict(page)) == (1, [expected])
    assert "1 of 8 responses is " in page["first"]["explanation"] and "tells it from the others" in page["first"]["explanation"]


@pytest.mark.parametrize("seed", range(3))
def test_one_token_far_off_is_no_temperature_of_its_response(seed: int, engine: Engine, tmp_path: Path) -> None:
    made = noisy(engine.generate(seed=40 + seed), 0.02, seed)
    logs = list(made[3].logs)
    logs[5 + seed] -= 3.0
    made[3] = made[3].with_logs(logs)
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", made))
    assert (code, page["faults"]) == (0, [])


@pytest.mark.parametrize("temperature", [0.9, 0.8])
def test_a_temperature_that_the_trainer_does_not_apply_is_a_fault_however_small(temperature: float, engine: Engine, tmp_path: Path) -> None:
    made = engine.generate(temperature=temperature)
    train = train_dump(tmp_path / "train.pt", made, [engine.score(row.tokens)[row.start :] for row in made])
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made), "--train", train)
    assert (code, verdict(page)) == (1, config_fault("scale"))
    assert page["first"]["relation"]["detail"]["temperature"] == pytest.approx(temperature, rel=0.02)


# -- stale weights --------------------------------------------------------------------------------------------------------------


def trained(steps: int) -> Fault:
    """Experts after so many small steps."""

    def move(name: str, data: torch.Tensor) -> torch.Tensor | None:
        if "mlp.experts" not in name:
            return None
        for step in range(steps):
            generator = torch.Generator().manual_seed(1000 * step + len(name))
            data = data + 0.1 * data.std() * torch.randn(data.shape, generator=generator)
        return data

    return rewritten(move)


WEIGHTS = [trained(steps) for steps in range(4)]


@pytest.mark.parametrize("held", [1, 3])
def test_rollouts_of_weights_two_steps_old_are_no_agreement(held: int, engine: Engine, tmp_path: Path) -> None:
    """The fourth rollout says it is of version 4; the trainer scores it so, and the engine still has version 2."""
    dumps: list[str | Path] = []
    for step in range(4):
        made = noisy(engine.generate(fault=WEIGHTS[held if step == 3 else step], seed=20 + step), 0.02, step)
        told = [
            row.plus(rollout_id=step, weight_version=str(step + 1), trainer_logprobs=engine.score(row.tokens, WEIGHTS[step])[row.start :].tolist())
            for row in made
        ]  # fmt: skip
        dumps += ["--rollout", lines(tmp_path / f"{step}.jsonl", told)]
    code, page = judged(tmp_path / "out", *dumps)
    assert (code, page["faults"]) == (125 if held == 1 else 0, [])
    assert ("open: responses of weight version 4 are" in said(page)) == (held == 1)
    assert ("cleared: the engine's decode" in said(page)) == (held == 3)


# -- how responses end ------------------------------------------------------------------------------------------------------------


def stopped(engine: Engine, row: Row, length: int) -> Row:
    """Ended by the stop token."""
    tokens = (*row.tokens[: row.start + length - 1], END)
    return replace(row, tokens=tokens).with_logs(engine.score(tokens)[row.start :].tolist())


@pytest.mark.parametrize("kept", [0, 1])
def test_a_stop_token_that_the_loss_mask_leaves_out_is_said(kept: int, engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    made = [stopped(engine, row, 12).plus(loss_mask=[1] * 11 + [kept]) for row in rows]
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", made))
    assert (code, page["faults"]) == (0 if kept else 125, [])
    assert ("open: 8 of 8 responses end with a stop token that the loss mask leaves out" in said(page)) == (not kept)
    skipped = [(one["what"], one["why"]) for one in page["stages"][4]["skipped"]]
    assert skipped == ([] if kept else [("log-probs of 8 tokens", "the loss mask leaves them out")])


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_responses_that_a_limit_cut_and_the_dump_calls_complete_are_said(
    reason: str, engine: Engine, rows: list[Row], tmp_path: Path
) -> None:
    made = [
        stopped(engine, row, 6 + i).plus(finish_reason="stop") if i % 2 else row.plus(finish_reason=reason) for i, row in enumerate(rows)
    ]
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", made))
    assert (code, page["faults"]) == (125 if reason == "stop" else 0, [])
    assert ("open: 4 of 8 responses are called complete" in said(page)) == (reason == "stop")


def test_where_no_response_ends_with_a_stop_token_it_can_not_be_told_and_is_noted(rows: list[Row], tmp_path: Path) -> None:
    dump = lines(tmp_path / "0.jsonl", [row.plus(finish_reason={"type": "stop"}) for row in rows])
    code, page = judged(tmp_path / "out", "--rollout", dump)
    assert (code, page["faults"]) == (0, [])
    assert "8 of 8 responses are called complete and no response ends with a stop token (2)" in said(page)


def test_ids_that_are_one_off_behind_a_stop_token_in_some_responses(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    made = []
    for i, row in enumerate(rows):
        if i in SOME:
            (rest,) = engine.generate([(*row.tokens[: row.start + 8], END)], 11, seed=i)
            logs, at = engine.score(rest.tokens)[row.start :].tolist(), row.start + 9
            row = replace(row, tokens=(*rest.tokens[:at], rest.tokens[at], *rest.tokens[at:-1])).with_logs(logs)
        made.append(row)
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", made))
    expected = {"class": "rollout", "between": ["reference", "engine"], "layers": [], "module": None, "parts": [], "relation": "unknown"}
    assert (code, verdict(page)) == (1, [expected])
    detail = page["first"]["relation"]["detail"]
    assert (detail["seen"], detail["wrong"], detail["of"]) == ("some", 3, 8) and detail["first_token"] >= 9


# -- templates ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", [False, True])
def test_a_template_without_its_generation_prompt(generation: bool, engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    page = json.loads((model / "tokenizer_config.json").read_text())
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps(page | {"chat_template": template}))
    asked = [prompt.removesuffix("=") for prompt in PROMPTS]
    made = rows if generation else engine.generate([tuple(engine.tokenizer.ids(one)) for one in asked])
    told = [row.plus(prompt=[{"role": "user", "content": one}]) for row, one in zip(made, asked, strict=True)]
    code, report = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", told), reference=model)
    assert (code, verdict(report)) == ((0, []) if generation else (1, config_fault("shifted-tokens", "tokens")))
    if not generation:
        detail = report["first"]["relation"]["detail"]
        assert (detail["missing"], detail["offset"], detail["wrong"]) == (engine.tokenizer.plain("="), -1, 8)


# -- a cause that all responses share, and that is large in a few -------------------------------------------------------------------


def without(layer: int) -> Fault:
    return hooked(f"layers.{layer}", lambda _module, inputs, output: (inputs[0], *output[1:]) if isinstance(output, tuple) else inputs[0])


def test_a_layer_that_the_engine_skips_is_said_of_all_responses_and_not_of_the_worst(engine: Engine, tmp_path: Path) -> None:
    """One response is as far off as would make it bad alone; the mean of the others is above what engines show too."""
    made = engine.generate(fault=without(6), seed=3)
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", made))
    expected = {"class": None, "between": ["reference", "engine"], "layers": [], "module": None, "parts": [], "relation": "unknown"}
    assert (code, verdict(page)) == (1, [expected])
    text, detail = page["first"]["explanation"], page["first"]["relation"]["detail"]
    assert (detail["seen"], detail["wrong"], detail["of"]) == ("every", 8, 8) and "8 of 8 responses are" in text
    first = [int(found[1]) for line in page["stages"][4]["probes"] if (found := re.search(r"bad from token (\d+) on", line))]
    low, high = (int(one) for one in re.findall(r"bad from token (\d+) to (\d+) on", text)[0])
    assert len(first) == 3 and low == detail["first_token"] and low <= min(first) <= max(first) <= high
    assert "the conversion" not in {one["suspect"] for one in page["cleared"]}
