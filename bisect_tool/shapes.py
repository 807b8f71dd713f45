"""The shape of an error over tokens, where that is the clue: which tokens are wrong says what was computed over the wrong ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bisect_tool.cuts import TokenCut
from bisect_tool.faults import span

# of what is said to be confined to a prompt's first tokens, at most this part of the prompt may be wrong
SHORT = 0.25
# tokens of a prompt from the first wrong one on from which one can tell whether an error grows
ENOUGH = 16
# so many tokens behind a boundary are named one by one, where those after them are right again
SPAN = 4
# so many scattered tokens are named one by one
FEW = 4
# and are said to be alone where they are further off than the rest by this factor
APART = 8.0
# a rank correlation of error and position from which an error is said to grow
GROWS = 0.5
# so many of the tokens that could be wrong are "nearly every" one
NEARLY = 0.9


@dataclass(frozen=True, slots=True)
class Shape:
    """kind is one of: everywhere, scattered, few, segments, start, last, span, from-token, grows, chunks, cp-ranks, chunk-ends, permuted.

    weights_are_right  tokens computed with the same weights in the same way are right, so no weight is at fault
    """

    kind: str
    text: str
    detail: dict[str, Any] = field(default_factory=dict)
    weights_are_right: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, **self.detail}


def token_errors(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Each token's difference [tokens f] in units of the typical token's size; infinite where one side alone is not finite."""
    r, c = (tensor.double().reshape(len(tensor), -1) for tensor in (reference, candidate))
    size = r.nan_to_num(0, 0, 0).square().sum(-1).mean().sqrt()
    off = (c - r).nan_to_num(0, 0, 0).square().sum(-1).sqrt()
    errors = torch.where(off == 0, off, off / size)
    return errors.masked_fill((r.isfinite() != c.isfinite()).any(-1), math.inf)


def shape_of(
    errors: torch.Tensor,
    allowed: float,
    lengths: Sequence[int],
    cut: TokenCut | None = None,
    *,
    rotation: bool = False,
    unit: str = "prompt",
) -> Shape:
    """What the tokens that are wrong (further off than `allowed`) have in common.  `lengths` are those of the prompts.

    rotation  the value is turned by an angle that goes with the position: an error that begins at the second token is one of that
              angle and grows with it, although what is measured of it is at its largest after half a turn
    unit      what one sequence is called: a prompt, or a segment of a packed batch
    """
    wrong = errors > allowed
    by_prompt = wrong.split(list(lengths))
    bad = [i for i, one in enumerate(by_prompt) if bool(one.any())]
    if not bad:
        return Shape("scattered", "no token by itself is off by more than is allowed")
    ranks = _by_rank(wrong, by_prompt, cut, unit)
    if ranks is not None:
        return ranks
    inside = _inside(errors, bad, wrong, lengths, rotation, unit)
    # a prompt that ends before the first wrong position of the others could not show it
    first = min(int(by_prompt[i].nonzero()[0]) for i in bad)
    clean = [i for i, length in enumerate(lengths) if i not in bad and length > first]
    after = bool(clean) and min(bad) > max(clean)
    return _of_prompts(bad, inside, unit) if clean and (after or inside.kind == "everywhere") else inside


def permutation_of(reference: torch.Tensor, candidate: torch.Tensor, wrong: torch.Tensor, allowed: float) -> list[int] | None:
    """Where every token is right but stands elsewhere: the token that each one holds.  None where that is not so.

    Tokens that say the same are interchangeable; the first one that is free is taken.
    """
    tokens = wrong.nonzero().flatten().tolist()
    if len(tokens) < 2 or len(tokens) > MOST_PERMUTED:
        return None
    r, c = reference.double()[tokens], candidate.double()[tokens]
    distance = torch.cdist(c, r)
    near = distance <= allowed * reference.double().square().sum(-1).mean().sqrt()
    free = torch.ones(len(tokens), dtype=torch.bool)
    held = list(range(len(wrong)))
    for i, token in enumerate(tokens):
        found = (near[i] & free).nonzero().flatten()
        if not len(found):
            return None
        free[found[0]] = False
        held[token] = tokens[int(found[0])]
    return held


MOST_PERMUTED = 4096


def _of_prompts(bad: Sequence[int], inside: Shape, unit: str) -> Shape:
    what = f"only in {unit}{'s' if len(bad) > 1 else ''} {span(list(bad))}"
    more = "" if inside.kind in ("everywhere", "scattered", "few") else f", there {inside.text}"
    fades = f", {inside.detail['fades']}" if "fades" in inside.detail else ""
    return Shape("segments", what + more + fades, {"segments": list(bad), "inside": inside.to_json()}, weights_are_right=True)


def _inside(every: torch.Tensor, bad: Sequence[int], wrong: torch.Tensor, lengths: Sequence[int], rotation: bool, unit: str) -> Shape:
    """The shape within prompts, which is the same in each of them; one of a single token has none."""
    errors = every.masked_fill(~wrong, 0)
    bad = [i for i in bad if lengths[i] > 1] or bad
    parts = {i: one for i, one in enumerate(wrong.split(list(lengths))) if i in bad}
    # an error that begins late and stays as large does not grow: what counts is what it does from its first token on
    sizes = [one[int(parts[i].nonzero()[0]) :] for i, one in enumerate(errors.split(list(lengths))) if i in bad]
    firsts = {int(one.nonzero()[0]) for one in parts.values()}
    lasts = {i: int(one.nonzero()[-1]) for i, one in parts.items()}
    reach = max(lasts.values()) + 1
    clean = [length for i, length in enumerate(lengths) if i not in bad]
    start = min(firsts)
    if start <= 1 and all(reach <= SHORT * lengths[i] for i in bad):
        text = f"only in the first {reach} token{'s' if reach > 1 else ''} of a {unit}" if reach > 1 else "only in the first token"
        return Shape("start", text, {"tokens": reach}, weights_are_right=True)
    several = sum(length > 1 for length in lengths) > 1
    if (
        several
        and len(bad) == sum(length > 1 for length in lengths)
        and all(int(one.nonzero()[0]) == len(one) - 1 for one in parts.values())
    ):
        return Shape("last", f"only at the last token of each {unit}", {"tokens": len(bad)}, weights_are_right=True)
    if start > 1 and len(firsts) == 1 and all(length <= start for length in clean):
        last = max(lasts.values())
        if last < min(start + SPAN, *(lengths[i] - 1 for i in bad)):
            text = f"only at token {start}" if last == start else f"only at tokens {start} to {last}"
            return Shape("span", text, {"token": start, "last": last}, weights_are_right=True)
        return Shape("from-token", f"starts at token {start}", {"token": start}, weights_are_right=True)
    growth = min((_growth(one) for one in sizes if len(one) >= ENOUGH), default=0.0)
    if (start == 1 and rotation) or growth > GROWS:
        zero = ", zero at position 0" if start >= 1 else ""
        return Shape("grows", f"grows with position{zero}", {"from": start})
    behind = [one[1:] for one in parts.values()]
    if firsts == {1} and max(clean, default=1) == 1 and sum(int(one.sum()) for one in behind) > NEARLY * sum(map(len, behind)):
        # no proof that weights are right: those of what looks back meet nothing at the first token
        return Shape("from-token", f"from the second token of each {unit} on, none at the first", {"token": 1})
    share = sum(int(one.sum()) for one in parts.values()) / sum(len(one) for one in parts.values())
    detail: dict[str, Any] = {"tokens": int(wrong.sum()), "of": len(wrong)}
    if growth < -GROWS and start == 0:
        detail["fades"] = "strongest at their start and fading"
    if share > NEARLY:
        return Shape("everywhere", "on nearly every token", detail)
    if int(wrong.sum()) > FEW or len(wrong) <= 2 * FEW:
        return Shape("scattered", f"on {int(wrong.sum())} of {len(wrong)} tokens", detail)
    places = [(i, one.nonzero().flatten().tolist()) for i, one in enumerate(wrong.split(list(lengths))) if bool(one.any())]
    text = f"on {int(wrong.sum())} of {len(wrong)} tokens: {'; '.join(f'{unit} {i}, token {span(at)}' for i, at in places)}"
    # the others may be off by the same weights and less than is allowed
    apart = float(every[~wrong].max()) < float(every[wrong].min()) / APART
    return Shape("few", text, detail | {"at": [[i, at] for i, at in places]}, weights_are_right=apart)


def _growth(errors: torch.Tensor) -> float:
    """The rank correlation of error and position."""
    _, which, count = errors.unique(return_inverse=True, return_counts=True)
    if len(count) == 1:
        return 0.0
    ranks = (count.cumsum(0) - (count + 1) / 2)[which].double()  # equal errors share a rank
    places = torch.arange(len(errors), dtype=torch.float64)
    return float(torch.corrcoef(torch.stack([ranks, places]))[0, 1])


def _by_rank(wrong: torch.Tensor, by_prompt: Sequence[torch.Tensor], cut: TokenCut | None, unit: str) -> Shape | None:
    """What only the cut over ranks explains: whole chunks of context parallel, one rank's tokens, the ends of chunks."""
    if cut is None or bool(wrong.all()):
        return None
    tokens = wrong.nonzero().flatten()
    if bool(cut.edge[tokens].all()) and not bool(cut.edge.all()) and len(tokens) > 1:
        return Shape("chunk-ends", "only at the ends of TP chunks", {"tokens": len(tokens)}, weights_are_right=True)
    ranks, every = sorted(set(cut.cp[tokens].tolist())), sorted(set(cut.cp.tolist()))
    if ranks != every:
        return Shape("cp-ranks", f"only on tokens of CP rank {span(ranks)}", {"cp": ranks}, weights_are_right=True)
    chunks = int(cut.chunk.max()) + 1
    bad, found = [], set()
    for i, (one, chunk) in enumerate(zip(by_prompt, cut.chunk.split([len(one) for one in by_prompt]), strict=True)):
        if not bool(one.any()) or len(one) < chunks:
            continue
        bad.append(i)
        held = {int(c) for c in chunk[one]}
        whole = {c for c in held if int(one[chunk == c].sum()) >= 0.9 * int((chunk == c).sum())}
        if held != whole or held == set(range(chunks)):
            return None
        found |= held
    if not bad or len(every) == 1:
        return None
    where = f" of {unit}{'s' if len(bad) > 1 else ''} {span(bad)}" if len(by_prompt) > 1 else ""
    text = f"in chunks {span(sorted(found))} of the {chunks} that CP cuts{where or ' the sequence'}, and in no other"
    return Shape("chunks", text, {"chunks": sorted(found), "of": chunks, "segments": bad}, weights_are_right=True)
