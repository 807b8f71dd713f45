"""Listings of an engine's weights and names, made of the tiny model's own tensors and perturbed as the catalogue's rows say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bisect_hooks.family import family_of
from engine_room import MODEL, said

from bisect_tool.__main__ import run
from bisect_tool.hf_directory import open_hf
from bisect_tool.listing import digest, hashes
from bisect_tool.rollouts.stacked import Held

EVERY, LINEAR, FULL, LATE = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 5, 6], [3, 7], [4, 5, 6, 7]
Tensors = dict[str, torch.Tensor]
PAIR = ["reference", "engine"]


def tensors() -> Tensors:
    return dict(open_hf(MODEL).tensors())


def trained(moved: Tensors) -> Tensors:
    """After a step of training: everything has moved."""
    return {name: (tensor.float() * 1.01 + 1e-3).to(tensor.dtype) for name, tensor in moved.items()}


def listing(path: Path, held: Tensors, *heads: str) -> Path:
    rows = [f"{name}  {list(tensor.shape)}  {str(tensor.dtype)[6:]}  {digest(tensor)}" for name, tensor in held.items()]
    with path.open("a") as file:
        file.write("\n".join([*(f"# {head}" for head in heads), *rows]) + "\n")
    return path


def export(folder: Path, held: Tensors) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((MODEL / "config.json").read_text())
    return folder


def judged(out: Path, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code = run(["rollout", "--reference", str(MODEL), *map(str, arguments), "--out", str(out)])
    page: dict[str, Any] = json.loads((out / "report.json").read_text())
    return code, page


def verdict(page: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "class": fault["class"], "between": fault["between"], "layers": fault["layers"], "modules": fault["modules"], "parts": fault["parts"],
            "relation": fault["relation"]["kind"], "detail": fault["relation"]["detail"],
        }
        for fault in page["faults"]
    ]  # fmt: skip


def fault(relation: str, layers: list[int], modules: list[str], parts: list[str], between: list[str], **detail: Any) -> dict[str, Any]:
    return {
        "class": "rollout", "between": between, "layers": layers, "modules": modules, "parts": parts, "relation": relation, "detail": detail,
    }  # fmt: skip


def test_the_command_hash_is_a_listing_and_a_good_engine_agrees(tmp_path: Path) -> None:
    file = tmp_path / "hashes.txt"
    file.write_text("\n".join(hashes(MODEL)) + "\n")
    code, page = judged(tmp_path / "out", "--hashes", file)
    assert (code, page["faults"], page["stages"][4]["compared"]) == (0, [], {"tensors": len(tensors())})


def changed(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[Tensors, Tensors], Tensors]:
    return lambda sent, _base: {name: change(name, tensor) for name, tensor in sent.items()}


def late_layers_stale(sent: Tensors, base: Tensors) -> Tensors:
    return {
        name: base[name] if any(f"layers.{n}." in name for n in LATE) and "mtp" not in name else tensor for name, tensor in sent.items()
    }


def other_chunk(sent: Tensors, _base: Tensors) -> Tensors:
    """L04: layers 0 to 3 were overwritten by those of the other chunk (4 to 7), which share their local names."""
    return {
        name: sent[name.replace(f"layers.{n}.", f"layers.{n + 4}.")]
        if (n := next((n for n in range(4) if f"model.layers.{n}." in name), None)) is not None
        else tensor
        for name, tensor in sent.items()
    }


def swap(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.chunk(2, 1)[::-1], 1)


LAYER = ["input_norm", "attention", "linear_attention", "pre_mlp_norm", "router", "experts", "shared_expert", "shared_expert_gate"]
SYNCED: dict[str, tuple[Callable[[Tensors, Tensors], Tensors], Callable[[list[dict[str, Any]]], bool]]] = {
    "W01 stale": (
        late_layers_stale,
        lambda found: [(one["relation"], one["layers"], sorted(one["modules"]), one["detail"]) for one in found]
        == [("stale", LATE, sorted(LAYER), {"of": "reference", "sync": [1]})],
    ),
    "T05 zero router": (
        changed(lambda name, tensor: torch.zeros_like(tensor) if name.endswith("mlp.gate.weight") and "mtp" not in name else tensor),
        lambda found: found == [fault("zero", EVERY, ["router"], ["logits"], ["export", "engine"], sync=[1])],
    ),
    "L04 other chunk": (
        other_chunk,
        lambda found: {one["relation"] for one in found} == {"other-layer"}
        and {(one["detail"]["offset"], *one["layers"]) for one in found} == {(4, 0, 1, 2, 3)},
    ),
    "W04 packed": (
        changed(lambda name, tensor: swap(tensor) if name.endswith("experts.gate_up_proj") else tensor),
        lambda found: found == [fault("halves-swapped", EVERY, ["experts"], ["fc1"], ["export", "engine"], sync=[1], packed="again")],
    ),
    "E03 init": (
        changed(lambda name, tensor: torch.randn_like(tensor.float()).to(tensor.dtype) if ".experts." in name and "mtp" not in name else tensor),
        lambda found: found == [fault("unknown", EVERY, ["experts"], ["fc1", "fc2"], ["export", "engine"], sync=[1])],
    ),
    "M08 stale draft": (
        lambda sent, base: {name: base[name] if name.startswith("mtp.") else tensor for name, tensor in sent.items()},
        lambda found: all((one["relation"], one["modules"]) == ("stale", ["mtp"]) for one in found),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SYNCED)
def test_a_sync_that_went_wrong_is_named_by_number(name: str, tmp_path: Path) -> None:
    base = tensors()
    sent = trained(base)
    change, right = SYNCED[name]
    held = change(sent, base)
    file = tmp_path / "hashes.txt"
    # sync 0 brought the same weights and is right, so whatever is wrong began with sync 1
    listing(file, sent, "sync 0")
    listing(file, held, "sync 1")
    code, page = judged(tmp_path / "out", "--hashes", file, "--export", export(tmp_path / "export", sent))
    assert code == 1 and right(verdict(page)), verdict(page)
    if name.startswith("M08"):
        assert "ruled out as a cause of garbled text" in said(page)


def test_w01_the_skipped_names_say_why(tmp_path: Path) -> None:
    base = tensors()
    sent = trained(base)
    file = listing(tmp_path / "hashes.txt", late_layers_stale(sent, base), "sync 1")
    doubled = [name.replace("model.", "model.language_model.language_model.", 1) if "layers.4" in name else name for name in sent]
    (tmp_path / "received").write_text("\n".join(doubled))
    (tmp_path / "consumed").write_text("\n".join(name for name in sent if "layers.4" not in name))
    more = ["--received", tmp_path / "received", "--consumed", tmp_path / "consumed", "--export", export(tmp_path / "export", sent)]
    code, page = judged(tmp_path / "out", "--hashes", file, *map(str, more))
    assert code == 1 and {one["relation"] for one in verdict(page)} == {"stale"}
    assert "why: " in said(page) and "model.language_model.language_model.layers.4" in said(page)


NAMES: dict[str, tuple[Callable[[str], bool], Callable[[str], str], list[tuple[str, list[int], list[str]]]]] = {
    "E03 fused experts": (lambda name: ".experts." not in name, lambda name: name, [("experts", EVERY, ["fc1", "fc2"]), ("mtp", [], ["layer"])]),
    "W01 prefix twice": (
        lambda name: "layers.5." not in name,
        lambda name: name.replace("model.", "model.language_model.language_model.", 1) if "layers.5." in name else name,
        [(module, [5], []) for module in LAYER if module != "attention"],
    ),
    "E15 split names": (lambda name: "shared_expert.gate_proj" not in name and "shared_expert.up_proj" not in name, lambda name: name, [("shared_expert", EVERY, ["fc1"]), ("mtp", [], ["layer"])]),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_that_were_received_and_never_consumed(name: str, tmp_path: Path) -> None:
    taken, renamed, expected = NAMES[name]
    (tmp_path / "received.log").write_text(
        "\n".join(f"[2026-04-23 10:00:00] INFO loader.py:88 got {renamed(one)} bf16" for one in tensors())
    )
    (tmp_path / "consumed.txt").write_text("\n".join(one for one in tensors() if taken(one)))
    code, page = judged(tmp_path / "out", "--received", tmp_path / "received.log", "--consumed", tmp_path / "consumed.txt")
    found = {(module, tuple(one["layers"])) for one in verdict(page) for module in one["modules"]}
    assert code == 1 and {one["relation"] for one in verdict(page)} == {"missing"}
    assert found == {(module, tuple(layers)) for module, layers, _ in expected}


def test_everything_consumed_under_the_engines_own_names_agrees(tmp_path: Path) -> None:
    (tmp_path / "received").write_text("\n".join(tensors()))
    fused = [name.replace("q_proj", "qkv_proj") for name in tensors() if "k_proj" not in name and "v_proj" not in name]
    (tmp_path / "consumed").write_text("\n".join(fused))
    code, page = judged(tmp_path / "out", "--received", tmp_path / "received", "--consumed", tmp_path / "consumed")
    assert (code, page["faults"]) == (0, [])


def test_q04_scales_that_nobody_sent(tmp_path: Path) -> None:
    scale = "model.layers.0.mlp.shared_expert.down_proj.weight_scale_inv"
    file = listing(tmp_path / "hashes.txt", tensors() | {scale: torch.ones(1, 1)})
    (tmp_path / "names").write_text("\n".join(tensors()))
    code, page = judged(tmp_path / "out", "--hashes", file, "--received", tmp_path / "names", "--consumed", tmp_path / "names")
    assert code == 1
    assert verdict(page) == [
        fault(
            "missing",
            [0],
            ["shared_expert"],
            ["fc2"],
            PAIR,
            name="model.layers.*.mlp.shared_expert.down_proj.weight_scale_inv",
            received=False,
        )
    ]


@pytest.mark.parametrize(
    ("buffer", "modules", "parts", "layers"),
    [
        ("model.layers.3.self_attn.rotary_emb.inv_freq", ["attention"], ["rope"], [3]),
        ("model.layers.2.mlp.gate.e_score_correction_bias", ["router"], ["expert_bias"], [2]),
    ],
)
def test_w02_buffers_lost_on_resume(buffer: str, modules: list[str], parts: list[str], layers: list[int], tmp_path: Path) -> None:
    file = listing(tmp_path / "hashes.txt", tensors() | {buffer: torch.zeros(16)}, "sync 1")
    code, page = judged(tmp_path / "out", "--hashes", file)
    assert code == 1
    assert verdict(page) == [fault("zero", layers, modules, parts, PAIR, buffer=buffer.split(".")[-1], sync=[1])]


def test_w06_a_bucket_that_one_engine_did_not_get(tmp_path: Path) -> None:
    base = tensors()
    sent = trained(base)
    bucket = {name: base[name] if "layers.2.linear_attn.in_proj" in name else tensor for name, tensor in sent.items()}
    first, second = listing(tmp_path / "a", sent, "sync 3", "engine 0"), listing(tmp_path / "b", bucket, "sync 3", "engine 1")
    code, page = judged(tmp_path / "out", "--hashes", first, "--hashes", second, "--export", export(tmp_path / "export", sent))
    assert code == 1
    expected = fault("stale", [2], ["linear_attention"], ["in_proj"], ["export", "engine"], of="reference", sync=[3], engines=["1"])
    assert verdict(page) == [expected]


def test_a08_rows_of_q_k_and_v_as_megatron_packs_them(tmp_path: Path) -> None:
    from bisect_hooks.table import GroupHeads, forward

    directory = open_hf(MODEL)
    dims = family_of(directory.config).reference_dimensions(directory.config)
    held = tensors()
    for n in FULL:
        names = [f"model.layers.{n}.self_attn.{one}_proj.weight" for one in "qkv"]
        packed = forward(GroupHeads(dims.groups, dims.heads, dims.head_width, dims.output_gate), [held[one] for one in names])[0]
        for name, rows in zip(names, packed.split([len(held[one]) for one in names]), strict=True):
            held[name] = rows
    code, page = judged(tmp_path / "out", "--hashes", listing(tmp_path / "hashes", held))
    assert code == 1
    assert [(one["relation"], one["layers"], one["modules"], one["parts"]) for one in verdict(page)] == [
        ("permutation", FULL, ["attention"], ["qkv"])
    ]


def test_trained_weights_without_the_export_are_open(tmp_path: Path) -> None:
    code, page = judged(tmp_path / "out", "--hashes", listing(tmp_path / "hashes", trained(tensors()), "sync 4"))
    assert (code, page["faults"]) == (125, [])
    assert "--export" in said(page)


def stacked(tp: int, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """What an engine holds: q, k and v stacked and so on, written out here by hand."""
    held = tensors()
    for n in FULL:
        own = f"model.layers.{n}.self_attn."
        q, k, v = (held[f"{own}{one}_proj.weight"].chunk(tp)[rank] for one in "qkv")
        yield f"{own}qkv_proj.weight", torch.cat([q, k, v])
        yield f"{own}o_proj.weight", held[f"{own}o_proj.weight"].chunk(tp, 1)[rank]
    for n in LINEAR:
        own = f"model.layers.{n}.linear_attn."
        query, key, value = held[f"{own}in_proj_qkv.weight"].split([64, 64, 192])
        z = held[f"{own}in_proj_z.weight"]
        yield f"{own}in_proj_qkvz.weight", torch.cat([part.chunk(tp)[rank] for part in (query, key, value, z)])
        yield f"{own}in_proj_ba.weight", torch.cat([held[f"{own}in_proj_{one}.weight"].chunk(tp)[rank] for one in "ba"])
        yield f"{own}A_log", held[f"{own}A_log"].chunk(tp)[rank]
    for n in EVERY:
        own = f"model.layers.{n}.mlp."
        gate, up = held[f"{own}experts.gate_up_proj"].chunk(2, 1)
        yield f"{own}experts.w13_weight", torch.cat([gate.chunk(tp, 1)[rank], up.chunk(tp, 1)[rank]], 1)
        yield f"{own}experts.w2_weight", held[f"{own}experts.down_proj"].chunk(tp, 2)[rank]
        both = [held[f"{own}shared_expert.{one}_proj.weight"].chunk(tp)[rank] for one in ("gate", "up")]
        yield f"{own}shared_expert.gate_up_proj.weight", torch.cat(both)
        yield f"{own}gate.weight", held[f"{own}gate.weight"]


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engines_stacked_and_cut_tensors_are_known(tp: int, tmp_path: Path) -> None:
    for rank in range(tp):
        listing(tmp_path / "hashes", dict(stacked(tp, rank)), "sync 0", f"tp {rank}/{tp}")
    code, page = judged(tmp_path / "good", "--hashes", tmp_path / "hashes")
    assert (code, page["faults"]) == (0, [])
    assert page["stages"][4]["compared"]["tensors"] == tp * len(dict(stacked(1, 0)))
    # and one rank's wrong piece is that rank's
    held = {name: swap(tensor) if name.endswith("layers.1.mlp.experts.w13_weight") else tensor for name, tensor in stacked(tp, tp - 1)}
    listing(tmp_path / "hashes", held, "sync 1", f"tp {tp - 1}/{tp}")
    code, page = judged(tmp_path / "bad", "--hashes", tmp_path / "hashes")
    assert (code, verdict(page)) == (1, [fault("halves-swapped", [1], ["experts"], ["fc1"], PAIR, sync=[1], packed="again")])
    assert page["first"]["shard"].get("tp", []) == ([] if tp == 1 else [1])


def test_what_an_engine_ought_to_hold_covers_the_whole_model() -> None:
    directory = open_hf(MODEL)
    dims = family_of(directory.config).reference_dimensions(directory.config)
    assert all(Held(directory, dims).sources(name) for name in directory.names)
