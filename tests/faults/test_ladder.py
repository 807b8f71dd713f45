"""The commands as a user runs them: the embedded model, the gate, conversions, and ends that are no verdict."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bisect_hooks.family import family_of
from bisect_hooks.hf import Reference
from bisect_hooks.parallel import Parallel
from bisect_hooks.tap import listening
from safetensors.torch import load_file, save_file
from workshop import PROMPTS, REFERENCE, ROOT, Workshop

from bisect_tool.__main__ import run
from bisect_tool.args import plain
from bisect_tool.candidate import CandidateRun
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.hf_directory import open_hf
from bisect_tool.prompts import Batch
from bisect_tool.reference import Wanted, base_grafts
from bisect_tool.reference_recording import record_reference

pytestmark = pytest.mark.ranks
GOLDEN = ROOT / "golden"
BATCH = Batch(((1, 20, 21, 13), (1, 30), tuple(range(3, 80))))


def page_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


def test_the_embedded_model_agrees_as_its_golden_report_says(tmp_path: Path) -> None:
    assert run(["run", "--prompts", str(GOLDEN / "prompts.jsonl"), "--out", str(tmp_path)]) == 0
    page, golden = page_of(tmp_path), json.loads((GOLDEN / "expected-report.json").read_text())
    for name in ("schema", "verdict", "first", "faults", "minor", "answers"):
        assert page[name] == golden[name]
    for stage, expected in zip(page["stages"], golden["stages"], strict=True):
        assert {key: stage[key] for key in ("name", "verdict", "compared", "skipped")} == {
            key: expected[key] for key in ("name", "verdict", "compared", "skipped")
        }
    assert page["provenance"]["digests"] == golden["provenance"]["digests"]


def test_the_gate_passes_our_own_conversion_and_stops_a_faulty_one(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, faulty = GOLDEN / "tiny-qwen3.5-moe-torch_dist", workshop.faulty("slime", "one", "A03")
    assert run(["gate", "--golden", str(GOLDEN), "--candidate", str(good), "--out", str(tmp_path / "good")]) == 0
    assert run(["gate", "--golden", str(GOLDEN), "--candidate", str(faulty), "--out", str(tmp_path / "bad")]) == 1
    (fault,) = page_of(tmp_path / "bad")["faults"]
    assert (fault["module"], fault["parts"], fault["layers"], fault["class"]) == ("attention", ["qkv"], [3, 7], None)
    # where rows of a packed tensor are judged piece by piece, the numbers say of which
    assert fault["piece"] in ("q", "k", "v")
    assert f"layers.3.attention.qkv:{fault['piece']}: " in capsys.readouterr().out


def test_a_run_against_golden_recordings_places_and_proves_what_a_run_against_the_reference_does(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty = str(workshop.faulty("slime", "one", "A03"))
    asked = ["run", "--reference", str(REFERENCE), "--candidate", faulty, "--golden", str(GOLDEN), "--stages", "inputs,forward"]
    assert run([*asked, "--prompts", str(PROMPTS), "--out", str(tmp_path / "out")]) == 1
    page = page_of(tmp_path / "out")
    (fault,) = page["faults"]
    assert (fault["class"], fault["module"], fault["layers"], fault["relation"]["kind"]) == (
        "conversion",
        "attention",
        [3, 7],
        "permutation",
    )
    assert any(note.startswith("the reference was not run") for note in page["stages"][3]["notes"])
    assert page["provenance"]["golden"] == str(GOLDEN)
    capsys.readouterr()
    assert run([*asked, "--prompts", str(GOLDEN / "prompts.jsonl"), "--out", str(tmp_path / "other")]) == 2
    assert "is of 3 other prompts (78 tokens)" in capsys.readouterr().err
    assert run([*asked, "--prompts", str(PROMPTS), "--dtype", "bf16", "--out", str(tmp_path / "other")]) == 2
    assert "is in float32, --dtype asks for bfloat16" in capsys.readouterr().err


def with_weight(out: Path, name: str, edit: Callable[[torch.Tensor], object]) -> Path:
    """A copy of the reference with one tensor edited where it is."""
    shutil.copytree(REFERENCE, out)
    file = next(one for one in out.glob("*.safetensors") if name in load_file(one))
    weights = load_file(file)
    edit(weights[name])
    save_file(weights, file)
    return out


def test_a_golden_recording_of_other_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = with_weight(
        tmp_path / "other", "model.language_model.layers.2.mlp.experts.gate_up_proj", lambda weight: weight[3, 17].mul_(1.05)
    )
    asked = ["run", "--reference", str(other), "--candidate", str(GOLDEN / "tiny-qwen3.5-moe-torch_dist"), "--golden", str(GOLDEN)]
    assert run([*asked, "--prompts", str(PROMPTS), "--stages", "inputs,forward", "--out", str(tmp_path / "out")]) == 2
    assert "is of other weights" in capsys.readouterr().err


def test_listening_changes_no_bit_of_either_side() -> None:
    directory = open_hf(REFERENCE)
    family = family_of(directory.config)
    reference = Reference(REFERENCE, family, family.reference_dimensions(directory.config), torch.float32, torch.device("cpu"))
    before = reference.forward(BATCH.ids(), BATCH.mask())
    with listening(reference.model, reference.taps):
        during = reference.forward(BATCH.ids(), BATCH.mask())
    assert torch.equal(before, during) and torch.equal(before, reference.forward(BATCH.ids(), BATCH.mask()))
    checkpoint = open_checkpoint(GOLDEN / "tiny-qwen3.5-moe-torch_dist")
    candidate = CandidateRun(family, plain(checkpoint.args), "slime", checkpoint.path, Parallel(), torch.float32, "cpu", BATCH)
    candidate.build()
    rows = [list(row) for row in BATCH.rows]
    alone = candidate.logits(rows)
    heard = candidate.record().tensors["lm_head"]
    ends = torch.tensor(BATCH.lengths).cumsum(0) - 1
    assert torch.equal(alone, heard[ends]) and torch.equal(alone, candidate.logits(rows))


def test_a_batch_run_in_parts_says_what_it_says_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory, parallel = open_hf(REFERENCE), Parallel(ep=2)
    family = family_of(directory.config)
    checkpoint = open_checkpoint(GOLDEN / "tiny-qwen3.5-moe-torch_dist")
    wanted = Wanted(directory, family, "slime", torch.float32)
    reference, _ = wanted.load()
    recording = record_reference(wanted, reference, BATCH, tmp_path / "whole")
    candidate = CandidateRun(family, plain(checkpoint.args), "slime", checkpoint.path, parallel, torch.float32, "cpu", BATCH)
    candidate.build()
    grafts = (recording.path, base_grafts(candidate.dims))
    free, grafted = candidate.record(), candidate.record(grafts)
    assert len(BATCH.parts(1)) == len(BATCH.rows) > 1
    monkeypatch.setattr("bisect_tool.prompts.FORWARD_TOKENS", 1)
    for whole, parts in ((free, candidate.record()), (grafted, candidate.record(grafts))):
        assert whole.tensors.keys() == parts.tensors.keys()
        for key, tensor in whole.tensors.items():
            torch.testing.assert_close(parts.tensors[key], tensor, rtol=1e-3, atol=1e-4, msg=key)
    again = record_reference(wanted, reference, BATCH, tmp_path / "parts")
    for key in recording.keys:
        torch.testing.assert_close(again[key], recording[key], rtol=1e-3, atol=1e-4, msg=key)


def test_a_recording_of_each_side_can_be_made(tmp_path: Path) -> None:
    for side in ("reference", "candidate"):
        out = tmp_path / side
        assert run(["record", "--side", side, "--prompts", str(PROMPTS), "--out", str(out)]) == 0
        assert json.loads((out / "recording.json").read_text())["side"] == side


def test_a_conversion_without_mtp_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["convert", "--reference", str(REFERENCE), "--out", str(out), "--no-mtp", "--layout", "native"]) == 0
    assert "left out 65 reference tensors: multi-token prediction" in capsys.readouterr().out
    assert not [key for key in open_checkpoint(out).tensors if key.startswith("mtp.")]
    assert run(["audit", "--reference", str(REFERENCE), "--candidate", str(out), "--out", str(tmp_path / "report")]) == 0
    skipped = next(stage for stage in page_of(tmp_path / "report")["stages"] if stage["name"] == "weights")["skipped"]
    assert "mtp.*" in [one["what"] for one in skipped]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def patch(model, parallel):\n    raise RuntimeError('planted')\n", "line 2: RuntimeError: planted"),
        # one rank of two, while the other waits for it
        (
            "import torch.distributed as dist\n\n\ndef patch(model, parallel):\n    if dist.get_rank() == 1:\n        model.nothing\n    dist.barrier()\n",
            "line 6: AttributeError: 'GPTModel' object has no attribute 'nothing'",
        ),
        ("def patch(model, parallel)\n    pass\n", "line 1: SyntaxError: expected ':'"),
        # only when the model runs
        (
            "def hook(module, args, output):\n    raise ValueError('planted')\n\n\n"
            "def patch(model, parallel):\n    model.decoder.layers[1].mlp.register_forward_hook(hook)\n",
            "line 2: ValueError: planted",
        ),
    ],
    ids=["every rank", "one rank", "no Python", "a hook"],
)
def test_what_a_patch_raises_is_the_users_and_no_rank_is_waited_for(
    text: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    patch, out = tmp_path / "patch.py", tmp_path / "out"
    patch.write_text(text)
    command = ["run", "--prompts", str(PROMPTS), "--candidate-patch", str(patch), "--stages", "inputs,forward", "--out", str(out)]
    started = time.monotonic()
    assert run([*command, *(["--tp", "2"] if "rank" in text else [])]) == 2
    assert time.monotonic() - started < 120
    errors = capfd.readouterr().err.splitlines()
    (line,) = [line for line in errors if line.startswith("Error: ")]
    assert f"--candidate-patch {patch}, {said}" in line
    assert not (out / "traceback.txt").exists() and not (out / "report.json").exists()


def test_a_rank_that_ends_is_a_crash_with_a_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    patch, out = tmp_path / "patch.py", tmp_path / "out"
    patch.write_text("import os\n\n\ndef patch(model, parallel):\n    print('planted', flush=True)\n    os._exit(3)\n")
    assert run(["run", "--prompts", str(PROMPTS), "--candidate-patch", str(patch), "--stages", "inputs,forward", "--out", str(out)]) == 70
    errors = capfd.readouterr().err.splitlines()
    assert [line for line in errors if line.startswith("Error: ")] == [line for line in errors if "planted" in line]
    assert "BisectError" in (out / "traceback.txt").read_text() and not (out / "report.json").exists()


def test_an_interrupted_run_exits_130_and_leaves_no_rank_behind(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bisect_tool",
        "run",
        "--prompts",
        str(PROMPTS),
        "--stages",
        "inputs,forward",
        "--out",
        str(tmp_path / "out"),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "hooks")])}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    ranks: list[psutil.Process] = []
    until = time.monotonic() + 60
    while not ranks and time.monotonic() < until:
        ranks = [child for child in psutil.Process(process.pid).children() if "bisect_tool.worker" in " ".join(child.cmdline())]
        time.sleep(0.1)
    assert ranks
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().strip().endswith("Error: interrupted")
    assert not psutil.wait_procs(ranks, timeout=10)[1]
    assert not (tmp_path / "out" / "report.json").exists()


LOST = """
import sys, time
from bisect_tool.__main__ import interrupt_again
sys.unraisablehook = interrupt_again
class Deleted:
    def __del__(self):
        raise KeyboardInterrupt
try:
    Deleted()
    time.sleep(10)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_that_python_ignores_comes_again() -> None:
    """As one did while a regular expression was being deleted: the run went on and ended with 0."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "hooks")])}
    done = subprocess.run([sys.executable, "-c", LOST], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "interrupted\n"


def test_a_reference_of_which_a_weight_is_no_number_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = with_weight(
        tmp_path / "other", "model.language_model.layers.2.linear_attn.in_proj_z.weight", lambda weight: weight[50, 20].fill_(torch.nan)
    )
    asked = ["run", "--reference", str(other), "--candidate", str(GOLDEN / "tiny-qwen3.5-moe-torch_dist"), "--prompts", str(PROMPTS)]
    assert run([*asked, "--stages", "inputs,forward", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "the reference itself gives 78 values that are NaN or infinite, first at layers.2.linear_attention.in_proj:z" in said
    assert "in_proj_z.weight holds some" in said
