"""An engine for tests: the real tiny model, generating and scoring, healthy or with a fault done to it.

Evidence is what this engine says, written as slime, miles, verl or plain lines write it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.family import family_of
from bisect_hooks.hf import Reference, Tokenizer

from bisect_tool.__main__ import run
from bisect_tool.hf_directory import read_config
from bisect_tool.prompts import Batch

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "golden/tiny-qwen3.5-moe"
PROMPTS = (
    "12+34=", "7+8=", "60+41=101;9+9=", "3+4=7;55+5=", "88+1=89;10+10=20;5+6=", "91+8=99;13+77=90;28+39=", "64+2=",
    "70+21=91;36+52=88;1+1=2;4+4=8;20+30=",
)  # fmt: skip
END = 2
Fault = Callable[[torch.nn.Module], AbstractContextManager[None]]


def healthy(_model: torch.nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Row:
    """One response, and the log-probs that were given to it."""

    text: str
    tokens: tuple[int, ...]
    start: int
    logs: tuple[float, ...]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> list[int]:
        return list(self.tokens[: self.start])

    @property
    def answer(self) -> list[int]:
        return list(self.tokens[self.start :])

    def with_logs(self, logs: Sequence[float]) -> Row:
        return replace(self, logs=tuple(float(one) for one in logs))

    def plus(self, **more: Any) -> Row:
        return replace(self, more=self.more | more)


class Engine:
    """The model, and what it says."""

    @cached_property
    def reference(self) -> Reference:
        config = read_config(MODEL)
        family = family_of(config)
        return Reference(MODEL, family, family.reference_dimensions(config), torch.float32, torch.device("cpu"))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(MODEL)

    @property
    def model(self) -> torch.nn.Module:
        found: torch.nn.Module = self.reference.model
        return found

    def logits(self, rows: Sequence[Sequence[int]], fault: Fault = healthy) -> list[torch.Tensor]:
        """[s v] of every row."""
        batch = Batch(tuple(map(tuple, rows)))
        with fault(self.model):
            found = self.reference.forward(batch.ids(), batch.mask())
        return [found[i, : len(row)].double() for i, row in enumerate(rows)]

    def score(self, tokens: Sequence[int], fault: Fault = healthy) -> torch.Tensor:
        """Log-probs [s] of every token in one pass; the first is NaN."""
        logs = self.logits([tokens], fault)[0][:-1].log_softmax(-1)
        return torch.cat([torch.tensor([torch.nan]), logs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]])

    def generate(
        self, prompts: Sequence[str | tuple[int, ...]] = PROMPTS, length: int = 20, fault: Fault = healthy, seed: int = 0,
        top_p: float = 1.0, temperature: float = 1.0,
    ) -> list[Row]:  # fmt: skip
        """Sampled responses with the log-probs they were drawn at; the same request is answered once."""
        key = (tuple(prompts), length, fault, seed, top_p, temperature)
        if key not in self.answered:
            self.answered[key] = self._generate(*key)
        return list(self.answered[key])

    @cached_property
    def answered(self) -> dict[Any, list[Row]]:
        return {}

    def _generate(
        self, prompts: Sequence[str | tuple[int, ...]], length: int, fault: Fault, seed: int, top_p: float, temperature: float
    ) -> list[Row]:
        generator = torch.Generator().manual_seed(seed)
        rows = [self.tokenizer.ids(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        starts = [len(row) for row in rows]
        logs: list[list[float]] = [[] for _ in rows]
        for _ in range(length):
            for i, logits in enumerate(self.logits(rows, fault)):
                kept = _nucleus((logits[-1] / temperature).softmax(-1), top_p)
                token = int(torch.multinomial(kept, 1, generator=generator))
                rows[i].append(token)
                logs[i].append(float(kept[token].log()))
        texts = [prompt if isinstance(prompt, str) else "" for prompt in prompts]
        return [Row(text, tuple(row), start, tuple(one)) for text, row, start, one in zip(texts, rows, starts, logs, strict=True)]


def _nucleus(chances: torch.Tensor, top_p: float) -> torch.Tensor:
    if top_p >= 1:
        return chances
    ordered, index = chances.sort(descending=True)
    count = int((ordered.cumsum(0) < top_p).sum()) + 1
    kept = torch.zeros_like(chances).scatter(0, index[:count], ordered[:count])
    return kept / kept.sum()


def noisy(rows: Sequence[Row], size: float, seed: int = 1) -> list[Row]:
    """Log-probs as another kernel gives them: off by a normal of this size."""
    generator = torch.Generator().manual_seed(seed)
    return [row.with_logs([min(0.0, log + size * float(torch.randn((), generator=generator))) for log in row.logs]) for row in rows]


# -- faults that are done to the model --------------------------------------------------------------------------------------


def hooked(kind: str, change: Callable[..., Any], *, before: bool = False) -> Fault:
    """A forward hook on every module whose path ends in `kind`."""

    @contextmanager
    def fault(model: torch.nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if name.endswith(kind):
                    handle = module.register_forward_pre_hook(change) if before else module.register_forward_hook(change)
                    stack.callback(handle.remove)
            yield

    return fault


def rewritten(change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Fault:
    """Weights written over, by name: what `change` gives nothing for stays."""

    @contextmanager
    def fault(model: torch.nn.Module) -> Iterator[None]:
        kept = {}
        for name, parameter in model.named_parameters():
            made = change(name, parameter.data)
            if made is not None:
                kept[name], parameter.data = parameter.data, made
        try:
            yield
        finally:
            for name, data in kept.items():
                model.get_parameter(name).data = data

    return fault


def times(factor: float, kind: str) -> Fault:
    return hooked(kind, lambda _module, _inputs, output: output * factor)


def local_experts(kept: int) -> Fault:
    """Experts beyond `kept` give nothing."""

    def drop(_module: Any, inputs: tuple[Any, ...]) -> Any:
        hidden, chosen, weights = inputs
        return hidden, chosen, weights * (chosen < kept)

    return hooked(".mlp.experts", drop, before=True)


def halves_swapped(name: str, data: torch.Tensor) -> torch.Tensor | None:
    if name.endswith("experts.gate_up_proj"):
        gate, up = data.chunk(2, 1)
        return torch.cat([up, gate], 1)
    return None


def experts_mod(modulus: int) -> Callable[[str, torch.Tensor], torch.Tensor | None]:
    """The fault of the seed: expert e holds expert e mod n."""

    def change(name: str, data: torch.Tensor) -> torch.Tensor | None:
        return data[torch.arange(len(data)) % modulus] if ".mlp.experts." in name else None

    return change


# -- what dumps look like ---------------------------------------------------------------------------------------------------


def slime_sample(row: Row, index: int, **more: Any) -> dict[str, Any]:
    """What slime's Sample.to_dict() gives."""
    return {
        "group_index": index // 2, "index": index, "prompt": row.text, "tokens": list(row.tokens), "response": "", "response_length": len(row.answer),
        "label": None, "reward": 1.0, "loss_mask": None, "weight_versions": ["1"], "rollout_log_probs": list(row.logs), "status": "completed" if row.answer[-1] == END else "truncated",
        "metadata": {}, "train_metadata": None, "spec_info": {"spec_accept_token_num": 0, "spec_draft_token_num": 0, "spec_verify_ct": 0},
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": row.start}, **row.more, **more,
    }  # fmt: skip


def slime_dump(path: Path, rows: Sequence[Row], rollout_id: int = 0, **more: Any) -> Path:
    torch.save({"rollout_id": rollout_id, "samples": [slime_sample(row, i, **more) for i, row in enumerate(rows)]}, path)
    return path


def train_dump(path: Path, rows: Sequence[Row], logs: Sequence[torch.Tensor]) -> Path:
    """slime's format 2."""
    samples = [
        {"data_parallel_rank": i % 2, "sample_index": i, "tokens": torch.tensor(row.tokens), "log_probs": one.float()}
        for i, (row, one) in enumerate(zip(rows, logs, strict=True))
    ]
    torch.save({"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "dp_shards": []}, path)
    return path


def lines(path: Path, rows: Sequence[Row]) -> Path:
    """Plain lines."""
    said = [
        {"prompt": row.text, "prompt_ids": row.prompt, "response_ids": row.answer, "logprobs": list(row.logs), **row.more} for row in rows
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in said))
    return path


def judged(out: Path, *arguments: str | Path, reference: Path = MODEL) -> tuple[int, dict[str, Any]]:
    """Exit code and report of `bisect-tool rollout` on the tiny model."""
    code = run(["rollout", "--reference", str(reference), *map(str, arguments), "--out", str(out)])
    page: dict[str, Any] = json.loads((out / "report.json").read_text())
    return code, page


def verdict(page: dict[str, Any]) -> list[dict[str, Any]]:
    """What a test asserts of each fault: everything but numbers and sentences."""
    return [
        {
            "class": fault["class"],
            "between": fault["between"],
            "layers": fault["layers"],
            "module": fault["module"],
            "parts": fault["parts"],
            "relation": fault["relation"]["kind"] if fault["relation"] else None,
        }
        for fault in page["faults"]
    ]


def fault_of(fault: dict[str, Any]) -> tuple[Any, ...]:
    """(class, layers, module, parts, between)"""
    parts = fault["parts"] or [one for one in [fault["part"]] if one]
    return fault["class"], fault["layers"], fault["module"], parts, fault["between"]


def said(page: dict[str, Any]) -> str:
    """Notes of the engine stage, and what it clears."""
    stage = page["stages"][4]
    return "\n".join([*stage["notes"], *(f"cleared: {one['suspect']} ({one['why']})" for one in stage["cleared"])])
