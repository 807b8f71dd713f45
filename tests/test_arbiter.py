"""The arbiter: every formula agrees with transformers to the noise of float32, and a reference that is wrong is found out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import Family, families
from bisect_hooks.hf import Reference
from written import Written

from bisect_tool import golden
from bisect_tool.arbiter import Arbiter, Opinion
from bisect_tool.hf_directory import open_hf
from bisect_tool.measure import measure
from bisect_tool.noise import MARGIN
from bisect_tool.recording import Recording
from bisect_tool.reference import tolerance_of

GOLDEN = Recording(golden.folder() / "recording")
BATCH = GOLDEN.batch
DIRECTORY = open_hf(golden.reference())
CONFIG = json.loads((golden.reference() / "config.json").read_text())
FAMILY: Family = families()["qwen3.5-moe"]
ARBITER = Arbiter(FAMILY.reference_dimensions(CONFIG), CONFIG["text_config"])
WITHOUT = ("tokens", ".input", "experts.fc1", "experts.fc2", "fc1:rows", "fc2:rows", "shared_expert_gate:logit")
KEYS = [key for key in GOLDEN.keys if not key.endswith(WITHOUT) or "shared_expert." in key]
# one key of each kind of module, in a layer that has it
KINDS = sorted(
    {
        key.replace("layers.4.", "layers.0.").replace("layers.7.", "layers.3.")
        for key in KEYS
        if "layers.0." in key or "layers.3.attention" in key
    }
)


def opinion(key: str, reference: Callable[[str], torch.Tensor], candidate: Callable[[str], torch.Tensor]) -> Opinion:
    tolerance = tolerance_of(GOLDEN, key) if not key.endswith("topk") else tolerance_of(GOLDEN, "embedding")
    return ARBITER.opinion(key, BATCH.lengths, tolerance, (reference, DIRECTORY.read), (candidate, DIRECTORY.read))


def test_every_site_but_inputs_and_probes_has_a_formula() -> None:
    assert len(KEYS) == 197
    for key in KEYS:
        assert ARBITER.recipe(key).inputs
    for key in ("tokens", "layers.0.input", "layers.3.experts.fc1"):
        with pytest.raises(UsageError, match="no formula makes"):
            ARBITER.recipe(key)


def test_every_formula_agrees_with_transformers_to_the_noise_of_float32() -> None:
    """Each site from transformers' own inputs: within the allowance that its own re-evaluations give, and an eighth of it mostly."""
    ratios = {}
    for key in KEYS:
        made_by = ARBITER.recipe(key)
        wanted = made_by.formula([GOLDEN[one] for one in made_by.inputs], [DIRECTORY.read(one) for one in made_by.weights], BATCH.lengths)
        ratios[key] = (
            measure(wanted.reshape(len(wanted), -1), GOLDEN[key].double()).relative_rms
            / tolerance_of(GOLDEN, "embedding" if key.endswith("topk") else key).relative_rms
        )
    worst = max(ratios, key=lambda key: ratios[key])
    assert ratios[worst] < 1, (worst, ratios[worst])
    assert sum(ratio < 4 / MARGIN for ratio in ratios.values()) > 0.9 * len(ratios)


@pytest.mark.parametrize("key", KINDS)
def test_a_reference_that_left_the_formula_is_found_out(key: str) -> None:
    def perturbed(name: str) -> torch.Tensor:
        return GOLDEN[name] * 1.001 + (name.endswith("topk")) if name == key else GOLDEN[name]

    assert (opinion(key, perturbed, GOLDEN.__getitem__).sides_with, opinion(key, perturbed, GOLDEN.__getitem__).cls) == (
        "candidate",
        "reference",
    )
    assert (opinion(key, GOLDEN.__getitem__, perturbed).sides_with, opinion(key, GOLDEN.__getitem__, perturbed).cls) == ("reference", None)
    assert opinion(key, perturbed, perturbed).sides_with == "neither"
    assert opinion(key, GOLDEN.__getitem__, GOLDEN.__getitem__).sides_with == "both"


def test_a_difference_that_came_in_from_before_accuses_nobody() -> None:
    written = Written(golden.reference()).run(GOLDEN.provenance.rows)
    found = opinion("layers.3.attention.core", GOLDEN.__getitem__, lambda key: written[key])
    assert found.sides_with == "both"
    assert "came in from before" in found.said


def test_a_wrong_transformers_is_found_out_g16(monkeypatch: pytest.MonkeyPatch) -> None:
    """G16: the reference's own module mixes up a shape: keys are transposed over heads before they are turned."""
    reference = Reference(golden.reference(), FAMILY, ARBITER.dims, torch.float32, torch.device("cpu"))
    module = __import__(type(reference.model).__module__, fromlist=["x"])
    right: Any = vars(module)["apply_rotary_pos_emb"]

    def mixed_up(q: torch.Tensor, k: torch.Tensor, *args: torch.Tensor, **more: int) -> tuple[torch.Tensor, torch.Tensor]:
        turned = right(q, k, *args, **more)
        return turned[0], turned[1].flip(1)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", mixed_up)
    said = {key: BATCH.pack(value) for key, value in reference.record(BATCH.ids(), BATCH.mask()).items()}
    candidate = Written(golden.reference()).run(BATCH.rows)
    found = opinion("layers.3.attention.rope:k", lambda key: said[key], lambda key: candidate[key])
    assert (found.sides_with, found.cls) == ("candidate", "reference")
    assert "sides with the candidate: the reference is wrong here" in found.said
    assert opinion("layers.3.attention.rope:q", lambda key: said[key], lambda key: candidate[key]).sides_with == "both"
    assert opinion("layers.7.attention.core", lambda key: said[key], lambda key: candidate[key]).sides_with == "both"
