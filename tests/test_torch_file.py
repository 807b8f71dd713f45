"""A torch.save file is read without loading it: tensors come back as places, and a file that lies about itself is refused."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from bisect_hooks.errors import UsageError

from bisect_tool.places import Piece, Stored
from bisect_tool.torch_file import Placed, data_of, open_torch


def read(placed: Placed) -> torch.Tensor:
    piece = Piece((0,) * len(placed.shape), placed.shape, placed.file, placed.start)
    return Stored("one", placed.shape, placed.dtype, (piece,)).read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_tensors_are_what_torch_loads(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.arange(60).reshape(5, 12).to(dtype)
    held = {"model": {"a": whole, "b": whole[2:4], "c": torch.nn.Parameter(whole.float())}, "args": Namespace(x=1), "iteration": 3}
    torch.save(held, tmp_path / "file.pt")
    found = open_torch(tmp_path / "file.pt")
    assert (found["args"].x, found["iteration"]) == (1, 3)
    for name, tensor in held["model"].items():  # type: ignore[attr-defined]
        placed = found["model"][name]
        assert (placed.dtype, placed.shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(read(placed).float(), tensor.float())


def test_nothing_of_the_tensors_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"a": torch.zeros(1 << 20)}, file)
    size = file.stat().st_size
    placed = open_torch(file)["a"]
    with file.open("r+b") as raw:  # whatever is there now is what a later read finds
        raw.seek(placed.start)
        raw.write(torch.ones(4).numpy().tobytes())
    assert file.stat().st_size == size
    assert read(placed)[:5].tolist() == [1, 1, 1, 1, 0]


def test_a_blob_inside_a_file_is_found_at_any_byte(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(6.0).reshape(2, 3), buffer)
    blob, file = buffer.getvalue(), tmp_path / "__0_0.distcp"
    for before in (0, 1, 7, 64):
        file.write_bytes(b"x" * before + blob + b"after")
        start = data_of(file, before, len(blob), torch.float32, (2, 3))
        assert torch.equal(read(Placed(file, start, torch.float32, (2, 3))), torch.arange(6.0).reshape(2, 3))
        data_of.cache_clear()
    with pytest.raises(UsageError, match=r"is torch\.float32 \(2, 3\), \.metadata says torch\.float32 \(3, 2\)"):
        data_of(file, 64, len(blob), torch.float32, (3, 2))
    with pytest.raises(UsageError, match="is the file whole"):
        data_of(file, 65, len(blob), torch.float32, (2, 3))
    with pytest.raises(UsageError, match="ends at byte"):
        data_of(file, 64, len(blob) + 100, torch.float32, (2, 3))


class Calls:
    """Pickles as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((os.system, "touch {mark}"), r"(posix|os)\.system"),
        ((eval, "__import__('os').system('touch {mark}')"), r"builtins\.eval"),
        ((__import__, "os"), r"builtins\.__import__"),
        ((getattr, Calls(os.system, "touch {mark}"), "x"), r"builtins\.getattr|(posix|os)\.system"),
    ],
    ids=["os.system", "eval", "import", "nested"],
)
def test_a_file_that_would_call_something_is_refused_by_name_and_calls_nothing(call: Any, name: str, tmp_path: Path) -> None:
    mark, file = tmp_path / "mark", tmp_path / "model_optim_rng.pt"
    made = [one.format(mark=mark) if isinstance(one, str) else one for one in call]
    torch.save({"model": {"a": torch.ones(2)}, "args": Calls(*made)}, file)
    with pytest.raises(UsageError, match=rf"{file.name} holds a pickle that would call ({name}); refused"):
        open_torch(file)
    assert not mark.exists()


def rewritten(file: Path, change: Any, compressed: bool = False) -> Path:
    """The archive again, its pickle changed."""
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)
    return file


def test_a_header_that_claims_a_terabyte_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"a": torch.ones(1000)}, file)
    claim = rewritten(file, lambda data: data.replace(b"M\xe8\x03", b"\x8a\x06\x00\x00\x00\x00\x00\x01"))  # 1000 → 2**40
    with pytest.raises(UsageError, match=r"storage 0 claims \d{13} bytes, the archive has a record of 4000 bytes"):
        open_torch(claim)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"a": torch.ones(10, 25)}, file)
    with pytest.raises(UsageError, match="in a storage of 1000 bytes"):
        open_torch(rewritten(file, lambda data: data.replace(b"K\x0aK\x19", b"K\xffK\x19")))


def test_other_lies_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"a": torch.ones(100, 50).T}, file)
    with pytest.raises(UsageError, match="which is not row-major"):
        open_torch(file)
    torch.save({"a": torch.ones(100)}, file)
    with pytest.raises(UsageError, match="claims 400 bytes"):
        open_torch(rewritten(file, lambda data: data, compressed=True))
    file.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UsageError, match="can't be read as a torch file"):
        open_torch(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/other", b"")
    with pytest.raises(UsageError, match=r"without data\.pkl"):
        open_torch(file)
