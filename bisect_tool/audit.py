"""The weights stage: is every tensor there, and the same?  If not, which relation holds?  No model is built, no forward is run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from bisect_hooks.family import Family, Setting
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site
from bisect_hooks.table import Cut, Made, Rule, check_total

from bisect_tool.faults import Finding, Proof, Relation, without_layer
from bisect_tool.hf_directory import HuggingFaceDirectory
from bisect_tool.judge import EXACT, Tolerance
from bisect_tool.measure import Difference, measure
from bisect_tool.relations import Blocks, Wrong, bits, even_cut, explain, same_bytes
from bisect_tool.shards import Shard, shard_of, wrong_places
from bisect_tool.torch_dist import TorchDist

FAMILY_ROUNDING = Tolerance(0.0, "bytes equal after one rounding to the stored dtype")


@dataclass(slots=True)
class Audit:
    """What an audit found and what it compared."""

    findings: list[Finding] = field(default_factory=list)
    minor: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    tensors: int = 0
    experts: int = 0


@dataclass(frozen=True)
class Auditor:
    """One reference, one candidate, the family's table between them.

    parallel  the layout the candidate was converted under; None when nobody says
    off       config settings that differ, by module: what the candidate's own args switch off is no conversion's fault
    """

    family: Family
    reference: HuggingFaceDirectory
    candidate: TorchDist
    parallel: Parallel | None
    off: Mapping[str, Setting] = field(default_factory=dict)

    def run(self) -> Audit:
        audit = Audit()
        dims = self.family.reference_dimensions(self.reference.config)
        rules = self.rules
        if self._mtp_left_out:
            audit.skipped.append(("mtp.*", f"left out by the candidate's flags (mtp_num_layers is not set): {self._promised} tensors"))
        wrong: list[Wrong] = []
        missing: list[tuple[Rule, Made]] = []
        for rule in rules:
            for made in rule.candidates:
                stored = self.stored(rule, made)
                if stored is None:
                    missing.append((rule, made))
                    continue
                audit.tensors += 1
                audit.experts += dims.experts if made.cut.expert and "linear_fc1" in made.name else 0
                found = self.compare(rule, made, stored, audit)
                if found is not None:
                    wrong.append(found)
        self._total(rules, missing, audit)
        if wrong:
            self.explain(wrong, audit)
        return audit

    @cached_property
    def rules(self) -> list[Rule]:
        """The table; with MTP where the reference has it and the candidate's args or keys do too."""
        dims = self.family.reference_dimensions(self.reference.config)
        mtp = self._promised > 0 and not self._mtp_left_out
        rules = self.family.rules(dims, self.candidate.layout, self.reference.names, mtp=mtp)
        check_total(rules)
        return rules

    @cached_property
    def rows(self) -> list[tuple[Rule, Made]]:
        """Every candidate tensor the table makes, with its rule."""
        return [(rule, made) for rule in self.rules for made in rule.candidates]

    @cached_property
    def _promised(self) -> int:
        return len(self.family.mtp_tensors(self.reference.names, self.family.reference_dimensions(self.reference.config)))

    @cached_property
    def _mtp_left_out(self) -> bool:
        has = any(key.startswith("mtp.") for key in self.candidate.tensors)
        return self._promised > 0 and not has and not self.candidate.args.get("mtp_num_layers")

    def stored(self, rule: Rule, made: Made) -> str | None:
        names = [made.name, *(alias for name, alias in rule.aliases if name == made.name)]
        return next((name for name in names if name in self.candidate.tensors), None)

    def expected(self, rule: Rule, made: Made) -> torch.Tensor:
        """What the table makes of the reference, in the reference's dtype."""
        return rule.forward([self.reference.read(name) for name in rule.references])[made.name]

    def compare(self, rule: Rule, made: Made, stored: str, audit: Audit) -> Wrong | None:
        expected, candidate = self.expected(rule, made), self.candidate.read(stored)
        if rule.site.module in ("embedding", "lm_head") and candidate.shape[0] > expected.shape[0]:
            audit.notes.append(f"{stored} has {candidate.shape[0] - expected.shape[0]} padding rows, not compared")
            candidate = candidate[: expected.shape[0]].contiguous()
        if candidate.shape != expected.shape:
            audit.findings.append(self._shape_finding(rule, made, stored, expected, candidate))
            return None
        wide = torch.promote_types(expected.dtype, candidate.dtype)
        if same_bytes(expected.to(wide), candidate.to(wide)):
            return None
        cast = expected.to(candidate.dtype)
        if made.fp32 and same_bytes(expected.to(torch.bfloat16).to(wide), candidate.to(wide)):
            audit.minor.append(self._rounded(rule, stored, measure(expected, candidate)))
            return None
        if candidate.dtype != expected.dtype and same_bytes(cast, candidate):
            audit.notes.append(f"{stored} is the reference rounded once, {_short(expected.dtype)} to {_short(candidate.dtype)}")
            return None
        return Wrong(rule, made, stored, cast, candidate, measure(expected, candidate))

    def explain(self, wrong: list[Wrong], audit: Audit) -> None:
        """Adds a finding for each wrong tensor, with the relation that reproduces it."""
        layer_of = {made.name: rule.site.layer for rule, made in self.rows}
        for one in self._even_cuts(wrong, audit):
            relation, proof = explain(one, self._blocks, self._as_stored, layer_of.get)
            audit.findings += self._findings(one, relation, proof)

    @cached_property
    def _as_stored(self) -> Callable[[str], torch.Tensor]:
        """What the table makes of the reference for a candidate tensor, in the dtype that tensor is stored in."""
        of = {made.name: (rule, made) for rule, made in self.rows}

        @lru_cache(maxsize=8)
        def expected(name: str) -> torch.Tensor:
            stored = self.stored(*of[name])
            tensor = self.expected(*of[name])
            return tensor if stored is None else tensor.to(self.candidate.tensors[stored].dtype)

        return expected

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self.rows, self._as_stored)

    def _findings(self, one: Wrong, relation: Relation, proof: Proof) -> list[Finding]:
        """One finding a part whose rows are wrong (only gate rows of linear_qkv: the gate; any other: attention)."""
        parts = one.rule.parts(one.made.name, one.candidate)
        expected = one.rule.parts(one.made.name, one.expected)
        unequal = [site for site in parts if not same_bytes(parts[site].contiguous(), expected[site].contiguous())]
        site = one.rule.site if one.rule.site in unequal else unequal[0]
        return [self._finding(site, one, relation, proof)]

    def _finding(self, site: Site, one: Wrong, relation: Relation, proof: Proof) -> Finding:
        unequal = bits(one.candidate) != bits(one.expected)
        padding = self.candidate.tensors[one.stored].shape[0] - len(unequal)  # rows of the vocabulary, which tp cuts too
        if padding > 0:
            unequal = torch.cat([unequal, unequal.new_zeros(padding, *unequal.shape[1:])])
        shard = self._shard(site, one.made.cut, unequal)
        names = tuple(self.reference.on_disk(name) for name in one.rule.references[:4])
        return Finding("conversion", site, shard, (names, (one.stored,)), one.difference, EXACT, relation, proof)

    def _even_cuts(self, wrong: list[Wrong], audit: Audit) -> list[Wrong]:
        """Packed projections (in_proj, conv1d of the native layout) that were cut with no regard to their parts."""
        ways = [self.parallel.tp] if self.parallel is not None else [2, 4, 8, 16]
        packs: dict[str, list[Wrong]] = {}
        for one in wrong:
            match = re.fullmatch(r"(.*\.(?:in_proj|conv1d)\.weight)\.\w+", one.made.name)
            if match:
                packs.setdefault(match[1], []).append(one)
        explained: set[str] = set()
        for prefix, found in packs.items():
            parts = self._parts_of(prefix, {one.made.name: one for one in found})
            size = even_cut(parts, [way for way in ways if way > 1])
            if size is None:
                continue
            relation = Relation("even-cut", {"parts": len(parts), "size": size})
            also = "fits too" if even_cut(parts, [2 * size]) else "does not fit"
            for one in found:
                proof = Proof(
                    f"cut the packed rows evenly over {size} tensor parallel ranks, compare every byte", one.difference.relative_rms, 0.0,
                    f"an even cut over {2 * size} ranks {also}; cut part by part it differs by {one.difference.relative_rms:.2g}",
                )  # fmt: skip
                audit.findings.append(self._finding(one.rule.site, one, relation, proof))
                explained.add(one.made.name)
        return [one for one in wrong if one.made.name not in explained]

    def _parts_of(self, prefix: str, wrong: Mapping[str, Wrong]) -> list[Wrong | tuple[torch.Tensor, torch.Tensor]]:
        parts: list[Wrong | tuple[torch.Tensor, torch.Tensor]] = []
        for rule, made in self.rows:
            if made.name.startswith(prefix + "."):
                expected = None if made.name in wrong else self.expected(rule, made)
                parts.append(wrong[made.name] if expected is None else (expected, self.candidate.read(made.name)))
        return parts

    def _total(self, rules: list[Rule], missing: list[tuple[Rule, Made]], audit: Audit) -> None:
        """Every tensor on both sides is accounted for: made by a row, left out on purpose, or a finding by name."""
        known = {
            name for rule in rules for made in rule.candidates for name in (made.name, *(a for n, a in rule.aliases if n == made.name))
        }
        extra = [key for key in self.candidate.tensors if key not in known]
        renamed: dict[str, str] = {}
        for rule, made in missing:
            expected = self.expected(rule, made)
            same = [key for key in extra if key not in renamed.values() and self._equal(key, expected)]
            if same:
                renamed[made.name] = same[0]
                audit.findings.append(self._names_only(rule, made, same[0], expected))
            else:
                audit.findings.append(self._missing(rule, made, extra))
        for key in extra:
            if key in renamed.values():
                continue
            near = difflib.get_close_matches(key, known, n=1)
            site = next((rule.site for rule in rules for made in rule.candidates if near and made.name == near[0]), Site("embedding"))
            audit.findings.append(self._extra(key, site))
        read = {name for rule in rules for name in rule.references}
        left: dict[str, int] = {}
        dims = self.family.reference_dimensions(self.reference.config)
        mtp = set(self.family.mtp_tensors(self.reference.names, dims))
        for name in self.reference.names:
            if name not in read:
                why = self.family.left_out(name, dims)
                if why is None:
                    near = difflib.get_close_matches(name, read, n=2)
                    audit.missing.append(
                        f"{self.reference.on_disk(name)}: no row of the table reads it (nearest: {', '.join(near) or 'none'})"
                    )
                elif name not in mtp or not any(what == "mtp.*" for what, _ in audit.skipped):
                    left[why] = left.get(why, 0) + 1
        audit.skipped += [(f"{count} reference tensors", why) for why, count in left.items()]

    def _equal(self, key: str, expected: torch.Tensor) -> bool:
        stored = self.candidate.tensors[key]
        return stored.shape == tuple(expected.shape) and stored.dtype == expected.dtype and same_bytes(self.candidate.read(key), expected)

    def _names_only(self, rule: Rule, made: Made, key: str, expected: torch.Tensor) -> Finding:
        shard = self._shard(rule.site, made.cut, None)
        tail = key.rsplit(".", 2)[-2] if key.count(".") > 1 else key
        proof = Proof(f"read it as {made.name}: every byte is equal", None, 0.0, "no other tensor of the candidate equals it")
        names = tuple(self.reference.on_disk(name) for name in rule.references[:4])
        return Finding("conversion", rule.site, shard, (names, (key,)), None, EXACT, Relation("names-only", {"name": tail}), proof)

    def _missing(self, rule: Rule, made: Made, extra: list[str]) -> Finding:
        setting = self.off.get(rule.site.module)
        names = tuple(self.reference.on_disk(name) for name in rule.references[:4])
        shard = self._shard(rule.site, made.cut, None)
        near = difflib.get_close_matches(made.name, extra, n=1)
        if setting is not None:
            detail = {"flag": setting.flag, "switched": "off"}
            proof = Proof(
                f"the candidate's args say {setting.arg} is off, so no such tensor is made",
                None,
                None,
                "tensors of the other modules are all there",
            )
            return Finding("model-definition", rule.site, shard, (names, (made.name,)), None, EXACT, Relation("missing", detail), proof)
        detail = {"nearest": near[0]} if near else {}
        proof = Proof("look for it by name and by bytes among the candidate's tensors", None, None, "every tensor that is there was found")
        return Finding(
            "conversion",
            rule.site,
            shard,
            (names, (made.name,)),
            None,
            EXACT,
            Relation("missing", detail, rule=without_layer(near[0]) if near else ""),
            proof,
        )

    def _extra(self, key: str, site: Site) -> Finding:
        shard = self._shard(site, Cut(""), None)
        proof = Proof("look for a row of the table that makes it", None, None, "every other tensor has one")
        return Finding(
            "conversion", site, shard, ((), (key,)), None, EXACT, Relation("extra", {"name": key}, rule=without_layer(key)), proof
        )

    def _shape_finding(self, rule: Rule, made: Made, stored: str, expected: torch.Tensor, candidate: torch.Tensor) -> Finding:
        names = tuple(self.reference.on_disk(name) for name in rule.references[:4])
        detail = {"expected": list(expected.shape), "stored": list(candidate.shape)}
        cls = "model-definition" if rule.site.module in self.off else "conversion"
        proof = Proof("compare shapes", None, None, "no element can be compared")
        return Finding(
            cls, rule.site, self._shard(rule.site, made.cut, None), (names, (stored,)), None, EXACT, Relation("unknown", detail), proof
        )

    def _rounded(self, rule: Rule, stored: str, difference: Difference) -> Finding:
        names = tuple(self.reference.on_disk(name) for name in rule.references[:4])
        proof = Proof("round the reference through bfloat16, compare every byte", difference.relative_rms, 0.0, "unrounded it differs")
        made = rule.candidates[0]
        return Finding(
            "conversion", rule.site, self._shard(rule.site, made.cut, None), (names, (stored,)), difference, FAMILY_ROUNDING,
            Relation("rounded", {"through": "bfloat16"}), proof, minor=True,
        )  # fmt: skip

    def _shard(self, site: Site, cut: Cut, unequal: torch.Tensor | None) -> Shard:
        """Where a wrong tensor lies in the layout it was converted under; `unequal` None is everywhere."""
        parallel = self.parallel or Parallel()
        inside = None if unequal is None else wrong_places(cut, unequal, parallel)
        layers = self.family.reference_dimensions(self.reference.config).layers
        return shard_of(site, parallel, "unknown" if self.parallel is None else "conversion", layers, inside, expert=cut.expert)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
