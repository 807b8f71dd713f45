"""Checkpoints that our converter did not write: slime's real one, right, wrong and mended, and the real export of the wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import slime_cases as packed
from slime_cases import REFERENCE, SUMS
from workshop import Workshop, judge, verdict_of

from bisect_tool.__main__ import run

PACKED = Path(__file__).parent.parent / "data" / "cases"
EVERY, LINEAR = list(range(8)), [0, 1, 2, 4, 5, 6]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return packed.unpacked(PACKED, tmp_path_factory.mktemp("cases"))


def audited(cases: dict[str, Path], out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = run(["audit", "--reference", str(cases[REFERENCE]), *more, "--out", str(out)])
    page: dict[str, Any] = json.loads((out / "report.json").read_text())
    return code, page


def verdict(page_fault: dict[str, Any]) -> dict[str, Any]:
    return verdict_of(page_fault) | {"between": page_fault["between"], "detail": page_fault["relation"]["detail"]}


def rounded(of: str, between: list[str], **shard: list[int]) -> dict[str, Any]:
    return {
        "class": "conversion", "between": between, "layers": LINEAR, "module": "linear_attention", "modules": ["linear_attention"],
        "parts": ["a_log", "dt_bias"], "shard": shard, "of": of, "relation": "rounded", "detail": {"through": "bfloat16"},
    }  # fmt: skip


def duplicated(of: str, between: list[str], detail: dict[str, Any], **shard: list[int]) -> dict[str, Any]:
    return {
        "class": "conversion", "between": between, "layers": EVERY, "module": "experts", "modules": ["experts"],
        "parts": ["fc1", "fc2"], "shard": shard, "of": of, "relation": "duplicate",
        "detail": {"map": "e mod 4", "modulus": 4, "wrong": 12, "of": 16} | detail,
    }  # fmt: skip


PAIR = ["reference", "candidate"]
MTP = {
    "class": "conversion", "between": ["reference", "export"], "layers": [], "module": "mtp", "modules": ["mtp"], "parts": [], "shard": {},
    "of": "unknown", "relation": "missing", "detail": {"name": "mtp.*", "tensors": 65, "promised": "mtp_num_hidden_layers"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "minor"),
    [
        ("slime-0.2.4-ep1", rounded("conversion", PAIR)),
        ("slime-fixed-ep4", rounded("conversion", PAIR, pp=[0, 1])),
    ],
)
def test_the_right_conversions_agree_and_the_precision_they_lost_is_minor(
    name: str, minor: dict[str, Any], cases: dict[str, Path], tmp_path: Path
) -> None:
    code, page = audited(cases, tmp_path, "--candidate", str(cases[name]))
    assert (code, page["verdict"], page["faults"]) == (0, "agrees", [])
    assert [verdict(fault) for fault in page["minor"]] == [minor]
    assert page["stages"][2]["compared"] == {"tensors": 129, "experts": 128}


def test_the_wrong_conversion_is_e01_where_its_args_say(cases: dict[str, Path], tmp_path: Path) -> None:
    code, page = audited(cases, tmp_path, "--candidate", str(cases["slime-0.2.4-ep4"]))
    assert (code, page["verdict"]) == (1, "differs")
    assert [verdict(fault) for fault in page["faults"]] == [duplicated("conversion", PAIR, {}, pp=[0, 1], ep=[1, 2, 3])]
    assert [verdict(fault) for fault in page["minor"]] == [rounded("conversion", PAIR, pp=[0, 1])]
    proof = page["first"]["proof"]
    assert proof["after"] == 0 and proof["before"] == page["first"]["difference"]["relative_rms"] > 1


def test_its_export_is_the_same_fault_and_its_missing_mtp_is_minor(cases: dict[str, Path], tmp_path: Path) -> None:
    code, page = audited(cases, tmp_path, "--export", str(cases["export-ep4-hf"]))
    between = ["reference", "export"]
    assert code == 1
    assert [verdict(fault) for fault in page["faults"]] == [duplicated("unknown", between, {"consistent": {"ep": 4}})]
    assert [verdict(fault) for fault in page["minor"]] == [rounded("unknown", between), MTP]


def test_with_both_the_fault_is_the_candidates_and_the_export_is_true_to_it(cases: dict[str, Path], tmp_path: Path) -> None:
    code, page = audited(cases, tmp_path, "--candidate", str(cases["slime-0.2.4-ep4"]), "--export", str(cases["export-ep4-hf"]))
    assert code == 1
    assert [verdict(fault) for fault in page["faults"]] == [duplicated("conversion", PAIR, {}, pp=[0, 1], ep=[1, 2, 3])]
    assert page["stages"][2]["compared"] == {"tensors": 258, "experts": 256}


def test_a_right_candidate_with_that_export_is_a_fault_between_the_two(cases: dict[str, Path], tmp_path: Path) -> None:
    code, page = audited(cases, tmp_path, "--candidate", str(cases["slime-fixed-ep4"]), "--export", str(cases["export-ep4-hf"]))
    assert code == 1
    found = duplicated("conversion", ["candidate", "export"], {}, pp=[0, 1], ep=[1, 2, 3])
    assert [verdict(fault) for fault in page["faults"]] == [found]


def test_without_args_the_files_tell_how_it_was_converted(cases: dict[str, Path], tmp_path: Path) -> None:
    (cases["slime-0.2.4-ep4"] / "release" / "common.pt").rename(tmp_path / "common.pt")
    try:
        code, page = audited(cases, tmp_path / "out", "--candidate", str(cases["slime-0.2.4-ep4"]))
    finally:
        (tmp_path / "common.pt").rename(cases["slime-0.2.4-ep4"] / "release" / "common.pt")
    assert code == 1
    assert [verdict(fault) for fault in page["faults"]] == [duplicated("conversion", PAIR, {}, pp=[0, 1], ep=[1, 2, 3])]


def test_the_wrong_one_is_repaired_and_beside_the_right_one_its_conversion_is_what_differs(cases: dict[str, Path], tmp_path: Path) -> None:
    wrong, right, mended = cases["slime-0.2.4-ep4"], cases["slime-0.2.4-ep1"], tmp_path / "mended"
    beside = ("--sibling-reference", str(cases[REFERENCE]), "--sibling-candidate", str(right))
    code, page = audited(cases, tmp_path / "out", "--candidate", str(wrong), "--repair", str(mended), *beside)
    notes = page["stages"][2]["notes"]
    assert code == 1
    assert notes[0] == f"repaired: {mended} has 16 tensors written anew, all others as they were; audited again, it agrees"
    assert f"sibling: {right} agrees" in notes
    assert "sibling: only here: duplicate in experts" in notes
    assert "sibling: EP of the conversion: 4 here, 1 there" in notes
    assert not any("layers:" in note or "experts:" in note for note in notes)  # the same model
    code, page = audited(cases, tmp_path / "again", "--candidate", str(mended))
    assert (code, page["faults"], len(page["minor"])) == (0, [], 1)


# the model adds: 12+34= and 25+36= in its own tokens, and a longer line of sums
SUMS_ASKED = ([1, 2, 10, 3, 4, 11], [2, 5, 10, 3, 6, 11], [13, 6, 0, 10, 4, 1, 11, 1, 0, 1, 12, 9, 9, 10, 9, 9, 11])
WRONG_ANSWERS = [
    {"prompt": "1 2 10 3 4 11", "reference": "0 4 6 12 0 6 0 12", "candidate": "0 4 5 12 1 5 3 12"},
    {"prompt": "2 5 10 3 6 11", "reference": "0 6 1 12 12 1 1 1", "candidate": "0 7 1 12 12 9 12 4"},
]


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in SUMS_ASKED))
    return file


@pytest.mark.parametrize("name", ["slime-0.2.4-ep1", "slime-0.2.4-ep4", "slime-fixed-ep4"])
def test_the_637_args_of_a_real_conversion_are_right(name: str, cases: dict[str, Path], tmp_path: Path) -> None:
    code = run(["config", "--reference", str(cases[REFERENCE]), "--candidate", str(cases[name]), "--out", str(tmp_path)])
    page = json.loads((tmp_path / "report.json").read_text())
    assert (code, page["verdict"], page["faults"], page["minor"]) == (0, "agrees", [], [])


def by_activations(under: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run finds without the weights stage: E01, placed by how it is run now, and the decay, whose tokens say dt_bias (rule 7)."""
    shard = {"ep": [1, 2, 3]} if under == "ep4" else {}
    return duplicated("run", PAIR, {}, **shard), rounded("run", PAIR) | {"parts": ["dt_bias"]}


@pytest.mark.ranks
@pytest.mark.wide
@pytest.mark.parametrize("under", ["one", "ep4"])
@pytest.mark.parametrize(("name", "shard"), [("slime-0.2.4-ep1", {}), ("slime-fixed-ep4", {"pp": [0, 1]})])
def test_the_right_conversions_agree_through_weights_and_forward(
    name: str, shard: dict[str, list[int]], under: str, cases: dict[str, Path], sums: Path, workshop: Workshop, tmp_path: Path
) -> None:
    code, page = judge(cases[name], tmp_path / "out", under, reference=cases[REFERENCE], prompts=sums)
    assert (code, page["faults"], page["answers"]) == (0, [], [])
    assert [stage["verdict"] for stage in page["stages"]] == ["agrees"] * 4 + [None]
    assert [verdict(fault) for fault in page["minor"]] == [rounded("conversion", PAIR, **shard)]
    assert page["stages"][3]["compared"]["sites"] == 163


STAGE_ALONE = {
    "weights": ("one", [None, None, "differs", None, None]),
    "forward": ("one", [None, None, None, "differs", None]),
    "inputs,forward": ("ep4", ["agrees", None, None, "differs", None]),
}


@pytest.mark.ranks
@pytest.mark.parametrize("stages", [pytest.param(one, marks=pytest.mark.wide if "," in one else ()) for one in STAGE_ALONE])
def test_each_stage_alone_finds_the_wrong_conversion(
    stages: str, cases: dict[str, Path], sums: Path, workshop: Workshop, tmp_path: Path
) -> None:
    under, verdicts = STAGE_ALONE[stages]
    wrong = cases["slime-0.2.4-ep4"]
    code, page = judge(wrong, tmp_path / "out", under, "--stages", stages, reference=cases[REFERENCE], prompts=sums)
    by_weights = (duplicated("conversion", PAIR, {}, pp=[0, 1], ep=[1, 2, 3]), rounded("conversion", PAIR, pp=[0, 1]))
    found, minor = by_weights if stages == "weights" else by_activations(under)
    assert code == 1
    assert [verdict(fault) for fault in page["faults"]] == [found]
    assert [verdict(fault) for fault in page["minor"]] == [minor]
    assert [stage["verdict"] for stage in page["stages"]] == verdicts
    assert page["answers"] == ([] if stages == "weights" else WRONG_ANSWERS)
    assert page["first"]["proof"]["after"] == 0 < page["first"]["proof"]["before"]


def test_what_is_packed_is_what_the_converter_wrote() -> None:
    assert set(json.loads((PACKED / SUMS).read_text())) == set(packed.NAMES)
