"""A recording: whole or not there, the same bytes every time, and never in the place of something else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bisect_hooks.errors import UsageError

from bisect_tool.noise import Noise
from bisect_tool.prompts import Batch
from bisect_tool.recording import Provenance, Recording, by_group, group_of, in_order, writing

ROWS = ((1, 2, 3), (4, 5))
PROVENANCE = Provenance(
    side="reference", family="qwen3.5-moe", model="tiny", dtype="float32", rows=ROWS, parallel={"tp": 2}, versions={"torch": "2"},
    floor={"layers.10.output": 1e-7, "embedding": 0.0},
)  # fmt: skip
IN_ORDER = [
    "tokens",
    "embedding",
    "layers.2.attention.qkv:gate",
    "layers.2.attention.qkv:q",
    "layers.2.output",
    "layers.10.input_norm",
    "layers.10.output",
    "final_norm",
    "lm_head",
]


def tensors(keys: Iterable[str] = IN_ORDER) -> dict[str, torch.Tensor]:
    return {key: torch.randn(5, 4, generator=torch.Generator().manual_seed(len(key))).bfloat16() for key in keys}


def write(path: Path, said: dict[str, torch.Tensor] | None = None, provenance: Provenance = PROVENANCE) -> Recording:
    said = tensors() if said is None else said
    with writing(path) as writer:
        for group, keys in by_group(said).items():
            writer.add(group, {key: said[key] for key in keys})
        writer.close(provenance)
    return Recording(path)


def test_noise_is_kept_by_key_and_is_no_key_itself(tmp_path: Path) -> None:
    noise = Noise(torch.ones(5), torch.full((4,), 0.5), 1.5, 2.5, 3.5, 0.004)
    with writing(tmp_path / "recording") as writer:
        writer.add("outside", tensors(["embedding"]))
        writer.add_noise({"embedding": noise})
        writer.close(replace(PROVENANCE, worst={"embedding": noise.worst}))
    found = Recording(tmp_path / "recording")
    read = found.noise("embedding")
    assert read is not None and found.keys == ["embedding"] and found.noise("lm_head") is None
    assert torch.equal(read.rows, noise.rows) and torch.equal(read.columns, noise.columns)
    assert read.worst == (1.5, 2.5, 3.5, 0.004)


def test_noise_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    with writing(tmp_path / "recording") as writer:
        writer.add("outside", tensors(["embedding"]))
        writer.add_noise({"embedding": Noise(torch.ones(5), torch.ones(4), 1.0, 1.0, 1.0, 0.004)})
        writer.close(replace(PROVENANCE, worst={"embedding": (1.0, 1.0, 1.0)}))  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="keeps 3 statistics of its noise, this version asks for 4"):
        Recording(tmp_path / "recording").noise("embedding")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = write(tmp_path / "recording")
    assert found.provenance == PROVENANCE
    assert found.batch == Batch(ROWS)
    for key, tensor in tensors().items():
        assert key in found
        assert torch.equal(found[key], tensor)
        assert found[key].dtype == tensor.dtype
    assert "layers.3.output" not in found
    with pytest.raises(UsageError, match=r"has no layers\.3\.output"):
        _ = found["layers.3.output"]


def test_keys_come_in_compute_order(tmp_path: Path) -> None:
    assert write(tmp_path / "recording", tensors(reversed(IN_ORDER))).keys == IN_ORDER
    assert in_order(sorted(IN_ORDER)) == IN_ORDER


def test_each_layer_has_a_file_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "recording")
    names = {entry.name for entry in (tmp_path / "recording").iterdir()}
    assert names == {"recording.json", "layers.002.safetensors", "layers.010.safetensors", "outside.safetensors"}
    assert [group_of(key) for key in ("layers.2.attention.qkv:q", "mtp.0.layer", "tokens")] == ["layers.002", "outside", "outside"]


def test_a_group_that_comes_twice_loses_nothing(tmp_path: Path) -> None:
    with writing(tmp_path / "recording") as writer:
        writer.add("layers.002", {"layers.2.input_norm": torch.ones(5, 2)})
        writer.add("layers.002", {"layers.2.output": torch.zeros(5, 2)})
        writer.add("layers.002", {})
        writer.close(PROVENANCE)
    found = Recording(tmp_path / "recording")
    assert found["layers.2.input_norm"].sum() == 10
    assert found["layers.2.output"].sum() == 0


def test_a_view_is_written_as_the_values_it_shows(tmp_path: Path) -> None:
    whole = torch.arange(30.0).reshape(6, 5)
    found = write(tmp_path / "recording", {"embedding": whole.T, "lm_head": whole[1:6]})
    assert torch.equal(found["embedding"], whole.T)
    assert torch.equal(found["lm_head"], whole[1:6])


def test_a_file_of_another_recording_is_refused(tmp_path: Path) -> None:
    found = write(tmp_path / "recording", {"lm_head": torch.zeros(6, 2)})
    with pytest.raises(UsageError, match="is of another recording: lm_head has 6 rows"):
        found["lm_head"]


def test_two_writings_of_the_same_are_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "one")
    floor = dict(reversed(list(PROVENANCE.floor.items())))
    write(tmp_path / "other", tensors(reversed(IN_ORDER)), replace(PROVENANCE, floor=floor))
    for file in sorted((tmp_path / "one").iterdir()):
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes(), file.name


def test_half_a_recording_is_none(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the forward failed"), writing(tmp_path / "recording") as writer:
        writer.add("outside", {"embedding": torch.ones(1, 1)})
        raise RuntimeError("the forward failed")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "recording")


def test_an_empty_directory_or_an_older_recording_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "recording").mkdir()
    write(tmp_path / "recording")
    assert write(tmp_path / "recording", tensors(IN_ORDER[:2])).keys == IN_ORDER[:2]
    assert len(list((tmp_path / "recording").iterdir())) == 2


def test_a_directory_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="holds something else"), writing(tmp_path):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_what_lies_beside_an_older_recording_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "recording")
    (tmp_path / "recording" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="holds something else"):
        write(tmp_path / "recording")
    assert (tmp_path / "recording" / "thesis.txt").read_text() == "years of work"


def test_a_directory_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no recording: it has no recording\.json"):
        Recording(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "schema is not"),
        ('{"schema": "bisect-tool/recording/2"}', "schema is not"),
        ('{"schema": "bisect-tool/recording/1"}', "is damaged"),
        ('{"schema": "bisect-tool/recording/1", "keys": {}, "rows": [], "other": 1}', "is damaged"),
        pytest.param("3", "is damaged"),
    ],
)
def test_a_damaged_page_is_refused(text: str, said: str, tmp_path: Path) -> None:
    write(tmp_path / "recording")
    (tmp_path / "recording" / "recording.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        Recording(tmp_path / "recording")


def test_a_damaged_or_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    found = write(tmp_path / "recording")
    file = tmp_path / "recording" / "layers.010.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match=re.escape(f"{file} can't be read")):
        _ = found["layers.10.output"]
    file.unlink()
    with pytest.raises(UsageError, match=re.escape(f"{file} can't be read")):
        _ = found["layers.10.output"]
    assert found["layers.2.output"].shape == (5, 4)


def test_a_page_that_leaves_its_directory_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "other")
    write(tmp_path / "recording")
    page = tmp_path / "recording" / "recording.json"
    said = json.loads(page.read_text())
    said["keys"]["lm_head"] = "../other/outside.safetensors"
    page.write_text(json.dumps(said))
    with pytest.raises(UsageError):
        _ = Recording(tmp_path / "recording")["lm_head"]
