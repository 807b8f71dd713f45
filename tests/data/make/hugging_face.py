"""Make tests/data/hf-text, hf-conditional and hf-hub: reference-mini as transformers' own `save_pretrained` writes it, in three styles.

Python 3.11.7, torch 2.13.0, transformers 5.24.0, safetensors 0.8.0 (the project's own environment):

    .venv/bin/python tests/data/make/hugging_face.py

hf-text         a freshly built Qwen3_5MoeForCausalLM: prefix `model.layers.`, experts one by one, flat config
hf-conditional  a freshly built Qwen3_5MoeForConditionalGeneration: prefix `model.language_model.`, a vision tower of one block
hf-hub          Qwen3_5MoeForCausalLM loaded from reference-mini (without its mtp.*) and saved again: keeps the style that it was loaded
                from, prefix `model.language_model.` and fused experts, but for the config, which is flat now

transformers has no module for `mtp.*`, so none of them holds it, though their configs go on promising one layer.  It looks at the
names all the same: with the per-expert `mtp.layers.0.mlp.experts.*` in the directory, hf-hub's experts would be written one by one.
`from_pretrained` rounds A_log and dt_bias to the config's bf16, so hf-hub has them rounded; the other two have them in fp32.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeTextConfig

DATA = Path(__file__).resolve().parent.parent
REFERENCE = DATA / "reference-mini"
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "temporal_patch_size": 1, "spatial_merge_size": 1, "num_position_embeddings": 16,
}  # fmt: skip


def put(model: Any, prefix: str) -> None:
    """Writes reference-mini's values into a model in memory, where experts are fused; whatever it has no values for is random."""
    stored = load_file(REFERENCE / "model.safetensors")
    generator = torch.Generator().manual_seed(23)
    for name, parameter in model.named_parameters():
        on_disk = name.replace(prefix, "model.language_model.", 1) if name.startswith(prefix) else name
        if on_disk in stored:
            parameter.data = stored[on_disk].clone()
        else:
            assert ".visual." in name, name
            parameter.data = (torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5).bfloat16()


def save(model: Any, name: str) -> None:
    """config.json and safetensors, and nothing else."""
    out = DATA / name
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    for file in out.iterdir():
        if file.name == "config.json" or file.suffix == ".safetensors" or file.name.endswith(".index.json"):
            file.chmod(0o644)
        else:
            file.unlink()


def main() -> int:
    """Writes all three."""
    page = json.loads((REFERENCE / "config.json").read_text())
    with torch.no_grad():
        text = Qwen3_5MoeForCausalLM._from_config(Qwen3_5MoeTextConfig(**page["text_config"]), dtype=torch.bfloat16)
        put(text, "model.")
        save(text, "hf-text")
        whole = Qwen3_5MoeForConditionalGeneration._from_config(Qwen3_5MoeConfig(**page, vision_config=VISION), dtype=torch.bfloat16)
        put(whole, "model.language_model.")
        save(whole, "hf-conditional")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(REFERENCE / "config.json", folder)
        stored = {name: tensor for name, tensor in load_file(REFERENCE / "model.safetensors").items() if not name.startswith("mtp.")}
        save_file(stored, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        save(Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype="auto"), "hf-hub")
    return 0


if __name__ == "__main__":
    sys.exit(main())
