"""The forward stage of a run: record, locate, decide, show."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.hf import Reference, Tokenizer
from bisect_hooks.site import Site, parse_site

from bisect_tool import choices
from bisect_tool.arbiter import Arbiter
from bisect_tool.candidate import CandidateRun, Said
from bisect_tool.drifts import to_finding
from bisect_tool.experiments import Lab
from bisect_tool.faults import Finding
from bisect_tool.floor import tolerance_of
from bisect_tool.flow import site_name, upstream, word
from bisect_tool.forward import Bench, Located, expected_keys, of_spec, shows_at
from bisect_tool.judge import Verdict
from bisect_tool.ladder import Job
from bisect_tool.measure import Difference, measure
from bisect_tool.noise import MARGIN
from bisect_tool.prompts import Batch
from bisect_tool.ranks import WORLDS
from bisect_tool.recording import Recording, in_order
from bisect_tool.reference import answers_of
from bisect_tool.reference_recording import golden_reference, recorded_reference
from bisect_tool.report import StageResult
from bisect_tool.shards import shard_of

ANSWERS, ANSWER_TOKENS = 2, 8


def run_forward(job: Job, result: StageResult, answers: list[dict[str, str]]) -> None:
    """Fills `result` and, where the two sides answer differently, `answers`."""
    WORLDS.get(job.parallel.world, job.device)  # ranks start while the reference runs
    run = job.candidate_run()
    job.progress("forward: reference")
    wanted = job.wanted
    recorded = golden_reference(job.golden, wanted, job.batch) if job.golden is not None else recorded_reference(wanted, job.batch)
    result.notes += recorded.notes
    job.progress("forward: candidate")
    missing = run.build()
    if missing:
        result.notes.append(f"{len(missing)} parameters were in no file and stayed NaN: {', '.join(missing[:3])}")
    bench = Bench(recorded.recording, run, job.dims)
    located = bench.locate(lambda number, found: result.probes.append(_pass_line(number, found)))
    captured = replicas(bench, located)
    findings = {site: to_finding(bench, located, site) for site in located.sites if not _came_in_from(captured, site)}
    if findings:
        arbiter = Arbiter.of(job.reference, job.family, job.dims, wanted.rounding.read)
        lab = Lab(
            bench,
            located,
            job.sides.auditor("reference-candidate"),
            job.reference.path,
            job.mismatches,
            arbiter,
            lambda: padded_right(job, bench),
        )
        findings = lab.decide(findings)
        result.probes += lab.probes
    if job.golden is not None:
        findings = {site: _doubting(finding, recorded.recording) for site, finding in findings.items()}
    _conclude(job, result, bench, located, captured | findings, run.record())
    if result.faults and job.answers:
        answers += [one for one in compare_answers(job, run, recorded.reference) if one["reference"] != one["candidate"]]


def padded_right(job: Job, bench: Bench) -> Bench:
    """The same prompts, padded on the right: what is wrong there too is not padding's."""
    batch = job.batch.padded_right()
    return replace(bench, recording=recorded_reference(job.wanted, batch).recording, run=replace(bench.run, batch=batch))


def _conclude(job: Job, result: StageResult, bench: Bench, located: Located, findings: dict[Site, Finding], free: Said) -> None:
    recording = bench.recording
    placed = _shown(job, bench, findings, free)
    result.faults = job.explained([finding for finding in placed if not finding.minor])
    result.minor = job.explained([finding for finding in placed if finding.minor])
    keys = expected_keys(recording, bench.run.fused)
    experts = sum(job.dims.experts for moe in job.dims.moe if moe)
    result.compared = {
        "sites": len({key.partition(":")[0] for key in keys}),
        "tensors": len(keys) - len(located.incomparable),
        "experts": experts,
        "tokens": job.batch.tokens,
        "ranks": job.parallel.world,
    }
    if job.dims.mtp:
        result.skipped.append(("mtp", "transformers has no module for it"))
    if job.spec is None and job.candidate.args.get("spec") is not None:
        result.skipped.append(("the candidate's own layer spec", "none was given (--spec); ours was used"))
    result.skipped += not_shown(job)
    result.notes += of_spec(bench.run)
    if job.spec is not None:
        result.skipped += [(site, "the spec's build computes it inside the linear that follows") for site in sorted(bench.run.fused)]
    floors = recording.provenance.floor.values()
    result.notes.insert(
        0, f"noise floor {min(floors):.1e} to {max(floors):.1e} relative rms, the reference against itself; {MARGIN:.0f} x that is allowed"
    )
    nearest = max(
        (one for one in located.passes[-1].judged.values() if one.verdict is Verdict.AGREES), key=lambda one: one.ratio, default=None
    )
    if nearest is not None:
        result.notes.insert(1, f"nearest to its tolerance: {nearest.key}, at {nearest.ratio:.0%} of it")
    logits = (
        measure(recording["lm_head"].float(), free.tensors["lm_head"][..., : recording["lm_head"].shape[-1]].float())
        if "lm_head" in free.tensors
        else None
    )
    if logits is not None:
        normal = is_this_normal(job, result, recording, logits.relative_rms)
        result.notes.insert(2, f"free-running, the logits differ by {logits.relative_rms:.1e}; {normal}")
    result.notes += flips(bench, located, free)
    result.notes += disagreements(job, result, recording, logits)
    result.notes += [f"not compared: {key}: {why}" for key, why in list(located.incomparable.items())[:8]]
    result.notes += [f"differs behind another site and could not be cured apart from it: {name}" for name in located.unexplained[:4]]
    gap = located.incomparable or located.unexplained or not keys
    result.verdict = Verdict.DIFFERS if result.faults else Verdict.INCOMPARABLE if gap else Verdict.AGREES


def not_shown(job: Job) -> list[tuple[str, str]]:
    """What these prompts can't show, whatever the two sides give for them."""
    seen = len({token for row in job.batch.rows for token in row})
    found = [("rows of the embedding", f"{seen} of {job.dims.vocabulary} tokens are in these prompts; the weights stage compares all rows")]
    if max(job.batch.lengths) == 1:
        found.append(
            ("positions, attention to other tokens, the past of a convolution or a recurrence", "no prompt has more than one token")
        )
    return found


def disagreements(job: Job, result: StageResult, recording: Recording, logits: Difference | None) -> list[str]:
    """Where the grafted and the free run do not say the same: drifts that later layers hide, and logits that no drift explains."""
    last = Site("lm_head")
    silent = [fault.first for fault in result.faults if fault.first.shows_at is None and fault.first.cls != "capture"]
    hidden = [first.site for first in silent if first.site < last]
    said = [
        f"{site}: free-running, nothing behind it leaves the reference's own noise: these prompts do not show it, or later layers hide it"
        for site in hidden[:3]
    ]
    allowed = tolerance_of(recording, "lm_head", free=True).relative_rms
    if logits is not None and not (result.faults or result.minor) and not logits.relative_rms <= allowed:
        said.append(
            f"the grafted run finds no drift, yet free-running the logits differ by {logits.relative_rms:.1e}, where the reference is up to "
            f"{allowed / MARGIN:.1e} from itself: small differences add up in {job.dtype}, or meet in a way that no single layer shows"
        )
    return said


def is_this_normal(job: Job, result: StageResult, recording: Recording, candidate: float) -> str:
    """What rounding alone does to a free run: the reference in this dtype against itself, evaluated again and in fp32."""
    again = recording.provenance.free_floor["lm_head"]
    most, of = again, f"in {job.dtype} the reference is {again:.1e} from itself when it is evaluated again"
    if job.dtype != "fp32":
        reference, _ = replace(job.wanted, dtype=torch.float32).load()
        exact = job.batch.pack(reference.forward(job.batch.ids(), job.batch.mask())).cpu()
        rounding = measure(exact, recording["lm_head"].float()).relative_rms
        most, of = max(again, rounding), f"{of}, and {rounding:.1e} from itself in fp32"
    small = candidate <= MARGIN * most
    if result.faults:  # a fault is none the less one where the logits hide it
        return f"is this normal? {'the size is, but there is a fault' if small else 'no, there is a fault'}: {of}"
    return f"is this normal? {'yes' if small else 'no'}: {of}"


def flips(bench: Bench, located: Located, free: Said) -> list[str]:
    """Experts and next tokens chosen otherwise than by the reference: how many, and by how narrow a margin."""
    ranked, found, recording = [], located.passes[-1].flips, bench.recording
    for key in found:
        bias = key.replace("topk", "expert_bias")
        logits = recording[key.replace("topk", "logits")].float()
        ranked.append(bench.run.family.route(logits, bench.dims, recording[bias] if bias in recording else None).ranked)
    said = [choices.routing(ranked, list(found.values()), bench.dims.top_k)]
    if "lm_head" in free.tensors:
        reference = recording["lm_head"]
        said.append(choices.next_tokens(reference, free.tensors["lm_head"][..., : reference.shape[-1]], where=", free-running"))
    return [one for one in said if one]


def replicas(bench: Bench, located: Located) -> dict[Site, Finding]:
    """Ranks that should hold the same and do not, beyond noise: what is compared behind that can't be trusted.

    Of each half of a layer the first: halves are cut loose from each other.
    """
    found: dict[tuple[int | None, bool], Finding] = {}
    sites = {parse_site(site_name(key)): key for key in reversed(in_order(located.first.replicas))}
    for site in sorted(sites):
        relative, tolerance = located.first.replicas[sites[site]], tolerance_of(bench.recording, sites[site])
        half = (site.layer, site.in_layer and not site < Site("pre_mlp_norm", site.layer))
        if relative <= tolerance.relative_rms or half in found or site in located.sites or site.module == "input":
            continue
        text = f"Capture fault at {site}: ranks that should hold the same differ by {relative:.2g} relative rms."
        hidden = [one for one in located.sites if _came_in_from([site], one)]
        if hidden:
            text += f" What it feeds differs, and is not judged: {', '.join(map(str, hidden[:3]))}{' and more' * (len(hidden) > 3)}."
        found[half] = Finding(
            "capture", site, shard_of(site, bench.run.parallel, "run", bench.dims.layers), tolerance=tolerance, explanation=text,
            next="Look at the reduction before this site.",
        )  # fmt: skip
    return {finding.site: finding for finding in found.values()}


def _came_in_from(captured: Collection[Site], site: Site) -> bool:
    """Whether a site of a grafted run is computed from one whose replicas differ."""
    return any(one.layer == site.layer and word(one) in upstream(site) for one in captured)


def _doubting(finding: Finding, recording: Recording) -> Finding:
    """A stored recording that leaves the formula may be spoiled as well as the reference that it was made of be wrong."""
    if finding.cls != "reference":
        return finding
    said = f"The reference was not run: {recording.path} stands for it."
    return replace(
        finding, evidence=f"{finding.evidence} {said}".strip(),
        next="Record the reference again (bisect-tool record --side reference): if it is still off, look at this module in transformers.",
    )  # fmt: skip


def _shown(job: Job, bench: Bench, findings: Mapping[Site, Finding], free: Said) -> list[Finding]:
    """Findings with the first site that shows them in a free run: of several faults, in one that has the others cured."""
    at = {finding.site: site for site, finding in findings.items()}
    faults = [[at[finding.site] for finding in fault.findings] for fault in job.explained(list(findings.values()))]
    shown: dict[Site, str | None] = {}
    for own in faults:
        others = [site for fault in faults if fault is not own for site in fault]
        said = bench.run.record((bench.recording.path, bench.cures(others))) if others else free
        shown |= {site: shows_at(bench.recording, said, site) for site in own}
    return [replace(finding, shows_at=shown[site]) for site, finding in findings.items()]


def _pass_line(number: int, located: Located) -> str:
    result = located.passes[-1]
    differing = result.differing(located.sites)
    total = len({key.partition(":")[0] for key in result.judged})
    cured = f", {sum(map(len, located.cures))} values of the reference in place" if located.cures else ""
    made = sorted(located.sites)
    more = f" and {len(made) - 3} more" if len(made) > 3 else ""
    shown = f"; made at {', '.join(map(str, made[:3]))}{more}" if made and number == 1 else ""
    return f"grafted run {number}: {len(differing)} of {total} sites differ{cured}{shown}"


def compare_answers(
    job: Job, run: CandidateRun, reference: Reference, count: int = ANSWERS, limit: int = ANSWER_TOKENS
) -> list[dict[str, str]]:
    """Greedy answers of both sides to the `count` shortest prompts, of at most `limit` tokens."""
    rows = [list(row) for row in sorted(job.batch.rows, key=lambda row: (len(row) < 2, len(row)))[:count]]
    try:
        tokenizer: Tokenizer | None = Tokenizer(job.reference.path)
    except UsageError:
        tokenizer = None  # prompts were ids: so are the answers
    end = tokenizer.end if tokenizer else None

    def reference_logits(ids: list[list[int]]) -> torch.Tensor:
        batch = Batch(tuple(map(tuple, ids)))
        logits = reference.forward(batch.ids(), batch.mask())
        return torch.stack([logits[i, n - 1] for i, n in enumerate(batch.lengths)])

    said = answers_of(reference_logits, rows, end=end, limit=limit)
    again = answers_of(lambda ids: run.logits(ids)[:, : job.dims.vocabulary], rows, end=end, limit=limit)

    def text(ids: list[int]) -> str:
        return tokenizer.text(ids) if tokenizer else " ".join(map(str, ids))

    return [
        {"prompt": text(row), "reference": text(one), "candidate": text(other)} for row, one, other in zip(rows, said, again, strict=True)
    ]
