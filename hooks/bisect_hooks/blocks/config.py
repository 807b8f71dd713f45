"""Reading config.json so that what was not understood can be listed.

Whoever reads a key has understood it.  A key that nobody read, that is not known to leave the function alone, and that is not
switched off, may be a new attention or another norm: the family is refused with all of them, not run without them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bisect_hooks.errors import UsageError

NEEDED = object()

# names that say nothing of what the text model computes: tokens, training, storage, serving
INERT = re.compile(
    r"_.*|.*_token_id|.*_token_index|.*dropout.*|.*initializer.*|output_(router_logits|hidden_states|attentions)|.*router_aux_loss.*|.*dtype|architectures|model_type|"
    r"transformers.*|use_cache|pretraining_tp|max_window_layers|language_model_only|vision_config|text_config|tokenizer_class|"
    r"is_llama_config|auto_map|bos|eos|chunk_size_feed_forward|return_dict|problem_type|id2label|label2id|cache_implementation"
)


@dataclass(frozen=True, slots=True)
class Key:
    """A value that config.json says under `name`, or `also`; `default` is transformers' own where the file does not say it."""

    name: str
    default: Any = NEEDED
    also: str = ""


class Config:
    """The text part of one config.json."""

    def __init__(self, page: Mapping[str, Any], family: str) -> None:
        self.page, self.family = page, family
        self.text: Mapping[str, Any] = page.get("text_config", page)
        self.read = {"tie_word_embeddings"}
        self.unknown: list[str] = []

    def get(self, one: Any) -> Any:
        """What the file says for a Key; a constant of the family as it is.  Raises UsageError for a needed key that is not there."""
        if not isinstance(one, Key):
            return one
        self.read |= {one.name, one.also}
        value = self.text.get(one.name, self.text.get(one.also))
        if value is None and one.default is NEEDED:
            raise UsageError(f"config.json has no {one.name!r}, which {self.family} needs")
        return one.default if value is None else value

    def where(self, one: Any) -> str | None:
        """The name under which the file says a Key, or could; None for a constant of the family."""
        return next((name for name in (one.name, one.also) if name in self.text), one.name) if isinstance(one, Key) else None

    def number(self, one: Any) -> int:
        """A whole number.  Raises UsageError."""
        value = self.get(one)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"config.json says {one.name if isinstance(one, Key) else 'a size'} {value!r}, which is no whole number")
        return value

    def only(self, name: str, *known: Any) -> None:
        """A key of which this family knows these values; any other is not understood."""
        value = self.get(Key(name, None))
        if value is not None and value not in known:
            self.not_understood(name, value)

    def not_understood(self, name: str, value: Any) -> None:
        self.unknown.append(f"{name} = {value!r}")

    @property
    def tied(self) -> bool:
        return bool(self.page.get("tie_word_embeddings", self.text.get("tie_word_embeddings", False)))

    def not_known(self) -> list[str]:
        """Every key that this family did not understand, with its value."""
        rest = [name for name, value in self.text.items() if value and name not in self.read and not INERT.fullmatch(name)]
        return [*self.unknown, *(f"{name} = {_short(self.text[name])}" for name in sorted(rest))]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
