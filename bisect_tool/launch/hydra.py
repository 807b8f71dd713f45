"""verl's Hydra overrides: `actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2`, `+...override_transformer_config.x=y`.

verl builds its model through a bridge, which reads config.json itself: only what an override says is the launch's word.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from bisect_tool.launch.names import LEFT_OUT, READS, RENAMED, megatron_args
from bisect_tool.launch.words import Where, Word, refuse

OVERRIDE = re.compile(r"^(\+\+|\+|~)?([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)+)=(.*)$", re.DOTALL)
ACTOR = re.compile(r"(?:^|\.)actor\.megatron\.(?:override_transformer_config\.)?(\w+)$")
HUGGING_FACE = re.compile(r"(?:^|\.)model\.override_config\.(?:model_config\.)?([\w.]+)$")
ROLE = re.compile(r"(?:^|\.)(ref|critic)\.megatron\.override_transformer_config\.(\w+)$")
OPTIONS = {"--config-name": "name", "-cn": "name", "--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path"}
# what holds either of them, as one value: `actor.megatron={...}`
HOLDS = re.compile(
    r"(?:^|\.)(?:(?:actor|ref|critic)(?:\.megatron(?:\.override_transformer_config)?)?|model(?:\.override_config(?:\.\w+)*)?|actor_rollout_ref)$"
)


@dataclass
class Overrides:
    """What overrides say: args of the actor's model, config.json's own values, and names of the former that nobody knows."""

    args: dict[str, Any] = field(default_factory=dict)
    said: dict[str, Where] = field(default_factory=dict)
    changed: dict[str, tuple[Any, Where]] = field(default_factory=dict)
    unknown: list[tuple[str, Where]] = field(default_factory=list)
    doubts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reference: dict[str, Any] = field(default_factory=dict)


def is_override(text: str) -> bool:
    """Whether a word is an override of a nested key."""
    return OVERRIDE.match(text) is not None


def shapes(words: Sequence[Word]) -> int:
    """How many words say something of the actor's model."""
    return sum(
        found is not None and any(one.search(found[2]) for one in (ACTOR, HUGGING_FACE, HOLDS))
        for found in (OVERRIDE.match(word.text) for word in words)
    )


def read_overrides(words: Sequence[Word]) -> Overrides:
    """Raises UsageError for a value that matters and is not known."""
    config: dict[str, Any] = {}
    where: dict[str, Where] = {}
    found = Overrides()
    of_the_model: set[str] = set()
    roles: dict[str, tuple[Any, Where]] = {}
    for word in words:
        match = OVERRIDE.match(word.text)
        if match is None:
            if word.unknown and word.text.startswith("$") and not word.unset:
                raise refuse(word.where, f"{word.text} may hold overrides, and its value is not known: {word.unknown}")
            continue
        for key, value in _keys(match, word):
            if (actor := ACTOR.search(key)) is not None:
                config.pop(actor[1], None)
                if match[1] != "~":
                    config[actor[1]], where[actor[1]] = value, word.where
                    if "override_transformer_config" in key:  # beside it stand verl's own settings
                        of_the_model.add(actor[1])
            elif (reference := HUGGING_FACE.search(key)) is not None:
                found.changed.pop(reference[1], None)
                if match[1] != "~":
                    found.changed[reference[1]] = value, word.where
            elif (role := ROLE.search(key)) is not None and role[1] == "ref":
                roles[role[2]] = value, word.where
            elif role is not None:
                found.notes.append(f"{word.where}: {key}={value} is said of another model than the actor's, which alone is judged")
    found.args, found.said = megatron_args(config, where)
    found.reference = megatron_args({name: value for name, (value, _) in roles.items()}, {name: at for name, (_, at) in roles.items()})[0]
    found.doubts = _own_config(words)
    alone = "activation_func" in config and "gated_linear_unit" not in config
    unread = [
        name
        for name in config
        if name in of_the_model and (name not in {*READS, *RENAMED, *LEFT_OUT} or (name == "activation_func" and alone))
    ]
    found.unknown = [(f"--{name.replace('_', '-')}", where[name]) for name in unread]
    return found


def _own_config(words: Sequence[Word]) -> list[tuple[str, str]]:
    """The user's own YAML that Hydra is pointed to, where it is beside the script or above it."""
    said: dict[str, Word] = {}
    for word, following in zip(words, [*words[1:], None], strict=True):
        name, equals, inline = word.text.partition("=")
        value = Word(inline, word.where, word.unknown) if equals else following
        if name in OPTIONS and value is not None:
            said[OPTIONS[name]] = value
    if "name" not in said:
        return []
    name = said["name"].text if said["name"].text.endswith((".yaml", ".yml")) else f"{said['name'].text}.yaml"
    folder = re.sub(r"^.*\}/?", "", said["path"].text) if "path" in said else ""
    roots = [*said["name"].where.file.absolute().parents][:4]
    if not any((root / folder / name).is_file() for root in roots):
        return []
    return [("Hydra's own config", f"{said['name'].where} names {posixpath.normpath(posixpath.join(folder, name))}, which is not read")]


def _keys(match: re.Match[str], word: Word) -> list[tuple[str, Any]]:
    """The keys that one word sets, those inside `{...}` each by itself; none where it says nothing of the actor's model."""
    key = match[2]
    if not any(one.search(key) for one in (ACTOR, HUGGING_FACE, HOLDS, ROLE)):
        return []
    if word.unknown:
        raise refuse(word.where, f"{word.text} is not known: {word.unknown}")
    return list(_flat(key, None if match[1] == "~" else _value(match[3], word)))


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inner in value.items():
        yield from _flat(f"{key}.{name}", inner)


def _value(text: str, word: Word) -> Any:
    """A value as Hydra reads it: YAML, in which `{a:b}` needs no blank."""
    try:
        return yaml.safe_load(re.sub(r"([{,]\s*\w+):(?=\S)", r"\1: ", text) if text.startswith("{") else text)
    except yaml.YAMLError:
        raise refuse(word.where, f"{word.text} has a value that is not YAML") from None
