"""The rows of the catalogue that files alone decide, each with its whole verdict, in every layout and conversion that can carry it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import weights_edits as to
from weights_edits import (
    EMBEDDING,
    EVERY,
    EXPERTS,
    FC1,
    FC2,
    FINAL,
    FULL,
    HEAD,
    LINEAR,
    MTP,
    PROJ,
    QKV,
    SHARED1,
    SHARED2,
    Edit,
    both,
    each,
    named,
    taken,
)

Verdict = dict[str, Any]
LAYOUTS = ("slime", "native")
WRITTEN = ("one", "tp2sp", "pp2", "ep4")


@dataclass(frozen=True)
class Wrong:
    """One fault of a case, before it is known how the checkpoint was written.

    expert         placed by ep and etp, everything else by tp
    stages         where they are not those of the layers
    tp, ep         ranks whose piece is wrong
    """

    layers: Sequence[int]
    module: str | None
    parts: Sequence[str]
    kind: str
    detail: dict[str, Any]
    modules: Sequence[str] = ()
    cls: str = "conversion"
    stages: Sequence[int] = ()
    expert: bool = False
    tp: Sequence[int] = (0, 1)
    ep: Sequence[int] = (0, 1, 2, 3)

    def verdict(self, written: str) -> Verdict:
        return {
            "class": self.cls,
            "between": ["reference", "candidate"],
            "layers": list(self.layers),
            "module": self.module,
            "modules": list(self.modules) or [self.module],
            "parts": list(self.parts),
            "shard": self.shard(written),
            "of": "conversion",
            "relation": self.kind,
            "detail": self.detail,
        }

    def shard(self, written: str) -> dict[str, list[int]]:
        """Every axis larger than 1 that places it.  Eight layers over two stages: four each; what comes after them is on the last."""
        expert = self.expert or self.module == "experts"
        stages = list(self.stages) or sorted({int(n > 3) for n in self.layers}) or [1]
        found = {"tp2sp": {"etp" if expert else "tp": list(self.tp)}, "pp2": {"pp": stages}, "ep4": {"ep": list(self.ep)} if expert else {}}
        return found.get(written, {})


@dataclass(frozen=True)
class Case:
    """layouts, written  where it can exist · flags  said to the audit
    plate  the checkpoint it is put into beside other faults, in other cells (HALF: in half of them); 0: alone in all of its cells
    alone  the conversion in which it is the only fault
    """

    id: str
    edit: Callable[[str], Edit]
    wrong: Callable[[str], Sequence[Wrong]]
    plate: int
    alone: str = "one"
    layouts: Sequence[str] = LAYOUTS
    written: Sequence[str] = WRITTEN
    minor: bool = False
    flags: Sequence[str] = ()

    def verdicts(self, written: str) -> list[Verdict]:
        return [one.verdict(written) for one in self.wrong(written)]


def case(id: str, plate: int, edit: Edit, *wrong: Wrong, **more: Any) -> Case:
    return Case(id, lambda _written: edit, lambda _written: wrong, plate, **more)


def only(written: str, layouts: Sequence[str] = LAYOUTS) -> dict[str, Any]:
    """A fault that one way of converting can have."""
    return {"alone": written, "written": (written,), "layouts": layouts}


def first_of_its_rank(written: str) -> list[int]:
    return [e - e % (4 if written == "ep4" else EXPERTS) for e in range(EXPERTS)]


def duplicate(said: str, modulus: int | None, wrong: int) -> dict[str, Any]:
    return {"map": said, "modulus": modulus, "wrong": wrong, "of": EXPERTS}


BOTH = ("fc1", "fc2")
ODD = [1, 3, 5, 7]
MODULES = ["input_norm", "attention", "linear_attention", "pre_mlp_norm", "router", "experts", "shared_expert", "shared_expert_gate"]
PARTS = ["qkv", "q_norm", "k_norm", "out_proj", "in_proj", "conv1d", "a_log", "dt_bias", "gated_norm", "logits", "fc1", "fc2"]
OF_MTP = ["enorm", "hnorm", "eh_proj", "layer", "final_norm"]
SWAPPED = [9 if e == 2 else 2 if e == 9 else e for e in range(EXPERTS)]
NARROW = to.of_width(16)
NORMS: tuple[tuple[list[int], str, list[str]], ...] = (
    (EVERY, "input_norm", []),
    (EVERY, "pre_mlp_norm", []),
    (FULL, "attention", ["q_norm", "k_norm"]),
    ([], "final_norm", []),
)
FP8 = {"through": "float8_e4m3fn, one scale a block of 128"}
# plates that go into every other cell: each conversion once, and both layouts
HALF = {3: 0, 4: 0, 5: 1}

CASES = [
    # 1. routed experts
    case(
        "E01", 0, each((FC1, FC2), EVERY, taken([e % 4 for e in range(EXPERTS)])),
        Wrong(EVERY, "experts", BOTH, "duplicate", duplicate("e mod 4", 4, 12), ep=[1, 2, 3]), **only("ep4"),
    ),
    case("E05", 0, each((FC1,), EVERY, taken(to.HALF_CUT, 1)), Wrong(EVERY, "experts", ["fc1"], "even-cut", {"parts": 2, "size": 2}), **only("tp2sp")),
    case("E06", 1, each((FC2,), ODD, lambda t: t.transpose(1, 2).reshape(t.shape)), Wrong(ODD, "experts", ["fc2"], "transpose", {}), alone="ep4"),
    case("E06-shape", 3, each((FC2,), ODD, lambda t: t.transpose(1, 2)), Wrong(ODD, "experts", ["fc2"], "transpose", {}), alone="tp2sp"),
    Case(
        "E08", lambda written: each((FC1, FC2), EVERY, taken(first_of_its_rank(written))),
        lambda written: [Wrong(EVERY, "experts", BOTH, "duplicate", duplicate("e - e mod 4", None, 12) if written == "ep4" else duplicate("0", 1, 15))],
        2, alone="ep4",
    ),
    case(
        "E10", 1, each((FC1,), EVERY, taken(to.BLOCKS_OF_8, 1)),
        Wrong(EVERY, "experts", ["fc1"], "block-interleave", {"axis": 1, "block": 8, "parts": 2}), alone="pp2",
    ),
    case(
        "E14", 0, each((FC1, FC2), EVERY, taken([e // 4 * 2 + e % 4 for e in range(EXPERTS)])),
        Wrong(EVERY, "experts", BOTH, "duplicate", duplicate("(e div 4) * 2 + e mod 4", None, 12), ep=[1, 2, 3]), **only("ep4"),
    ),
    # 2. q, k, v and the output gate
    case(
        "A02", 3, to.renamed("linear_qkv", "linear_qgkv", "decoder."),
        Wrong(FULL, "attention", ["qkv"], "names-only", {"name": "linear_qgkv", "as": f"decoder.layers.3.{QKV}"}), alone="tp2sp",
    ),
    case(
        "A03", 1, each((QKV,), FULL, taken(to.units(to.NOT_REGROUPED, 32))),
        Wrong(FULL, "attention", ["qkv"], "permutation", {"axis": 0, "unit": 32, "map": to.NOT_REGROUPED}), alone="tp2sp",
    ),
    case("A06", 4, each((QKV,), FULL, lambda t: t[:240]), Wrong(FULL, "attention", ["qkv"], "unknown", {"expected": [640, 96], "stored": [240, 96], "head_width": 12}), alone="pp2"),
    case(
        "A06-16", 2, each((QKV,), FULL, taken(NARROW)),
        Wrong(FULL, "attention", ["qkv"], "permutation", {"axis": 0, "unit": 16, "map": [j // 16 for j in NARROW[::16]]}),
    ),
    # 3. gated delta net
    case(
        "G01", 0, to.cut_evenly(to.IN_PROJ, LINEAR), Wrong(LINEAR, "linear_attention", ["in_proj"], "even-cut", {"parts": 6, "size": 2}),
        **only("tp2sp", ("native",)),
    ),
    case(
        "G01-conv1d", 0, to.cut_evenly(to.CONV, LINEAR), Wrong(LINEAR, "linear_attention", ["conv1d"], "even-cut", {"parts": 3, "size": 2}),
        **only("tp2sp", ("native",)),
    ),
    case(
        "G01-ba", 0, to.cut_evenly(to.IN_PROJ[4:], LINEAR), Wrong(LINEAR, "linear_attention", ["in_proj"], "even-cut", {"parts": 2, "size": 2}),
        **only("tp2sp", ("native",)),
    ),
    case("G04", 1, to.decay_rounded, Wrong(LINEAR, "linear_attention", ["a_log"], "rounded", {"through": "bfloat16"}), minor=True, alone="tp2sp"),
    # 4. norms
    case("N02", 2, to.norms_rounded, *(Wrong(n, module, parts, "rounded", {"through": "bfloat16 of w − 1"}) for n, module, parts in NORMS)),
    case("N05", 1, to.norms_exchanged(2), Wrong([2], "input_norm", [], "other-tensor", {"name": "decoder.layers.2.pre_mlp_layernorm.weight"}, ["input_norm", "pre_mlp_norm"])),
    # 6. and 7. router, shared expert
    case("T04-router", 1, to.dropped(["decoder.layers.5.mlp.router.weight"]), Wrong([5], "router", ["logits"], "missing", {})),
    case(
        "S04", 2, to.gate_left_out,
        Wrong(EVERY, "shared_expert_gate", [], "missing", {"flag": "--moe-shared-expert-gate", "switched": "off"}, cls="model-definition"), alone="pp2",
    ),
    case("S05", 1, each((SHARED1,), EVERY, lambda t: t.roll(56, 0)), Wrong(EVERY, "shared_expert", ["fc1"], "halves-swapped", {"axis": 0})),
    # 8. vocabulary
    case("V01", 1, to.loud_padding, Wrong([], "lm_head", [], "extra", {"rows": 12, "norm": 40.9131011582248}, tp=[1]), alone="tp2sp"),
    case("V02", 2, to.copied(EMBEDDING, HEAD), Wrong([], "lm_head", [], "other-tensor", {"name": EMBEDDING})),
    case("V02-reverse", 1, to.copied(HEAD, EMBEDDING), Wrong([], "embedding", [], "other-tensor", {"name": HEAD}, stages=[0]), alone="pp2"),
    # 9. pipeline stages
    case("L01", 0, to.layers_of([0, 1, 2, 3], [4, 5, 6, 7]), Wrong([4, 5, 6, 7], None, PARTS, "other-layer", {"offset": -4}, MODULES), **only("pp2")),
    case(
        "L04", 0, to.layers_of([4, 5, 6, 7], [0, 1, 2, 3]), Wrong([0, 1, 2, 3], None, PARTS, "other-layer", {"offset": 4}, MODULES, stages=[0, 1]),
        **only("pp2"), flags=("--pp", "2", "--vpp", "2"),
    ),
    # 10. multi-token prediction
    case("M01", 1, named(["mtp.layers.0.eh_proj.weight"], lambda t: t.roll(96, 1)), Wrong([], "mtp", ["eh_proj"], "halves-swapped", {"axis": 1}), alone="pp2"),
    case("M02-init", 1, named([MTP + FC1, MTP + FC2], to.fresh(3)), Wrong([], "mtp", ["layer"], "init", {"distribution": "normal", "std": 0.02}, expert=True), alone="ep4"),
    case("M02-expert0", 2, named([MTP + FC1, MTP + FC2], taken([0] * EXPERTS)), Wrong([], "mtp", ["layer"], "duplicate", duplicate("0", 1, 15), expert=True), alone="ep4"),
    case("M03", 3, to.renamed("transformer_layer", "mtp_model_layer"), Wrong([], "mtp", ["layer"], "names-only", {"name": "mtp_model_layer", "as": MTP + "input_layernorm.weight"})),
    case("M03-prefix", 4, to.renamed("mtp.", "decoder.mtp.", "mtp."), Wrong([], "mtp", OF_MTP, "names-only", {"name": "decoder", "as": "mtp.layers.0.enorm.weight"})),
    case("M-missing", 5, to.mtp_dropped, Wrong([], "mtp", OF_MTP, "missing", {})),
    # 12. quantisation
    case("Q03", 1, to.inside(to.BETA, LINEAR, to.through_fp8), Wrong(LINEAR, "linear_attention", ["in_proj"], "rounded", FP8)),
    case("Q05", 2, each((PROJ,), [3], to.through_int8), Wrong([3], "attention", ["out_proj"], "rounded", {"through": "int8, one scale a row"})),
    # not of the catalogue
    case("scale", 2, each((PROJ,), [7], lambda t: (t.float() * 1.02).to(t.dtype)), Wrong([7], "attention", ["out_proj"], "scale", {"value": 1.02})),
    case(
        "one-row", 0, each((FC2,), [6], to.row_times((9, 17), 1.05)),
        Wrong([6], "experts", ["fc2"], "scale", {"value": 1.05, "experts": [9], "wrong": 1, "of": EXPERTS, "rows": [[17, 18]]}, ep=[2]), alone="ep4",
    ),
    case(
        "two-scales", 4, both(each((SHARED1,), [1], lambda t: (t.float() * 1.02).to(t.dtype)), each((SHARED2,), [1], lambda t: t * 2)),
        Wrong([1], "shared_expert", ["fc1"], "scale", {"value": 1.02}), Wrong([1], "shared_expert", ["fc2"], "scale", {"value": 2.0}),
    ),
    case("offset", 1, named([FINAL], lambda t: t + 1), Wrong([], "final_norm", [], "offset", {"value": 1.0}), alone="tp2sp"),
    case("offset-fp32", 3, to.inside(to.DT_BIAS, [4], lambda t: t + 0.5), Wrong([4], "linear_attention", ["dt_bias"], "offset", {"value": 0.5}), alone="pp2"),
    case("zero", 2, each(("mlp.router.weight",), [6], to.filled(0.0)), Wrong([6], "router", ["logits"], "zero", {}), alone="pp2"),
    case("nan", 2, each((SHARED2,), [1], to.filled(float("nan"))), Wrong([1], "shared_expert", ["fc2"], "nan", {}), alone="tp2sp"),
    case("other-expert", 4, to.expert_of(5, 1, 6), Wrong([5], "experts", BOTH, "other-layer", {"offset": -4, "experts": [6]}, ep=[1]), alone="ep4"),
    case("head-zero", 5, each((QKV,), [7], to.rows_filled(352, 384, 0.0)), Wrong([7], "attention", ["qkv"], "zero", {"rows": [[352, 384]]}, tp=[1]), alone="tp2sp"),
    case("gate-zero", 5, each((QKV,), [3], to.rows_filled(480, 512, 0.0)), Wrong([3], "attention_gate", [], "zero", {"rows": [[480, 512]]}, tp=[1]), alone="tp2sp"),
    case("swapped", 3, each((FC1, FC2), [4], taken(SWAPPED)), Wrong([4], "experts", BOTH, "permutation", {"axis": 0, "unit": 1, "map": SWAPPED}, ep=[0, 2]), alone="ep4"),
    case("truncated", 3, each(("mlp.router.weight",), [2], lambda t: t[:12]), Wrong([2], "router", ["logits"], "unknown", {"expected": [16, 96], "stored": [12, 96]})),
    case("truncated-vocabulary", 3, named([EMBEDDING], lambda t: t[:480]), Wrong([], "embedding", [], "unknown", {"expected": [500, 96], "stored": [480, 96]}, stages=[0])),
]  # fmt: skip

# Cells of fault x layout x conversion that can't exist, and why.
CANNOT_EXIST = {
    "E01, E14 at EP 1 (one rank, TP 2, PP 2)": "the EP-local expert number is the global one, and every expert is owned by the one rank",
    "E05 at ETP 1 (one rank, PP 2, EP 4)": "nothing is cut, so nothing can be cut before gate and up are parted",
    "E08 at EP 4 as one expert for all": "each rank repeats its own first expert; at EP 1 there is one rank, and all experts are expert 0",
    "G01 at TP 1 (one rank, PP 2, EP 4)": "one rank holds every part whole: an even cut over one rank is no cut",
    "G01 in the slime layout": "its linear attention is replicated on every tensor parallel rank, so nothing cuts it",
    "L01 at PP 1, L04 at VPP 1": "there is one stage whose offset is 0, and one chunk whose names collide with nothing",
    "L04 as megatron-core writes it": "VPP is not run in this build: the files are those of PP 2, and the flags say that each stage had two chunks",
    "L02": "the layer kinds of 3 + 5 read as 4 + 4 differ, so no such file can be loaded: it is made at run time (A + M)",
    "V01 as a fault with padding as small as real rows": "healthy conversions have noise there: a note (test_weights_clean.py)",
    "G04 as a fault": "precision lost while the function is the same is minor (contract rule 8)",
}
# Rows with W or M that this model, or this stage, can't carry; they are for others to carry.
LATER = {
    "A05": "q, k, v biases: no Qwen3.5 has any (family_cases.py)",
    "T03, T04 expert_bias": "the router of this family has none (family_cases.py); T04-router drops a router instead",
    "L01 shifted by one layer": "a hybrid of period 4 has other tensors in the neighbouring layer; a dense family has not",
    "E03, E15, T05, W01": "what an engine received and did not consume: the engine stage",
    "P01, P02, T01, G07, L02": "settings: the config stage (cases.py has P01 and T01), or the forward",
    "L03, L05, L07": "launch flags against config.json: the config stage",
    "D02, D03": "token ids: the inputs stage",
}
