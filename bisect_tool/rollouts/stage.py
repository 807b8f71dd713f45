"""The engine stage: what an engine said, holds and computed, against the reference, and against the candidate where there is one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from bisect_hooks.family import Dimensions
from bisect_hooks.hf import VERSION, Reference
from bisect_hooks.site import Site

from bisect_tool.faults import Fault, Finding, Relation
from bisect_tool.hf_directory import open_hf
from bisect_tool.judge import EXACT, Verdict
from bisect_tool.report import STAGES, Report, StageResult, not_run, timed
from bisect_tool.rollouts import activations, endings, engine, sync, tokens
from bisect_tool.rollouts.bench import Bench
from bisect_tool.rollouts.evidence import Evidence
from bisect_tool.rollouts.gather import Gathered, TextOrIds, gather
from bisect_tool.rollouts.known import Known
from bisect_tool.rollouts.sample import Sample
from bisect_tool.rollouts.scoring import score


def run_rollout(asked: Evidence) -> Report:
    """`bisect-tool rollout`: the whole report; one stage was run."""
    result = StageResult("engine")
    with timed(result):
        found = gather(asked)
        with found.open:
            audit = f"bisect-tool audit --reference {shlex.quote(str(asked.reference))} --candidate MEGATRON_DIR"
            judge_engine(found, Known(rerun=asked.rerun, audit=audit), result)
    stages = [result if name == "engine" else not_run(name, "the rollout command runs the engine stage alone") for name in STAGES]
    return Report(stages, _provenance(found), strict=asked.strict)


def judge_engine(found: Gathered, known: Known, result: StageResult, candidate: activations.Record | None = None) -> None:
    """Fills `result`.  candidate: records the candidate on given rows, where there is one"""
    result.skipped += found.skipped
    result.notes += found.notes
    open_questions: list[str] = []
    shown = False
    if found.listings or found.names:
        known = _weights(found, known, result, open_questions)
    if found.recordings:
        known = activations.judge(found, known, candidate, result, open_questions)
    if found.samples:
        _tokens(found.samples, found.tokenizer, found.dims, result)
        end = found.tokenizer.loaded.end if found.tokenizer.there else None
        endings.judge(found.samples, endings.stops(found.directory.path, found.directory.config, end), result, open_questions)
        shown = _responses(found, known, result, open_questions)
    result.notes += [f"open: {one}" for one in open_questions]
    shown = shown or activations.SHOWN in result.notes
    result.verdict = Verdict.DIFFERS if result.faults or shown else Verdict.INCOMPARABLE if open_questions else Verdict.AGREES


def _weights(gathered: Gathered, known: Known, result: StageResult, open_questions: list[str]) -> Known:
    """What the engine holds and what it took; with what that makes known."""
    listings, names, export = gathered.listings, gathered.names, gathered.asked.export
    sent = sync.Sent(gathered.family, gathered.directory, open_hf(export) if export else None)
    findings: list[Finding] = []
    if listings:
        found = sync.compare_hashes(listings, sent)
        findings += found.findings
        result.compared["tensors"] = found.compared
        if found.right == found.compared and export is None:
            known = replace(known, held=True)
        result.notes.append(f"the engine holds {found.right} of {found.compared} tensors as the {sent.between[0]} has them, byte by byte")
        if found.trained and not findings:
            open_questions.append(
                f"{len(found.unknown)} tensors are not the reference's: the engine holds trained weights; --export with the directory of the same iteration decides"
            )
    if names:
        taken = sync.compare_names(*names, sent, listings)
        held = {name for one in findings for name in (*one.tensors[0], *one.tensors[1])}
        findings += [one for one in taken.findings if not held & {*one.tensors[0], *one.tensors[1]}]
        skipped = [one.tensors[1][0] for one in taken.findings if held & {*one.tensors[0], *one.tensors[1]}]
        if skipped:
            result.notes.append(f"why: {len(skipped)} names were received and never consumed, first {skipped[0]}")
        result.notes += taken.notes
        result.notes.append(f"{taken.right} of {taken.compared} names that were supplied were consumed")
    for fault in sync.united(findings, sent.modules_of_layer):
        result.faults.append(fault)
        if fault.first.site.module == "mtp" and len(fault.modules) == 1:
            result.notes.append(
                "ruled out as a cause of garbled text: the draft only proposes, and verification by the target keeps the text (it lowers acceptance)"
            )
            result.cleared.append(
                ("a stale draft, as a cause of garbled text", "the target holds what was sent, and verification by it keeps the text")
            )
    return known


def _tokens(samples: Sequence[Sample], tokenizer: TextOrIds, dims: Dimensions, result: StageResult) -> None:
    """Ids of prompts against the reference's tokenizer and template."""
    if not tokenizer.there:
        result.skipped.append(("tokenisation", "the reference has no tokenizer"))
        return
    judged = [sample for sample in samples if sample.prompt is not None and sample.exact]
    found = [one for one in (tokens.retokenised(sample, tokenizer.loaded) for sample in samples) if one is not None]
    groups = tokens.common(found)
    for together in groups[1:]:
        result.notes.append(f"other tokens too, in {len(together)} prompts: {_said_of_tokens(together[0], len(together), len(judged))[0]}")
    for together in groups[:1]:
        one = together[0]
        text, do = _said_of_tokens(one, len(together), len(judged) or len(samples))
        kind = "shifted-tokens" if one.shifted else "unknown"
        detail = {
            "index": one.index, "offset": one.offset, "added": list(one.added[:16]), "missing": list(one.missing[:16]), "wrong": len(together),
            "context": {"expected": one.around[0], "engine": one.around[1]},
        }  # fmt: skip
        site = Site("tokens")
        finding = Finding(
            "rollout-config",
            site,
            engine.nowhere(site, dims.layers),
            ((), ()),
            None,
            EXACT,
            Relation(kind, detail),
            None,
            text,
            do,
            ("reference", "engine"),
        )
        result.faults.append(Fault((finding,)))
    if judged and not found:
        result.cleared.append(("tokenisation and template", f"the ids of {len(judged)} prompts are those the reference's tokenizer makes"))
    inexact = sum(not sample.exact for sample in samples)
    if inexact:
        result.skipped.append(
            (f"ids of {inexact} responses", "the dump keeps text only: ids were made of it again, special tokens may be lost")
        )


def _said_of_tokens(one: tokens.Retokenised, count: int, of: int) -> tuple[str, str]:
    rows = f"in {count} of {of} prompts, first {one.where}"
    if one.bos:
        said = {
            "doubled": f"BOS stands {'twice' if one.offset == 1 else f'{one.offset + 1} times'}",
            "missing": "BOS is missing",
            "added": "a BOS was put in front",
        }[one.bos]
        return (
            f"Rollout-config fault: {said} at index 0 of the engine's tokens, so every position is shifted by {one.offset:+d} ({rows}).",
            "Let either the template or the tokenizer write BOS (add_special_tokens=False for rendered text), on both sides (sglang#888)."
            if one.rendered
            else "No template is at work: the tokenizer wrote BOS to text or ids that had it already, or not at all; have it add BOS once (add_special_tokens).",
        )
    what = f"{len(one.added)} ids more and {len(one.missing)} fewer" if one.added or one.missing else "other ids"
    return (
        f"Rollout-config fault: the engine's tokens leave the reference's at index {one.index} ({what}; {rows}): expected {one.around[0]!r}, the engine had {one.around[1]!r}.",
        "Render the whole conversation once with the reference's template, not message by message (slime#2263)."
        if one.rendered
        else "No template is at work: encode the whole text once, with the reference's tokenizer.",
    )


def _responses(found: Gathered, known: Known, result: StageResult, open_questions: list[str]) -> bool:
    """Log-probs and text against the reference; whether they show a fault of the candidate's."""
    asked, samples = found.asked, found.samples
    asked.progress("engine: loading the reference")
    reference = Reference(found.directory.path, found.family, found.dims, torch.float32, torch.device(asked.device))
    scored = score(reference, samples, found.dims.vocabulary, asked.progress)
    given = {side: score(model, samples, found.dims.vocabulary, asked.progress) for side, model in known.models.items()}
    others = [{side: views[i] for side, views in given.items()} for i in range(len(samples))]
    judged = engine.Questions(Bench(samples, scored, others, reference), found.tokenizer.text, known).judge()
    result.faults += judged.faults
    result.notes += judged.notes
    result.skipped += judged.skipped
    result.probes += judged.probes
    result.cleared += judged.cleared
    open_questions += judged.open
    result.compared |= {"responses": len(samples), "tokens": judged.tokens}
    if not judged.tokens and not judged.open and not judged.faults:
        open_questions.append("no log-prob could be compared: every response spans several weight versions")
    return judged.shown


def said_of(found: Gathered) -> dict[str, Any]:
    """The evidence, for a report's provenance."""
    asked = found.asked
    return {
        "rollout": ", ".join(map(str, asked.rollouts)) + f" ({len(found.samples)} responses)" if asked.rollouts else None,
        "train": ", ".join(map(str, asked.train)) or None,
        "server": asked.server,
        "hashes": ", ".join(map(str, asked.hashes)) or None,
        "received": str(asked.received) if asked.received else None,
        "consumed": str(asked.consumed) if asked.consumed else None,
        "recordings": ", ".join(map(str, asked.recordings)) or None,
    }


def _provenance(found: Gathered) -> dict[str, Any]:
    asked, computed = found.asked, found.samples or found.recordings
    return {
        "versions": {"torch": torch.__version__, "transformers": VERSION},
        "reference": str(asked.reference),
        "candidate": None,
        "export": str(asked.export) if asked.export else None,
        **said_of(found),
        "layout": None,
        "parallel": None,
        "digests": {},
        "dtype": "fp32" if computed else None,
        "device": asked.device if computed else None,
        "prompts": None,
        "seed": None,
        "command": asked.command,
    }
