"""A torch_dist checkpoint: read as torch's own loader reads it, and refused by file and key where it is not whole."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bisect_hooks.errors import UsageError
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bisect_tool.checkpoint import TRACKER, Checkpoint
from bisect_tool.rewrite import Rewriting
from bisect_tool.torch_dist import open_torch_dist

# torch's own writer and loader say that they work without ranks, which is what is wanted
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny-qwen3.5-moe-torch_dist"
WHOLE = torch.arange(6.0).reshape(2, 3)
FC1 = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny checkpoint by torch's own writer, behind a tracker file."""
    tensors = {"decoder.w": WHOLE, "decoder.top": WHOLE[:1] + 10, "decoder.bottom": WHOLE[1:] + 20}
    others = {"optimizer.state.w": torch.zeros(2), "x.rng_state": torch.zeros(2), "decoder.b": 3}
    save({**tensors, **others}, checkpoint_id=str(tmp_path / "tiny" / "release"), no_dist=True)
    (tmp_path / "tiny" / TRACKER).write_text("release\n")
    return tmp_path / "tiny"


def change(checkpoint: Path, edit: Callable[[Any], object]) -> Checkpoint:
    """Edits what .metadata says, then opens the checkpoint."""
    file = checkpoint / "release" / ".metadata"
    page = pickle.loads(file.read_bytes())
    edit(page)
    file.write_bytes(pickle.dumps(page))
    return open_torch_dist(checkpoint)


def in_two_chunks(page: Metadata, second: int = 1) -> None:
    """decoder.w is made of two rows: the blobs of decoder.top and decoder.bottom, at row 0 and at row `second`."""
    entry = page.state_dict_metadata["decoder.w"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([1, 3])) for at in (0, second)]
    for at, key in ((0, "decoder.top"), (second, "decoder.bottom")):
        page.storage_data[MetadataIndex("decoder.w", [at, 0])] = page.storage_data[MetadataIndex(key, [0, 0])]


def test_it_says_what_it_was_made_with() -> None:
    found = open_torch_dist(GOLDEN)
    assert found.layout == "slime"
    assert found.args["num_layers"] == 8
    assert found.args["linear_attention_freq"] == [1, 1, 1, 0, 1, 1, 1, 0]
    assert found.args["tensor_model_parallel_size"] == 1
    assert found.tensors[FC1].shape == (16, 80, 96)
    assert found.tensors[FC1].dtype == torch.bfloat16


def test_tensors_are_what_torchs_own_loader_reads() -> None:
    found = open_torch_dist(GOLDEN)
    described = FileSystemReader(GOLDEN / "release").read_metadata().state_dict_metadata
    entries = {key: entry for key, entry in described.items() if isinstance(entry, TensorStorageMetadata)}
    assert found.tensors.keys() == entries.keys()
    assert found.tensors.keys() | found.skipped.keys() == described.keys()
    kinds = [key for key in entries if ".layers." not in key or ".layers.0." in key]
    state = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in kinds}
    load(state, checkpoint_id=str(GOLDEN / "release"), no_dist=True)
    assert len(found.tensors[FC1].pieces) > 1
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16, torch.float32}
    for key, tensor in state.items():
        assert torch.equal(found.read(key), tensor), key


def test_what_is_no_weight_is_skipped_with_the_reason(saved: Path) -> None:
    found = open_torch_dist(saved)
    assert sorted(found.tensors) == ["decoder.bottom", "decoder.top", "decoder.w"]
    assert found.skipped["decoder.b"] == "bytes, not a tensor"
    assert found.skipped["optimizer.state.w"] == found.skipped["x.rng_state"] == "not a weight"
    assert found.layout == "native"
    assert found.args == {}


def test_the_tracker_is_followed(saved: Path) -> None:
    assert open_torch_dist(saved).path == saved / "release"
    assert open_torch_dist(saved / "release").path == saved / "release"
    (saved / "release").rename(saved / "iter_0000042")
    (saved / TRACKER).write_text("42\n")
    assert open_torch_dist(saved).path == saved / "iter_0000042"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("43", "names iter_0000043, which has no .metadata and no mp_rank_*"),
        ("../other", "neither `release` nor"),
        ("", "neither `release` nor"),
    ],
)
def test_a_tracker_that_leads_nowhere_is_refused(word: str, said: str, saved: Path) -> None:
    (saved / TRACKER).write_text(word)
    with pytest.raises(UsageError, match=re.escape(said)):
        open_torch_dist(saved)


def test_what_is_no_checkpoint_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match=r"no Megatron checkpoint.*it holds config\.json, model\.safetensors"):
        open_torch_dist(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        open_torch_dist(tmp_path / "config.json")
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"not": "metadata"}))
    with pytest.raises(UsageError, match="describes no tensors"):
        open_torch_dist(tmp_path)


def test_a_missing_file_is_refused_with_how_much_was_in_it(saved: Path) -> None:
    found = open_torch_dist(saved)
    file = found.tensors["decoder.w"].pieces[0].file
    held = sum(piece.file == file for one in found.tensors.values() for piece in one.pieces)
    file.unlink()
    with pytest.raises(UsageError, match=rf"{re.escape(str(file))} is not there; \.metadata keeps {held} chunks in it"):
        open_torch_dist(saved)


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_a_truncated_file_is_refused_when_its_tensor_is_read(kept: int, saved: Path) -> None:
    found = open_torch_dist(saved)
    piece = found.tensors["decoder.w"].pieces[0]
    assert piece.blob
    end = piece.start + piece.blob[0]
    piece.file.write_bytes(piece.file.read_bytes()[:end][:kept])
    with pytest.raises(UsageError, match=re.escape(str(piece.file))):
        open_torch_dist(saved).read("decoder.w")


def test_a_damaged_chunk_is_refused(saved: Path) -> None:
    piece = open_torch_dist(saved).tensors["decoder.w"].pieces[0]
    assert piece.blob
    blob = bytearray(piece.file.read_bytes())
    end = piece.start + piece.blob[0]
    blob[end - 40 : end] = bytes(40)  # the directory at the end of the archive
    piece.file.write_bytes(blob)
    with pytest.raises(UsageError, match="is the file whole"):
        open_torch_dist(saved).read("decoder.w")


def test_a_key_that_is_not_there_names_its_nearest(saved: Path) -> None:
    with pytest.raises(UsageError, match=r"has no tensor decoder\.botom; nearest: decoder\.bottom"):
        open_torch_dist(saved).read("decoder.botom")


def test_chunks_are_put_where_they_belong(saved: Path) -> None:
    found = change(saved, in_two_chunks)
    assert found.read("decoder.w").tolist() == [[10, 11, 12], [23, 24, 25]]


def test_chunks_that_do_not_cover_their_tensor_are_refused(saved: Path) -> None:
    def with_a_hole(page: Any) -> None:
        in_two_chunks(page)
        page.state_dict_metadata["decoder.w"].chunks.pop()

    with pytest.raises(UsageError, match=r"the chunks of decoder\.w do not cover its \(2, 3\) once each"):
        change(saved, with_a_hole).read("decoder.w")


def test_chunks_that_lie_on_each_other_are_refused(saved: Path) -> None:
    found = change(saved, lambda page: in_two_chunks(page, second=0))
    with pytest.raises(UsageError):
        found.read("decoder.w")


def test_a_chunk_of_another_shape_or_without_a_file_is_refused(saved: Path) -> None:
    def reshaped(page: Any) -> None:
        entry = page.state_dict_metadata["decoder.w"]
        entry.size = entry.chunks[0].sizes = torch.Size([3, 2])

    with pytest.raises(UsageError, match=r"is torch\.float32 \(2, 3\), \.metadata says torch\.float32 \(3, 2\)"):
        change(saved, reshaped).read("decoder.w")
    with pytest.raises(UsageError, match=r"no file is given for decoder\.w at \(0, 0\)"):
        change(saved, lambda page: page.storage_data.clear())


@pytest.mark.parametrize("name", ["../__0_0.distcp", "/etc/passwd"])
def test_a_file_outside_the_directory_is_refused(name: str, saved: Path) -> None:
    def elsewhere(page: Any) -> None:
        for info in page.storage_data.values():
            info.relative_path = name

    with pytest.raises(UsageError, match="leaves the directory; refused"):
        change(saved, elsewhere)


def with_common(saved: Path, thing: object) -> Checkpoint:
    torch.save(thing, saved / "release" / "common.pt")
    return open_torch_dist(saved)


def test_args_are_read_from_common(saved: Path) -> None:
    assert with_common(saved, {"args": Namespace(num_layers=3), "iteration": 1}).args == {"num_layers": 3}
    assert with_common(saved, {"iteration": 1}).args == {}
    with pytest.raises(UsageError, match=r"common\.pt holds a list, not a table"):
        with_common(saved, [1])


@pytest.mark.parametrize("args", [{"num_layers": 3}, 3], ids=["table", "number"])
def test_args_of_another_kind_are_read_or_refused(args: object, saved: Path) -> None:
    found = with_common(saved, {"args": args})
    if isinstance(args, dict):
        assert found.args == args
        return
    with pytest.raises(UsageError):
        _ = found.args


def test_a_link_that_leads_to_itself_is_a_file_that_is_not_there(saved: Path) -> None:
    file = open_torch_dist(saved).tensors["decoder.w"].pieces[0].file
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(UsageError, match="is not there"):
        open_torch_dist(saved)


DATA = Path(__file__).parent / "data"


def test_layers_stacked_in_one_tensor_are_read_one_by_one() -> None:
    expected = load_file(DATA / "stacked" / "expected.safetensors")
    found = open_torch_dist(DATA / "stacked")
    stacked = {name: tensor for name, tensor in expected.items() if "decoder.layers." in name}
    assert stacked
    for name, tensor in stacked.items():
        for layer, one in enumerate(tensor):
            key = name.replace("decoder.layers.", f"decoder.layers.{layer}.")
            assert torch.equal(found.read(key), one)
            assert found.tensors[key].on_disk == f"{name}[{layer}]"
    assert not any(name in found.tensors for name in stacked)


def test_chunks_of_several_layers_are_read_too(tmp_path: Path) -> None:
    expected = load_file(DATA / "stacked" / "expected.safetensors")
    save(dict(expected), checkpoint_id=str(tmp_path), no_dist=True)
    found = open_torch_dist(tmp_path)
    name = next(name for name in expected if name.endswith("experts.experts.linear_fc1.weight"))
    key = name.replace("decoder.layers.", "decoder.layers.2.")
    assert len(found.tensors[key].pieces) == 1 and found.tensors[key].pieces[0].skip
    assert torch.equal(found.read(key), expected[name][2])


@pytest.mark.parametrize(
    "style", ["experts.experts.{}.linear_fc1.weight", "experts.local_experts.{}.linear_fc1.weight", "experts.linear_fc1.weight{}"]
)
def test_experts_kept_one_by_one_are_one_tensor(style: str, tmp_path: Path) -> None:
    parts = {f"decoder.layers.1.mlp.{style.format(e)}": torch.randn(6, 4) for e in range(12)}
    save(dict(parts), checkpoint_id=str(tmp_path), no_dist=True)
    found = open_torch_dist(tmp_path)
    assert list(found.tensors) == ["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"]
    assert torch.equal(found.read(*found.tensors), torch.stack(list(parts.values())))
    del parts[f"decoder.layers.1.mlp.{style.format(5)}"]
    save(dict(parts), checkpoint_id=str(tmp_path / "gap"), no_dist=True)
    with pytest.raises(UsageError, match="one of 12 experts, and expert 5 is not there"):
        open_torch_dist(tmp_path / "gap")


@pytest.mark.parametrize(("layout", "ways"), [("slime", {"expert_model_parallel_size": 2}), ("native", {"tensor_model_parallel_size": 2})])
def test_the_common_state_that_newer_cores_keep_inside_is_read(layout: str, ways: dict[str, int]) -> None:
    found = open_torch_dist(DATA / f"core-0.19.2-{layout}")
    assert not (found.path / "common.pt").exists()
    assert (found.layout, found.iteration, found.core_reads) == (layout, 5, False)
    assert found.args | ways == found.args
    assert not any(key.startswith("optimizer.") for key in found.tensors)


def test_args_that_newer_cores_keep_inside_are_rewritten(tmp_path: Path) -> None:
    good = open_torch_dist(DATA / "core-0.19.2-native")
    shutil.copytree(DATA / "core-0.19.2-native", tmp_path / "copy")
    Rewriting(open_torch_dist(tmp_path / "copy").path).finish({"rotary_base": 12345})
    found = open_torch_dist(tmp_path / "copy")
    assert (good.args["rotary_base"] != 12345, found.iteration) == (True, good.iteration)
    assert found.args == good.args | {"rotary_base": 12345}
    assert all(torch.equal(found.read(name), good.read(name)) for name in good.tensors)


@pytest.mark.parametrize("folder", ["dist_ckpt", "actor/dist_ckpt"])
def test_the_folders_that_verl_writes_are_found(folder: str, saved: Path, tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_7"
    (step / folder).parent.mkdir(parents=True)
    (saved / "release").rename(step / folder)
    (tmp_path / "run" / TRACKER).write_text("7")
    config = {"num_layers": 3, "layernorm_zero_centered_gamma": True, "num_moe_experts": 16}
    (step / folder).parent.joinpath("transformer_config.json").write_text(json.dumps(config))
    for given in (tmp_path / "run", step, step / folder):
        assert open_torch_dist(given).path == step / folder
    args = open_torch_dist(step).args
    assert (args["num_layers"], args["apply_layernorm_1p"], args["num_experts"]) == (3, True, 16)
