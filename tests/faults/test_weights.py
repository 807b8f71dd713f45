"""What files alone decide: every fault ends in its whole verdict and in nothing else, whatever it was planted in."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from weights_cases import CANNOT_EXIST, CASES, HALF, LATER, LAYOUTS, WRITTEN, Case, Verdict
from weights_edits import EVERY, FULL, LINEAR, Audited, Work, audit, edited
from weights_exports import EXPORTS, FP8, Export, exported, in_fp8, power_of_two, wrong
from workshop import REFERENCE, ROOT, Workshop

from bisect_tool.__main__ import run

# torch's own writer says that it works without ranks, which is what is wanted
pytestmark = pytest.mark.filterwarnings("ignore")

# alone: both layouts where one conversion can have it; else one layout, in the others it is one fault of a plate
ALONE = [
    (case, layout, case.alone)
    for i, case in enumerate(CASES)
    for layout in (case.layouts if case.plate == 0 else [LAYOUTS[i % len(LAYOUTS)]])
]
CELLS = [(layout, written) for layout in LAYOUTS for written in WRITTEN]
PLATES = [
    (plate, *cell)
    for plate in sorted({case.plate for case in CASES} - {0})
    for i, cell in enumerate(CELLS)
    if plate not in HALF or (i + i // len(WRITTEN)) % 2 == HALF[plate]
]


def name_of(value: object) -> str:
    return value.id if isinstance(value, (Case, Export)) else f"plate-{value}" if isinstance(value, int) else str(value)


def check(found: Audited, faults: Sequence[Verdict], minor: Sequence[Verdict] = (), *, order: bool = True) -> None:
    """Faults and minor findings are these, and no others; each says what to do and proves itself."""
    assert (found.faults if order else by_text(found.faults)) == (list(faults) if order else by_text(faults))
    assert (found.minor if order else by_text(found.minor)) == (list(minor) if order else by_text(minor))
    assert found.code == (1 if faults else 0)
    assert found.page["verdict"] == found.stage["verdict"] == ("differs" if faults else "agrees")
    for fault in [*found.page["faults"], *found.page["minor"]]:
        proof = fault["proof"]
        assert fault["explanation"] and fault["next"] and proof["experiment"] and proof["control"]
        assert "{" not in proof["control"]
        if isinstance(proof["before"], float) and proof["after"] is not None:
            assert proof["before"] > proof["after"]


def by_text(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return sorted(verdicts, key=str)


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "layout", "written"), ALONE, ids=name_of)
def test_a_fault_is_named_and_nothing_else_is(case: Case, layout: str, written: str, workshop: Workshop, tmp_path: Path) -> None:
    faulty = edited(workshop.good(layout, written), tmp_path / "faulty", case.edit(written))
    found = audit(tmp_path / "report", "--candidate", faulty, *case.flags)
    expected = case.verdicts(written)
    check(found, [] if case.minor else expected, expected if case.minor else [])


@pytest.mark.ranks
@pytest.mark.parametrize(("plate", "layout", "written"), PLATES, ids=name_of)
def test_faults_beside_each_other_are_told_apart_in_every_cell(
    plate: int, layout: str, written: str, workshop: Workshop, tmp_path: Path
) -> None:
    cases = [case for case in CASES if case.plate == plate]
    faulty = edited(workshop.good(layout, written), tmp_path / "faulty", *(case.edit(written) for case in cases))
    found = audit(tmp_path / "report", "--candidate", faulty)
    faults, minor = ([verdict for case in cases if case.minor == kind for verdict in case.verdicts(written)] for kind in (False, True))
    check(found, faults, minor, order=False)
    layers = [fault["layer"] for fault in found.page["faults"] if fault["layer"] is not None]
    assert layers == sorted(layers)
    assert found.page["first"] == found.page["faults"][0]


def test_every_cell_holds_a_fault_or_says_why_not() -> None:
    for case in CASES:
        assert case.alone in case.written and set(case.layouts) <= set(LAYOUTS) and set(case.written) <= set(WRITTEN)
        if set(case.written) != set(WRITTEN) or set(case.layouts) != set(LAYOUTS):
            assert case.plate == 0 and any(case.id.partition("-")[0] in why for why in CANNOT_EXIST), case.id
    assert len({case.id for case in CASES}) == len(CASES)
    assert all(CANNOT_EXIST.values()) and all(LATER.values())


@pytest.mark.ranks
@pytest.mark.parametrize("case", [pytest.param(one, id=one.id) for one in EXPORTS if one.candidate is not None])
def test_a_fault_of_the_export_lies_between_the_candidate_and_it(case: Export, workshop: Workshop, tmp_path: Path) -> None:
    assert case.candidate is not None
    export = exported(tmp_path / "export", *case.edits, **case.text)
    found = audit(tmp_path / "report", "--candidate", workshop.good(*case.candidate), "--export", export)
    check(found, case.faults, case.minor)


@pytest.mark.parametrize("case", [pytest.param(one, id=one.id) for one in EXPORTS if one.candidate is None])
def test_a_fault_of_an_export_is_named_and_nothing_else_is(case: Export, tmp_path: Path) -> None:
    found = audit(tmp_path / "report", "--export", exported(tmp_path / "export", *case.edits, **case.text))
    check(found, case.faults, case.minor)


POWERS = {"through": "powers of two (the scales of FP8 blocks)"}
Q02 = [
    wrong(LINEAR, "linear_attention", ["in_proj", "out_proj"], "rounded", POWERS),
    wrong(EVERY, "experts", ["fc1", "fc2"], "rounded", POWERS),
    wrong(EVERY, "shared_expert", ["fc1", "fc2"], "rounded", POWERS),
    wrong(FULL, "attention", ["qkv", "out_proj"], "rounded", POWERS),
    wrong([], "mtp", ["layer"], "rounded", POWERS),
]


@pytest.mark.parametrize("reference", ["bfloat16", "fp8"])
def test_q02_scales_that_were_rounded_beside_codes_that_were_not(reference: str, tmp_path: Path) -> None:
    export = exported(tmp_path / "export", in_fp8(shown=power_of_two), config=FP8)
    sides: dict[str, Any] = {"reference": exported(tmp_path / "fp8", in_fp8(), config=FP8)} if reference == "fp8" else {}
    check(audit(tmp_path / "report", "--export", export, **sides), Q02)


@pytest.mark.ranks
def test_flags_that_contradict_the_args_place_the_fault_and_are_told(workshop: Workshop, tmp_path: Path) -> None:
    found = audit(tmp_path / "report", "--candidate", workshop.faulty("slime", "ep4", "E01"), "--ep", "2")
    assert [fault["shard"]["ep"] for fault in found.page["faults"]] == [[0, 1]]
    assert found.stage["notes"][0] == "the flags say that it was converted at ep 2, its args at ep 4: placed by the flags"


GOOD = ROOT / "golden/tiny-qwen3.5-moe-torch_dist"


def beyond(work: Work) -> None:
    """The last layer once more, as a layer that the model does not have."""
    last = {key: one for key, one in work.tensors.items() if key.startswith("decoder.layers.7.")}
    work.tensors |= {key.replace("layers.7.", "layers.8."): one.clone() for key, one in last.items()}


def of_another_model(work: Work) -> None:
    """Every tensor as another seed would have it."""
    torch.manual_seed(7)
    for key, one in work.tensors.items():
        work.tensors[key] = torch.randn_like(one.float()).to(one.dtype)


def test_a_layer_beyond_the_last_is_one_fault_there(tmp_path: Path) -> None:
    found = audit(tmp_path / "report", "--candidate", edited(GOOD, tmp_path / "faulty", beyond))
    (fault,) = found.page["faults"]
    assert (fault["class"], fault["layers"], fault["relation"]["kind"]) == ("conversion", [8], "extra")
    assert fault["relation"]["detail"] == {"name": "decoder.layers.8.*", "tensors": 12, "layers": 8}
    assert "config.json says 8 layers" in fault["explanation"] and fault["next"].endswith("?")


def test_a_checkpoint_of_another_model_is_called_that(tmp_path: Path) -> None:
    found = audit(tmp_path / "report", "--candidate", edited(GOOD, tmp_path / "other", of_another_model))
    assert found.code == 1
    assert re.fullmatch(r"not one of \d+ matrices of the candidate is the reference's, .*: another model\?", found.stage["notes"][0])


def test_a_reference_kept_in_float16_is_less_than_the_candidate(tmp_path: Path) -> None:
    narrow = tmp_path / "narrow"
    shutil.copytree(REFERENCE, narrow)
    file = next(narrow.glob("*.safetensors"))
    save_file({name: one.half() if one.dtype == torch.bfloat16 else one for name, one in load_file(file).items()}, file)
    assert run(["audit", "--reference", str(narrow), "--candidate", str(GOOD), "--out", str(tmp_path / "out")]) == 0
    page = json.loads((tmp_path / "out/report.json").read_text())
    assert page["verdict"] == "agrees" and page["minor"] == []
    assert any("float16 was rounded from" in note for note in page["stages"][2]["notes"])
