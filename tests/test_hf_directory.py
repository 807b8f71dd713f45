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
