"""What a stage clears: suspects of a garbled rollout that its evidence rules out, each with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bisect_tool.report import StageResult

if TYPE_CHECKING:
    from bisect_tool.ladder import Job

CONVERSION = "the conversion"
EQUAL = {
    "reference-candidate": "of the checkpoint are what the table makes of the reference, byte by byte",
    "reference-export": "of the export equal the reference, byte by byte",
    "candidate-export": "of the export are what the table makes of the candidate, byte by byte",
}


def by_weights(job: Job, equal: dict[str, int], result: StageResult) -> None:
    """equal: for each pair without a fault and without a gap, its number of tensors"""
    if not result.faults:
        for between, tensors in equal.items():
            suspect = "the export" if between == "candidate-export" else CONVERSION
            but = ", but for the precision that is listed as minor" if result.minor else ""
            result.cleared.append((suspect, f"{tensors} tensors {EQUAL[between]}{but}"))
    elif not result.trained and all(fault.first.relation is not None for fault in result.faults):
        _the_rest(job, result)
    visual = [name for name in job.reference.names if name.startswith(("model.visual.", "visual."))]
    why = job.family.left_out(visual[0], job.dims) if visual else None
    if why is not None:
        result.cleared.append(("vision weights left out", f"{len(visual)} tensors of {why}"))


def _the_rest(job: Job, result: StageResult) -> None:
    """Modules that no fault touches: all their bytes were compared."""
    wrong = {module for fault in result.faults for module in fault.modules}
    lost = {fault.modules[0]: fault.parts for fault in result.minor if fault.parts and fault.modules[0] not in wrong}
    modules = [module for module in _every_module(job) if module not in wrong and module not in lost]
    if modules and not any(fault.whole_layer for fault in result.faults):
        words = ", ".join(module.replace("_", " ") for module in modules)
        result.cleared.append((words, "equal byte by byte, in every layer"))
        for module, parts in lost.items():
            why = f"equal byte by byte, but for the precision of {' and '.join(parts)}, which is minor"
            result.cleared.append((module.replace("_", " "), why))
        stages = job.written_under.pp if job.written_under is not None else 1
        kinds = {fault.first.relation.kind for fault in result.faults if fault.first.relation is not None}
        if stages > 1 and "other-layer" not in kinds:
            result.cleared.append((f"layer offsets of the {stages} pipeline stages", "every other module stands in its own layer"))


def _every_module(job: Job) -> list[str]:
    layout = job.candidate.layout if job.candidate_path is not None else "native"
    rules = job.family.rules(job.dims, layout, job.reference.names, mtp=False)
    return list(dict.fromkeys(rule.site.module for rule in sorted(rules, key=lambda rule: rule.site)))


def by_forward(job: Job, result: StageResult) -> None:
    """A forward that agrees clears how the model is defined, and the layout it ran under."""
    if result.verdict is None or result.verdict.value != "agrees":
        return
    sites = f"{result.compared['sites']} sites agree with the reference in {job.dtype}"
    if max(job.batch.lengths) == 1:
        return  # a token by itself shows nothing of what lies between tokens
    result.cleared.append(("the model's definition", f"{sites}, each layer given the reference's input"))
    if job.parallel.world > 1:
        result.cleared.append(("the parallel layout", f"{sites} under {job.parallel}"))
