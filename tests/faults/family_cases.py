"""The drill over every family: what each of its tiny models can carry, and the whole verdict that has to come out.

A case is put together from what a family has (`Traits`), so that a new family needs one line.  CI runs a covering set of them
(`COVERING`); `make wide` runs all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cases import FORWARD, Case, Verdict, fault


@dataclass(frozen=True)
class Traits:
    """What a tiny model has.  Layers by what is in them; `shared` names the module that stands for gated rows in S05."""

    family: str
    full: tuple[int, ...] = (0, 1, 2, 3)
    linear: tuple[int, ...] = ()
    moe: tuple[int, ...] = ()
    qk_norm: bool = True
    gated: bool = False
    qkv_bias: bool = False
    tied: bool = False
    shared: bool = False
    shared_gate: bool = False
    expert_bias: bool = False

    @property
    def layouts(self) -> tuple[str, ...]:
        return ("slime", "native") if self.linear else ("native",)

    @property
    def unders(self) -> tuple[str, ...]:
        return ("one", "tp2sp", "pp2", "ep2") if self.moe else ("one", "tp2sp", "pp2")

    @property
    def dense(self) -> tuple[int, ...]:
        return tuple(sorted(set(EVERY) - set(self.moe)))


EVERY = (0, 1, 2, 3)
HYBRID: dict[str, Any] = {"full": (1, 3), "linear": (0, 2), "gated": True}
FAMILIES = (
    Traits("qwen3-moe", moe=EVERY),
    Traits("qwen3-moe-mixed", moe=(0, 2, 3)),
    Traits("qwen3"),
    Traits("qwen2", qk_norm=False, qkv_bias=True, tied=True),
    Traits("llama", qk_norm=False, tied=True),
    Traits("qwen3.5", **HYBRID),
    Traits("qwen3.5-tied", **HYBRID, tied=True),
    Traits("qwen3-next", **HYBRID, moe=EVERY, shared=True, shared_gate=True),
    Traits("glm4-moe", moe=(1, 2, 3), qkv_bias=True, shared=True, expert_bias=True),
)


def config(
    layers: Iterable[int], module: str, *parts: str, of: str = "conversion", modules: list[str] | None = None, **shard: list[int]
) -> Verdict:
    return fault("model-definition", list(layers), module, list(parts), "config", of, modules, **shard)


def conversion(layers: Iterable[int], module: str | None, parts: Iterable[str], relation: str, *, of: str = "conversion", modules: list[str] | None = None, **shard: list[int]) -> Verdict:  # fmt: skip
    return fault("conversion", list(layers), module, list(parts), relation, of, modules, **shard)


def norms(t: Traits, layout: str, of: str = "conversion") -> Verdict:
    """Every norm there is: one flag reaches them all."""
    parts = [*(["q_norm", "k_norm"] if t.qk_norm else []), *(["gated_norm"] if t.linear and layout == "native" else [])]
    modules = [
        "input_norm",
        *(["attention"] if t.qk_norm else []),
        *(["linear_attention"] if "gated_norm" in parts else []),
        "pre_mlp_norm",
        "final_norm",
    ]
    return config(EVERY, "input_norm", *parts, of=of, modules=modules)


def second_stage(t: Traits, *, at_run_time: bool = False) -> Verdict:
    """L01: layers 2 and 3 hold layers 0 and 1, in every module that has weights.  By activations, a moved A_log is dt_bias (rule 7)."""
    parts = ["qkv", *(["q_norm", "k_norm"] if t.qk_norm else []), "out_proj"]
    modules = ["input_norm", "attention"]
    if t.linear:
        parts += ["in_proj", "conv1d", *([] if at_run_time else ["a_log"]), "dt_bias", "gated_norm"]
        modules.append("linear_attention")
    modules.append("pre_mlp_norm")
    if t.moe:
        parts += ["logits"]
        modules += ["router", "experts", *(["shared_expert"] if t.shared else []), *(["shared_expert_gate"] if t.shared_gate else [])]
    else:
        modules.append("mlp")
    if at_run_time:
        return fault("parallel", [2, 3], None, [*parts, "fc1", "fc2"], None, "run", modules, pp=[1])
    return conversion([2, 3], None, [*parts, "fc1", "fc2"], "other-layer", modules=modules, pp=[1])


def cases_of(t: Traits) -> list[Case]:
    """Every fault that this family's model can carry, each in a layout where it exists, and some by activations alone."""
    found: list[Case] = []
    number = 0

    def add(
        name: str, written: str, expected: Callable[[str], Verdict], *, layout: str = "", flags: tuple[str, ...] = (), minor: bool = False
    ) -> None:
        nonlocal number
        layout = layout or t.layouts[number % len(t.layouts)]  # one layout after the other
        number += 1
        verdict = (expected(layout),)
        by = "-activations" if flags else ""
        found.append(Case(f"{t.family}-{name}-{layout}-{written}{by}", layout, written, (name,), written, flags, () if minor else verdict, verdict if minor else ()))  # fmt: skip

    patched = (*FORWARD, "--candidate-patch", "patch.py")
    halves = ("shared_expert", t.moe) if t.shared else ("mlp", t.dense)
    for of, flags in (("conversion", ()), ("run", FORWARD)):
        add("P01", "one", lambda _, of=of: config(t.full, "attention", "rope", of=of), flags=flags)  # type: ignore[misc]
        if t.shared or t.dense:
            add(
                "S05", "tp2sp",
                lambda _, of=of: conversion(halves[1], halves[0], ["fc1"], "halves-swapped", of=of, tp=[0, 1]), flags=flags,  # type: ignore[misc]
            )  # fmt: skip
        if t.moe:
            add("E01", "ep2", lambda _, of=of: conversion(t.moe, "experts", ["fc1", "fc2"], "duplicate", of=of, ep=[1]), flags=flags)  # type: ignore[misc]
        if t.qkv_bias:
            add("A05", "one", lambda _, of=of: conversion(t.full, "attention", ["qkv"], "permutation", of=of), flags=flags)  # type: ignore[misc]
        if t.expert_bias:
            add("T04", "one", lambda _, of=of: conversion(t.moe, "router", ["expert_bias"], "zero", of=of), flags=flags)  # type: ignore[misc]
            add("T03", "one", lambda _, of=of: conversion(t.moe, "router", ["expert_bias"], "rounded", of=of), minor=True, flags=flags)  # type: ignore[misc]
    add("P03", "one", lambda _: config(t.full, "attention", "rope"))
    add("N03", "one", lambda layout: norms(t, layout))
    add("N04", "one", lambda layout: norms(t, layout))
    add("N05", "one", lambda _: conversion([0], "input_norm", [], "other-tensor", modules=["input_norm", "pre_mlp_norm"]))
    if t.tied:
        add("V02", "one", lambda _: config([], "lm_head"))
    else:
        add("V02", "tp2sp", lambda _: conversion([], "lm_head", [], "other-tensor", tp=[0, 1]))
    if not t.dense or not t.moe:
        add("L01", "pp2", lambda _: second_stage(t))
        add("L01-run", "pp2", lambda _: second_stage(t, at_run_time=True), flags=patched)
    behind = [n for n in t.full if n > 1]
    add("A07", "pp2", lambda _: fault("parallel", behind, "attention", ["core"], None, "run", pp=[1]), flags=patched)
    if t.gated:
        add("A03", "one", lambda _: conversion(t.full, "attention", ["qkv"], "permutation"))
    if t.linear:
        add("G01", "tp2sp", lambda _: conversion(t.linear, "linear_attention", ["in_proj"], "even-cut", tp=[0, 1]), layout="native")
        add("G04", "one", lambda _: conversion(t.linear, "linear_attention", ["a_log"], "rounded"), minor=True)
    if t.moe:
        add("E13", "tp2ep2", lambda _: fault("parallel", list(t.moe), "experts", ["dispatch"], None, "run", ep=[0, 1]), flags=patched)
        add("E08", "ep2", lambda _: conversion(t.moe, "experts", ["fc1", "fc2"], "duplicate", ep=[0, 1]))
        add("L05", "one", lambda _: config([t.moe[0]], "experts"))
        if t.expert_bias:
            add("T09", "one", lambda _: config(t.moe, "router", "probs"))
            add("T02", "one", lambda _: fault("model-definition", list(t.moe), "router", ["probs"], None, "run"), flags=patched)
        else:
            add("T01", "one", lambda _: config(t.moe, "router", "probs"))
    if t.shared_gate:
        add("S04", "one", lambda _: config(t.moe, "shared_expert_gate"))
    return found


def cannot(t: Traits) -> dict[str, str]:
    """Plants that this family's model can't carry, and why."""
    no_bias, no_experts = "experts are chosen without a bias, and their weights are not scaled", "there are no experts"
    reasons = {
        "A01": (True, "its 6 heads don't divide by 4 ranks, and with 2 ranks no KV head is shared: the embedded model has 8"),
        "A03": (not t.gated, "attention has no output gate"),
        "A05": (not t.qkv_bias, "q, k and v have no biases"),
        "E01": (not t.moe, no_experts),
        "E08": (not t.moe, no_experts),
        "E13": (not t.moe, no_experts),
        "G01": (not t.linear, "there is no linear attention"),
        "G04": (not t.linear, "there is no linear attention"),
        "L01": (bool(t.dense and t.moe), "stages hold other kinds of layers: no such checkpoint can be loaded"),
        "L01-run": (bool(t.dense and t.moe), "stages hold other kinds of layers: no such model can be run"),
        "L05": (not t.moe, no_experts),
        "S04": (not t.shared_gate, "no shared expert has a gate"),
        "S05": (not t.shared and not t.dense, "there is neither a shared expert nor a dense MLP"),
        "T01": (not t.moe or t.expert_bias, "experts are scored by a sigmoid, which --moe-router-pre-softmax leaves alone" if t.moe else no_experts),
        **dict.fromkeys(("T02", "T03", "T04", "T09"), (not t.expert_bias, no_bias if t.moe else no_experts)),
    }  # fmt: skip
    return {name: why for name, (so, why) in reasons.items() if so}


def clean_of(t: Traits) -> list[Case]:
    return [Case(f"{t.family}-clean-{layout}-{under}", layout, under, (), under, (), ()) for layout in t.layouts for under in t.unders]


CASES = {case.id: (t, case) for t in FAMILIES for case in (*clean_of(t), *cases_of(t))}


def covering() -> set[str]:
    """For each family one clean run on one rank and one under a layout, and a few faults: over all families every layout and every plant."""
    chosen: set[str] = set()
    seen = {("P01", True), ("E01", True), ("L01-run", True), ("A07", True), ("E13", True)}  # by activations alone: the first drill has them
    for i, t in enumerate(FAMILIES):
        clean = clean_of(t)
        own = [clean[0], clean[1 + i % (len(clean) - 1)]]
        for case in cases_of(t):
            kind = (case.faults[0], bool(case.flags))
            own += [case] if kind not in seen else []
            seen.add(kind)
        chosen |= {case.id for case in own}
    return chosen


COVERING = covering()
