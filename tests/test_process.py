"""Recording in a Megatron process that the tool did not build: its own GPTModel, its own ranks, three lines of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bisect_hooks import process
from bisect_hooks.errors import UsageError
from bisect_hooks.site import Site
from bisect_hooks.tap import Tap

from bisect_tool.comparing import compare
from bisect_tool.unshard import opened

HERE = Path(__file__).parent


def run(out: Path, tp: int = 1, pp: int = 1, fault: str = "") -> Path:
    """Starts the ranks and waits for them."""
    path = os.pathsep.join(str(HERE.parent / name) for name in (".", "hooks"))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    words = [str(tp * pp), str(tp), str(pp), str(out.with_suffix(".store")), str(out), *([fault] if fault else [])]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "own_megatron.py"), str(rank), *words], env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        for rank in range(tp * pp)
    ]  # fmt: skip
    said = [rank.communicate(timeout=180)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(said)[-3000:]
    return out


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("one") / "recording")


def judged(reference: Path, candidate: Path) -> dict[str, Any]:
    return compare(reference, candidate).to_json()


@pytest.mark.ranks
@pytest.mark.wide
def test_every_site_of_one_rank_is_there_and_the_inputs_with_it(one_rank: Path) -> None:
    with opened(one_rank) as recording:
        come = recording.provenance
        assert [len(row) for row in come.rows] == [12, 12]
        assert come.positions == (tuple(range(12)),) * 2
        assert come.absent == {}
        for n in (0, 1):
            for word in (
                "attention.qkv:q",
                "attention.core",
                "attention_gate",
                "router.topk",
                "experts.combine",
                "shared_expert_gate",
                "output",
            ):
                assert recording[f"layers.{n}.{word}"].shape[0] == 24
        assert recording["lm_head"].shape == (24, 64)
        assert torch.equal(recording["layers.1.input"], recording["layers.0.output"])


@pytest.mark.ranks
@pytest.mark.wide
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_say_together_what_one_rank_says(tp: int, pp: int, one_rank: Path, tmp_path: Path) -> None:
    found = judged(one_rank, run(tmp_path / "recording", tp, pp))
    assert found["verdict"] == "agrees", found
    assert found["stages"][3]["compared"]["ranks"] == tp * pp
    assert "half a unit in the last place of float32" in found["stages"][3]["notes"][0]


@pytest.mark.ranks
@pytest.mark.wide
def test_a_rank_whose_query_rows_are_wrong_is_named(one_rank: Path, tmp_path: Path) -> None:
    found = judged(one_rank, run(tmp_path / "recording", 2, fault="decoder.layers.0.self_attention.linear_qkv.weight"))
    assert (found["first"]["site"], found["first"]["shard"]["tp"]) == ("layers.0.attention.qkv", [1])
    assert (found["first"]["class"], found["first"]["shows_at"]) == (None, "layers.0.attention.core")  # a norm hides the scale of q and k


def test_what_can_not_be_recorded_is_refused_before_the_block() -> None:
    with pytest.raises(UsageError, match="virtual pipeline stages"):
        process.unwrap([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    with pytest.raises(UsageError, match="is no GPTModel"):
        process.unwrap(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("layout", "site", "expected"),
    [
        ("s[sp] b h", Site("output", 0), "s[cp,sp] b h"),
        ("(s[sp] b) e", Site("router", 0, "probs"), "(s[cp,sp] b) e"),
        ("s b n[tp] d", Site("attention", 0, "core"), "s[cp] b n[tp] d"),
        ("b s", Site("tokens"), "b s[cp]"),
        ("b s n[tp] d", Site("linear_attention", 0, "core"), None),
    ],
)
def test_context_parallel_cuts_every_sequence(layout: str, site: Site, expected: str | None) -> None:
    assert process.over_cp(Tap(site, "", layout), "native") == expected


def test_slimes_linear_attention_sees_the_whole_sequence_under_context_parallel() -> None:
    assert process.over_cp(Tap(Site("linear_attention", 0, "core"), "", "b s n d"), "slime") == "b s n d"
