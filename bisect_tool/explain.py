"""One sentence for a person, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bisect_tool.extent import odd
from bisect_tool.extent import said as _part
from bisect_tool.faults import Fault, Finding, span

NAMES = {
    "experts": "routed experts", "linear_attention": "linear attention", "attention_gate": "the attention output gate",
    "shared_expert": "the shared expert", "shared_expert_gate": "the shared expert's gate", "input_norm": "the input norm",
    "pre_mlp_norm": "the norm before the MLP", "router": "the router", "embedding": "the embedding", "lm_head": "the output layer",
    "final_norm": "the final norm", "mtp": "multi-token prediction", "tokens": "the tokens",
}  # fmt: skip
CLASSES = {None: "Fault of open class", "model-definition": "Model-definition fault"}
AGAIN = "Convert again with the mapping put right"
# tensors (blocks of rows) of one fault that are told one by one
TOLD = 8


def explanation(fault: Fault) -> tuple[str, str]:
    """(what is wrong, what to do next)."""
    first = fault.first
    if first.relation is None:
        return _drift(fault)
    said, do = _said(first.relation.kind, first.relation.detail, first)
    if first.relation.kind == "other-layer" and not _several_in_a_row(fault.layers):
        do = "Look at how layers are numbered in the mapping"
    if first.relation.kind == "other-tensor" and _exchanged(fault):
        said = "exchanged: each holds what belongs in another of them"
    unexplained = first.relation.kind == "unknown" and not first.relation.rule and first.cls != "conversion"
    if unexplained and first.tolerance is not None and first.shard.of == "run":
        return _drift(fault)
    reference, candidate = first.between
    said = said.replace("the reference's", f"the {reference}'s").replace("the candidate", f"the {candidate}")
    return f"{where(fault)}: {said}.", do if do.endswith("?") else f"{do}."


def _said(kind: str, detail: Mapping[str, Any], first: Finding) -> tuple[str, str]:
    """What was done, and what to do about it; of each tensor where it is not the same of all, of each block of rows likewise."""
    if "each" not in detail:
        return SENTENCES[kind](detail, first)
    each: Sequence[Mapping[str, Any]] = detail["each"]
    told = [_said(one["kind"], one["detail"], first) for one in each]
    names = _short([one.get("tensor", "") for one in each])
    said = [f"{name}: {what}" if name else what for name, (what, _) in zip(names, told, strict=True)]
    more = f"; and {len(said) - TOLD} more, in report.json" if len(said) > TOLD else ""
    return "; ".join(said[:TOLD]) + more, told[0][1]


def _short(names: Sequence[str]) -> list[str]:
    """Names without the beginning that all of them share; a layer's number keeps its word."""
    words = [name.split(".") for name in names]
    shared = next((i for i, column in enumerate(zip(*words, strict=False)) if len(set(column)) > 1), len(words[0]) - 1)
    shared -= any(some[shared : shared + 1] and some[shared].isdigit() for some in words) if shared else 0
    return [".".join(some[min(shared, len(some) - 1) :]) for some in words]


def _several_in_a_row(layers: Sequence[int]) -> bool:
    """What a pipeline stage holds; a single layer is no stage."""
    return len(layers) > 1 and list(layers) == list(range(layers[0], layers[-1] + 1))


def where(fault: Fault) -> str:
    """'Conversion fault from layer 0 on, in layers 0 to 7: routed experts (fc1, fc2) on EP ranks 1 to 3 (converted at EP 4)'"""
    first, shard = fault.first, str(fault.shard or fault.first.shard)
    rounded = first.relation is not None and first.relation.kind == "rounded"
    cls = ("Precision lost" if rounded else "Left out") if first.minor else CLASSES.get(first.cls, f"{str(first.cls).capitalize()} fault")
    layers = fault.layers
    at = f" from layer {layers[0]} on, in layers {span(layers)}" if len(layers) > 1 else f" in layer {layers[0]}" if layers else ""
    names = (
        "every module of the layer" if fault.whole_layer else " and ".join(NAMES.get(one, one.replace("_", " ")) for one in fault.modules)
    )
    parts = f" ({', '.join(fault.parts)})" if fault.parts and not fault.whole_layer and len(fault.modules) == 1 else ""
    joined = f" {shard}" if shard.startswith("(") else f", {shard}" if first.shard.of == "unknown" else f" on {shard}"
    return f"{cls}{at}: {names}{parts}{joined}"


def _exchanged(fault: Fault) -> bool:
    """Do the tensors of a layer hold each other's values, and no others?"""
    layer = [finding for finding in fault.findings if finding.site.layer == fault.first.site.layer]
    held = {finding.relation.detail["name"] for finding in layer if finding.relation is not None}
    return len(held) == len(layer) > 1 and held == {name for finding in layer for name in finding.tensors[1]}


def _drift(fault: Fault) -> tuple[str, str]:
    """A forward fault that no relation explains."""
    first = fault.first
    size = f"{first.difference.relative_rms:.2g}" if first.difference else "?"
    do = {
        "parallel": "The weights are right and one rank is right: look at how this layout cuts, places or reduces here.",
        "model-definition": "The weights are right, on one rank too: look at how the candidate defines this module (spec, flags).",
        "reference": "The reference is wrong here, not the candidate: look at this module in transformers, or take another version of it.",
    }.get(first.cls or "", "Run again with the weights stage: it decides between conversion and definition.")
    seen = f" ({first.tripped})" if first.tripped else ""
    other = "candidate" if first.cls == "reference" else "reference"
    said = f"{where(fault)}: what it gives leaves the {other}'s by {size} relative rms{seen}, on the reference's own inputs."
    return f"{said} {first.evidence}".rstrip(), do


def _duplicate(detail: Mapping[str, Any], first: Finding) -> tuple[str, str]:
    if "axis" in detail:
        what = "row" if detail["axis"] == 0 or first.site.module == "experts" else "column"
        if isinstance(detail["map"], str):
            return (
                f"{what}s repeat each other, {detail['wrong']} of {detail['of']} are wrong; {what} i holds {what} i mod {detail['modulus']}",
                AGAIN,
            )
        moved = [f"{what} {i} holds the reference's {what} {j}" for i, j in enumerate(detail["map"]) if i != j]
        more = f", and {len(moved) - 3} more" if len(moved) > 3 else ""
        return f"{'; '.join(moved[:3])}{more} ({detail['wrong']} of {detail['of']} are wrong)", AGAIN
    if (detail["modulus"] or 0) > 1:
        said = f"expert e holds the reference's expert e mod {detail['modulus']}; {detail['wrong']} of {detail['of']} are wrong"
        return said, "Convert again with global expert numbers (slime#1799: the converter used each EP rank's local number)"
    shown = detail["map"] if isinstance(detail["map"], str) else f"{str(detail['map'][:12])[:-1]}, ..]"
    return f"experts repeat each other, {detail['wrong']} of {detail['of']} are wrong; expert e holds expert {shown}", AGAIN


def _permutation(detail: Mapping[str, Any], first: Finding) -> tuple[str, str]:
    words = ("experts", "rows", "columns") if first.site.module == "experts" else ("rows", "columns", "taps")
    said = _order(detail["map"], words[detail["axis"]], detail["unit"]) + _part(detail)
    if detail["axis"] == 0 and (first.site.part == "qkv" or first.site.module == "attention_gate"):
        return said, AGAIN + ": Megatron packs group by group the queries of a KV group, then their gates, then its k and v"
    return said, AGAIN


def _order(mapped: Sequence[int], word: str, unit: int) -> str:
    moved = [i for i, j in enumerate(mapped) if i != j]
    if len(moved) == 2:
        one, other = moved if unit == 1 else (f"{i * unit} to {(i + 1) * unit - 1}" for i in moved)
        return f"its {word} {one} and {other} have changed places"
    first, last = moved[0], moved[-1]
    some = f" {first * unit} to {(last + 1) * unit - 1}" if len(moved) < len(mapped) else ""
    backwards = list(mapped[first : last + 1]) == list(range(first, last + 1))[::-1]
    return f"its {word}{some} are the reference's in {'reverse' if backwards else 'another'} order" + (
        f", {unit} at a time" * (backwards and unit > 1)
    )


def _even_cut(detail: Mapping[str, Any], _first: Finding) -> tuple[str, str]:
    joined = detail.get("how") == "joined"
    done = "joined from" if joined else "cut evenly over"
    said = f"a packed tensor of {detail['parts']} parts was {done} {detail['size']} tensor parallel ranks, with no regard to the parts"
    return said, "Convert again and " + ("join" if joined else "cut") + " each part over the ranks on its own (Megatron-Bridge#1690, #2013)"


def _other_layer(detail: Mapping[str, Any], _first: Finding) -> tuple[str, str]:
    offset = detail["offset"]
    some = f"{len(detail['experts'])} experts of " if "experts" in detail else ""
    return (
        f"{some}layer i hold{'' if some else 's'} the reference's layer i {'+' if offset > 0 else '-'} {abs(offset)}",
        "Look at the layer offset of the pipeline stages",
    )


def _missing(detail: Mapping[str, Any], first: Finding) -> tuple[str, str]:
    name = first.tensors[1][0] if first.tensors[1] else str(first.site)
    if "promised" in detail:
        return (
            f"{detail['tensors']} {detail['name']} tensors are not in the candidate, whose config.json promises them ({detail['promised']})",
            ("Harmless for text; set it to 0, or copy them from the original for speculative decoding"),
        )
    if "flag" in detail:
        return (
            f"{name} is not there: {detail['flag']} is off in the candidate's args, so the reference's tensor was dropped",
            f"Give {detail['flag']}, and convert again",
        )
    return f"{name} is not in the candidate", AGAIN


def _unknown(detail: Mapping[str, Any], _first: Finding) -> tuple[str, str]:
    if "padding" in detail:
        return (
            "what pads a row on the left leaks into its first tokens and all that remembers them; padded on the right it is right",
            "Mask padding before the convolution and the recurrence (maxtext#5295), or pad on the right",
        )
    said = (
        f"it is {detail['stored']} where the table makes {detail['expected']}"
        + (f", as heads {detail['head_width']} wide would have it (hidden size / heads?)" if "head_width" in detail else "")
        if "expected" in detail
        else f"the bytes differ{_part(detail)}{f': {odd(detail)};' if odd(detail) else ' and'} no known relation explains them"
    )
    return said, "Compare one tensor of it by hand (bisect-tool hash DIR lists digests)"


def _rounded(detail: Mapping[str, Any], first: Finding) -> tuple[str, str]:
    if not first.minor:
        return f"it is the reference's, rounded through {detail['through']}{_part(detail)}", "Convert again without that rounding"
    if detail.get("side") == "reference":
        return (
            "kept in float32 by the family; the reference's is rounded through bfloat16, the candidate's is not",
            "Nothing: it holds more than the reference",
        )
    said = f"kept in float32 by the family, held rounded through {detail['through']} by the candidate"
    return said, "Harmless for text; convert with these tensors kept in float32 to get it back"


def _every(detail: Mapping[str, Any]) -> str:
    """'in element 5 it is', but 'in row 3 every element is'"""
    return "it is" if "elements" in detail else "every element is"


def _init(detail: Mapping[str, Any], _first: Finding) -> tuple[str, str]:
    if detail["distribution"] == "constant":
        said = f"{_every(detail)} {detail['value']:g}, as an initialisation leaves it"
    else:
        said = f"it looks like a fresh initialisation (normal, standard deviation {detail['std']:g}) that never saw the reference's values"
    return said + _part(detail), "It was never loaded: look for the mapping that is missing. " + AGAIN


def _extra(detail: Mapping[str, Any], first: Finding) -> tuple[str, str]:
    if "nonfinite" in detail:
        said = f"its {detail['rows']} padding rows hold NaN or infinity, so that a padded token can win or all logits are lost"
        return said, "Zero the padding rows, and cut them off on export"
    if "norm" in detail:
        said = f"its {detail['rows']} padding rows are up to {detail['norm']:.3g} times as large as any real row, so that a padded token can win"
        return said, "Zero the padding rows, and cut them off on export"
    if "rows" in detail:
        return f"the candidate keeps {detail['rows']} padding rows of the vocabulary", "Cut them off on export"
    name = detail["name"]
    if "layers" in detail:
        said = f"{name} ({detail['tensors']} tensors) is in the candidate, and config.json says {detail['layers']} layers"
        return said, "Is the checkpoint of a larger model, or does it keep its MTP layer among the others?"
    return f"{name} is in the candidate and no row of the table makes it", "Is the checkpoint of another model? Is its mapping missing?"


def _stale(detail: Mapping[str, Any], first: Finding) -> tuple[str, str]:
    if first.relation is not None and first.relation.rule == "two sources":
        said = f"the candidate holds it twice, and the two disagree: {first.tensors[1][0]} is still what the {detail['of']} holds"
        return said, "Remove the old tensors from the export: a loader may take them and drop the trained ones"
    return (
        f"it is still exactly what the {detail['of']} holds, while its neighbours moved",
        "Was it frozen, or never saved? Look at what was trained and at the save",
    )


SENTENCES: dict[str, Callable[[Mapping[str, Any], Finding], tuple[str, str]]] = {
    "duplicate": _duplicate,
    "permutation": _permutation,
    "even-cut": _even_cut,
    "other-layer": _other_layer,
    "missing": _missing,
    "unknown": _unknown,
    "rounded": _rounded,
    "init": _init,
    "extra": _extra,
    "stale": _stale,
    "scale": lambda detail, _: (f"it is the reference's times {detail['value']:g}{_part(detail)}", AGAIN),
    "offset": lambda detail, _: (f"it is the reference's plus {detail['value']:g}{_part(detail)}", AGAIN),
    "block-interleave": lambda detail, _: (
        f"its {detail['parts']} parts alternate in blocks of {detail['block']} instead of standing one after another{_part(detail)}", AGAIN
    ),
    "halves-swapped": lambda detail, _: (f"the two halves are exchanged{_part(detail)}", AGAIN),
    "transpose": lambda detail, _: (f"it is the reference's tensor transposed{_part(detail)}", AGAIN),
    "other-tensor": lambda detail, _: (f"it holds what belongs in {detail['name']}", AGAIN),
    "names-only": lambda detail, _: (
        f"the values are right under the name {detail['name']}, which a loader would drop", "Rename the tensors, or drop the flag that renames them"
    ),
    "zero": lambda detail, _: (f"{_every(detail)} zero{_part(detail)}", "Was it ever loaded? " + AGAIN),
    "nan": lambda detail, _: (f"{_every(detail)} NaN{_part(detail)}", "Was it ever loaded? " + AGAIN),
}  # fmt: skip
