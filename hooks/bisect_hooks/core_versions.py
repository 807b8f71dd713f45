"""What some releases of megatron-core lack, or call otherwise than 0.16 does.  Nothing else asks which release is there.

`make versions` says which ones were run (docs/versions.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from bisect_hooks.errors import UsageError

# a word of the config that 0.15 has in the layer spec
BY_SPEC = "moe_shared_expert_gate"


def config_of(**wanted: Any) -> Any:
    """A TransformerConfig of the words that this release knows.  Raises UsageError for one that it lacks and that is not off."""
    from megatron.core import __version__
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {one.name for one in fields(TransformerConfig)}
    lacking = [name for name, value in wanted.items() if name not in {*known, BY_SPEC} and value]
    if lacking:
        more = f" and {len(lacking) - 1} more words" if len(lacking) > 1 else ""
        raise UsageError(
            f"megatron-core {__version__} has no {lacking[0]}{more} that this candidate's args ask for", hint="megatron-core 0.16 has"
        )
    return TransformerConfig(**{name: value for name, value in wanted.items() if name in known})


def shared_expert_params(gate: bool) -> dict[str, Any]:
    """What the spec of a shared expert says beside its modules: 0.15 is told of the gate there (moe_layer.py:163)."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {} if BY_SPEC in {one.name for one in fields(TransformerConfig)} else {"gate": gate}


def mtp_submodules(layer: Any, **around: Any) -> Any:
    """What an MTP layer is made of: 0.19 calls the layer inside it otherwise, in memory alone (multi_token_prediction.py:1557)."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules as Submodules

    name = next(one.name for one in fields(Submodules) if one.name in ("transformer_layer", "mtp_model_layer"))
    return Submodules(**{name: layer}, **around)


def prepare_delta_net(l2norm: Callable[..., torch.Tensor]) -> None:
    """Lets the gated delta net be built without flash-linear-attention (`l2norm` in its place), and be heard under the names of 0.16.

    0.15 has none.  0.19 made a package of the module: it normalises queries and keys in one call (common.py:411), and binds the
    rule when it is built (gdn.py:60).  Here they are two calls again, and the rule is looked up when it is called.
    """
    try:
        from megatron.core.ssm import gated_delta_net as own
    except ImportError:
        return
    kernels = getattr(own, "common", own)
    if not kernels.HAVE_FLA:
        # gated_delta_net.py:104 refuses to build without fla; with deterministic_mode it needs only fla's l2norm (:280)
        kernels.HAVE_FLA = True
        own.l2norm = l2norm
    if kernels is not own:
        kernels.l2norm = lambda both: torch.cat([own.l2norm(one) for one in both.chunk(2, dim=2)], dim=2)
        own.gdn.torch_chunk_gated_delta_rule = lambda *args, **more: own.torch_chunk_gated_delta_rule(*args, **more)
