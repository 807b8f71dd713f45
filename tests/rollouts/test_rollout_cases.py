"""Rows of the catalogue that saved rollouts carry: evidence made by the real tiny model, perturbed as the row says, with its exact verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_room import (
    PROMPTS,
    Engine,
    Fault,
    Row,
    experts_mod,
    hooked,
    judged,
    lines,
    local_experts,
    noisy,
    rewritten,
    said,
    slime_dump,
    times,
    train_dump,
    verdict,
)

pytestmark = pytest.mark.wide

EVERY, LINEAR, FULL = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 5, 6], [3, 7]
PAIR = ["reference", "engine"]


def fault(cls: str | None, module: str | None, relation: str, layers: list[int] | None = None, *parts: str) -> dict[str, Any]:
    return {"class": cls, "between": PAIR, "layers": layers or [], "module": module, "parts": list(parts), "relation": relation}


def rescored(engine: Engine, rows: list[Row], change: Callable[[Row], Row]) -> list[Row]:
    """Other prompt ids, with the log-probs that a healthy engine gives on those."""
    changed = [change(row) for row in rows]
    return [row.with_logs(engine.score(row.tokens)[row.start :].tolist()) for row in changed]


def put_in(row: Row, at: int, *ids: int) -> Row:
    return replace(row, tokens=(*row.tokens[:at], *ids, *row.tokens[at:]), start=row.start + len(ids))


def from_token(engine: Engine, row: Row, start: int, wrong: Fault) -> Row:
    """Right up to a token of the response, and what a faulty engine goes on with from there (text and log-probs)."""
    (rest,) = engine.generate([row.tokens[: row.start + start]], len(row.answer) - start, wrong, seed=start)
    return replace(row, tokens=rest.tokens, logs=(*row.logs[:start], *rest.logs))


GARBLED = rewritten(experts_mod(4))


def partial(layer: int, rank: int, ways: int) -> Fault:
    """What a layer's feed-forward gives on one tensor parallel rank, with nobody to add the others."""

    def change(name: str, data: torch.Tensor) -> torch.Tensor | None:
        if f"layers.{layer}.mlp" not in name or "down_proj" not in name:
            return None
        kept = torch.zeros_like(data)
        own = slice(data.shape[-1] // ways * rank, data.shape[-1] // ways * (rank + 1))
        kept[..., own] = data[..., own]
        return kept

    return rewritten(change)


COMPUTED = {
    "E02": (local_experts(4), fault("rollout", "experts", "zero", EVERY, "combine")),
    "S01": (times(4, ".mlp"), fault("rollout", "mlp", "scale", EVERY)),
    "S02": (partial(7, 1, 8), fault("rollout", "mlp", "unknown", [7])),
    "S03": (partial(3, 0, 2), fault("rollout", "mlp", "unknown", [3])),
    "T09": (times(2.5, ".mlp.experts"), fault("rollout", "experts", "scale", EVERY, "combine")),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_the_engine_computes_wrong_is_named_and_placed(name: str, engine: Engine, tmp_path: Path) -> None:
    wrong, expected = COMPUTED[name]
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", engine.generate(fault=wrong)))
    assert (code, verdict(page)) == (1, [expected])
    proof = page["first"]["proof"]
    assert proof["before"] > 0.02 > 0.001 > proof["after"]
    assert "cleared: the conversion" in said(page)


def test_g15_a_state_that_is_not_carried(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    """Every decode step of the linear attention sees its own token alone."""

    def alone(start: int) -> Fault:
        busy = False

        def after(module: Any, inputs: Any, words: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal busy
            hidden = words.get("hidden_states", inputs[0] if inputs else None)
            if busy:
                return output
            busy = True
            pieces = [output[:, :start], *(module(hidden[:, t : t + 1]) for t in range(start, hidden.shape[1]))]
            busy = False
            return torch.cat(pieces, 1)

        from contextlib import ExitStack, contextmanager

        @contextmanager
        def done(model: torch.nn.Module) -> Any:
            with ExitStack() as stack:
                for path, module in model.named_modules():
                    if path.endswith("linear_attn"):
                        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
                yield

        return done

    bad = [row.with_logs(engine.score(row.tokens, alone(row.start))[row.start :].tolist()) for row in rows[:5]]
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", bad))
    assert (code, verdict(page)) == (1, [fault("rollout", "linear_attention", "zero", LINEAR, "core")])


def test_w08_what_no_simulation_makes_is_of_open_class_and_the_next_piece_is_named(engine: Engine, tmp_path: Path) -> None:
    """W08: KV heads exchanged.  From log-probs alone weights and engine look the same, and the report says what tells them apart."""

    def heads(name: str, data: torch.Tensor) -> torch.Tensor | None:
        return data.roll(len(data) // 2, 0) if name.endswith("v_proj.weight") else None

    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", engine.generate(fault=rewritten(heads))))
    assert (code, verdict(page)) == (1, [fault(None, None, "unknown")])
    assert page["first"]["class_candidates"] == ["conversion", "rollout"]
    assert "--train TRAIN_DUMP" in page["first"]["next"]


# -- who agrees with whom -----------------------------------------------------------------------------------------------------


def test_a_trainer_that_agrees_with_the_reference_clears_the_conversion(engine: Engine, tmp_path: Path) -> None:
    """A08: the engine's weights alone are wrong."""
    bad = engine.generate(fault=GARBLED)
    train = train_dump(tmp_path / "train.pt", bad, [engine.score(row.tokens)[row.start :] for row in bad])
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", bad), "--train", train)
    assert (code, verdict(page)) == (1, [fault("rollout", None, "unknown")])
    assert "cleared: the conversion (the trainer computes with the converted weights)" in said(page)


def test_a_trainer_that_agrees_with_the_engine_means_both_have_the_wrong_model(engine: Engine, tmp_path: Path) -> None:
    """E01, seen from the rollouts: the engine is cleared, and the audit is named."""
    wrong = rewritten(experts_mod(4))
    bad = engine.generate(fault=wrong)
    train = train_dump(tmp_path / "train.pt", bad, [engine.score(row.tokens, wrong)[row.start :] for row in bad])
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", bad), "--train", train)
    assert (code, verdict(page)) == (1, [fault(None, None, "unknown") | {"between": ["reference", "candidate"]}])
    assert page["first"]["class_candidates"] == ["conversion", "model-definition", "parallel"]
    assert "bisect-tool audit" in page["first"]["next"] and "cleared: the engine" in said(page)


def test_g11_an_engine_that_disagrees_with_itself_clears_the_conversion(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    """Two of eight responses are decoded wrongly; the engine's own prefill of the same ids is right."""
    bad = engine.generate(fault=GARBLED)
    half = [bad[i] if i in (2, 5) else row for i, row in enumerate(rows)]
    half = [row.plus(prefill_logprobs=engine.score(row.tokens)[row.start :].tolist()) for row in half]
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", half))
    assert (code, verdict(page)) == (1, [fault("rollout", None, "unknown")])
    assert page["first"]["relation"]["detail"]["seen"] == "some"
    assert "disagrees with itself" in page["first"]["explanation"]
    assert "cleared: the conversion (prefill and decode use the same weights" in said(page)


def test_g10_right_until_a_draft_is_accepted(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    drafted = [[False] * len(row.answer) for row in rows]
    made = []
    for i, row in enumerate(rows):
        if i < 5:
            drafted[i][3 + i] = True
            row = from_token(engine, row, 4 + i, GARBLED)
        made.append(row.plus(draft_accepted=drafted[i]))
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", made))
    assert (code, verdict(page)) == (1, [fault("rollout", None, "unknown")])
    assert page["first"]["relation"]["detail"]["seen"] == "draft"


@pytest.mark.parametrize("name", ["W05", "W10"])
def test_w05_w10_wrong_behind_a_cached_prefix_only(name: str, engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    bad = engine.generate(fault=GARBLED)
    made = [
        (bad[i] if i % 2 else row).plus(prefix_cache_info={"cached_tokens": 3 * (i % 2), "total_prompt_tokens": row.start})
        for i, row in enumerate(rows)
    ]
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, verdict(page)) == (1, [fault("rollout", None, "unknown")])
    assert page["first"]["relation"]["detail"]["seen"] == "cache"


@pytest.mark.parametrize("name", ["W04", "W07"])
def test_w04_w07_garbled_after_the_first_sync(name: str, engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    first = slime_dump(tmp_path / "0.pt", rows, 0)
    later = slime_dump(tmp_path / "1.pt", engine.generate(fault=GARBLED), 1, weight_versions=["2"])
    code, page = judged(tmp_path / "out", "--rollout", first, later)
    assert (code, verdict(page)) == (1, [fault("rollout", None, "unknown")])
    assert page["first"]["relation"]["detail"] == {"seen": "sync", "first_token": 0, "from": 2, "by": "weight version"}
    assert "cleared: the conversion" in said(page)


def test_w06_only_one_engine(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    bad = engine.generate(fault=GARBLED)
    made = [(bad[i] if i % 2 else row).plus(metadata={"dp_rank": i % 2}) for i, row in enumerate(rows)]
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, verdict(page)) == (1, [fault("rollout", None, "unknown")])
    assert page["first"]["relation"]["detail"]["engines"] == ["1"]


def test_wrong_beyond_a_length(engine: Engine, tmp_path: Path) -> None:
    long = engine.generate(PROMPTS[:6], length=30)
    made = [from_token(engine, row, 26 - row.start, GARBLED) for row in long if row.start <= 14]
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, verdict(page)) == (1, [fault("rollout", None, "unknown")])
    assert page["first"]["relation"]["detail"]["seen"] == "length"
    assert abs(page["first"]["relation"]["detail"]["position"] - 26) <= 4


# -- what log-probs and tokens mean ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_d01_a_temperature(noise: float, engine: Engine, tmp_path: Path) -> None:
    made = noisy(engine.generate(temperature=0.8), noise)
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, verdict(page)) == (1, [fault("rollout-config", "lm_head", "scale")])
    assert page["first"]["relation"]["detail"]["value"] == pytest.approx(1 / 0.8, rel=0.04)


def test_d01_scored_at_zero(rows: list[Row], tmp_path: Path) -> None:
    made = [row.with_logs([0.0] * len(row.answer)) for row in rows]
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, verdict(page)) == (1, [fault("rollout-config", "lm_head", "scale")])
    assert page["first"]["relation"]["detail"]["value"] == "inf"


def test_a_temperature_that_the_trainer_applies_too_is_no_fault(engine: Engine, tmp_path: Path) -> None:
    made = engine.generate(temperature=0.8)
    train = train_dump(tmp_path / "train.pt", made, [torch.tensor(row.logs) for row in made])
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made), "--train", train)
    assert (code, verdict(page)) == (0, [])
    assert "this is no fault" in said(page)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_d07_a_support_that_was_cut(noise: float, engine: Engine, tmp_path: Path) -> None:
    made = noisy(engine.generate(top_p=0.9), noise)
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, verdict(page)) == (1, [fault("rollout-config", "lm_head", "config")])
    detail = page["first"]["relation"]["detail"]
    low, high = detail.get("between", [detail["value"]] * 2)
    assert detail["flag"] == "top_p" and low <= 0.9 <= high


@pytest.mark.parametrize("offset", [-1, 1])
def test_labels_that_are_one_off(offset: int, engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    logs = [engine.score(row.tokens) for row in rows]
    made = [
        row.with_logs([*row.logs[1:], -0.5] if offset == 1 else one[row.start - 1 : -1].tolist())
        for row, one in zip(rows, logs, strict=True)
    ]
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, verdict(page)) == (1, [fault("rollout-config", "tokens", "shifted-tokens")])
    assert page["first"]["relation"]["detail"] == {"offset": offset, "of": "rows"}


TOKENS: dict[str, tuple[Callable[[Row], Row], dict[str, Any]]] = {
    "D02 doubled": (lambda row: put_in(row, 0, 1), {"index": 0, "offset": 1, "added": [1], "missing": []}),
    "D02 missing": (lambda row: replace(row, tokens=row.tokens[1:], start=row.start - 1), {"index": 0, "offset": -1, "added": [], "missing": [1]}),
    "D03": (lambda row: put_in(row, 3, 2, 1), {"index": 3, "offset": 2, "added": [2, 1], "missing": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
def test_d02_d03_other_tokens(name: str, engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    change, expected = TOKENS[name]
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", rescored(engine, rows, change)))
    assert (code, verdict(page)) == (1, [fault("rollout-config", "tokens", "shifted-tokens")])
    detail = page["first"]["relation"]["detail"]
    assert {key: detail[key] for key in expected} == expected and detail["wrong"] == len(rows)


def test_d02_a_doubled_bos_is_seen_without_the_text(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    made = rescored(engine, rows, lambda row: replace(put_in(row, 0, 1), text=""))
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, verdict(page)) == (1, [fault("rollout-config", "tokens", "shifted-tokens")])


def test_d08_prompt_rows_that_were_never_written(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    made = []
    for i, row in enumerate(rows):
        logs = engine.score(row.tokens)
        logs[1:4] = torch.tensor([-41.0, 3.0, -700.0]) if i % 2 else logs[1:4]
        made.append(row.plus(prompt_logprobs=[None, *logs[1 : row.start].tolist()], cached_tokens=4 if i % 2 else 0))
    code, page = judged(tmp_path / "out", "--rollout", lines(tmp_path / "0.jsonl", made))
    assert (code, verdict(page)) == (1, [fault("capture", None, "unknown")])
    assert page["first"]["relation"]["detail"]["positions"] == [1, 2, 3]


def test_a_sampler_that_does_not_draw_from_its_own_log_probs(engine: Engine, tmp_path: Path) -> None:
    hot = engine.generate(temperature=4.0)
    made = [row.with_logs(engine.score(row.tokens)[row.start :].tolist()) for row in hot]
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, verdict(page)) == (1, [fault("rollout-config", "lm_head", "config")])
    assert page["first"]["relation"]["detail"]["flag"] == "sampling"


# -- controls -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.0, 0.01, 0.03, 0.2], ids=["exact", "Z02", "Z04", "W09"])
def test_noise_is_not_a_fault(size: float, rows: list[Row], tmp_path: Path) -> None:
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", noisy(rows, size)))
    assert (code, page["verdict"], page["faults"], page["minor"]) == (0, "agrees", [], [])
    assert page["stages"][4]["compared"] == {"responses": 8, "tokens": 160}
    assert ("more than usual" in said(page)) == (size == 0.2)


def test_z05_one_flipped_expert_moves_one_token_and_is_no_fault(rows: list[Row], tmp_path: Path) -> None:
    made = noisy(rows, 0.02)
    logs = list(made[3].logs)
    logs[7] -= 4.0
    made[3] = made[3].with_logs(logs)
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, page["faults"]) == (0, [])
    assert "sample 3" in page["stages"][4]["probes"][0]


def test_bf16_arithmetic_is_clean(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    """Z01, Z03: every linear layer rounds what it gives to bf16."""
    rounded = hooked("_proj", lambda _module, _inputs, output: output.bfloat16().float())
    made = [row.with_logs(engine.score(row.tokens, rounded)[row.start :].tolist()) for row in rows]
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, page["faults"]) == (0, [])


def test_a_mixed_sample_is_said_to_be_so_and_is_no_mismatch(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    moved = rewritten(lambda name, data: data * 1.02 if "norm" in name else None)
    mixed = engine.generate(fault=moved, seed=5)[0].plus(weight_versions=["1", "2"])
    far = mixed.with_logs([log - 1.5 for log in mixed.logs])
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", [*rows[1:], far]))
    assert (code, page["faults"]) == (0, [])
    assert [one["what"] for one in page["stages"][4]["skipped"]] == ["log-probs of 1 response"]
    assert "mixed" in page["stages"][4]["skipped"][0]["why"]


def test_trained_weights_are_not_a_fault_and_the_trainer_decides(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    def move(name: str, data: torch.Tensor) -> torch.Tensor | None:
        noise = torch.randn(data.shape, generator=torch.Generator().manual_seed(len(name)))
        return data + 1.1 * data.std() * noise if "mlp.experts" in name else None

    trained = rewritten(move)
    later = engine.generate(fault=trained, seed=9)
    dump = slime_dump(tmp_path / "7.pt", later, 7, weight_versions=["8"])
    code, page = judged(tmp_path / "open", "--rollout", slime_dump(tmp_path / "0.pt", rows), dump)
    assert (code, page["faults"]) == (125, [])
    assert "training explains that, and so would a bad sync" in said(page)
    train = train_dump(tmp_path / "train.pt", later, [engine.score(row.tokens, trained)[row.start :] for row in later])
    code, page = judged(tmp_path / "decided", "--rollout", tmp_path / "0.pt", dump, "--train", train)
    assert (code, page["faults"]) == (0, [])


def test_an_engine_that_leaves_the_trainer_later_on_is_a_fault_between_the_two(engine: Engine, tmp_path: Path) -> None:
    moved = rewritten(lambda name, data: data * 1.05 if "mlp.experts" in name else None)
    later = engine.generate(fault=GARBLED)
    dump = slime_dump(tmp_path / "7.pt", later, 7, weight_versions=["8"])
    train = train_dump(tmp_path / "train.pt", later, [engine.score(row.tokens, moved)[row.start :] for row in later])
    code, page = judged(tmp_path / "out", "--rollout", dump, "--train", train)
    assert (code, verdict(page)) == (1, [fault("rollout", None, "unknown") | {"between": ["candidate", "engine"]}])


def test_a_text_that_brings_its_own_bos_is_not_given_another(rows: list[Row], tmp_path: Path) -> None:
    """slime's prompts are rendered already: the template's BOS is the only one."""
    made = [replace(row, text=f"<bos>{row.text}") for row in rows[:3]]
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", made))
    assert (code, page["faults"]) == (0, [])
    assert "cleared: tokenisation and template" in said(page)
