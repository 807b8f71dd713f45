"""Multi-token prediction: one more layer behind a projection of [embedding; hidden].  Compared as weights only.

Source: megatron-core `transformer/multi_token_prediction.py`; transformers has no module for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bisect_hooks.blocks.config import Key
from bisect_hooks.blocks.place import ROWS, Place
from bisect_hooks.errors import UsageError
from bisect_hooks.family import Dimensions
from bisect_hooks.site import Site
from bisect_hooks.table import Made, Rule

LEFT_OUT = "multi-token prediction, left out by the candidate's flags"
COPY = "multi-token prediction's copy of the embedding or the head, which Megatron shares"


@dataclass(frozen=True, slots=True)
class Mtp:
    """What a family calls its tensors.  `{layers}` in a name is the number of decoder layers.

    own     prefix of everything that is MTP           names  (eh_proj, enorm, hnorm, final_norm)
    layer   prefix of the layer itself                 copies ends of what repeats the model's own embedding and head
    """

    count: int | Key
    own: str = "mtp."
    names: tuple[str, ...] = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    layer: str = "mtp.layers.0."
    copies: tuple[str, ...] = ()

    def tensors(self, names: Iterable[str], dims: Dimensions) -> list[str]:
        """The reference's tensors that are MTP."""
        prefix = self.own.format(layers=dims.layers)
        return [name for name in names if name.startswith(prefix)]

    def left_out(self, name: str, dims: Dimensions) -> str | None:
        if name.startswith(self.own.format(layers=dims.layers)):
            return COPY if name.endswith(self.copies or ("\0",)) else LEFT_OUT
        return None

    def rules(self, dims: Dimensions, layer_rules: Callable[[Place], list[Rule]]) -> list[Rule]:
        """`layer_rules` makes the rules of the layer inside: full attention and the family's feed-forward part."""
        if dims.mtp > 1:
            raise UsageError(f"{dims.mtp} MTP layers: only one is known to share {self.names[0]} and its norms")
        own = "mtp.layers.0."
        made = {
            "eh_proj": Made(f"{own}eh_proj.weight", ROWS),
            "enorm": Made(f"{own}enorm.weight"),
            "hnorm": Made(f"{own}hnorm.weight"),
            "final_norm": Made(f"{own}final_layernorm.weight"),
        }
        outer = [
            Rule(Site("mtp", 0, part), (f"{name.format(layers=dims.layers)}.weight",), (made[part],))
            for name, part in zip(self.names, made, strict=True)
        ]
        return [*outer, *layer_rules(Place(0, self.layer.format(layers=dims.layers), f"{own}transformer_layer.", mtp=True))]
