"""What a foreign module's output is here: engines' names (SGLang, vLLM), every module that the family taps on either side, our own sites.

Engines fuse: q, k and v (with the gate's rows between those of q, head by head), gate and up, the projections of the linear
attention, and the residual, which travels beside a layer's own output.  Taken apart they are the family's pieces.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import Dimensions, Family
from bisect_hooks.site import parse_site
from bisect_hooks.tap import Tap, split_key

from bisect_tool.flow import word
from bisect_tool.recording import NOWHERE, in_order

PREFIX = re.compile(r"^(?:module\.)*(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)?")
WHOLE, CUT = "b s f", "b s f[tp]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of ours: its key, its layout, and this rank's part of it."""

    key: str
    layout: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Fused:
    """One engine module: names of its pieces and how wide each is on one rank.  partial: ranks may hold summands of it"""

    site: str
    layout: str = WHOLE
    partial: bool = False
    split: Callable[[torch.Tensor, Dimensions, int], dict[str, torch.Tensor]] = lambda tensor, _dims, _tp: {"": tensor}


def _qkv(tensor: torch.Tensor, dims: Dimensions, tp: int) -> dict[str, torch.Tensor]:
    if dims.groups % tp:
        raise UsageError(f"k and v are repeated on ranks at TP {tp} with {dims.groups} KV heads, which is not known apart")
    width, heads, groups = dims.head_width, dims.heads // tp, dims.groups // tp
    queries = heads * width * (2 if dims.output_gate else 1)
    q, k, v = tensor.split([queries, groups * width, groups * width], -1)
    if not dims.output_gate:
        return {"q": q, "k": k, "v": v}
    both = q.reshape(*q.shape[:-1], heads, 2, width)
    return {"q": both[..., 0, :].flatten(-2), "gate": both[..., 1, :].flatten(-2), "k": k, "v": v}


def _qkvz(tensor: torch.Tensor, dims: Dimensions, tp: int) -> dict[str, torch.Tensor]:
    sizes = [dims.key_rows // tp, dims.key_rows // tp, dims.value_rows // tp, dims.value_rows // tp]
    return dict(zip(("q", "k", "v", "z"), tensor.split(sizes, -1), strict=True))


def _halves(*names: str) -> Callable[[torch.Tensor, Dimensions, int], dict[str, torch.Tensor]]:
    return lambda tensor, _dims, _tp: dict(zip(names, tensor.chunk(2, -1), strict=True))


ENGINE: dict[str, Fused] = {
    "embed_tokens": Fused("embedding"),
    "layers.*.input_layernorm": Fused("layers.*.input_norm"),
    "layers.*.self_attn.qkv_proj": Fused("layers.*.attention.qkv", CUT, split=_qkv),
    "layers.*.self_attn.q_norm": Fused("layers.*.attention.q_norm", CUT),
    "layers.*.self_attn.k_norm": Fused("layers.*.attention.k_norm", CUT),
    "layers.*.self_attn.attn": Fused("layers.*.attention.core", CUT),
    "layers.*.self_attn.o_proj": Fused("layers.*.attention.out_proj", partial=True),
    "layers.*.linear_attn.in_proj_qkvz": Fused("layers.*.linear_attention.in_proj", CUT, split=_qkvz),
    "layers.*.linear_attn.in_proj_ba": Fused("layers.*.linear_attention.in_proj", CUT, split=_halves("beta", "alpha")),
    "layers.*.linear_attn.attn": Fused("layers.*.linear_attention.core", CUT),
    "layers.*.linear_attn.norm": Fused("layers.*.linear_attention.gated_norm", CUT),
    "layers.*.linear_attn.out_proj": Fused("layers.*.linear_attention.out_proj", partial=True),
    "layers.*.post_attention_layernorm": Fused("layers.*.pre_mlp_norm"),
    "layers.*.mlp.gate": Fused("layers.*.router.logits"),
    "layers.*.mlp.experts": Fused("layers.*.experts.combine", partial=True),
    "layers.*.mlp.shared_expert.gate_up_proj": Fused("layers.*.shared_expert.fc1", CUT, split=_halves("gate", "up")),
    "layers.*.mlp.shared_expert.down_proj": Fused("layers.*.shared_expert.fc2", partial=True),
    "layers.*.mlp.gate_up_proj": Fused("layers.*.mlp.fc1", CUT, split=_halves("gate", "up")),
    "layers.*.mlp.down_proj": Fused("layers.*.mlp.fc2", partial=True),
    "layers.*": Fused("layers.*.output", partial=True),
    "norm": Fused("final_norm"),
    "lm_head": Fused("lm_head", CUT),
    "logits_processor": Fused("lm_head"),
}
# a chooser's output: probabilities and numbers of the experts of each token, in whatever order the kernel wrote them
TOPK = re.compile(r"layers\.(\d+)\.mlp\.(?:topk|gate\.topk|router\.topk)")
# sites that are as wide as the hidden state, whatever else the model is
HIDDEN = (
    "embedding",
    "input",
    "input_norm",
    "linear_attention.out_proj",
    "attention.out_proj",
    "pre_mlp_norm",
    "experts.combine",
    "output",
    "final_norm",
)


class Names:
    """Knows what a module's output is.  `given` maps their names to ours, `*` standing for a layer's number.

    Raises UsageError for a map to what this model does not have.
    """

    def __init__(self, family: Family, dims: Dimensions, given: Mapping[str, str]) -> None:
        self.dims, self.given = dims, given
        taps = [*family.candidate_taps(dims, "native"), *family.candidate_taps(dims, "slime"), *family.reference_taps(dims)]
        self.taps: dict[str, Tap] = {PREFIX.sub("", tap.path): tap for tap in taps if tap.at == "output" and tap.transform is None}
        self.ours = {key for tap in taps for key in tap.keys}
        self.expected = {key for tap in family.reference_taps(dims) for key in tap.keys} | {
            one.key for one in family.derived(dims, "reference")
        }
        for theirs, ours in given.items():
            self._check(theirs, ours)

    def pieces(self, name: str, outputs: Sequence[torch.Tensor], tp: int, shape: tuple[int, int]) -> list[Piece]:
        """This rank's tensors of a module's outputs, [] for a name that is not known.  Raises UsageError where one does not fit.

        shape  [b s] of the token ids
        """
        path = PREFIX.sub("", name)
        given = next((known for theirs, ours in self.given.items() if (known := _renamed(theirs, ours, name))), None)
        if given in self.ours or given in ("tokens",):
            return [Piece(str(given), WHOLE, rows(outputs[0], shape))]
        if given is None and self.own(name):
            return [Piece(name, WHOLE, rows(outputs[0], shape))]
        path = PREFIX.sub("", given) if given else path
        chosen = TOPK.fullmatch(path)
        if chosen and len(outputs) > 1:
            return self._chosen(int(chosen[1]), outputs, shape)
        kind = _starred(path)
        number = re.search(r"\blayers\.(\d+)", path)
        fused = ENGINE.get(kind)
        if fused is not None:
            site = fused.site.replace("*", number[1] if number else "")
            whole = _summed(outputs) if kind == "layers.*" else outputs[0]
            parts = fused.split(rows(whole, shape), self.dims, tp)
            return [Piece(f"{site}:{piece}" if piece else site, fused.layout, part) for piece, part in parts.items()]
        tap = self.taps.get(path)
        if tap is None:
            return []
        missing_batch = outputs[0].dim() == len(tap.parsed.items) - 1 and shape[0] == 1
        return [
            Piece("|".join(tap.keys), tap.layout, outputs[0].unsqueeze(int(tap.layout.startswith("s"))) if missing_batch else outputs[0])
        ]

    def _check(self, theirs: str, ours: str) -> None:
        path = PREFIX.sub("", ours)
        number = re.match(r"layers\.(\d+)", path)
        exact = {*self.ours, *self.taps, "tokens"}
        kinds = {*map(_starred, exact), *ENGINE}
        if "*" in ours:
            there = "*" in theirs and path in kinds
        else:
            there = path in exact or (_starred(path) in ENGINE and (number is None or int(number[1]) < self.dims.layers))
        if not there:
            near = f"nearest: {', '.join(self.nearest(ours)) or 'none'}; of {self.dims.layers} layers, and * only where their name has one"
            raise UsageError(f"--map calls {theirs} {ours}, and this model has no such site", hint=near)

    def own(self, name: str) -> bool:
        """Whether a name is a key of ours, and no module's path on either side."""
        return name in self.ours and name not in self.taps and name not in ENGINE

    def fitting(self, piece: Piece) -> Piece:
        """The piece.  Raises UsageError for a layer that the model has not, and where it has to be as wide as the hidden state and is not."""
        if not self.ours.issuperset(piece.key.split("|")):
            raise UsageError(f"it would be {piece.key}, and config.json has no such site in its {self.dims.layers} layers")
        site = parse_site(split_key(piece.key)[0]) if "|" not in piece.key else None
        if site is not None and word(site) in HIDDEN and piece.tensor.shape[-1] != self.dims.hidden:
            raise UsageError(f"{piece.key} is {piece.tensor.shape[-1]} wide, and config.json has a hidden size of {self.dims.hidden}")
        return piece

    def absent(self, known: Collection[str], unknown: Collection[str]) -> dict[str, str]:
        """Keys of the reference that are not known of the dump, and why: what no layer has is not its format's, but for a layer's output."""
        held = {key for one in known for key in one.split("|")}
        kinds = set(map(_starred, held))
        more = (
            f", and {len(unknown)} of its names {'is' if len(unknown) == 1 else 'are'} not known (first {next(iter(unknown))})"
            if unknown
            else ""
        )
        lost = in_order(self.expected - held - {"tokens"})
        return {key: f"the dump has none of it{more}" if _starred(key) in kinds | {"layers.*.output"} else NOWHERE for key in lost}

    def partial(self, name: str) -> bool:
        """Whether ranks may hold summands of a module's output."""
        fused = ENGINE.get(_starred(PREFIX.sub("", name)))
        return fused is not None and fused.partial

    def nearest(self, name: str) -> list[str]:
        kind = _starred(PREFIX.sub("", name))
        known = [*ENGINE, *map(_starred, self.taps), *map(_starred, self.ours)]
        return difflib.get_close_matches(kind, dict.fromkeys(known), n=3, cutoff=0.4)

    def _chosen(self, layer: int, outputs: Sequence[torch.Tensor], shape: tuple[int, int]) -> list[Piece]:
        numbers = next((one for one in outputs if not one.is_floating_point()), None)
        weights = next((one for one in outputs if one.is_floating_point() and numbers is not None and one.shape == numbers.shape), None)
        if numbers is None or weights is None:
            return []
        empty = torch.zeros(*numbers.shape[:-1], self.dims.experts)
        dense = {"probs": empty.scatter(-1, numbers.long(), weights.float()), "topk": empty.scatter(-1, numbers.long(), 1.0)}
        return [Piece(f"layers.{layer}.router.{part}", WHOLE, rows(tensor, shape)) for part, tensor in dense.items()]


def _starred(path: str) -> str:
    """A name with `*` for a layer's number."""
    return re.sub(r"\b(layers\.)\d+", r"\1*", path)


def _renamed(theirs: str, ours: str, name: str) -> str | None:
    match = re.fullmatch(re.escape(theirs).replace(r"\*", r"(\d+)"), name)
    return None if match is None else ours.replace("*", match[1]) if match.groups() else ours


def _summed(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A layer's own output and the residual that travels beside it."""
    first = outputs[0].float()
    alike = [one for one in outputs[1:] if one.shape == outputs[0].shape]
    return first + alike[0].float() if alike else first


def rows(tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A tensor with a row, or some rows one behind the other, a token → [b s f].  Raises UsageError where rows and tokens differ."""
    tokens = shape[0] * shape[1]
    leading = tensor.shape[0] * tensor.shape[1] if tensor.dim() == 3 and tuple(tensor.shape[:2]) == shape else tensor.shape[0]
    if tensor.dim() < 2 or leading % tokens or leading == 0:
        raise UsageError(f"it is {tuple(tensor.shape)} where the pass has {tokens} tokens")
    return tensor.reshape(*shape, -1)
