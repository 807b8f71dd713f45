"""Train the embedded tiny Qwen3.5-MoE on two-digit additions: `make train`.

Random weights hide faults: their activations, routing and norms look like no model's, and a wrong expert does not show in an
answer.  A model that adds does show it.  The geometry is `golden/config.json`; every size differs from every other on purpose,
so that a swapped or mis-cut axis can't fit by luck.

Sums are trained in rows of eight, so that rows are longer than one chunk of the delta rule (64 tokens) and the linear attention
has a past to forget.  One sum in twenty is held out; at least 95 % of those have to come out right, in fp32 from the *stored*
values, or nothing is written.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ["<pad>", "<bos>", "<eos>"]
SUMS_PER_ROW, ROWS = 8, 12
HELD_OUT = 500
FP32 = ("A_log", "dt_bias")
PREFIX = "model.language_model."


def make_tokenizer() -> Tokenizer:
    """One token a byte, after three specials: any prompt can be written, and digits stay digits."""
    vocab = {word: index for index, word in enumerate(SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer


def split_sums(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of numbers below 100, as (trained on, held out)."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def make_batch(tokenizer: Tokenizer, pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of sums `12+34=46;`, as (ids [b s], labels [b s] with -100 where nothing is asked)."""
    rows, labels = [], []
    for start in range(0, len(pairs), SUMS_PER_ROW):
        ids, label = [BOS], [-100]
        for a, b in pairs[start : start + SUMS_PER_ROW]:
            question, answer = (tokenizer.encode(text, add_special_tokens=False).ids for text in (f"{a}+{b}=", f"{a + b};"))
            ids += question + answer
            label += [-100] * len(question) + answer
        rows.append(torch.tensor(ids))
        labels.append(torch.tensor(label))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True, PAD), pad(labels, True, -100)


def perturb(model: Qwen3_5MoeForCausalLM, seed: int) -> None:
    """Move what starts as ones or zeros: a norm that is still constant hides every norm fault."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data += 0.15 * torch.randn(parameter.shape, generator=generator)
        elif name.endswith("dt_bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
        elif name.endswith("A_log"):
            parameter.data = torch.empty(parameter.shape).uniform_(math.log(0.02), math.log(2.0), generator=generator)
        elif name.endswith(("gate.weight", "shared_expert_gate.weight")):
            parameter.data = torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1])


@torch.no_grad()
def accuracy(model: Qwen3_5MoeForCausalLM, tokenizer: Tokenizer, pairs: list[tuple[int, int]]) -> float:
    """The part of the sums whose every answer token is the most likely one, teacher-forced."""
    model.eval()
    right = 0
    for a, b in pairs:
        ids, labels = make_batch(tokenizer, [(a, b)])
        said = model(input_ids=ids, use_cache=False).logits[0, :-1].argmax(-1)
        asked = labels[0, 1:] != -100
        right += bool((said[asked] == labels[0, 1:][asked]).all())
    model.train()
    return right / len(pairs)


def train(config: Qwen3_5MoeTextConfig, tokenizer: Tokenizer, steps: int, seed: int) -> Qwen3_5MoeForCausalLM:
    """A model trained on sums, in fp32."""
    torch.manual_seed(seed)
    model = Qwen3_5MoeForCausalLM._from_config(config, dtype=torch.float32)
    perturb(model, seed)
    pairs, _ = split_sums(seed)
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * (0.5 + 0.5 * math.cos(math.pi * step / steps)) + 0.01
    )
    started = time.monotonic()
    for step in range(steps):
        ids, labels = make_batch(tokenizer, [draw.choice(pairs) for _ in range(SUMS_PER_ROW * ROWS)])
        output = model(input_ids=ids, labels=labels, use_cache=False, output_router_logits=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == steps - 1:
            sys.stderr.write(f"step {step:4d}  loss {output.loss.item():.4f}  {time.monotonic() - started:.0f} s\n")
    return model


def mtp_tensors(config: Qwen3_5MoeTextConfig, seed: int) -> dict[str, torch.Tensor]:
    """A multi-token-prediction layer with the names of the public checkpoints, expert by expert.

    transformers ignores these weights, so they are random, scaled by 1/sqrt(fan-in), and only ever compared as files.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, routed, shared = config.hidden_size, config.moe_intermediate_size, config.shared_expert_intermediate_size
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"mtp.{norm}.weight": (hidden,) for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (2 * heads * width, hidden),
        "self_attn.k_proj": (groups * width, hidden),
        "self_attn.v_proj": (groups * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "self_attn.q_norm": (width,),
        "self_attn.k_norm": (width,),
        "mlp.gate": (config.num_experts, hidden),
        "mlp.shared_expert_gate": (1, hidden),
    }
    experts = {"mlp.shared_expert": shared} | {f"mlp.experts.{e}": routed for e in range(config.num_experts)}
    for name, width in experts.items():
        layer |= {f"{name}.gate_proj": (width, hidden), f"{name}.up_proj": (width, hidden), f"{name}.down_proj": (hidden, width)}
    shapes |= {f"mtp.layers.0.{name}.weight": shape for name, shape in layer.items()}
    return {
        name: torch.randn(shape, generator=generator) * (0.15 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in sorted(shapes.items())
    }


def stored_tensors(model: Qwen3_5MoeForCausalLM, config: Qwen3_5MoeTextConfig, seed: int) -> dict[str, torch.Tensor]:
    """The model under the names, layouts and dtypes of the public Qwen3.5-MoE checkpoints."""
    stored = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("model.", PREFIX, 1) if name.startswith("model.") else name
        stored[name] = tensor if name.endswith(FP32) else tensor.to(torch.bfloat16)
    stored |= {name: tensor.to(torch.bfloat16) for name, tensor in mtp_tensors(config, seed + 1).items()}
    return {name: tensor.contiguous() for name, tensor in sorted(stored.items())}


def write(out: Path, stored: dict[str, torch.Tensor], config_page: dict[str, object], tokenizer: Tokenizer) -> None:
    """The directory, as two shards and an index, complete or not at all."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    names = list(stored)
    half = len(names) // 2
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: stored[name] for name in part}, partial / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (partial / "config.json").write_text(json.dumps(config_page, indent=2) + "\n")
    tokenizer.save(str(partial / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (partial / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def main() -> int:
    """Trains, checks, writes."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=here / "tiny-qwen3.5-moe")
    parser.add_argument("--config", type=Path, default=here / "config.json")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    page = json.loads(options.config.read_text())
    config = Qwen3_5MoeTextConfig(**page["text_config"])
    config._attn_implementation = "eager"
    tokenizer = make_tokenizer()
    model = train(config, tokenizer, options.steps, options.seed)
    stored = stored_tensors(model, config, options.seed)
    for name, parameter in model.state_dict().items():
        parameter.copy_(stored[name.replace("model.", PREFIX, 1) if name.startswith("model.") else name].float())
    right = accuracy(model, tokenizer, split_sums(options.seed)[1])
    sys.stderr.write(f"{right:.1%} of {HELD_OUT} held-out sums right, from the stored values\n")
    if right < 0.95:
        sys.stderr.write("Error: under 95 %, nothing written; train longer (--steps) or with another --seed\n")
        return 70
    write(options.out, stored, page, tokenizer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
