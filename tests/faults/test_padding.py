"""Prompts of unequal lengths padded on the left: the `slime` layout masks them; on `native` they leak, which is G06 and is said so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import FORWARD, LINEAR, fault
from workshop import Workshop, judge, verdict_of

pytestmark = pytest.mark.ranks
LEFT = (*FORWARD, "--padding", "left")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rows, the shortest a few tokens longer than what a convolution of 4 reaches."""
    out = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [[3 + (n * n + 7 * length) % 490 for n in range(length)] for length in (13, 32, 70)]
    out.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return out


@pytest.mark.wide
@pytest.mark.parametrize("under", ["one", "tp2sp", "pp2", "ep2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_padding_on_the_left_is_clean_on_the_slime_layout(
    under: str, dtype: str, prompts: Path, workshop: Workshop, tmp_path: Path
) -> None:
    code, page = judge(workshop.good("slime", "one"), tmp_path / "out", under, *LEFT, "--dtype", dtype, prompts=prompts)
    assert (code, page["verdict"], page["faults"]) == (0, "agrees", [])
    assert "padded to the left" in page["stages"][0]["notes"][0]


@pytest.mark.wide
@pytest.mark.parametrize("under", ["one", "tp2sp"])
def test_padding_on_the_left_leaks_on_the_native_layout_g06(under: str, prompts: Path, workshop: Workshop, tmp_path: Path) -> None:
    code, page = judge(workshop.good("native", "one"), tmp_path / "out", under, *LEFT, prompts=prompts)
    shard = {"tp": [0, 1]} if under == "tp2sp" else {}
    assert (code, page["minor"]) == (1, [])
    assert [verdict_of(one) for one in page["faults"]] == [
        fault("model-definition", LINEAR, "linear_attention", ["conv1d", "core"], "unknown", "run", None, **shard)
    ]
    first = page["first"]
    assert first["relation"]["detail"] == {"padding": "left"}
    assert first["shape"]["text"] == "only in the first 3 tokens of a prompt"
    assert first["proof"]["experiment"] == "pad the same prompts on the right"
    assert first["proof"]["before"] > 1e4 * first["proof"]["after"]
    assert "leaks into its first tokens" in first["explanation"]


@pytest.mark.wide
def test_another_fault_is_not_put_down_to_padding(prompts: Path, workshop: Workshop, tmp_path: Path) -> None:
    candidate = workshop.faulty("native", "one", "T01")
    _, page = judge(candidate, tmp_path / "out", "one", *LEFT, prompts=prompts)
    assert [(one["module"], one["relation"]["kind"]) for one in page["faults"]] == [("linear_attention", "unknown"), ("router", "config")]
