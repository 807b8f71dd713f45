"""What decides the class of a located drift, and what proves it.  Every experiment has a control that must not cure.

Order (contract rule 4): are the bytes in the file what the table makes of the reference, and does putting the reference's weights
in place remove the drift (conversion)?  Is it gone on one rank (parallel)?  Else it is the model's definition, and if setting one
argument as config.json has it removes the drift, that argument is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bisect_hooks.site import Site
from bisect_hooks.table import Made, Rule

from bisect_tool.audit import Auditor
from bisect_tool.config_check import Mismatch, config_relation, explanation
from bisect_tool.faults import Finding, Proof, Relation
from bisect_tool.flow import site_name, word
from bisect_tool.forward import Bench, Located, Pass
from bisect_tool.judge import Verdict
from bisect_tool.recording import in_order

# computations whose numbers come straight from a tensor of another part
WEIGHTS_OF = {"linear_attention.decay": ("linear_attention.a_log", "linear_attention.dt_bias"), "attention_gate": ("attention.qkv",)}


@dataclass(slots=True)
class Lab:
    """One located bench and the evidence for classes."""

    bench: Bench
    located: Located
    auditor: Auditor
    reference: Path
    mismatches: Sequence[Mismatch]
    probes: list[str] = field(default_factory=list)

    def decide(self, findings: dict[Site, Finding]) -> dict[Site, Finding]:
        """Findings by located site, each with class, relation where one is known, and proof."""
        open_sites = dict(findings)
        decided: dict[Site, Finding] = {}
        for step in (self._conversion, self._parallel, self._config, self._definition):
            if open_sites:
                found = step(open_sites)
                decided |= found
                open_sites = {site: finding for site, finding in open_sites.items() if site not in found}
        return decided | open_sites

    # -- conversion -----------------------------------------------------------------------------------------------------------

    def _conversion(self, findings: Mapping[Site, Finding]) -> dict[Site, Finding]:
        suspects: dict[Site, list[Finding]] = {}
        for site, finding in findings.items():
            found = self._unequal(site, finding.site)
            if found:
                suspects[site] = found
        if not suspects:
            self.probes.append("weights of the located sites: equal, every byte, to what the table makes of the reference")
            return {}
        self.probes.append(
            f"weights of {len(suspects)} located site(s): the bytes in the file differ from what the table makes of the reference"
        )
        keys = sorted({name for found in suspects.values() for one in found for name in one.tensors[1]})
        others = sorted(made.name for _, made in self._rows() if made.name not in keys)
        self.bench.run.put_reference(self.reference, others)
        control = self.bench.one_pass()
        self.bench.run.put_reference(self.reference, keys)
        cured = self.bench.one_pass()
        self.bench.run.build()  # back to what the file says
        decided = {}
        for site, found in suspects.items():
            before, after, kept = self._levels(site, cured, control)
            if not self._agrees(cured, site) or self._agrees(control, site):
                continue
            experiment = (
                f"put the reference's weights in the place of {len(keys)} located tensor(s) and run again on the reference's inputs"
            )
            proof = Proof(
                experiment, before, after, f"the reference's weights in all {len(others)} other tensors instead: still {kept:.2g}"
            )
            relations = {one.relation.key: one.relation for one in found if one.relation is not None}
            relation = next(iter(relations.values())) if len(relations) == 1 else Relation("unknown")
            tensors = (tuple(n for one in found for n in one.tensors[0]), tuple(n for one in found for n in one.tensors[1]))
            decided[site] = replace(findings[site], cls="conversion", relation=relation, proof=proof, tensors=tensors)
            if all(one.minor for one in found):
                decided[site] = replace(decided[site], minor=True)
        spared = sum(self._agrees(control, site) for site in suspects)
        self.probes.append(
            f"reference's weights put in place: {len(decided)} of {len(suspects)} cured; control, all {len(others)} other tensors: {spared} cured"
        )
        return decided

    def _unequal(self, site: Site, named: Site) -> list[Finding]:
        """Findings of the weights stage for the tensors of one located site."""
        names = {word(site), word(named), *WEIGHTS_OF.get(word(site), ())}
        rows = [made.name for rule, made in self._rows() if rule.site.layer == site.layer and word(rule.site) in names]
        return self.auditor.findings_of(rows)

    def _rows(self) -> list[tuple[Rule, Made]]:
        return [(rule, made) for rule, made in self.auditor.rows if rule.site.module != "mtp"]

    # -- parallel -------------------------------------------------------------------------------------------------------------

    def _parallel(self, findings: Mapping[Site, Finding]) -> dict[Site, Finding]:
        run = self.bench.run
        if run.parallel.one_rank:
            return {}
        alone = replace(self.bench, run=replace(run, parallel=run.parallel.as_one_rank()))
        alone.run.build()
        result = alone.one_pass()
        cured = [site for site in findings if self._agrees(result, site)]
        self.probes.append(f"one rank instead of {run.parallel}: {len(cured)} of {len(findings)} located drift(s) gone")
        if not cured:
            return {}
        run.build()
        control = self.bench.one_pass()
        decided = {}
        for site in cured:
            proof = Proof(
                f"run the same checkpoint on one rank instead of {run.parallel}", self._before(site), self._level(result, site),
                f"built and run again under {run.parallel}: still {self._level(control, site):.2g}",
            )  # fmt: skip
            decided[site] = replace(findings[site], cls="parallel", proof=proof)
        return decided

    # -- model definition -----------------------------------------------------------------------------------------------------

    def _config(self, findings: Mapping[Site, Finding]) -> dict[Site, Finding]:
        """Which one argument, set as config.json has it, removes which drifts?"""
        if not self.mismatches:
            return {}
        cures: dict[Site, tuple[Mismatch, float]] = {}
        for one in self.mismatches:
            left = [site for site in findings if site not in cures]
            if not left:
                break
            run = replace(self.bench.run, args=self.bench.run.args | {one.setting.arg: one.setting.expected})
            if run.build():
                run.put_reference(self.reference, None)  # parameters that only now exist are in no file
            result = replace(self.bench, run=run).one_pass()
            cured = [site for site in left if self._agrees(result, site)]
            self.probes.append(f"{one.setting.flag} as config.json has it: {len(cured)} of {len(left)} located drift(s) gone")
            cures |= {site: (one, self._level(result, site)) for site in cured}
        self.bench.run.build()
        control = self.bench.one_pass()
        decided = {}
        for site, (one, after) in cures.items():
            text, do = explanation(one)
            proof = Proof(
                f"build the candidate with {one.setting.flag} as config.json has it", self._before(site), after,
                f"built again with it as the candidate has it: still {self._level(control, site):.2g}",
            )  # fmt: skip
            decided[site] = replace(
                findings[site], cls="model-definition", relation=config_relation(one), proof=proof, explanation=text, next=do
            )
        return decided

    def _definition(self, findings: Mapping[Site, Finding]) -> dict[Site, Finding]:
        """Weights equal, drift there on one rank, no argument cures it: the reference's value in its place does."""
        decided = {}
        graft = self._graft_proof(findings)
        for site, finding in findings.items():
            decided[site] = replace(finding, cls="model-definition", proof=graft[site])
        return decided

    def _graft_proof(self, findings: Mapping[Site, Finding]) -> dict[Site, Proof]:
        """The reference's value at the site: the layer's output falls to the floor.  At its neighbour: it does not."""
        cures = self.located.all_cures
        open_pass, cured = self.bench.one_pass(base=False), self.bench.one_pass(cures, base=False)
        controls = self._controls(findings)
        control = self.bench.one_pass(controls.values(), base=False)
        proofs = {}
        for site in findings:
            end = Site("output", site.layer) if site.in_layer else site
            proofs[site] = Proof(
                f"graft the reference's value at {site}; look at {end}", self._level(open_pass, end), self._level(cured, end),
                f"graft it at {controls[site]} instead: {self._level(control, end):.2g}",
            )  # fmt: skip
        self.probes.append(f"reference's values grafted at {len(findings)} site(s); control at their neighbours")
        return proofs

    def _controls(self, findings: Iterable[Site]) -> dict[Site, str]:
        """A neighbouring key that agrees, in the same layer where there is one."""
        agreeing = [key for key, one in self.located.first.judged.items() if one.verdict is Verdict.AGREES and ":" not in key]
        chosen = {}
        for site in findings:
            here = [key for key in agreeing if key.startswith(f"layers.{site.layer}.") and not key.endswith((".output", ".input"))]
            near = [key for key in in_order(here) if key.split(".")[2] == site.module] or here or agreeing
            chosen[site] = near[0]
        return chosen

    # -- reading passes -------------------------------------------------------------------------------------------------------

    def _agrees(self, result: Pass, site: Site) -> bool:
        """Whether a site (or what it waits for) no longer differs."""
        keys = [one for key, one in result.judged.items() if site_name(key) == str(site)]
        return bool(keys) and all(one.verdict is Verdict.AGREES for one in keys)

    def _level(self, result: Pass, site: Site) -> float:
        levels = [one.difference.relative_rms for key, one in result.judged.items() if site_name(key) == str(site) and one.difference]
        return max(levels, default=float("nan"))

    def _before(self, site: Site) -> float:
        return self.located.sites[site].difference.relative_rms if self.located.sites[site].difference else float("nan")  # type: ignore[union-attr]

    def _levels(self, site: Site, cured: Pass, control: Pass) -> tuple[float, float, float]:
        return self._before(site), self._level(cured, site), self._level(control, site)
