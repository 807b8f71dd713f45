"""Somebody's own Megatron process, for tests: a GPTModel built with megatron-core's API alone, and our three lines in it.

    python own_megatron.py RANK WORLD TP PP STORE OUT [FAULT]

Nothing of the tool builds, loads or drives this model; the shims let megatron-core run on a CPU.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import bisect_hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from bisect_hooks.cpu import prepare_megatron, running_on
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

CPU = torch.device("cpu")
VOCABULARY, HIDDEN, EXPERTS = 64, 32, 4
CUT = {"word_embeddings": 0, "linear_qkv": 0, "linear_fc1": 0, "output_layer": 0, "linear_proj": 1, "linear_fc2": 1}
IDS = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


def config(tp: int, pp: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, kv_channels=8,
        normalization="RMSNorm", layernorm_epsilon=1e-6, qk_layernorm=True, attention_output_gate=True, add_bias_linear=False,
        gated_linear_unit=True, activation_func=F.silu, bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        apply_rope_fusion=False, attention_dropout=0.0, hidden_dropout=0.0, num_moe_experts=EXPERTS, moe_layer_freq=[1, 1], moe_ffn_hidden_size=24,
        moe_shared_expert_intermediate_size=16, moe_shared_expert_gate=True, moe_router_topk=2, moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather", params_dtype=torch.float32, pipeline_dtype=torch.float32, use_cpu_initialization=True,
        perform_initialization=False, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_tensor_parallel_size=1,
        linear_attention_freq=[0, 0],
    )  # fmt: skip


def fill(model: GPTModel, tp: int, at: int) -> None:
    """The same whole weights under every layout, cut as megatron-core cuts them."""
    numbers = {f"layers.{i}.": f"layers.{layer.layer_number - 1}." for i, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        whole = next((name.replace(local, everywhere) for local, everywhere in numbers.items() if local in name), name)
        dim = next((dim for word, dim in CUT.items() if word in name and "local_experts" not in name), None)
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] *= tp
        values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(whole.encode()))) * 0.1 + ("norm" in name)
        if dim is not None:
            halves = values.chunk(2, dim) if "linear_fc1" in name else [values]
            values = torch.cat([half.chunk(tp, dim)[at] for half in halves], dim)
        parameter.data.copy_(values)


def main(rank: int, world: int, tp: int, pp: int, store: str, out: str, fault: str = "") -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    prepare_megatron(CPU)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_tensor_parallel_size=1)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    shape = config(tp, pp)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    with running_on(CPU), torch.no_grad():
        spec = get_gpt_decoder_block_spec(shape, use_transformer_engine=False)
        model = GPTModel(
            config=shape, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=64, pre_process=first, post_process=last,
            position_embedding_type="rope", rotary_base=10000, share_embeddings_and_output_weights=False,
        ).eval()  # fmt: skip
        fill(model, tp, parallel_state.get_tensor_model_parallel_rank())
        if fault and rank == world - 1:
            dict(model.named_parameters())[fault].data *= 1.05
        positions = torch.arange(IDS.shape[1]).expand_as(IDS)
        mask = torch.ones(IDS.shape[1], IDS.shape[1], dtype=torch.bool).triu(1)[None, None]
        with bisect_hooks.record(model, "qwen3.5-moe", out):
            if not first:
                hidden = torch.empty(IDS.shape[1], IDS.shape[0], HIDDEN)
                dist.recv(hidden, rank - tp)
                model.set_input_tensor(hidden)
            said = model(IDS, positions, mask)
            if not last:
                dist.send(said.contiguous(), rank + tp)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:5]]
    Path(sys.argv[5]).parent.mkdir(parents=True, exist_ok=True)
    main(numbers[0], numbers[1], numbers[2], numbers[3], *sys.argv[5:])
