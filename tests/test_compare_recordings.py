"""The rows of the catalogue that megatron-core can't run on a CPU, as recordings.

The candidate is computed by written-out formulas with the row's error in it, segment by segment or as each rank would have, cut
into ranks' files, put together and judged by the code that ships.  Nothing here was run by megatron-core.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from bisect_hooks.family import family_of
from bisect_hooks.parallel import Parallel
from bisect_hooks.zigzag import zigzag_order
from rank_files import megatron, write_ranks
from safetensors.torch import load_file, save_file
from written import Errors, Written

from bisect_tool import golden
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.comparing import compare
from bisect_tool.free import FreeRun
from bisect_tool.hf_directory import open_hf
from bisect_tool.noise import MARGIN
from bisect_tool.prompts import Batch
from bisect_tool.recording import Recording
from bisect_tool.reference import Wanted
from bisect_tool.reference_recording import recorded_reference
from bisect_tool.text import render

LENGTHS = (16, 64, 24)
ROWS = tuple(tuple(torch.randint(3, 500, (n,), generator=torch.Generator().manual_seed(n)).tolist()) for n in LENGTHS)
TOKENS = sum(LENGTHS)
CP2 = Parallel(cp=2)
GOLDEN = Recording(golden.folder() / "recording")


@pytest.fixture(scope="module")
def written() -> Written:
    return Written(golden.reference())


@pytest.fixture(scope="module")
def reference() -> Path:
    """transformers on the same rows, with its own noise."""
    directory = open_hf(golden.reference())
    layout = open_checkpoint(golden.candidate()).layout
    return recorded_reference(Wanted(directory, family_of(directory.config), layout, torch.float32), Batch(ROWS)).recording.path


def judged(reference: Path, candidate: Path) -> dict[str, Any]:
    return compare(reference, candidate).to_json()


def only_fault(page: dict[str, Any]) -> dict[str, Any]:
    assert page["verdict"] == "differs"
    assert len(page["faults"]) == 1
    return dict(page["first"])


def place(fault: dict[str, Any]) -> tuple[Any, ...]:
    return fault["class"], fault["layer"], fault["module"], fault["part"]


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=2), Parallel(tp=2, sp=True), CP2, Parallel(tp=2, cp=2, sp=True)], ids=str)
@pytest.mark.parametrize("rows", [ROWS, GOLDEN.provenance.rows], ids=["even", "padded"])
def test_a_recording_without_an_error_agrees_in_every_layout(
    rows: Sequence[Sequence[int]], parallel: Parallel, reference: Path, written: Written, tmp_path: Path
) -> None:
    found = judged(reference if rows is ROWS else GOLDEN.path, write_ranks(tmp_path / "ranks", written.run(rows), rows, parallel))
    assert (found["verdict"], found["faults"]) == ("agrees", [])
    assert found["stages"][3]["compared"] == {"sites": 147, "tensors": 205, "tokens": sum(map(len, rows)), "ranks": parallel.world}


@pytest.mark.parametrize(
    ("errors", "part", "inside"),
    [
        pytest.param(Errors(state=[TOKENS]), "core", None, id="G03-recording-the-kernel-does-not-know"),
        pytest.param(Errors(conv=[TOKENS]), "conv1d", "only in the first 3 tokens of a segment", id="G03-recording-the-convolution-does-not-know"),
        pytest.param(Errors(conv=[TOKENS], state=[TOKENS]), "conv1d", "only in the first 3 tokens of a segment", id="G03-recording-neither-knows"),
    ],
)  # fmt: skip
def test_a_recording_whose_mixer_does_not_know_the_segments(
    errors: Errors, part: str, inside: str | None, reference: Path, written: Written, tmp_path: Path
) -> None:
    fault = only_fault(judged(reference, write_ranks(tmp_path / "ranks", written.run(ROWS, errors), ROWS, Parallel())))
    assert place(fault) == ("model-definition", 0, "linear_attention", part)
    assert (fault["shape"]["kind"], fault["shape"]["segments"]) == ("segments", [1, 2])
    assert "only in segments 1 and 2" in fault["explanation"]
    if inside:
        assert fault["shape"]["inside"]["text"] == inside
    else:
        assert "strongest at their start and fading" in fault["explanation"]


def test_a_recording_without_sequence_indices_says_so_g07(reference: Path, written: Written, tmp_path: Path) -> None:
    said = written.run(ROWS, Errors(conv=[TOKENS], state=[TOKENS]))
    ranks = write_ranks(tmp_path / "ranks", said, ROWS, Parallel(), packed={"seq_idx": None, "total_tokens": None})
    fault = only_fault(judged(reference, ranks))
    assert place(fault) == ("model-definition", 0, "linear_attention", "conv1d")
    assert "The packed batch says nothing of seq_idx and total_tokens." in fault["explanation"]


def test_a_recording_with_parameters_of_another_cp_size_g08(reference: Path, written: Written, tmp_path: Path) -> None:
    """Megatron's GatedDeltaNet cuts heads over CP; with the sizes of CP 1 every rank takes the first heads' parameters."""

    def first_heads(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight[: len(weight) // 2].repeat(2) if name.endswith(("A_log", "dt_bias")) else weight

    def heads_over_cp(key: str) -> str:
        return "s b f[cp]" if ".linear_attention." in key and not key.endswith("out_proj") else megatron(key)

    said = written.run(ROWS, Errors(weight=first_heads))
    fault = only_fault(judged(reference, write_ranks(tmp_path / "ranks", said, ROWS, CP2, layout_of=heads_over_cp)))
    assert place(fault)[:3] == ("parallel", 0, "linear_attention")
    assert fault["site"] == "layers.0.linear_attention.decay"
    assert fault["shard"]["cp"] == [1]


def test_a_recording_whose_sequence_is_reassembled_in_the_wrong_order_g09(reference: Path, written: Written, tmp_path: Path) -> None:
    """The zigzag is not undone: rank 0's two chunks stand one behind the other, then rank 1's."""
    order = zigzag_order(TOKENS, LENGTHS, 2)
    fault = only_fault(judged(reference, write_ranks(tmp_path / "ranks", written.run(ROWS, Errors(order=order)), ROWS, CP2)))
    assert place(fault)[:3] == ("parallel", 0, "linear_attention")
    assert fault["site"] == "layers.0.linear_attention.in_proj"
    ids = torch.tensor(sum(ROWS, ()))  # in layer 0, tokens of one id can't be told apart
    assert fault["relation"]["kind"] == "permutation"
    assert ids[fault["relation"]["detail"]["map"]].tolist() == ids[order].tolist()
    assert fault["shard"]["cp"] == [0, 1]


def test_a_recording_whose_positions_go_on_over_segments_p04(reference: Path, written: Written, tmp_path: Path) -> None:
    said = written.run(ROWS, Errors(positions=torch.arange(TOKENS)))
    fault = only_fault(judged(reference, write_ranks(tmp_path / "ranks", said, ROWS, Parallel())))
    assert place(fault) == ("model-definition", 3, "attention", "rope")
    assert fault["layers"] == [3, 7]
    assert (fault["shape"]["kind"], fault["shape"]["segments"]) == ("segments", [1, 2])


def test_a_recording_that_holds_its_wrong_positions_is_not_compared_further_p04(reference: Path, written: Written, tmp_path: Path) -> None:
    said = written.run(ROWS, Errors(positions=torch.arange(TOKENS)))
    page = judged(reference, write_ranks(tmp_path / "ranks", said, ROWS, Parallel(), positions=list(range(TOKENS))))
    fault = only_fault(page)
    assert place(fault) == ("capture", None, "tokens", None)
    assert "the whole row is off by +16: they go on over the packed sequence" in fault["explanation"]
    assert page["stages"][3]["verdict"] is None


def test_a_recording_whose_ranks_take_the_first_segments_frequencies_p05(reference: Path, written: Written, tmp_path: Path) -> None:
    """CP 2: each rank picks the rotary frequencies of its chunks by the chunk size of segment 0."""
    positions = torch.cat([torch.arange(n // 4) + c * (LENGTHS[0] // 4) for n in LENGTHS for c in range(4)])
    fault = only_fault(judged(reference, write_ranks(tmp_path / "ranks", written.run(ROWS, Errors(positions=positions)), ROWS, CP2)))
    assert place(fault) == ("parallel", 3, "attention", "rope")
    assert fault["shard"]["cp"] == [0, 1]
    assert (fault["shape"]["kind"], fault["shape"]["chunks"], fault["shape"]["segments"]) == ("chunks", [1, 2, 3], [1, 2])


def test_a_recording_cut_over_sp_before_cp_d06(reference: Path, written: Written, tmp_path: Path) -> None:
    parallel = Parallel(tp=2, cp=2, sp=True)
    right = zigzag_order(TOKENS, LENGTHS, 2)
    halves = [half[zigzag_order(len(half), (), 2)].chunk(2) for half in torch.arange(TOKENS).chunk(2)]
    wrong = torch.cat([halves[tp][cp] for cp in range(2) for tp in range(2)])
    held = torch.empty_like(right).scatter(0, right, wrong)

    def scattered(key: str, value: torch.Tensor) -> torch.Tensor:
        return value[held] if key == "embedding" else value

    fault = only_fault(judged(reference, write_ranks(tmp_path / "ranks", written.run(ROWS, Errors(finish=scattered)), ROWS, parallel)))
    assert place(fault) == ("parallel", None, "embedding", None)
    assert fault["relation"]["kind"] == "permutation"
    assert (fault["shard"]["tp"], fault["shard"]["cp"]) == ([0, 1], [0, 1])


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_a_recording_with_rows_that_nobody_wrote_d08(value: float, reference: Path, written: Written, tmp_path: Path) -> None:
    """The prefix cache answered for the first tokens of row 1: their logits were never computed."""

    def unwritten(key: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_fill(0, torch.arange(16, 48), value) if key == "lm_head" else tensor

    fault = only_fault(judged(reference, write_ranks(tmp_path / "ranks", written.run(ROWS, Errors(finish=unwritten)), ROWS, Parallel())))
    assert place(fault) == ("capture", None, "lm_head", None)
    assert fault["shape"]["text"] == "row 1, positions 0 to 31"


@pytest.mark.parametrize("key", ["lm_head", "layers.2.input_norm"])
def test_a_recording_with_stale_rows_d08(key: str, reference: Path, written: Written, tmp_path: Path) -> None:
    """The same, where the memory held something: another row's values."""

    def stale(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:16], tensor[80:96], tensor[32:]]) if name == key else tensor

    said = written.run(ROWS)
    said[key] = stale(key, said[key])
    fault = only_fault(judged(reference, write_ranks(tmp_path / "ranks", said, ROWS, Parallel())))
    assert place(fault)[0] == "capture"
    assert fault["site"] == key
    assert fault["shape"]["text"] == "row 1, positions 0 to 15"
    assert "have nothing to do with what enters" in fault["explanation"]


def test_only_rows_that_are_off_by_themselves_are_said_to_be_stale(tmp_path: Path) -> None:
    """What is allowed is for all rows together: the noisiest of many goes beyond it, and is right."""
    other, key = tmp_path / "other", "layers.4.experts.combine"
    shutil.copytree(GOLDEN.path, other)
    said = load_file(other / GOLDEN.files[key])
    allowed = FreeRun(GOLDEN, GOLDEN, torch.arange(GOLDEN.batch.tokens)).tolerance(key).relative_rms
    typical = said[key].square().sum(-1).mean().sqrt()
    said[key][60] += 1.5 * allowed * typical / said[key].shape[1] ** 0.5
    said[key][50] = said[key][51]
    save_file(said, other / GOLDEN.files[key])
    fault = only_fault(judged(GOLDEN.path, other))
    row, position = GOLDEN.batch.where(50)
    assert (fault["site"], fault["shape"]["tokens"]) == (key, [50])
    assert f"1 of {GOLDEN.batch.tokens} rows (row {row}, position {position}) has nothing to do with what enters" in fault["explanation"]
    assert fault["explanation"].endswith("another row's values, or nobody wrote there.")


def edited(folder: Path, key: str, change: Callable[[torch.Tensor], None]) -> Path:
    """The golden recording with one of its tensors changed."""
    other = folder / "other"
    shutil.copytree(GOLDEN.path, other)
    said = load_file(other / GOLDEN.files[key])
    change(said[key])
    save_file(said, other / GOLDEN.files[key])
    return other


def test_one_wrong_token_that_is_small_beside_all_of_them_is_found(tmp_path: Path) -> None:
    key = "layers.3.attention.core"
    allowed = FreeRun(GOLDEN, GOLDEN, torch.arange(GOLDEN.batch.tokens)).tolerance(key)

    def one(core: torch.Tensor) -> None:
        typical = core.square().sum(-1).mean().sqrt()
        core[50] += 1.5 * MARGIN * allowed.token * typical / core.shape[1] ** 0.5

    page = judged(GOLDEN.path, edited(tmp_path, key, one))
    fault = only_fault(page)
    assert (fault["class"], fault["site"]) == ("model-definition", key)
    assert fault["difference"]["relative_rms"] < allowed.relative_rms
    assert "worst token 50: 12 x its noise, 8 allowed" in fault["explanation"]
    assert fault["shape"]["text"].endswith(f"token {GOLDEN.batch.where(50)[1]}")


@pytest.mark.parametrize("more", [1.0, 0.4, torch.nan])
def test_a_recording_whose_embedding_saw_other_ids_than_its_rows_hold_is_not_compared(more: float, tmp_path: Path) -> None:
    other, file = tmp_path / "other", GOLDEN.files["tokens"]
    shutil.copytree(GOLDEN.path, other)
    said = load_file(other / file)
    said["tokens"] = said["tokens"].float()
    said["tokens"].reshape(-1)[50] += more
    save_file(said, other / file)
    page = judged(GOLDEN.path, other)
    fault = only_fault(page)
    row, position = GOLDEN.batch.where(50)
    assert (place(fault), page["stages"][3]["verdict"]) == (("capture", None, "tokens", None), None)
    assert f"at 1 of {GOLDEN.batch.tokens} tokens: first at row {row}, position {position}" in fault["explanation"]


@pytest.mark.parametrize("value", [2.0, torch.nan])
def test_an_output_that_is_not_the_next_layers_input_is_an_error_of_the_recording(value: float, tmp_path: Path) -> None:
    def one(output: torch.Tensor) -> None:
        output[50, 5] += value

    fault = only_fault(judged(GOLDEN.path, edited(tmp_path, "layers.4.output", one)))
    assert place(fault) == ("capture", 4, "mlp", None)
    assert "They are one tensor, so the recording is wrong and not the model." in fault["explanation"]


def test_choices_that_are_not_as_the_logits_say_are_not_said_to_be(tmp_path: Path) -> None:
    def another(chosen: torch.Tensor) -> None:
        chosen[50] = chosen[50].roll(1)

    page = judged(GOLDEN.path, edited(tmp_path, "layers.4.router.topk", another))
    assert place(only_fault(page)) == ("model-definition", 4, "router", "topk")
    assert any("choices flip, and not as the candidate's own logits say" in note for note in page["stages"][3]["notes"])


def test_an_error_of_rows_that_are_not_packed_keeps_to_prompts_and_its_numbers_tell_the_sides_apart(tmp_path: Path) -> None:
    other, key = tmp_path / "other", "layers.3.attention.core"
    shutil.copytree(GOLDEN.path, other)
    said = load_file(other / GOLDEN.files[key])
    prompt = len(GOLDEN.provenance.rows) - 2
    start = sum(map(len, GOLDEN.provenance.rows[:prompt]))
    said[key][start : start + len(GOLDEN.provenance.rows[prompt])] *= 1.0001
    save_file(said, other / GOLDEN.files[key])
    page = judged(GOLDEN.path, other)
    assert f"only in prompt {prompt}" in only_fault(page)["explanation"]
    shown = re.search(r"reference (\S+), candidate (\S+)", " ".join(render(page).split()))
    assert shown is not None and shown[1] != shown[2]
    # no more digits than it takes
    assert f"{float(shown[1]):.3g}" == f"{float(shown[2]):.3g}" and len(shown[1]) < 9


def test_past_taps_of_a_convolution_are_no_error_that_grows(reference: Path, written: Written, tmp_path: Path) -> None:
    def past(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight * torch.tensor([2.0, 2.0, 2.0, 1.0]) if name.endswith("layers.0.linear_attn.conv1d.weight") else weight

    fault = only_fault(judged(reference, write_ranks(tmp_path / "ranks", written.run(ROWS, Errors(weight=past)), ROWS, Parallel())))
    assert place(fault) == (None, 0, "linear_attention", "conv1d")
    assert fault["shape"]["text"] == "from the second token of each segment on, none at the first"
    assert "conversion" in fault["class_candidates"]


def test_a_recording_whose_replicas_disagree_is_not_compared(reference: Path, written: Written, tmp_path: Path) -> None:
    def one_rank_apart(rank: int, tensors: dict[str, torch.Tensor]) -> None:
        if rank == 1:
            tensors["layers.2.router.logits"] *= 1.01

    ranks = write_ranks(tmp_path / "ranks", written.run(ROWS), ROWS, Parallel(tp=2), change=one_rank_apart)
    fault = only_fault(judged(reference, ranks))
    assert place(fault) == ("capture", 2, "router", "logits")


@pytest.mark.parametrize(
    "errors", [pytest.param(Errors(base=1e4), id="P01-another-base"), pytest.param(Errors(width=32), id="P03-all-of-each-head")]
)
def test_a_recording_with_another_rotation_grows_with_position(errors: Errors, reference: Path, written: Written, tmp_path: Path) -> None:
    fault = only_fault(judged(reference, write_ranks(tmp_path / "ranks", written.run(ROWS, errors), ROWS, Parallel())))
    assert place(fault) == ("model-definition", 3, "attention", "rope")
    assert fault["shape"]["text"] == "grows with position, zero at position 0"


def test_nan_is_made_in_one_place_and_only_shows_behind_it(reference: Path, written: Written, tmp_path: Path) -> None:
    def nan(key: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_fill(0, torch.tensor([30]), float("nan")) if key == "layers.2.pre_mlp_norm" else tensor

    fault = only_fault(judged(reference, write_ranks(tmp_path / "ranks", written.run(ROWS, Errors(finish=nan)), ROWS, Parallel())))
    assert (fault["class"], fault["site"], fault["shows_at"]) == ("model-definition", "layers.2.pre_mlp_norm", "layers.2.router.logits")
    assert fault["difference"]["nonfinite"] == 96


def test_a_wrong_weight_keeps_its_class_open_and_names_the_run_that_decides(reference: Path, written: Written, tmp_path: Path) -> None:
    def scaled(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1.02 if "layers.5.linear_attn.out_proj" in name else weight

    ranks = write_ranks(tmp_path / "ranks", written.run(ROWS, Errors(weight=scaled)), ROWS, Parallel(tp=2))
    fault = only_fault(judged(reference, ranks))
    assert place(fault) == (None, 5, "linear_attention", "out_proj")
    assert fault["class_candidates"] == ["conversion", "model-definition", "parallel"]
    assert "--tp 2" in fault["next"]


def test_tokens_behind_a_choice_that_differs_are_not_compared_and_that_is_no_agreement(tmp_path: Path) -> None:
    token = 64
    end = next(one for one in accumulate(map(len, GOLDEN.provenance.rows)) if one > token)
    name, sides = GOLDEN.files["layers.7.router.topk"], [tmp_path / "reference", tmp_path / "candidate"]
    for side in sides:
        shutil.copytree(GOLDEN.path, side)
    said = load_file(sides[0] / name)
    topk, logits = said["layers.7.router.topk"][token], said["layers.7.router.logits"][token]
    last, next_one = logits.argsort(descending=True)[[int(topk.sum()) - 1, int(topk.sum())]].tolist()
    logits[next_one] = logits[last] * (1 - 1e-6 * logits[last].sign())  # nearly a tie: the candidate chooses the other
    save_file(said, sides[0] / name)
    for values in (topk, logits):
        values[[last, next_one]] = values[[next_one, last]]
    said["layers.7.output"][token + 1 : end] *= 2
    save_file(said, sides[1] / name)
    page = judged(*sides)
    assert page["verdict"] == "incomparable" and not page["faults"]
    (note,) = [one for one in page["stages"][3]["notes"] if "their routing differs" in one]
    assert note.startswith(f"not compared: {end - token} of {sum(map(len, GOLDEN.provenance.rows))} tokens")


def test_recordings_of_two_dtypes_are_said_to_be(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(GOLDEN.path, other)
    said = json.loads((other / "recording.json").read_text())
    (other / "recording.json").write_text(json.dumps(said | {"dtype": "bfloat16"}))
    assert compare(GOLDEN.path, other).to_json()["provenance"]["dtype"].startswith("fp32 reference, bf16 candidate")
