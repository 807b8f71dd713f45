"""A trained checkpoint is no fault, and training hides none: one real optimizer step on the embedded model, and faults on top of it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import weights_edits as to
from bisect_hooks.hf import Reference
from weights_cases import BOTH, MODULES, Verdict, duplicate
from weights_edits import (
    EVERY,
    EXPERTS,
    FAMILY,
    FC1,
    FC2,
    FULL,
    LINEAR,
    PROJ,
    QKV,
    SHARED1,
    SHARED2,
    Audited,
    Edit,
    State,
    Work,
    audit,
    each,
    edited,
    taken,
)
from weights_exports import BASE, both_styles, dequantised, exported, in_fp8, one_by_one, reference
from workshop import REFERENCE, Workshop

from bisect_tool.hf_directory import canonical, read_config

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]
ITERATION = 7
LR = 2e-4


DIMS = FAMILY.reference_dimensions(read_config(REFERENCE))


@cache
def trained() -> State:
    """Every tensor of the reference after one step of AdamW, by its name on disk; MTP is not trained, as it is not without its loss."""
    model = Reference(REFERENCE, FAMILY, DIMS, torch.float32, torch.device("cpu")).model
    model.requires_grad_(True)
    ids = torch.randint(3, 250, (2, 48), generator=torch.Generator().manual_seed(2))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01).step()
    moved = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: moved[canonical(name)].to(tensor.dtype) if canonical(name) in moved else tensor for name, tensor in reference().items()}


def made_of(tensors: State, layout: str) -> State:
    """What the weight table makes of the tensors of a directory."""
    now = {canonical(name): tensor for name, tensor in tensors.items()}
    found: State = {}
    for rule in FAMILY.rules(DIMS, layout, tuple(now), mtp=True):  # type: ignore[arg-type]
        found |= rule.forward([now[one] for one in rule.references])
    return found


def put(work: Work, name: str, tensor: torch.Tensor) -> None:
    """In its place, with the padding of the vocabulary that is there."""
    work.tensors[name] = torch.cat([tensor, work.tensors[name][len(tensor) :]])


def after_training(layout: str) -> Edit:
    """What a conversion holds after the step."""

    def edit(work: Work) -> None:
        for name, tensor in made_of(trained(), layout).items():
            put(work, name, tensor)
        work.iteration = ITERATION

    return edit


def after_the_step(workshop: Workshop, layout: str, written: str) -> Path:
    """A conversion as it is after the step, made once."""
    key = ("trained", layout, written)
    if key not in workshop.made:
        workshop.made[key] = edited(workshop.good(layout, written), workshop.folder / "-".join(key), after_training(layout))
    return workshop.made[key]


def given_back(name: str) -> Edit:
    """One tensor as it was before the training."""
    return lambda work: put(work, name, made_of(reference(), "slime")[name])


def as_trained(_tensors: State) -> State:
    return dict(trained())


EVERY_MATRIX = ("linear_attention", "router", "experts", "shared_expert", "shared_expert_gate", "attention")
E01 = each((FC1, FC2), EVERY, taken([e % 4 for e in range(EXPERTS)]))
# the second query head of the second group, and the first
HEADS = [11 if unit == 10 else 10 if unit == 11 else unit for unit in range(20)]
TRAINED = re.compile(r"looks trained \(iteration 7, median relative difference 0\.\d+; 1\d\d of 1\d\d tensors moved\)")


def found_on_top(
    layers: Sequence[int], module: str | None, parts: Sequence[str], kind: str, detail: dict[str, Any], **more: Any
) -> dict[str, Any]:
    modules = more.pop("modules", [module])
    return {
        "class": "conversion", "between": ["reference", "candidate"], "layers": list(layers), "module": module, "modules": modules,
        "parts": list(parts), "shard": {}, "of": "conversion", "relation": kind, "detail": detail,
    } | more  # fmt: skip


def check_trained(found: Audited, *faults: Verdict) -> None:
    """Said to be trained, and a fault only where there is one."""
    assert found.faults == list(faults)
    assert found.minor == []
    assert (found.code, found.stage["verdict"]) == ((1, "differs") if faults else (125, "incomparable"))
    said = [note for note in found.stage["notes"] if TRAINED.search(note)]
    assert len(said) == 1 and said[0].startswith("not compared: ")


def test_the_step_is_a_small_one() -> None:
    moved = [
        float((trained()[name].float() - tensor.float()).norm() / tensor.float().norm())
        for name, tensor in reference().items()
        if not name.startswith("mtp.")
    ]
    assert 1e-3 < statistics.median(moved) < 1e-2


@pytest.mark.parametrize(("layout", "written"), [("slime", "ep4"), ("native", "one"), ("native", "tp2sp"), ("slime", "pp2")])
def test_training_is_no_fault_and_can_not_be_compared(layout: str, written: str, workshop: Workshop, tmp_path: Path) -> None:
    check_trained(audit(tmp_path / "report", "--candidate", after_the_step(workshop, layout, written)))


def one_element_moved(work: Work) -> None:
    """Each vector is what it was before the step, but for one element, as are the MLPs: most kinds that moved are vectors."""
    for name, tensor in made_of(reference(), "native").items():
        if tensor.dim() == 1:
            put(work, name, torch.cat([tensor[:1] + 0.25, tensor[1:]]))
        elif name.endswith((SHARED1, SHARED2, FC2)):
            put(work, name, tensor)


def test_one_element_of_each_vector_is_no_structure_of_a_trained_checkpoint(workshop: Workshop, tmp_path: Path) -> None:
    faulty = edited(after_the_step(workshop, "native", "one"), tmp_path / "moved", one_element_moved)
    found = audit(tmp_path / "report", "--candidate", faulty)
    assert (found.code, found.faults) == (125, [])
    assert any("looks trained" in note for note in found.stage["notes"])


ON_TOP: dict[str, tuple[str, str, Edit, dict[str, Any]]] = {
    "E01": ("slime", "ep4", E01, found_on_top(EVERY, "experts", BOTH, "duplicate", duplicate("e mod 4", 4, 12), shard={"ep": [1, 2, 3]})),
    "A03": (
        "slime", "one", each((QKV,), FULL, taken(to.units(to.NOT_REGROUPED, 32))),
        found_on_top(FULL, "attention", ["qkv"], "permutation", {"axis": 0, "unit": 32, "map": to.NOT_REGROUPED}),
    ),
    "two heads": (
        "slime", "tp2sp", each((QKV,), [3], taken(to.units(HEADS, 32))),
        found_on_top([3], "attention", ["qkv"], "permutation", {"axis": 0, "unit": 32, "map": HEADS}, shard={"tp": [1]}),
    ),
    "halves": ("slime", "tp2sp", each((SHARED1,), [2], lambda t: t.roll(56, 0)), found_on_top([2], "shared_expert", ["fc1"], "halves-swapped", {"axis": 0}, shard={"tp": [0, 1]})),
    "halves of experts": ("slime", "ep4", each((FC1,), [2], lambda t: t.roll(40, 1)), found_on_top([2], "experts", ["fc1"], "halves-swapped", {"axis": 1}, shard={"ep": [0, 1, 2, 3]})),
    "G01": ("native", "tp2sp", to.cut_evenly(to.IN_PROJ, LINEAR), found_on_top(LINEAR, "linear_attention", ["in_proj"], "even-cut", {"parts": 6, "size": 2}, shard={"tp": [0, 1]})),
    "L01": (
        "slime", "pp2", to.layers_of([0, 1, 2, 3], [4, 5, 6, 7]),
        found_on_top(
            [4, 5, 6, 7], None, ["qkv", "q_norm", "k_norm", "out_proj", "in_proj", "conv1d", "logits", "fc1", "fc2"], "other-layer",
            {"offset": -4}, shard={"pp": [1]}, modules=MODULES,
        ),
    ),
    "nan": ("slime", "one", each((SHARED2,), [1], to.filled(float("nan"))), found_on_top([1], "shared_expert", ["fc2"], "nan", {})),
    "nan in a head": (
        "slime", "tp2sp", each((QKV,), [7], to.rows_filled(352, 384, float("nan"))),
        found_on_top([7], "attention", ["qkv"], "nan", {"rows": [[352, 384]]}, shard={"tp": [1]}),
    ),
    "a zero expert": (
        "slime", "ep4", each((FC2,), [6], to.rows_filled(9, 10, 0.0)),
        found_on_top([6], "experts", ["fc2"], "zero", {"experts": [9], "wrong": 1, "of": 16}, shard={"ep": [2]}),
    ),
    "stale": ("slime", "tp2sp", given_back(f"decoder.layers.3.{PROJ}"), found_on_top([3], "attention", ["out_proj"], "stale", {"of": "reference"}, shard={"tp": [0, 1]})),
    "stale embedding": ("slime", "pp2", given_back(to.EMBEDDING), found_on_top([], "embedding", [], "stale", {"of": "reference"}, shard={"pp": [0]})),
    "dropped": ("slime", "one", to.dropped(["decoder.layers.5.mlp.router.weight"]), found_on_top([5], "router", ["logits"], "missing", {})),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_TOP)
def test_training_hides_no_fault(name: str, workshop: Workshop, tmp_path: Path) -> None:
    layout, written, fault, verdict = ON_TOP[name]
    faulty = edited(after_the_step(workshop, layout, written), tmp_path / "faulty", fault)
    check_trained(audit(tmp_path / "report", "--candidate", faulty), verdict)


def test_a_candidate_and_the_export_of_the_same_iteration_agree(workshop: Workshop, tmp_path: Path) -> None:
    candidate = after_the_step(workshop, "native", "tp2sp")
    found = audit(tmp_path / "report", "--candidate", candidate, "--export", exported(tmp_path / "export", as_trained, one_by_one))
    check_trained(found)
    assert all("reference-candidate" in note for note in found.stage["notes"] if "not compared: " in note)


@pytest.mark.parametrize(
    ("edit", "module", "parts"),
    [
        (lambda tensors: both_styles(tensors), "experts", BOTH),
        (lambda tensors: tensors | {f"{BASE}embed_tokens.weight": reference()[f"{BASE}embed_tokens.weight"]}, "embedding", []),
    ],
    ids=["E09", "V04"],
)
@pytest.mark.parametrize("beside", [False, True], ids=["export alone", "candidate and export"])
def test_an_export_that_kept_what_the_reference_held_is_stale(
    edit: Any, module: str, parts: Sequence[str], beside: bool, workshop: Workshop, tmp_path: Path
) -> None:
    export = exported(tmp_path / "export", as_trained, edit)
    expected = found_on_top(EVERY if module == "experts" else [], module, parts, "stale", {"of": "reference"})
    if beside:
        candidate = after_the_step(workshop, "slime", "one")
        check_trained(
            audit(tmp_path / "report", "--candidate", candidate, "--export", export), expected | {"between": ["candidate", "export"]}
        )
    else:
        found = audit(tmp_path / "report", "--export", export)
        assert (found.code, found.faults) == (1, [expected | {"between": ["reference", "export"], "of": "unknown"}])
        assert any("looks trained (an iteration that it does not say" in note for note in found.stage["notes"])


def test_fp8_of_every_matrix_is_a_rounding_and_no_training(tmp_path: Path) -> None:
    """Most tensors differ by a little, as after training; but one rule tells every byte of them."""
    found = audit(tmp_path / "report", "--export", exported(tmp_path / "export", in_fp8(which=lambda _name: True), dequantised))
    through = {"through": "float8_e4m3fn, one scale a block of 128"}
    assert found.code == 1
    assert [(fault["module"], fault["relation"], fault["detail"]) for fault in found.faults] == [
        (module, "rounded", through) for module in ("embedding", *EVERY_MATRIX, "lm_head", "mtp")
    ]
    assert not any("looks trained" in note for note in found.stage["notes"])
    unequal = [one for one in found.page["faults"] if one["difference"]["relative_rms"] > 0.05]
    assert unequal == []
