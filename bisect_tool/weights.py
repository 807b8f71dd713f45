"""The audit from end to end: open both sides, compare, explain, group, measure.  Every step is made of units that a Crew may share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout, Dimensions, Family, check_conversion
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site
from bisect_hooks.table import Rule, check_total

from bisect_tool import __version__, config_check, trained
from bisect_tool.accounting import account
from bisect_tool.args import parallel_of, plain
from bisect_tool.audit import Audit, Auditor
from bisect_tool.checkpoint import Checkpoint, open_checkpoint
from bisect_tool.compare import Compared
from bisect_tool.crew import Crew, Journal, Work, rank_of
from bisect_tool.faults import Fault, Finding, Proof, Relation
from bisect_tool.hf_directory import HuggingFaceDirectory, open_hf
from bisect_tool.layouts import written_by
from bisect_tool.legacy import LegacyCheckpoint
from bisect_tool.measure import Difference
from bisect_tool.sides import Side, StoredSide, TableSide, without_rounding
from bisect_tool.unknown import family_in

# one tensor of so many kinds is explained before a checkpoint is taken for a trained one
KINDS = 12


@dataclass(frozen=True)
class Sides:
    """What is compared with what, by path, so that every process opens it for itself.

    converted  how the candidate was converted, where flags say so
    """

    reference: Path
    candidate: Path | None = None
    export: Path | None = None
    converted: Parallel | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Sides, (self.reference, self.candidate, self.export, self.converted)

    @cached_property
    def directory(self) -> HuggingFaceDirectory:
        return open_hf(self.reference)

    @cached_property
    def exported(self) -> HuggingFaceDirectory:
        assert self.export is not None
        return open_hf(self.export)

    @cached_property
    def family(self) -> Family:
        return family_in(self.directory)

    @cached_property
    def dims(self) -> Dimensions:
        return self.family.reference_dimensions(self.directory.config)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        assert self.candidate is not None
        found = open_checkpoint(self.candidate)
        if not isinstance(found, LegacyCheckpoint):
            return found
        rules = self.table(found.layout, self.directory, mtp=found.holds_mtp)
        reference = TableSide("reference", self.directory, rules)
        shapes = {
            made.name: tensor.shape for rule in rules for made in rule.candidates if (tensor := reference.tensor(made.name)) is not None
        }
        return found.joined(rules, shapes)

    @cached_property
    def args(self) -> dict[str, Any]:
        """The candidate's own words, as far as it keeps any."""
        found = plain(self.checkpoint.args) if self.candidate is not None else {}
        return found | self.family.read_by_spec(found, self.directory.config) if found else {}

    @cached_property
    def written_under(self) -> Parallel | None:
        """The conversion's layout: flags, else the checkpoint's args, else the files that ranks wrote, else unknown."""
        if self.converted is not None:
            check_conversion(self.dims, self.converted)
        if self.candidate is None:
            return self.converted
        return self.converted or parallel_of(self.args, self.dims.layers) or written_by(self.checkpoint, self.dims)

    @property
    def contradicted(self) -> str:
        """What the checkpoint's args say of its layout, where flags say another."""
        said = parallel_of(self.args, self.dims.layers) if self.candidate is not None and self.converted is not None else None
        same = said is None or all(said.size(axis) == self.converted.size(axis) for axis in ("tp", "pp", "ep", "etp"))  # type: ignore[union-attr]
        return "" if same else f"the flags say that it was converted at {self.converted}, its args at {said}: placed by the flags"

    def table(self, layout: CheckpointLayout, directory: HuggingFaceDirectory, mtp: bool) -> list[Rule]:
        rules = self.family.rules(self.dims, layout, directory.names, mtp=mtp)
        check_total(rules)
        return rules

    @property
    def mtp(self) -> int:
        """MTP tensors of the reference."""
        return len(self.family.mtp_tensors(self.directory.names, self.dims))

    def auditor(self, between: str) -> Auditor:
        """One pair: reference-candidate, reference-export or candidate-export."""
        return {
            "reference-candidate": self._candidate, "reference-export": self._export, "candidate-export": self._candidate_export,
        }[between]()  # fmt: skip

    def _candidate(self) -> Auditor:
        checkpoint = self.checkpoint
        mtp = self.mtp > 0 and not self._mtp_left_out
        rules = self.table(checkpoint.layout, self.directory, mtp)
        off: Mapping[str, Any] = {}
        if self.args:
            off = config_check.switched_off(
                config_check.compare_settings(self.family, self.directory.config, self.args, checkpoint.layout)[0]
            )
        reference, candidate = TableSide("reference", self.directory, rules), StoredSide("candidate", checkpoint, rules)
        return Auditor(self.family, self.dims, rules, reference, candidate, self.written_under, off, self.args)

    @property
    def _mtp_left_out(self) -> bool:
        has = any(key.startswith("mtp.") for key in self.checkpoint.tensors)
        return self.mtp > 0 and not has and not self.args.get("mtp_num_layers")

    @property
    def export_mtp(self) -> bool:
        return bool(self.family.mtp_tensors(self.exported.names, self.dims))

    def _export(self) -> Auditor:
        mtp = self.mtp > 0 and self.export_mtp
        tables = [without_rounding(self.table("native", directory, mtp)) for directory in (self.directory, self.exported)]
        reference, export = TableSide("reference", self.directory, tables[0]), TableSide("export", self.exported, tables[1], whole=False)
        return Auditor(self.family, self.dims, tables[0], reference, export, self.converted)

    def _candidate_export(self) -> Auditor:
        checkpoint = self.checkpoint
        mtp = any(key.startswith("mtp.") for key in checkpoint.tensors) and self.export_mtp
        ours = self.table(checkpoint.layout, self.directory, mtp)
        theirs = without_rounding(self.table(checkpoint.layout, self.exported, mtp))
        candidate: Side = StoredSide("candidate", checkpoint, ours, backwards=True)
        export = TableSide("export", self.exported, theirs, whole=False)
        # a row that the candidate itself lacks is the other pair's finding
        rules = [rule for rule in theirs if all(candidate.tensor(made.name) is not None for made in rule.candidates)]
        origin = TableSide("reference", self.directory, without_rounding(ours))
        return Auditor(self.family, self.dims, rules, candidate, replace(export, rules=theirs), self.written_under, origin=origin)


def work_of(sides: Sides) -> Work:
    """What a process of the crew does: one unit of one step.  Called once in each process, which opens everything for itself."""
    auditors: dict[str, Auditor] = {}

    def work(step: str, argument: Any) -> Any:
        between, _, verb = step.partition(" ")
        auditor = auditors.setdefault(between, sides.auditor(between)) if between not in auditors else auditors[between]
        if verb == "compare":
            found = auditor.compare(argument)
            return None if found is None else found.to_json()
        if verb == "measure":
            return asdict(auditor.measure(argument))
        if verb == "pack":
            explained = auditor.explain_pack(argument)
        elif verb == "trained pack":
            explained = auditor.explain_pack(argument, trained.matched)
        elif verb == "trained":
            return _narrowed(auditor, Compared.from_json(argument))
        else:
            explained = auditor.explain(Compared.from_json(argument))
        return None if explained is None else _page(*explained)

    return work


def _narrowed(auditor: Auditor, compared: Compared) -> dict[str, Any] | None:
    """What training can't have done to a tensor, and where it shows."""
    wrong = auditor.wrong(compared)
    found = trained.explain(wrong, auditor.search)
    if found is None:
        return None
    relation, proof, rows = found
    return _page(relation, proof) | {"compared": trained.narrowed(compared, wrong, rows, auditor.parallel or Parallel()).to_json()}


def _page(relation: Relation, proof: Proof) -> dict[str, Any]:
    return {"relation": asdict(relation), "proof": asdict(proof)}


def _read(page: Mapping[str, Any]) -> tuple[Relation, Proof]:
    relation = dict(page["relation"]) | {"also": tuple(page["relation"]["also"])}
    return Relation(**relation), Proof(**page["proof"])


Group = Callable[[list[Finding]], list[Fault]]


@dataclass
class Stage:
    """One pair audited.  group: findings → faults with their sentences"""

    sides: Sides
    between: str
    crew: Crew
    group: Group = field(repr=False)

    def run(self) -> tuple[Audit, list[Fault], list[Fault]]:
        """(what was found and compared, faults, minor)."""
        auditor, audit = self.auditor, Audit()
        self._leave_out(audit)
        if self.sides.contradicted:
            audit.notes.append(self.sides.contradicted)
        answers = self.crew.answers(f"{self.between} compare", [(name, name) for name in auditor.row_of])
        missing = []
        compared: list[Compared] = []
        for name, answer in answers.items():
            if answer is not None:
                compared.append(Compared.from_json(answer))
            elif auditor.candidate.tensor(name) is None:
                missing.append(name)
            else:
                audit.findings.append(auditor.other_shape(name))
        self._count(compared, audit)
        wrong = [one for one in compared if not one.equal and not auditor.settle(one, audit)]
        self._explain(wrong, compared, audit)
        account(auditor, missing, audit)
        return audit, self._measured(audit.findings), self._measured(audit.minor)

    @cached_property
    def auditor(self) -> Auditor:
        return self.sides.auditor(self.between)

    def _leave_out(self, audit: Audit) -> None:
        """MTP that the other side leaves out: its flags say so, or its own config still promises it."""
        sides = self.sides
        if not sides.mtp or any(rule.site.module == "mtp" for rule in self.auditor.rules):
            return
        if self.between == "reference-candidate":
            audit.skipped.append(("mtp.*", f"left out by the candidate's flags (mtp_num_layers is not set): {sides.mtp} tensors"))
        elif self.between == "reference-export" and sides.family.reference_dimensions(sides.exported.config).mtp:
            site = Site("mtp", 0)
            names = tuple(map(sides.directory.on_disk, sides.family.mtp_tensors(sides.directory.names, sides.dims)))
            proof = Proof(f"look for {names[0]} and the like in the export", None, None, "every tensor of the decoder is there")
            key = sides.family.mtp_key(sides.exported.config)
            relation = Relation("missing", {"name": "mtp.*", "tensors": len(names), **({"promised": key} if key else {})})
            shard = self.auditor.shard(site, self.auditor.rows[0][1].cut, None)
            words = (self.auditor.reference.word, self.auditor.candidate.word)
            audit.minor.append(
                Finding("conversion", site, shard, (names[:4], ("mtp.*",)), relation=relation, proof=proof, between=words, minor=True)
            )
            audit.skipped.append(("mtp.*", f"the export has none, though its config.json promises them: {len(names)} tensors"))

    def _count(self, compared: Sequence[Compared], audit: Audit) -> None:
        auditor = self.auditor
        audit.tensors = len(compared)
        audit.experts = sum(auditor.dims.experts for one in compared if "linear_fc1" in one.name and auditor.row_of[one.name][1].cut.expert)
        audit.read, audit.holes = sum(one.read for one in compared), sum(one.holes for one in compared)
        for one in compared:
            candidate = auditor.candidate.tensor(one.name)
            padding = auditor.padding(one.name, auditor.expected(one.name), candidate) if candidate is not None else 0
            if padding:
                audit.notes.append(f"{auditor.candidate.names(one.name)[0]} has {padding} padding rows, not compared")
                loud = auditor.loud_padding(one.name)
                if loud is not None:
                    audit.findings.append(loud)
        if audit.holes:
            audit.notes.append(f"{audit.holes / 1e9:.1f} GB on both sides together are holes of sparse files, equal without being read")
        rounded = [row for row in self.auditor.rules if row.op.lossy]
        if rounded and self.between == "reference-candidate":
            audit.notes.append(
                f"{len(rounded)} tensors ({rounded[0].candidates[0].name.rpartition('.layers.')[2].partition('.')[2]}) are rounded by this layout "
                "itself, w - 1 in the stored dtype: compared as the conversion rounds them"
            )

    def _explain(self, wrong: Sequence[Compared], compared: Sequence[Compared], audit: Audit) -> None:
        training = trained.looks_trained(compared)
        if training is not None and self._structured(wrong):
            training = None
        if training is not None:
            self._trained(wrong, compared, training, audit)
            return
        auditor = self.auditor
        packs = auditor.packs(one.name for one in wrong)
        answered = self.crew.answers(f"{self.between} pack", list(packs.items()))
        explained = {name: answer for prefix, answer in answered.items() if answer is not None for name in packs[prefix]}
        left = [one for one in wrong if one.name not in explained]
        explained |= self.crew.answers(f"{self.between} explain", [(one.name, one.to_json()) for one in left])
        for one in wrong:
            relation, proof = _read(explained[one.name])
            audit.findings += auditor.findings(one, consistent(relation, auditor), proof)
        matrices = {one.name for one in compared if len(auditor.expected(one.name).shape) > 1}
        if len(matrices) > 1 and all(name in explained and explained[name]["relation"]["kind"] == "unknown" for name in matrices):
            words = (auditor.candidate.word, auditor.reference.word)
            audit.notes.insert(
                0,
                f"not one of {len(matrices)} matrices of the {words[0]} is the {words[1]}'s, nor made of it by a relation: another model?",
            )

    def _structured(self, wrong: Sequence[Compared]) -> bool:
        """Whether a relation explains most of what looks like training: a rounding of everything is no training.

        Some elements of a vector tell nothing: a small step moves few of a norm's, all by the same unit in the last place.
        """
        kinds = {
            self.auditor.row_of[one.name][0].site.module + str(self.auditor.row_of[one.name][0].site.part): one for one in reversed(wrong)
        }
        some = list(kinds.values())[:KINDS]
        found = self.crew.answers(f"{self.between} explain", [(one.name, one.to_json()) for one in some])
        relations = [answer["relation"] for answer in found.values()]
        told = sum(one["kind"] != "unknown" and "elements" not in one["detail"] for one in relations)
        return bool(told * 2 > len(some))

    def _trained(self, wrong: Sequence[Compared], compared: Sequence[Compared], training: trained.Training, audit: Audit) -> None:
        auditor = self.auditor
        iteration = self.sides.checkpoint.iteration if self.sides.candidate is not None else None
        audit.missing.append(training.note(iteration))
        audit.trained = True
        far = sorted((one for one in wrong if one.size > trained.FURTHEST * training.median), key=lambda one: -one.size)
        audit.missing += [f"{one.name} moved by {one.size:.2g}, {one.size / training.median:.0f} times the median" for one in far[:12]]
        packs = auditor.packs(one.name for one in wrong)
        answered = self.crew.answers(f"{self.between} trained pack", list(packs.items()))
        found = {name: answer for prefix, answer in answered.items() if answer is not None for name in packs[prefix]}
        left = [one for one in wrong if one.name not in found]
        found |= self.crew.answers(f"{self.between} trained", [(one.name, one.to_json()) for one in left])
        for one in wrong:
            answer = found[one.name]
            if answer is not None:
                narrowed = Compared.from_json(answer["compared"]) if "compared" in answer else one
                audit.findings += auditor.findings(narrowed, consistent(_read(answer)[0], auditor), _read(answer)[1])
        matrices = {one.name: len(auditor.expected(one.name).shape) > 1 for one in compared}
        for name in trained.left_behind(compared, matrices):
            rule, made = auditor.row_of[name]
            proof = Proof("compare every byte: it is the reference's", 0.0, 0.0, f"its neighbours moved by {training.median:.2g}")
            audit.findings.append(auditor.finding(rule.site, made, Relation("stale", {"of": "reference"}), proof))

    def _measured(self, findings: list[Finding]) -> list[Fault]:
        """Findings as faults; the first of each, which stands for it, is measured over every element."""
        faults = self.group(findings)
        names = list(dict.fromkeys(f.first.made for f in faults if f.first.made and self._measurable(f.first)))
        measured = self.crew.answers(f"{self.between} measure", [(name, name) for name in names])
        found = []
        for fault in faults:
            first = fault.first
            if first.made in measured and self._measurable(first):
                page = measured[first.made]
                difference = Difference(**(page | {"index": tuple(page["index"])}))
                found.append(replace(fault, findings=(with_numbers(first, difference), *fault.findings[1:])))
            else:
                found.append(fault)
        return found

    def _measurable(self, finding: Finding) -> bool:
        if not finding.made:
            return False
        candidate = self.auditor.candidate.tensor(finding.made)
        if candidate is None:
            return False
        expected = self.auditor.expected(finding.made)
        rows = candidate.shape[0] - self.auditor.padding(finding.made, expected, candidate)
        shape: tuple[int, ...] = (rows, *candidate.shape[1:])
        return shape == expected.shape


def with_numbers(finding: Finding, difference: Difference) -> Finding:
    """A finding with its difference, and its proof told with it."""
    before = difference.relative_rms
    proof = finding.proof
    if proof is not None:
        control = proof.control.replace("{before}", f"{before:.2g}")
        proof = replace(proof, before=before if proof.before is None else proof.before, control=control)
    return replace(finding, difference=difference, proof=proof)


def consistent(relation: Relation, auditor: Auditor) -> Relation:
    """Where nobody says how it was converted: expert parallel sizes that the relation fits."""
    modulus, of = relation.detail.get("modulus"), relation.detail.get("of")
    if auditor.parallel is not None or not modulus or not of or relation.kind != "duplicate" or of % modulus:
        return relation
    return replace(relation, detail=relation.detail | {"consistent": {"ep": of // modulus}})


def run_weights(
    sides: Sides, group: Group, jobs: int, folder: Path | None, progress: Callable[[str], None]
) -> list[tuple[str, Audit, list[Fault], list[Fault]]]:
    """Every pair that the evidence given makes, in order: (between, audit, faults, minor)."""
    if sides.candidate is None and sides.export is None:
        raise UsageError("nothing to compare the reference with", hint="give --candidate, --export or both")
    journal = Journal(folder, inputs_of(sides), rank_of()[0])
    crew = Crew(partial(work_of, sides), journal, jobs, progress)
    found = []
    try:
        pairs = ["reference-candidate"] if sides.candidate is not None else ["reference-export"]
        for between in [*pairs, *(["candidate-export"] if sides.candidate is not None and sides.export is not None else [])]:
            found.append((between, *Stage(sides, between, crew, group).run()))
    finally:
        crew.close()
        journal.close()
    return found


def inputs_of(sides: Sides) -> dict[str, Any]:
    """What a journal belongs to: the files as they are now, the flags, this version."""
    folders = {"reference": sides.reference, "candidate": sides.candidate, "export": sides.export}
    files = {
        f"{side} {file}": (file.stat().st_size, file.stat().st_mtime_ns)
        for side, folder in folders.items()
        if folder is not None
        for file in sorted(folder.resolve().rglob("*"))
        if file.is_file()
    }
    return {"version": __version__, "files": files, "converted": repr(sides.converted)}
