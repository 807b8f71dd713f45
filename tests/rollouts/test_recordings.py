"""An engine's activations: its prefill and its decode against the reference and each other, and whose fault a drift then is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_dumps
import pytest
import torch
from engine_room import MODEL, fault_of, judged, said
from written import Errors, Said, Written

from bisect_tool.__main__ import run
from bisect_tool.importing import import_dump
from bisect_tool.listing import hashes

pytestmark = pytest.mark.wide

ROW, START = (1, 25, 13, 26, 31, 7, 8, 11, 14, 9, 21, 30, 12, 5), 6


@pytest.fixture(scope="module")
def written() -> Written:
    return Written(MODEL)


def prefill(folder: Path, words: Said, written: Written) -> Path:
    """Prompt and response in one pass."""
    foreign_dumps.sglang(folder / "dump", words, [ROW], written.dims)
    import_dump("sglang", folder / "dump", folder / "prefill", MODEL)
    return folder / "prefill"


def decode(folder: Path, words: Said, written: Written) -> Path:
    foreign_dumps.sglang_decode(folder / "steps", words, ROW, START, written.dims)
    import_dump("sglang", folder / "steps", folder / "decode", MODEL, decode=True)
    return folder / "decode"


def weight(layer: int, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Errors:
    return Errors(weight=lambda one, value: change(value) if f"layers.{layer}.{name}" in one else value)


def table(page: dict[str, Any]) -> list[str]:
    """Who is held against whom, and whether they agree."""
    return [" ".join(probe.split(",")[0].split(" at ")[0].split()) for probe in page["stages"][4]["probes"]]


def test_a_prefill_and_a_decode_that_are_right_agree(written: Written, tmp_path: Path) -> None:
    words = written.run([ROW])
    recordings = (prefill(tmp_path, words, written), decode(tmp_path, words, written))
    code, page = judged(tmp_path / "out", *(word for path in recordings for word in ("--rollout-recording", path)))
    assert (code, page["faults"]) == (0, [])
    assert table(page) == [
        "engine prefill against reference: agrees", "engine decode against reference: agrees", "engine decode against engine prefill: agrees",
    ]  # fmt: skip
    assert {one["suspect"] for one in page["cleared"]} == {"the engine's prefill", "the engine's decode"}
    assert page["stages"][4]["compared"]["tokens"] == 2 * len(ROW)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_drift_of_prefill_is_placed_and_its_class_is_open_until_the_weights_are_known(
    hashed: bool, written: Written, tmp_path: Path
) -> None:
    words = written.run([ROW], weight(4, "linear_attn.in_proj_z", lambda value: value * 1.05))
    more: list[str | Path] = []
    if hashed:
        (tmp_path / "hashes").write_text("\n".join(hashes(MODEL)) + "\n")
        more = ["--hashes", tmp_path / "hashes"]
    code, page = judged(tmp_path / "out", "--rollout-recording", prefill(tmp_path, words, written), *more)
    cls = "rollout" if hashed else None
    assert (code, [fault_of(one) for one in page["faults"]]) == (1, [(cls, [4], "linear_attention", ["in_proj"], ["reference", "engine"])])
    if not hashed:
        assert page["first"]["class_candidates"] == ["conversion", "rollout"]
        assert f"bisect-tool audit --reference {MODEL} --candidate MEGATRON_DIR" in page["first"]["next"]


@pytest.mark.parametrize("both", [False, True])
def test_g10_g11_a_state_that_decode_loses_is_placed_and_clears_the_conversion(both: bool, written: Written, tmp_path: Path) -> None:
    """Every decode step of the linear attention begins with an empty state (G15 too)."""
    lost = written.run([ROW], Errors(state=[START, *[1] * (len(ROW) - START)]))
    recordings = [decode(tmp_path, lost, written)]
    if both:
        recordings.append(prefill(tmp_path, written.run([ROW]), written))
    code, page = judged(tmp_path / "out", *(word for path in recordings for word in ("--rollout-recording", path)))
    assert code == 1
    first = page["first"]
    # the first site of the dump behind the state is the gated norm
    assert [fault_of(one)[:4] for one in page["faults"]] == [("rollout", [0], "linear_attention", ["gated_norm"])]
    assert "Only tokens that decode made are wrong" in first["explanation"]
    assert "cleared: the conversion" in said(page)
    if both:
        assert table(page)[0].endswith("agrees") and table(page)[2] == "engine decode against engine prefill: differs"


def test_w05_w10_rows_of_a_cached_prefix_that_are_old_are_placed(written: Written, tmp_path: Path) -> None:
    """The first tokens come from other weights, the rest from the right ones: a state of another model is in every layer."""
    old = written.run([ROW], weight(0, "linear_attn.out_proj", lambda value: value * 0.5))
    right = written.run([ROW])
    mixed = {key: torch.cat([old[key][:3], right[key][3:]]) for key in right}
    code, page = judged(tmp_path / "out", "--rollout-recording", prefill(tmp_path, mixed, written))
    assert (code, fault_of(page["first"])[:4]) == (1, ("rollout", [0], "linear_attention", ["out_proj"]))


def test_w08_exchanged_kv_heads_are_placed_at_the_first_full_attention_layer(written: Written, tmp_path: Path) -> None:
    def exchanged(key: str, value: torch.Tensor) -> torch.Tensor:
        return value.roll(written.dims.heads // 2, -2) if key.endswith("attention.core") and "linear" not in key else value

    (tmp_path / "hashes").write_text("\n".join(hashes(MODEL)) + "\n")
    recording = prefill(tmp_path, written.run([ROW], Errors(finish=exchanged)), written)
    code, page = judged(tmp_path / "out", "--rollout-recording", recording, "--hashes", tmp_path / "hashes")
    first = page["first"]
    assert (code, fault_of(first)[0], first["layer"], first["module"]) == (1, "rollout", 3, "attention")


def test_t06_routing_that_is_replayed_one_layer_off_follows_from_no_logits(written: Written, tmp_path: Path) -> None:
    """From layer 5 on each layer is given the choice of the one before."""
    held: dict[str, torch.Tensor] = {}

    def shifted(key: str, value: torch.Tensor) -> torch.Tensor:
        if not key.endswith(("router.probs", "router.topk")):
            return value
        layer = int(key.split(".")[1])
        held[key] = value
        return held[key.replace(f".{layer}.", f".{layer - 1}.")] if layer >= 5 else value

    code, page = judged(tmp_path / "out", "--rollout-recording", prefill(tmp_path, written.run([ROW], Errors(finish=shifted)), written))
    first = page["first"]
    assert (code, first["class"], first["layer"], first["module"]) == (1, "rollout", 5, "router")
    assert {one["layer"] for one in page["faults"]} <= {5, 6, 7}


def test_z01_an_engine_that_computes_in_bf16_has_no_fault(written: Written, tmp_path: Path) -> None:
    def rounded(key: str, value: torch.Tensor) -> torch.Tensor:
        return value if key == "tokens" or key.endswith("topk") else value.bfloat16().float()

    words = written.run([ROW], Errors(finish=rounded))
    coarse = {key: value if key == "tokens" or key.endswith("topk") else value.bfloat16() for key, value in words.items()}
    code, page = judged(tmp_path / "out", "--rollout-recording", prefill(tmp_path, coarse, written))
    # so few tokens, so many experts: behind the last flip of a near tie nothing is left to compare, and that is said
    assert (code, page["faults"], page["cleared"]) == (125, [], [])
    assert "each as the candidate's own logits say" in said(page)


BROKEN: dict[str, tuple[Callable[[Path], list[str | Path]], str]] = {
    "no recording": (lambda path: ["--rollout-recording", path], "is no recording"),
    "two prefills": (lambda path: ["--rollout-recording", path / "prefill"] * 2, "is a second recording of engine prefill"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_recordings_that_are_none_are_one_clear_error(
    what: str, written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill(tmp_path, written.run([ROW]), written)
    arguments, text = BROKEN[what]
    assert run(["rollout", "--reference", str(MODEL), *map(str, arguments(tmp_path)), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ") and error.count("\n") == 1 and text in error


def test_decode_steps_of_several_requests_are_refused(written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign_dumps.sglang(tmp_path / "dump", written.run([ROW, ROW[:5]]), [ROW, ROW[:5]], written.dims)
    base = ["import", "sglang", str(tmp_path / "dump"), "--reference", str(MODEL), "--out", str(tmp_path / "out")]
    assert run([*base, "--decode"]) == 2
    assert "holds no prefill of one sequence with decode steps" in capsys.readouterr().err
