"""compare: two Recordings, ours or imported, judged.  Inputs and the recordings themselves first, then site by site.

Nothing can be grafted or run again here, so `class` is decided only where the tokens that are wrong decide it; else the report
names what it may be and the run that decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site, parse_site
from bisect_hooks.tap import split_key

from bisect_tool import choices
from bisect_tool.align import Aligned, Mismatch, align
from bisect_tool.capture import Capture, heard_otherwise
from bisect_tool.cuts import TokenCut, feature_axes, parallel_of, sequence_axes, token_cut
from bisect_tool.faults import Fault, Finding, Relation, group, span
from bisect_tool.flow import word
from bisect_tool.forward import Judged
from bisect_tool.free import Free, FreeRun
from bisect_tool.judge import Tolerance, Verdict, judge
from bisect_tool.ladder import package_version
from bisect_tool.measure import measure
from bisect_tool.recording import Recording
from bisect_tool.report import STAGES, Report, StageResult, not_run, timed
from bisect_tool.shapes import Shape, permutation_of, shape_of, token_errors
from bisect_tool.shards import Shard, shard_of
from bisect_tool.unshard import opened

CLASSES = ("conversion", "model-definition", "parallel")
# sites that no weight reaches once what enters them agrees
WEIGHTLESS = ("attention.rope", "attention.core", "linear_attention.core", "linear_attention.beta", "router.topk", "router.probs", "output")
# sites where a weight reaches only some tokens: an expert's, a token id's
PARTIAL = ("experts", "embedding")


def compare(
    reference: Path, candidate: Path, *, strict: bool = False, command: str = "", progress: Callable[[str], None] = lambda _text: None
) -> Report:
    """Judges the Recording `candidate` against `reference`; either may be a directory of ranks' shards."""
    inputs, forward = StageResult("inputs"), StageResult("forward")
    with opened(reference) as one, opened(candidate) as other:
        with timed(inputs):
            aligned = align(one.provenance, other.provenance)
            inputs.compared = {"rows": len(one.provenance.rows), "tokens": one.batch.tokens}
            if isinstance(aligned, Aligned):
                aligned = heard_otherwise(one, other) or aligned
            if isinstance(aligned, Mismatch):
                inputs.faults = _faults([inputs_differ(aligned, other)])
            else:
                inputs.notes += aligned.notes
            inputs.verdict = Verdict.DIFFERS if inputs.faults else Verdict.AGREES
        if isinstance(aligned, Aligned):
            with timed(forward):
                Comparison(one, other, aligned.index, progress).judge(forward)
        else:
            forward = not_run("forward", "the two recordings are of other inputs: nothing on top of them can be compared")
        provenance = _provenance(reference, candidate, one, other, command)
    others = {name: not_run(name, "compare holds two recordings against each other") for name in STAGES}
    stages = others | {"inputs": inputs, "forward": forward}
    return Report([stages[name] for name in STAGES], provenance, strict=strict)


@dataclass(frozen=True)
class Comparison:
    """Two Recordings of the same tokens."""

    reference: Recording
    candidate: Recording
    index: torch.Tensor
    progress: Callable[[str], None]

    @property
    def run(self) -> FreeRun:
        return FreeRun(self.reference, self.candidate, self.index)

    def judge(self, result: StageResult) -> Free:
        """Fills the stage; answers the judgement by site."""
        found = self.run.judge(lambda key: self.progress(f"compare: {key}"))
        compared = [one for one in found.judged.values() if one.difference is not None or one.verdict is Verdict.AGREES]
        result.compared = {"sites": len({split_key(one.key)[0] for one in compared}), "tensors": len(compared), "tokens": len(self.index)}
        result.compared["ranks"] = parallel_of(self.candidate.provenance).world
        capture = Capture(self.reference, self.candidate, self.run, self._shard).finding(found)
        if capture is not None:
            result.faults = _faults([capture])
        else:
            result.faults = _faults(self._findings(found), self._module_names(found))
        result.skipped += sorted(found.skipped.items())
        result.notes += self._notes(found)
        result.notes += found.lacking()
        # tokens behind a choice that differs are of other experts, and a recording can't be given the reference's
        gap = found.missing or not compared or not bool(found.alive.all())
        result.verdict = Verdict.DIFFERS if result.faults else Verdict.INCOMPARABLE if gap else Verdict.AGREES
        return found

    def _module_names(self, found: Free) -> Callable[[int], set[str]]:
        """What a whole layer is: its output, where nothing inside of it was compared."""

        def names(layer: int) -> set[str]:
            inside = {parse_site(name).module for name in found.level if name.startswith(f"layers.{layer}.")}
            return {"output"} if inside <= {"output", "input"} else {"every module"}

        return names

    # -- drifts ---------------------------------------------------------------------------------------------------------------

    def _findings(self, found: Free) -> list[Finding]:
        """Behind another drift, tokens and features are wrong for two reasons and decide nothing: the same site in an earlier layer
        speaks for it, else its class is open."""
        findings: list[Finding] = []
        for site in found.made:
            one = self._finding(site, found)
            if max((found.level[name] for name in self.run.sources(site, found)), default=0.0) > 1:
                twin = next((other for other in findings if (other.site.module, other.site.part) == (one.site.module, one.site.part)), None)
                one = replace(one, cls=None, candidates=CLASSES, relation=None, shape=None, next=self._next(None))
                if twin is not None:
                    one = replace(one, cls=twin.cls, candidates=twin.candidates, shard=twin.shard, relation=twin.relation)
            findings.append(one)
        return findings

    def _finding(self, site: Site, found: Free) -> Finding:
        one = found.worst_key(site)
        parallel = parallel_of(self.candidate.provenance)
        shape, relation = self._shape(one, found)
        cut = self._columns(one)
        cls, candidates, reason = decide(site, shape, parallel, cut, known=self._layout_is_known, near=self.run.near(site, found))
        shard = self._shard(site, one, shape, cut)
        module = Site("mlp", site.layer) if site.module == "output" and f"layers.{site.layer}.pre_mlp_norm" in found.level else site
        at, size = str(shard), one.difference.relative_rms if one.difference else float("nan")
        if one.difference is not None and one.difference.nonfinite:
            said = f"{one.difference.nonfinite} numbers are not finite on one side only"
        else:
            said = one.tripped or f"{size:.2g} relative rms where {one.tolerance.relative_rms:.2g} is allowed"
        confined = shape.kind not in ("everywhere", "scattered")
        text = f"Drift made at {site} {at if at.startswith('(') else f'on {at}'}: {said}{f'; {shape.text}' if confined else ''}."
        before = sorted(self.run.sources(site, found), key=parse_site)
        agrees = (
            "What it is computed from agrees."
            if self.run.near(site, found)
            else f"{', '.join(before)} before it agree{'s' if len(before) == 1 else ''}."
        )
        if self.run.passed_over(site, found):
            agrees += " Nothing of the layers between was there to compare: it may be made in any of them."
        text += (f" {agrees}" if before else "") + (f" {reason}" if reason else "") + self._metadata(site, shape)
        return Finding(
            cls, module, shard, difference=one.difference, tolerance=one.tolerance, relation=relation, explanation=text,
            next=self._next(cls, site), shows_at=found.shows_at(site), shape=shape.to_json(), candidates=candidates, piece=split_key(one.key)[1],
        )  # fmt: skip

    @property
    def _layout_is_known(self) -> bool:
        return bool(self.candidate.provenance.parallel) or not self.candidate.provenance.imported

    def _shape(self, one: Judged, found: Free) -> tuple[Shape, Relation | None]:
        reference, candidate = self.run.pair(one.key)
        errors = token_errors(reference, candidate)
        allowed = one.tolerance.relative_rms
        held = permutation_of(reference, candidate, errors > allowed, allowed)
        if held is not None:
            moved = [t for t, source in enumerate(held) if t != source]
            text = f"every token is right and stands in another's place ({len(moved)} of {len(held)}; token {moved[0]} holds token {held[moved[0]]})"
            detail = {"axis": "tokens", "unit": 1, "map": held}
            return Shape("permuted", text, {"tokens": len(moved), "of": len(held)}, weights_are_right=True), Relation("permutation", detail)
        lengths = [len(row) for row in self.reference.provenance.rows]
        rotation = word(parse_site(split_key(one.key)[0])) == "attention.rope"
        unit = "segment" if self.candidate.provenance.packed else "prompt"
        return shape_of(errors, allowed, lengths, self._token_cut(), rotation=rotation, unit=unit), None

    def _token_cut(self) -> TokenCut | None:
        cut = token_cut(self.candidate.provenance)
        return None if cut is None else TokenCut(*(getattr(cut, name)[self.index] for name in ("cp", "chunk", "sp", "edge")))

    def _columns(self, one: Judged) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
        """(axes that cut the features of a key, their coordinates whose features are wrong)."""
        parallel = parallel_of(self.candidate.provenance)
        layout = self.candidate.provenance.layouts.get(one.key)
        axes = tuple(axis for axis in feature_axes(layout) if parallel.size(axis) > 1) if layout else ()
        places = list(itertools.product(*(range(parallel.size(axis)) for axis in axes)))
        reference, candidate = self.run.pair(one.key)
        if not axes or reference.shape[-1] % len(places):
            return (), []
        wrong = []
        for place, r, c in zip(places, reference.chunk(len(places), -1), candidate.chunk(len(places), -1), strict=True):
            if judge(measure(r, c), one.tolerance) is Verdict.DIFFERS:
                wrong.append(place)
        return axes, wrong if len(wrong) < len(places) else places

    def _shard(
        self,
        site: Site,
        one: Judged | None = None,
        shape: Shape | None = None,
        cut: tuple[tuple[str, ...], list[tuple[int, ...]]] = ((), []),
    ) -> Shard:
        """The coordinates whose piece is wrong: by features where those are cut, by tokens where the sequence is."""
        parallel = parallel_of(self.candidate.provenance)
        layers = self.run.layers
        if layers % parallel.pp:
            parallel = Parallel(tp=parallel.tp, cp=parallel.cp, ep=parallel.ep, etp=parallel.expert_tp, sp=parallel.sp)
        wrong = {axis: set(range(parallel.size(axis))) for axis in ("tp", "cp")}
        axes, places = cut
        for i, axis in enumerate(axes):
            wrong[axis] = {place[i] for place in places}
        tokens = self._token_cut()
        layout = self.candidate.provenance.layouts.get(one.key, "") if one else ""
        if one is not None and tokens is not None and layout:
            bad = token_errors(*self.run.pair(one.key)) > one.tolerance.relative_rms
            over = sequence_axes(layout)
            if "cp" in over:
                wrong["cp"] = set(tokens.cp[bad].tolist())
            if "sp" in over and parallel.sp:
                wrong["tp"] = set(tokens.sp[bad].tolist())
        if site.module == "experts":
            return shard_of(site, parallel, "run", layers)
        return shard_of(site, parallel, "run", layers, itertools.product(sorted(wrong["tp"]), sorted(wrong["cp"])))

    def _metadata(self, site: Site, shape: Shape) -> str:
        """What packed metadata does not say, where an error keeps to some segments."""
        unsaid = [name for name, value in self.candidate.provenance.packed.items() if value is None]
        if shape.kind != "segments" or not unsaid:
            return ""
        return f" The packed batch says nothing of {' and '.join(sorted(unsaid))}."

    def _next(self, cls: str | None, site: Site | None = None) -> str:
        if cls == "parallel":
            return "Look at how this layout cuts, orders or reduces here; the same recording on one rank should agree."
        if cls == "model-definition":
            return f"Look at what {site} is told of positions and boundaries (cu_seqlens, position ids, masks), and at its definition."
        parallel = parallel_of(self.candidate.provenance)
        flags = " ".join(f"--{axis} {size}" for axis, size in parallel.shown().items() if size > 1 and axis != "etp")
        return (
            f"bisect-tool run --prompts FILE --reference HF --candidate MEGATRON {flags}".rstrip()
            + " decides: it grafts, and puts weights in place."
        )

    # -- notes ------------------------------------------------------------------------------------------------------------------

    def _notes(self, found: Free) -> list[str]:
        notes = []
        agreeing = [one for one in found.judged.values() if one.verdict is Verdict.AGREES and one.tolerance.relative_rms]
        if agreeing:
            near = max(agreeing, key=lambda one: one.ratio)
            notes.append(f"nearest to its tolerance ({near.tolerance.source}): {near.key}, at {near.ratio:.0%} of it")
        flips = sum(found.flips.values())
        if flips:
            left = int(found.alive.sum())
            notes.append(
                f"not compared: {len(self.index) - left} of {len(self.index)} tokens, from where their routing differs on: {flips} choices flip, "
                f"{self._whose(found)}; bisect-tool run gives them the reference's routing"
            )
        if "lm_head" in found.judged and bool(found.alive.any()):
            reference, candidate = self.run.pair("lm_head")
            notes += [one for one in (choices.next_tokens(reference[found.alive], candidate[found.alive]),) if one]
        if found.made and len(found.level) > 1:
            behind = sum(level > 1 for level in found.level.values()) - len(found.made)
            apart = "and are not judged apart: nothing can be grafted into a recording"
            notes.append(f"{behind} sites differ behind it {apart}" if behind else "nothing behind it differs")
        return notes

    def _whose(self, found: Free) -> str:
        """Whether choices that flip are as the logits say."""
        verdicts = [one.verdict for key, one in found.judged.items() if key.endswith(".topk")]
        if Verdict.DIFFERS in verdicts:
            return "and not as the candidate's own logits say"
        return "each as the candidate's own logits say" if verdicts else "with no logits there to say why"


def decide(
    site: Site, shape: Shape, parallel: Parallel, cut: tuple[tuple[str, ...], list[tuple[int, ...]]], *, known: bool, near: bool
) -> tuple[str | None, tuple[str, ...], str]:
    """(class or None, what it may be, why) as far as the wrong tokens and features decide.

    known  the recording says what layout it was made under · near  all that the site is computed from was compared
    """
    left, reasons = list(CLASSES), []
    axes, places = cut
    ways = [axis for axis in axes if axis == "cp" and {place[axes.index("cp")] for place in places} != set(range(parallel.cp))]
    if known and parallel.one_rank:
        left.remove("parallel")
    if shape.kind in ("chunks", "cp-ranks", "chunk-ends", "permuted") and not parallel.one_rank:
        return "parallel", ("parallel",), "Only the cut over ranks draws these tokens together."
    if ways:
        return "parallel", ("parallel",), "Only features of some CP ranks are wrong, and context parallel cuts no weight."
    if near and word(site) in WEIGHTLESS:
        left.remove("conversion")
        reasons.append("No weight enters here.")
    elif shape.weights_are_right and site.module not in PARTIAL:
        left.remove("conversion")
        reasons.append("The same weights are right on the other tokens.")
    return (left[0] if len(left) == 1 else None), tuple(left), " ".join(reasons)


def inputs_differ(found: Mismatch, candidate: Recording) -> Finding:
    """The finding of two recordings that are not of the same tokens."""
    relation = Relation(found.kind, found.detail) if found.kind else None
    shard = shard_of(Site("tokens"), parallel_of(candidate.provenance), "run", 1) if parallel_of(candidate.provenance).pp == 1 else None
    return Finding(
        "capture", Site("tokens"), shard or shard_of(Site("tokens"), Parallel(), "run", 1), tolerance=Tolerance(0.0, "token ids and positions are equal"),
        relation=relation, explanation=f"The inputs differ: {found.text}.", next=found.next,
    )  # fmt: skip


def _faults(findings: list[Finding], modules_of_layer: Callable[[int], set[str]] = lambda _layer: {"every module"}) -> list[Fault]:
    faults = []
    for fault in group(findings, modules_of_layer):
        first, others = fault.first, fault.layers[1:]
        more = f" Likewise in layer{'s' if len(others) > 1 else ''} {span(others)}." if others else ""
        faults.append(replace(fault, findings=(replace(first, explanation=first.explanation + more), *fault.findings[1:])))
    return faults


def _provenance(reference: Path, candidate: Path, one: Recording, other: Recording, command: str) -> Mapping[str, Any]:
    come = other.provenance
    if one.provenance.family and come.family and one.provenance.family != come.family:
        raise UsageError(f"{reference} is of the family {one.provenance.family}, {candidate} of {come.family}")
    return {
        "versions": {"torch": package_version("torch")} | dict(come.versions), "reference": str(reference), "candidate": str(candidate),
        "layout": come.layout, "digests": {"prompts": one.batch.digest}, "parallel": dict(come.parallel),
        "dtype": _dtypes(one, other), "device": come.device,
        "prompts": f"{len(one.provenance.rows)} rows, {one.batch.tokens} tokens, as recorded", "seed": None, "command": command,
    }  # fmt: skip


SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def _dtypes(one: Recording, other: Recording) -> str:
    """What was asked, as far as both sides computed in the same dtype."""
    reference, candidate = (SHORT.get(come, come) for come in (one.provenance.dtype, other.provenance.dtype))
    same = reference == candidate or not reference
    return candidate if same else f"{reference} reference, {candidate} candidate: neither the same function nor the same rounding is asked"
