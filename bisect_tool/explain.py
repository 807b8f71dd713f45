"""One sentence for a person, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bisect_tool.faults import Fault, Finding, span

NAMES = {
    "experts": "routed experts", "linear_attention": "linear attention", "attention_gate": "the attention output gate",
    "shared_expert": "the shared expert", "shared_expert_gate": "the shared expert's gate", "input_norm": "the input norm",
    "pre_mlp_norm": "the norm before the MLP", "router": "the router", "embedding": "the embedding", "lm_head": "the output layer",
    "final_norm": "the final norm", "mtp": "multi-token prediction", "tokens": "the tokens",
}  # fmt: skip
CLASSES = {None: "Fault of open class", "model-definition": "Model-definition fault"}
AGAIN = "Convert again with the mapping put right"


def explanation(fault: Fault) -> tuple[str, str]:
    """(what is wrong, what to do next)."""
    first = fault.first
    if first.relation is None:
        return _drift(fault)
    said, do = SENTENCES[first.relation.kind](first.relation.detail, first)
    if first.relation.kind == "unknown" and first.tolerance is not None and first.shard.of == "run":
        return _drift(fault)
    return f"{where(fault)}: {said}.", f"{do}."


def where(fault: Fault) -> str:
    """'Conversion fault from layer 0 on, in layers 0 to 7: routed experts (fc1, fc2) on EP ranks 1 to 3 (converted at EP 4)'"""
    first, shard = fault.first, str(fault.shard or fault.first.shard)
    cls = "Precision lost" if first.minor else CLASSES.get(first.cls, f"{str(first.cls).capitalize()} fault")
    layers = fault.layers
    at = f" from layer {layers[0]} on, in layers {span(layers)}" if len(layers) > 1 else f" in layer {layers[0]}" if layers else ""
    names = (
        "every module of the layer" if fault.whole_layer else " and ".join(NAMES.get(one, one.replace("_", " ")) for one in fault.modules)
    )
    parts = f" ({', '.join(fault.parts)})" if fault.parts and not fault.whole_layer and len(fault.modules) == 1 else ""
    joined = f" {shard}" if shard.startswith("(") else f", {shard}" if first.shard.of == "unknown" else f" on {shard}"
    return f"{cls}{at}: {names}{parts}{joined}"


def _drift(fault: Fault) -> tuple[str, str]:
    """A forward fault that no relation explains."""
    first = fault.first
    size = f"{first.difference.relative_rms:.2g}" if first.difference else "?"
    do = {
        "conversion": "The bytes differ and no known relation explains them: compare the tensors named here by hand.",
        "parallel": "The weights are right and one rank is right: look at how this layout cuts, places or reduces here.",
        "model-definition": "The weights are right, on one rank too: look at how the candidate defines this module (spec, flags).",
    }.get(first.cls or "", "Run again with the weights stage: it decides between conversion and definition.")
    return f"{where(fault)}: what it gives leaves the reference's by {size} relative rms, on the reference's own inputs.", do


def _duplicate(detail: Mapping[str, Any], _first: Finding) -> tuple[str, str]:
    if detail["modulus"]:
        said = f"expert e holds the reference's expert e mod {detail['modulus']}; {detail['wrong']} of {detail['of']} are wrong"
        return said, "Convert again with global expert numbers (slime#1799: the converter used each EP rank's local number)"
    return f"experts repeat each other, {detail['wrong']} of {detail['of']} are wrong; the map is {detail['map']}", AGAIN


def _permutation(_detail: Mapping[str, Any], first: Finding) -> tuple[str, str]:
    if first.site.module == "experts":
        return "they are the reference's experts in another order", AGAIN
    if first.site.module in ("attention", "attention_gate"):
        return "its rows are the reference's in another order", AGAIN + ": queries and gates of a KV group are packed apart in Megatron"
    return "its rows are the reference's in another order", AGAIN


def _even_cut(detail: Mapping[str, Any], _first: Finding) -> tuple[str, str]:
    said = f"a packed projection of {detail['parts']} parts was cut evenly over {detail['size']} tensor parallel ranks, with no regard to the parts"
    return said, "Convert again and cut each part over the ranks on its own (Megatron-Bridge#1690)"


def _other_layer(detail: Mapping[str, Any], _first: Finding) -> tuple[str, str]:
    offset = detail["offset"]
    return (
        f"layer i holds the reference's layer i {'+' if offset > 0 else '-'} {abs(offset)}",
        "Look at the layer offset of the pipeline stages",
    )


def _missing(detail: Mapping[str, Any], first: Finding) -> tuple[str, str]:
    name = first.tensors[1][0] if first.tensors[1] else str(first.site)
    if "flag" in detail:
        return (
            f"{name} is not there: {detail['flag']} is off in the candidate's args, so the reference's tensor was dropped",
            f"Give {detail['flag']}, and convert again",
        )
    return f"{name} is not in the candidate", AGAIN


def _unknown(detail: Mapping[str, Any], _first: Finding) -> tuple[str, str]:
    said = (
        f"it is {detail['stored']} where the table makes {detail['expected']}"
        if "expected" in detail
        else "the bytes differ and no known relation explains them"
    )
    return said, "Compare one tensor of it by hand (bisect-tool hash DIR lists digests)"


SENTENCES: dict[str, Callable[[Mapping[str, Any], Finding], tuple[str, str]]] = {
    "duplicate": _duplicate,
    "permutation": _permutation,
    "even-cut": _even_cut,
    "other-layer": _other_layer,
    "missing": _missing,
    "unknown": _unknown,
    "rounded": lambda detail, _: (
        f"kept in float32 by the family, held rounded through {detail['through']} by the candidate",
        "Harmless for text; convert with these tensors kept in float32 to get it back"
    ),
    "halves-swapped": lambda *_: ("the two halves are exchanged", AGAIN),
    "transpose": lambda *_: ("it is the reference's tensor transposed", AGAIN),
    "other-tensor": lambda detail, _: (f"it holds what belongs in {detail['name']}", AGAIN),
    "names-only": lambda detail, _: (
        f"the values are right under the name {detail['name']}, which a loader would drop", "Rename the tensors, or drop the flag that renames them"
    ),
    "extra": lambda detail, _: (f"{detail['name']} is in the candidate and no row of the table makes it", "Is the checkpoint of another model?"),
    "zero": lambda *_: ("every element is zero", "Was it ever loaded? " + AGAIN),
    "nan": lambda *_: ("every element is NaN", "Was it ever loaded? " + AGAIN),
}  # fmt: skip
