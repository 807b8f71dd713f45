"""The weights stage: is every tensor there, and the same?  If not, which relation holds?  No model is built, no forward is run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from bisect_hooks.family import Dimensions, Family, Setting
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site, parse_site
from bisect_hooks.table import Cut, GroupHeads, Made, Rule

from bisect_tool.compare import Compared, Row, compare, same_bytes, same_tensor
from bisect_tool.faults import Finding, Proof, Relation
from bisect_tool.index import Index
from bisect_tool.judge import EXACT, Tolerance
from bisect_tool.measure import Difference, Sums
from bisect_tool.orders import WAYS, even_cut, reordered
from bisect_tool.places import Tensor, steps
from bisect_tool.quantised import in_fp8, nearest
from bisect_tool.relations import Search, Wrong
from bisect_tool.shards import Shard, shard_of
from bisect_tool.sides import Cast, First, Side, StoredSide, TableSide

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
FAMILY_ROUNDING = Tolerance(0.0, "bytes equal after one rounding to the stored dtype")
PACKED = re.compile(r"(.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.\w+")
PADDED = ("embedding", "lm_head")
# a padding row this much larger than any real row of the vocabulary can win the argmax
LOUD = 4.0


@dataclass(slots=True)
class Audit:
    """What an audit found and what it compared.  settled: tensors that are equal in other words, by what they are"""

    findings: list[Finding] = field(default_factory=list)
    minor: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    tensors: int = 0
    experts: int = 0
    read: int = 0
    holes: int = 0
    trained: bool = False
    settled: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Auditor:
    """A reference side, a candidate side, the family's table between them.

    parallel  the layout the candidate was converted under; None when nobody says
    off       config settings that differ, by module: what the candidate's own args switch off is no conversion's fault
    args      the candidate's own words, where there are any
    origin    where neither side is the reference: what both come from
    """

    family: Family
    dims: Dimensions
    rules: Sequence[Rule] = field(repr=False)
    reference: Side
    candidate: Side
    parallel: Parallel | None
    off: Mapping[str, Setting] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict, repr=False)
    origin: Side | None = None

    # -- one row at a time ----------------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> list[tuple[Rule, Made]]:
        """Every candidate tensor the table makes, with its rule."""
        return [(rule, made) for rule in self.rules for made in rule.candidates]

    @cached_property
    def row_of(self) -> Mapping[str, tuple[Rule, Made]]:
        return {made.name: (rule, made) for rule, made in self.rows}

    def expected(self, name: str) -> Tensor:
        """What the candidate should hold under a made name, in the reference's dtype.  A checkpoint's padding is not part of it."""
        found = self.reference.tensor(name)
        assert found is not None, f"the table makes {name} of nothing"
        padded = isinstance(self.reference, StoredSide) and self.row_of[name][0].site.module in PADDED
        return First(found, self.dims.vocabulary) if padded and found.shape[0] > self.dims.vocabulary else found

    def padding(self, name: str, expected: Tensor, candidate: Tensor) -> int:
        """Rows that only pad the vocabulary for parallel ranks."""
        extra = candidate.shape[0] - expected.shape[0] if len(candidate.shape) == len(expected.shape) else 0
        fits = extra > 0 and candidate.shape[1:] == expected.shape[1:] and isinstance(self.candidate, StoredSide)
        return extra if fits and self.row_of[name][0].site.module in PADDED else 0

    def compare(self, name: str) -> Compared | None:
        """One tensor; None when the candidate lacks it, or has it in another shape."""
        rule, made = self.row_of[name]
        candidate = self.candidate.tensor(name)
        if candidate is None:
            return None
        expected = self.expected(name)
        rows = candidate.shape[0] - self.padding(name, expected, candidate)
        if (rows, *candidate.shape[1:]) != expected.shape:
            return None
        return compare(name, rule, made.cut, made.fp32, expected, candidate, self.parallel or Parallel(), rows)

    def wrong(self, compared: Compared) -> Wrong:
        """A compared tensor with both sides at hand, in the dtype it is stored in."""
        rule, made = self.row_of[compared.name]
        candidate = self.candidate.tensor(compared.name)
        expected = self.expected(compared.name)
        assert candidate is not None
        cast = expected if expected.dtype == candidate.dtype else Cast(expected, candidate.dtype)
        if self.padding(compared.name, expected, candidate):
            candidate = First(candidate, expected.shape[0])  # what only pads the vocabulary is of no tensor of the reference
        return Wrong(rule, made, cast, candidate, compared, expected.shape[0])

    def explain(self, compared: Compared) -> tuple[Relation, Proof]:
        """The relation of one wrong tensor."""
        return self.search.explain(self.wrong(compared))

    def measure(self, name: str) -> Difference:
        """How far apart, over every element.  Windows where both sides are holes count as compared and equal."""
        expected, candidate = self.expected(name), self.candidate.tensor(name)
        assert candidate is not None
        row, sums = Row(expected, candidate), Sums()
        for start, stop in steps(expected.shape[0], row.unit, row.bytes):
            if expected.empty(start, stop) and candidate.empty(start, stop):
                sums.compared += (stop - start) * math.prod(expected.shape[1:])
                continue
            sums.add(expected.rows(start, stop), candidate.rows(start, stop), start)
        return sums.difference()

    @cached_property
    def search(self) -> Search:
        names = tuple(name for name, (rule, made) in self.row_of.items() if self.reference.tensor(name) is not None)
        experts = frozenset(name for name in names if self.row_of[name][1].cut.expert)
        dtypes = {name: found.dtype for name in names if (found := self.candidate.tensor(name)) is not None}

        def expected(name: str) -> Tensor:
            found = self.expected(name)
            return found if dtypes.get(name, found.dtype) == found.dtype else Cast(found, dtypes[name])

        layers = {name: rule.site.layer for name, (rule, _) in self.row_of.items()}
        std = self.args.get("init_method_std")
        stds = [std] if isinstance(std, float) and std > 0 else [0.02]
        origin = self.origin.tensor if self.origin is not None else lambda _name: None
        return Search(
            Index(names, experts, expected), layers.get, self.ways, (*stds, *(one / (2 * self.dims.layers) ** 0.5 for one in stds)), origin
        )

    @property
    def ways(self) -> Sequence[int]:
        """Tensor parallel sizes that something may have been cut or joined for."""
        if self.parallel is None or isinstance(self.candidate, TableSide):
            return WAYS
        return sorted({self.parallel.tp, self.parallel.expert_tp} - {1})

    # -- packed projections ---------------------------------------------------------------------------------------------------

    def packs(self, wrong: Iterable[str]) -> dict[str, list[str]]:
        """Packed projections (in_proj, conv1d of the native layout) with a wrong part: prefix → every part's name, in packing order."""
        found = {match[1] for name in wrong if (match := PACKED.fullmatch(name))}
        return {prefix: [name for name in self.row_of if (m := PACKED.fullmatch(name)) and m[1] == prefix] for prefix in sorted(found)}

    def explain_pack(self, names: Sequence[str], matched: Callable[[Pairs], Pairs | None] | None = None) -> tuple[Relation, Proof] | None:
        """Whether a packed projection was cut, or joined, with no regard to its parts.

        matched  row numbers for rows, where rows can only be told by what they are nearest to
        """
        pairs = []
        for name in names:
            candidate = self.candidate.tensor(name)
            if candidate is None or candidate.shape != self.expected(name).shape:
                return None
            pairs.append((self.expected(name).rows(0, candidate.shape[0]).to(candidate.dtype), candidate.rows(0, candidate.shape[0])))
        told = pairs if matched is None else matched(pairs)
        if told is None:
            return None
        pairs = told
        found = even_cut(pairs, self.ways)
        if found is None:  # some of the parts, packed by themselves: b and a
            wrong = [i for i, (want, got) in enumerate(pairs) if not same_bytes(want.contiguous(), got.contiguous())]
            pairs = pairs[wrong[0] : wrong[-1] + 1] if wrong else []
            found = even_cut(pairs, self.ways) if len(pairs) > 1 else None
        if found is None:
            return None
        how, size = found
        twice = even_cut(pairs, [2 * size])
        done = "cut the packed rows evenly over" if how == "cut" else "join the packed rows of"
        proof = Proof(
            f"{done} {size} tensor parallel ranks, compare every {'byte' if matched is None else 'row with its nearest'}",
            None, 0.0 if matched is None else None,
            f"over {2 * size} ranks it {'fits too' if twice else 'does not fit'}; part by part it differs by {{before}}",
        )  # fmt: skip
        detail = {"parts": len(pairs), "size": size} | ({"how": how} if how == "joined" else {})
        return Relation("even-cut", detail, rule=f"{how} {size}"), proof

    # -- findings -------------------------------------------------------------------------------------------------------------

    def findings_of(self, names: Iterable[str]) -> list[Finding]:
        """Compares and explains some tensors on the spot: what the forward stage asks about a located site."""
        compared = [one for name in names if (one := self.compare(name)) is not None and not one.equal]
        audit = Audit()
        wrong = [one for one in compared if not self.settle(one, audit)]
        packed: dict[str, tuple[Relation, Proof]] = {}
        for parts in self.packs(one.name for one in wrong).values():
            found = self.explain_pack(parts)
            if found is not None:
                packed |= dict.fromkeys(parts, found)
        for one in wrong:
            relation, proof = packed.get(one.name) or self.explain(one)
            audit.findings += self.findings(one, relation, proof)
        return [*audit.findings, *audit.minor]

    def settle(self, compared: Compared, audit: Audit) -> bool:
        """Whether an unequal tensor is a rounding that is allowed or minor; adds what has to be said of it."""
        if compared.bf16 or compared.coarse:
            audit.minor.append(self.rounded(compared))
            return True
        candidate, expected = self.candidate.tensor(compared.name), self.expected(compared.name)
        assert candidate is not None
        said = f"the {self.reference.word} rounded once, {_short(expected.dtype)} to {_short(candidate.dtype)}" if compared.once else None
        if said is None and _coded(candidate, expected):
            said = f"the {self.reference.word}, each element as the nearest FP8 code under the {self.candidate.word}'s own scales"
        elif said is None and _coded(expected, candidate):
            said = f"what the {self.reference.word}'s FP8 was made of: each of its codes is the nearest under its own scales"
        elif said is None and _short_of(expected, candidate):
            said = f"what the {self.reference.word}'s float16 was rounded from: rounded so, every byte is equal"
        if said is None:
            return False
        audit.settled.setdefault(said, []).append(self.candidate.names(compared.name)[0])
        return True

    def findings(self, compared: Compared, relation: Relation, proof: Proof) -> list[Finding]:
        """One wrong tensor, at the site whose rows are wrong (only gate rows of linear_qkv: the gate; any other: attention)."""
        rule, made = self.row_of[compared.name]
        sites = [parse_site(site) for site in compared.sites] or [rule.site]
        site = rule.site if rule.site in sites else sites[0]
        return [self.finding(site, made, relation, proof, compared.places)]

    def finding(
        self,
        site: Site,
        made: Made,
        relation: Relation,
        proof: Proof,
        places: Iterable[tuple[int, ...]] | None = None,
        cls: str = "conversion",
    ) -> Finding:
        shard = self.shard(site, made.cut, places)
        names = (self.reference.names(made.name), self.candidate.names(made.name))
        return Finding(
            cls, site, shard, names, None, EXACT, relation, proof, between=(self.reference.word, self.candidate.word), made=made.name
        )

    def rounded(self, compared: Compared) -> Finding:
        """Kept in float32 by the family and rounded through bfloat16 by the candidate: minor."""
        rule, made = self.row_of[compared.name]
        side = "reference" if compared.bf16 else "candidate"
        proof = Proof(f"round the {side} through bfloat16, compare every byte", None, 0.0, "unrounded it differs by {before}")
        detail = {"through": "bfloat16"} | ({} if compared.bf16 else {"side": "reference"})
        found = self.finding(rule.site, made, Relation("rounded", detail), proof)
        return replace(found, tolerance=FAMILY_ROUNDING, minor=True)

    def other_shape(self, name: str) -> Finding:
        """A tensor that is there in another shape: rows too many, a transpose, or what the args make it."""
        rule, made = self.row_of[name]
        expected, candidate = self.expected(name), self.candidate.tensor(name)
        assert candidate is not None
        want, got = expected.shape, candidate.shape
        if rule.site.module in PADDED and want[1:] == got[1:] and got[0] > want[0]:
            relation = Relation("extra", {"rows": got[0] - want[0]}, rule="padding rows")
            proof = Proof("count the rows of the vocabulary", None, None, f"without the last {got[0] - want[0]} rows the shapes are equal")
            return self.finding(rule.site, made, relation, proof)
        if len(want) == len(got) == 3 and want[0] == got[0] and (want[1], want[2]) == (got[2], got[1]):
            cast = Cast(expected, candidate.dtype)
            changes = [reordered(cast.rows(e, e + 1)[0], candidate.rows(e, e + 1)[0], ()) for e in range(want[0])]
            if all(change is not None and change.kind == "transpose" for change in changes):
                proof = Proof("transpose every expert of the reference, compare every byte", None, 0.0, "as they are, the shapes differ")
                return self.finding(rule.site, made, Relation("transpose"), proof)
        if len(want) == len(got) == 2 and want == (got[1], got[0]):
            change = reordered(Cast(expected, candidate.dtype).rows(0, want[0]), candidate.rows(0, got[0]), ())
            if change is not None:
                return self.finding(
                    rule.site, made, Relation("transpose"), Proof(change.experiment, None, 0.0, "as it is, the shapes differ")
                )
        cls = "model-definition" if rule.site.module in self.off else "conversion"
        proof = Proof("compare shapes", None, None, "no element can be compared")
        detail: dict[str, Any] = {"expected": list(want), "stored": list(got)}
        heads = isinstance(rule.op, GroupHeads) and want[1:] == got[1:] and got[0] * rule.op.width % want[0] == 0
        if isinstance(rule.op, GroupHeads) and heads:
            detail["head_width"] = got[0] * rule.op.width // want[0]
        return self.finding(rule.site, made, Relation("unknown", detail, rule="heads of another width" if heads else ""), proof, cls=cls)

    def loud_padding(self, name: str) -> Finding | None:
        """Padding rows of the output layer that can win the argmax: larger than any real row by far."""
        rule, made = self.row_of[name]
        expected, candidate = self.expected(name), self.candidate.tensor(name)
        if candidate is None or rule.site.module != "lm_head" or not self.padding(name, expected, candidate):
            return None
        real = max(float(candidate.rows(a, b).float().norm(dim=-1).max()) for a, b in steps(expected.shape[0], 1, Row(candidate).bytes))
        pad = float(candidate.rows(expected.shape[0], candidate.shape[0]).float().norm(dim=-1).max())
        if pad <= LOUD * real:
            return None
        last = self.parallel.tp - 1 if self.parallel is not None else 0
        proof = Proof(
            f"the largest padding row has norm {pad:.3g}", pad, None, f"the largest of the {expected.shape[0]} real rows has {real:.3g}"
        )
        places = [(last, cp) for cp in range(self.parallel.cp if self.parallel else 1)]
        rows = candidate.shape[0] - expected.shape[0]
        # rows that nobody initialised may hold NaN, which strict JSON has no number for
        detail = {"rows": rows} | ({"norm": pad / real} if math.isfinite(pad / real) else {"nonfinite": True})
        return self.finding(rule.site, made, Relation("extra", detail, rule="padding rows"), proof, places)

    def shard(self, site: Site, cut: Cut, places: Iterable[tuple[int, ...]] | None) -> Shard:
        """Where a wrong tensor lies in the layout it was converted under; `places` None is everywhere."""
        parallel = self.parallel or Parallel()
        of = "unknown" if self.parallel is None else "conversion"
        return shard_of(site, parallel, of, self.dims.layers, places, expert=cut.expert)


def _short_of(expected: Tensor, candidate: Tensor) -> bool:
    """Whether the candidate, rounded to the float16 that the other side is kept in, is that: small values lose bits there."""
    if expected.dtype != torch.float16 or candidate.dtype == torch.float16:
        return False
    kept = First(candidate, expected.shape[0]) if candidate.shape != expected.shape else candidate  # a vocabulary's padding
    return same_tensor(Cast(kept, expected.dtype), expected)


def _coded(coarse: Tensor, fine: Tensor) -> bool:
    """Whether one side is the other in FP8."""
    found = in_fp8(coarse)
    return found is not None and in_fp8(fine) is None and nearest(found, fine)


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
