"""Rollouts on the ladder: what the other stages know decides whose fault an engine's is, and one fault is said once."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import foreign_dumps
import pytest
import torch
from engine_room import END, MODEL, ROOT, Engine, experts_mod, fault_of, halves_swapped, rewritten, said, slime_dump, times
from safetensors.torch import load_file, save_file
from written import Errors, Written

from bisect_tool.__main__ import run
from bisect_tool.importing import import_dump

pytestmark = [pytest.mark.wide, pytest.mark.ranks]
GOOD = ROOT / "golden/tiny-qwen3.5-moe-torch_dist"
ROW = (1, 25, 13, 26, 31, 7, 8, 11, 14, 9, 21, 30, 12, 5)
GARBLED = rewritten(experts_mod(4))
EVERY = list(range(8))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("faulty") / "e01"
    assert run(["plant", "E01", "--candidate", str(GOOD), "--out", str(out), "--ep", "4"]) == 0
    yield out


def climbed(out: Path, *arguments: str | Path, reference: Path = MODEL) -> tuple[int, dict[str, Any]]:
    base = ["run", "--prompts", str(ROOT / "golden/prompts.jsonl"), "--reference", str(reference)]
    code = run([*base, *map(str, arguments), "--out", str(out)])
    page: dict[str, Any] = json.loads((out / "report.json").read_text())
    return code, page


def heads(name: str, data: torch.Tensor) -> torch.Tensor | None:
    return data.roll(len(data) // 2, 0) if name.endswith("v_proj.weight") else None


def clears(page: dict[str, Any]) -> set[str]:
    return {one["suspect"] for one in page["cleared"]}


def test_a_right_engine_agrees_with_candidate_and_reference(engine: Engine, tmp_path: Path) -> None:
    dump = slime_dump(tmp_path / "0.pt", engine.generate())
    code, page = climbed(tmp_path / "out", "--candidate", GOOD, "--rollout", dump)
    assert (code, page["faults"], [stage["verdict"] for stage in page["stages"]]) == (0, [], ["agrees"] * 5)
    assert "engine decode - candidate" in page["stages"][4]["probes"][0]
    assert clears(page) >= {"the conversion", "the model's definition", "the engine's decode", "tokenisation and template"}


@pytest.mark.parametrize("flags", [("--tp", "2", "--sp"), ("--ep", "2"), ("--pp", "2")], ids=lambda flags: " ".join(flags))
def test_the_candidate_scores_under_a_layout_what_it_scores_on_one_rank(flags: tuple[str, ...], engine: Engine, tmp_path: Path) -> None:
    dump = slime_dump(tmp_path / "0.pt", engine.generate()[:3])
    code, page = climbed(tmp_path / "out", "--candidate", GOOD, "--rollout", dump, "--stages", "engine", *flags)
    distances = dict(re.findall(r"(engine decode - candidate|candidate - reference) ([\d.e+-]+)", page["stages"][4]["probes"][0]))
    assert code == 0 and set(distances) == {"engine decode - candidate", "candidate - reference"}
    assert max(map(float, (one.rstrip(",") for one in distances.values()))) < 1e-4


def test_an_engine_that_says_what_the_faulty_candidate_says_shows_its_fault_and_has_none(
    engine: Engine, faulty: Path, tmp_path: Path
) -> None:
    dump = slime_dump(tmp_path / "0.pt", engine.generate(fault=GARBLED))
    stages = ("--stages", "config,weights,engine", "--all-stages")
    code, page = climbed(tmp_path / "out", "--candidate", faulty, "--rollout", dump, *stages)
    assert (code, [fault_of(one)[:3] for one in page["faults"]]) == (1, [("conversion", EVERY, "experts")])
    assert page["stages"][4]["verdict"] == "differs"
    assert "they show the conversion fault at layers.0.experts.fc1" in said(page)
    assert "the engine" in clears(page) and "the conversion" not in clears(page)


def test_without_the_weights_stage_the_candidate_clears_the_engine_and_the_audit_is_named(
    engine: Engine, faulty: Path, tmp_path: Path
) -> None:
    dump = slime_dump(tmp_path / "0.pt", engine.generate(fault=GARBLED))
    code, page = climbed(tmp_path / "out", "--candidate", faulty, "--rollout", dump, "--stages", "engine")
    first = page["first"]
    assert (code, first["class"], first["between"]) == (1, None, ["reference", "candidate"])
    assert first["class_candidates"] == ["conversion", "model-definition", "parallel"]
    assert f"bisect-tool audit --reference {MODEL} --candidate {faulty}" in first["next"] and "the engine" in clears(page)


def test_the_run_stops_before_the_engine_where_the_weights_are_at_fault(engine: Engine, faulty: Path, tmp_path: Path) -> None:
    dump = slime_dump(tmp_path / "0.pt", engine.generate(fault=GARBLED))
    code, page = climbed(tmp_path / "out", "--candidate", faulty, "--rollout", dump)
    assert (code, page["stages"][4]["verdict"]) == (1, None)
    assert page["stages"][4]["skipped"][0]["why"] == "the weights stage found a fault; --all-stages goes on"


def test_w08_is_of_the_engine_where_the_weights_stage_cleared_the_conversion(engine: Engine, tmp_path: Path) -> None:
    dump = slime_dump(tmp_path / "0.pt", engine.generate(fault=rewritten(heads)))
    code, page = climbed(tmp_path / "out", "--candidate", GOOD, "--rollout", dump, "--stages", "weights,engine")
    assert (code, [fault_of(one)[0] for one in page["faults"]]) == (1, ["rollout"])
    assert "the conversion" in clears(page)
    assert f"--candidate {GOOD} --rollout {dump} --hashes ENGINE_HASHES" in page["first"]["next"]


def test_a_temperature_of_some_responses_is_found_where_everything_else_agrees(engine: Engine, tmp_path: Path) -> None:
    hot = engine.generate(temperature=0.8)
    made = [hot[i] if i in (1, 4, 6) else row for i, row in enumerate(engine.generate())]
    code, page = climbed(
        tmp_path / "out", "--candidate", GOOD, "--rollout", slime_dump(tmp_path / "0.pt", made), "--stages", "weights,engine"
    )
    assert (code, [fault_of(one) for one in page["faults"]]) == (1, [("rollout-config", [], "lm_head", [], ["reference", "engine"])])
    assert page["first"]["relation"]["detail"]["wrong"] == 3 and page["stages"][2]["verdict"] == "agrees"


def test_a_masked_stop_token_keeps_the_run_from_agreeing(engine: Engine, tmp_path: Path) -> None:
    made = [replace(row, tokens=(*row.tokens[:-1], END)) for row in engine.generate()]
    made = [row.with_logs(engine.score(row.tokens)[row.start :].tolist()).plus(loss_mask=[1] * 19 + [0]) for row in made]
    code, page = climbed(
        tmp_path / "out", "--candidate", GOOD, "--rollout", slime_dump(tmp_path / "0.pt", made), "--stages", "weights,engine"
    )
    assert (code, page["verdict"], page["faults"]) == (125, "incomparable", [])
    assert "open: 8 of 8 responses end with a stop token that the loss mask leaves out" in said(page)


def test_an_engine_fault_beside_a_conversion_fault_is_a_second_one(engine: Engine, faulty: Path, tmp_path: Path) -> None:
    dump = slime_dump(tmp_path / "0.pt", engine.generate(fault=times(4, ".mlp")))
    stages = ("--stages", "weights,engine", "--all-stages")
    code, page = climbed(tmp_path / "out", "--candidate", faulty, "--rollout", dump, *stages)
    assert (code, [fault_of(one)[0] for one in page["faults"]]) == (1, ["conversion", "rollout"])


def test_an_export_that_equals_the_reference_clears_the_conversion(engine: Engine, tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "export")
    dump = slime_dump(tmp_path / "0.pt", engine.generate(fault=rewritten(heads)))
    code, page = climbed(tmp_path / "out", "--export", tmp_path / "export", "--rollout", dump, "--stages", "weights,engine")
    assert (code, [fault_of(one)[0] for one in page["faults"]]) == (1, ["rollout"])
    assert any(one["suspect"] == "the conversion" and "of the export equal the reference" in one["why"] for one in page["cleared"])


def test_an_engine_that_serves_a_faulty_export_shows_its_fault_and_has_none(engine: Engine, tmp_path: Path) -> None:
    """The checkpoint is right, the export is not (halves exchanged), and the engine computes what it was given."""
    shutil.copytree(MODEL, tmp_path / "export")
    for file in (tmp_path / "export").glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: swapped(name, tensor) for name, tensor in tensors.items()}, file, {"format": "pt"})
    dump = slime_dump(tmp_path / "0.pt", engine.generate(fault=rewritten(halves_swapped)))
    arguments = ("--candidate", GOOD, "--export", tmp_path / "export", "--rollout", dump)
    code, page = climbed(tmp_path / "out", *arguments, "--stages", "weights,engine", "--all-stages")
    assert code == 1 and {one["class"] for one in page["faults"]} == {"conversion"}
    assert all("export" in one["between"] for one in page["faults"])
    assert "what the export says" in said(page) and "the engine" in clears(page)


def swapped(name: str, tensor: torch.Tensor) -> torch.Tensor:
    made = halves_swapped(name, tensor) if "mtp" not in name else None
    return tensor if made is None else made.contiguous()


def test_rollouts_alone_leave_the_class_open_and_name_the_piece(engine: Engine, tmp_path: Path) -> None:
    dump = slime_dump(tmp_path / "0.pt", engine.generate(fault=rewritten(heads)))
    code, page = climbed(tmp_path / "out", "--rollout", dump)
    assert (code, page["first"]["class"], page["first"]["class_candidates"]) == (1, None, ["conversion", "rollout"])
    assert f"--rollout {dump} --train TRAIN_DUMP decides it" in page["first"]["next"]


def recorded(folder: Path, errors: Errors) -> Path:
    written = Written(MODEL)
    foreign_dumps.sglang(folder / "dump", written.run([ROW], errors), [ROW], written.dims)
    import_dump("sglang", folder / "dump", folder / "recording", MODEL)
    return folder / "recording"


def scaled(name: str, value: torch.Tensor) -> torch.Tensor | None:
    """G05: k, v and z are de-quantised with the scale of q."""
    if "linear_attn.in_proj_z" in name:
        return value * 1.7
    if "linear_attn.in_proj_qkv" in name:
        rows = value.clone()
        rows[64:128] *= 0.6
        rows[128:] *= 1.3
        return rows
    return None


def one_projection(name: str, value: torch.Tensor) -> torch.Tensor | None:
    return value * 1.05 if "layers.4.linear_attn.in_proj_z" in name else None


ACTIVATIONS = {
    "E01": (experts_mod(4), True, ("conversion", EVERY, "experts")),
    "one projection": (one_projection, False, ("rollout", [4], "linear_attention")),
    "G05": (scaled, False, ("rollout", [0], "linear_attention")),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_engines_activations_are_held_against_the_candidates(name: str, faulty: Path, tmp_path: Path) -> None:
    change, own, expected = ACTIVATIONS[name]

    def weight(one: str, value: torch.Tensor) -> torch.Tensor:
        made = change(one, value)
        return value if made is None else made

    recording = recorded(tmp_path, Errors(weight=weight))
    stages = ("--stages", "weights,engine", "--all-stages")
    code, page = climbed(tmp_path / "out", "--candidate", faulty if own else GOOD, "--rollout-recording", recording, *stages)
    assert (code, fault_of(page["first"])[:3]) == (1, expected)
    assert {one["class"] for one in page["faults"]} == {expected[0]}
    rows = [" ".join(probe.split()[:5]) for probe in page["stages"][4]["probes"]]
    assert rows[0] == "engine prefill against reference: differs," and len(rows) == 3
    assert ("the engine" in clears(page)) == own and page["stages"][4]["verdict"] == "differs"
