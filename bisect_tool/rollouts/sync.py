"""Did the engine get the weights that were sent?  Digests of what it holds against the directory that was sent, by sync number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import Family
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site
from bisect_hooks.table import GroupHeads, forward

from bisect_tool.faults import Fault, Finding, Relation, span, without_layer
from bisect_tool.hf_directory import HuggingFaceDirectory, canonical
from bisect_tool.judge import EXACT
from bisect_tool.listing import digest
from bisect_tool.rollouts.listings import Listing, Row
from bisect_tool.rollouts.stacked import Held, repacked
from bisect_tool.shards import shard_of

# tensors of an engine that no directory holds, and where they matter
BUFFERS = {"inv_freq": ("attention", "rope"), "cos_sin_cache": ("attention", "rope"), "e_score_correction_bias": ("router", "expert_bias")}


@dataclass(frozen=True, slots=True)
class Wrong:
    """What one tensor of one rank holds instead."""

    name: str
    kind: str
    detail: dict[str, Any]
    sources: tuple[str, ...]
    sync: int
    engine: str
    tp: int
    rank: int


@dataclass
class Weights:
    """The answer: findings, how many tensors were compared, and what could not be."""

    findings: list[Finding] = field(default_factory=list)
    compared: int = 0
    right: int = 0
    notes: list[str] = field(default_factory=list)
    trained: bool = False
    unknown: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sent:
    """base: the reference · export: what was sent, where it is another directory"""

    family: Family
    base: HuggingFaceDirectory
    export: HuggingFaceDirectory | None = None

    @property
    def directory(self) -> HuggingFaceDirectory:
        return self.export or self.base

    @property
    def between(self) -> tuple[str, str]:
        return ("export" if self.export else "reference", "engine")

    def modules_of_layer(self, layer: int) -> set[str]:
        """Modules of a layer that hold weights."""
        return {site.module for site in self.places().values() if site.in_layer and site.layer == layer}

    def places(self) -> dict[str, Site]:
        """Names of the directory → Sites, by the weight table."""
        dims = self.family.reference_dimensions(self.base.config)
        names = self.directory.names
        mtp = bool(self.family.mtp_tensors(names, dims))
        return {name: rule.site for rule in self.family.rules(dims, "slime", names, mtp) for name in rule.references}


def compare_hashes(listings: Sequence[Listing], sent: Sent) -> Weights:
    """Every tensor of every listing against what ought to be there."""
    found = Weights()
    judges: dict[int, _Judge] = {}
    wrong: list[Wrong] = []
    before: dict[tuple[str, int], Listing] = {}
    for listing in listings:
        judge = judges.setdefault(listing.tp, _Judge(sent, listing.tp))
        wrong += judge.judge(listing, before.get((listing.engine, listing.rank)), found)
        before[listing.engine, listing.rank] = listing
    if not found.compared:
        raise UsageError(f"{listings[0].source} lists no tensor of {sent.directory.path}", hint="is it a listing of this model?")
    unknown = [one for one in wrong if one.kind == "unknown"]
    if sent.export is None and len(unknown) * 2 > found.compared:
        found.trained = True
        wrong = [one for one in wrong if one.kind != "unknown"]
        found.unknown = sorted({one.name for one in unknown})
    found.findings = _findings(wrong, sent, listings)
    return found


class _Judge:
    """Says what a tensor is, at one tensor parallel size."""

    def __init__(self, sent: Sent, tp: int) -> None:
        dims = sent.family.reference_dimensions(sent.base.config)
        self.sent, self.tp = sent, tp
        self.held, self.base = Held(sent.directory, dims, tp), Held(sent.base, dims, tp)
        self.known: dict[tuple[str, int], dict[str, str]] = {}

    def judge(self, listing: Listing, earlier: Listing | None, found: Weights) -> Iterable[Wrong]:
        others = self._digests(listing)
        for name, row in listing.rows.items():
            sources = self.held.sources(name)
            zero = digest(torch.zeros(row.shape, dtype=_dtype(row, listing)))
            if not sources:
                if name.split(".")[-1] in BUFFERS:
                    found.compared += 1
                    if row.digest == zero:
                        yield self._wrong(listing, name, "zero", {"buffer": name.split(".")[-1]}, ())
                    else:
                        found.right += 1
                continue
            found.compared += 1
            if row.digest == others["sent"].get(name):
                found.right += 1
            else:
                kind, detail = self._what(name, row, listing, earlier, others, zero)
                yield self._wrong(listing, name, kind, detail, sources)

    def _wrong(self, listing: Listing, name: str, kind: str, detail: dict[str, Any], sources: tuple[str, ...]) -> Wrong:
        return Wrong(name, kind, detail, sources, listing.sync, listing.engine, listing.tp, listing.rank)

    def _what(
        self, name: str, row: Row, listing: Listing, earlier: Listing | None, others: dict[str, dict[str, str]], zero: str
    ) -> tuple[str, dict[str, Any]]:
        if row.digest == zero:
            return "zero", {}
        if self.sent.export is not None and row.digest == others["base"].get(name):
            return "stale", {"of": "reference"}
        if (
            earlier is not None
            and name in earlier.rows
            and row.digest == earlier.rows[name].digest
            and row.digest not in others["by digest"]
        ):
            return "stale", {"of": f"sync {earlier.sync}"}
        twin = others["by digest"].get(row.digest)
        if twin is not None and without_layer(twin) == without_layer(name):
            return "other-layer", {"offset": _layer(twin) - _layer(name)}
        if twin is not None:
            return "other-tensor", {"name": twin}
        tensor = self.held.make(name, listing.rank)
        if tensor is None:
            return "unknown", {}
        tensor = tensor.to(_dtype(row, listing))
        for kind, detail, made in repacked(tensor).values():
            if digest(made.contiguous()) == row.digest:
                return kind, detail
        if self._as_megatron_packs(name, row, listing):
            return "permutation", {"axis": 0, "unit": "rows", "map": "Megatron's packed rows, cut without taking the groups apart"}
        return "unknown", {}

    def _as_megatron_packs(self, name: str, row: Row, listing: Listing) -> bool:
        """Whether the rows of q, k and v stand as Megatron packs them, cut at the sizes of Hugging Face's."""
        directory, dims = self.sent.directory, self.held.dims
        for rule in self.sent.family.rules(dims, "slime", directory.names, mtp=False):
            if isinstance(rule.op, GroupHeads) and set(self.held.sources(name)) <= set(rule.references):
                parts = [directory.read(one) for one in rule.references]
                cut = dict(zip(rule.references, forward(rule.op, parts)[0].split([len(part) for part in parts]), strict=True))
                made = torch.cat([cut[one] for one in self.held.sources(name)])
                return self.tp == 1 and digest(made.to(_dtype(row, listing)).contiguous()) == row.digest
        return False

    def _digests(self, listing: Listing) -> dict[str, dict[str, str]]:
        """Digests of what this rank ought to hold, of what it would hold of the base, and names by digest."""
        found: dict[str, dict[str, str]] = {"sent": {}, "base": {}, "by digest": {}}
        for kind, held in (("sent", self.held), ("base", self.base)):
            key = (kind, listing.rank)
            known = self.known.setdefault(key, {})
            for name, row in listing.rows.items():
                if name not in known:
                    tensor = held.make(name, listing.rank)
                    if tensor is None:
                        continue
                    known[name] = digest(tensor.to(_dtype(row, listing)).contiguous())
                found[kind][name] = known[name]
            if self.sent.export is None:
                found["base"] = {}
                break
        for kind in ("base", "sent"):
            for name, one in found[kind].items():
                found["by digest"].setdefault(one, name)
        return found


def _findings(wrong: Sequence[Wrong], sent: Sent, listings: Sequence[Listing]) -> list[Finding]:
    """One finding a tensor, whatever the syncs, engines and ranks it is wrong on; those are its relation's detail."""
    places = sent.places()
    dims = sent.family.reference_dimensions(sent.base.config)
    engines = {one.engine for one in listings}
    rows: dict[tuple[str, str, str], list[Wrong]] = {}
    for one in wrong:
        rows.setdefault((one.name, one.kind, str(sorted(one.detail.items()))), []).append(one)
    findings = []
    for (name, kind, _), found in rows.items():
        site = place(name, found[0].sources, places, dims.kinds)
        syncs, where = sorted({one.sync for one in found}), sorted({one.engine for one in found})
        detail = found[0].detail | {"sync": syncs} | ({"engines": where} if len(where) < len(engines) else {})
        if kind in ("halves-swapped", "block-interleave", "transpose") and any(one.sync < min(syncs) for one in listings):
            detail["packed"] = "again"  # it was right before: the kernel's layout was applied to what had it already
        tp = found[0].tp
        inside = None if tp == 1 else sorted({(one.rank, 0) for one in found})
        shard = shard_of(site, Parallel(tp=tp), "engine" if tp > 1 else "unknown", dims.layers, inside, expert=False)
        relation = Relation(kind, detail, rule=f"{kind} {sorted(detail.items(), key=str)}")
        names = found[0].sources
        findings.append(Finding("rollout", site, shard, (names, (name,)), None, EXACT, relation, between=sent.between, made=name))
    return findings


def united(findings: Sequence[Finding], modules_of_layer: Callable[[int], set[str]]) -> list[Fault]:
    """Findings by the rule that made them, whatever modules it reached: a sync knows names and buckets, not modules.  The draft is apart."""
    rules: dict[tuple[bool, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda one: one.site):
        assert finding.relation is not None
        rules.setdefault((finding.site.module == "mtp", finding.relation.key), []).append(finding)
    faults = []
    for found in rules.values():
        shard = found[0].shard
        reached: dict[int, set[str]] = {}
        for one in found:
            shard = shard.joined(one.shard)
            if one.site.layer is not None and one.site.in_layer:
                reached.setdefault(one.site.layer, set()).add(one.site.module)
        whole = bool(reached) and all(one.site.in_layer for one in found) and all(got >= modules_of_layer(n) for n, got in reached.items())
        near = [one for one in found if one.site.layer == found[0].site.layer]
        names = tuple(tuple(dict.fromkeys(name for one in near for name in one.tensors[side])) for side in (0, 1))
        text, do = said(found)
        first = replace(found[0], tensors=(names[0], names[1]), explanation=text, next=do)
        faults.append(Fault((first, *found[1:]), whole, shard))
    return sorted(faults, key=lambda fault: fault.first.site)


def place(name: str, sources: Sequence[str], places: dict[str, Site], kinds: Sequence[str]) -> Site:
    """The Site of an engine's tensor: of what it is made of, or by its last word where it is a buffer."""
    for source in sources:
        if source in places:
            return places[source]
    module, part = BUFFERS.get(name.split(".")[-1], ("lm_head", None))
    layer = _layer(name)
    if layer < 0 and module != "lm_head":
        layer = next((n for n, kind in enumerate(kinds) if kind == "attention"), 0)
    return Site(module, layer if module != "lm_head" else None, part)


def compare_names(received: Sequence[str], consumed: Sequence[str], sent: Sent, listings: Sequence[Listing]) -> Weights:
    """Names that were supplied and never taken, and scales that an engine keeps and nobody supplied."""
    found = Weights()
    places = sent.places()
    dims = sent.family.reference_dimensions(sent.base.config)
    held = Held(sent.directory, dims)
    taken = {canonical(name) for name in consumed}
    taken |= {source for name in consumed for source in held.sources(name)}
    left: Counter[str] = Counter()
    for raw in received:
        name = canonical(raw)
        why = sent.family.left_out(name, dims) if not sent.family.mtp_tensors([name], dims) else None
        if why is not None:
            left[why] += 1
            continue
        found.compared += 1
        if name in taken or raw in consumed:
            found.right += 1
            continue
        own = nearest(name, places)
        site = places.get(own, Site("lm_head"))
        shard = shard_of(site, Parallel(), "unknown", dims.layers)
        relation = Relation("missing", {"name": without_layer(raw), "received": True, "consumed": False}, rule="received, never consumed")
        findings_name = (own,) if own in places else ()
        found.findings.append(
            Finding("rollout", site, shard, (findings_name, (raw,)), None, EXACT, relation, between=sent.between, made=own)
        )
    found.notes += [f"{count} names were left out: {why}" for why, count in left.items()]
    supplied = {canonical(name) for name in received}
    for name in sorted({name for one in listings for name in one.rows if name.endswith("_scale_inv")} - supplied):
        own = name.removesuffix("_scale_inv")
        sources = held.sources(own)
        if {f"{source}_scale_inv" for source in sources} <= supplied and sources:
            continue
        site = place(own, sources, places, dims.kinds)
        relation = Relation("missing", {"name": without_layer(name), "received": False}, rule="scales that nobody sent")
        found.findings.append(
            Finding(
                "rollout",
                site,
                shard_of(site, Parallel(), "unknown", dims.layers),
                (sources, (name,)),
                None,
                EXACT,
                relation,
                between=sent.between,
                made=name,
            )
        )
    return found


def nearest(name: str, places: dict[str, Site]) -> str:
    """The table's name that a name ends like: prefixes get lost or doubled on the way, and quantisers add an ending."""
    for ending in ("_packed", "_scale_inv", "_scale", "_shape", "_zero_point"):
        name = name.removesuffix(ending)
    words = name.split(".")
    for start in range(len(words)):
        for prefix in ("model.", ""):
            tried = prefix + ".".join(words[start:])
            if tried in places:
                return tried
            split = tried.replace(".weight", "")
            for fused in ("gate_up_proj", "down_proj"):
                if ".experts." in split and split.split(".experts.")[0] + f".experts.{fused}" in places and fused[:4] in split:
                    return split.split(".experts.")[0] + f".experts.{fused}"
    return name


def said(fault_findings: Sequence[Finding]) -> tuple[str, str]:
    """(what is wrong, what to do next) of findings that are one fault."""
    first = fault_findings[0]
    assert first.relation is not None
    kind, detail = first.relation.kind, first.relation.detail
    layers = sorted({one.site.layer for one in fault_findings if one.site.in_layer and one.site.layer is not None})
    modules = list(dict.fromkeys(one.site.module.replace("_", " ") for one in fault_findings))
    where = f"{', '.join(modules[:3])}{' ..' if len(modules) > 3 else ''}" + (f" in layers {span(layers)}" if layers else "")
    when = f" after sync {span(detail['sync'])}" if "sync" in detail else ""
    who = f" on engine {', '.join(detail['engines'])}, not on the others" if "engines" in detail else ""
    text, do = SENTENCES[kind](detail)
    return f"Rollout fault: {where}: {text}{when}{who} ({len(fault_findings)} tensors, first {first.tensors[1][0]}).", do


SENTENCES: dict[str, Any] = {
    "stale": lambda detail: (
        f"the engine still holds the {detail['of']}'s bytes",
        "Look at what the sync names: the new tensor had no name the engine takes, or its bucket was not applied (give --received and --consumed).",
    ),
    "zero": lambda _: ("the engine holds nothing but zeros", "It was dropped (sleep, release) or never loaded: load it again after resuming, and look for names that were skipped."),
    "other-layer": lambda detail: (f"layer i holds what layer i {detail['offset']:+d} should", "Two chunks share local names: number layers globally before the sync (slime#898)."),
    "other-tensor": lambda detail: (f"it holds what belongs in {detail['name']}", "Look at the name map of the sync."),
    "halves-swapped": lambda detail: _again("its two halves are exchanged", detail),
    "block-interleave": lambda detail: _again(f"its halves alternate in blocks of {detail['block']}", detail),
    "transpose": lambda detail: _again("it is transposed", detail),
    "permutation": lambda detail: (f"its rows are {detail['map']}", "Take q, gate, k and v apart by KV group before sending (vime#274)."),
    "unknown": lambda _: ("the bytes are not those that were sent, and no known relation explains them", "Compare one tensor by hand: docs/engine-hash.md says how to keep it."),
    "missing": lambda detail: (
        ("the sync supplied it and the engine never took it" if detail["received"] else "the engine keeps scales for it and the sync sent none"),
        ("Look at the loader's names: what matches no parameter is skipped in silence." if detail["received"] else "Quantise on sync too: bf16 went into an engine of another precision (slime#1624)."),
    ),
}  # fmt: skip


def _again(text: str, detail: dict[str, Any]) -> tuple[str, str]:
    if "packed" in detail:
        return (
            f"{text}: the kernel's layout was applied again to what had it",
            "Load into checkpoint layout and pack once, or restart the engine between syncs (sglang#28015).",
        )
    return (
        f"{text}, as a kernel may want it",
        "If the engine packs on loading this may be its layout: list it once before the first sync too, as `# sync 0`.",
    )


def _dtype(row: Row, listing: Listing) -> torch.dtype:
    found = getattr(torch, row.dtype, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"{listing.source}: {row.name} has dtype {row.dtype}, which is not known")
    return found


def _layer(name: str) -> int:
    words = name.split(".")
    return next((int(words[i + 1]) for i in range(len(words) - 1) if words[i] == "layers" and words[i + 1].isdecimal()), -1)
