"""verl's Hydra overrides: `actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2`, `+...override_transformer_config.x=y`.

verl builds its model through a bridge, which reads config.json itself: only what an override says is the launch's word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from bisect_tool.launch.names import megatron_args
from bisect_tool.launch.words import Where, Word, refuse

OVERRIDE = re.compile(r"^(\+\+|\+|~)?([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)+)=(.*)$", re.DOTALL)
ACTOR = re.compile(r"(?:^|\.)actor\.megatron\.(?:override_transformer_config\.)?(\w+)$")
HUGGING_FACE = re.compile(r"(?:^|\.)model\.override_config\.(?:model_config\.)?(\w+)$")


def is_override(text: str) -> bool:
    """Whether a word is an override of a nested key."""
    return OVERRIDE.match(text) is not None


def shapes(words: Sequence[Word]) -> int:
    """How many words say something of the actor's Megatron model."""
    return sum(found is not None and ACTOR.search(found[2]) is not None for found in (OVERRIDE.match(word.text) for word in words))


def read_overrides(words: Sequence[Word]) -> tuple[dict[str, Any], dict[str, Where], list[tuple[str, Where]]]:
    """(args, where each is said, overrides of config.json's own values).  Raises UsageError for a value that is not known."""
    config: dict[str, Any] = {}
    where: dict[str, Where] = {}
    others: list[tuple[str, Where]] = []
    for word in words:
        found = OVERRIDE.match(word.text)
        if found is None:
            if word.unknown and word.text.startswith("$") and not word.unset:
                raise refuse(word.where, f"{word.text} may hold overrides, and its value is not known: {word.unknown}")
            continue
        actor, hugging_face = ACTOR.search(found[2]), HUGGING_FACE.search(found[2])
        if hugging_face is not None:
            others.append((found[0], word.where))
        if actor is None:
            continue
        if word.unknown:
            raise refuse(word.where, f"{word.text} is not known: {word.unknown}")
        name = actor[1]
        if found[1] == "~":
            config.pop(name, None)
            continue
        config[name], where[name] = _value(found[3], word), word.where
    args, said = megatron_args(config, where)
    return args, said, others


def _value(text: str, word: Word) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise refuse(word.where, f"{word.text} has a value that is not YAML") from None
    return value
