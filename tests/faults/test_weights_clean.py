"""No clean checkpoint is called different: every layout, conversion, format and style, on either side of the audit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from weights_cases import LAYOUTS, WRITTEN, Verdict
from weights_edits import Audited, State, audit, copied, edited, quiet_padding
from weights_exports import FP8, both_styles, dequantised, exported, fused_mtp, in_fp8, one_by_one, power_of_two, without, wrong
from workshop import ROOT, Workshop

sys.path.insert(0, str(ROOT / "tests/data/make"))

from legacy import Layout, write_legacy

from bisect_tool.args import plain
from bisect_tool.checkpoint import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
DATA = ROOT / "tests/data"
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def agrees(found: Audited, minor: Sequence[Verdict] = (), tensors: int | None = None) -> Audited:
    assert (found.code, found.page["verdict"], found.faults, found.minor) == (0, "agrees", [], list(minor))
    if tensors is not None:
        assert found.stage["compared"]["tensors"] == tensors
    return found


def tensors_of(layout: str) -> int:
    """Megatron keeps in_proj and conv1d whole in the slime layout, in their parts in the native one."""
    return {"slime": 145, "native": 169}[layout]


@pytest.mark.ranks
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversion_agrees_and_so_does_its_export(layout: str, written: str, workshop: Workshop, tmp_path: Path) -> None:
    good = workshop.good(layout, written)
    found = agrees(audit(tmp_path / "report", "--candidate", good, "--export", exported(tmp_path / "export", one_by_one)))
    assert found.stage["compared"] == {"tensors": 2 * tensors_of(layout), "experts": 288}


@pytest.mark.ranks
def test_noise_in_the_padding_of_the_vocabulary_is_a_note(workshop: Workshop, tmp_path: Path) -> None:
    noisy = edited(workshop.good("slime", "tp2sp"), tmp_path / "noisy", quiet_padding)
    found = agrees(audit(tmp_path / "report", "--candidate", noisy))
    assert [f"{name} has 12 padding rows, not compared" in found.stage["notes"] for name in (EMBEDDING, HEAD)] == [True, True]


LEGACY = {
    "tp2": Layout(tp=2), "pp2": Layout(pp=2), "ep2": Layout(ep=2), "pp2vpp2": Layout(pp=2, vpp=2), "tp2ep2etp1": Layout(tp=2, ep=2, etp=1),
    "tp2etp1": Layout(tp=2, etp=1), "pp3+5": Layout(pp=2, pp_layers=(3, 5)),
}  # fmt: skip
# every way of writing in both checkpoint layouts and with both styles of experts
LEGACY_CELLS = [
    (layout, written, ("sequential", "grouped")[(i + j) % 2]) for i, layout in enumerate(LAYOUTS) for j, written in enumerate(LEGACY)
]


@pytest.mark.ranks
@pytest.mark.parametrize(("layout", "written", "experts"), LEGACY_CELLS)
def test_the_legacy_format_agrees(layout: str, written: str, experts: Any, workshop: Workshop, tmp_path: Path) -> None:
    good = open_checkpoint(workshop.good(layout, "one"))
    # as the distributed optimizer lays tensors out, and with MTP as 0.19 calls it
    more: dict[str, Any] = {"one_storage": True, "mtp_layer": "mtp_model_layer"} if experts == "grouped" else {}
    write_legacy(tmp_path / "legacy", dict(good.all()), plain(good.args), LEGACY[written], experts, **more)
    agrees(audit(tmp_path / "report", "--candidate", tmp_path / "legacy"), tensors=tensors_of(layout))


@pytest.mark.parametrize(("layout", "tensors"), [("slime", 66), ("native", 94)])
def test_what_megatron_core_0_19_saved_agrees(layout: str, tensors: int, tmp_path: Path) -> None:
    candidate = DATA / f"core-0.19.2-{layout}"
    sizes = {name: open_checkpoint(candidate).args[f"{name}_model_parallel_size"] for name in ("tensor", "expert")}
    assert sizes == {"slime": {"tensor": 1, "expert": 2}, "native": {"tensor": 2, "expert": 1}}[layout]
    agrees(audit(tmp_path / "report", "--candidate", candidate, reference=DATA / "reference-mini"), tensors=tensors)


STYLES = ("reference-mini", "hf-text", "hf-conditional", "hf-hub")
PROMISED = {"name": "mtp.*", "tensors": 41, "promised": "mtp_num_hidden_layers"}


@pytest.mark.parametrize("export", STYLES)
@pytest.mark.parametrize("reference", STYLES)
def test_the_styles_of_transformers_agree_with_each_other(reference: str, export: str, tmp_path: Path) -> None:
    minor = []
    if "hf-hub" in (reference, export) and reference != export:  # loaded and saved by transformers, which rounds them
        detail = {"through": "bfloat16"} | ({"side": "reference"} if reference == "hf-hub" else {})
        minor.append(wrong([0, 1, 2], "linear_attention", ["a_log", "dt_bias"], "rounded", detail))
    if reference == "reference-mini" and export != reference:
        minor.append(wrong([], "mtp", [], "missing", PROMISED))
    agrees(audit(tmp_path / "report", "--export", DATA / export, reference=DATA / reference), minor)


@pytest.mark.parametrize("edit", [fused_mtp, one_by_one, both_styles], ids=lambda edit: edit.__name__)
def test_every_style_of_experts_agrees(edit: Any, tmp_path: Path) -> None:
    found = agrees(audit(tmp_path / "report", "--export", exported(tmp_path / "export", edit)), tensors=169)
    again = [note for note in found.stage["notes"] if "hold again, with the same values, what is there one by one" in note]
    assert len(again) == (edit is both_styles)


@pytest.mark.ranks
def test_a_tied_reference_leaves_a_head_that_is_the_embedding_alone(workshop: Workshop, tmp_path: Path) -> None:
    tied = exported(tmp_path / "tied", without("lm_head."), config={"tie_word_embeddings": True}, tie_word_embeddings=True)
    good = workshop.good("slime", "one")
    found = agrees(
        audit(tmp_path / "report", "--candidate", edited(good, tmp_path / "same", copied(EMBEDDING, HEAD)), reference=tied), tensors=144
    )
    assert f"{HEAD} is the embedding once more: the reference ties the two" in found.stage["notes"]
    # V02 of a tied model: what is there is not the embedding
    stale = audit(tmp_path / "stale", "--candidate", good, reference=tied)
    expected = wrong([], "lm_head", [], "extra", {"name": HEAD}, between=["reference", "candidate"], of="conversion")
    assert (stale.code, stale.faults, stale.minor) == (1, [expected], [])


# -- FP8 ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ([in_fp8(), dequantised], "489 matrices of reference are FP8: compared as bfloat16 times their block scales"),
        ([in_fp8()], "489 matrices of reference are FP8: compared as bfloat16 times their block scales"),
        ([one_by_one], "what the reference's FP8 was made of: each of its codes is the nearest under its own scales"),
    ],
    ids=["dequantised", "fp8", "what it was made of"],
)
def test_an_fp8_reference_is_compared_dequantised(edits: list[Any], said: str, tmp_path: Path) -> None:
    reference = exported(tmp_path / "reference", in_fp8(), config=FP8)
    found = audit(tmp_path / "report", "--export", exported(tmp_path / "export", *edits, config=FP8), reference=reference)
    notes = agrees(found, tensors=169).stage["notes"]
    assert any(said in note for note in notes)
    assert any("codes is the nearest" in note for note in notes) == (edits == [one_by_one])


@pytest.mark.parametrize("scale", [lambda scale: scale, power_of_two], ids=["largest / 448", "powers of two"])
def test_a_right_fp8_export_is_the_reference_rounded_once(scale: Any, tmp_path: Path) -> None:
    found = audit(tmp_path / "report", "--export", exported(tmp_path / "export", in_fp8(scale, scale), config=FP8))
    said = "are the reference, each element as the nearest FP8 code under the export's own scales"
    assert sum(said in note for note in agrees(found, tensors=169).stage["notes"]) == 1


# -- layers stacked in one tensor -----------------------------------------------------------------------------------------------


def unstacked(expected: State) -> State:
    """Every tensor by the name it has where layers are apart."""
    found: State = {}
    for name, tensor in expected.items():
        before, layers, after = name.partition("layers.")
        found |= {f"{before}layers.{n}.{after}": one for n, one in enumerate(tensor)} if layers else {name: tensor}
    return found


def same_as(folder: Path, expected: State) -> None:
    checkpoint = open_checkpoint(folder)
    read = dict(checkpoint.all())
    assert set(read) == set(expected)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in expected.items())
    for name, stored in checkpoint.tensors.items():  # a few rows of one layer, and not those of the next
        assert torch.equal(checkpoint.tensor(name).rows(0, 1), expected[name][:1]), stored.on_disk
        assert torch.equal(checkpoint.tensor(name).rows(len(expected[name]) - 1, len(expected[name])), expected[name][-1:])


def test_stacked_layers_are_read_apart(tmp_path: Path) -> None:
    stacked = load_file(DATA / "stacked/expected.safetensors")
    same_as(DATA / "stacked", unstacked(stacked))
    # one chunk over all four layers, where megatron-core's stages wrote a chunk for each
    save(dict(stacked), storage_writer=FileSystemWriter(tmp_path / "one"), no_dist=True)
    same_as(tmp_path / "one", unstacked(stacked))
