"""Exported Hugging Face directories with a fault in them, made of the reference's tensors, each with its whole verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from weights_cases import BOTH, Verdict, duplicate
from weights_edits import EVERY, EXPERTS, FULL, HALF_CUT, LINEAR, ROUTED, Change, State, fresh, taken, through_fp8
from workshop import REFERENCE

BASE = "model.language_model."
Edit = Callable[[State], State]
PACKED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
BLOCK = 128


@cache
def reference(path: Path = REFERENCE) -> State:
    """Every tensor of a directory by its name on disk."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def exported(out: Path, *edits: Edit, config: dict[str, Any] | None = None, **text: Any) -> Path:
    """The reference with the edits in it, as one file."""
    tensors = dict(reference())
    for edit in edits:
        tensors = edit(tensors)
    out.mkdir(parents=True)
    page = json.loads((REFERENCE / "config.json").read_text())
    page["text_config"] |= text
    (out / "config.json").write_text(json.dumps(page | (config or {})))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    return out


def changed(ends: Sequence[str], layers: Sequence[int], change: Change) -> Edit:
    names = [f"{BASE}layers.{n}.{end}" for n in layers for end in ends]
    return lambda tensors: tensors | {name: change(tensors[name]) for name in names}


def only(name: str, change: Change) -> Edit:
    return lambda tensors: tensors | {name: change(tensors[name])}


def without(start: str) -> Edit:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(start)}


def one_by_one(tensors: State) -> State:
    """Fused experts as one tensor an expert, the style of a per-expert export."""
    found: State = {}
    for name, tensor in tensors.items():
        start, _, end = name.rpartition(".")
        if end == "gate_up_proj":
            for e in range(EXPERTS):
                found[f"{start}.{e}.gate_proj.weight"] = tensor[e, :ROUTED].clone()
                found[f"{start}.{e}.up_proj.weight"] = tensor[e, ROUTED:].clone()
        elif end == "down_proj":
            found |= {f"{start}.{e}.down_proj.weight": tensor[e].clone() for e in range(EXPERTS)}
        else:
            found[name] = tensor
    return found


def fused_mtp(tensors: State) -> State:
    """MTP experts in one tensor, as Qwen3.6 stores them."""
    start = "mtp.layers.0.mlp.experts."
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith(start)}

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([tensors[f"{start}{e}.{name}_proj.weight"] for e in range(EXPERTS)])

    return found | {f"{start}gate_up_proj": torch.cat([stacked("gate"), stacked("up")], dim=1), f"{start}down_proj": stacked("down")}


def both_styles(tensors: State) -> State:
    """Experts one by one, and the original fused ones added from the origin."""
    return one_by_one(tensors) | {name: tensor for name, tensor in reference().items() if "mlp.experts." in name and name.startswith(BASE)}


def joined_over_tp(tensors: State) -> State:
    """A TP 2 checkpoint's packed in_proj and conv1d joined along their rows, then read as if they were packed."""
    found = dict(tensors)
    for n in LINEAR:
        start = f"{BASE}layers.{n}.linear_attn."
        packed = [tensors[f"{start}{name}.weight"] for name in PACKED]
        for names, parts in (
            (PACKED, [*packed[0].split([64, 64, 192]), *packed[1:]]),
            (("conv1d",), tensors[f"{start}conv1d.weight"].split([64, 64, 192])),
        ):
            whole = torch.cat([part.chunk(2)[rank] for rank in range(2) for part in parts])
            sizes = [len(tensors[f"{start}{name}.weight"]) for name in names]
            found |= {f"{start}{name}.weight": part for name, part in zip(names, whole.split(sizes), strict=True)}
    return found


def kept_padding(tensors: State) -> State:
    """The padding rows of the vocabulary are not cut off."""
    names = (f"{BASE}embed_tokens.weight", "lm_head.weight")
    return tensors | {name: torch.cat([tensors[name], fresh(1)(tensors[name][:12])]) for name in names}


def is_quantised(name: str) -> bool:
    """What FP8 checkpoints of this family keep in FP8."""
    return name.endswith("proj.weight") or ".in_proj_qkv." in name or ".in_proj_z." in name


def scales(tensor: torch.Tensor) -> torch.Tensor:
    """The largest of each block / 448."""
    rows, columns = tensor.shape
    found = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for i in range(found.shape[0]):
        for j in range(found.shape[1]):
            found[i, j] = tensor[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK].float().abs().max() / 448
    return found


def spread(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    rows, columns = like.shape
    return scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]


def in_fp8(shown: Change = lambda scale: scale, used: Change = lambda scale: scale, which: Callable[[str], bool] = is_quantised) -> Edit:
    """Matrices in e4m3 with a scale a block: quantised by `used` of the scale, and stored with `shown` of it."""

    def edit(tensors: State) -> State:
        found: State = {}
        for name, tensor in one_by_one(tensors).items():
            if tensor.dim() != 2 or not which(name):
                found[name] = tensor
                continue
            scale = scales(tensor)
            found[name] = (tensor.float() / spread(used(scale), tensor)).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = shown(scale)
        return found

    return edit


def dequantised(tensors: State) -> State:
    """What a loader without FP8 kernels makes of it."""
    return {
        name: (tensor.float() * spread(tensors[f"{name}_scale_inv"], tensor)).bfloat16() if tensor.dtype == torch.float8_e4m3fn else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}}


@dataclass(frozen=True)
class Export:
    """candidate  (layout, written) of a good conversion that is given beside it"""

    id: str
    edits: Sequence[Edit]
    faults: Sequence[Verdict]
    minor: Sequence[Verdict] = ()
    candidate: tuple[str, str] | None = None
    text: dict[str, Any] = field(default_factory=dict)


def wrong(layers: Sequence[int], module: str, parts: Sequence[str], kind: str, detail: dict[str, Any], **more: Any) -> Verdict:
    """The verdict of a pair without a candidate; nobody says how it was converted."""
    found = {
        "class": "conversion", "between": ["reference", "export"], "layers": list(layers), "module": module, "modules": [module],
        "parts": list(parts), "shard": {}, "of": "unknown", "relation": kind, "detail": detail,
    }  # fmt: skip
    return found | more


def beside(verdict: Verdict, **shard: list[int]) -> Verdict:
    """The same between a candidate and its export, placed in the layout that the candidate was converted under."""
    return verdict | {"between": ["candidate", "export"], "of": "conversion", "shard": shard}


FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
BETA = ("linear_attn.in_proj_b.weight",)
OF_RANKS = [e - e % 4 + 3 for e in range(EXPERTS)]
LAST = wrong(EVERY, "experts", BOTH, "duplicate", duplicate("15", None, 15))
OF_RANK_1 = wrong(EVERY, "experts", BOTH, "duplicate", duplicate("7", None, 15))
OF_EACH = wrong(EVERY, "experts", BOTH, "duplicate", duplicate("e - e mod 4 + 3", None, 12))
JOINED = wrong(LINEAR, "linear_attention", ["in_proj", "conv1d"], "even-cut", {"parts": 6, "size": 2, "how": "joined"})
FRESH = {"distribution": "normal", "std": 0.02}
THROUGH = {"through": "float8_e4m3fn, one scale a block of 128"}
MTP_EXPERTS = "mtp.layers.0.mlp.experts."
PROMISED = wrong([], "mtp", [], "missing", {"name": "mtp.*", "tensors": 65, "promised": "mtp_num_hidden_layers"})


def mtp_experts_fresh(tensors: State) -> State:
    return tensors | {name: fresh(8)(tensor) for name, tensor in tensors.items() if name.startswith(MTP_EXPERTS)}


EXPORTS = [
    Export("E04-last", [changed(FUSED, EVERY, taken([15] * EXPERTS))], [LAST]),
    Export("E04-last-of-rank-1", [changed(FUSED, EVERY, taken([7] * EXPERTS))], [OF_RANK_1]),
    Export("E04-last-of-each-rank", [changed(FUSED, EVERY, taken(OF_RANKS))], [OF_EACH]),
    Export("E04-beside-ep4", [changed(FUSED, EVERY, taken(OF_RANKS))], [beside(OF_EACH, ep=[0, 1, 2, 3])], candidate=("slime", "ep4")),
    Export("E04-one-by-one", [changed(FUSED, EVERY, taken([15] * EXPERTS)), one_by_one], [LAST]),
    Export(
        "E09-two-sources", [changed(FUSED, [2], taken([0] * EXPERTS)), both_styles],
        [
            wrong([2], "experts", BOTH, "duplicate", duplicate("0", 1, 15) | {"consistent": {"ep": 16}}),
            wrong([2], "experts", BOTH, "stale", {"of": "reference"}),
        ],
    ),
    Export("E11", [changed(FUSED[:1], EVERY, taken(HALF_CUT, 1))], [wrong(EVERY, "experts", ["fc1"], "even-cut", {"parts": 2, "size": 2})]),
    Export("G02", [joined_over_tp], [JOINED]),
    Export("G02-beside-tp2", [joined_over_tp], [beside(JOINED, tp=[0, 1])], candidate=("native", "tp2sp")),
    Export("V01", [kept_padding], [wrong([], "embedding", [], "extra", {"rows": 12}), wrong([], "lm_head", [], "extra", {"rows": 12})]),
    Export("V04", [only(f"{BASE}embed_tokens.weight", fresh(4))], [wrong([], "embedding", [], "init", FRESH)]),
    Export(
        "V04-beside-pp2", [only(f"{BASE}embed_tokens.weight", fresh(4))], [beside(wrong([], "embedding", [], "init", FRESH), pp=[0])],
        candidate=("slime", "pp2"),
    ),
    Export("Q03", [changed(BETA, LINEAR, through_fp8)], [wrong(LINEAR, "linear_attention", ["in_proj"], "rounded", THROUGH)]),
    Export(
        "Q03-everything", [in_fp8(), dequantised],
        [
            wrong(LINEAR, "linear_attention", ["in_proj", "out_proj"], "rounded", THROUGH),
            wrong(EVERY, "experts", BOTH, "rounded", THROUGH),
            wrong(EVERY, "shared_expert", BOTH, "rounded", THROUGH),
            wrong(FULL, "attention", ["qkv", "out_proj"], "rounded", THROUGH),
            wrong([], "mtp", ["layer"], "rounded", THROUGH),
        ],
    ),
    Export("M02", [mtp_experts_fresh], [wrong([], "mtp", ["layer"], "init", FRESH)]),
    Export("M02-fused", [fused_mtp, mtp_experts_fresh], [wrong([], "mtp", ["layer"], "init", FRESH)]),
    Export("M02-missing", [without(MTP_EXPERTS)], [wrong([], "mtp", ["layer"], "missing", {})]),
    Export("M-promised", [without("mtp.")], [], [PROMISED]),
    Export("M-not-promised", [without("mtp.")], [], text={"mtp_num_hidden_layers": 0}),
    Export("head-missing", [without("lm_head.")], [wrong([], "lm_head", [], "missing", {})]),
]  # fmt: skip
