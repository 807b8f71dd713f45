"""Parallel sizes against a model: what divides what, and which kind of layer each pipeline stage begins with.

A size that does not divide is a fault of the layout: the same model on one rank is fine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bisect_hooks.blocks.args import Args
from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout, Dimensions
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site

from bisect_tool.args import SIZES, parallel_of
from bisect_tool.faults import Finding, Proof, Relation, span
from bisect_tool.shards import shard_of

FLAGS = {axis: "--" + name.replace("_", "-") for axis, name in SIZES.items()}


@dataclass
class Fit:
    """How a layout fits: findings, one line a person reads, and the layout (one rank where its stages can't be told)."""

    parallel: Parallel = field(default_factory=Parallel)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def fit(args: Mapping[str, Any], dims: Dimensions, layout: CheckpointLayout) -> Fit:
    """The layout that args ask for.  Sizes that are not given are 1, expert tensor parallel that of tensor parallel."""
    if all(args.get(name) is None for name in SIZES.values()):
        return Fit()
    found = Fit()
    read = Args(args)
    sizes = {axis: read.number(name, 1) for axis, name in SIZES.items()}
    sizes["etp"] = read.number(SIZES["etp"], sizes["tp"])
    small = next((axis for axis, size in sizes.items() if size < 1), None)
    if small is not None:
        raise UsageError(f"{FLAGS[small]} is {sizes[small]}: a size is at least 1")
    uneven: dict[str, list[tuple[str, int, tuple[Site, ...]]]] = {}
    for what, count, axis, sites in _counts(dims, layout):
        if count and count % sizes[axis] and not (what == "KV heads" and sizes[axis] % count == 0):
            uneven.setdefault(axis, []).append((what, count, sites))
    for axis, counts in uneven.items():
        found.findings += _findings(counts, axis, sizes[axis])
    try:
        found.parallel = _laid_out(args, dims)
    except UsageError as error:
        sites = tuple(Site("input_norm", n) for n in range(dims.layers))
        found.findings += _findings([("layers", dims.layers, sites)], "pp", sizes["pp"], error.message)
    found.notes += _notes(sizes, dims, found.parallel, args)
    _world(args, sizes, found)
    return found


def _counts(dims: Dimensions, layout: CheckpointLayout) -> list[tuple[str, int, str, tuple[Site, ...]]]:
    """(what, how many, the axis that divides it, where it matters)."""
    layers = range(dims.layers)
    full = [n for n in layers if dims.kinds[n] == "attention"]
    linear = [n for n in layers if dims.kinds[n] == "linear_attention"]
    moe, dense = [n for n in layers if dims.moe[n]], [n for n in layers if not dims.moe[n]]

    def at(numbers: Sequence[int], module: str, part: str) -> tuple[Site, ...]:
        return tuple(Site(module, n, part) for n in numbers)

    return [
        ("attention heads", dims.heads, "tp", at(full, "attention", "qkv")),
        ("KV heads", dims.groups, "tp", at(full, "attention", "qkv")),
        ("linear attention key heads", dims.key_heads if layout == "native" else 0, "tp", at(linear, "linear_attention", "in_proj")),
        ("rows of the dense MLP", dims.dense if dense else 0, "tp", at(dense, "mlp", "fc1")),
        ("experts", dims.experts, "ep", at(moe, "experts", "dispatch")),
        ("rows of an expert", dims.routed if moe else 0, "etp", at(moe, "experts", "fc1")),
        ("rows of the shared expert", dims.shared, "tp", at(moe, "shared_expert", "fc1")),
    ]


def _findings(counts: Sequence[tuple[str, int, tuple[Site, ...]]], axis: str, size: int, why: str = "") -> list[Finding]:
    """One fault a flag: everything that its size does not divide."""
    flag, named = FLAGS[axis], " and ".join(f"{count} {what}" for what, count, _ in counts)
    relation = Relation("config", {"flag": flag, "value": size, "expected": f"a divisor of {named}"})
    text = f"Parallel fault: {why or f'{named} do not divide by {flag} {size}'}; Megatron refuses such a layout, or cuts it wrongly."
    common = math.gcd(*(count for _, count, _ in counts))
    near = min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: abs(n - size))
    proof = Proof(f"give {flag} a divisor of {common}", None, None, "the same model on one rank")
    do = f"Give {flag} {near}, or another divisor of {common}."
    return [
        Finding(
            "parallel",
            site,
            shard_of(site, Parallel(), "unknown", site.layer + 1 if site.layer is not None else 1),
            relation=relation,
            proof=proof,
            explanation=text,
            next=do,
        )
        for _, _, sites in counts
        for site in sites
    ]


def _laid_out(args: Mapping[str, Any], dims: Dimensions) -> Parallel:
    """The args as a Parallel.  Raises UsageError for stages that don't hold the layers."""
    given = {SIZES["tp"]: 1, SIZES["pp"]: 1, **{name: value for name, value in args.items() if value is not None}}
    pp = int(given[SIZES["pp"]])
    chunk = args.get("num_layers_per_virtual_pipeline_stage")
    stages = args.get("num_virtual_stages_per_pipeline_rank") or (
        dims.layers // pp // int(chunk) if chunk and dims.layers // pp >= int(chunk) else None
    )
    if stages:
        given["virtual_pipeline_model_parallel_size"] = int(stages)
    ends = sum(bool(args.get(f"account_for_{name}_in_pipeline_split")) for name in ("embedding", "loss"))
    if ends and pp > 1:
        if (dims.layers + ends) % pp:
            raise UsageError(f"{dims.layers} layers and {ends} more for the embedding or the loss do not divide by --pp {pp}")
        each = (dims.layers + ends) // pp
        first = each - bool(args.get("account_for_embedding_in_pipeline_split"))
        given |= {
            "decoder_first_pipeline_num_layers": first,
            "decoder_last_pipeline_num_layers": each - bool(args.get("account_for_loss_in_pipeline_split")),
        }
    parallel = parallel_of(given, dims.layers) or Parallel()
    parallel.chunk_sizes(dims.layers)
    return parallel


def _notes(sizes: Mapping[str, int], dims: Dimensions, parallel: Parallel, args: Mapping[str, Any]) -> list[str]:
    said = []
    tp, ep, etp = sizes["tp"], sizes["ep"], sizes["etp"]
    if tp > 1 and dims.heads % tp == 0:
        heads = dims.groups // tp if dims.groups >= tp else 1
        said.append(f"TP {tp}: {dims.heads // tp} heads and {heads} KV head{'s' * (heads > 1)} a rank")
    if ep > 1 and dims.experts % ep == 0:
        said.append(f"EP {ep}: {dims.experts // ep} experts a rank" + (f", each cut by ETP {etp}" if etp > 1 else ""))
    notes = [", ".join(said)] if said else []
    if dims.groups < tp and tp % dims.groups == 0:
        gate = (
            " With the output gate it needs Megatron-LM#3575: before it the gate is not cut as the queries are (A01), on TP ranks beyond the first."
            if dims.output_gate
            else ""
        )
        notes.append(f"TP {tp} is more than the {dims.groups} KV heads: each is held by {tp // dims.groups} ranks.{gate}")
    if args.get("pipeline_model_parallel_layout"):
        return [*notes, f"the stages of --pipeline-model-parallel-layout {args['pipeline_model_parallel_layout']} are not read"]
    return notes + _stages(dims, parallel)


def _stages(dims: Dimensions, parallel: Parallel) -> list[str]:
    """What each stage begins with: where a wrong offset would also change the kind of a layer."""
    chunks = parallel.chunk_sizes(dims.layers)
    if len(chunks) < 2:
        return []
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    sizes = f"{chunks[0]} layers each" if len(set(chunks)) == 1 else f"{', '.join(map(str, chunks))} layers"
    virtual = f" x VPP {parallel.vpp}" if parallel.vpp > 1 else ""
    text = f"PP {parallel.pp}{virtual}: {sizes}, beginning at layers {span(starts)}"
    if len(set(dims.kinds)) > 1:
        period = next(
            (n for n in range(1, dims.layers) if all(dims.kinds[i] == dims.kinds[i % n] for i in range(dims.layers))), dims.layers
        )
        shown = ", ".join(dims.kinds[start].replace("_", " ") for start in starts)
        uneven = any(size % period for size in chunks)
        text += f" ({shown})" if len(set(dims.kinds[start] for start in starts)) > 1 else f" ({dims.kinds[0].replace('_', ' ')} all)"
        if uneven:
            text += f"; not all multiples of the period {period}, so a wrong layer offset would also change layer kinds"
    return [text]


def _world(args: Mapping[str, Any], sizes: Mapping[str, int], found: Fit) -> None:
    """The ranks that the launch starts, where it says how many."""
    nodes, each = args.get("actor_num_nodes"), args.get("actor_num_gpus_per_node")
    if not nodes or not each:
        return
    world = int(nodes) * int(each)
    model, expert = sizes["tp"] * sizes["cp"] * sizes["pp"], sizes["ep"] * sizes["etp"] * sizes["pp"]
    for size, what in ((model, "TP x CP x PP"), (expert, "EP x ETP x PP")):
        if world % size:
            relation = Relation(
                "config", {"flag": "--actor-num-nodes", "value": int(nodes), "expected": f"ranks that {what} = {size} divides"}
            )
            text = f"Parallel fault: {nodes} nodes of {each} are {world} ranks, and {what} = {size} does not divide them."
            site = Site("tokens")
            shard = shard_of(site, Parallel(), "unknown", 1)
            proof = Proof(f"start a multiple of {size} ranks", None, None, "the same model on one rank")
            found.findings.append(
                Finding(
                    "parallel", site, shard, relation=relation, proof=proof, explanation=text, next=f"Start a multiple of {size} ranks."
                )
            )
            return
    found.notes.append(f"{world} ranks: DP {world // model}, expert DP {world // expert}")
