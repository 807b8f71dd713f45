"""A live engine, asked over its own protocol: SGLang's `/generate`, or `/v1/completions` of vLLM and whatever speaks OpenAI's.

Two questions: what would you say to this prompt, and what log-prob do you give each of these tokens in one pass?  Answers are other
people's data: read up to a size and a deadline, and checked before they are believed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
from bisect_hooks.errors import UsageError, first_line

from bisect_tool.rollouts.sample import Sample, made

# seconds: to be connected, for an engine to say who it is, for the next bytes of an answer, for a whole answer
CONNECT, HELLO, READ, WHOLE = 5.0, 5.0, 60.0, 300.0
TRIES = 3
PAUSE = 0.5
LARGEST_ANSWER = 256 << 20
# what a prompt without a response is answered with
NEW_TOKENS = 64
ENDPOINTS = ("/v1/completions", "/generate", "/v1")


class RefusedError(UsageError):
    """The engine answered that it will not: asking again is no use."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What a server is: "sglang" or "openai", and the model it names."""

    url: str
    kind: str
    model: str

    def score(self, sample: Sample) -> Sample:
        """The sample with the engine's log-prob of every token, from one pass over prompt and response."""
        if self.kind == "sglang":
            meta = self._generate({"input_ids": list(sample.tokens)}, 1)["meta_info"]
            said = meta.get("input_token_logprobs")
        else:
            said = self._prompt_logs(sample)
        if not isinstance(said, list) or len(said) != len(sample.tokens):
            count = f"{len(said)} log-probs" if isinstance(said, list) else "no log-probs"
            raise UsageError(
                f"{self.url} gives {count} for {sample.where}, which has {len(sample.tokens)} tokens", hint="does it cut its input?"
            )
        scored = made(sample.where, tokens=sample.tokens, start=sample.start, logs={"prefill": said}, mask=None)
        return replace(sample, prefill=scored.prefill)

    def answer(self, prompt: Any, where: str, encode: Callable[[Any, bool], list[int]]) -> Sample:
        """Greedily, with the ids that the engine made of a prompt's text where it says them."""
        ids = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else None
        said = self._answer_sglang(prompt, ids) if self.kind == "sglang" else self._answer_openai(prompt, ids)
        before, after, logs, text, version = said
        exact = before is not None and after is not None
        if before is None:
            before = encode(prompt, True)
        if after is None:
            after = encode(text, False)
            logs = logs if len(logs) == len(after) else []
        return made(
            where, tokens=[*before, *after], start=len(before), logs={"decode": logs}, mask=None, prompt=None if ids else prompt,
            response=text, exact=exact, versions=version, engine="",
        )  # fmt: skip

    def _answer_sglang(self, prompt: Any, ids: list[int] | None) -> tuple[Any, Any, list[Any], str, tuple[str, ...]]:
        found = self._generate({"input_ids": ids} if ids else {"text": _text(prompt, self)}, NEW_TOKENS)
        meta = found["meta_info"]
        before, after = (_pairs(meta.get(key), self.url) for key in ("input_token_logprobs", "output_token_logprobs"))
        version = (str(meta["weight_version"]),) if meta.get("weight_version") is not None else ()
        return [one[1] for one in before] or ids, [one[1] for one in after], [one[0] for one in after], str(found.get("text", "")), version

    def _answer_openai(self, prompt: Any, ids: list[int] | None) -> tuple[Any, Any, list[Any], str, tuple[str, ...]]:
        asked = {"prompt": ids or _text(prompt, self), "max_tokens": NEW_TOKENS, "logprobs": 1, "return_token_ids": True}
        choice = self._complete(asked)
        logs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        return choice.get("prompt_token_ids") or ids, choice.get("token_ids"), logs, str(choice.get("text", "")), ()

    def _prompt_logs(self, sample: Sample) -> list[Any] | None:
        """vLLM's prompt_logprobs, or OpenAI's echo for servers that do not know those."""
        try:
            said = self._complete({"prompt": list(sample.tokens), "max_tokens": 1, "prompt_logprobs": 0}).get("prompt_logprobs")
        except RefusedError:
            said = None
        if isinstance(said, list):
            return [one.get(str(token)) if isinstance(one, dict) else None for one, token in zip(said, sample.tokens, strict=False)]
        choice = self._complete({"prompt": list(sample.tokens), "max_tokens": 0, "echo": True, "logprobs": 1})
        logs = (choice.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(logs, list):
            raise UsageError(
                f"{self.url} gives no prompt log-probs, neither for prompt_logprobs nor for echo with logprobs",
                hint="compare the rollout files alone, without --server",
            )
        return logs[: len(sample.tokens)]

    def _generate(self, asked: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": tokens}
        found = ask(f"{self.url}/generate", {**asked, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0})
        if not isinstance(found, dict) or not isinstance(found.get("meta_info"), dict):
            raise UsageError(f"{self.url}/generate answers without meta_info: {str(found)[:80]!r}", hint="is it an SGLang server?")
        return found

    def _complete(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        found = ask(f"{self.url}/v1/completions", {"model": self.model, "temperature": 0, **asked})
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise UsageError(f"{self.url}/v1/completions answers without choices: {str(found)[:80]!r}")
        return dict(choices[0])


def meet(url: str) -> Engine:
    """Who answers at a URL.  Raises UsageError when nobody does, or nobody that is known."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--server {url} is no http address", hint="such as http://host:30000")
    for ending in ENDPOINTS:
        url = url.rstrip("/").removesuffix(ending)
    for path, kind in (("/get_model_info", "sglang"), ("/model_info", "sglang"), ("/v1/models", "openai")):
        try:
            found = ask(f"{url}{path}", None, HELLO)
        except RefusedError:
            continue
        if kind == "sglang" and isinstance(found, dict) and "model_path" in found:
            return Engine(url, kind, str(found["model_path"]))
        if kind == "openai" and isinstance(found, dict) and isinstance(found.get("data"), list) and found["data"]:
            return Engine(url, kind, str(dict(found["data"][0]).get("id", "")))
    raise UsageError(f"{url} is no engine that is known", hint="SGLang answers at /get_model_info, vLLM and OpenAI's at /v1/models")


def ask(url: str, body: Any, seconds: float | None = None) -> Any:
    """The JSON that a URL answers with.  Tries again when it fails; raises UsageError when it goes on failing."""
    seconds = WHOLE if seconds is None else seconds
    said = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE * 2**attempt)
        try:
            return _once(url, body, seconds)
        except httpx.TimeoutException:
            said = f"did not answer within {min(READ, seconds):g} s"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = f"can't be asked: {first_line(error)}"
        except _FailingError as error:
            said = str(error)
    raise UsageError(f"{url} {said} ({TRIES} tries)", hint="is the engine up, and is this its address?")


class _FailingError(Exception):
    """An answer that may be better the next time."""


def _once(url: str, body: Any, seconds: float) -> Any:
    timeout = httpx.Timeout(min(READ, seconds), connect=min(CONNECT, seconds))
    ends = time.monotonic() + seconds
    kept = bytearray()
    # an engine is on this network: no proxy is asked
    with (
        httpx.Client(timeout=timeout, trust_env=False) as client,
        client.stream("GET" if body is None else "POST", url, json=body) as response,
    ):
        if response.status_code >= 500:
            raise _FailingError(f"answers {response.status_code}")
        if response.status_code >= 400:
            raise RefusedError(f"{url} answers {response.status_code}")
        for part in response.iter_bytes():
            kept += part
            if len(kept) > LARGEST_ANSWER:
                raise UsageError(f"{url} goes on after {LARGEST_ANSWER >> 20} MiB; that is no answer")
            if time.monotonic() > ends:
                raise UsageError(f"{url} was still answering after {seconds:g} s; given up")
    try:
        return json.loads(kept)
    except ValueError as error:
        raise UsageError(f"{url} answers what is no JSON: {bytes(kept[:60])!r}", hint="is this an engine's address?") from error


def _pairs(value: Any, url: str) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(one, list) and len(one) > 1 for one in value):
        raise UsageError(f"{url}/generate answers without [log-prob, id] pairs", hint="does this build know return_logprob?")
    return value


def _text(prompt: Any, engine: Engine) -> str:
    if not isinstance(prompt, str):
        raise UsageError(
            f"{engine.url} is asked with text or ids, and a prompt is messages", hint="render them with the chat template first"
        )
    return prompt
