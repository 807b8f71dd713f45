"""slime's and miles' dumps: `--save-debug-rollout-data` and `--save-debug-train-data`, read without running a pickle.

rollout  {"rollout_id", "samples": [Sample.to_dict()]}
train    format 2: {"rollout_id", "samples": [{"tokens", "log_probs", ..}], "dp_shards"}; before that (and miles):
         {"rollout_id", "rank", "rollout_data": {"tokens": [..], "log_probs": [..], ..}}, one file a rank
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bisect_hooks.errors import UsageError

from bisect_tool.pickles import Inert
from bisect_tool.places import Piece, Stored
from bisect_tool.rollouts.sample import Sample, ended, logs_of, made
from bisect_tool.torch_file import Placed, open_torch

ENGINE_KEYS = ("engine", "engine_id", "engine_rank", "dp_rank", "worker", "worker_url")
# numpy's names of the numbers that dumps hold, as struct reads them
NUMPY = {"f2": "e", "f4": "f", "f8": "d", "i4": "i", "i8": "q"}


def read_rollout(path: Path) -> tuple[list[Sample], list[str]]:
    """(samples of a rollout dump, places of those without a token).  Raises UsageError."""
    page = _page(path)
    if "samples" not in page:
        kind = "a train dump: give it as --train" if "rollout_data" in page else f"it holds {', '.join(map(str, page))[:120]}"
        raise UsageError(f"{path} has no samples, so it is no rollout dump", hint=kind)
    if page.get("format_version") == 2 and "dp_shards" in page:
        raise UsageError(f"{path} is a train dump", hint="give it as --train")
    rollout = page.get("rollout_id")
    samples = page["samples"]
    if not isinstance(samples, list) or not all(isinstance(one, dict) for one in samples):
        raise UsageError(f"{path}: its samples are not a list of tables")
    found = {where: _sample(where, one, rollout) for number, one in enumerate(samples) if (where := f"{path.name} sample {number}")}
    return [one for one in found.values() if one is not None], [where for where, one in found.items() if one is None]


def _sample(where: str, said: Mapping[str, Any], rollout: Any) -> Sample | None:
    length = said.get("response_length") or 0
    if "tokens" not in said or not isinstance(length, int):
        raise UsageError(f"{where} has no tokens or no response_length, so it is no sample of slime or miles")
    tokens, mask = numbers(said["tokens"]), numbers(said.get("loss_mask"))
    if not length or not tokens:
        return None  # aborted before its first token
    metadata, cache = said.get("metadata"), said.get("prefix_cache_info")
    engine = next((said.get(key) or (metadata or {}).get(key) for key in ENGINE_KEYS if _says(said, key) or _says(metadata, key)), "")
    spec = said.get("spec_info")
    drafts = spec.get("spec_draft_token_num") if isinstance(spec, dict) else None
    return made(
        where,
        tokens=tokens,
        start=len(tokens) - length,
        logs={"decode": numbers(said.get("rollout_log_probs")) or []},
        mask=mask or None,
        prompt=said.get("prompt") or None,
        response=str(said.get("response") or ""),
        versions=tuple(str(one) for one in said.get("weight_versions") or ()),
        rollout=rollout if isinstance(rollout, int) else None,
        complete=ended(said.get("status")),
        engine=str(engine),
        cached=cache.get("cached_tokens") if isinstance(cache, dict) and cache.get("total_prompt_tokens") else None,
        drafted=(False,) * length if drafts == 0 else None,
    )


def _says(table: Any, key: str) -> bool:
    return isinstance(table, dict) and table.get(key) is not None


def join_train(samples: Sequence[Sample], paths: Sequence[Path]) -> tuple[list[Sample], int]:
    """Samples with the trainer's log-probs, found by their ids; and how many train rows had no sample."""
    said: dict[tuple[int, ...], list[list[Any]]] = {}
    for path in paths:
        for tokens, logs in _train_rows(path):
            said.setdefault(tuple(tokens), []).append(logs)
    joined = []
    for sample in samples:
        rows = said.get(sample.tokens)
        if rows and len(rows[0]) == sample.length:
            sample = replace(sample, trained=logs_of(rows.pop(0), f"{paths[0]}: the trainer's log-probs"))
        joined.append(sample)
    if samples and paths and not any(sample.trained for sample in joined):
        raise UsageError(f"no row of {paths[0]} has the ids of a rollout sample", hint="give the train dump of the same rollout_id")
    return joined, sum(map(len, said.values()))


def _train_rows(path: Path) -> Iterator[tuple[list[Any], list[Any]]]:
    page = _page(path)
    if isinstance(page.get("samples"), list) and all(isinstance(one, dict) for one in page["samples"]):
        rows = page["samples"]
    elif isinstance(page.get("rollout_data"), dict):
        data = page["rollout_data"]
        columns = [data.get("tokens"), data.get("log_probs")]
        if not all(isinstance(column, list) for column in columns) or len(columns[0]) != len(columns[1]):
            raise UsageError(
                f"{path}: rollout_data has no tokens and log_probs of one length", hint="was it written after the actor's forward?"
            )
        rows = [{"tokens": tokens, "log_probs": logs} for tokens, logs in zip(*columns, strict=True)]
    else:
        raise UsageError(f"{path} is no train dump: it has neither samples nor rollout_data")
    for row in rows:
        tokens, logs = numbers(row.get("tokens")), numbers(row.get("log_probs"))
        if tokens and logs:
            yield tokens, logs


def _page(path: Path) -> dict[str, Any]:
    page = open_torch(path)
    if not isinstance(page, dict):
        raise UsageError(f"{path} holds a {type(page).__name__}, no dump of slime or miles")
    return page


def numbers(value: Any) -> list[Any]:
    """A list of numbers, however it was stored: a list, a tensor, or numpy's array.  Empty for what lies in another file."""
    if isinstance(value, Placed):
        stored = Stored("value", value.shape, value.dtype, (Piece((0,) * len(value.shape), value.shape, value.file, value.start),))
        found: list[Any] = stored.read().flatten().tolist()
        return found
    if isinstance(value, Inert):
        return _of_numpy(value)
    if isinstance(value, list | tuple):
        return [_of_numpy(one)[0] if isinstance(one, Inert) and _of_numpy(one) else one for one in value]
    return []


def _of_numpy(value: Inert) -> list[Any]:
    """What a pickled numpy array or scalar holds; nothing for any other class."""
    state = getattr(value, "state", None)
    if isinstance(state, tuple) and len(state) == 5:  # (version, shape, dtype, fortran, bytes)
        kind, data = state[2], state[4]
    else:
        arguments: tuple[Any, ...] = getattr(value, "made_of", ((), {}))[0]
        if len(arguments) != 2 or not isinstance(arguments[1], bytes):
            return []
        kind, data = arguments
    code = getattr(kind, "made_of", (("",), {}))[0][:1]
    letter = NUMPY.get(str(code[0])) if code else None
    if letter is None or not isinstance(data, bytes) or len(data) % struct.calcsize(letter):
        return []
    return [one for (one,) in struct.iter_unpack(f"<{letter}", data)]
