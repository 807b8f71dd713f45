"""What the reference says of the same ids: teacher-forced log-probs, their entropy, and as many whole distributions as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bisect_tool.prompts import Batch
from bisect_tool.rollouts.sample import Sample

# bytes of logits that one forward may make, and that are kept to try hypotheses on
AT_ONCE = 1 << 28
ROWS_KEPT = 1 << 29


class Model(Protocol):
    """What is asked of a reference, and of a candidate."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Scored:
    """What the reference says of each token of a sample, in the order of its ids; the first token has no log-prob (NaN).

    logs, entropy, spread [tokens]   log-prob of the token; mean and variance of -log p under the distribution it was drawn from
    logits [response, vocabulary]    of the distributions that the response was drawn from, where they were kept
    """

    logs: torch.Tensor
    entropy: torch.Tensor
    spread: torch.Tensor
    logits: torch.Tensor | None


def score(model: Model, samples: Sequence[Sample], vocabulary: int, progress: Callable[[str], None] = lambda _text: None) -> list[Scored]:
    """The reference's view of every sample, in their order."""
    found: list[Scored | None] = [None] * len(samples)
    kept = 0
    for group in _batches(samples, AT_ONCE // (4 * vocabulary)):
        batch = Batch(tuple(samples[i].tokens for i in group))
        logits = model.forward(batch.ids(), batch.mask())
        for row, i in enumerate(group):
            sample = samples[i]
            own = logits[row, : len(sample.tokens) - 1, :vocabulary].float().cpu()  # rows that only pad it are nobody's
            size = sample.length * own.shape[1] * 4
            found[i] = _scored(sample, own, keep=kept + size <= ROWS_KEPT)
            kept += size if kept + size <= ROWS_KEPT else 0
        progress(f"engine: {sum(one is not None for one in found)} of {len(samples)} responses scored")
    return [one for one in found if one is not None]


def _scored(sample: Sample, logits: torch.Tensor, *, keep: bool) -> Scored:
    logs, entropy, spread = (torch.full((len(sample.tokens),), torch.nan, dtype=torch.float64) for _ in range(3))
    ids = torch.tensor(sample.tokens[1:])
    for start in range(0, len(ids), 512):
        rows = logits[start : start + 512].double().log_softmax(-1)
        at = slice(start + 1, start + 1 + len(rows))
        logs[at] = rows.gather(1, ids[start : start + 512, None])[:, 0]
        mean = -(rows.exp() * rows).nan_to_num(0.0).sum(-1)
        entropy[at] = mean
        spread[at] = (rows.exp() * (rows + mean[:, None]) ** 2).nan_to_num(0.0).sum(-1)
    return Scored(logs, entropy, spread, logits[sample.start - 1 :].clone() if keep else None)


def _batches(samples: Sequence[Sample], tokens: int) -> Iterator[list[int]]:
    """Samples of like length together, so that little is padding; at most about `tokens` of them at once."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * len(samples[i].tokens) > tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
