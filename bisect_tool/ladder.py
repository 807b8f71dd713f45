"""The ladder: inputs, config, weights, forward, engine.  Each stage adds what it found; the first that finds a fault ends it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import Dimensions, Family
from bisect_hooks.parallel import Parallel

from bisect_tool import clearing, config_check, launch_check, launch_doubts
from bisect_tool.args import plain
from bisect_tool.candidate import CandidateRun
from bisect_tool.checkpoint import Checkpoint
from bisect_tool.config_stage import Words, judge_words
from bisect_tool.explain import explanation
from bisect_tool.faults import Fault, Finding, group, span
from bisect_tool.hf_directory import HuggingFaceDirectory
from bisect_tool.judge import Verdict
from bisect_tool.launch.launch import Launch
from bisect_tool.launch.read import read_launch
from bisect_tool.model_args import every_setting
from bisect_tool.prompts import Batch, make_batch, read_prompts
from bisect_tool.ranks import WORLDS
from bisect_tool.report import STAGES, Report, StageResult, not_run, timed
from bisect_tool.weights import Sides, run_weights

if TYPE_CHECKING:
    from bisect_tool.reference import Wanted
    from bisect_tool.rollouts.evidence import Evidence
    from bisect_tool.rollouts.gather import Gathered

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What a run was asked for, with everything it reads opened once.

    parallel   how the candidate is run now · converted  how it was converted, when flags say so
    left       whether prompts are padded on the left · answers  whether both sides answer prompts where they differ
    """

    reference_path: Path
    candidate_path: Path | None = None
    prompts: str | None = None
    input_key: str | None = None
    parallel: Parallel = field(default_factory=Parallel)
    converted: Parallel | None = None
    dtype: str = "fp32"
    device: str = "cpu"
    patch: Path | None = None
    left: bool = False
    spec: tuple[str, str] | None = None
    stages: tuple[str, ...] = STAGES
    everything: bool = False
    answers: bool = True
    strict: bool = False
    command: str = ""
    progress: Progress = lambda _text: None
    export: Path | None = None
    launch: Path | None = None
    jobs: int | None = None
    out: Path | None = None
    rollout: Evidence | None = None
    golden: Path | None = None

    @cached_property
    def sides(self) -> Sides:
        return Sides(self.reference_path, self.candidate_path, self.export, self.converted)

    @property
    def reference(self) -> HuggingFaceDirectory:
        return self.sides.directory

    @property
    def candidate(self) -> Checkpoint:
        return self.sides.checkpoint

    @property
    def family(self) -> Family:
        return self.sides.family

    @property
    def dims(self) -> Dimensions:
        return self.sides.dims

    @cached_property
    def args(self) -> dict[str, Any]:
        """The candidate's own words: what the launch says, then the args in the checkpoint, then the config beside it."""
        found = plain(self.candidate.args)
        if self.launched is not None:
            found |= plain(launch_check.built_from(self.family, self.reference.config, self.launched, self.candidate.layout))
        if not found:
            raise UsageError(
                f"{self.candidate.path} keeps no args (common.pt)",
                hint="without them nothing says how to build the candidate: give --launch SCRIPT",
            )
        return found | self.read_by_spec

    @cached_property
    def launched(self) -> Launch | None:
        return None if self.launch is None else read_launch(self.launch)

    @cached_property
    def read_by_spec(self) -> dict[str, Any]:
        """What the candidate's own spec reads from the Hugging Face directory: said as a note, never a finding."""
        return self.family.read_by_spec(plain(self.candidate.args), self.reference.config)

    @cached_property
    def wanted(self) -> Wanted:
        """The reference as the forward stage needs it."""
        from bisect_tool.reference import Wanted

        checkpoint = self.candidate
        return Wanted(self.reference, self.family, checkpoint.layout, DTYPES[self.dtype], self.device, checkpoint.dtypes)

    @property
    def written_under(self) -> Parallel | None:
        return self.sides.written_under

    @cached_property
    def mismatches(self) -> list[config_check.Mismatch]:
        if self.launched is not None:
            return launch_check.judge(self.family, self.reference.config, self.launched, plain(self.candidate.args) or None).mismatches
        return config_check.compare_settings(self.family, self.reference.config, self.args, self.candidate.layout)[0]

    @cached_property
    def batch(self) -> Batch:
        from bisect_hooks.hf import Tokenizer

        assert self.prompts is not None
        prompts = read_prompts(self.prompts, self.input_key)
        batch = make_batch(prompts, lambda: Tokenizer(self.reference.path), vocabulary=self.dims.vocabulary, positions=self.dims.positions)
        return batch.padded_left() if self.left else batch

    @cached_property
    def gathered(self) -> Gathered:
        """What the engine left, read and asked for."""
        from bisect_tool.rollouts.gather import gather

        assert self.rollout is not None
        return gather(self.rollout)

    def candidate_run(self, batch: Batch | None = None) -> CandidateRun:
        # slime's specs read the Hugging Face directory that its launch script names
        directory = {"hf_checkpoint": str(self.reference.path.resolve())} if self.spec else {}
        return CandidateRun(
            self.family,
            self.args | directory,
            self.candidate.layout,
            self.candidate.path,
            self.parallel,
            DTYPES[self.dtype],
            self.device,
            batch or self.batch,
            self.patch,
            self.spec,
        )

    def modules_of_layer(self, layer: int) -> set[str]:
        """Modules of a layer that hold weights."""
        layout = self.candidate.layout if self.candidate_path is not None else "native"
        rules = self.family.rules(self.dims, layout, self.reference.names, mtp=False)
        return {rule.site.module for rule in rules if rule.site.layer == layer}

    def explained(self, findings: list[Finding]) -> list[Fault]:
        """Findings as faults, each with its sentence."""
        faults = []
        for fault in group(findings, self.modules_of_layer):
            first = fault.first
            if not first.explanation:
                text, do = explanation(fault)
                fault = replace(fault, findings=(replace(first, explanation=text, next=first.next or do), *fault.findings[1:]))
            faults.append(fault)
        return faults


def climb(job: Job) -> Report:
    """Every stage asked for, in order, until one finds a fault (all of them with `everything`)."""
    # bad input is refused before any work
    rules = job.family.rules(job.dims, "native", job.reference.names, mtp=False)
    embedding = next(name for rule in rules if rule.site.module == "embedding" for name in rule.references)
    job.reference.check_sizes(embedding, job.dims.vocabulary, job.dims.hidden)
    if job.candidate_path is not None:
        job.candidate  # noqa: B018
        job.written_under  # noqa: B018 - refuses a layout that it can't have been written under
        if job.stages != ("weights",):
            job.args  # noqa: B018
    if "engine" in job.stages and job.rollout is not None:
        job.gathered  # noqa: B018
    forward = job.prompts is not None and job.candidate_path is not None
    if "forward" in job.stages and forward:
        check_device(job.device)
        if job.patch is not None and not job.patch.is_file():
            raise UsageError(f"--candidate-patch {job.patch}: no such file", hint="bisect-tool plant writes a patch.py into its copy")
        job.candidate_run()  # refuses sizes that don't fit before any rank is started
        if job.spec is not None:
            WORLDS.get(job.parallel.world, job.device).call("import_spec", spec=job.spec)
        elif job.stages == ("inputs", "forward") or job.everything:
            WORLDS.get(job.parallel.world, job.device)  # ranks start while the files are read
    results: list[StageResult] = []
    answers: list[dict[str, str]] = []
    steps = {"inputs": inputs_stage, "config": config_stage, "weights": weights_stage, "forward": forward_stage, "engine": engine_stage}
    for name in STAGES:
        found_by = next((result.name for result in results if result.verdict is Verdict.DIFFERS), None)
        if name not in job.stages:
            results.append(not_run(name, "not asked for (--stages)"))
        elif name == "engine" and job.rollout is None:
            results.append(not_run(name, "no rollout evidence was given"))
        elif name in ("inputs", "forward") and not forward:
            results.append(not_run(name, "no prompts were given" if job.prompts is None else "no candidate was given"))
        elif name == "config" and job.candidate_path is None and job.export is None and job.launch is None:
            results.append(not_run(name, "no candidate, launch script or export was given"))
        elif name == "weights" and job.candidate_path is None and job.export is None:
            results.append(not_run(name, "neither a candidate nor an export was given"))
        elif found_by and not job.everything:
            results.append(not_run(name, f"the {found_by} stage found a fault; --all-stages goes on"))
        else:
            result = StageResult(name)
            with timed(result):
                job.progress(name)
                try:
                    steps[name](job, result, answers, results)
                except UsageError as error:
                    if not found_by:
                        raise
                    # a fault outranks a gap: what the earlier stage found is not lost because this one can't go on
                    result.notes.append(f"not compared: {error.message}")
                    result.verdict = Verdict.INCOMPARABLE
            results.append(result)
    return Report(results, provenance(job), answers, job.strict)


def check_device(name: str) -> None:
    """Raises UsageError for a device that torch does not know, or that this machine or this build of torch has not."""
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise UsageError(f"--device {name} is none that torch knows", hint="give cpu, cuda or npu") from error
    here = getattr(getattr(torch, kind, None), "is_available", lambda: False)()
    if kind != "cpu" and not here:
        raise UsageError(
            f"--device {name}: torch {torch.__version__} finds no {kind} here", hint="leave --device out to compute on the CPU"
        )


def inputs_stage(job: Job, result: StageResult, *_: Any) -> None:
    """Are both sides given the same token ids?  Every data parallel rank's slice is put together again and compared."""
    run, batch = job.candidate_run(), job.batch
    fed = run.fed(batch)
    unequal = batch.pack(fed).tolist() != [token for row in batch.rows for token in row]
    if job.dims.vocabulary > run.dims.vocabulary:
        raise UsageError(f"the candidate's vocabulary has {run.dims.vocabulary} rows, the reference's {job.dims.vocabulary}")
    result.compared = {"tokens": batch.tokens, "ranks": run.parallel.world}
    result.verdict = Verdict.DIFFERS if unequal else Verdict.AGREES
    lengths = sorted(set(batch.lengths))
    result.notes.append(
        f"{len(batch.rows)} prompts of lengths {span(lengths)}; padded to the {'left' if batch.left else 'right'}, padding is never compared; "
        f"positions count from 0{', padding counted' if batch.left else ''}"
    )


def config_stage(job: Job, result: StageResult, *_: Any) -> None:
    """The launch's flags, the checkpoint's args, an export's own config, against config.json."""
    if job.launched is not None or job.export is not None:
        words = None
        if job.candidate_path is not None:
            words = Words(job.launched, plain(job.candidate.args) | job.read_by_spec or None, job.candidate.layout)
        elif job.launched is not None:
            words = Words(job.launched, None, None)
        judge_words(job.family, job.reference.config, words, job.export, job.reference.path, result)
        return
    mismatches, count = config_check.compare_settings(job.family, job.reference.config, job.args, job.candidate.layout)
    parallel = job.written_under or Parallel()
    of = "conversion" if job.written_under else "unknown"
    result.faults = job.explained(config_check.findings(mismatches, parallel, of, job.dims.layers))
    settings = every_setting(job.family, job.reference.config, job.candidate.layout)
    result.notes += [f"{count} settings compared", *launch_doubts.kept_not_judged(plain(job.candidate.args), settings)]
    if not mismatches:
        result.cleared.append(("the checkpoint's args", f"{count} settings are those of config.json"))
    result.probes = [one.shown for one in mismatches]
    if job.read_by_spec:
        spec = " ".join(map(str, plain(job.candidate.args)["spec"]))
        result.notes.append(
            f"{', '.join(job.read_by_spec)}: the candidate's spec ({spec}) reads them from the Hugging Face directory itself"
        )
    result.verdict = Verdict.DIFFERS if mismatches else Verdict.AGREES


def weights_stage(job: Job, result: StageResult, *_: Any) -> None:
    """The audit, of every pair that was given."""
    missing: list[str] = []
    equal: dict[str, int] = {}
    tensors = experts = 0
    for between, found, faults, minor in run_weights(job.sides, job.explained, job.jobs or jobs_for(job.sides), job.out, job.progress):
        result.faults += faults
        result.minor += minor
        result.trained = result.trained or found.trained
        tensors, experts = tensors + found.tensors, experts + found.experts
        result.skipped += found.skipped
        several = job.export is not None and job.candidate_path is not None
        result.notes += [f"{between}: {note}" if several else note for note in found.notes]
        missing += [f"{between}: {line}" if several else line for line in found.missing]
        if not found.tensors:
            missing.append(f"{between}: no tensor could be compared")
        if found.tensors and not (faults or found.missing):
            equal[between] = found.tensors
    result.notes += [f"not compared: {line}" for line in missing]
    clearing.by_weights(job, equal, result)
    result.compared = {"tensors": tensors, "experts": experts}
    if job.candidate_path is not None and job.candidate.skipped:
        result.skipped.append((f"{len(job.candidate.skipped)} entries of the checkpoint", "not weights (extra state, rng, optimizer)"))
    result.verdict = Verdict.DIFFERS if result.faults else Verdict.INCOMPARABLE if missing else Verdict.AGREES


# under this many bytes, starting another process costs more than it saves
WORTH_A_PROCESS = 2 << 30


def jobs_for(sides: Sides) -> int:
    """Processes for an audit of this size on this machine."""
    size = sum(stored.row_bytes * stored.shape[0] for stored in sides.directory.stored.values() if stored.shape)
    return min(len(os.sched_getaffinity(0)), 16) if size > WORTH_A_PROCESS else 1


def forward_stage(job: Job, result: StageResult, answers: list[dict[str, str]], *_: Any) -> None:
    """Grafted runs; imported late, because it imports transformers."""
    from bisect_tool.forward_stage import run_forward

    run_forward(job, result, answers)
    clearing.by_forward(job, result)


def engine_stage(job: Job, result: StageResult, _answers: list[dict[str, str]], earlier: Sequence[StageResult]) -> None:
    """What a rollout engine said, held and computed; imported late, because it imports transformers."""
    from bisect_tool.engine_stage import run_engine

    run_engine(job, earlier, result)


def provenance(job: Job) -> Mapping[str, Any]:
    """Where everything came from."""
    return {
        "versions": {name: package_version(name) for name in ("torch", "megatron-core", "transformers")},
        "reference": str(job.reference_path),
        "candidate": str(job.candidate_path) if job.candidate_path is not None else None,
        "export": str(job.export) if job.export is not None else None,
        "launch": str(job.launch) if job.launch is not None else None,
        "golden": str(job.golden) if job.golden is not None else None,
        "layout": job.candidate.layout if job.candidate_path is not None else None,
        "digests": {"prompts": job.batch.digest} if job.prompts is not None and job.candidate_path is not None else {},
        "parallel": (job.written_under or job.parallel if job.stages == ("weights",) else job.parallel).shown(),
        "spec": " ".join(job.spec) if job.spec is not None else None,
        **(engine_evidence(job) if job.rollout is not None else {}),
        "dtype": job.dtype if "forward" in job.stages else None,
        "device": job.device if "forward" in job.stages else None,
        "prompts": f"{job.prompts} ({len(job.batch.rows)} prompts, {job.batch.tokens} tokens)" if job.prompts is not None else None,
        "seed": None,
        "command": job.command,
    }


def engine_evidence(job: Job) -> dict[str, Any]:
    """What of an engine was given."""
    from bisect_tool.rollouts.stage import said_of

    return said_of(job.gathered) if "engine" in job.stages else {}


def package_version(name: str) -> str:
    """The installed version, or that there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
