"""Foreign dumps become Recordings: taken apart, put together, lined up; what is not known is said, and nothing in a dump is run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_dumps
import pytest
import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.parallel import Parallel
from safetensors.torch import save_file
from written import Errors, Said, Written

from bisect_tool import golden
from bisect_tool.comparing import compare
from bisect_tool.importing import import_dump
from bisect_tool.recording import Provenance, Recording, writing

GOLDEN = Recording(golden.folder() / "recording")
ROWS = GOLDEN.provenance.rows


@pytest.fixture(scope="module")
def written() -> Written:
    return Written(golden.reference())


@pytest.fixture(scope="module")
def said(written: Written) -> Said:
    return written.run(ROWS)


def imported(form: str, path: Path, out: Path, **more: Any) -> tuple[Recording, str]:
    text = import_dump(form, path, out, golden.reference(), **more)
    return Recording(out), text


def judged(out: Path) -> dict[str, Any]:
    return compare(GOLDEN.path, out).to_json()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_dump_of_sglang_is_taken_apart_and_agrees(tp: int, said: Said, written: Written, tmp_path: Path) -> None:
    dump = foreign_dumps.sglang(tmp_path / "dump", said, ROWS, written.dims, tp)
    found, text = imported("sglang", dump, tmp_path / "out")
    assert found.provenance.rows == ROWS
    assert found.provenance.positions == tuple(tuple(range(len(row))) for row in ROWS)
    assert found.provenance.parallel["tp"] == tp
    assert "step 0 was taken, the one with most tokens; 1 other steps were left out" in text
    assert "not known: model.layers.0.mlp.fancy_new_module; nearest:" in text
    assert ("taken for partial sums" in text) == (tp == 2)
    for key in (
        "layers.3.attention.qkv:gate",
        "layers.0.linear_attention.in_proj:alpha",
        "layers.0.router.topk",
        "layers.5.shared_expert.fc1:up",
    ):
        torch.testing.assert_close(found[key], said[key], rtol=0, atol=0)
    for key in ("layers.2.output", "layers.3.attention.out_proj", "layers.7.experts.combine"):
        torch.testing.assert_close(found[key], said[key], rtol=1e-5, atol=1e-6)
    if tp == 1:
        page = judged(tmp_path / "out")
        assert (page["verdict"], page["faults"]) == ("agrees", [])
        assert {"what": "attention.rope:q", "why": "the imported dump has no such site in any layer"} in page["stages"][3]["skipped"]


def test_an_engines_drift_is_placed_by_layer_and_module(written: Written, tmp_path: Path) -> None:
    """The gate of the shared expert taken out of layer 4 only, as an engine with another kernel might."""

    def wrong(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1.02 if "layers.4.linear_attn.in_proj_z" in name else weight

    foreign_dumps.sglang(tmp_path / "dump", written.run(ROWS, Errors(weight=wrong)), ROWS, written.dims)
    imported("sglang", tmp_path / "dump", tmp_path / "out")
    page = judged(tmp_path / "out")
    assert len(page["faults"]) == 1
    fault = page["first"]
    assert (fault["site"], fault["class"], fault["module"], fault["part"]) == (
        "layers.4.linear_attention.in_proj", None, "linear_attention", "in_proj",
    )  # fmt: skip


def test_a_dump_of_msprobe_is_read(said: Said, written: Written, tmp_path: Path) -> None:
    rows = [tuple(token for row in ROWS for token in row)]
    dump = foreign_dumps.msprobe(tmp_path / "dump", said, rows, written.dims)
    found, _ = imported("msprobe", dump, tmp_path / "out")
    assert found.provenance.rows == tuple(rows)
    assert torch.equal(found["layers.3.attention.qkv:k"], said["layers.3.attention.qkv:k"])
    assert torch.equal(found["layers.6.linear_attention.gated_norm"], said["layers.6.linear_attention.gated_norm"])


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_dump_of_slime_is_read(tp: int, said: Said, written: Written, tmp_path: Path) -> None:
    dump = foreign_dumps.slime(tmp_path / "dump", said, ROWS, written.dims, tp)
    found, text = imported("slime", dump, tmp_path / "out", parallel=Parallel(tp=tp))
    assert found.provenance.rows == ROWS
    assert "the first pass was taken; 1 later ones were left out" in text
    assert torch.equal(found["layers.5.output"], said["layers.5.output"])
    assert torch.equal(found["layers.3.attention.core"], said["layers.3.attention.core"])
    assert judged(tmp_path / "out")["verdict"] == "agrees"


def test_a_site_that_a_dump_has_of_some_layers_only_is_a_gap(said: Said, written: Written, tmp_path: Path) -> None:
    imported("slime", foreign_dumps.slime(tmp_path / "dump", said, ROWS, written.dims, held=(3,)), tmp_path / "out", parallel=Parallel())
    page = judged(tmp_path / "out")
    assert page["verdict"] == "incomparable"
    assert (
        "not compared: layers.7.attention.core: the candidate's recording lacks it: the dump has none of it" in page["stages"][3]["notes"]
    )


def test_layer_outputs_alone_place_a_drift_by_layer(written: Written, tmp_path: Path) -> None:
    foreign_dumps.slime(tmp_path / "dump", written.run(ROWS, Errors(base=1e4)), ROWS, written.dims)
    imported("slime", tmp_path / "dump", tmp_path / "out", parallel=Parallel())
    fault = judged(tmp_path / "out")["first"]
    assert fault["layer"] == 3
    assert fault["class"] is None


@pytest.mark.parametrize("save", [torch.save, save_file], ids=["pt", "safetensors"])
def test_a_dict_of_tensors_is_read_with_a_map(save: Callable[[Any, Path], None], said: Said, tmp_path: Path) -> None:
    rows = torch.tensor([token for row in ROWS for token in row])
    tensors = {
        "input_ids": rows,
        "seq_lens": torch.tensor([len(row) for row in ROWS]),
        "blocks.2.out": said["layers.2.output"],
        "odd": rows.float(),
    }
    path = tmp_path / ("dump.pt" if save is torch.save else "dump.safetensors")
    save(tensors, path)
    (tmp_path / "map.json").write_text(json.dumps({"blocks.*.out": "layers.*.output"}))
    found, text = imported("torch", path, tmp_path / "out", given=tmp_path / "map.json")
    assert torch.equal(found["layers.2.output"], said["layers.2.output"])
    assert "not known: odd" in text


def test_a_dump_in_which_nothing_is_known_is_refused_with_its_nearest_names(tmp_path: Path) -> None:
    torch.save({"input_ids": torch.tensor([1, 2]), "model.layers.0.self_attn.qkv": torch.ones(2, 4)}, tmp_path / "dump.pt")
    with pytest.raises(UsageError, match=r"model\.layers\.0\.self_attn\.qkv \(nearest: layers\.\*\.self_attn\.qkv_proj"):
        imported("torch", tmp_path / "dump.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_logits_of_the_last_tokens_only_are_left_out_and_said(said: Said, tmp_path: Path) -> None:
    ids = torch.tensor([token for row in ROWS for token in row])
    torch.save({"input_ids": ids, "model.norm": said["final_norm"], "lm_head": torch.ones(3, 500)}, tmp_path / "dump.pt")
    found, text = imported("torch", tmp_path / "dump.pt", tmp_path / "out")
    assert "left out: lm_head: it is (3, 500) where the pass has 78 tokens" in text
    assert "lm_head" not in found


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("form", ["sglang", "slime", "torch"])
def test_nothing_in_a_dump_is_run(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump" / "rank00000").mkdir(parents=True)
    torch.save({"value": Bomb(), "meta": {}}, tmp_path / "dump" / "step=0___rank=0___dump_index=1___name=input_ids.pt")
    torch.save({"layers": {0: Bomb()}}, tmp_path / "dump" / "rank00000" / "actor_Pass00000.pt")
    with pytest.raises(UsageError, match="refused, nothing in it was run"):
        imported(form, tmp_path / "dump", tmp_path / "out", parallel=Parallel())
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("form", ["sglang", "msprobe", "slime", "torch"])
def test_an_empty_directory_is_refused(form: str, tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    with pytest.raises(UsageError, match="holds n"):
        imported(form, tmp_path / "dump", tmp_path / "out")


def test_more_ranks_than_the_flags_say_are_refused(said: Said, written: Written, tmp_path: Path) -> None:
    foreign_dumps.slime(tmp_path / "dump", said, ROWS, written.dims, 2)
    with pytest.raises(UsageError, match="has a rank 1, one rank has 1; say how it was laid out"):
        imported("slime", tmp_path / "dump", tmp_path / "out")


@pytest.mark.parametrize(
    ("page", "said"),
    [("{", "is damaged"), ('{"task": "statistics"}', "keeps no tensors"), ('{"task": "tensor"}', "is damaged")],
)
def test_a_page_of_msprobe_that_tells_nothing_is_refused(page: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "dump.json").write_text(page)
    with pytest.raises(UsageError, match=said):
        imported("msprobe", tmp_path, tmp_path / "out")


def test_our_own_names_need_no_map_and_another_width_is_refused(tmp_path: Path) -> None:
    ids = torch.tensor([ROWS[-1]])
    layers = {f"layers.{n}.output": torch.randn(1, ids.shape[1], 96) for n in range(8)}
    torch.save({"input_ids": ids} | layers, tmp_path / "dump.pt")
    found, text = imported("torch", tmp_path / "dump.pt", tmp_path / "out")
    assert set(layers) <= set(found.keys) and "not known" not in text
    torch.save({"input_ids": ids} | layers | {"layers.3.output": torch.randn(1, ids.shape[1], 50)}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"50 wide, and config\.json has a hidden size of 96"):
        imported("torch", tmp_path / "other.pt", tmp_path / "refused")


def torch_dump(path: Path, said: Said, *keys: str, **more: torch.Tensor) -> Path:
    """A dict of tensors under our own names, and under names of its own."""
    lengths = torch.tensor([len(row) for row in ROWS])
    torch.save({"input_ids": torch.tensor(sum(ROWS, ())), "seq_lens": lengths} | {key: said[key] for key in keys} | more, path)
    return path


OUTPUTS = tuple(f"layers.{n}.output" for n in range(8))
ENDS = ("embedding", "lm_head")


def gaps(page: dict[str, Any]) -> list[str]:
    """What the report lists as not compared.  Nothing but a gap is in it."""
    assert (page["verdict"], page["faults"], page["minor"]) == ("incomparable", [], [])
    return [note for note in page["stages"][3]["notes"] if note.startswith("not compared: ")]


def test_two_dumps_without_the_layers_between_do_not_agree(said: Said, tmp_path: Path) -> None:
    for name in ("one", "other"):
        imported("torch", torch_dump(tmp_path / f"{name}.pt", said, *ENDS), tmp_path / name)
    page = compare(tmp_path / "one", tmp_path / "other").to_json()
    why = "the candidate's recording lacks it: the dump has none of it"
    assert gaps(page) == [f"not compared: output of layers 0 to 7: {why}"]
    assert {"what": "router.logits", "why": "the imported dump has no such site in any layer"} in page["stages"][3]["skipped"]
    assert gaps(judged(tmp_path / "other")) == gaps(page)


@pytest.mark.parametrize(("held", "said_of_it"), [(ENDS, ["layers"]), ((*ENDS, *OUTPUTS[4:]), ["output of layers 0 to 3"])])
def test_layers_that_no_recording_names_are_missed_all_the_same(
    held: tuple[str, ...], said_of_it: list[str], said: Said, tmp_path: Path
) -> None:
    """Recordings that another program wrote say nothing of what they lack."""
    for name in ("one", "other"):
        with writing(tmp_path / name) as writer:
            writer.add("outside", {key: said[key] for key in held})
            writer.close(Provenance("candidate", "qwen3.5-moe", "", "float32", ROWS))
    page = compare(tmp_path / "one", tmp_path / "other").to_json()
    assert gaps(page) == [f"not compared: {what}: nothing of it is in both recordings" for what in said_of_it]


def test_a_drift_behind_layers_that_were_not_compared_may_be_made_in_any_of_them(said: Said, tmp_path: Path) -> None:
    imported("torch", torch_dump(tmp_path / "dump.pt", said, "embedding", lm_head=said["lm_head"] * 1.01), tmp_path / "out")
    page = judged(tmp_path / "out")
    assert (page["verdict"], len(page["faults"]), page["first"]["site"]) == ("differs", 1, "lm_head")
    assert "Nothing of the layers between was there to compare: it may be made in any of them." in page["first"]["explanation"]


def test_a_name_that_is_not_known_leaves_its_site_absent_and_is_no_agreement(said: Said, tmp_path: Path) -> None:
    dump = torch_dump(tmp_path / "dump.pt", said, *OUTPUTS[:2], *OUTPUTS[3:], **{"layers.2.result": said["layers.2.output"]})
    found, text = imported("torch", dump, tmp_path / "out")
    why = "the dump has none of it, and 1 of its names is not known (first layers.2.result)"
    assert found.provenance.absent["layers.2.output"] == why
    assert f"absent: layers.2.output: {why}\n" in text and "not known: layers.2.result; nearest: layers.*.input, layers.*.output" in text
    assert gaps(judged(tmp_path / "out")) == [f"not compared: layers.2.output: the candidate's recording lacks it: {why}"]


def test_a_site_of_another_width_is_not_compared(said: Said, tmp_path: Path) -> None:
    narrow = {"layers.5.router.logits": said["layers.5.router.logits"][:, :8]}
    others = [f"layers.{n}.router.logits" for n in range(8) if n != 5]
    imported("torch", torch_dump(tmp_path / "dump.pt", said, *OUTPUTS, *others, **narrow), tmp_path / "out")
    what = "layers.5.router.logits: it is 16 wide in the reference's recording, 8 in the candidate's"
    assert gaps(judged(tmp_path / "out")) == [f"not compared: {what}"]


def test_a_model_with_another_hidden_size_is_not_compared_at_any_layer(said: Said, tmp_path: Path) -> None:
    """Both dumps fit their own config.json, and not each other."""
    config = json.loads((golden.reference() / "config.json").read_text())
    config.get("text_config", config)["hidden_size"] = 48
    (tmp_path / "config.json").write_text(json.dumps(config))
    dump = torch_dump(tmp_path / "dump.pt", said, **{key: said[key][:, :48] for key in ("embedding", *OUTPUTS)})
    import_dump("torch", dump, tmp_path / "out", tmp_path)
    why = "it is 96 wide in the reference's recording, 48 in the candidate's"
    assert gaps(judged(tmp_path / "out")) == [f"not compared: embedding: {why}", f"not compared: output of layers 0 to 7: {why}"]


@pytest.mark.parametrize(
    ("theirs", "ours", "near"),
    [
        ("blocks.*.out", "layers.*.outptu", r"nearest: layers\.\*\.output"),
        ("blocks.9.out", "layers.9.output", r"nearest: layers\.\*\.output.*; of 8 layers"),
        ("blocks.0.out", "layers.*.output", "only where their name has one"),
        ("blocks.0.attn", "layers.0.attention.core", r"nearest: layers\.\*\.attention\.core"),
    ],
)
def test_a_map_to_what_the_model_has_not_is_refused(theirs: str, ours: str, near: str, said: Said, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps({theirs: ours}))
    with pytest.raises(UsageError, match=f"--map calls {re.escape(f'{theirs} {ours}')}, and this model has no such site; .*{near}"):
        imported("torch", torch_dump(tmp_path / "dump.pt", said, *OUTPUTS), tmp_path / "out", given=tmp_path / "map.json")
    assert not (tmp_path / "out").exists()


def test_a_dump_with_more_layers_than_the_model_is_refused(said: Said, tmp_path: Path) -> None:
    dump = torch_dump(tmp_path / "dump.pt", said, *OUTPUTS, **{"model.layers.8": said["layers.7.output"]})
    with pytest.raises(UsageError, match=r"it would be layers\.8\.output, and config\.json has no such site in its 8 layers"):
        imported("torch", dump, tmp_path / "out")
