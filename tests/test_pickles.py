"""Hostile pickles are refused by file and name, and nothing in them runs."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import io
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bisect_hooks.errors import UsageError
from torch.distributed.checkpoint import metadata as dcp

from bisect_tool.pickles import load_pickle, load_torch


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


def attacks(mark: Path) -> dict[str, tuple[Any, str]]:
    """Each would make `mark`; and the name that the refusal has to say."""
    touch = f"touch {mark}"
    write = f"open({str(mark)!r}, 'w').close()"
    return {
        "os.system": (Calls(os.system, touch), f"{os.system.__module__}.system"),
        "eval": (Calls(builtins.eval, write), "builtins.eval"),
        "exec": (Calls(builtins.exec, write), "builtins.exec"),
        "getattr": (Calls(builtins.getattr, Calls(__import__, "os"), "system"), "builtins."),
        "Popen": (Calls(subprocess.Popen, ["touch", str(mark)]), "subprocess.Popen"),
        "open": (Calls(io.open, str(mark), "w"), "open"),
        "inside a Namespace": (argparse.Namespace(tp=1, hook=Calls(os.system, touch)), f"{os.system.__module__}.system"),
        "inside a list of a reduce": (Calls(list, [Calls(builtins.eval, write)]), "builtins.eval"),
        "a torch function": (Calls(torch.load, str(mark)), "torch"),
        "torch.hub": (Calls(torch.hub.load, "x", "y"), "torch.hub.load"),
    }


ATTACKS = sorted(attacks(Path("mark")))
# torch.save writes protocol 2, which spells builtins `__builtin__` and subprocess `commands`
RENAMED = ("Popen", "eval", "exec", "getattr", "inside a list of a reduce")


@pytest.mark.parametrize(
    ("attack", "kind"),
    [
        *((attack, "pickle") for attack in ATTACKS),
        *(pytest.param(attack, "torch" if attack in RENAMED else ()) for attack in ATTACKS),
    ],
)
def test_a_hostile_file_is_refused_by_name_and_nothing_runs(attack: str, kind: str, tmp_path: Path) -> None:
    mark, file = tmp_path / "pwned", tmp_path / "common.pt"
    hostile, name = attacks(mark)[attack]
    if kind == "pickle":
        file.write_bytes(pickle.dumps(hostile))
    else:
        torch.save({"args": hostile, "iteration": 3}, file)
    load: Callable[[Path], Any] = load_pickle if kind == "pickle" else load_torch
    with pytest.raises(UsageError, match=f"{re.escape(str(file))} holds a pickle that .*{re.escape(name)}.*refused"):
        load(file)
    assert not mark.exists()


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_runs_whatever_the_protocol(attack: str, protocol: int, tmp_path: Path) -> None:
    mark, file = tmp_path / "pwned", tmp_path / ".metadata"
    file.write_bytes(pickle.dumps([attacks(mark)[attack][0]], protocol=protocol))
    with contextlib.suppress(UsageError):
        load_pickle(file)
    assert not mark.exists()


def test_a_set_in_a_torch_file_is_a_set(tmp_path: Path) -> None:
    torch.save(argparse.Namespace(stages={1, 2}), tmp_path / "common.pt")
    assert load_torch(tmp_path / "common.pt").stages == {1, 2}


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_the_attacks_of_these_tests_are_real(kind: str, tmp_path: Path) -> None:
    mark, file = tmp_path / "pwned", tmp_path / "common.pt"
    hostile, _ = attacks(mark)["os.system"]
    if kind == "pickle":
        pickle.loads(pickle.dumps(hostile))
    else:
        torch.save(hostile, file)
        torch.load(file, weights_only=False)
    assert mark.exists()


def test_a_pickle_that_spells_a_dotted_name_is_refused(tmp_path: Path) -> None:
    """Protocol 4 may name `Namespace.__class__...`: the dots are looked up one by one, past the list of classes."""
    file = tmp_path / ".metadata"
    for module, name in (
        ("argparse", "Namespace.__init__.__globals__"),
        ("torch", "Size.__new__"),
        ("collections", "OrderedDict.fromkeys"),
    ):
        text = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
        file.write_bytes(b"\x80\x04" + text + b"\x93.")
        with pytest.raises(UsageError, match="refused"):
            load_pickle(file)


def foreign(module: str, name: str) -> type:
    """A class of a package that will not be there when the file is read."""
    made = type(name, (), {"__module__": module, "__init__": lambda self, value: setattr(self, "value", value)})
    return made


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_class_that_is_not_known_becomes_an_inert_stand_in(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "common.pt"
    with monkeypatch.context() as patch:
        package = ModuleType("somebody")
        package.__dict__["Config"] = foreign("somebody", "Config")
        patch.setitem(sys.modules, "somebody", package)
        one = argparse.Namespace(tp=2, config=package.Config({"depth": 3}), called=Calls(package.Config, 7))
        if kind == "pickle":
            file.write_bytes(pickle.dumps(one))
        else:
            torch.save(one, file)
    found = load_pickle(file) if kind == "pickle" else load_torch(file)
    assert found.tp == 2
    assert (type(found.config).__module__, type(found.config).__name__) == ("somebody", "Config")
    assert found.config.value == {"depth": 3}
    assert found.called.made_of == ((7,), {})
    assert "somebody.Config" in repr(found.called)


def test_what_checkpoints_are_made_of_loads(tmp_path: Path) -> None:
    file = tmp_path / ".metadata"
    properties = dcp.TensorProperties(dtype=torch.bfloat16)
    chunks = [dcp.ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=torch.Size([2, 3]))]
    entry = dcp.TensorStorageMetadata(properties=properties, size=torch.Size([2, 3]), chunks=chunks)
    page = dcp.Metadata(state_dict_metadata={"w": entry, "b": dcp.BytesStorageMetadata()}, storage_data={dcp.MetadataIndex("w"): None})
    args = argparse.Namespace(dtype=torch.bfloat16, shape=torch.Size([4]), device=torch.device("cpu"), names={"a", "b"}, none=None)
    file.write_bytes(pickle.dumps((page, args)))
    found, again = load_pickle(file)
    assert isinstance(found, dcp.Metadata)
    assert found.state_dict_metadata["w"] == entry
    assert list(found.storage_data) == [dcp.MetadataIndex("w")]
    assert again == args


def test_a_torch_file_gives_its_tensors_and_its_tables(tmp_path: Path) -> None:
    file = tmp_path / "common.pt"
    page = {"args": argparse.Namespace(params_dtype=torch.bfloat16), "w": torch.arange(6.0).reshape(2, 3).bfloat16()}
    torch.save(page, file)
    found = load_torch(file)
    assert found["args"] == page["args"]
    assert torch.equal(found["w"], page["w"])  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [0, 1, 20, -1])
def test_a_truncated_file_is_an_error_of_usage(kept: int, tmp_path: Path) -> None:
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps({"a": [1, 2, 3], "b": "some text"})[:kept])
    with pytest.raises(UsageError, match=f"{re.escape(str(file))} can't be read as a pickle"):
        load_pickle(file)
    file = tmp_path / "common.pt"
    torch.save({"w": torch.zeros(8)}, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UsageError, match=f"{re.escape(str(file))} can't be read as a torch file"):
        load_torch(file)


@pytest.mark.parametrize(
    ("load", "length"),
    [(load_pickle, 2**60), (load_pickle, 2**64 - 1), (load_torch, 2**60)],
    ids=["pickle, no memory", "pickle, no such number", "torch, no memory"],
)
def test_a_damaged_length_is_an_error_of_usage(load: Callable[[Path], Any], length: int, tmp_path: Path) -> None:
    file = tmp_path / "common.pt"
    file.write_bytes(b"\x80\x04\x95" + length.to_bytes(8, "little") + b"N.")
    with pytest.raises(UsageError):
        load(file)
