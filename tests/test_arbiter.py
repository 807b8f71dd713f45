"""The arbiter: every formula agrees with transformers to the noise of float32, and a reference that is wrong is found out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from bisect_hooks.by_formula import Recipe
from bisect_hooks.family import Family, families, family_of
from bisect_hooks.hf import Reference
from written import Written

from bisect_tool import golden
from bisect_tool.arbiter import Arbiter, Opinion
from bisect_tool.floor import tolerance_of
from bisect_tool.hf_directory import HuggingFaceDirectory, open_hf
from bisect_tool.measure import measure
from bisect_tool.noise import MARGIN
from bisect_tool.prompts import Batch
from bisect_tool.recording import Recording
from bisect_tool.reference import Wanted
from bisect_tool.reference_recording import record_reference

GOLDEN = Recording(golden.folder() / "recording")
BATCH = GOLDEN.batch
DIRECTORY = open_hf(golden.reference())
CONFIG = json.loads((golden.reference() / "config.json").read_text())
FAMILY: Family = families()["qwen3.5-moe"]
ARBITER = Arbiter.of(DIRECTORY, FAMILY, FAMILY.reference_dimensions(CONFIG), DIRECTORY.read)
WITHOUT = ("tokens", ".input", "fc1:rows", "fc2:rows", "shared_expert_gate:logit")
KEYS = [key for key in GOLDEN.keys if not key.endswith(WITHOUT)]
# one key of each kind of module, in a layer that has it
KINDS = sorted(
    {
        key.replace("layers.4.", "layers.0.").replace("layers.7.", "layers.3.")
        for key in KEYS
        if "layers.0." in key or "layers.3.attention" in key
    }
)


def opinion(key: str, reference: Callable[[str], torch.Tensor], candidate: Callable[[str], torch.Tensor]) -> Opinion:
    found = ARBITER.opinion(
        key, BATCH.lengths, tolerance_of(GOLDEN, key), torch.float32, (reference, reference(key)), (candidate, candidate(key))
    )
    assert found is not None
    return found


def recipe_of(arbiter: Arbiter, key: str) -> Recipe:
    found = arbiter.recipe(key)
    assert found is not None, key
    return found


def test_every_site_but_inputs_has_a_formula() -> None:
    assert len(KEYS) == 213
    for key in KEYS:
        assert recipe_of(ARBITER, key).inputs
    for key in ("tokens", "layers.0.input", "layers.3.experts.dispatch:rows"):
        assert ARBITER.recipe(key) is None


def ratios_of(arbiter: Arbiter, recording: Recording, directory: HuggingFaceDirectory) -> dict[str, float]:
    """How far transformers is from each formula on its own inputs, in units of what is allowed; a choice in units of the embedding's."""
    ratios = {}
    for key in (key for key in recording.keys if not key.endswith(WITHOUT)):
        made_by = recipe_of(arbiter, key)
        weights = [directory.read(one) for one in made_by.weights]
        wanted = made_by.formula([recording[one] for one in made_by.inputs], weights, recording.batch.lengths)
        off = measure(wanted.reshape(len(wanted), -1), recording[key].double().reshape(len(wanted), -1)).relative_rms
        ratios[key] = off / tolerance_of(recording, "embedding" if key.endswith("topk") else key).relative_rms
    return ratios


def test_every_formula_agrees_with_transformers_to_the_noise_of_float32() -> None:
    """Each site from transformers' own inputs: within the allowance that its own re-evaluations give, and an eighth of it mostly."""
    ratios = ratios_of(ARBITER, GOLDEN, DIRECTORY)
    worst = max(ratios, key=lambda key: ratios[key])
    assert ratios[worst] < 1, (worst, ratios[worst])
    assert sum(ratio < 4 / MARGIN for ratio in ratios.values()) > 0.9 * len(ratios)


@pytest.mark.wide
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_the_formulas_are_those_of_every_family(name: str, tmp_path: Path) -> None:
    directory = open_hf(tiny.make(name, tmp_path / "model"))
    family = family_of(directory.config)
    wanted = Wanted(directory, family, "slime", torch.float32)
    reference, _ = wanted.load()
    recording = record_reference(wanted, reference, Batch(((5, 7, 9), tuple(range(3, 70)))), tmp_path / "recording")
    ratios = ratios_of(Arbiter.of(directory, family, reference.dims, directory.read), recording, directory)
    worst = max(ratios, key=lambda key: ratios[key])
    assert ratios[worst] < 1, (worst, ratios[worst])


@pytest.mark.parametrize("key", KINDS)
def test_a_reference_that_left_the_formula_is_found_out(key: str) -> None:
    def perturbed(name: str) -> torch.Tensor:
        return GOLDEN[name] * 1.001 + (name.endswith("topk")) if name == key else GOLDEN[name]

    assert opinion(key, perturbed, GOLDEN.__getitem__).sides_with == "candidate"
    assert opinion(key, GOLDEN.__getitem__, perturbed).sides_with == "reference"
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
    assert found.sides_with == "candidate"
    assert "sides with the candidate" in found.said
    assert opinion("layers.3.attention.rope:q", lambda key: said[key], lambda key: candidate[key]).sides_with == "both"
    assert opinion("layers.7.attention.core", lambda key: said[key], lambda key: candidate[key]).sides_with == "both"
