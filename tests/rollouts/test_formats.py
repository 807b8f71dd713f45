"""Every format that rollouts are saved in, read as it is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_room import MODEL, Engine, Row, experts_mod, judged, rewritten, said, slime_dump, slime_sample, verdict

from bisect_tool.rollouts.dumps import join_train, read_rollout
from bisect_tool.rollouts.evidence import files
from bisect_tool.rollouts.lines import read_lines
from bisect_tool.rollouts.sample import Sample


def no_text(text: Any, opens: bool) -> list[int]:
    raise AssertionError(f"{text!r} had to be encoded")


def only(path: Path, said: dict[str, Any]) -> Sample:
    path.write_text(json.dumps(said) + "\n")
    ((sample,), prompts, empty) = read_lines(path, no_text)
    assert (prompts, empty) == ([], [])
    return sample


def test_slimes_samples(rows: list[Row], tmp_path: Path) -> None:
    made = slime_dump(tmp_path / "3.pt", rows, 3, weight_versions=["4", "4"], metadata={"dp_rank": 2})
    sample = read_rollout(made)[0][0]
    assert (sample.tokens, sample.start, sample.prompt) == (rows[0].tokens, rows[0].start, rows[0].text)
    assert sample.decode == pytest.approx(rows[0].logs)
    assert (sample.rollout, sample.versions, sample.engine, sample.mixed, sample.age) == (3, ("4", "4"), "2", False, (4, ""))
    assert (sample.cached, sample.drafted) == (0, (False,) * sample.length)


def test_miles_keeps_numpy_and_other_classes_in_its_samples(rows: list[Row], tmp_path: Path) -> None:
    """Routed experts as an array, log-probs as an array or as numpy's scalars; nothing of it is run."""
    one = slime_sample(rows[0], 0, rollout_routed_experts=np.zeros((4, 8, 4), dtype=np.int32), rollout_log_probs=np.array(rows[0].logs))
    two = slime_sample(rows[1], 1, rollout_log_probs=[np.float32(log) for log in rows[1].logs], multimodal_inputs={"at": Path("x")})
    three = slime_sample(rows[2], 2, rollout_log_probs=torch.tensor(rows[2].logs), tokens=torch.tensor(rows[2].tokens))
    torch.save({"rollout_id": 0, "samples": [one, two, three]}, tmp_path / "0.pt")
    for sample, row in zip(read_rollout(tmp_path / "0.pt")[0], rows, strict=False):
        assert sample.tokens == row.tokens and sample.decode == pytest.approx(row.logs, rel=1e-5)


def test_what_a_tool_wrote_has_no_log_prob(rows: list[Row], tmp_path: Path) -> None:
    mask = [1] * 10 + [0] * 5 + [1] * 5
    logs = [log if keep else 0.0 for log, keep in zip(rows[0].logs, mask, strict=True)]
    sample = read_rollout(slime_dump(tmp_path / "0.pt", [rows[0].with_logs(logs)], loss_mask=mask))[0][0]
    assert [one is None for one in sample.decode] == [not keep for keep in mask]


def test_aborted_samples_are_left_out(rows: list[Row], tmp_path: Path) -> None:
    torch.save({"samples": [slime_sample(rows[0], 0), slime_sample(rows[1], 1, response_length=0, status="aborted")]}, tmp_path / "0.pt")
    samples, empty = read_rollout(tmp_path / "0.pt")
    assert (len(samples), empty) == (1, ["0.pt sample 1"])


def test_train_dumps_old_and_new_are_joined_by_ids(rows: list[Row], tmp_path: Path) -> None:
    samples, _ = read_rollout(slime_dump(tmp_path / "0.pt", rows))
    logs = [torch.arange(len(row.answer), dtype=torch.float32) - i for i, row in enumerate(rows)]
    for rank in range(2):  # before format 2: one file a data parallel rank
        own = list(range(rank, len(rows), 2))
        data = {"tokens": [torch.tensor(rows[i].tokens) for i in own], "log_probs": [logs[i] for i in own], "rewards": [0.0] * len(own)}
        torch.save({"rollout_id": 0, "rank": rank, "rollout_data": data}, tmp_path / f"train_{rank}.pt")
    joined, spare = join_train(samples, [tmp_path / "train_0.pt", tmp_path / "train_1.pt"])
    assert spare == 0
    assert [sample.trained for sample in joined] == [tuple(one.tolist()) for one in logs]


def test_plain_lines(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    plain = {"prompt_ids": [1, 5], "response_ids": [6, 7], "logprobs": [-0.5, None], "rollout_id": 2, "engine": 3, "weight_version": 9}
    sample = only(path, plain)
    assert (sample.tokens, sample.start, sample.decode, sample.rollout, sample.engine, sample.versions) == (
        (1, 5, 6, 7),
        2,
        (-0.5, None),
        2,
        "3",
        ("9",),
    )
    whole = only(
        path,
        {"tokens": [1, 5, 6, 7], "response_length": 2, "prefill_logprobs": [-1, -2], "prompt_logprobs": [-3], "old_log_probs": [-4, -5]},
    )
    assert (whole.prefill, whole.trained, whole.decode) == ((None, -3.0, -1.0, -2.0), (-4.0, -5.0), ())
    sglang = only(path, {"input_ids": [1, 5], "output_token_logprobs": [[-0.1, 6, None], [-0.2, 7, "x"]]})
    assert (sglang.tokens, sglang.decode) == ((1, 5, 6, 7), (-0.1, -0.2))
    openai = only(path, {"prompt_token_ids": [1, 5], "token_ids": [6], "logprobs": {"tokens": ["a"], "token_logprobs": [-0.3]}})
    assert (openai.tokens, openai.decode) == ((1, 5, 6), (-0.3,))


def verl(path: Path, engine: Engine, rows: list[Row], step: int) -> Path:
    """verl's rollout_data_dir: one file a step; text without special tokens, and no log-probs."""
    said = [
        {"input": row.text, "output": engine.tokenizer.text(row.answer), "gts": "46", "score": 1.0, "step": step, "acc": True}
        for row in rows
    ]
    (path / f"{step}.jsonl").write_text("\n".join(json.dumps(one, ensure_ascii=False) for one in said) + "\n")
    return path


def test_verls_text_shows_no_garbling_and_can_show_no_more(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    code, page = judged(tmp_path / "out", "--rollout", verl(folder, engine, rows, 1))
    assert (code, page["verdict"], page["faults"]) == (125, "incomparable", [])
    assert "have no log-probs of the engine" in said(page) and "--server URL" in said(page)


def test_verls_text_that_is_garbled_from_the_second_step_on(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    verl(folder, engine, rows, 1)
    verl(folder, engine, engine.generate(fault=rewritten(experts_mod(2)), seed=3, temperature=1.5), 2)
    code, page = judged(tmp_path / "out", "--rollout", folder)
    assert code == 1
    assert [(one["class"], one["relation"]) for one in verdict(page)] == [("rollout", "unknown")]
    assert page["first"]["relation"]["detail"]["seen"] == "sync" and page["first"]["relation"]["detail"]["from"] == 1


def test_a_directory_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for name in ("10.jsonl", "9.jsonl", "eval_0.pt", "notes.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in files([tmp_path])] == ["eval_0.pt", "9.jsonl", "10.jsonl"]


def test_samples_can_be_fewer_and_the_rest_is_listed(rows: list[Row], tmp_path: Path) -> None:
    code, page = judged(tmp_path / "out", "--rollout", slime_dump(tmp_path / "0.pt", rows), "--samples", "3")
    assert (code, page["stages"][4]["compared"]["responses"]) == (0, 3)
    assert {"what": "5 of 8 responses", "why": "left out by --samples"} in page["stages"][4]["skipped"]


def test_several_files_behind_one_option(rows: list[Row], tmp_path: Path) -> None:
    first, second = slime_dump(tmp_path / "0.pt", rows[:4]), slime_dump(tmp_path / "1.pt", rows[4:])
    code, page = judged(tmp_path / "out", "--rollout", first, second)
    assert (code, page["stages"][4]["compared"]["responses"]) == (0, 8)


def test_without_a_tokenizer_ids_are_shown_as_ids(engine: Engine, rows: list[Row], tmp_path: Path) -> None:
    import shutil

    from bisect_tool.__main__ import run

    bare = tmp_path / "bare"
    shutil.copytree(MODEL, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    dump = slime_dump(tmp_path / "0.pt", [replace(row, text="") for row in rows])
    assert run(["rollout", "--reference", str(bare), "--rollout", str(dump), "--out", str(tmp_path / "out")]) == 0
    page = json.loads((tmp_path / "out/report.json").read_text())
    assert {"what": "tokenisation", "why": "the reference has no tokenizer"} in page["stages"][4]["skipped"]
