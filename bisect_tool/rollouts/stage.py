"""`bisect-tool rollout`: the engine stage alone, from dumps, a live server, and listings of what an engine holds."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.family import Dimensions, Family
from bisect_hooks.hf import VERSION, Reference, Tokenizer
from bisect_hooks.site import Site

from bisect_tool.faults import Fault, Finding, Relation
from bisect_tool.hf_directory import HuggingFaceDirectory, open_hf
from bisect_tool.judge import EXACT, Verdict
from bisect_tool.report import STAGES, Report, StageResult, not_run
from bisect_tool.rollouts import engine, evidence, server, sync, tokens
from bisect_tool.rollouts.evidence import Evidence
from bisect_tool.rollouts.listings import read_hashes, read_names
from bisect_tool.rollouts.sample import Sample
from bisect_tool.rollouts.scoring import score
from bisect_tool.unknown import family_in


def run_rollout(asked: Evidence) -> Report:
    """The whole report: one stage was run."""
    asked.check()
    directory = open_hf(asked.reference)
    family = family_in(directory)
    dims = family.reference_dimensions(directory.config)
    result = StageResult("engine")
    started = time.monotonic()
    tokenizer = _Tokenizer(asked.reference)
    listings = read_hashes(list(asked.hashes)) if asked.hashes else []
    names = (read_names(asked.received), read_names(asked.consumed)) if asked.received and asked.consumed else None
    read = evidence.read(asked, tokenizer.encode)
    samples = evidence.checked(read.samples, dims.vocabulary)
    if asked.server is not None:
        samples = _asked(asked.server, samples, read.prompts, tokenizer, result)
        samples = evidence.checked(samples, dims.vocabulary)
    result.skipped += read.skipped
    result.notes += read.notes
    open_questions: list[str] = []
    equal = False
    if listings or names:
        equal = _weights(asked, directory, family, listings, names, result, open_questions)
    if samples:
        _tokens(samples, tokenizer, dims, result)
        _responses(asked, samples, directory, family, dims, tokenizer, equal, result, open_questions)
    result.notes += [f"open: {one}" for one in open_questions]
    result.verdict = Verdict.DIFFERS if result.faults else Verdict.INCOMPARABLE if open_questions else Verdict.AGREES
    result.seconds = time.monotonic() - started
    stages = [result if name == "engine" else not_run(name, "the rollout command runs the engine stage alone") for name in STAGES]
    return Report(stages, _provenance(asked, samples), strict=asked.strict)


def _asked(url: str, samples: Sequence[Sample], prompts: Sequence[Any], tokenizer: _Tokenizer, result: StageResult) -> list[Sample]:
    """The samples with the server's prefill beside them, and its answers to prompts that had none."""
    met = server.meet(url)
    result.notes.append(f"{met.url} is {met.kind} serving {met.model}")
    answered = [met.answer(prompt, f"prompt {number} answered by the server", tokenizer.encode) for number, prompt in enumerate(prompts)]
    return [met.score(sample) for sample in (*samples, *answered)]


def _weights(
    asked: Evidence, directory: HuggingFaceDirectory, family: Family, listings: Sequence[Any], names: tuple[tuple[str, ...], tuple[str, ...]] | None,
    result: StageResult, open_questions: list[str],
) -> bool:  # fmt: skip
    """What the engine holds and what it took; whether all of it is what was sent."""
    sent = sync.Sent(family, directory, open_hf(asked.export) if asked.export else None)
    findings: list[Finding] = []
    equal = False
    if listings:
        found = sync.compare_hashes(listings, sent)
        findings += found.findings
        result.compared["tensors"] = found.compared
        equal = found.right == found.compared and asked.export is None
        result.notes.append(f"the engine holds {found.right} of {found.compared} tensors as the {sent.between[0]} has them, byte by byte")
        if found.trained and not findings:
            open_questions.append(
                f"{len(found.unknown)} tensors are not the reference's: the engine holds trained weights; --export with the directory of the same iteration decides"
            )
    if names:
        taken = sync.compare_names(*names, sent, listings)
        known = {name for one in findings for name in (*one.tensors[0], *one.tensors[1])}
        findings += [one for one in taken.findings if not known & {*one.tensors[0], *one.tensors[1]}]
        skipped = [one.tensors[1][0] for one in taken.findings if known & {*one.tensors[0], *one.tensors[1]}]
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
    return equal


def _tokens(samples: Sequence[Sample], tokenizer: _Tokenizer, dims: Dimensions, result: StageResult) -> None:
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
        result.notes.append(
            f"cleared: tokenisation and template (the ids of {len(judged)} prompts are those the reference's tokenizer makes)"
        )
    inexact = sum(not sample.exact for sample in samples)
    if inexact:
        result.skipped.append(
            (f"ids of {inexact} responses", "the dump keeps text only: ids were made of it again, special tokens may be lost")
        )


def _said_of_tokens(one: tokens.Retokenised, count: int, of: int) -> tuple[str, str]:
    rows = f"in {count} of {of} prompts, first {one.where}"
    if one.bos:
        said = {"doubled": "BOS stands twice", "missing": "BOS is missing", "added": "a BOS was put in front"}[one.bos]
        return (
            f"Rollout-config fault: {said} at index 0 of the engine's tokens, so every position is shifted by {one.offset:+d} ({rows}).",
            "Let either the template or the tokenizer write BOS (add_special_tokens=False for rendered text), on both sides (sglang#888).",
        )
    what = f"{len(one.added)} ids more and {len(one.missing)} fewer" if one.added or one.missing else "other ids"
    return (
        f"Rollout-config fault: the engine's tokens leave the reference's at index {one.index} ({what}; {rows}): expected {one.around[0]!r}, the engine had {one.around[1]!r}.",
        "Render the whole conversation once with the reference's template, not message by message (slime#2263).",
    )


def _responses(
    asked: Evidence, samples: Sequence[Sample], directory: HuggingFaceDirectory, family: Family, dims: Dimensions, tokenizer: _Tokenizer, equal: bool,
    result: StageResult, open_questions: list[str],
) -> None:  # fmt: skip
    """Log-probs and text against the reference."""
    asked.progress("engine: loading the reference")
    reference = Reference(directory.path, family, dims, torch.float32, torch.device("cpu"))
    scored = score(reference, samples, dims.vocabulary, asked.progress)

    def rerun(flags: str) -> str:
        files = " ".join(shlex.quote(str(path)) for path in asked.rollouts)
        return f"bisect-tool rollout --reference {shlex.quote(str(asked.reference))} --rollout {files} {flags}"

    judged = engine.Bench(samples, scored, reference, rerun, tokenizer.text, equal).judge()
    result.faults += judged.faults
    result.notes += judged.notes
    result.skipped += judged.skipped
    result.probes += judged.probes
    open_questions += judged.open
    result.compared |= {"responses": len(samples), "tokens": judged.tokens}
    if not judged.tokens and not judged.open and not judged.faults:
        open_questions.append("no log-prob could be compared: every response spans several weight versions")


class _Tokenizer:
    """The reference's tokenizer, loaded when something is text.  Without one, text can't be read and ids are shown as ids."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.there = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"))
        self._loaded: Tokenizer | None = None

    @property
    def loaded(self) -> Tokenizer:
        if self._loaded is None:
            self._loaded = Tokenizer(self.path)
        return self._loaded

    def encode(self, text: Any, opens: bool) -> list[int]:
        if not opens:
            return self.loaded.plain(str(text))
        return tokens.expected_ids(text, self.loaded)

    def text(self, ids: list[int]) -> str:
        return self.loaded.text(ids) if self.there else " ".join(map(str, ids))


def _provenance(asked: Evidence, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "versions": {"torch": torch.__version__, "transformers": VERSION},
        "reference": str(asked.reference),
        "candidate": None,
        "export": str(asked.export) if asked.export else None,
        "rollout": ", ".join(map(str, asked.rollouts)) + f" ({len(samples)} responses)" if asked.rollouts else None,
        "train": ", ".join(map(str, asked.train)) or None,
        "server": asked.server,
        "hashes": ", ".join(map(str, asked.hashes)) or None,
        "received": str(asked.received) if asked.received else None,
        "consumed": str(asked.consumed) if asked.consumed else None,
        "layout": None,
        "parallel": None,
        "digests": {},
        "dtype": "fp32" if samples else None,
        "device": "cpu" if samples else None,
        "prompts": None,
        "seed": None,
        "command": asked.command,
    }
