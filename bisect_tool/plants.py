"""The catalogue of plants: faults that really happened, as edits of a good checkpoint.

Three carriers.  `weights` and `args` change files in the copy; `code` writes patch.py into it, which runs only when
`run --candidate-patch` names it.  A plant asks for what it needs (tensors, sizes, args) and is refused where a model has none.
Searching and judging never read where or what was planted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import Dimensions, Family
from bisect_hooks.parallel import Parallel
from bisect_hooks.table import GroupHeads

from bisect_tool.checkpoint import Checkpoint


@dataclass(slots=True)
class Copy:
    """A copy of a checkpoint that is being edited."""

    checkpoint: Checkpoint
    family: Family
    dims: Dimensions
    parallel: Parallel
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    args: dict[str, Any] = field(default_factory=dict)
    patch: str = ""

    def read(self, key: str) -> torch.Tensor:
        return self.checkpoint.read(key)

    def has(self, end: str) -> list[str]:
        """Keys of the decoder's layers with this end, by layer."""
        return [key for n in range(self.dims.layers) if (key := f"decoder.layers.{n}.{end}") in self.checkpoint.tensors]

    def keys(self, *ends: str) -> list[str]:
        """The same for the first of `ends` that there is.  Raises UsageError when there is none."""
        for end in ends:
            if found := self.has(end):
                return found
        raise UsageError(
            f"{self.checkpoint.path} has no decoder.layers.*.{ends[-1]}: "
            f"this fault can't be planted in this model, or not in the {self.checkpoint.layout} layout"
        )

    def set(self, name: str, value: Any) -> None:
        """Changes one of the args.  Raises UsageError where it is so already."""
        if (self.args | self.checkpoint.args).get(name) == value:
            raise UsageError(f"{name} is {value} in {self.checkpoint.path} already: this fault would change nothing")
        self.args[name] = value


@dataclass(frozen=True, slots=True)
class Plant:
    """One fault of the catalogue.  needs  the axis that has to be larger than 1 for the fault to exist"""

    id: str
    carrier: str
    what: str
    edit: Callable[[Copy], None]
    needs: str = ""


EXPERTS = ("mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight")
GATED_MLP = ("mlp.shared_experts.linear_fc1.weight", "mlp.linear_fc1.weight")


def map_experts(copy: Copy, source: Callable[[int, int], int]) -> None:
    """Expert e becomes expert source(e, experts a rank)."""
    width = copy.dims.experts // copy.parallel.ep
    for end in EXPERTS:
        for key in copy.keys(end):
            copy.changed[key] = copy.read(key)[[source(e, width) for e in range(copy.dims.experts)]]


def expert_from_local_number(copy: Copy) -> None:
    """E01: the expert slice is taken with the EP-local number."""
    map_experts(copy, lambda e, width: e % width)


def one_expert_a_rank(copy: Copy) -> None:
    """E08: the expert's number is lost, so that a rank's experts are all its first."""
    map_experts(copy, lambda e, width: e - e % width)


def gate_not_regrouped(copy: Copy) -> None:
    """Hugging Face's [query, gate] a head, taken over as it is, where Megatron wants a group's queries before its gates."""
    dims = copy.dims
    if not dims.output_gate:
        raise UsageError("this model's attention has no output gate")
    heads = GroupHeads(dims.groups, dims.heads, dims.head_width, True)
    for key in copy.keys("self_attention.linear_qkv.weight"):
        packed = copy.read(key)
        query, k, v = heads.backward([packed])
        parts = [query.reshape(dims.groups, -1, query.shape[-1]), *(t.reshape(dims.groups, dims.head_width, -1) for t in (k, v))]
        copy.changed[key] = torch.cat(parts, dim=1).reshape(packed.shape).contiguous()


def gate_not_sliced(copy: Copy) -> None:
    """A01: the query is sliced for the ranks that share a KV head, the output gate is not."""
    if not copy.dims.output_gate:
        raise UsageError("this model's attention has no output gate")
    copy.patch = UNSLICED_GATE_PATCH


def scores_by_local_number(copy: Copy) -> None:
    """A07: a pipeline stage scales attention scores by the number of the layer in the stage, not in the model."""
    copy.keys("self_attention.linear_qkv.weight")
    copy.patch = LOCAL_NUMBER_PATCH


def rows_of_another_order(copy: Copy) -> None:
    """E13: stale counts, so that an expert is handed its rows in another order; only where tokens travel over TP and EP."""
    copy.keys(*EXPERTS)
    if copy.parallel.tp == 1:
        raise UsageError("E13 exists only with --tp and --ep above 1", hint="add --tp 2 --ep 2 --etp 1")
    copy.patch = STALE_COUNTS_PATCH


def biases_grouped_by_twice_the_heads(copy: Copy) -> None:
    """A05: q's biases handed to the KV groups two groups' worth of heads at a time, as if half of them were gates."""
    dims = copy.dims
    if dims.groups == 1:
        raise UsageError("with one KV group there is one way to group its heads")
    heads = GroupHeads(dims.groups, dims.heads, dims.head_width, dims.output_gate)
    for key in copy.keys("self_attention.linear_qkv.bias"):
        parts = heads.named(copy.read(key))
        queries = parts["q"].split(2 * heads.parts["q"])
        k, v = (parts[name].split(dims.head_width) for name in ("k", "v"))
        groups = [part for i in range(dims.groups) for part in (*queries[i : i + 1], k[i], v[i])]
        copy.changed[key] = torch.cat(groups).contiguous()


def halves_swapped(copy: Copy) -> None:
    """S05: up where gate belongs, in the shared expert, or in the dense MLP of a model without one."""
    for key in copy.keys(*GATED_MLP):
        copy.changed[key] = torch.cat(copy.read(key).chunk(2)[::-1]).contiguous()


def norms_swapped(copy: Copy) -> None:
    """N05: the two norms of the first layer exchanged."""
    first, second = (
        next(key for key in copy.checkpoint.tensors if key.startswith("decoder.layers.0.") and key.endswith(f".{name}_layernorm.weight"))
        for name in ("input", "pre_mlp")
    )
    copy.changed |= {first: copy.read(second), second: copy.read(first)}


def head_is_embedding(copy: Copy) -> None:
    """V02: an untied head that holds the embedding; of a tied model, args that say it has a head of its own."""
    if copy.dims.tied:
        copy.set("untie_embeddings_and_output_weights", True)
    else:
        copy.changed["output_layer.weight"] = copy.read("embedding.word_embeddings.weight")


def bias_rounded(copy: Copy) -> None:
    """T03: the expert bias rounded to bf16 and stored as float32 again."""
    for key in copy.keys("mlp.router.expert_bias"):
        copy.changed[key] = copy.read(key).to(torch.bfloat16).float()


def bias_forgotten(copy: Copy) -> None:
    """T04: buffers are no parameters, so the converter left the expert bias as it was made."""
    for key in copy.keys("mlp.router.expert_bias"):
        copy.changed[key] = torch.zeros_like(copy.read(key))


def bias_in_the_weights(copy: Copy) -> None:
    """T02: what is meant for the choice enters the experts' weights too."""
    copy.keys("mlp.router.expert_bias")
    copy.patch = BIASED_WEIGHTS_PATCH


def scaling_forgotten(copy: Copy) -> None:
    """T09: the routed experts' scaling factor is not handed on."""
    copy.keys(*EXPERTS)
    copy.set("moe_router_topk_scaling_factor", 1.0)


def dense_first_layer(copy: Copy) -> None:
    """L05: the layer pattern of the launch script says that the first layer with experts has none."""
    copy.keys(*EXPERTS)
    first = copy.dims.moe.index(True)
    copy.set("moe_layer_freq", [int(one and n != first) for n, one in enumerate(copy.dims.moe)])


def cut_evenly(copy: Copy) -> None:
    """in_proj's packed rows [q k v z beta alpha] cut into equal blocks, each then read as if it were one rank's parts."""
    parts = ("query", "key", "value", "z", "beta", "alpha")
    for first in copy.keys("self_attention.in_proj.weight.query"):
        keys = [first.removesuffix("query") + part for part in parts]
        right = [copy.read(key) for key in keys]
        ways = copy.parallel.tp
        local = [block.split([len(part) // ways for part in right]) for block in torch.cat(right).chunk(ways)]
        for i, key in enumerate(keys):
            copy.changed[key] = torch.cat([rank[i] for rank in local]).contiguous()


def decay_rounded(copy: Copy) -> None:
    """G04: A_log rounded to bf16 and stored as float32 again."""
    for key in copy.keys("self_attention.A_log", "self_attention.linear_attn.A_log"):
        copy.changed[key] = copy.read(key).to(torch.bfloat16).float()


def gate_dropped(copy: Copy) -> None:
    """S04: the flag is off, so the converter never made the tensor."""
    copy.dropped |= set(copy.keys("mlp.shared_experts.gate_weight"))
    copy.set("moe_shared_expert_gate", False)


def softmax_before_topk(copy: Copy) -> None:
    """T01: probabilities over all experts, not renormalised over the chosen; the other way round where that is right."""
    copy.keys(*EXPERTS)
    if copy.dims.expert_bias:
        raise UsageError("this model scores its experts by a sigmoid: there is no softmax to move")
    copy.set("moe_router_pre_softmax", not copy.checkpoint.args.get("moe_router_pre_softmax"))


def rotary_base_forgotten(copy: Copy) -> None:
    """P01: the base falls back to Megatron's default."""
    copy.set("rotary_base", 10000)


def rotary_share_forgotten(copy: Copy) -> None:
    """P03: the whole head is rotated where a part should be; half of it where the whole should be."""
    share = copy.checkpoint.args.get("rotary_percent", 1.0)
    copy.set("rotary_percent", 1.0 if share < 1 else 0.5)


def other_gamma(copy: Copy) -> None:
    """N03: w where the reference has 1 + w, or the other way round."""
    copy.set("apply_layernorm_1p", not copy.checkpoint.args.get("apply_layernorm_1p"))


def epsilon_forgotten(copy: Copy) -> None:
    """N04: the norms' epsilon falls back to Megatron's default."""
    copy.set("norm_epsilon", 1e-5)


def _offset(copy: Copy) -> tuple[int, range]:
    if copy.dims.layers % copy.parallel.pp or copy.parallel.pp_layers:
        raise UsageError("L01 needs an even split over --pp")
    stage = copy.dims.layers // copy.parallel.pp
    last = range(copy.dims.layers - stage, copy.dims.layers)
    alike = list(zip(copy.dims.kinds, copy.dims.moe, strict=True))
    if alike[:stage] != alike[last.start :]:
        raise UsageError(f"L01 can't be built: the kinds of layers 0 to {stage - 1} and {last.start} to {last.stop - 1} differ")
    return last.start, last


def stage_offset_forgotten(copy: Copy) -> None:
    """L01: layers of the last stage hold those of the first."""
    offset, layers = _offset(copy)
    for key in copy.checkpoint.tensors:
        words = key.split(".")
        if key.startswith("decoder.layers.") and int(words[2]) in layers:
            copy.changed[key] = copy.read(".".join([*words[:2], str(int(words[2]) - offset), *words[3:]]))


def stage_offset_at_run_time(copy: Copy) -> None:
    """L01 made by the running model: no file is wrong."""
    copy.patch = STAGE_OFFSET_PATCH


STAGE_OFFSET_PATCH = '''"""L01 at run time: every pipeline stage ends up with the first stage's layers, because the layer offset is forgotten."""

import torch.distributed as dist
from megatron.core import parallel_state


def patch(model, parallel):
    if parallel.pp == 1:
        return
    group = parallel_state.get_pipeline_model_parallel_group()
    first = parallel_state.get_pipeline_model_parallel_first_rank()
    for layer in model.decoder.layers:
        for parameter in layer.parameters():
            dist.broadcast(parameter.data, src=first, group=group)
'''

UNSLICED_GATE_PATCH = '''"""A01: with more tensor parallel ranks than KV heads, a rank gates with the group's first heads, not with its own."""

from functools import partial

from megatron.core.transformer.attention import SelfAttention


def first_heads(attention, *args, **kwargs):
    query, key, value, gate = SelfAttention.get_query_key_value_tensors(attention, *args, **kwargs)
    return query, key, value, gate[:, :, : query.shape[2]]


def patch(model, parallel):
    for layer in model.decoder.layers:
        if isinstance(layer.self_attention, SelfAttention):
            layer.self_attention.get_query_key_value_tensors = partial(first_heads, layer.self_attention)
'''

LOCAL_NUMBER_PATCH = '''"""A07: attention scores are scaled for the local number of a layer; on the first stage that is the global one."""


def patch(model, parallel):
    for local, layer in enumerate(model.decoder.layers, 1):
        core = getattr(layer.self_attention, "core_attention", None)
        if core is not None:
            core.softmax_scale *= local / layer.layer_number
'''

STALE_COUNTS_PATCH = '''"""E13: an expert's rows are split by stale counts, where tokens come over both tensor and expert parallel ranks."""


def turned(expert, args):
    rows, *rest = args
    return (rows.roll(1, 0), *rest)


def patch(model, parallel):
    if parallel.tp == 1 or parallel.ep == 1:
        return
    for layer in model.decoder.layers:
        for expert in getattr(getattr(layer.mlp, "experts", None), "local_experts", ()):
            expert.register_forward_pre_hook(turned)
'''

BIASED_WEIGHTS_PATCH = '''"""T02: experts are weighted by score + bias, not by score."""

import torch


def biased(router, original):
    def routing(logits, *args, **kwargs):
        probs, chosen = original(logits, *args, **kwargs)
        ranked = (torch.sigmoid(logits.float()) + router.expert_bias).view_as(probs) * chosen
        weights = ranked / ranked.sum(-1, keepdim=True) * (router.config.moe_router_topk_scaling_factor or 1.0)
        return weights.type_as(probs), chosen

    return routing


def patch(model, parallel):
    for layer in model.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            router.routing = biased(router, router.routing)
'''

PLANTS = (
    Plant(
        "E01",
        "weights",
        "expert e holds expert e mod (experts / EP): the converter used EP-local numbers (slime#1799)",
        expert_from_local_number,
        "ep",
    ),
    Plant("E08", "weights", "every expert of an EP rank is its first: the number is lost (Megatron-Bridge#2888)", one_expert_a_rank, "ep"),
    Plant(
        "A01", "code", "with more TP ranks than KV heads the output gate is not sliced like the query (Megatron-LM#3575)", gate_not_sliced
    ),
    Plant(
        "A07",
        "code",
        "stages behind the first scale attention scores by the local number of a layer (Megatron-LM !2592)",
        scores_by_local_number,
        "pp",
    ),
    Plant("E13", "code", "with TP and EP an expert is handed its rows in another order (Megatron-LM !2824)", rows_of_another_order, "ep"),
    Plant(
        "A05",
        "weights",
        "q, k and v biases are grouped by twice the heads of a KV group (Megatron-Bridge#1253)",
        biases_grouped_by_twice_the_heads,
    ),
    Plant("S05", "weights", "gate and up rows exchanged, in the shared expert or the dense MLP", halves_swapped),
    Plant("N05", "weights", "the two norms of the first layer exchanged (Megatron-Bridge#4201)", norms_swapped),
    Plant("V02", "weights", "the head holds the embedding; of a tied model: --untie-embeddings-and-output-weights", head_is_embedding),
    Plant("T02", "code", "the expert bias enters the experts' weights (Megatron-LM !3209)", bias_in_the_weights),
    Plant("T03", "weights", "expert bias rounded through bf16: precision lost (minor)", bias_rounded),
    Plant("T04", "weights", "expert bias zero: it was never converted (Megatron-Bridge#4657)", bias_forgotten),
    Plant("T09", "args", "--moe-router-topk-scaling-factor is missing", scaling_forgotten),
    Plant("L05", "args", "--moe-layer-freq makes the first layer with experts a dense one", dense_first_layer),
    Plant("N04", "args", "the norms' epsilon is Megatron's default", epsilon_forgotten),
    Plant("P03", "args", "another share of each head is rotated: --rotary-percent", rotary_share_forgotten),
    Plant("A03", "weights", "q and gate rows of linear_qkv are not regrouped from Hugging Face's per-head packing", gate_not_regrouped),
    Plant("G01", "weights", "the packed in_proj is cut evenly over TP, not part by part (native; Megatron-Bridge#1690)", cut_evenly, "tp"),
    Plant("G04", "weights", "A_log rounded through bf16: precision lost, the function is the same (minor)", decay_rounded),
    Plant("S04", "args", "the shared expert's gate is left out: --moe-shared-expert-gate is missing", gate_dropped),
    Plant(
        "T01",
        "args",
        "softmax over all experts and no renormalisation, or the other way round: --moe-router-pre-softmax",
        softmax_before_topk,
    ),
    Plant("P01", "args", "rotary base 10000 instead of the model's", rotary_base_forgotten),
    Plant("N03", "args", "zero-centred gamma taken as plain, or plain as zero-centred: --apply-layernorm-1p", other_gamma),
    Plant(
        "L01",
        "weights",
        "the last pipeline stage holds the first stage's layers: offset forgotten in the file",
        stage_offset_forgotten,
        "pp",
    ),
    Plant("L01-run", "code", "the same made at run time: the files are right", stage_offset_at_run_time, "pp"),
)
