"""Reading numbers and patterns out of Megatron's args, with an error that names the flag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bisect_hooks.errors import UsageError
from bisect_hooks.family import Dimensions


@dataclass(frozen=True, slots=True)
class Args:
    """A candidate's own words.  None counts as not given, as in Megatron's Namespace."""

    args: Mapping[str, Any]

    def number(self, name: str, default: int) -> int:
        """Raises UsageError for a value that is no whole number."""
        value = self.args.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or int(value) != value:
            raise UsageError(f"the candidate's args say {flag(name)} {value!r}, which is no whole number")
        return int(value)

    def need(self, name: str) -> int:
        """A number without a default that building needs.  Raises UsageError with its flag."""
        if self.args.get(name) is None:
            raise UsageError(
                f"the candidate's args say no {name} ({flag(name)})", hint="nothing else says it, and it is never taken from the reference"
            )
        value = self.number(name, 0)
        if value < 1:
            raise UsageError(f"the candidate's args say {flag(name)} {value}")
        return value

    def pattern(self, name: str, layers: int, *, every: Callable[[int, int], bool], default: int | None = None) -> tuple[bool, ...]:
        """A flag a layer, from a list of flags or from "every N layers".  Raises UsageError."""
        value = self.args.get(name, default)
        value = default if value is None else value
        if isinstance(value, (list, tuple)):
            if len(value) != layers:
                raise UsageError(f"the candidate's args give {len(value)} entries in {flag(name)} for {layers} layers")
            return tuple(bool(one) for one in value)
        if value is None:
            self.need(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"the candidate's args say {flag(name)} {value!r}, neither a list nor a number of layers")
        return tuple(every(i, value) for i in range(layers))


def flag(name: str) -> str:
    """An arg as it is written on a command line."""
    return "--" + name.replace("_", "-")


def close(a: Any, b: Any) -> bool:
    """Equality of settings that are fractions."""
    return isinstance(a, (int, float)) and abs(float(a) - float(b)) <= 1e-9 * max(1.0, abs(float(b)))


def same_pattern(layers: int, every: Callable[[int, int], bool], default: int | None) -> Callable[[Any, Any], bool]:
    """Equality of a flag a layer, however it is written."""

    def same(value: Any, expected: Any) -> bool:
        try:
            found = Args({"freq": value}).pattern("freq", layers, every=every, default=default)
        except UsageError:
            return False
        return bool([int(one) for one in found] == expected)

    return same


def dimensions_of(args: Mapping[str, Any], *, linear: bool) -> Dimensions:
    """What Megatron's args alone say.  `linear`: the family has linear attention, so which layers are has to be said.

    Raises UsageError with the flag of a value that has no default and is not there.
    """
    read = Args(args)
    layers, hidden, heads = read.need("num_layers"), read.need("hidden_size"), read.need("num_attention_heads")
    kinds = read.pattern("linear_attention_freq", layers, every=lambda i, n: (i + 1) % n != 0) if linear else (False,) * layers
    experts = read.number("num_experts", 0)
    every = read.pattern("moe_layer_freq", layers, every=lambda i, n: i % n == 0, default=1)
    dense = read.number("ffn_hidden_size", _gated_width(hidden) if args.get("swiglu") else 4 * hidden)
    return Dimensions(
        layers=layers,
        hidden=hidden,
        heads=heads,
        groups=read.need("num_query_groups") if args.get("group_query_attention") else heads,
        head_width=read.number("kv_channels", hidden // heads),
        vocabulary=read.number("padded_vocab_size", 0) or read.need("vocab_size"),
        kinds=tuple("linear_attention" if one else "attention" for one in kinds),
        moe=every if experts else (False,) * layers,
        output_gate=bool(args.get("attention_output_gate")),
        tied=not args.get("untie_embeddings_and_output_weights"),
        mtp=read.number("mtp_num_layers", 0),
        positions=read.number("max_position_embeddings", 0) or None,
        experts=experts,
        top_k=read.number("moe_router_topk", 2),
        routed=read.number("moe_ffn_hidden_size", dense),
        shared=read.number("moe_shared_expert_intermediate_size", 0),
        shared_gate=bool(args.get("moe_shared_expert_gate")),
        dense=dense,
        key_heads=read.number("linear_num_key_heads", 16) if linear else 0,
        key_width=read.number("linear_key_head_dim", 128) if linear else 0,
        value_heads=read.number("linear_num_value_heads", 32) if linear else 0,
        value_width=read.number("linear_value_head_dim", 128) if linear else 0,
        kernel=read.number("linear_conv_kernel_dim", 4) if linear else 0,
        qk_norm=bool(args.get("qk_layernorm")),
        qkv_bias=bool(args.get("add_qkv_bias")),
        expert_bias=bool(args.get("moe_router_enable_expert_bias")),
    )


def _gated_width(hidden: int) -> int:
    """Megatron's default for a gated MLP (training/arguments.py): two thirds of 4h, down to a multiple of 64."""
    return int(4 * hidden * 2 / 3 / 64) * 64
