"""The engine stage of a run: what an engine left, judged with what the other stages know of the same model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.hf import Reference

from bisect_tool.faults import Fault
from bisect_tool.ladder import Job
from bisect_tool.prompts import Batch
from bisect_tool.recorded import record_candidate
from bisect_tool.recording import Recording
from bisect_tool.report import StageResult, united
from bisect_tool.rollouts.known import Known
from bisect_tool.rollouts.scoring import Model
from bisect_tool.rollouts.stage import judge_engine


def run_engine(job: Job, earlier: Sequence[StageResult], result: StageResult) -> None:
    """Fills `result`.  The candidate is built where there is one, and says what it makes of the engine's tokens."""
    assert job.rollout is not None
    job.progress("engine")
    found = job.gathered
    with found.open:
        known = replace(known_of(earlier), rerun=job.rollout.rerun, audit=_audit(job))
        models: dict[str, Model] = {}
        record = None
        if job.candidate_path is not None and (found.samples or found.recordings):
            run = job.candidate_run(Batch(tuple(sample.tokens for sample in found.samples) or ((0,),)))
            run.build()
            models["candidate"] = run

            def record(batch: Batch, out: Path) -> Recording:
                return record_candidate(job, replace(run, batch=batch), out)

        if job.export is not None and found.samples and not known.conversion:
            models |= _export(job, result)
        judge_engine(found, replace(known, models=models), result, record)


def _export(job: Job, result: StageResult) -> dict[str, Model]:
    """The export as transformers runs it, where it does."""
    assert job.export is not None
    try:
        return {"export": Reference(job.export, job.family, job.dims, torch.float32, torch.device(job.device))}
    except UsageError as error:
        result.notes.append(f"the export's own log-probs are not in the table: {error.message}")
        return {}


def known_of(earlier: Sequence[StageResult]) -> Known:
    """What the stages before leave for the engine's: a cleared conversion, or a fault that an engine may show."""
    why = next((why for stage in earlier for suspect, why in stage.cleared if suspect == "the conversion"), "")
    return Known(conversion=why, found=_said(united([stage.faults for stage in earlier])))


def _said(faults: Sequence[Fault]) -> str:
    """Faults of the candidate in a few words."""
    own = [fault for fault in faults if "candidate" in fault.first.between or "export" in fault.first.between]
    if not own:
        return ""
    first = own[0].first
    more = f" and {len(own) - 1} more" if len(own) > 1 else ""
    return f"the {first.cls or 'open'} fault at {first.site}{more}"


def _audit(job: Job) -> str:
    given = [("--candidate", job.candidate_path), ("--export", job.export)]
    words = [word for flag, path in given if path is not None for word in (flag, str(path))] or ["--candidate", "MEGATRON_DIR"]
    return shlex.join(["bisect-tool", "audit", "--reference", str(job.reference_path), *words])
