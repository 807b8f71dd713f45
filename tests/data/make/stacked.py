"""Make tests/data/stacked: a checkpoint of megatron-core 0.16.1 in which all layers of a weight are one tensor, [L, ...].

megatron-core stacks the layers of a homogeneous model (moe_layer_freq 1, no linear attention) unless it is asked not to.  In the
project's own environment (Python 3.11.7, torch 2.13.0, megatron-core 0.16.1):

    .venv/bin/torchrun --standalone --nproc-per-node 2 tests/data/make/stacked.py

Two pipeline stages on real gloo ranks, upstream's own local layer spec, `sharded_state_dict` and `dist_checkpointing.save`; only what
makes CUDA's names mean the CPU is ours.  A small Qwen3-MoE: 4 layers, hidden 32, 4 heads over 2 groups x 8, 2 experts, random bf16
weights.  `expected.safetensors` holds every tensor as torch's own loader puts it together, and nothing of ours has touched it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

DATA = Path(__file__).resolve().parent.parent
NAME = "stacked"
ARGS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2,
    "kv_channels": 8, "qk_layernorm": True, "normalization": "RMSNorm", "norm_epsilon": 1e-06, "position_embedding_type": "rope",
    "rotary_base": 1000000, "rotary_percent": 1.0, "swiglu": True, "add_bias_linear": False, "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": True, "num_experts": 2, "moe_layer_freq": 1, "moe_ffn_hidden_size": 12,
    "ffn_hidden_size": 12, "moe_router_topk": 2, "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
    "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none", "moe_grouped_gemm": False,
    "max_position_embeddings": 64, "seq_length": 64, "vocab_size": 48, "padded_vocab_size": 48, "make_vocab_size_divisible_by": 16,
    "mtp_num_layers": None, "transformer_impl": "local", "ckpt_format": "torch_dist", "bf16": True, "fp16": False, "iteration": 5,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1, "context_parallel_size": 1, "sequence_parallel": False, "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip


def prepare() -> None:
    """CUDA's names mean the CPU, for the whole process."""
    for name, value in (
        ("current_device", lambda: torch.device("cpu")),
        ("synchronize", lambda *_: None),
        ("Stream", type("NoStream", (), {})),
        ("current_stream", lambda *_: None),
        ("stream", lambda *_: contextlib.nullcontext()),
    ):
        setattr(torch.cuda, name, value)


def build() -> GPTModel:
    """This stage's part of the model, filled with random values that differ from stage to stage."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    same = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization"),
        *("qk_layernorm", "add_bias_linear", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function"),
        *("moe_router_dtype", "moe_router_load_balancing_type", "moe_token_dispatcher_type", "pipeline_model_parallel_size", "bf16"),
    )
    config = TransformerConfig(
        **{name: ARGS[name] for name in same},
        num_moe_experts=ARGS["num_experts"],
        layernorm_epsilon=ARGS["norm_epsilon"],
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=ARGS["num_experts"], moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
        ),
        vocab_size=ARGS["padded_vocab_size"],
        max_sequence_length=ARGS["max_position_embeddings"],
        pre_process=stage == 0,
        post_process=stage == 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=ARGS["rotary_base"],
    ).bfloat16()
    generator = torch.Generator().manual_seed(22 + stage)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        parameter.data.copy_(1 + 0.2 * values if parameter.dim() == 1 else values)
    return model


def write_expected(root: Path) -> None:
    """Every tensor of the checkpoint, put together by torch's own loader."""
    described = FileSystemReader(root).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=FileSystemReader(root), no_dist=True)
    save_file(tensors, root.parent / "expected.safetensors")
    (root.parent / "expected.safetensors").chmod(0o644)


def main() -> int:
    """Builds, saves and reads back."""
    # a name without a folder in front: the checkpoint keeps the path it was written under
    os.chdir(DATA)
    prepare()
    dist.init_process_group("gloo")
    with torch.no_grad():
        model = build()
    out = Path(NAME) / "iter_0000005"
    if dist.get_rank() == 0:
        shutil.rmtree(NAME, ignore_errors=True)
        out.mkdir(parents=True)
        (Path(NAME) / "latest_checkpointed_iteration.txt").write_text("5")
    dist.barrier()
    common = {"args": Namespace(**ARGS), "checkpoint_version": 3.0, "iteration": 5}
    dist_checkpointing.save({**model.sharded_state_dict(metadata={}), **common}, str(out))
    if dist.get_rank() == 0:
        write_expected(out)
    dist.barrier()
    # at once: megatron-core's save leaves a manager process behind
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
