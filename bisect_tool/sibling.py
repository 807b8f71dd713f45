"""'The small one works, the big one breaks': what differs in kind between two models, their conversions and their audits."""

from __future__ import annotations

from collections.abc import Mapping

from bisect_tool.faults import Fault, span
from bisect_tool.judge import Verdict
from bisect_tool.ladder import Job
from bisect_tool.report import Report, StageResult


def held_beside(job: Job, weights: StageResult, sibling: Job, report: Report) -> list[str]:
    """One line for each thing that differs: verdict, faults, how they were converted, what kind of model they are."""
    said = {Verdict.AGREES: "agrees", Verdict.DIFFERS: "differs too", Verdict.INCOMPARABLE: "is incomparable"}[report.verdict]
    lines = [f"sibling: {sibling.candidate_path} {said}"]
    ours, theirs = _kinds(weights.faults), _kinds(report.faults)
    lines += [f"sibling: only here: {kind}" for kind in ours if kind not in theirs]
    lines += [f"sibling: only there: {kind}" for kind in theirs if kind not in ours]
    lines += [f"sibling: in both: {kind}" for kind in ours if kind in theirs]
    here, there = _facts(job), _facts(sibling)
    lines += [f"sibling: {name}: {here[name]} here, {there[name]} there" for name in here if here[name] != there.get(name)]
    return lines


def _kinds(faults: list[Fault]) -> list[str]:
    """Faults by what they are, whatever the size of the model."""
    return [f"{fault.first.relation.kind if fault.first.relation else 'drift'} in {' and '.join(fault.modules)}" for fault in faults]


def _facts(job: Job) -> Mapping[str, str]:
    """What may matter: the conversion first, because that is where small and big differ most often."""
    dims, parallel, checkpoint = job.dims, job.written_under, job.candidate
    found = {}
    if parallel is None:
        found["converted at"] = "a layout that nobody says"
    else:
        for axis in ("tp", "pp", "ep", "etp"):
            found[f"{axis.upper()} of the conversion"] = str(parallel.size(axis))
        starts = [sum(parallel.chunk_sizes(dims.layers)[:i]) for i in range(parallel.pp * parallel.vpp)]
        found["pipeline stages start with"] = ", ".join(dims.kinds[start].replace("_", " ") for start in starts)
        if dims.experts:
            found["experts an EP rank"] = str(dims.experts // parallel.ep)
        found["layers a stage"] = span(sorted(set(parallel.chunk_sizes(dims.layers))))
    found |= {
        "checkpoint format": checkpoint.format,
        "linear attention layout": checkpoint.layout,
        "layers": str(dims.layers),
        "experts": str(dims.experts),
        "experts a token": str(dims.top_k),
        "query heads a KV head": str(dims.heads // max(1, dims.groups)),
        "value heads a key head": str(dims.value_heads // max(1, dims.key_heads)),
        "tied head": "yes" if dims.tied else "no",
        "stored as": ", ".join(
            sorted(str(dtype).removeprefix("torch.") for dtype in {stored.dtype for stored in checkpoint.tensors.values()})
        ),
        "MTP tensors": str(sum(key.startswith("mtp.") for key in checkpoint.tensors)),
    }
    return found
