"""Is a Recording what it says it is?  Its inputs, its replicas, rows that nobody wrote, and one tensor that it holds twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from bisect_hooks.site import Site, parse_site
from bisect_hooks.tap import split_key

from bisect_tool.align import Mismatch
from bisect_tool.faults import Finding, counted, verb
from bisect_tool.flow import site_name, word
from bisect_tool.free import Free, FreeRun
from bisect_tool.judge import Verdict, judge
from bisect_tool.measure import measure
from bisect_tool.recording import Recording
from bisect_tool.shards import Shard


def heard_otherwise(*recordings: Recording) -> Mismatch | None:
    """Recordings whose embedding saw other ids than those that they were asked for."""
    for recording in recordings:
        if "tokens" not in recording:
            continue
        asked = torch.tensor([token for row in recording.provenance.rows for token in row])
        heard = recording["tokens"].double().reshape(len(asked), -1)
        wrong = (heard != asked[:, None]).any(-1).nonzero().flatten()
        if len(wrong):
            row, at = recording.batch.where(int(wrong[0]))
            seen, told = f"{float(heard[wrong[0], 0]):.15g}", int(asked[wrong[0]])
            return Mismatch(
                f"the embedding of {recording.path} saw other ids than its rows hold, at {counted(len(wrong), 'token', of=len(asked))}: first "
                f"at row {row}, position {at}, {seen} for {told}",
                "Record again: what the rows say was not what the model was given. Nothing after this can be compared.",
            )
    return None


@dataclass(frozen=True)
class Capture:
    """A candidate's Recording, looked at for what is no model's doing.  shard  the coordinates of a site"""

    reference: Recording
    candidate: Recording
    run: FreeRun
    shard: Callable[[Site], Shard]

    def finding(self, found: Free) -> Finding | None:
        return self._replicas() or self._held_twice(found) or self._unwritten(found)

    def _named(self, site: Site, found: Free) -> Site:
        """A layer's output is its MLP's, where anything else of the layer was recorded."""
        return Site("mlp", site.layer) if site.module == "output" and f"layers.{site.layer}.pre_mlp_norm" in found.level else site

    def _held_twice(self, found: Free) -> Finding | None:
        """A layer's output that differs while the next layer's input, the same tensor, does not."""
        for key, one in found.judged.items():
            site = parse_site(split_key(key)[0])
            again = f"layers.{(site.layer or 0) + 1}.input"
            if site.module != "output" or one.verdict is not Verdict.DIFFERS or again not in found.judged:
                continue
            own = measure(self.run.pair(again)[1], self.run.pair(key)[1])
            if found.judged[again].verdict is not Verdict.AGREES or judge(own, one.tolerance) is Verdict.AGREES:
                continue
            text = f"Capture fault at {site}: what was recorded of it differs, and what was recorded of {again} agrees. They are one tensor, so the recording is wrong and not the model."
            do = "Look at what was written to the recording at this site, and when: a buffer that is used again, a hook that changes what it hears."
            where = self._named(site, found)
            return Finding(
                "capture", where, self.shard(site), difference=one.difference, tolerance=one.tolerance, explanation=text, next=do
            )
        return None

    def _replicas(self) -> Finding | None:
        """Ranks that should hold the same and do not, in compute order."""
        for key in self.candidate.keys:
            relative = self.candidate.provenance.replica_difference.get(key, 0.0)
            if key not in self.reference or relative <= self.run.tolerance(key).relative_rms:
                continue
            site = parse_site(split_key(key)[0])
            text = f"Capture fault at {site}: ranks that should hold the same differ by {relative:.2g} relative rms, so no value there is the candidate's."
            do = "Look at the reduction or the broadcast before this site, and at whether every rank recorded the same forward."
            return Finding("capture", site, self.shard(site), tolerance=self.run.tolerance(key), explanation=text, next=do)
        return None

    def _unwritten(self, found: Free) -> Finding | None:
        """Rows that hold nothing, one value, or what was never made of their inputs, where what is computed from them does not show it."""
        for key, rows in (found.garbage | found.strange).items():
            site, name = parse_site(split_key(key)[0]), site_name(key)
            before = self.run.sources(site, found)
            rows = rows & ~_any_of(rows, [other for other in found.garbage if site_name(other) in before], found.garbage)
            if key in found.strange and not self._not_made_there(site, rows, before, found):
                continue
            behind = [other for other in found.judged if name in self.run.sources(parse_site(split_key(other)[0]), found)]
            if not bool(rows.any()) or any(self._wrong(other, rows) for other in behind):
                continue
            if not behind and bool(rows.all()):
                continue  # with nothing behind it, only rows that are right clear the weights
            tokens = rows.nonzero().flatten().tolist()
            where, count = self._rows_of(tokens), len(tokens)
            difference = measure(*self.run.pair(key))
            held, so = (
                ("nothing to do with what enters", "another row's values, or nobody wrote there")
                if key in found.strange
                else ("no numbers or one value throughout", "nobody wrote there")
            )
            shown = "what follows does not show it" if behind else "what enters agrees"
            text = f"Capture fault at {site}: {counted(count, 'row', of=len(rows))} ({where}) {verb(count, 'has', 'have')} {held}, and {shown}: {so}."
            do = "Look at what fills the rows of cached or padded positions; record with the prefix cache off."
            shape = {"kind": "unwritten", "text": where, "tokens": tokens[:64]}
            return Finding(
                "capture",
                self._named(site, found),
                self.shard(site),
                difference=difference,
                tolerance=self.run.tolerance(key),
                explanation=text,
                next=do,
                shape=shape,
            )
        return None

    def _not_made_there(self, site: Site, rows: torch.Tensor, before: set[str], found: Free) -> bool:
        """Whether rows can't have come out of their site: what enters agrees, and what follows too; a head is the same for every row."""
        entered = [key for key in found.judged if site_name(key) in before and key in self.candidate]
        if word(site) == "attention.rope":
            return False  # a whole segment turned further gives the same attention
        followed = any(str(site) in self.run.sources(parse_site(name), found) for name in found.level)
        return (
            bool(rows.any())
            and bool(entered)
            and (followed or site.module == "lm_head")
            and not any(self._wrong(key, rows) for key in entered)
        )

    def _wrong(self, key: str, rows: torch.Tensor) -> bool:
        reference, candidate = self.run.pair(key)
        difference = measure(reference[rows], candidate[rows])
        return judge(difference, self.run.tolerance(key)) is not Verdict.AGREES

    def _rows_of(self, tokens: list[int]) -> str:
        places: dict[int, list[int]] = {}
        for token in tokens:
            row, at = self.reference.batch.where(token)
            places.setdefault(row, []).append(at)
        return "; ".join(f"row {row}, position{'s' if len(at) > 1 else ''} {runs(at)}" for row, at in list(places.items())[:3]) + (
            " .." if len(places) > 3 else ""
        )


def runs(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0 to 2, 5"; of many runs the first ones."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    shown = [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(shown[:4]) + (" .." if len(shown) > 4 else "")


def _any_of(rows: torch.Tensor, keys: list[str], garbage: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([garbage[key] for key in keys]).any(0) if keys else torch.zeros_like(rows)
