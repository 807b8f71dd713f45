"""Qwen3.5-MoE written out from `bisect_hooks.formulas`: every site of a forward pass, with room for one error.

Shares nothing with transformers or megatron-core but the weights.  What CPU megatron-core can't run (packed sequences, context
parallel) is computed here as what its ranks would have said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from bisect_hooks import formulas as f
from bisect_hooks.families.qwen3_5_moe import FAMILY
from bisect_hooks.family import Dimensions

from bisect_tool.hf_directory import open_hf

Said = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Errors:
    """What is done wrong.  Segments are those that each part believes in; None is right.

    base, width  of the rotation; width is how much of each head is turned
    order   tokens as the linear attention of a layer sees them, put back afterwards
    finish  what becomes of every value where it is made (key, value → value)
    weight  what becomes of every weight (name, value → value)
    """

    conv: Sequence[int] | None = None
    state: Sequence[int] | None = None
    positions: torch.Tensor | None = None
    base: float | None = None
    width: int | None = None
    order: torch.Tensor | None = None
    finish: Callable[[str, torch.Tensor], torch.Tensor] = lambda _key, value: value
    weight: Callable[[str, torch.Tensor], torch.Tensor] = lambda _name, value: value


class Written:
    """The model of a Hugging Face directory."""

    def __init__(self, path: Path) -> None:
        self.directory = open_hf(path)
        config = json.loads((path / "config.json").read_text())
        self.text: dict[str, Any] = config.get("text_config", config)
        self.dims: Dimensions = FAMILY.reference_dimensions(config)
        self.eps: float = self.text["rms_norm_eps"]
        self.base: float = self.text["rope_parameters"]["rope_theta"]
        self.width = int(self.dims.head_width * self.text["rope_parameters"]["partial_rotary_factor"])
        self._kept: dict[str, torch.Tensor] = {}

    def weight(self, name: str) -> torch.Tensor:
        if name not in self._kept:
            self._kept[name] = self.directory.read(name)
        return self._kept[name]

    @cached_property
    def nothing_wrong(self) -> Errors:
        return Errors()

    def run(self, rows: Sequence[Sequence[int]], errors: Errors | None = None) -> Said:
        """Every key of a Recording of `rows`, each a segment, in float32."""
        return _Pass(self, [len(row) for row in rows], errors or self.nothing_wrong).run([token for row in rows for token in row])


class _Pass:
    """One forward pass over the tokens of all segments."""

    def __init__(self, model: Written, segments: list[int], errors: Errors) -> None:
        self.model, self.dims, self.segments, self.errors = model, model.dims, segments, errors
        self.said: Said = {}

    def weight(self, name: str) -> torch.Tensor:
        return self.errors.weight(name, self.model.weight(name))

    def say(self, key: str, value: torch.Tensor) -> torch.Tensor:
        value = self.errors.finish(key, value)
        self.said[key] = value.reshape(len(value), -1).float()
        return value

    def norm(self, key: str, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.say(key, f.rms_norm(x, self.weight(name), self.model.eps, zero_centred=True))

    def project(self, key: str, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.say(key, f.linear(x, self.weight(f"{name}.weight")))

    def run(self, ids: list[int]) -> Said:
        self.say("tokens", torch.tensor(ids)[:, None])
        x = self.say("embedding", f.wide(self.weight("model.embed_tokens.weight")[torch.tensor(ids)]))
        for n, kind in enumerate(self.dims.kinds):
            layer, source = f"layers.{n}", f"model.layers.{n}"
            self.say(f"{layer}.input", x)
            normed = self.norm(f"{layer}.input_norm", x, f"{source}.input_layernorm.weight")
            x = x + (self.full if kind == "attention" else self.linear)(f"{layer}.{kind}", source, normed)
            x = x + self.moe(layer, source, self.norm(f"{layer}.pre_mlp_norm", x, f"{source}.post_attention_layernorm.weight"))
            x = self.say(f"{layer}.output", x)
        self.project("lm_head", self.norm("final_norm", x, "model.norm.weight"), "lm_head")
        return self.said

    def full(self, key: str, source: str, x: torch.Tensor) -> torch.Tensor:
        dims, own = self.dims, f"{source}.self_attn"
        packed = f.linear(x, self.weight(f"{own}.q_proj.weight")).reshape(len(x), dims.heads, 2, dims.head_width)
        q, gate = (self.say(f"{key}.qkv:{name}", packed[:, :, i]) for i, name in enumerate(("q", "gate")))
        k, v = (self.project(f"{key}.qkv:{name}", x, f"{own}.{name}_proj") for name in "kv")
        k, v = (one.reshape(len(x), dims.groups, dims.head_width) for one in (k, v))
        positions = f.positions_of(self.segments) if self.errors.positions is None else self.errors.positions
        turned: list[torch.Tensor] = []
        for name, one in (("q", q), ("k", k)):
            normed = self.norm(f"{key}.{name}_norm", one, f"{own}.{name}_norm.weight")
            turned.append(self.say(f"{key}.rope:{name}", self.turned(normed, positions)))
        core = self.say(f"{key}.core", f.attention(turned[0], turned[1], v, self.segments)).reshape(len(x), -1)
        gated = self.say(f"{key.replace('attention', 'attention_gate')}", f.gate(core, gate.reshape(len(x), -1)))
        return self.project(f"{key}.out_proj", gated, f"{own}.o_proj")

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return f.rope(x, positions, self.errors.base or self.model.base, self.errors.width or self.model.width)

    def linear(self, key: str, source: str, x: torch.Tensor) -> torch.Tensor:
        dims, own, errors = self.dims, f"{source}.linear_attn", self.errors
        x = x if errors.order is None else x[errors.order]
        weight = self.weight
        sizes = [dims.key_rows, dims.key_rows, dims.value_rows]
        q, k, v = f.linear(x, weight(f"{own}.in_proj_qkv.weight")).split(sizes, -1)
        mixed = torch.cat([self.say(f"{key}.in_proj:{name}", one) for name, one in (("q", q), ("k", k), ("v", v))], -1)
        z = self.project(f"{key}.in_proj:z", x, f"{own}.in_proj_z").reshape(len(x), dims.value_heads, dims.value_width)
        beta = self.project(f"{key}.in_proj:beta", x, f"{own}.in_proj_b")
        alpha = self.project(f"{key}.in_proj:alpha", x, f"{own}.in_proj_a")
        convolved = f.conv(mixed, weight(f"{own}.conv1d.weight"), errors.conv or self.segments).split(sizes, -1)
        q, k, v = (self.say(f"{key}.conv1d:{name}", one) for name, one in zip("qkv", convolved, strict=True))
        decay = self.say(f"{key}.decay", f.decay(alpha, weight(f"{own}.A_log"), weight(f"{own}.dt_bias")))
        beta = self.say(f"{key}.beta", torch.sigmoid(beta))
        q, k = (one.reshape(len(x), dims.key_heads, dims.key_width) for one in (q, k))
        core = self.say(f"{key}.core", f.delta_rule(q, k, v.reshape(z.shape), decay, beta, errors.state or self.segments))
        normed = self.say(f"{key}.gated_norm", f.gated_norm(core, z, weight(f"{own}.norm.weight"), self.model.eps))
        out = self.project(f"{key}.out_proj", normed.reshape(len(x), -1), f"{own}.out_proj")
        return out if errors.order is None else out[errors.order.argsort()]

    def moe(self, layer: str, source: str, x: torch.Tensor) -> torch.Tensor:
        weight, own = self.weight, f"{source}.mlp"
        logits = self.project(f"{layer}.router.logits", x, f"{own}.gate")
        probs, chosen = f.route(logits, self.dims.top_k)
        probs = self.say(f"{layer}.router.probs", probs)
        self.say(f"{layer}.router.topk", chosen)
        combined = f.experts(x, weight(f"{own}.experts.gate_up_proj"), weight(f"{own}.experts.down_proj"), probs)
        combined = self.say(f"{layer}.experts.combine", combined)
        gate = self.project(f"{layer}.shared_expert.fc1:gate", x, f"{own}.shared_expert.gate_proj")
        up = self.project(f"{layer}.shared_expert.fc1:up", x, f"{own}.shared_expert.up_proj")
        second = self.project(f"{layer}.shared_expert.fc2", f.swiglu(gate, up), f"{own}.shared_expert.down_proj")
        shared = self.say(f"{layer}.shared_expert_gate", f.gate(second, f.linear(x, weight(f"{own}.shared_expert_gate.weight"))))
        return combined + shared
