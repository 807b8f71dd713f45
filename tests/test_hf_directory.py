"""A Hugging Face directory: one file or shards, either prefix; whatever is wrong with it is said with the file's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bisect_hooks.errors import UsageError
from safetensors.torch import save_file

from bisect_tool.hf_directory import canonical, open_hf, read_config

INDEX = "model.safetensors.index.json"
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def tensors(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), float(len(name)), dtype=torch.bfloat16) for name in names}


def directory(path: Path, files: Mapping[str, Mapping[str, torch.Tensor]], index: Mapping[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"model_type": "tiny"}')
    for file, held in files.items():
        save_file(dict(held), path / file)
    if index is not None:
        (path / INDEX).write_text(json.dumps({"weight_map": index}))
    return path


def sharded(path: Path) -> Path:
    files = {"a.safetensors": tensors(EMBED, NORM), "b.safetensors": tensors(HEAD)}
    return directory(path, files, {EMBED: "a.safetensors", NORM: "a.safetensors", HEAD: "b.safetensors"})


def test_one_file_is_read(tmp_path: Path) -> None:
    found = open_hf(directory(tmp_path, {"model.safetensors": tensors(EMBED, HEAD)}))
    assert found.names == (HEAD, EMBED)
    assert found.config == {"model_type": "tiny"}
    assert torch.equal(found.read(EMBED), tensors(EMBED)[EMBED])


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    found = open_hf(sharded(tmp_path))
    assert {name: tensor[0, 0].item() for name, tensor in found.tensors()} == {name: len(name) for name in (EMBED, NORM, HEAD)}
    assert set(found.dtypes.values()) == {torch.bfloat16}
    assert found.dtypes.keys() == set(found.names)


@pytest.mark.parametrize(
    ("disk", "name"),
    [
        ("model.language_model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("language_model.model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("model.visual.blocks.0.norm1.weight", "model.visual.blocks.0.norm1.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_name_is_canonical_whatever_its_prefix(disk: str, name: str, tmp_path: Path) -> None:
    assert canonical(disk) == name
    found = open_hf(directory(tmp_path, {"model.safetensors": tensors(disk)}))
    assert found.names == (name,)
    assert found.on_disk(name) == disk
    assert found.read(name).shape == (2, 3)


def test_the_index_of_a_prefixed_directory_may_be_prefixed_too(tmp_path: Path) -> None:
    disk = "model.language_model.norm.weight"
    assert open_hf(directory(tmp_path, {"a.safetensors": tensors(disk)}, {disk: "a.safetensors"})).names == (NORM,)


def test_an_index_that_names_an_absent_file_is_refused_with_its_count(tmp_path: Path) -> None:
    (sharded(tmp_path) / "a.safetensors").unlink()
    with pytest.raises(UsageError, match=r"lists 2 tensors in a\.safetensors, which is not there"):
        open_hf(tmp_path)


def test_a_tensor_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    directory(tmp_path, {"a.safetensors": tensors(EMBED), "b.safetensors": tensors("model.language_model.embed_tokens.weight")})
    with pytest.raises(UsageError, match=r"embed_tokens\.weight is in a\.safetensors and in b\.safetensors"):
        open_hf(tmp_path)


def test_an_index_that_names_another_file_than_the_one_that_holds_a_tensor_is_refused(tmp_path: Path) -> None:
    files = {"a.safetensors": tensors(EMBED), "b.safetensors": tensors(HEAD)}
    files["a.safetensors"] |= tensors(NORM)
    directory(tmp_path, files, {EMBED: "b.safetensors", HEAD: "b.safetensors", NORM: "a.safetensors"})
    with pytest.raises(UsageError, match=r"has .*embed_tokens\.weight in b\.safetensors, it is in a\.safetensors \(1 such\)"):
        open_hf(tmp_path)


def test_a_tensor_that_only_the_index_knows_is_refused(tmp_path: Path) -> None:
    directory(tmp_path, {"a.safetensors": tensors(EMBED)}, {EMBED: "a.safetensors", HEAD: "a.safetensors"})
    with pytest.raises(UsageError, match=r"lists lm_head\.weight, which its file does not hold \(1 such\)"):
        open_hf(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_truncated_file_is_refused_by_name(kept: int, tmp_path: Path) -> None:
    file = sharded(tmp_path) / "b.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UsageError, match=r"b\.safetensors can't be read.*is the download complete"):
        open_hf(tmp_path)


@pytest.mark.parametrize("name", ["../b.safetensors", "/etc/passwd", "sub/../../b.safetensors"])
def test_an_index_that_leaves_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    directory(tmp_path / "inner", {"a.safetensors": tensors(EMBED)}, {EMBED: "a.safetensors", HEAD: name})
    save_file(tensors(HEAD), tmp_path / "b.safetensors")
    with pytest.raises(UsageError, match="leaves the directory; refused"):
        open_hf(tmp_path / "inner")


@pytest.mark.parametrize("text", ["{", "[]", "{}", "", pytest.param('{"weight_map": 3}')])
def test_a_damaged_index_is_refused(text: str, tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).write_text(text)
    with pytest.raises(UsageError, match=r"index\.json is damaged"):
        open_hf(tmp_path)


def test_a_directory_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no \*\.safetensors files"):
        open_hf(directory(tmp_path, {}))


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    (sharded(tmp_path) / "config.json").unlink()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        open_hf(tmp_path)


@pytest.mark.parametrize("name", ["absent", "config.json"])
def test_what_is_no_directory_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        open_hf(sharded(tmp_path) / name)


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"{model_type: tiny}", "is not JSON"), (b"", "is not JSON"), (b"\xff\xfe{", "is not JSON"), (b"[1]", "holds a list")],
)
def test_a_config_that_is_no_table_is_refused(text: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UsageError, match=rf"config\.json {said}"):
        read_config(tmp_path)


def test_a_dtype_that_is_not_known_is_refused_by_tensor(tmp_path: Path) -> None:
    header = json.dumps({HEAD: {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (directory(tmp_path, {}) / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(UsageError, match=r"lm_head\.weight has dtype U16"):
        open_hf(tmp_path)


def test_a_link_that_leads_to_itself_is_a_file_that_is_not_there(tmp_path: Path) -> None:
    file = sharded(tmp_path) / "b.safetensors"
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(UsageError, match=r"lists 1 tensors in b\.safetensors, which is not there"):
        open_hf(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        open_hf(tmp_path)


def test_a_header_that_claims_a_terabyte_is_refused(tmp_path: Path) -> None:
    file = sharded(tmp_path) / "b.safetensors"
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(UsageError, match=r"b\.safetensors can't be read"):
        open_hf(tmp_path)


def test_files_that_no_index_names_are_strays(tmp_path: Path) -> None:
    save_file(tensors("model.stray.weight"), sharded(tmp_path) / "old.safetensors")
    found = open_hf(tmp_path)
    assert found.strays == ("old.safetensors",)
    assert "model.stray.weight" not in found.names


def fp8(path: Path, block: list[int] | None = None, **scales: torch.Tensor) -> Path:
    weights = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(200, 150, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    }
    directory(path, {"model.safetensors": weights | scales})
    config = {"model_type": "tiny"} | ({"quantization_config": {"weight_block_size": block}} if block else {})
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_fp8_matrices_are_read_times_the_scale_of_each_block(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    scale = torch.tensor([[0.5, 2.0], [3.0, 0.25]])
    for block in (None, [128, 128]):
        found = open_hf(fp8(tmp_path, block, **{name + "_scale_inv": scale}))
        assert (found.names, found.quantised, found.dtypes[name]) == ((name,), (name,), torch.bfloat16)
        spread = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :150]
        expected = (found.stored[name].read().float() * spread).to(torch.bfloat16)
        assert torch.equal(found.read(name), expected)
        assert torch.equal(found.tensor(name).rows(100, 131), expected[100:131])


def test_fp8_without_a_scale_or_with_one_of_another_size_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(UsageError, match="has no _scale_inv beside it"):
        open_hf(fp8(tmp_path / "none")).tensor(name)
    with pytest.raises(UsageError, match="need another"):
        open_hf(fp8(tmp_path / "odd", [128, 128], **{name + "_scale_inv": torch.ones(3, 2)})).tensor(name)
