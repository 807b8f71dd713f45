"""The CI tolerance gate: a candidate held against golden references, in seconds, without running the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bisect_hooks.errors import UsageError
from bisect_hooks.family import families
from bisect_hooks.parallel import Parallel
from bisect_hooks.spec import Spec

from bisect_tool.args import plain
from bisect_tool.candidate import CandidateRun
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.drifts import to_finding
from bisect_tool.faults import Finding, group
from bisect_tool.forward import Bench, Located, expected_keys, of_spec
from bisect_tool.judge import Verdict
from bisect_tool.ladder import DTYPES, package_version
from bisect_tool.noise import MARGIN
from bisect_tool.recording import Recording
from bisect_tool.reference_recording import golden_recording
from bisect_tool.report import STAGES, Report, StageResult, not_run, timed


def gate(golden: Path, candidate: Path, parallel: Parallel, command: str, spec: Spec | None = None) -> Report:
    """One grafted run of the candidate against the Recording in `golden`, judged with the noise stored in it.

    Raises UsageError when the golden directory holds no Recording, or one of another layout's rounding.
    """
    recording = golden_recording(golden)
    come, path = recording.provenance, recording.path
    checkpoint = open_checkpoint(candidate)
    family = families().get(come.family)
    if family is None:
        raise UsageError(f"{path} is of the unknown family {come.family!r}")
    args = plain(checkpoint.args)
    dtype = DTYPES[_short(come.dtype)]
    run = CandidateRun(family, args, checkpoint.layout, checkpoint.path, parallel, dtype, "cpu", recording.batch, spec=spec)
    if run.dims.layers != _layers(recording):
        raise UsageError(f"the candidate has {run.dims.layers} layers, the golden recording {_layers(recording)}")
    result = StageResult("forward")
    with timed(result):
        missing = run.build()
        bench = Bench(recording, run, run.dims)
        located = bench.locate(
            lambda number, found: result.probes.append(f"grafted run {number}: {len(found.passes[-1].differing(found.sites))} sites differ")
        )
        _judge(bench, located, result, missing)
    others = [not_run(name, "the gate holds activations against golden ones") for name in STAGES]
    stages = [result if name == "forward" else other for name, other in zip(STAGES, others, strict=True)]
    provenance = {
        "versions": {name: package_version(name) for name in ("torch", "megatron-core")} | {"transformers": come.versions.get("transformers", "")},
        "reference": str(path), "candidate": str(candidate), "layout": checkpoint.layout, "digests": {"prompts": recording.batch.digest},
        "parallel": parallel.shown(), "dtype": _short(come.dtype), "device": "cpu",
        "prompts": f"{path} ({len(come.rows)} prompts, {recording.batch.tokens} tokens)", "seed": None, "command": command,
    }  # fmt: skip
    return Report(stages, provenance)


def _judge(bench: Bench, located: Located, result: StageResult, missing: list[str]) -> None:
    keys = expected_keys(bench.recording, bench.run.fused)
    findings: list[Finding] = []
    for site in located.sites:
        open_finding = to_finding(bench, located, site)
        size = open_finding.difference.relative_rms if open_finding.difference else float("nan")
        shard = str(open_finding.shard)
        at = shard if shard.startswith("(") else f"on {shard}"
        text = f"Drift at {open_finding.site} {at}: {size:.2g} relative rms off the golden recording, on its own inputs."
        findings.append(_told(open_finding, text))
    result.faults = group(findings, lambda _layer: {"every module"})
    result.compared = {
        "sites": len({key.partition(":")[0] for key in keys}),
        "tokens": bench.recording.batch.tokens,
        "ranks": bench.run.parallel.world,
    }
    nearest = max(
        (one for one in located.passes[-1].judged.values() if one.verdict is Verdict.AGREES), key=lambda one: one.ratio, default=None
    )
    if nearest is not None:
        result.notes.append(
            f"nearest to its tolerance ({MARGIN:.0f} x the noise stored with the golden recording): {nearest.key}, at {nearest.ratio:.0%} of it"
        )
    if missing:
        result.notes.append(f"{len(missing)} parameters were in no file: {', '.join(missing[:3])}")
    result.notes += of_spec(bench.run)
    result.notes += [f"not compared: {key}: {why}" for key, why in list(located.incomparable.items())[:8]]
    gap = located.incomparable or located.unexplained or not keys
    result.verdict = Verdict.DIFFERS if findings else Verdict.INCOMPARABLE if gap else Verdict.AGREES


def _told(finding: Finding, text: str) -> Finding:
    return replace(
        finding, explanation=text, next="bisect-tool run --prompts FILE --reference HF --candidate DIR decides its class and proves it."
    )


def _layers(recording: Recording) -> int:
    return sum(key.endswith(".output") for key in recording.keys)


def _short(dtype: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16"}.get(dtype, dtype)
