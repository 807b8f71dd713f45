"""record: one side's activations by site, as a Recording."""

from __future__ import annotations

from pathlib import Path

import torch

from bisect_tool.candidate import CandidateRun
from bisect_tool.ladder import DTYPES, Job, package_version
from bisect_tool.recording import Provenance, Recording, by_group, writing
from bisect_tool.reference_recording import record_reference


def record(job: Job, side: str, out: Path) -> str:
    """Writes the Recording and returns a line about it."""
    if side == "reference":
        reference, notes = job.wanted.load()
        recording = record_reference(job.wanted, reference, job.batch, out)
        return "\n".join([f"wrote {out}: {len(recording.keys)} tensors, {job.batch.tokens} tokens, with the reference's own noise", *notes])
    recording = record_candidate(job, job.candidate_run(), out)
    absent = [f"not recorded: {key}: {why}" for key, why in recording.provenance.absent.items()]
    return "\n".join([f"wrote {out}: {len(recording.keys)} tensors, {job.batch.tokens} tokens, {job.parallel}", *absent])


def record_candidate(job: Job, run: CandidateRun, out: Path) -> Recording:
    """Builds the candidate and writes what it says of the run's batch."""
    run.build()
    said = run.record()
    provenance = Provenance(
        side="candidate",
        family=job.family.name,
        model=str(job.candidate_path),
        dtype=str(DTYPES[job.dtype]).removeprefix("torch."),
        rows=run.batch.rows,
        parallel=job.parallel.shown() | {"sp": job.parallel.sp},
        layout=job.candidate.layout,
        versions={"torch": torch.__version__, "megatron-core": package_version("megatron-core")},
        device=job.device,
        replica_difference=said.replicas,
        absent=said.absent,
        layouts={key: tap.layout for tap in run.taps for key in tap.keys if key in said.tensors},
    )
    with writing(out) as writer:
        for name, keys in by_group(said.tensors).items():
            writer.add(name, {key: said.tensors[key] for key in keys})
        writer.close(provenance)
    return Recording(out)
