"""A recorder for a rollout engine's process: one file that needs nothing but torch, switched on by an environment variable.

    BISECT_RECORD=/somewhere python -m sglang.launch_server ...      with, in the engine's model runner, after the model is loaded:
    from bisect_hooks import engine; engine.attach(model, tp_rank=rank, tp_size=size)  # a no-op unless BISECT_RECORD is set

Where the package is not installed, copy this one file and import it by whatever name it was given.  The first forward with BISECT_RECORD_TOKENS tokens or
more (default 2: a prefill, not a decode step) leaves `rank<r>.pt`, which `bisect-tool import torch` reads.  With BISECT_RECORD_STEPS=N
the N decode steps that follow are put behind it, where one request runs alone: what decode computes.  Module names are those of
SGLang's and vLLM's Qwen3.5, Qwen3-MoE and Llama.  CUDA graphs and torch.compile skip hooks: run eagerly (SGLang --disable-cuda-graph,
vLLM --enforce-eager).  Only tensors are written, with torch.save; a forward is left as it was, and an error here never reaches it.

Written from the engines' sources; it was not run against a live engine.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

SWITCH, LEAST, STEPS = "BISECT_RECORD", "BISECT_RECORD_TOKENS", "BISECT_RECORD_STEPS"
LAYER = r"(?:[\w.]*\.)?layers\.\d+"
# modules whose outputs have a place in a recording; a layer itself gives its own part and the residual beside it
WANTED = re.compile(
    rf"(?:[\w.]*\.)?(?:embed_tokens|norm|lm_head|logits_processor)|{LAYER}"
    rf"|{LAYER}\.(?:input_layernorm|post_attention_layernorm)"
    rf"|{LAYER}\.self_attn\.(?:qkv_proj|q_proj|k_proj|v_proj|q_norm|k_norm|attn|o_proj)"
    rf"|{LAYER}\.linear_attn\.(?:in_proj_qkvz|in_proj_qkv|in_proj_z|in_proj_ba|attn|norm|out_proj)"
    rf"|{LAYER}\.mlp\.(?:gate|topk|experts|shared_expert_gate|gate_up_proj|down_proj|shared_expert\.gate_up_proj|shared_expert\.down_proj)"
)
log = logging.getLogger("bisect.engine")


def attach(model: torch.nn.Module, tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1) -> Callable[[], None]:
    """Listens to `model` if BISECT_RECORD names a directory.  Returns what takes the hooks off again."""
    out = os.environ.get(SWITCH)
    if not out:
        return lambda: None
    at, sizes = {"tp": tp_rank, "pp": pp_rank}, {"tp": tp_size, "pp": pp_size}
    recorder = Recorder(out, at, sizes, int(os.environ.get(LEAST, "2")), int(os.environ.get(STEPS, "0")))
    recorder.listen(model)
    return recorder.remove


class Recorder:
    """Keeps the outputs of one forward pass, and of `steps` decode steps behind it, writes them and is silent."""

    def __init__(self, out: str, at: dict[str, int], sizes: dict[str, int], least: int, steps: int = 0) -> None:
        self.out, self.at, self.sizes, self.least, self.steps = out, at, sizes, least, steps
        self.found: dict[str, Any] = {}
        self.passes: list[dict[str, Any]] = []
        self.keeping = self.done = False
        self.handles: list[Any] = []

    def listen(self, model: torch.nn.Module) -> None:
        """Hooks the model and every module of it that is known."""
        self.handles.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        for name, module in model.named_modules():
            if WANTED.fullmatch(name):
                self.handles.append(module.register_forward_hook(self._hear(name)))
        self.handles.append(model.register_forward_hook(self._end, always_call=True))
        log.warning("recording the first forward of at least %d tokens to %s", self.least, self.out)

    def remove(self) -> None:
        """Takes every hook off."""
        while self.handles:
            self.handles.pop().remove()

    def _begin(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = next((one for one in (kwargs.get("input_ids"), *args) if _is_ids(one)), None)
        enough = ids is not None and (ids.numel() == 1 if self.passes else ids.numel() >= self.least)
        self.keeping = not self.done and enough
        if not self.keeping or ids is None:
            return
        positions = next((one for one in (kwargs.get("positions"), *args[1:]) if _is_ids(one) and one.numel() == ids.numel()), None)
        self.found = {"input_ids": _kept(ids)} | ({} if positions is None else {"positions": _kept(positions)})
        lengths = next((one for one in (_lengths(thing) for thing in (*args, *kwargs.values())) if one is not None), None)
        if lengths is not None and int(lengths.sum()) == ids.numel():
            self.found["seq_lens"] = _kept(lengths)

    def _hear(self, name: str) -> Callable[..., None]:
        def after(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            if not self.keeping:
                return
            tensors = list(_tensors(output))
            for i, tensor in enumerate(tensors):
                # the residual is changed in place by what comes next, so it is copied now
                self.found.setdefault(name if len(tensors) == 1 else f"{name}:{i}", _kept(tensor))

        return after

    def _end(self, *_: Any) -> None:
        if not self.keeping:
            return
        self.keeping = False
        self.passes.append(self.found)
        alone = self.passes[0].get("seq_lens") is None or self.passes[0]["seq_lens"].numel() == 1
        self.done = len(self.passes) > self.steps or not alone
        if self.done:
            self._write()

    def _write(self) -> None:
        first = self.passes[0]
        page = first | {"meta": {"at": self.at, "sizes": self.sizes}}
        if len(self.passes) > 1:
            names = [name for name in first if name != "seq_lens" and all(name in one for one in self.passes)]
            page = {name: torch.cat([one[name] for one in self.passes]) for name in names} | {"meta": page["meta"]}
            page["meta"] = page["meta"] | {"decoded": first["input_ids"].numel()}
        try:
            os.makedirs(self.out, exist_ok=True)  # noqa: PTH103 - one file without our own helpers, old engines included
            rank = self.at["pp"] * self.sizes["tp"] + self.at["tp"]
            target = f"{self.out}/rank{rank:05d}.pt"
            torch.save(page, target + ".partial")
            os.replace(target + ".partial", target)  # noqa: PTH105
            log.warning("wrote %s: %d tensors", target, len(page) - 1)
        except OSError as error:
            log.error("nothing was recorded: %s", error)
        self.found, self.passes = {}, [{}]


def _is_ids(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and not thing.is_floating_point() and thing.dtype != torch.bool and thing.dim() > 0


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _lengths(thing: Any) -> torch.Tensor | None:
    """SGLang's ForwardBatch says how many tokens of each sequence a prefill holds."""
    for name in ("extend_seq_lens", "seq_lens"):
        found = getattr(thing, name, None)
        if isinstance(found, torch.Tensor):
            return found
    return None


def _tensors(output: Any) -> Iterable[torch.Tensor]:
    """Tensors of an output: itself, those of a tuple, or the fields of an object (SGLang's top-k and logits)."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        yield from (one for one in output if isinstance(one, torch.Tensor))
    else:
        for name in ("topk_weights", "topk_ids", "next_token_logits"):
            found = getattr(output, name, None)
            if isinstance(found, torch.Tensor):
                yield found
