"""A located drift as a finding whose class is still open: its numbers, and which tokens have it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from bisect_hooks.site import Site, parse_site
from bisect_hooks.tap import split_key

from bisect_tool.cuts import token_cut
from bisect_tool.faults import Finding
from bisect_tool.flow import word
from bisect_tool.forward import Bench, Judged, Located
from bisect_tool.judge import Verdict
from bisect_tool.shapes import shape_of, token_errors


def to_finding(bench: Bench, located: Located, site: Site) -> Finding:
    """A located site as a finding whose class is still open."""
    one = located.sites[site]
    named = site
    if site.part == "decay":
        key = f"layers.{site.layer}.linear_attention.decay"
        result = next(result for result in located.passes if result.judged[key].verdict is Verdict.DIFFERS)
        named = replace(site, part=decay_part(result.values[key]))
    elif site.module == "output":
        named = replace(site, module="mlp")
    tolerance = replace(one.tolerance, source=f"{one.tolerance.source}; {one.tripped}") if one.tripped else one.tolerance
    return Finding(
        None, named, located.shards[site], difference=one.difference, tolerance=tolerance, tripped=one.tripped,
        piece=split_key(one.key)[1], shape=_shape(bench, located, one), evidence=_how_many(located, one) if site.part == "topk" else "",
    )  # fmt: skip


def _how_many(located: Located, one: Judged) -> str:
    """How many experts a token are chosen, where that is not as many as the rule chooses."""
    rule, own = (value.sum(-1) for value in next(result.values[one.key] for result in located.passes if result.judged.get(one.key) is one))
    if bool((rule == own).all()):
        return ""
    counts = " to ".join(str(int(n)) for n in dict.fromkeys((float(own.min()), float(own.max()))))
    return f"It chooses {counts} experts a token where the reference chooses {int(rule[0])}."


def _shape(bench: Bench, located: Located, one: Judged) -> dict[str, Any] | None:
    """Which tokens are wrong, where that is a clue; None where it is nearly all of them, or where they are not compared one by one."""
    values = next(result.values.get(one.key) for result in located.passes if result.judged.get(one.key) is one)
    rows = bench.recording.provenance.rows
    if values is None or one.key.endswith(".topk") or len(values[0]) != sum(map(len, rows)):
        return None
    parallel = bench.run.parallel.shown() | {"sp": bench.run.parallel.sp}
    cut = token_cut(replace(bench.recording.provenance, parallel=parallel))
    rotation = word(parse_site(split_key(one.key)[0])) == "attention.rope"
    found = shape_of(token_errors(*values), one.tolerance.relative_rms, [len(row) for row in rows], cut, rotation=rotation)
    return None if found.kind in ("everywhere", "scattered") else found.to_json()


def decay_part(pair: tuple[torch.Tensor, torch.Tensor]) -> str:
    """a_log where the ratio of decay is constant over tokens for each head, else dt_bias; decay where it can't be told."""
    reference, candidate = (tensor.double() for tensor in pair)
    if reference.shape[0] < 3 or bool((reference == 0).any()):
        return "decay"
    ratio = candidate / reference
    spread = (ratio.std(0) / ratio.mean(0).abs().clamp_min(1e-30)).max().item()
    return "a_log" if spread < 1e-4 else "dt_bias"
