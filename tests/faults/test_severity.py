"""Small faults, made in the memory of a built candidate: one channel, one head, one expert, two per cent; and NaN, named once."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from bisect_hooks.family import family_of
from bisect_hooks.parallel import Parallel
from workshop import REFERENCE, ROOT

from bisect_tool.args import plain
from bisect_tool.candidate import CandidateRun
from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.forward import Bench
from bisect_tool.hf_directory import open_hf
from bisect_tool.prompts import Batch
from bisect_tool.reference import Wanted
from bisect_tool.reference_recording import record_reference

pytestmark = [pytest.mark.ranks, pytest.mark.wide]
BATCH = Batch(((1, 20, 21, 13), tuple(range(3, 70))))
LAYER = "decoder.layers.3"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    directory, checkpoint = open_hf(REFERENCE), open_checkpoint(ROOT / "golden/tiny-qwen3.5-moe-torch_dist")
    family = family_of(directory.config)
    wanted = Wanted(directory, family, "slime", torch.float32)
    reference, _ = wanted.load()
    recording = record_reference(wanted, reference, BATCH, tmp_path_factory.mktemp("severity") / "recording")
    run = CandidateRun(family, plain(checkpoint.args), "slime", checkpoint.path, Parallel(), torch.float32, "cpu", BATCH)
    run.build()
    yield Bench(recording, run, reference.dims)


@pytest.mark.parametrize(
    ("key", "rows", "factor", "site"),
    [
        (f"{LAYER}.pre_mlp_layernorm.weight", (17, 18), 0.99, "layers.3.pre_mlp_norm"),
        (f"{LAYER}.self_attention.linear_qkv.weight", (32, 64), 1.02, "layers.3.attention.qkv"),
        (f"{LAYER}.self_attention.linear_qkv.weight", (128, 129), 1.02, "layers.3.attention_gate"),
        (f"{LAYER}.mlp.experts.experts.linear_fc2.weight", (5, 6), 1.02, "layers.3.experts.fc2"),
        (f"{LAYER}.self_attention.k_layernorm.weight", None, 1.001, "layers.3.attention.k_norm"),
        ("embedding.word_embeddings.weight", (13, 14), 1.02, "embedding"),
        (f"{LAYER}.self_attention.linear_proj.weight", (4, 5), math.nan, "layers.3.attention.out_proj"),
        (f"{LAYER}.mlp.shared_experts.linear_fc1.weight", (0, 1), math.inf, "layers.3.shared_expert.fc1"),
    ],
    ids=lambda value: str(value).removeprefix("decoder.layers."),
)
def test_a_small_fault_is_named_and_nothing_else(bench: Bench, key: str, rows: tuple[int, int] | None, factor: float, site: str) -> None:
    bench.run.edit(key, rows, factor)
    try:
        located = bench.locate()
    finally:
        bench.run.put_reference(REFERENCE, [key])
    assert [str(one) for one in located.sites] == [site]
    if math.isfinite(factor):
        assert located.sites[next(iter(located.sites))].ratio > 10


def test_mended_it_agrees(bench: Bench) -> None:
    assert bench.one_pass().differing() == set()
