"""G16: the reference itself is wrong.  transformers' own functions are spoiled; the whole verdict has to accuse the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bisect_hooks.family import family_of
from cases import EVERY, FULL, LINEAR
from workshop import Workshop, judge, verdict_of

from bisect_tool import golden

pytestmark = pytest.mark.ranks
Function = Callable[..., Any]


def keys_in_another_order(right: Function) -> Function:
    """Keys are mixed up over heads before they are turned."""

    def wrong(q: torch.Tensor, k: torch.Tensor, *args: Any, **more: Any) -> Any:
        turned = right(q, k, *args, **more)
        return turned[0], turned[1].flip(1)

    return wrong


def heads_and_tokens_mixed_up(right: Function) -> Function:
    """transformers#41036: the output of the delta rule is reshaped where it had to be transposed."""

    def wrong(*args: Any, **more: Any) -> Any:
        core, state = right(*args, **more)
        return core.transpose(1, 2).reshape(core.shape), state

    return wrong


@pytest.fixture
def candidate(workshop: Workshop, request: pytest.FixtureRequest) -> Path:
    return workshop.good(request.param, "one")


@pytest.mark.parametrize(
    ("function", "spoiled", "candidate", "layers", "module", "part", "neighbour"),
    [
        ("apply_rotary_pos_emb", keys_in_another_order, "slime", FULL, "attention", "rope", "layers.3.attention."),
        pytest.param(
            *("torch_chunk_gated_delta_rule", heads_and_tokens_mixed_up, "native", LINEAR, "linear_attention", "core"),
            *("layers.0.linear_attention.",),
            marks=pytest.mark.wide,
        ),
    ],
    indirect=["candidate"],
)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.wide)])
def test_a_wrong_transformers_is_accused_and_the_candidate_is_not(
    function: str, spoiled: Callable[[Function], Function], candidate: Path, layers: list[int], module: str, part: str, neighbour: str,
    dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    family = family_of(json.loads((golden.reference() / "config.json").read_text()))
    modeling = __import__(family.modeling, fromlist=["x"])  # type: ignore[attr-defined]
    monkeypatch.setattr(modeling, function, spoiled(getattr(modeling, function)))
    prompts = tmp_path / "prompts.jsonl"  # of its own: the reference of other tests is right, and kept by its prompts
    prompts.write_text("".join(json.dumps({"input_ids": [3, 17, 90, 4] * n}) + "\n" for n in (len(dtype), 9)))
    code, page = judge(candidate, tmp_path / "out", "one", "--dtype", dtype, prompts=prompts)
    assert (code, page["verdict"], page["minor"]) == (1, "differs", [])
    assert [verdict_of(fault) for fault in page["faults"]] == [
        {
            "class": "reference", "layers": layers, "module": module, "modules": [module], "parts": [part], "shard": {}, "of": "run",
            "relation": None,
        }
    ]  # fmt: skip
    fault = page["first"]
    assert "sides with the candidate" in fault["explanation"]
    assert fault["next"].startswith("The reference is wrong here")
    assert fault["proof"]["before"] > 0.1 > 10 * fault["proof"]["after"]
    assert neighbour in fault["proof"]["control"]


@pytest.mark.wide
def test_a_wrong_candidate_does_not_accuse_the_reference(workshop: Workshop, tmp_path: Path) -> None:
    patch = tmp_path / "patch.py"
    patch.write_text(
        "def patch(model, parallel):\n"
        "    for layer in model.decoder.layers:\n"
        "        layer.pre_mlp_layernorm.register_forward_hook(lambda module, args, output: output * 1.02)\n"
    )
    code, page = judge(
        workshop.good("slime", "one"), tmp_path / "out", "one", "--stages", "inputs,forward", "--candidate-patch", str(patch)
    )
    assert code == 1
    assert [(fault["class"], fault["layers"], fault["module"]) for fault in page["faults"]] == [("model-definition", EVERY, "pre_mlp_norm")]
    assert "sides with the reference" in page["first"]["explanation"]
    assert "formulas in float64 of the located sites side with: reference 8" in page["stages"][3]["probes"]
