"""E01 and G01 planted by hand, through torch's own distributed checkpoint API, into what megatron-core's own save wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import HOME
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from workshop import REFERENCE, Workshop, judge, verdict_of

from bisect_tool.__main__ import run

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]
State = dict[str, torch.Tensor]


def local_expert_numbers(state: State) -> None:
    for key in [key for key in state if key.startswith("decoder.") and ".mlp.experts.experts.linear_fc" in key]:
        state[key] = state[key][[e % 4 for e in range(16)]].clone()


def even_cut(state: State) -> None:
    for first in [key for key in state if key.endswith(".self_attention.in_proj.weight.query")]:
        parts = [first.removesuffix("query") + part for part in ("query", "key", "value", "z", "beta", "alpha")]
        rows = [state[part].shape[0] for part in parts]
        packed = torch.cat([state[part] for part in parts])
        halves = packed[: len(packed) // 2], packed[len(packed) // 2 :]
        for i, part in enumerate(parts):
            start = sum(rows[:i]) // 2
            state[part] = torch.cat([half[start : start + rows[i] // 2] for half in halves]).clone()


def rewrite(good: Path, out: Path, edit: Callable[[State], None]) -> Path:
    """Every tensor through dcp.load and dcp.save: other chunks, other files, no byte entries; common state as it was."""
    source = good / "release"
    described = FileSystemReader(source).read_metadata().state_dict_metadata
    state: State = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(source), no_dist=True)
    edit(state)
    save(state, storage_writer=FileSystemWriter(out), no_dist=True)
    for name in ("common.pt", "metadata.json"):
        shutil.copy(source / name, out / name)
    return out


@pytest.mark.parametrize(
    ("layout", "written", "edit", "case"),
    [("slime", "ep4", local_expert_numbers, "E01-slime-ep4"), ("native", "tp2sp", even_cut, "G01-native-tp2")],
    ids=["E01", "G01"],
)
def test_a_fault_edited_in_through_the_raw_api_is_the_same_fault(
    layout: str, written: str, edit: Callable[[State], None], case: str, workshop: Workshop, tmp_path: Path
) -> None:
    faulty = rewrite(workshop.good(layout, written), tmp_path / "faulty", edit)
    out = tmp_path / "report"
    assert run(["audit", "--reference", str(REFERENCE), "--candidate", str(faulty), "--out", str(out)]) == 1
    page = json.loads((out / "report.json").read_text())
    expected = next(one.expected for one in HOME if one.id == case)
    assert [verdict_of(fault) for fault in page["faults"]] == list(expected)


def test_rewriting_alone_is_no_fault(workshop: Workshop, tmp_path: Path) -> None:
    same = rewrite(workshop.good("slime", "ep4"), tmp_path / "same", lambda _state: None)
    assert run(["audit", "--reference", str(REFERENCE), "--candidate", str(same), "--out", str(tmp_path / "report")]) == 0


def test_a_wrong_head_and_a_wrong_convolution_are_two_faults_by_activations_alone(workshop: Workshop, tmp_path: Path) -> None:
    def edit(state: State) -> None:
        state["output_layer.weight"][7] *= 2
        state["decoder.layers.2.self_attention.linear_attn.conv1d.weight"][3] *= 2

    faulty = rewrite(workshop.good("slime", "one"), tmp_path / "faulty", edit)
    code, page = judge(faulty, tmp_path / "report", "one", "--stages", "inputs,forward")
    assert code == 1
    found = [(fault["class"], fault["module"], fault["parts"], fault["layers"]) for fault in page["faults"]]
    assert found == [("conversion", "linear_attention", ["conv1d"], [2]), ("conversion", "lm_head", [], [])]
