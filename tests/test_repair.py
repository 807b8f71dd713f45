"""A repaired copy holds what reference and table say, everything else byte by byte; what can't be repaired or written leaves nothing."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bisect_hooks.errors import UsageError
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from bisect_tool.__main__ import run
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.compare import same_bytes
from bisect_tool.pickles import load_pickle
from bisect_tool.planting import plant
from bisect_tool.rewrite import Rewriting, without_path

ROOT = Path(__file__).parent.parent
REFERENCE, GOOD = ROOT / "golden" / "tiny-qwen3.5-moe", ROOT / "golden" / "tiny-qwen3.5-moe-torch_dist"
QKV, HEAD = "decoder.layers.3.self_attention.linear_qkv.weight", "output_layer.weight"
Edit = Callable[[Rewriting], None]


@pytest.fixture
def faulty(tmp_path: Path) -> Callable[[Edit], Path]:
    def made(edit: Edit) -> Path:
        shutil.copytree(GOOD, tmp_path / "faulty")
        rewriting = Rewriting(tmp_path / "faulty" / "release")
        edit(rewriting)
        rewriting.finish()
        return tmp_path / "faulty"

    return made


def audit(candidate: Path, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = run(["audit", "--reference", str(REFERENCE), "--candidate", str(candidate), "--out", str(out), *more])
    page = json.loads((out / "report.json").read_text()) if (out / "report.json").is_file() else {}
    return code, page


def changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(rewriting: Rewriting) -> None:
        stored = open_checkpoint(rewriting.root).tensor(key)
        whole = change(stored.read())
        rewriting.change(stored, lambda at, n: whole[tuple(slice(a, a + s) for a, s in zip(at, n, strict=True))])

    return edit


def renamed(rewriting: Rewriting) -> None:
    rewriting.renamed[QKV] = QKV.replace("linear_qkv", "linear_qgkv")


def reshaped(rewriting: Rewriting) -> None:
    for key in open_checkpoint(rewriting.root).tensors:
        if key.startswith("decoder") and key.endswith("experts.experts.linear_fc2.weight"):
            rewriting.dropped.add(key)
            rewriting.add(key, open_checkpoint(GOOD).read(key).transpose(1, 2).contiguous())


def dropped(rewriting: Rewriting) -> None:
    rewriting.dropped.add("decoder.layers.2.mlp.router.weight")


def added(rewriting: Rewriting) -> None:
    rewriting.add("decoder.layers.0.mlp.router.expert_bias", torch.ones(16))


EDITS: dict[str, tuple[Edit, str, int]] = {
    "a tensor scaled": (changed(QKV, lambda whole: whole * 2), "scale", 1),
    "a head that is the embedding": (
        changed(HEAD, lambda _: open_checkpoint(GOOD).read("embedding.word_embeddings.weight")),
        "other-tensor",
        1,
    ),
    "a tensor under another name": (renamed, "names-only", 1),
    "experts transposed": (reshaped, "transpose", 8),
    "a tensor dropped": (dropped, "missing", 1),
    "a tensor too many": (added, "extra", 1),
}


@pytest.mark.parametrize("what", EDITS)
def test_what_was_explained_is_repaired_and_nothing_else_is_touched(what: str, faulty: Callable[[Edit], Path], tmp_path: Path) -> None:
    edit, kind, count = EDITS[what]
    wrong, mended = faulty(edit), tmp_path / "mended"
    code, page = audit(wrong, tmp_path / "out", "--repair", str(mended))
    assert code == 1
    assert [fault["relation"]["kind"] for fault in page["faults"]] == [kind]
    assert page["stages"][2]["notes"][0].endswith(f"has {count} tensors written anew, all others as they were; audited again, it agrees")
    good, found = open_checkpoint(GOOD), open_checkpoint(mended)
    assert found.tensors.keys() == good.tensors.keys()
    assert all(same_bytes(found.read(key), good.read(key)) for key in good.tensors)
    # byte entries that megatron-core wants back are still there
    assert found.skipped.keys() == good.skipped.keys()
    assert audit(mended, tmp_path / "again")[0] == 0


def test_a_flag_that_dropped_tensors_is_repaired_with_them(tmp_path: Path) -> None:
    plant("S04", GOOD, tmp_path / "faulty", None)
    code, page = audit(tmp_path / "faulty", tmp_path / "out", "--repair", str(tmp_path / "mended"))
    assert (code, page["first"]["class"]) == (1, "model-definition")
    assert audit(tmp_path / "mended", tmp_path / "again")[0] == 0
    assert open_checkpoint(tmp_path / "mended").args["moe_shared_expert_gate"] is True


def test_what_nothing_explains_is_left_and_said(faulty: Callable[[Edit], Path], tmp_path: Path) -> None:
    noise = torch.Generator().manual_seed(1)
    wrong = faulty(changed(QKV, lambda whole: (whole.float() + 0.3 * torch.randn(whole.shape, generator=noise)).to(whole.dtype)))
    code, page = audit(wrong, tmp_path / "out", "--repair", str(tmp_path / "mended"))
    notes = page["stages"][2]["notes"]
    assert (code, page["first"]["relation"]["kind"]) == (1, "unknown")
    assert "0 tensors written anew" in notes[0] and "it differs at layers.3.attention.qkv (unknown)" in notes[0]
    assert notes[1] == "not repaired: layers.3.attention.qkv: its relation is unknown"


def test_a_right_checkpoint_needs_no_repair(tmp_path: Path) -> None:
    code, page = audit(GOOD, tmp_path / "out", "--repair", str(tmp_path / "mended"))
    assert code == 0
    assert page["stages"][2]["notes"][0].startswith("nothing to repair")
    assert not (tmp_path / "mended").exists()


def test_metadata_of_a_frameworks_own_class_is_written_as_torchs(tmp_path: Path) -> None:
    shutil.copytree(GOOD, tmp_path / "copy")
    rewriting = Rewriting(tmp_path / "copy" / "release")
    dropped(rewriting)
    rewriting.finish()
    assert type(load_pickle(tmp_path / "copy" / "release" / ".metadata")).__module__.startswith("torch.distributed")


def test_a_path_is_taken_out_of_metadata_of_a_frameworks_own_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(GOOD, tmp_path / "copy")
    file = tmp_path / "copy" / "release" / ".metadata"
    with monkeypatch.context() as patch:
        theirs = type("MCoreMetadata", (Metadata,), {"__module__": "theirs"})
        package = ModuleType("theirs")
        package.__dict__["MCoreMetadata"] = theirs
        patch.setitem(sys.modules, "theirs", package)
        found = theirs({})
        vars(found).update(vars(load_pickle(file)) | {"storage_meta": StorageMeta(checkpoint_id="/disk/of/somebody")})
        file.write_bytes(pickle.dumps(found))
    without_path(file.parent)
    assert b"somebody" not in file.read_bytes()
    assert type(load_pickle(file)) is Metadata
    assert audit(tmp_path / "copy", tmp_path / "out")[0] == 0


def refused(candidate: Path, out: Path, repair: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert audit(candidate, out, "--repair", str(repair))[0] == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert [line for line in said if line.startswith("Error: ")] == said[-1:]
    assert not (out / "report.json").exists()
    return said[-1]


def test_where_it_can_not_be_written_is_said_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert "is not empty" in refused(GOOD, tmp_path / "a", tmp_path / "full", capsys)
    assert "lies inside the candidate" in refused(GOOD, tmp_path / "b", GOOD / "mended", capsys)
    assert "Error" in refused(GOOD, tmp_path / "c", Path("/proc/mended"), capsys)


def test_a_disk_that_is_full_leaves_nothing_behind(
    faulty: Callable[[Edit], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = faulty(changed(QKV, lambda whole: whole * 2))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most[1]))  # the kernel refuses to write more into any file
    try:
        said = refused(wrong, tmp_path / "out", tmp_path / "mended", capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert "nothing was left there" in said
    assert not [entry for entry in tmp_path.iterdir() if "mended" in entry.name]


def test_layers_stacked_in_one_tensor_are_not_rewritten(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "data" / "stacked", tmp_path / "copy")
    found = open_checkpoint(tmp_path / "copy")
    key = next(key for key, stored in found.tensors.items() if stored.on_disk != key)
    with pytest.raises(UsageError, match="layers stacked"):
        Rewriting(found.path).change(found.tensor(key), lambda at, n: torch.zeros(n))
