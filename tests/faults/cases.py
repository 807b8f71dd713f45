"""The drill as a table: what is planted where, how it is run, and the whole verdict that has to come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EVERY, LINEAR, FULL = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 5, 6], [3, 7]
FORWARD = ("--stages", "inputs,forward")
Verdict = dict[str, Any]


def fault(
    cls: str,
    layers: list[int],
    module: str | None,
    parts: list[str],
    relation: str | None,
    of: str,
    modules: list[str] | None = None,
    **shard: list[int],
) -> Verdict:
    return {
        "class": cls,
        "layers": layers,
        "module": module,
        "modules": modules or [module],
        "parts": parts,
        "shard": shard,
        "of": of,
        "relation": relation,
    }


@dataclass(frozen=True)
class Case:
    """layout  of the checkpoint · written  how it was converted · under  how it is run"""

    id: str
    layout: str
    written: str
    faults: tuple[str, ...]
    under: str
    flags: tuple[str, ...]
    expected: tuple[Verdict, ...]
    minor: tuple[Verdict, ...] = ()


NORMS = ["input_norm", "attention", "linear_attention", "pre_mlp_norm", "final_norm"]
LAYER_SLIME = ["input_norm", "attention", "linear_attention", "pre_mlp_norm", "router", "experts", "shared_expert", "shared_expert_gate"]
PARTS_OF_LINEAR = ["in_proj", "conv1d", "a_log", "dt_bias", "gated_norm", "out_proj"]

HOME = [
    Case(
        "E01-slime-ep4", "slime", "ep4", ("E01",), "ep4", (),
        (fault("conversion", EVERY, "experts", ["fc1", "fc2"], "duplicate", "conversion", ep=[1, 2, 3]),),
    ),
    Case("A03-slime", "slime", "one", ("A03",), "one", (), (fault("conversion", FULL, "attention", ["qkv"], "permutation", "conversion"),)),
    Case(
        "G01-native-tp2", "native", "tp2sp", ("G01",), "tp2sp", (),
        (fault("conversion", LINEAR, "linear_attention", ["in_proj"], "even-cut", "conversion", tp=[0, 1]),),
    ),
    Case("S04-slime", "slime", "one", ("S04",), "one", (), (fault("model-definition", EVERY, "shared_expert_gate", [], "config", "conversion"),)),
    Case("T01-native", "native", "one", ("T01",), "one", (), (fault("model-definition", EVERY, "router", ["probs"], "config", "conversion"),)),
    Case("P01-slime", "slime", "one", ("P01",), "one", (), (fault("model-definition", FULL, "attention", ["rope"], "config", "conversion"),)),
    Case(
        "N03-native", "native", "one", ("N03",), "one", (),
        (fault("model-definition", EVERY, "input_norm", ["q_norm", "k_norm", "gated_norm"], "config", "conversion", NORMS),),
    ),
    Case(
        "L01-native-pp2", "native", "pp2", ("L01",), "pp2", (),
        (fault(
            "conversion", [4, 5, 6, 7], None,
            ["qkv", "q_norm", "k_norm", "out_proj", "in_proj", "conv1d", "a_log", "dt_bias", "gated_norm", "logits", "fc1", "fc2"],
            "other-layer", "conversion", LAYER_SLIME, pp=[1],
        ),),
    ),
]  # fmt: skip

# By activations alone a decay whose ratio is not the same over tokens is dt_bias (contract rule 7), though L01 moves A_log too.
FORWARD_ONLY = [
    Case("A03-slime", "slime", "one", ("A03",), "one", (*FORWARD, "--no-answers"), (fault("conversion", FULL, "attention", ["qkv"], "permutation", "run"),)),
    Case("S04-native", "native", "one", ("S04",), "one", FORWARD, (fault("model-definition", EVERY, "shared_expert_gate", [], "config", "run"),)),
    Case("T01-slime-ep4", "slime", "one", ("T01",), "ep4", FORWARD, (fault("model-definition", EVERY, "router", ["probs"], "config", "run"),)),
    Case("P01-native-tp2", "native", "one", ("P01",), "tp2sp", FORWARD, (fault("model-definition", FULL, "attention", ["rope"], "config", "run", tp=[0, 1]),)),
    Case(
        "N03-slime", "slime", "one", ("N03",), "one", FORWARD,
        (fault("model-definition", EVERY, "input_norm", ["q_norm", "k_norm"], "config", "run", ["input_norm", "attention", "pre_mlp_norm", "final_norm"]),),
    ),
    Case(
        "L01-slime-pp2", "slime", "pp2", ("L01",), "pp2", FORWARD,
        (fault(
            "conversion", [4, 5, 6, 7], None,
            ["qkv", "q_norm", "k_norm", "out_proj", "in_proj", "conv1d", "dt_bias", "gated_norm", "logits", "fc1", "fc2"],
            "other-layer", "run", LAYER_SLIME, pp=[1],
        ),),
    ),
    # where no rank is at fault by itself; logits that drifted are routed by the rule, and no router is
    Case(
        "L01-slime", "slime", "pp2", ("L01",), "one", FORWARD,
        (fault(
            "conversion", [4, 5, 6, 7], None,
            ["qkv", "q_norm", "k_norm", "out_proj", "in_proj", "conv1d", "dt_bias", "gated_norm", "logits", "fc1", "fc2"],
            "other-layer", "run", LAYER_SLIME,
        ),),
    ),
    Case(
        "L01-run-native-pp2", "native", "pp2", ("L01-run",), "pp2", (*FORWARD, "--candidate-patch", "patch.py"),
        (fault(
            "parallel", [4, 5, 6, 7], None,
            ["qkv", "q_norm", "k_norm", "out_proj", "in_proj", "conv1d", "dt_bias", "gated_norm", "logits", "fc1", "fc2"],
            None, "run", LAYER_SLIME, pp=[1],
        ),),
    ),
    Case(
        "A01-slime-tp4", "slime", "one", ("A01",), "tp4", (*FORWARD, "--candidate-patch", "patch.py"),
        (fault("parallel", FULL, "attention_gate", [], None, "run", tp=[1, 3]),),
    ),
]  # fmt: skip

BF16 = ("--dtype", "bf16")
ROUNDED = [
    Case(
        "E01-slime-ep4-bf16", "slime", "ep4", ("E01",), "ep4", (*FORWARD, *BF16),
        (fault("conversion", EVERY, "experts", ["fc1", "fc2"], "duplicate", "run", ep=[1, 2, 3]),),
    ),
    Case("A03-native-bf16", "native", "one", ("A03",), "one", (*FORWARD, *BF16), (fault("conversion", FULL, "attention", ["qkv"], "permutation", "run"),)),
    Case("S04-slime-bf16", "slime", "one", ("S04",), "one", (*FORWARD, *BF16), (fault("model-definition", EVERY, "shared_expert_gate", [], "config", "run"),)),
    Case("clean-native-tp2sp-bf16", "native", "tp2sp", (), "tp2sp", BF16, ()),
]  # fmt: skip
ROUNDED_WIDE = [
    Case(f"clean-{layout}-{under}-bf16", layout, under, (), under, BF16, ())
    for layout in ("slime", "native")
    for under in ("one", "tp2sp", "pp2", "ep4", "tp4", "vpp2")
    if (layout, under) != ("native", "tp2sp")
]


def both(layout: str, under: str) -> Case:
    """An expert fault and a linear attention fault at once, converted under TP2 x EP2, located by activations alone."""
    experts: dict[str, Any] = {"one": {}, "tp2sp": {"etp": [0, 1]}, "pp2": {"pp": [0, 1]}, "ep4": {"ep": [2, 3]}, "tp2ep2": {"ep": [1]}}[
        under
    ]
    dense: dict[str, Any] = {"one": {}, "tp2sp": {"tp": [0, 1]}, "pp2": {"pp": [0, 1]}, "ep4": {}, "tp2ep2": {"tp": [0, 1]}}[under]
    expert = fault("conversion", EVERY, "experts", ["fc1", "fc2"], "duplicate", "run", **experts)
    if layout == "native":
        linear = fault("conversion", LINEAR, "linear_attention", ["in_proj"], "even-cut", "run", **dense)
        return Case(f"E01+G01-{layout}-{under}", layout, "tp2ep2", ("E01", "G01"), under, FORWARD, (linear, expert))
    rounded = fault("conversion", LINEAR, "linear_attention", ["a_log"], "rounded", "run", **dense)
    return Case(f"E01+G04-{layout}-{under}", layout, "tp2ep2", ("E01", "G04"), under, FORWARD, (expert,), (rounded,))


UNDER = ("one", "tp2sp", "pp2", "ep4", "tp2ep2")
BOTH = [both(layout, under) for layout in ("slime", "native") for under in UNDER]
CLEAN = [Case(f"clean-{layout}-{under}", layout, under, (), under, (), ()) for layout in ("slime", "native") for under in UNDER]
# each in one checkpoint layout, and in the other by `make wide`
MORE = {"tp4": "slime", "pp3+5": "slime", "vpp2": "native", "tp2pp2": "slime", "etp2": "native"}
CLEAN += [Case(f"clean-{layout}-{under}", layout, under, (), under, (), ()) for under, layout in MORE.items()]
OTHER = {"slime": "native", "native": "slime"}
CLEAN_WIDE = [Case(f"clean-{OTHER[layout]}-{under}", OTHER[layout], under, (), under, (), ()) for under, layout in MORE.items()]

# Cells of fault x layout x checkpoint layout that can't exist, and why.
CANNOT_EXIST = {
    "E01 converted at EP 1": "the EP-local expert number is the global one: the defect is invisible, which is why 35B trained well",
    "G01 in the slime layout": "its linear attention is replicated on every tensor parallel rank, so nothing cuts in_proj; G04 stands for it",
    "G01 converted at TP 1": "one rank holds every part whole: an even cut over one rank is no cut",
    "L01 converted at PP 1": "there is one stage, its offset is 0",
    "L01 shifted by one layer": "a hybrid of period 4 has other tensors in the neighbouring layer: no such checkpoint can be loaded",
    "L01-run by the weights stage": "no file is wrong; only a forward under PP 2 shows it",
    "G06 in the slime layout": "a Hugging Face style module zeroes what is padding before its projections, so nothing leaks",
    "position ids that restart, as a forward": "megatron-core's rope counts from the start of a row whatever position_ids say (gpt_model.py); P04 is a recording",
    "A07 on one stage, E13 without TP or EP": "the local number is the global one; no counts are exchanged",
    "G04 as a first fault": "precision lost while the function is the same is minor (contract rule 8)",
}
