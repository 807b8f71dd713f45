"""A Fault is the answer: class, place, shard, numbers, relation, proof.  Findings are what stages find; one rule makes one fault."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bisect_hooks.site import Site

from bisect_tool.judge import Tolerance
from bisect_tool.measure import Difference
from bisect_tool.shards import Shard

REFERENCE_CANDIDATE = ("reference", "candidate")
# one rule that may reach several modules: a stage offset, an exchange, a flag
ACROSS_MODULES = ("other-layer", "other-tensor", "config")
# what of a relation's detail says where, and not what
PLACE = ("experts", "wrong", "of", "rows", "columns", "taps", "elements", "counts", "nan", "infinite", "first", "values", "each")


@dataclass(frozen=True, slots=True)
class Relation:
    """candidate = relation(reference).  `rule` is what makes two findings one fault where `detail` names a tensor."""

    kind: str
    detail: dict[str, Any] = field(default_factory=dict)
    also: tuple[dict[str, Any], ...] = ()
    rule: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "detail": _plain(self.detail), "also": list(self.also)}

    @property
    def key(self) -> str:
        return f"{self.kind} {self.rule or json.dumps(self.detail, sort_keys=True)}"


@dataclass(frozen=True, slots=True)
class Proof:
    """An experiment that makes the difference go away, and the control that does not."""

    experiment: str
    before: float | None
    after: float | None
    control: str

    def to_json(self) -> dict[str, Any]:
        return {"experiment": self.experiment, "before": number(self.before), "after": number(self.after), "control": self.control}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong at one site.

    made        the weight table's name of the tensor, where it is one
    piece       of a packed site, whose numbers are shown: `difference` counts inside it
    tripped     the row or column that says so, where the site as a whole does not
    shape       which tokens are wrong, where that is a clue
    candidates  the classes it may be, where the evidence does not decide
    evidence    what an experiment says of it, as sentences
    axes        the axes of the layout that make it, where taking them away cures it
    """

    cls: str | None
    site: Site
    shard: Shard
    tensors: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    difference: Difference | None = None
    tolerance: Tolerance | None = None
    relation: Relation | None = None
    proof: Proof | None = None
    explanation: str = ""
    next: str = ""
    between: tuple[str, str] = REFERENCE_CANDIDATE
    shows_at: str | None = None
    minor: bool = False
    made: str = ""
    piece: str = ""
    tripped: str = ""
    shape: Mapping[str, Any] | None = None
    candidates: tuple[str, ...] = ("conversion", "model-definition", "parallel")
    evidence: str = ""
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """Findings with one cause.  The first finding, in compute order, gives site, tensors and numbers."""

    findings: tuple[Finding, ...]
    whole_layer: bool = False
    shard: Shard | None = None

    @property
    def first(self) -> Finding:
        return self.findings[0]

    @property
    def layers(self) -> list[int]:
        return sorted({f.site.layer for f in self.findings if f.site.in_layer and f.site.layer is not None})

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(f.site.module for f in sorted(self.findings, key=lambda f: module_order(f.site))))

    @property
    def parts(self) -> list[str]:
        found = dict.fromkeys(f.site.part for f in sorted(self.findings, key=lambda f: module_order(f.site)) if f.site.part)
        return [part for part in found if part is not None]

    def to_json(self) -> dict[str, Any]:
        first, parts = self.first, self.parts
        shard = self.shard or first.shard
        several = len(self.modules) > 1
        page: dict[str, Any] = {
            "class": first.cls,
            "between": list(first.between),
            "layer": self.layers[0] if self.layers else None,
            "layers": self.layers,
            "module": None if self.whole_layer else self.modules[0],
            "modules": self.modules,
            "part": parts[0] if len(parts) == 1 and not several else None,
            "parts": parts,
            "shard": shard.to_json(),
            "site": str(first.site),
            "tensors": {"reference": list(first.tensors[0]), "candidate": list(first.tensors[1])},
            "difference": difference_json(first.difference),
            "tolerance": tolerance_json(first.tolerance),
            "relation": first.relation.to_json() if first.relation else None,
            "shows_at": first.shows_at,
            "proof": first.proof.to_json() if first.proof else None,
            "explanation": first.explanation,
            "next": first.next,
        }
        if first.cls is None:
            page["class_candidates"] = list(first.candidates)
        if first.piece:
            page["piece"] = first.piece
        if first.shape is not None:
            page["shape"] = dict(first.shape)
        if first.axes:
            page["axes"] = list(first.axes)
        return page


def module_order(site: Site) -> tuple[int, ...]:
    """Compute order of modules and parts, whatever their layer."""
    return Site(site.module, 0 if site.in_layer else None, site.part).order


def group(findings: Iterable[Finding], modules_of_layer: Any) -> list[Fault]:
    """Findings that are one fault by the contract's rule 3, in compute order.

    modules_of_layer  layer → names of every module it has that holds weights; a fault that broke all of them has no module
    """
    ordered = sorted(findings, key=lambda f: f.site)
    unexplained: dict[tuple[Any, ...], set[str]] = {}
    for finding in ordered:
        if _without_rule(finding) and finding.site.in_layer:
            unexplained.setdefault((finding.cls, finding.between, finding.site.layer), set()).add(finding.site.module)
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in ordered:
        place = (finding.cls, finding.between, finding.site.layer)
        every = _without_rule(finding) and finding.site.in_layer and unexplained[place] >= set(modules_of_layer(finding.site.layer))
        groups.setdefault((finding.cls, finding.between, "every module") if every else _key(finding), []).append(finding)
    faults = []
    for found in groups.values():
        shard = found[0].shard
        for finding in found[1:]:
            shard = shard.joined(finding.shard)
        by_layer: dict[int, set[str]] = {}
        for finding in found:
            if finding.site.in_layer and finding.site.layer is not None:
                by_layer.setdefault(finding.site.layer, set()).add(finding.site.module)
        whole = bool(by_layer) and all(modules >= set(modules_of_layer(layer)) for layer, modules in by_layer.items())
        united = tuple(found) if len({f.tensors for f in found}) == 1 else (_united(found), *found[1:])
        faults.append(Fault(united, whole and all(f.site.in_layer for f in found), shard))
    return sorted(faults, key=lambda fault: fault.first.site)


def _without_rule(finding: Finding) -> bool:
    return finding.relation is None or (finding.relation.kind == "unknown" and not finding.relation.rule)


def _key(finding: Finding) -> tuple[Any, ...]:
    site, relation = finding.site, finding.relation
    base = (finding.cls, finding.between, finding.minor)
    if relation is None or _without_rule(finding):
        return (*base, site.module, site.part, json.dumps(finding.shard.to_json(), sort_keys=True))
    if relation.kind in ACROSS_MODULES:
        return (*base, relation.key)
    return (*base, site.module, relation.key)


def joint(found: Sequence[Finding]) -> Relation | None:
    """What was done to several tensors: one relation; where they differ in it, or in the rows it covers, `each` says it of each tensor."""
    told = [(finding, finding.relation) for finding in found if finding.relation is not None]
    if not told:
        return None
    first, relations = told[0][1], [relation for _, relation in told]
    alike = len({relation.key for relation in relations}) == 1 or all(map(_without_rule, found))
    common = [{name: value for name, value in relation.detail.items() if name not in PLACE} for relation in relations]
    same_place = all(relation.detail == first.detail for relation in relations)
    if alike and (same_place or any(one != common[0] for one in common)):
        return first
    each: list[dict[str, Any]] = []
    for finding, relation in told:
        before = relation.detail.get("each", [])
        name = finding.tensors[1][0] if finding.tensors[1] else str(finding.site)
        own = {"tensor": name, "kind": relation.kind, "detail": relation.detail}
        each += before if before and all("tensor" in one for one in before) else [own]
    return Relation(first.kind, common[0] | {"each": each}, first.also, first.rule) if alike else Relation("unknown", {"each": each})


def _united(found: Sequence[Finding]) -> Finding:
    """The first finding, with the tensors of every part of its own layer and what was done to them."""
    first = found[0]
    layer = [f for f in found if f.site.layer == first.site.layer]
    reference = tuple(dict.fromkeys(name for f in layer for name in f.tensors[0]))
    candidate = tuple(dict.fromkeys(name for f in layer for name in f.tensors[1]))
    return replace(first, tensors=(reference, candidate), relation=joint(found))


def _plain(value: Any) -> Any:
    """A detail for strict JSON, however deep its numbers lie."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return number(value) if isinstance(value, float) else value


def number(value: float | None) -> float | str | None:
    """A number for strict JSON: non-finite values are words."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def difference_json(difference: Difference | None) -> dict[str, Any]:
    """A Difference as the contract has it; for what could not be measured (missing, other shape) the numbers are \"nan\"."""
    if difference is None:
        return {
            "relative_rms": "nan", "largest": "nan", "index": None, "reference_value": None, "candidate_value": None,
            "nonfinite": 0, "compared": 0,
        }  # fmt: skip
    return {
        "relative_rms": number(difference.relative_rms),
        "largest": number(difference.largest),
        "index": list(difference.index),
        "reference_value": number(difference.reference_value),
        "candidate_value": number(difference.candidate_value),
        "nonfinite": difference.nonfinite,
        "compared": difference.compared,
    }


def tolerance_json(tolerance: Tolerance | None) -> dict[str, Any]:
    """A Tolerance as the contract has it."""
    return {"relative_rms": tolerance.relative_rms if tolerance else 0, "source": tolerance.source if tolerance else "must be there"}


def span(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 3] → "0 to 3", [3, 7] → "3 and 7"."""
    numbers = list(numbers)
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return " and ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])])) if numbers else "none"


def counted(number: int, noun: str, *, of: int | None = None) -> str:
    """ "1 token", "3 tokens", "1 of 3 tokens"."""
    whole = number if of is None else of
    return f"{number}{'' if of is None else f' of {of}'} {noun}{'' if whole == 1 else 's'}"


def verb(number: int, one: str, many: str) -> str:
    """What so many of something do."""
    return one if number == 1 else many


def without_layer(name: str) -> str:
    """A tensor name with its layer number taken out: what two tensors of one kind share."""
    return re.sub(r"layers\.\d+\.", "layers.*.", name)
