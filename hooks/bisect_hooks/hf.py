"""The reference's side: transformers' own modules, eager attention.  The only file that imports transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging as transformers_logging

from bisect_hooks.errors import UsageError, by_kind, first_line
from bisect_hooks.family import Derived, Dimensions, Family
from bisect_hooks.parallel import Parallel
from bisect_hooks.tap import NO_GRAFT, Graft, Heard, Tap, find, listening

VERSION = transformers.__version__
ONE = Parallel()

# where the reference computes the same function another way: what the noise floor is measured with
WRITES_HIDDEN = ("o_proj", "out_proj", "down_proj")
CHUNKED_RULES, CHUNK = ("torch_chunk_gated_delta_rule",), 64
ATTENTION = "eager_attention_forward"


class Reference:
    """A reference model in eval mode, and how to run it."""

    def __init__(self, path: Path, family: Family, dims: Dimensions, dtype: torch.dtype, device: torch.device) -> None:
        quiet()
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                path,
                config=_text_config(path),
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                local_files_only=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            sizes = "ignore_mismatched_sizes" in str(error)
            why = "the sizes in its config.json are not those of its tensors" if sizes else first_line(error)
            raise UsageError(f"transformers can't load {path}: {why}") from error
        check_known(self.model, family, dims)
        look_up_when_called(self.model)
        self.model.to(device).eval().requires_grad_(False)
        self.family, self.dims, self.dtype, self.device = family, dims, dtype, device
        self.taps = family.reference_taps(dims)
        self.derived = family.derived(dims, "reference")
        self.order: torch.Tensor | None = None

    def put(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrites parameters by their canonical names (a lossy row of the table: both sides then have what it makes)."""
        named = dict(self.model.named_parameters())
        for name, tensor in weights.items():
            named[name].data.copy_(tensor)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """ids, mask [b s] → logits [b s v]"""
        with torch.no_grad():
            output = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device), use_cache=False)
        return output.logits  # type: ignore[no-any-return]

    def record(self, ids: torch.Tensor, mask: torch.Tensor, graft: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Every canonical tensor [b s f] by key, from one forward.  `graft` puts values in their place on the way."""
        sizes = {"b": ids.shape[0], "s": ids.shape[1]}
        at = ONE.coordinates(0)
        if graft and self.order is not None:
            graft = {key: value[..., self.order] if key in self._hidden else value for key, value in graft.items()}
        with listening(self.model, self.taps, Graft(graft, at, sizes, ONE) if graft else NO_GRAFT, where=" on the reference") as heard:
            self.forward(ids, mask)
        back = dict.fromkeys(self._hidden, self.order.argsort()) if self.order is not None else {}
        return canonical(heard, self.taps, self.derived, sizes, back)

    @property
    def _hidden(self) -> set[str]:
        """Keys whose features are the hidden dimension: their layout calls it h."""
        return {key for tap in self.taps if re.search(r"\bh$", tap.layout) for key in tap.keys}

    def fired(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, int]:
        """One forward: how often each tap fired, by its id."""
        with listening(self.model, self.taps, strict=False) as heard:
            self.forward(ids, mask)
        return heard.times(self.taps)

    def probe_experts(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Every expert on the same rows [t h]: (fc1 [e t 2f], activation [e t f], fc2 [e t h]), with the module's own weights."""
        experts = find(self.model, f"model.layers.{layer}.mlp.experts")
        rows = rows.to(self.device, self.dtype)
        with torch.no_grad():
            first = torch.stack([torch.nn.functional.linear(rows, weight) for weight in experts.gate_up_proj])
            gate, up = first.chunk(2, dim=-1)
            inner = experts.act_fn(gate) * up
            second = torch.stack([torch.nn.functional.linear(one, weight) for one, weight in zip(inner, experts.down_proj, strict=True)])
        return first, inner, second

    @contextmanager
    def another_order(self) -> Iterator[None]:
        """The same function by other sums: half the chunk of the delta rule, experts in one batched product, attention in one call."""
        module = __import__(type(self.model).__module__, fromlist=["x"])
        before = self.model.config._experts_implementation
        originals = {name: getattr(module, name) for name in (*CHUNKED_RULES, ATTENTION) if hasattr(module, name)}
        try:
            self.model.set_experts_implementation("batched_mm")
            for name, original in originals.items():
                # torch's own attention rounds inside in other places than eager does, as a candidate's will
                setattr(module, name, sdpa_attention_forward if name == ATTENTION else _with_half_a_chunk(original))
            yield
        finally:
            self.model.set_experts_implementation(before)
            for name, original in originals.items():
                setattr(module, name, original)

    @contextmanager
    def hidden_permuted(self, seed: int) -> Iterator[None]:
        """The same function with the hidden dimension in another order: weights, grafts and what is heard are put in order again."""
        self.order = torch.randperm(self.dims.hidden, generator=torch.Generator().manual_seed(seed)).to(self.device)
        kept = {name: parameter.data for name, parameter in self.model.named_parameters()}
        try:
            for name, parameter in self.model.named_parameters():
                parameter.data = self._permuted(name, parameter.data)
            yield
        finally:
            self.order = None
            for name, parameter in self.model.named_parameters():
                parameter.data = kept[name]

    def _permuted(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A weight's hidden dimension is its last, but for projections back to it; vectors have one where they norm it."""
        if name.endswith(("layernorm.weight", "model.norm.weight")):
            return weight[self.order]
        if weight.dim() < 2 or "conv1d" in name:
            return weight
        written = name.removesuffix(".weight").rpartition(".")[2] in WRITES_HIDDEN
        return weight[..., self.order, :] if written else weight[..., self.order]

    @contextmanager
    def half_an_ulp_off(self, seed: int) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Every weight moved by up to half a unit in its last place; yields the same for an input."""
        generator = torch.Generator().manual_seed(seed)
        ulp = torch.finfo(self.dtype).eps / 2
        kept = {name: parameter.data.clone() for name, parameter in self.model.named_parameters()}

        def nudge(tensor: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(tensor.shape, generator=generator).mul_(2).sub_(1).to(tensor.device)
            return (tensor.float() * (1 + ulp * noise)).to(tensor.dtype)

        try:
            for parameter in self.model.parameters():
                parameter.data = nudge(parameter.data)
            yield nudge
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.data = kept[name]


def check_known(model: torch.nn.Module, family: Family, dims: Dimensions) -> None:
    """Raises UsageError that lists every module and every tensor of a built reference that the family's tables don't account for.

    A module without weights shows in no checkpoint, and a tensor that the checkpoint lacks is made up by transformers.
    """
    modules, tensors = not_known(model, family, dims)
    if modules or tensors:
        said = [f"the module {one}" for one in by_kind(modules, "modules")] + [f"the tensor {one}" for one in by_kind(tensors)]
        raise UsageError(
            f"{family.name} does not understand {len(modules) + len(tensors)} parts of {type(model).__name__} "
            f"in transformers {VERSION}: {'; '.join(said)}",
            hint="nothing was compared: what these change is not in its tables (docs/add-a-family.md)",
        )


def look_up_when_called(model: torch.nn.Module) -> None:
    """Rules that a module of transformers 5.3 binds when it is built are looked up when they are called, so that they are heard."""
    owner = import_module(type(model).__module__)
    for name in CHUNKED_RULES:
        rule = getattr(owner, name, None)
        for module in model.modules():
            for attribute in [key for key, value in vars(module).items() if rule is not None and value is rule]:
                setattr(module, attribute, _late(owner, name))


def _late(owner: Any, name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def not_known(model: torch.nn.Module, family: Family, dims: Dimensions) -> tuple[list[str], list[str]]:
    """(modules with their class, tensors) of a model that a family's tables don't account for."""
    known = family.reference_modules(dims)
    modules = [f"{name} of {type(module).__name__}" for name, module in model.named_modules() if name not in known]
    tabled = {name for rule in family.rules(dims, "native", (), mtp=False) for name in rule.references}
    return modules, [name for name in model.state_dict() if name not in tabled and family.left_out(name, dims) is None]


def empty_model(path: Path) -> torch.nn.Module:
    """The model that transformers makes of a config.json, without weights.  Raises UsageError for one that it does not know."""
    quiet()
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(_text_config(path))  # type: ignore[no-any-return]
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        raise UsageError(f"transformers can't make a model of {path / 'config.json'}: {first_line(error)}") from error


def canonical(
    heard: Heard,
    taps: tuple[Tap, ...],
    derived: tuple[Derived, ...],
    sizes: Mapping[str, int],
    order: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> dict[str, torch.Tensor]:
    """What a one-rank side heard, in canonical order by key; `order` puts the features of some keys in another."""
    found = {}
    for tap in taps:
        gathered = tap.parsed.gather([(ONE.coordinates(0), heard.one(tap))], sizes, ONE)
        for key, piece in zip(tap.keys, tap.parsed.pieces, strict=True):
            tensor = gathered[piece].tensor
            found[key] = tensor[..., order[key]] if key in order else tensor
    for made in derived:
        found[made.key] = made.formula(*(found[key] for key in made.sources))
    return found


class Tokenizer:
    """The tokenizer of a directory: text or messages → token ids, and back."""

    def __init__(self, path: Path) -> None:
        quiet()
        if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")):
            raise UsageError(
                f"{path} has no tokenizer, and a prompt is text", hint="give prompts as input_ids (JSONL), or add tokenizer.json"
            )
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:
            raise UsageError(f"the tokenizer of {path} can't be loaded: {first_line(error)}") from error

    def ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return [int(token) for token in self.tokenizer(prompt)["input_ids"]]
        if not self.tokenizer.chat_template:
            raise UsageError("messages need a chat template, and this tokenizer has none", hint="give prompts as text or input_ids")
        try:
            text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise UsageError(f"the chat template does not take these messages: {first_line(error)}") from error
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def plain(self, text: str) -> list[int]:
        """Text as it stands, with no special token put before or behind it."""
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    @property
    def begin(self) -> int | None:
        return self.tokenizer.bos_token_id  # type: ignore[no-any-return]

    @property
    def end(self) -> int | None:
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]


def quiet() -> None:
    """transformers says on every load which fast kernels are not installed; none of them is wanted here."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _text_config(path: Path) -> Any:
    """The text model's config also where config.json wraps it: loading a text checkpoint with the outer class is a trap."""
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UsageError(f"transformers can't read {path / 'config.json'}: {first_line(error)}") from error
    return config.get_text_config()


def _with_half_a_chunk(original: Callable[..., Any]) -> Callable[..., Any]:
    """A rule in chunks of half of what its rows fill of one: half of 64 would leave rows of up to 32 tokens in one chunk as before."""

    def chunked(*args: Any, **kwargs: Any) -> Any:
        length = (args[0] if args else kwargs["query"]).shape[1]
        return original(*args, **{**kwargs, "chunk_size": max(1, min(CHUNK, length) // 2)})

    return chunked
