"""`bisect-tool config`: the config stage alone, from whatever is at hand: a launch script, a checkpoint's args, an exported directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout, Dimensions, Family, family_of

from bisect_tool import config_check, launch_check, launch_doubts, serving
from bisect_tool.args import SIZES, plain
from bisect_tool.faults import Fault, Finding, group
from bisect_tool.fitting import Fit, fit
from bisect_tool.hf_directory import read_config
from bisect_tool.judge import Verdict
from bisect_tool.launch.launch import Launch
from bisect_tool.launch.read import read_launch
from bisect_tool.model_args import every_setting
from bisect_tool.report import STAGES, Report, StageResult, not_run


@dataclass(frozen=True)
class Evidence:
    """What there is to compare with the reference's config.json; at least one of launch, candidate and export."""

    reference: Path
    launch: Path | None = None
    candidate: Path | None = None
    export: Path | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    command: str = ""


def run_config(evidence: Evidence) -> Report:
    """The whole report: one stage was run."""
    if not (evidence.launch or evidence.candidate or evidence.export):
        raise UsageError("nothing to compare with config.json", hint="give --launch SCRIPT, --candidate DIR or --export DIR")
    config = read_config(evidence.reference)
    result = StageResult("config")
    words: Words | None = None
    if evidence.launch or evidence.candidate:
        launch = read_launch(evidence.launch, evidence.given) if evidence.launch else None
        checkpoint = _checkpoint(evidence.candidate) if evidence.candidate else None
        words = Words(launch, *(checkpoint or (None, None)))
    said = judge_words(family_of(config), config, words, evidence.export, evidence.reference, result)
    stages = [result if name == "config" else not_run(name, "the config command runs the config stage alone") for name in STAGES]
    provenance = {
        "versions": {},
        "reference": str(evidence.reference),
        "candidate": str(evidence.candidate) if evidence.candidate else None,
        "export": str(evidence.export) if evidence.export else None,
        "digests": {},
        "dtype": None,
        "device": None,
        "prompts": None,
        "seed": None,
        "command": evidence.command,
        **said,
    }
    return Report(stages, provenance, strict=evidence.strict)


@dataclass(frozen=True)
class Words:
    """A candidate's own words: a launch, the args its checkpoint keeps (and the layout of its linear attention), or both."""

    launch: Launch | None
    checkpoint: Mapping[str, Any] | None
    layout: CheckpointLayout | None


def judge_words(
    family: Family, config: Mapping[str, Any], words: Words | None, export: Path | None, reference: Path, result: StageResult
) -> dict[str, Any]:
    """Fills `result` with what differs from config.json; answers what is known of the layout, for the report."""
    said: dict[str, Any] = {"parallel": None, "layout": None}
    findings: list[Finding] = []
    minor: list[Finding] = []
    if words is not None:
        findings += _words(family, config, words, result, said)
    if export is not None:
        served = serving.read_export(export, family, config, reference)
        findings, minor = findings + served.findings, served.minor
        result.notes += served.notes
        result.skipped += served.skipped
        result.cleared += served.cleared
    result.faults = grouped(findings)
    result.minor = grouped(minor)
    result.verdict = Verdict.DIFFERS if findings else Verdict.INCOMPARABLE if said.pop("undecided", False) else Verdict.AGREES
    return said


def grouped(findings: list[Finding]) -> list[Fault]:
    """Findings as faults.  Names under another prefix are one fault, however many modules they are in."""
    renamed = tuple(sorted((one for one in findings if one.relation and one.relation.kind == "names-only"), key=lambda one: one.site))
    others = group([one for one in findings if one not in renamed], lambda _layer: {""})
    faults = [*others, *([Fault(renamed)] if renamed else [])]
    return sorted(faults, key=lambda fault: fault.first.site)


def _words(family: Family, config: Mapping[str, Any], words: Words, result: StageResult, said: dict[str, Any]) -> list[Finding]:
    """The launch's flags, the checkpoint's args, or both."""
    dims = family.reference_dimensions(config)
    launch, checkpoint, layout = words.launch, words.checkpoint, words.layout
    if launch is None:
        assert checkpoint is not None and layout is not None
        launch = Launch(Path(), "checkpoint's args", dict(checkpoint), {})
        args = {**checkpoint, **family.read_by_spec(checkpoint, config)}
        mismatches, compared = config_check.compare_settings(family, config, args, layout)
        result.notes += [
            f"{compared} settings compared", *launch_doubts.kept_not_judged(checkpoint, every_setting(family, config, layout))
        ]  # fmt: skip
    else:
        said["launch"] = f"{launch.path} ({launch.kind}{f', starts {launch.program}' if launch.program else ''})"
        judged = launch_check.judge(family, config, launch, checkpoint)
        mismatches = judged.mismatches
        result.notes += [f"{judged.compared} settings compared", *judged.notes]
        result.skipped += judged.skipped
        result.cleared += judged.cleared
        sizes = any(launch.args.get(name) is not None for name in SIZES.values())
        if not judged.compared and not sizes:
            result.skipped.append(("the model", "the launch says nothing of it that could be compared"))
        said["undecided"] = judged.undecided or not (judged.compared or sizes)
    layout = layout or launch_check.layout_of(launch.args, launch.spec)
    of = "conversion" if launch.converts or not launch.said else "run"
    fitted = fit(launch.args, dims, layout)  # by the sizes of config.json: one that is wrong is a finding of its own
    result.notes += [*fitted.notes, *launch.notes]
    if launch.converts and fitted.parallel.ep > 1:
        result.notes.append(
            f"this converts at EP {fitted.parallel.ep}: slime before 0.3.0 and miles number experts within their rank there (slime#1799), which no "
            "flag shows; bisect-tool audit reads it off the checkpoint"
        )
    result.probes = [one.shown for one in mismatches] + list(dict.fromkeys(finding.explanation for finding in fitted.findings))
    said |= {"parallel": fitted.parallel.shown(), "layout": layout}
    return config_check.findings(mismatches, *_placed(fitted, dims, of), dims.layers) + fitted.findings


def _placed(fitted: Fit, dims: Dimensions, of: str) -> tuple[Any, str]:
    """The layout that findings are placed in; unknown where its stages can't be told."""
    if any(finding.relation and finding.relation.detail["flag"].startswith("--pipeline") for finding in fitted.findings):
        return fitted.parallel, "unknown"
    return fitted.parallel, of


def _checkpoint(path: Path) -> tuple[dict[str, Any], CheckpointLayout]:
    """(args of a checkpoint, its layout).  Raises UsageError when it keeps none."""
    from bisect_tool.checkpoint import open_checkpoint

    opened = open_checkpoint(path)
    args = plain(opened.args)
    if not args:
        raise UsageError(f"{path} keeps no args (common.pt) and no run_config.yaml", hint="give --launch alone, or the checkpoint's args")
    return args, opened.layout
