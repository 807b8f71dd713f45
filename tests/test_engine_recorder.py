"""The engine recorder, on a tree of torch modules with the engines' names (no engine can be installed here)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import foreign_dumps
import pytest
import torch
from written import Said, Written

from bisect_tool import golden
from bisect_tool.comparing import compare
from bisect_tool.importing import import_dump
from bisect_tool.recording import Recording

FILE = Path(__file__).parent.parent / "hooks" / "bisect_hooks" / "engine.py"
GOLDEN = Recording(golden.folder() / "recording")
ROWS = GOLDEN.provenance.rows


def alone() -> Any:
    """The file by itself, as somebody copies it."""
    spec = importlib.util.spec_from_file_location("engine", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Says(torch.nn.Module):
    """A module that says what it is told to."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any) -> Any:
        return self.output


class Engine(torch.nn.Module):
    """Modules under an engine's names, each giving what a forward pass said; ids of another length get nothing of it."""

    def __init__(self, modules: dict[str, list[torch.Tensor]]) -> None:
        super().__init__()
        self.say(modules)

    def say(self, modules: dict[str, list[torch.Tensor]]) -> None:
        """What the modules give from now on."""
        for name, outputs in sorted(modules.items()):
            here: torch.nn.Module = self
            for word in name.split("."):
                if not hasattr(here, word):
                    here.add_module(word, Says(None))
                here = getattr(here, word)
            said: Any = outputs[0] if len(outputs) == 1 else tuple(outputs)
            if name.endswith("topk"):
                said = SimpleNamespace(topk_weights=outputs[0], topk_ids=outputs[1])
            here.output = said

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        for _, module in list(self.named_modules())[1:]:
            module(input_ids)
        return input_ids


@pytest.fixture(scope="module")
def said() -> Said:
    return Written(golden.reference()).run(ROWS)


def run(engine: Engine) -> None:
    ids = torch.tensor([token for row in ROWS for token in row])
    engine(torch.tensor([5]), torch.tensor([0]), SimpleNamespace(seq_lens=torch.tensor([1])))  # a decode step comes by first
    positions = torch.cat([torch.arange(len(row)) for row in ROWS])
    lengths = torch.tensor([len(row) for row in ROWS])
    engine(ids, positions, forward_batch=SimpleNamespace(extend_seq_lens=lengths))
    engine(ids + 1, positions, forward_batch=SimpleNamespace(extend_seq_lens=lengths))


def test_a_prefill_is_recorded_imported_and_agrees(said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BISECT_RECORD", str(tmp_path / "engine"))
    written = Written(golden.reference())
    engine, recorder = Engine(foreign_dumps.engine_modules(said, written.dims, 1, 0)), alone()
    remove: Callable[[], None] = recorder.attach(engine)
    run(engine)
    remove()
    import_dump("torch", tmp_path / "engine", tmp_path / "out", golden.reference())
    found = Recording(tmp_path / "out")
    assert found.provenance.rows == ROWS
    for key in ("layers.3.attention.qkv:q", "layers.1.router.probs", "layers.6.linear_attention.in_proj:z"):
        assert torch.equal(found[key], said[key])
    page = compare(GOLDEN.path, tmp_path / "out").to_json()
    assert (page["verdict"], page["faults"]) == ("agrees", [])
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in engine.modules())


def test_decode_steps_are_put_behind_the_prefill_of_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BISECT_RECORD", str(tmp_path / "engine"))
    monkeypatch.setenv("BISECT_RECORD_STEPS", "3")
    written = Written(golden.reference())
    row = max(ROWS, key=len)[:12]
    start = len(row) - 4
    words = written.run([row])
    engine = Engine(foreign_dumps.engine_modules(words, written.dims, 1, 0))
    alone().attach(engine)
    for tokens in (slice(0, start), *(slice(i, i + 1) for i in range(start, len(row)))):
        part = foreign_dumps.engine_modules({key: value[tokens] for key, value in words.items()}, written.dims, 1, 0)
        engine.say(part)
        engine(torch.tensor(row[tokens]), torch.arange(len(row))[tokens], SimpleNamespace(seq_lens=torch.tensor([tokens.stop])))
    import_dump("torch", tmp_path / "engine", tmp_path / "out", golden.reference())
    found = Recording(tmp_path / "out")
    assert found.provenance.rows == (row[:-1],) and found.provenance.decoded == (start,)
    assert torch.equal(found["layers.3.attention.qkv:q"], words["layers.3.attention.qkv:q"][:-1])


def test_ranks_leave_a_file_each(said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BISECT_RECORD", str(tmp_path / "engine"))
    dims = Written(golden.reference()).dims
    for rank in (0, 1):
        engine = Engine(foreign_dumps.engine_modules(said, dims, 2, rank))
        alone().attach(engine, tp_rank=rank, tp_size=2)
        run(engine)
    text = import_dump("torch", tmp_path / "engine", tmp_path / "out", golden.reference())
    assert "taken for partial sums" in text
    torch.testing.assert_close(Recording(tmp_path / "out")["layers.3.attention.core"], said["layers.3.attention.core"], rtol=0, atol=0)


def test_nothing_is_hooked_unless_it_is_asked_for(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BISECT_RECORD", raising=False)
    engine = Engine(foreign_dumps.engine_modules(said, Written(golden.reference()).dims, 1, 0))
    alone().attach(engine)
    assert not engine._forward_hooks


def test_a_disk_that_is_full_does_not_stop_the_engine(said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine").write_text("a file where the directory should go")
    monkeypatch.setenv("BISECT_RECORD", str(tmp_path / "engine"))
    engine = Engine(foreign_dumps.engine_modules(said, Written(golden.reference()).dims, 1, 0))
    alone().attach(engine)
    run(engine)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.layers.3", True),
        ("model.layers.3.self_attn.qkv_proj", True),
        ("language_model.model.layers.12.linear_attn.in_proj_ba", True),
        ("model.layers.0.mlp.shared_expert.down_proj", True),
        ("model.layers.0.mlp.gate_up_proj", True),
        ("model.norm", True),
        ("lm_head", True),
        ("model.layers.0.mlp.experts.7.w13", False),
        ("visual.blocks.0.norm1", False),
    ],
)
def test_names_of_the_engines_are_known(name: str, wanted: bool) -> None:
    assert bool(alone().WANTED.fullmatch(name)) == wanted


def test_the_file_needs_nothing_but_torch() -> None:
    path = f"import sys; sys.path[:0] = [{str(FILE.parent)!r}]; import engine; "
    code = path + "print([name for name in sys.modules if name.startswith(('bisect_', 'safetensors', 'transformers'))])"
    assert subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
