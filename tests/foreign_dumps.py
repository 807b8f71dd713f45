"""Writers of foreign formats, from what a forward pass said: one file layout a format, with the tensors as engines fuse them.

Facts are those of each format's own code and documents (SGLang's dumper and its models, msprobe's dump.json, slime's layer dump);
nothing here was written by those programs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.family import Dimensions

Said = Mapping[str, torch.Tensor]
Modules = dict[str, list[torch.Tensor]]


def engine_modules(said: Said, dims: Dimensions, tp: int, at: int) -> Modules:
    """What the hooks of an SGLang rank hear: fused projections, partial sums where the engine reduces later, residual beside delta."""

    def cut(key: str) -> torch.Tensor:
        return said[key].chunk(tp, -1)[at]

    def summand(key: str) -> torch.Tensor:
        """Summands of a reduction that comes later: the parts of ranks add up to the whole."""
        noise = torch.randn(said[key].shape, generator=torch.Generator().manual_seed(len(key)))
        return said[key] / tp + (noise if at == 0 else -noise) * (tp > 1)

    def normed(key: str, residual: torch.Tensor | None) -> list[torch.Tensor]:
        return [said[key]] if residual is None else [said[key], residual]

    found: Modules = {"model.embed_tokens": [said["embedding"]]}
    for n, kind in enumerate(dims.kinds):
        layer, own = f"model.layers.{n}", f"layers.{n}"
        mixed = said[f"{own}.input"] + said[f"{own}.{kind}.out_proj"]
        found[f"{layer}.input_layernorm"] = normed(f"{own}.input_norm", said[f"{own}.input"] if n else None)
        if kind == "attention":
            q, gate = (cut(f"{own}.attention.qkv:{piece}").unflatten(-1, (-1, dims.head_width)) for piece in ("q", "gate"))
            both = torch.stack([q, gate], -2).flatten(1)
            found[f"{layer}.self_attn.qkv_proj"] = [torch.cat([both, cut(f"{own}.attention.qkv:k"), cut(f"{own}.attention.qkv:v")], -1)]
            found[f"{layer}.self_attn.attn"] = [cut(f"{own}.attention.core")]
            found[f"{layer}.self_attn.o_proj"] = [summand(f"{own}.attention.out_proj")]
        else:
            found[f"{layer}.linear_attn.in_proj_qkvz"] = [
                torch.cat([cut(f"{own}.linear_attention.in_proj:{piece}") for piece in "qkvz"], -1)
            ]
            found[f"{layer}.linear_attn.in_proj_ba"] = [
                torch.cat([cut(f"{own}.linear_attention.in_proj:{piece}") for piece in ("beta", "alpha")], -1)
            ]
            found[f"{layer}.linear_attn.norm"] = [cut(f"{own}.linear_attention.gated_norm").reshape(-1, dims.value_width)]
            found[f"{layer}.linear_attn.out_proj"] = [summand(f"{own}.linear_attention.out_proj")]
        found[f"{layer}.post_attention_layernorm"] = normed(f"{own}.pre_mlp_norm", mixed)
        found[f"{layer}.mlp.gate"] = [said[f"{own}.router.logits"]]
        chosen = said[f"{own}.router.topk"].nonzero()[:, 1].reshape(-1, dims.top_k).flip(-1)  # in no order of ours
        found[f"{layer}.mlp.topk"] = [said[f"{own}.router.probs"].gather(-1, chosen), chosen.int(), said[f"{own}.router.logits"]]
        found[f"{layer}.mlp.experts"] = [summand(f"{own}.experts.combine")]
        found[f"{layer}.mlp.shared_expert.gate_up_proj"] = [
            torch.cat([cut(f"{own}.shared_expert.fc1:{piece}") for piece in ("gate", "up")], -1)
        ]
        delta = said[f"{own}.output"] - mixed
        found[layer] = [delta, mixed]
    found["model.norm"] = [said["final_norm"], said[f"layers.{dims.layers - 1}.output"]]
    return found


def sglang(out: Path, said: Said, rows: Sequence[Sequence[int]], dims: Dimensions, tp: int = 1) -> Path:
    out.mkdir(parents=True)
    for rank in range(tp):
        index = 0
        info = {"tp_rank": rank, "tp_size": tp, "pp_rank": 0, "pp_size": 1}

        def dump(name: str, value: Any, step: int = 0, layer: str = "", rank: int = rank, info: Any = info) -> None:
            nonlocal index
            index += 1
            words = {"step": step, "rank": rank, "dump_index": index, "name": name, "recompute_status": "disabled"} | (
                {"layer_id": layer} if layer else {}
            )
            meta = words | {"world_rank": rank, "world_size": tp, "sglang_parallel_info": info, "megatron_parallel_info": {}}
            torch.save({"value": value, "meta": meta}, out / ("___".join(f"{key}={one}" for key, one in words.items()) + ".pt"))

        dump("input_ids", torch.tensor([token for row in rows for token in row]))
        dump("positions", torch.cat([torch.arange(len(row)) for row in rows]))
        dump("seq_lens", torch.tensor([len(row) for row in rows]))
        dump("rids", ["a", "b"])
        for name, outputs in engine_modules(said, dims, tp, rank).items():
            for i, value in enumerate(outputs):
                layer = name.split(".")[2] if ".layers." in name and name.count(".") > 2 else ""
                dump(f"non_intrusive__{name}.output" + (f".{i}" if len(outputs) > 1 else ""), value, layer=layer)
        dump("non_intrusive__model.layers.0.inputs.1", said["embedding"])
        dump("non_intrusive__model.layers.0.mlp.fancy_new_module.output", said["embedding"])
        dump("input_ids", torch.tensor([5, 6]), step=1)  # a decode step of two sequences
        dump("non_intrusive__model.embed_tokens.output", said["embedding"][:2], step=1)
    return out


def sglang_decode(out: Path, said: Said, row: Sequence[int], start: int, dims: Dimensions) -> Path:
    """One request, alone: a prefill of `start` tokens, then a step a token."""
    out.mkdir(parents=True)
    for step, tokens in enumerate([slice(0, start), *(slice(i, i + 1) for i in range(start, len(row)))]):
        part = {key: value[tokens] for key, value in said.items()}
        values = {"input_ids": [torch.tensor(row[tokens])], "positions": [torch.arange(len(row))[tokens]]}
        values |= {f"non_intrusive__{name}.output": outputs for name, outputs in engine_modules(part, dims, 1, 0).items()}
        for index, (name, outputs) in enumerate(values.items()):
            for i, value in enumerate(outputs):
                words = {"step": step, "rank": 0, "dump_index": 9 * index + i, "name": name + (f".{i}" if len(outputs) > 1 else "")}
                torch.save({"value": value, "meta": words}, out / ("___".join(f"{key}={one}" for key, one in words.items()) + ".pt"))
    return out


def msprobe(out: Path, said: Said, rows: Sequence[Sequence[int]], dims: Dimensions) -> Path:
    """One rank that ran the engine's modules on rows of one length, `[b s f]` flattened."""
    folder = out / "step0" / "rank0"
    data = folder / "dump_tensor_data"
    data.mkdir(parents=True)
    page: dict[str, Any] = {"task": "tensor", "level": "L0", "framework": "pytorch", "dump_data_dir": str(data), "data": {}}
    for name, outputs in engine_modules(said, dims, 1, 0).items():
        operation = f"Module.{name}.{name.rsplit('.', 1)[-1].title()}.forward.0"
        entry: dict[str, Any] = {"input_args": [], "input_kwargs": {}, "output": []}
        if name.endswith("embed_tokens"):
            ids = torch.tensor([token for row in rows for token in row])
            torch.save(ids, data / f"{operation}.input.0.pt")
            entry["input_args"] = [
                {"type": "torch.Tensor", "dtype": "torch.int64", "shape": list(ids.shape), "data_name": f"{operation}.input.0.pt"}
            ]
        for i, value in enumerate(outputs):
            torch.save(value.clone(), data / f"{operation}.output.{i}.pt")
            leaf = {
                "type": "torch.Tensor",
                "dtype": str(value.dtype),
                "shape": list(value.shape),
                "data_name": f"{operation}.output.{i}.pt",
            }
            entry["output"].append(leaf)
        page["data"][operation] = entry
    page["data"]["Functional.silu.0.forward"] = {"input_args": [], "output": []}
    (folder / "dump.json").write_text(json.dumps(page))
    return out


def slime(out: Path, said: Said, rows: Sequence[Sequence[int]], dims: Dimensions, tp: int = 1, held: Sequence[int] = (3, 7)) -> Path:
    """Whole layer outputs on every rank, [t 1 h], and the attention of some layers, which is cut over tp."""
    bounds = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()], dtype=torch.int32)
    for rank in range(tp):
        folder = out / f"rank{rank:05d}"
        folder.mkdir(parents=True)
        page = {
            "store_prefix": "", "layers": {n: said[f"layers.{n}.output"][:, None] for n in range(dims.layers)},
            "modules": {f"decoder.layers.{n}.self_attention.core_attention": said[f"layers.{n}.attention.core"].chunk(tp, -1)[rank][:, None] for n in held},
            "input_ids": torch.tensor([token for row in rows for token in row]), "cu_seqlens": bounds,
        }  # fmt: skip
        torch.save(page, folder / "actor_Pass00000.pt")
        torch.save(page | {"layers": {}}, folder / "actor_Pass00001.pt")
    return out
