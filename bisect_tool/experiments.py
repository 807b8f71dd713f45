"""What decides the class of a located drift, and what proves it.  Every experiment has a control that must not cure.

Order (contract rule 4): does the formula side with the candidate (reference)?  Are the bytes in the file what the table makes of
the reference, and does putting the reference's weights in place remove the drift (conversion)?  Is it gone on one rank (parallel),
and which axis has to be taken away?  Else it is the model's definition, and if setting one argument as config.json has it removes
the drift, that argument is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bisect_hooks.errors import BisectError, UsageError
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site
from bisect_hooks.table import Made, Rule

from bisect_tool.arbiter import Arbiter, Opinion
from bisect_tool.audit import Auditor
from bisect_tool.config_check import Mismatch, config_relation, explanation
from bisect_tool.faults import Finding, Proof, Relation, joint
from bisect_tool.floor import tolerance_of
from bisect_tool.flow import word
from bisect_tool.forward import Bench, Located, Pass, handed_to
from bisect_tool.judge import Verdict
from bisect_tool.levels import agrees, level, size
from bisect_tool.recording import in_order
from bisect_tool.reference import base_grafts
from bisect_tool.shards import Place, Shard, shard_of

# computations whose numbers come straight from a tensor of another part
WEIGHTS_OF = {"linear_attention.decay": ("linear_attention.a_log", "linear_attention.dt_bias"), "attention_gate": ("attention.qkv",)}

NO_NEIGHBOUR = "there is none: no neighbour agrees, so nothing says that another value would not cure it too"

# sums that no site hears by itself
SUM_BEFORE = (
    "With the reference's value in its place the layer's output is still off: it is the sum before it, of what enters the layer and "
    "what its mixer gives (the residual)."
)
SUM_AFTER = "What enters the layer and all that its modules give agree: it is their sum (the residual)."


@dataclass(slots=True)
class Lab:
    """One located bench and the evidence for classes."""

    bench: Bench
    located: Located
    auditor: Auditor
    reference: Path
    mismatches: Sequence[Mismatch]
    arbiter: Arbiter | None = None
    padded_right: Callable[[], Bench] | None = None
    probes: list[str] = field(default_factory=list)
    opinions: dict[Site, Opinion] = field(default_factory=dict)
    absorbed: set[Site] = field(default_factory=set)

    def decide(self, findings: dict[Site, Finding]) -> dict[Site, Finding]:
        """Findings by located site, each with class, relation where one is known, and proof."""
        open_sites = dict(findings)
        decided: dict[Site, Finding] = {}
        for step in (self._reference, self._conversion, self._parallel, self._padding, self._config, self._definition):
            if open_sites:
                found = step(open_sites)
                decided |= found
                open_sites = {site: finding for site, finding in open_sites.items() if site not in found}
        kept = {site: finding for site, finding in (decided | open_sites).items() if site not in self.absorbed}
        return {site: self._with_opinion(site, finding) for site, finding in kept.items()}

    # -- reference ------------------------------------------------------------------------------------------------------------

    def _reference(self, findings: Mapping[Site, Finding]) -> dict[Site, Finding]:
        """Which side follows the formula?  A candidate that does while the reference does not is cleared."""
        if self.arbiter is None:
            return {}
        opinion = self._opinion(self.arbiter)
        self.opinions = {site: one for site in findings if (one := opinion(self.located.sites[site].key)) is not None}
        sides = [one.sides_with for one in self.opinions.values()]
        shown = ", ".join(f"{which} {sides.count(which)}" for which in ("reference", "candidate", "both", "neither") if which in sides)
        without = len(findings) - len(sides)
        self.probes.append(
            f"formulas in float64 of the located sites side with: {shown or 'nobody'}" + (f"; {without} have none" if without else "")
        )
        decided = {}
        controls = self._controls(findings)
        for site, one in self.opinions.items():
            if one.sides_with == "candidate":
                before, after = one.off
                neighbour = opinion(controls[site]) if site in controls else None
                kept = f"{neighbour.off[0]:.2g} and {neighbour.off[1]:.2g} off" if neighbour else "it has none"
                proof = Proof(
                    f"compute {self.located.sites[site].key} by its formula in float64 from each side's own inputs; the reference is off, the candidate is not",
                    before, after, f"the formula of {controls[site]}, where the two agree: {kept}" if site in controls else NO_NEIGHBOUR,
                )  # fmt: skip
                decided[site] = replace(findings[site], cls="reference", proof=proof)
        return decided

    def _opinion(self, arbiter: Arbiter) -> Callable[[str], Opinion | None]:
        """What the formula of a key says of the two sides of a grafted run, each on its own inputs."""
        recording, run, first = self.bench.recording, self.bench.run, self.located.first
        grafts = base_grafts(self.bench.dims)
        said = run.record((recording.path, grafts))
        handed = handed_to(said, set(grafts), recording)

        def opinion(key: str) -> Opinion | None:
            output = said.tensors[key] if key in said.tensors else first.values[key][1] if key in first.values else None
            if key not in recording or output is None or (run.batch.left and ".rope:" in key):
                return None  # a formula counts positions from the first token
            try:
                return arbiter.opinion(
                    key, recording.batch.lengths, tolerance_of(recording, key), run.dtype,
                    (recording.__getitem__, recording[key]),
                    (lambda one: recording[one] if one.endswith(":rows") else handed(one), output),
                )  # fmt: skip
            except BisectError:
                return None  # a side has no such inputs

        return opinion

    def _with_opinion(self, site: Site, finding: Finding) -> Finding:
        """What the formula said goes with every drift that no relation explains."""
        if site not in self.opinions or finding.relation is not None:
            return finding
        return replace(finding, evidence=f"{finding.evidence} {self.opinions[site].said}".strip())

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
            if not agrees(cured, site) or agrees(control, site):
                continue
            experiment = (
                f"put the reference's weights in the place of {len(keys)} located tensor(s) and run again on the reference's inputs"
            )
            proof = Proof(
                experiment, before, after, f"the reference's weights in all {len(others)} other tensors instead: still {kept:.2g}"
            )
            relation = joint(found) or Relation("unknown")
            tensors = (tuple(n for one in found for n in one.tensors[0]), tuple(n for one in found for n in one.tensors[1]))
            decided[site] = replace(
                findings[site],
                cls="conversion",
                relation=relation,
                proof=proof,
                tensors=tensors,
                shard=self._held_by(findings[site], found),
            )
            if all(one.minor for one in found):
                decided[site] = replace(decided[site], minor=True)
        spared = sum(agrees(control, site) for site in suspects)
        self.probes.append(
            f"reference's weights put in place: {len(decided)} of {len(suspects)} cured; control, all {len(others)} other tensors: {spared} cured"
        )
        return decided

    def _held_by(self, finding: Finding, unequal: Iterable[Finding]) -> Shard:
        """Which ranks of the run hold the wrong bytes: what ranks add up, activations can't tell apart."""
        parallel, places = self.bench.run.parallel, set[Place]()
        auditor = replace(self.auditor, parallel=parallel)
        for one in unequal:
            compared = auditor.compare(one.made)
            if compared is None or not compared.places:  # of another shape, or wrong by a rounding that is everywhere
                return finding.shard
            places |= set(compared.places)
        return shard_of(finding.site, parallel, "run", self.bench.dims.layers, places)

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
        result = self._under(run.parallel.as_one_rank())
        cured = [site for site in findings if agrees(result, site)]
        self.probes.append(f"one rank instead of {run.parallel}: {len(cured)} of {len(findings)} located drift(s) gone")
        if not cured:
            return {}
        without = self._by_axis(cured, result)
        run.build()
        control = self.bench.one_pass()
        decided = {}
        for site in cured:
            proof = Proof(
                f"run the same checkpoint on one rank instead of {run.parallel}", self._before(site), level(result, site),
                f"built and run again under {run.parallel}: still {self._still(control, site):.2g}",
            )  # fmt: skip
            gone = {axis: agrees(one, site) for axis, one in without.items()}
            axes, evidence = at_fault(gone)
            others = [axis for axis in without if not gone[axis]]
            if len(without) > 1 and gone[axes[0]]:
                one, other = run.parallel.without(axes[0]), others[0] if others else ""
                proof = Proof(
                    f"run the same checkpoint under {one} instead of {run.parallel}", self._before(site), level(without[axes[0]], site),
                    f"under {run.parallel.without(other)} instead: still {self._still(without[other], site):.2g}" if other else proof.control,
                )  # fmt: skip
            decided[site] = replace(findings[site], cls="parallel", proof=proof, axes=axes, evidence=evidence)
        return decided

    def _under(self, parallel: Parallel) -> Pass:
        """The same checkpoint under another layout."""
        other = replace(self.bench, run=replace(self.bench.run, parallel=parallel))
        other.run.build()
        return other.one_pass()

    def _by_axis(self, sites: Sequence[Site], alone: Pass) -> dict[str, Pass]:
        """The run with one axis of the layout taken away, for each axis; `alone` is the one on one rank."""
        parallel, found = self.bench.run.parallel, dict[str, Pass]()
        for axis in parallel.axes:
            less = parallel.without(axis)
            if less.one_rank:
                found[axis] = alone
                continue
            try:
                found[axis] = self._under(less)
            except UsageError as error:
                self.probes.append(f"{less} instead of {parallel} can't be run: {error.message}")
                continue
            cured = sum(agrees(found[axis], site) for site in sites)
            self.probes.append(f"{less} instead of {parallel}: {cured} of {len(sites)} drift(s) that one rank cures gone")
        return found

    # -- padding --------------------------------------------------------------------------------------------------------------

    def _padding(self, findings: Mapping[Site, Finding]) -> dict[Site, Finding]:
        """Which drifts are gone when the same prompts are padded on the right?"""
        if self.padded_right is None or not self.bench.run.batch.left:
            return {}
        result, control = self.padded_right().one_pass(), self.bench.one_pass()
        cured = [site for site in findings if agrees(result, site)]
        self.probes.append(f"padded on the right instead of the left: {len(cured)} of {len(findings)} located drift(s) gone")
        relation = Relation("unknown", {"padding": "left"}, rule="padding")
        return {
            site: replace(
                findings[site], cls="model-definition", relation=relation,
                proof=Proof(
                    "pad the same prompts on the right", self._before(site), level(result, site),
                    f"padded on the left again: still {self._still(control, site):.2g}",
                ),
            )
            for site in cured
        }  # fmt: skip

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
            cured = [site for site in left if agrees(result, site)]
            self.probes.append(f"{one.setting.flag} as config.json has it: {len(cured)} of {len(left)} located drift(s) gone")
            cures |= {site: (one, level(result, site)) for site in cured}
        self.bench.run.build()
        control = self.bench.one_pass()
        decided = {}
        for site, (one, after) in cures.items():
            text, do = explanation(one)
            proof = Proof(
                f"build the candidate with {one.setting.flag} as config.json has it", self._before(site), after,
                f"built again with it as the candidate has it: still {self._still(control, site):.2g}",
            )  # fmt: skip
            decided[site] = replace(
                findings[site], cls="model-definition", relation=config_relation(one), proof=proof, explanation=text, next=do
            )
        return decided

    def _definition(self, findings: Mapping[Site, Finding]) -> dict[Site, Finding]:
        """Weights equal, drift there on one rank, no argument cures it: the reference's value in its place does."""
        decided = {}
        graft, cured = self._graft_proof(findings)
        for site, finding in findings.items():
            found = replace(finding, cls="model-definition", proof=graft[site])
            if not site.in_layer:  # there is no layer's output to look at
                found = replace(found, proof=self._formula_proof(site) or graft[site])
            elif site.module == "output":
                found = replace(found, proof=self._formula_proof(site) or graft[site], evidence=SUM_AFTER)
            elif site.module == "pre_mlp_norm" and _stays(graft[site]):
                after = Site("output", site.layer)
                if not agrees(cured, after):
                    found = replace(found, proof=self._formula_proof(site) or graft[site], evidence=SUM_BEFORE)
                    self.absorbed.add(after)
            decided[site] = found
        return decided

    def _formula_proof(self, site: Site) -> Proof | None:
        """The formula on each side's own inputs, where grafting proves nothing: what is off is a sum that no site hears."""
        one = self.opinions.get(site)
        if one is None or one.sides_with != "reference":
            return None
        return Proof(
            f"compute {self.located.sites[site].key} by its formula in float64 from each side's own inputs; the candidate is off, the reference is not",
            one.off[1], one.off[0], "a formula on the same inputs can't be off for what came in from before",
        )  # fmt: skip

    def _graft_proof(self, findings: Mapping[Site, Finding]) -> tuple[dict[Site, Proof], Pass]:
        """(proofs, the pass with every cure in place).  The reference's value at the site: the layer's output falls to the floor.  At its neighbour: it does not.

        Layers are cut loose from each other, so a pass asks one site of each; what else is off in a layer is cured throughout.
        """
        cures, controls = self.located.all_cures, self._controls(findings)
        cured = self.bench.one_pass(cures, base=False)
        proofs = {}
        for sites in _one_of_each_layer(findings):
            others = [key for key in cures if key not in self.bench.cures(sites)]
            open_pass = self.bench.one_pass(others, base=False)
            control = self.bench.one_pass([*others, *(controls[site] for site in sites if site in controls)], base=False)
            for site in sites:
                end = Site("output", site.layer) if site.in_layer else Site("lm_head") if site.module == "final_norm" else site
                beside = [str(one) for one in self.located.sites if site.in_layer and one.layer == site.layer and one != site]
                proofs[site] = Proof(
                    f"graft the reference's value at {site}{', with the cure of ' * bool(beside)}{' and '.join(beside)}; look at {end}",
                    level(open_pass, end), level(cured, end),
                    f"graft it at {controls[site]} instead: {level(control, end):.2g}" if site in controls else NO_NEIGHBOUR,
                )  # fmt: skip
        self.probes.append(
            f"reference's values grafted at {len(findings)} site(s); control at {'their neighbours' if controls else 'none of their neighbours: none agrees'}"
        )
        return proofs, cured

    def _controls(self, findings: Iterable[Site]) -> dict[Site, str]:
        """A neighbouring key that agrees, in the same layer where there is one; none where nothing agrees."""
        agreeing = [key for key, one in self.located.first.judged.items() if one.verdict is Verdict.AGREES and ":" not in key]
        chosen = {}
        for site in findings:
            here = [key for key in agreeing if key.startswith(f"layers.{site.layer}.") and not key.endswith((".output", ".input"))]
            near = [key for key in in_order(here) if key.split(".")[2] == site.module] or here or agreeing
            if near:
                chosen[site] = near[0]
        return chosen

    # -- reading passes -------------------------------------------------------------------------------------------------------

    def _still(self, result: Pass, site: Site) -> float:
        """A control's level, of the piece of a packed site whose numbers are shown."""
        one = result.judged.get(self.located.sites[site].key)
        own = size(result, one) if one is not None else None
        return level(result, site) if own is None else own

    def _before(self, site: Site) -> float:
        return self.located.sites[site].difference.relative_rms if self.located.sites[site].difference else float("nan")  # type: ignore[union-attr]

    def _levels(self, site: Site, cured: Pass, control: Pass) -> tuple[float, float, float]:
        return self._before(site), level(cured, site), self._still(control, site)


def _one_of_each_layer(sites: Iterable[Site]) -> list[list[Site]]:
    """Sites, so that no two of a group are in one layer."""
    groups: list[list[Site]] = []
    for site in sorted(sites):
        group = next((one for one in groups if all(other.layer != site.layer for other in one)), None)
        if group is None:
            groups.append([site])
        else:
            group.append(site)
    return groups


def _stays(proof: Proof) -> bool:
    """Whether less than half of a difference went with the experiment."""
    return proof.before is not None and proof.after is not None and proof.after > proof.before / 2


def at_fault(cured: Mapping[str, bool]) -> tuple[tuple[str, ...], str]:
    """(axes that make a drift which one rank cures, a sentence on it), from whether taking each axis away cures it."""
    axes = [axis for axis, gone in cured.items() if gone]
    for inner, outer in (("sp", "tp"), ("vpp", "pp")):
        if inner in axes and outer in axes:
            axes.remove(outer)  # it went with the inner one
    kept = [axis for axis, gone in cured.items() if not gone]
    names, others = (" and ".join(axis.upper() for axis in some) for some in (axes, kept))
    if len(cured) < 2:
        return tuple(cured), ""
    if not axes:
        return tuple(kept), f"Taking away {others} one at a time cures nothing: more than one of them makes it by itself."
    if len(axes) > 1:
        return tuple(axes), f"Only {names} together make it: taking away any of them cures it."
    return tuple(axes), f"{names} makes it: it is gone without it" + (f", and still there without {others}." if kept else ".")
