"""The reference as the driver sees it: loaded, listened to, its experts probed, its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from bisect_hooks.family import CheckpointLayout, Dimensions, Family
from bisect_hooks.hf import Reference
from bisect_hooks.site import parse_site
from bisect_hooks.tap import split_key

from bisect_tool.hf_directory import HuggingFaceDirectory
from bisect_tool.prompts import Batch
from bisect_tool.recording import Recording
from bisect_tool.rounding import Rounding

PROBE_ROWS = 8
BEHIND_ROUTING = ("experts.combine", "output")


@dataclass(frozen=True)
class Wanted:
    """Which reference, and how it is to compute.

    layout  of the candidate's checkpoint, whose table may round · stored  dtypes of the candidate's tensors by name, None without one
    """

    directory: HuggingFaceDirectory
    family: Family
    layout: CheckpointLayout
    dtype: torch.dtype
    device: str = "cpu"
    stored: Mapping[str, torch.dtype] | None = None

    @cached_property
    def rounding(self) -> Rounding:
        return Rounding.of(self.directory, self.family, self.layout, self.stored)

    def load(self) -> tuple[Reference, list[str]]:
        """The model, run through the rounding of the table's lossy rows and of the candidate's dtypes; and a note for each, with its size."""
        dims = self.family.reference_dimensions(self.directory.config)
        reference = Reference(self.directory.path, self.family, dims, self.dtype, torch.device(self.device))
        notes: list[str] = []
        for rounded in self.rounding.tensors(notes):
            reference.put(rounded)
        return reference, notes


def base_grafts(dims: Dimensions) -> list[str]:
    """Where each layer is cut loose: its input, the output of its mixer, and what leaves the last layer."""
    mixers = [f"layers.{n}.{dims.kinds[n]}.out_proj" for n in range(dims.layers)]
    return [*(f"layers.{n}.input" for n in range(dims.layers)), *mixers, f"layers.{dims.layers - 1}.output", "final_norm"]


def probe_inputs(recording: Recording, dims: Dimensions) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """What every expert of a layer is probed with: rows of the reference's MoE input, and its own activations for fc2."""
    inputs = {}
    for layer in range(dims.layers):
        if dims.moe[layer]:
            inputs[layer] = (recording[f"layers.{layer}.experts.fc1:rows"], recording[f"layers.{layer}.experts.fc2:rows"])
    return inputs


def routed_alike(key: str, one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """[t] tokens whose experts both chose alike, for a key behind the choice; None where every token counts."""
    site = parse_site(split_key(key)[0])
    topk = f"layers.{site.layer}.router.topk"
    behind = (f"{site.module}.{site.part}" if site.part else site.module) in BEHIND_ROUTING
    if not behind or topk not in one or topk not in other:
        return None
    return (one[topk].float() == other[topk].float()).all(-1)


def said_of(
    reference: Reference, batch: Batch, grafts: Mapping[str, torch.Tensor] | None = None, most: int | None = None
) -> dict[str, torch.Tensor]:
    """Every key [tokens f], from forwards of a few prompts each, so that memory goes with tokens and not with padding."""
    parts: dict[str, list[torch.Tensor]] = {}
    for start, part in batch.parts(most):
        ids, mask = part.ids(), part.mask()
        put = {key: part.unpack(value[start : start + part.tokens], *ids.shape) for key, value in (grafts or {}).items()}
        for key, value in reference.record(ids, mask, put).items():
            parts.setdefault(key, []).append(part.pack(value))
    return {key: values[0] if len(values) == 1 else torch.cat(values) for key, values in parts.items()}


def probe_all(reference: Reference, said: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every expert of every MoE layer on a few tokens: what goes in [t h] and into fc2 [e t f/2], what fc1 [e t f] and fc2 [e t h] give."""
    probes: dict[str, torch.Tensor] = {}
    for layer in range(reference.dims.layers):
        if reference.dims.moe[layer]:
            tokens = said[f"layers.{layer}.pre_mlp_norm"]
            step = max(1, len(tokens) // PROBE_ROWS)
            rows = tokens[::step][:PROBE_ROWS].clone()  # of few tokens this is all of them, and files hold no tensor twice
            first, inner, second = reference.probe_experts(layer, rows)
            probes |= {
                f"layers.{layer}.experts.fc1:rows": rows,
                f"layers.{layer}.experts.fc2:rows": inner,
                f"layers.{layer}.experts.fc1": first,
                f"layers.{layer}.experts.fc2": second,
            }
    return probes


def answers_of(logits_of: Any, rows: list[list[int]], *, end: int | None, limit: int) -> list[list[int]]:
    """Greedy continuations of each row.  `logits_of` maps rows of ids to the logits after each row's last token."""
    said: list[list[int]] = [[] for _ in rows]
    done = [False] * len(rows)
    for _ in range(limit):
        logits = logits_of([row + one for row, one in zip(rows, said, strict=True)])
        for i, token in enumerate(logits.argmax(-1).tolist()):
            if not done[i]:
                said[i].append(token)
                done[i] = token == end
        if all(done):
            break
    return said
