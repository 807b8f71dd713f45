"""Are the ids those that the reference's tokenizer and template make of the prompt?  If not: which were added, which are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Protocol

from bisect_tool.rollouts.sample import Sample

# tokens on each side of a difference that are shown
CONTEXT = 4


class Tokens(Protocol):
    """What is asked of a tokenizer."""

    def ids(self, prompt: Any) -> list[int]: ...
    def text(self, ids: list[int]) -> str: ...
    def plain(self, text: str) -> list[int]: ...
    @property
    def begin(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Retokenised:
    """One prompt whose ids are other ones.  index: where they part · offset: how many more the engine has from there on

    rendered: whether a template wrote its prompt, as far as that can be seen
    bos: "doubled", "missing", "added" where that is all · added, missing: the ids · around: (expected, engine) as text
    """

    where: str
    index: int
    offset: int
    bos: str
    added: tuple[int, ...]
    missing: tuple[int, ...]
    around: tuple[str, str]
    expected: tuple[int, ...]
    rendered: bool = True

    @property
    def shifted(self) -> bool:
        """Whether ids were put in or left out; else some are others in place."""
        return self.offset != 0


def retokenised(sample: Sample, tokenizer: Tokens) -> Retokenised | None:
    """What is different, or None where nothing is or nothing can be told."""
    found = sample.tokens[: sample.start]
    begin = tokenizer.begin
    if sample.prompt is None or not sample.exact:
        if begin is not None and found[:2] == (begin, begin):
            return _difference(sample.where, found[1:], found, tokenizer, begin)
        return None
    expected = tuple(expected_ids(sample.prompt, tokenizer))
    if expected == found:
        return None
    rendered = not isinstance(sample.prompt, str) or tokenizer.plain(sample.prompt)[:1] == [begin]
    return replace(_difference(sample.where, expected, found, tokenizer, begin), rendered=rendered)


def expected_ids(prompt: Any, tokenizer: Tokens) -> list[int]:
    """Messages through the template; text as the tokenizer takes it, without a second BOS where the text brings its own."""
    if not isinstance(prompt, str):
        return tokenizer.ids(prompt)
    bare = tokenizer.plain(prompt)
    return bare if bare[:1] == [tokenizer.begin] else tokenizer.ids(prompt)


def _difference(where: str, expected: tuple[int, ...], found: tuple[int, ...], tokenizer: Tokens, begin: int | None) -> Retokenised:
    added: list[int] = []
    missing: list[int] = []
    index = -1
    for kind, a, b, c, d in SequenceMatcher(None, expected, found, autojunk=False).get_opcodes():
        if kind != "equal":
            index = c if index < 0 else index
            missing += expected[a:b]
            added += found[c:d]
    bos = ""
    if set(added + missing) == {begin} and (found[len(added) :] == expected or expected[len(missing) :] == found):
        bos = "missing" if missing else "doubled" if expected[:1] == (begin,) else "added"
        index = 0
    low = max(0, index - CONTEXT)
    around = tuple(tokenizer.text(list(ids[low : index + CONTEXT])) for ids in (expected, found))
    return Retokenised(where, index, len(found) - len(expected), bos, tuple(added), tuple(missing), (around[0], around[1]), expected)


def common(found: Sequence[Retokenised]) -> list[list[Retokenised]]:
    """Those with one cause together: the same change of BOS, or the same ids put in or left out."""
    groups: dict[tuple[Any, ...], list[Retokenised]] = {}
    for one in found:
        key = (one.bos,) if one.bos else ("template", tuple(sorted(Counter(one.added))), tuple(sorted(Counter(one.missing))))
        groups.setdefault(key, []).append(one)
    return sorted(groups.values(), key=len, reverse=True)
