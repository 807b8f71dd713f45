"""Recording in somebody else's Megatron process: three lines in a training script, one shard a rank.

    import bisect_hooks
    with bisect_hooks.record(model, family, "recording"):
        forward_backward_func(...)

The first forward inside the block is kept, and nothing of it is changed.  What the model is, is read from the model (its config, its
layers' own numbers); where this rank stands, from the megatron-core that the process has loaded already.  Nothing is imported here
that the process does not have but torch and safetensors, and no other version of megatron-core is asked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bisect_hooks.errors import BisectError, UsageError
from bisect_hooks.family import CheckpointLayout, Family, families
from bisect_hooks.parallel import Parallel
from bisect_hooks.shard_file import FUSED, Part, ShardPage, write_shard
from bisect_hooks.tap import Heard, Tap, find, listening

PACKED = {"cu_seqlens": "cu_seqlens_q", "cu_seqlens_padded": "cu_seqlens_q_padded", "seq_idx": "seq_idx", "total_tokens": "total_tokens"}


@contextmanager
def record(model: Any, family: Family | str, out: Path | str, *, lengths: Sequence[int] = ()) -> Iterator[None]:
    """Writes this rank's shard of what `model` says in the first forward of the block; `bisect-tool compare` reads the directory.

    model    GPTModel, wrapped (DDP, Float16Module) or not, or a list of one
    lengths  real tokens of each row of the batch, where rows are padded on the right
    Raises UsageError before the block for what can't be recorded; a site that is not there is named in the shard.
    """
    module: Any = unwrap(model)
    known = families()[family] if isinstance(family, str) and family in families() else family
    if isinstance(known, str):
        raise UsageError(f"unknown family {known!r}", hint=f"known: {', '.join(families())}")
    dims = known.candidate_dimensions(args_of(module))
    layout: CheckpointLayout = "slime" if any(name.endswith("linear_attn") for name, _ in module.named_modules()) else "native"
    sizes, at = _standing(module.config)
    taps, absent = _local_taps(module, known.candidate_taps(dims, layout), layout, sizes)
    inputs: dict[str, Any] = {}
    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(_remembers(inputs), with_kwargs=True).remove)
        heard = stack.enter_context(listening(module, taps, first=True))
        yield
    if not inputs:
        raise UsageError("nothing was recorded: the model was not called inside the block")
    tensors, parts, silent = _kept(heard, taps, inputs, sizes)
    page = ShardPage(
        side="candidate", family=known.name, model=type(module).__name__, dtype=str(module.config.params_dtype).removeprefix("torch."),
        rank=_rank(), world=_world(), sizes=sizes, at=at, local=inputs["local"] | {"s": _local_length(inputs, sizes)}, taps=parts,
        lengths=tuple(lengths), packed=inputs["packed"], absent=absent | silent, layout=layout, layers=dims.layers,
        device=next(iter(tensors.values())).device.type if tensors else "cpu", versions=_versions(),
    )  # fmt: skip
    write_shard(Path(out), page, tensors)


def unwrap(model: Any) -> torch.nn.Module:
    """The model inside of its wrappers.  Raises UsageError for virtual pipeline chunks, whose layers no one forward passes."""
    if isinstance(model, (list, tuple)):
        if len(model) != 1:
            raise UsageError(f"{len(model)} model chunks: virtual pipeline stages are not recorded", hint="give one chunk")
        model = model[0]
    while not hasattr(model, "decoder") and isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "decoder") or not hasattr(model, "config"):
        raise UsageError(f"{type(model).__name__} is no GPTModel: it has no decoder or no config")
    return model


def args_of(model: Any) -> dict[str, Any]:
    """Megatron's arguments as a model that is built tells of them; only names that the config spells otherwise are said here."""
    config = dict(vars(model.config))
    return config | {
        "num_experts": config.get("num_moe_experts") or 0,
        "group_query_attention": config.get("num_query_groups") != config["num_attention_heads"],
        "padded_vocab_size": model.vocab_size,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "mtp_num_layers": config.get("mtp_num_layers") or 0,
        "moe_shared_expert_intermediate_size": config.get("moe_shared_expert_intermediate_size") or 0,
    }


def _standing(config: Any) -> tuple[dict[str, int], dict[str, int]]:
    """(parallel sizes, where this rank stands)."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        raise UsageError("megatron-core's parallel state is not initialised in this process")
    sizes = {
        "tp": state.get_tensor_model_parallel_world_size(), "pp": state.get_pipeline_model_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(), "dp": state.get_data_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(), "etp": state.get_expert_tensor_parallel_world_size(),
        "sp": int(bool(config.sequence_parallel)),
    }  # fmt: skip
    at = {
        "tp": state.get_tensor_model_parallel_rank(), "pp": state.get_pipeline_model_parallel_rank(),
        "cp": state.get_context_parallel_rank(), "dp": state.get_data_parallel_rank(),
        "ep": state.get_expert_model_parallel_rank(), "etp": state.get_expert_tensor_parallel_rank(),
    }  # fmt: skip
    return sizes, at


def _local_taps(
    model: Any, taps: Sequence[Tap], layout: CheckpointLayout, sizes: Mapping[str, int]
) -> tuple[tuple[Tap, ...], dict[str, str]]:
    """Taps of this stage, with layers as the stage counts them; and the sites of this stage that can't be heard."""
    here = {layer.layer_number - 1: i for i, layer in enumerate(model.decoder.layers)}
    found, absent = [], {}
    for tap in taps:
        number = tap.site.layer
        if tap.site.in_layer:
            if number not in here:
                continue
            path = f"decoder.layers.{here[number]}{tap.path.removeprefix(f'decoder.layers.{number}')}"
            tap = replace(tap, path=path)
        elif not getattr(model, "pre_process" if tap.site.module in ("tokens", "embedding") else "post_process", True):
            continue
        cut = over_cp(tap, layout) if sizes["cp"] > 1 else tap.layout
        why = "its heads are exchanged over context parallel ranks in a way that is not known" if cut is None else _unheard(model, tap)
        if why or cut is None:
            absent[str(tap.site)] = why
        else:
            found.append(replace(tap, layout=cut))
    return tuple(found), absent


def _unheard(model: torch.nn.Module, tap: Tap) -> str:
    try:
        module = find(model, tap.path)
        if tap.at == "function":
            owner, function = tap.name.split(":")
            if not hasattr(sys.modules.get(owner), function):
                return f"{owner} has no {function}"
    except UsageError as error:
        return error.message
    return FUSED if type(module).__name__ == "IdentityOp" else ""


def over_cp(tap: Tap, layout: CheckpointLayout) -> str | None:
    """A tap's layout under context parallel, where Megatron cuts every sequence; None where it is not known.

    slime's linear attention gathers the sequence and is whole; megatron-core's own exchanges heads for tokens.
    """
    if tap.site.module == "linear_attention" and not tap.layout.startswith("s"):
        return tap.layout if layout == "slime" else None
    return re.sub(r"\bs\[sp\]", "s[cp,sp]", re.sub(r"\bs\b(?!\[)", "s[cp]", tap.layout))


def _remembers(inputs: dict[str, Any]) -> Any:
    """A hook on the whole model that keeps what the first forward was given."""

    def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if inputs:
            return
        given = dict(zip(("input_ids", "position_ids"), args, strict=False)) | kwargs
        ids, positions = given.get("input_ids"), given.get("position_ids")
        inputs["local"] = {"b": ids.shape[0]} if isinstance(ids, torch.Tensor) else {}
        inputs["length"] = ids.shape[1] if isinstance(ids, torch.Tensor) else 0
        fits = isinstance(positions, torch.Tensor) and isinstance(ids, torch.Tensor) and positions.shape == ids.shape
        inputs["positions"] = positions.detach().clone() if fits else None  # type: ignore[union-attr]
        packed = given.get("packed_seq_params")
        inputs["packed"] = {name: _plain(getattr(packed, word)) for name, word in PACKED.items() if hasattr(packed, word)}

    return before


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _local_length(inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    return int(inputs["length"]) // (sizes["tp"] if sizes["sp"] else 1)


def _kept(
    heard: Heard, taps: Sequence[Tap], inputs: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[dict[str, torch.Tensor], dict[str, Part], dict[str, str]]:
    """(tensors by tap id, what each is, sites that stayed silent or do not fit their layout)."""
    parallel = Parallel(tp=sizes["tp"], cp=sizes["cp"], sp=bool(sizes["sp"]))
    local = inputs["local"] | {"s": _local_length(inputs, sizes)}
    tensors, parts, silent = {}, {}, {}
    for tap in taps:
        if tap.id not in heard.tensors:
            silent[str(tap.site)] = f"{tap.path} was not called in the forward that was recorded"
            continue
        tensor = heard.one(tap)
        if inputs["packed"] and tensor.dim() == len(tap.parsed.items) - 1 and tap.layout.startswith("s"):
            tensor = tensor.unsqueeze(1)  # packed tensors inside the attention have no batch dim
        try:
            tap.parsed.split(tensor, local, parallel)
        except BisectError as error:
            silent[str(tap.site)] = error.message
            continue
        tensors[tap.id], parts[tap.id] = tensor, Part(tap.layout, tap.keys)
        if str(tap.site) == "tokens" and inputs["positions"] is not None:
            tensors["positions"], parts["positions"] = inputs["positions"], Part(tap.layout, ("positions",))
    return tensors, parts, silent


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _versions() -> dict[str, str]:
    core = getattr(sys.modules.get("megatron.core"), "__version__", None)
    return {"torch": torch.__version__} | ({"megatron-core": str(core)} if core else {})
