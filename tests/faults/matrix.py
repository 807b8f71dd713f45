"""Every fault of the catalogue x parallel layout x checkpoint layout x dtype that can exist, by activations alone.

The whole verdict of a cell is put together from where the fault is and how the candidate is run: nothing is looked up that the
judge could have said.  `tests/faults/test_matrix.py` asserts each cell, and `make drill` writes which hold to docs/drill.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from bisect_hooks.parallel import Parallel
from cases import BF16, EVERY, FORWARD, FULL, LAYER_SLIME, LINEAR, Case, Verdict, fault
from workshop import LAYOUTS

LAYERS, EXPERTS, KV_GROUPS, HEADS_OF_GROUP = 8, 16, 2, 4
UNDERS = ("one", "tp2sp", "tp4", "pp2", "pp3+5", "vpp2", "ep2", "ep4", "tp2ep2", "etp2", "tp2pp2")
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Place:
    """One cell's coordinates: how the checkpoint is laid out, how the candidate is run, in what."""

    layout: str
    under: str
    dtype: str

    @property
    def run(self) -> Parallel:
        return LAYOUTS[self.under]

    def stages(self, layers: list[int] | None) -> dict[str, list[int]]:
        """Stages that hold these layers; outside the layers (None) it is the last."""
        if self.run.pp == 1:
            return {}
        found = {self.run.pp - 1} if layers is None else {self.run.stage_of(layer, LAYERS) for layer in layers}
        return {"pp": sorted(found)}

    def dense(self, layers: list[int] | None) -> dict[str, list[int]]:
        return self.stages(layers) | ({"tp": list(range(self.run.tp))} if self.run.tp > 1 else {})

    def experts(self, wrong: list[int]) -> dict[str, list[int]]:
        width = EXPERTS // self.run.ep
        shard = self.stages(EVERY)
        if self.run.ep > 1:
            shard["ep"] = sorted({e // width for e in wrong})
        if self.run.expert_tp > 1:
            shard["etp"] = list(range(self.run.expert_tp))
        return shard


Verdicts = Callable[[Place], Verdict]


def config(layers: list[int], module: str, *parts: str) -> Verdicts:
    return lambda at: fault("model-definition", layers, module, list(parts), "config", "run", None, **at.dense(layers or None))


def conversion(layers: list[int], module: str, parts: list[str], relation: str, modules: list[str] | None = None) -> Verdicts:
    return lambda at: fault("conversion", layers, module, parts, relation, "run", modules, **at.dense(layers or None))


def experts(wrong: Callable[[int], bool]) -> Verdicts:
    chosen = [e for e in range(EXPERTS) if wrong(e)]
    return lambda at: fault("conversion", EVERY, "experts", ["fc1", "fc2"], "duplicate", "run", None, **at.experts(chosen))


def norms(gated: Callable[[Place], bool]) -> Verdicts:
    """One flag reaches every norm, that of linear attention where `gated`."""

    def verdict(at: Place) -> Verdict:
        parts = ["q_norm", "k_norm", *(["gated_norm"] if gated(at) else [])]
        modules = ["input_norm", "attention", *(["linear_attention"] if gated(at) else []), "pre_mlp_norm", "final_norm"]
        return fault("model-definition", EVERY, "input_norm", parts, "config", "run", modules, **at.dense(EVERY))

    return verdict


def epsilon(at: Place) -> Verdict:
    """1e-5 instead of 1e-6: in bf16 only the gated norms of linear attention are small enough to show it.

    It makes the first norm smaller by 0.39 %, and as much is what rounding one constant may make.
    """
    if at.dtype == "fp32":
        return norms(lambda _: True)(at)
    return fault("model-definition", LINEAR, "linear_attention", ["gated_norm"], "config", "run", None, **at.dense(LINEAR))


def regrouped(at: Place) -> Verdict:
    """Ranks whose rows of linear_qkv are others in the two orders: every q before every gate, or each q with its gate."""
    queries, gates = ([f"{part}{head}" for head in range(HEADS_OF_GROUP)] for part in "qg")
    right, wrong = [*queries, *gates, "k", "v"], [*(one for pair in zip(queries, gates, strict=True) for one in pair), "k", "v"]
    blocks = len(right) * KV_GROUPS // at.run.tp
    own = [range(rank * blocks, (rank + 1) * blocks) for rank in range(at.run.tp)]
    ranks = [rank for rank in range(at.run.tp) if any(right[i % len(right)] != wrong[i % len(right)] for i in own[rank])]
    shard = at.dense(FULL) | ({"tp": ranks} if at.run.tp > 1 else {})
    return fault("conversion", FULL, "attention", ["qkv"], "permutation", "run", None, **shard)


# by activations alone a decay whose ratio is not the same over tokens is dt_bias (contract rule 7), though A_log moved too
PARTS = ["qkv", "q_norm", "k_norm", "out_proj", "in_proj", "conv1d", "dt_bias", "gated_norm", "logits", "fc1", "fc2"]
SECOND = [4, 5, 6, 7]


def second_stage(cls: str, relation: str | None) -> Verdicts:
    def verdict(at: Place) -> Verdict:
        # experts and the dense rest lie along other axes: of modules placed by both, the dense ones' are said
        return fault(cls, SECOND, None, PARTS, relation, "run", LAYER_SLIME, **at.dense(SECOND))

    return verdict


@dataclass(frozen=True)
class Cells:
    """One fault: how its checkpoint was written, what it looks like, and where it can't be or can't be seen."""

    plant: str
    expected: Verdicts
    written: str = "one"
    minor: bool = False
    absent: Callable[[Place], str] = lambda _at: ""
    unseen: Callable[[Place], str] = lambda _at: ""


def only(layout: str, why: str) -> Callable[[Place], str]:
    return lambda at: "" if at.layout == layout else why


def in_fp32(why: str) -> Callable[[Place], str]:
    return lambda at: why if at.dtype == "bf16" else ""


FAULTS = (
    Cells("E01", experts(lambda e: e >= 4), "ep4"),
    Cells("E08", experts(lambda e: e % 4 != 0), "ep4"),
    Cells("A03", regrouped),
    Cells("S05", conversion(EVERY, "shared_expert", ["fc1"], "halves-swapped")),
    Cells("N05", conversion([0], "input_norm", [], "other-tensor", ["input_norm", "pre_mlp_norm"])),
    Cells("V02", conversion([], "lm_head", [], "other-tensor")),
    Cells(
        "G01", conversion(LINEAR, "linear_attention", ["in_proj"], "even-cut"), "tp2sp",
        absent=only("native", "linear attention is replicated on every tensor parallel rank: nothing cuts in_proj"),
    ),
    Cells(
        "G04", conversion(LINEAR, "linear_attention", ["a_log"], "rounded"), minor=True,
        unseen=in_fp32("bf16 rounds the decay itself on both sides"),
    ),
    Cells("S04", config(EVERY, "shared_expert_gate")),
    Cells("T01", config(EVERY, "router", "probs")),
    Cells("P01", config(FULL, "attention", "rope")),
    Cells("P03", config(FULL, "attention", "rope")),
    # the slime layout's gated norm is Hugging Face's, and has no zero-centred gamma to mistake
    Cells("N03", norms(lambda at: at.layout == "native")),
    Cells("N04", epsilon),
    Cells("L01", second_stage("conversion", "other-layer"), "pp2"),
    Cells(
        "L01-run", second_stage("parallel", None), "pp2",
        absent=lambda at: (
            "" if at.run.pp > 1 and at.run.vpp == 1 and not at.run.pp_layers
            else "only pipeline stages of the same kinds of layers can take each other's: neither uneven nor virtual ones do"
        ),
    ),
    Cells(
        "A01",
        lambda at: fault("parallel", FULL, "attention_gate", [], None, "run", tp=[1, 3]),
        absent=lambda at: "" if at.run.tp > 2 else "with as many KV heads as tensor parallel ranks nothing is sliced",
    ),
)  # fmt: skip
CODE = ("L01-run", "A01")


def cells() -> Iterator[tuple[Cells, Place, str]]:
    """Every combination, with the reason where it can't exist."""
    # by what is kept from one to the next: recordings by layout, dtype and rounded tensors, ranks by their number
    for layout, dtype, minor, under, made in product(("slime", "native"), DTYPES, (False, True), UNDERS, FAULTS):
        if made.minor == minor:
            place = Place(layout, under, dtype)
            yield made, place, made.absent(place)


def case_of(made: Cells, at: Place) -> Case:
    """The case of one cell that can exist."""
    flags = (
        *FORWARD,
        "--no-answers",
        *(BF16 if at.dtype == "bf16" else ()),
        *(("--candidate-patch", "patch.py") if made.plant in CODE else ()),
    )
    seen = () if made.unseen(at) else (made.expected(at),)
    expected, minor = ((), seen) if made.minor else (seen, ())
    return Case(f"{made.plant}-{at.layout}-{at.under}-{at.dtype}", at.layout, made.written, (made.plant,), at.under, flags, expected, minor)
