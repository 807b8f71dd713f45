"""How responses end: a stop token that the loss mask leaves out, and a response that a limit cut and the dump calls complete."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bisect_tool.faults import counted, verb
from bisect_tool.report import StageResult
from bisect_tool.rollouts.sample import Sample


def stops(path: Path, config: dict[str, Any], end: int | None) -> frozenset[int]:
    """Ids that end a response: those of config.json and generation_config.json, and the tokenizer's."""
    file = path / "generation_config.json"
    try:
        generation = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError):
        generation = {}  # only that file's word is lost: there are two others
    said = [page.get("eos_token_id") for page in (config, config.get("text_config") or {}, generation) if isinstance(page, dict)]
    ids = [one for value in (*said, end) for one in (value if isinstance(value, list) else [value])]
    return frozenset(one for one in ids if isinstance(one, int))


def judge(samples: Sequence[Sample], ends: frozenset[int], result: StageResult, open_questions: list[str]) -> None:
    """Opens what looks wrong, and says what can't be told."""
    samples = [one for one in samples if one.exact]
    masked = sum(len(one.masked) for one in samples)
    if masked:
        result.skipped.append((f"log-probs of {counted(masked, 'token')}", f"the loss mask leaves {verb(masked, 'it', 'them')} out"))
    stopped = [one for one in samples if one.tokens[-1] in ends]
    untaught = [one for one in stopped if one.length - 1 in one.masked and 0 < one.length - 1 and one.length - 2 not in one.masked]
    if untaught:
        open_questions.append(
            f"{counted(len(untaught), 'response', of=len(samples))} {verb(len(untaught), 'ends', 'end')} with a stop token that the loss mask leaves "
            f"out, first {untaught[0].where}: it was generated, was not compared, and who trains on this does not learn to stop; mend the mask, or "
            "give the dump without it to have all compared"
        )
    called = [one for one in samples if one.complete and one not in stopped]
    most = max((one.length for one in samples), default=0)
    cut = [one for one in called if one.length == most]
    if called and not stopped:
        result.notes.append(
            f"{counted(len(called), 'response', of=len(samples))} {verb(len(called), 'is', 'are')} called complete and no response ends with a stop "
            f"token ({', '.join(map(str, sorted(ends))) or 'none is known'}): whether a limit cut them can't be told"
        )
    elif len(cut) > 1:
        open_questions.append(
            f"{counted(len(cut), 'response', of=len(samples))} are called complete, first {cut[0].where}, end without a stop token, and all have the "
            f"{most} tokens that none exceeds: a limit cut them, and they should be called truncated; raise it, or mend the status"
        )
