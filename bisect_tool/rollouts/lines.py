"""JSONL rollouts: verl's `trainer.rollout_data_dir` (input, output, step, ..) and plain lines of prompt, response and log-probs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bisect_hooks.errors import UsageError

from bisect_tool.rollouts.sample import Sample, ended, ids_of, made

# the names that dumps use for one thing; the first that a line has counts
PROMPT = ("prompt", "messages", "input", "text")
PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "input_ids")
RESPONSE = ("response", "output", "completion")
RESPONSE_IDS = ("response_ids", "response_token_ids", "output_ids", "token_ids")
DECODE = ("rollout_log_probs", "logprobs", "log_probs", "output_token_logprobs", "token_logprobs")
PREFILL = ("prefill_logprobs", "prefill_log_probs")
PROMPT_LOGS = ("prompt_logprobs", "input_token_logprobs")
TRAINED = ("trainer_logprobs", "old_log_probs", "train_log_probs")
FINISH = ("finish_reason", "status")
ENGINE = ("engine", "dp_rank", "engine_id", "worker")
Encode = Callable[[Any, bool], list[int]]


def read_lines(path: Path, encode: Encode) -> tuple[list[Sample], list[Any], list[str]]:
    """(samples, prompts that have no response yet, places of responses without a token).  encode: text or messages, whether it opens a sequence → ids"""
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text: {error}", hint="dumps of slime and miles end in .pt, others are JSONL") from error
    samples: list[Sample] = []
    open_prompts: list[Any] = []
    empty: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path.name} line {number}"
            try:
                said = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{where} is not JSON: {error}") from error
            except RecursionError as error:
                raise UsageError(f"{where} is no response: its brackets are nested too deep") from error
            if not isinstance(said, dict):
                raise UsageError(f"{where} holds a {type(said).__name__}, not a table")
            found = _sample(where, said, encode)
            if isinstance(found, Sample):
                samples.append(found)
            elif found is None:
                empty.append(where)
            else:
                open_prompts.append(found)
    return samples, open_prompts, empty


def _first(said: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((said[name] for name in names if said.get(name) is not None), None)


def _sample(where: str, said: Mapping[str, Any], encode: Encode) -> Any:
    prompt, response = _first(said, PROMPT), _first(said, RESPONSE)
    ids, answer = _first(said, PROMPT_IDS), _first(said, RESPONSE_IDS)
    decode = _first(said, DECODE) or []
    if isinstance(decode, dict):  # OpenAI's {"tokens": [..], "token_logprobs": [..]}
        decode = decode.get("token_logprobs") or []
    if not isinstance(decode, list):
        raise UsageError(f"{where}: its log-probs are a {type(decode).__name__}, not a list")
    exact = answer is not None or "tokens" in said
    if answer is None and decode and all(isinstance(one, list) and len(one) > 1 and isinstance(one[1], int) for one in decode):
        answer, exact = [one[1] for one in decode], True  # SGLang's [log-prob, id, text]
    if "tokens" in said:
        tokens = list(ids_of(said["tokens"], where))
        length = said.get("response_length")
        if not isinstance(length, int) or not 0 <= length < len(tokens):
            raise UsageError(f"{where} has tokens and no response_length that fits them")
        ids, answer = tokens[: len(tokens) - length], tokens[len(tokens) - length :]
    if ids is None and prompt is None:
        raise UsageError(
            f"{where} has no prompt", hint=f"it has {', '.join(said)[:120]}; known: {', '.join((*PROMPT, *PROMPT_IDS, 'tokens'))}"
        )
    if prompt is not None and not isinstance(prompt, str | list):
        raise UsageError(f"{where}: its prompt is neither text nor messages")
    if answer is None and response is None:
        return ids if ids is not None else prompt
    exact = exact and ids is not None
    ids = list(ids_of(ids, where)) if ids is not None else encode(prompt, True)
    # bytes that were no text when they were decoded can't be encoded again: what stands before them is judged
    answer = list(ids_of(answer, where)) if answer is not None else encode(str(response).split("\ufffd")[0], False)
    if not answer and ((not exact and response) or not decode):
        return None  # nor has one that was aborted before its first token
    if not ids or not answer:
        raise UsageError(f"{where}: " + ("an empty prompt" if not ids else "log-probs of an empty response"))
    prompt_logs, prefill = _first(said, PROMPT_LOGS), _first(said, PREFILL)
    drafted = said.get("draft_accepted")
    versions = said.get("weight_versions") or said.get("weight_version") or ()
    rollout, step = said.get("rollout_id"), said.get("step")
    if rollout is None and isinstance(step, int):
        rollout = max(0, step - 1)  # verl counts steps from 1
    return made(
        where,
        tokens=[*ids, *answer],
        start=len(ids),
        logs={
            "decode": decode,
            "prefill": _whole(prompt_logs, prefill, len(ids), len(answer), where),
            "trained": _first(said, TRAINED) or [],
        },
        mask=said.get("loss_mask"),
        prompt=prompt,
        response=str(response or ""),
        exact=exact,
        versions=tuple(str(one) for one in (versions if isinstance(versions, list) else [versions] if versions != () else [])),
        rollout=rollout if isinstance(rollout, int) else None,
        complete=ended(_first(said, FINISH)),
        engine=str(_first(said, ENGINE) if _first(said, ENGINE) is not None else ""),
        cached=said.get("cached_tokens") if isinstance(said.get("cached_tokens"), int) else None,
        drafted=tuple(map(bool, drafted)) if isinstance(drafted, list) and len(drafted) == len(answer) else None,
    )


def _whole(prompt: Any, response: Any, before: int, length: int, where: str) -> list[Any]:
    """One pass over everything, from the two halves that dumps keep; what is not said is None."""
    for what, values, count in (("prompt_logprobs", prompt, before), ("prefill_logprobs", response, length)):
        if values is not None and (not isinstance(values, list) or len(values) not in (count, count - 1)):
            raise UsageError(f"{where}: {what} is not a list of {count} log-probs")
    if prompt is None and response is None:
        return []
    head = [None] * before if prompt is None else [None] * (before - len(prompt)) + prompt
    return [*head, *([None] * length if response is None else response)]
