"""Families: what config.json says is understood or refused, tables are total, and nothing outside a family's file names it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from bisect_hooks.blocks.feed_forward import route
from bisect_hooks.errors import UsageError
from bisect_hooks.family import LAYOUTS, CheckpointLayout, check_sizes, families, family_of, family_of_tensors
from bisect_hooks.hf import check_known
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site
from bisect_hooks.table import check_total, forward
from bisect_hooks.table_more import Deinterleave
from hypothesis import given
from hypothesis import strategies as st
from properties import repeatable
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bisect_tool.__main__ import run
from bisect_tool.args import conversion_args
from bisect_tool.config_check import compare_settings
from bisect_tool.conversion import check_table
from bisect_tool.hf_directory import HuggingFaceDirectory, open_hf
from bisect_tool.unknown import family_in

ROOT = Path(__file__).parent.parent
TWO_SCREENS = 100


def page(family: str, **more: Any) -> dict[str, Any]:
    """A config.json as it stands on a hub: what the tiny model says, and nothing that transformers adds."""
    model_type, said = tiny.CONFIGS[family]
    return tiny.INITIAL | said | {"model_type": model_type} | more


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, HuggingFaceDirectory]:
    return {family: open_hf(tiny.make(family, tmp_path_factory.mktemp(family))) for family in tiny.CONFIGS}


# -- house rules --------------------------------------------------------------------------------------------------------------


def test_nothing_outside_its_file_names_a_model() -> None:
    words = {word for family in families().values() for word in family.model_types} | {"transformers.models"}
    files = [path for folder in ("hooks", "bisect_tool") for path in (ROOT / folder).rglob("*.py") if path.parent.name != "families"]
    files.remove(ROOT / "bisect_tool/golden.py")  # the embedded model's directory is called after it
    assert len(files) > 40
    named = {f"{path.name}: {word}" for path in files for word in words if re.search(rf"\b{re.escape(word)}\b", path.read_text())}
    assert named == set()


@pytest.mark.parametrize("path", sorted((ROOT / "hooks/bisect_hooks/families").glob("*.py")), ids=lambda path: path.stem)
def test_a_family_fits_on_two_screens(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= TWO_SCREENS


def test_every_family_has_a_tiny_model() -> None:
    made = {family_of(page(name)).name for name in tiny.CONFIGS}
    assert made == set(families()) - {"qwen3.5-moe"}  # the embedded model is one


# -- config.json --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_hub_config_and_one_saved_by_transformers_say_the_same(family: str, directories: Mapping[str, HuggingFaceDirectory]) -> None:
    saved = directories[family].config
    found = family_of(saved)
    assert found.reference_dimensions(saved) == found.reference_dimensions(page(family))


UNKNOWN: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a scaled rope": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}},
        ["rope_parameters of type = 'llama3'"],
    ),
    "a rope factor": (
        "qwen3",
        {"rope_parameters": {"rope_theta": 1e6, "attention_factor": 2.0}},
        ["rope_parameters.attention_factor = 2.0"],
    ),
    "rope_scaling of old": ("qwen3-moe", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling of type = 'yarn'"]),
    "a sliding window": ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, ["use_sliding_window = True", "sliding_window = 64"]),
    "a kind of attention": ("qwen3.5", {"layer_types": ["full_attention", "mamba"] * 2}, ["layer_types = 'mamba'"]),
    "sliding layers": ("qwen3", {"layer_types": ["sliding_attention"] * 4}, ["layer_types = 'sliding_attention'"]),
    "an activation": ("llama", {"hidden_act": "gelu"}, ["hidden_act = 'gelu'"]),
    "a bias on o_proj too": ("llama", {"attention_bias": True, "mlp_bias": True}, ["attention_bias = True", "mlp_bias = True"]),
    "experts chosen group by group": ("glm4-moe", {"n_group": 2, "topk_group": 1}, ["n_group = 2"]),
    "a sigmoid that is not renormalised": ("glm4-moe", {"norm_topk_prob": False}, ["norm_topk_prob = False"]),
    "quantised weights": ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config = {'quant_method': 'fp8'}"]),
    "what nobody heard of": ("qwen3-next", {"logit_softcap": 30.0, "extra_norm": True}, ["logit_softcap = 30.0", "extra_norm = True"]),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_config_that_is_not_understood_is_refused_with_all_of_it(what: str) -> None:
    family, more, said = UNKNOWN[what]
    config = page(family, **more)
    with pytest.raises(UsageError, match=f"does not understand {len(said)} of config.json") as refused:
        family_of(config).reference_dimensions(config)
    assert all(one in refused.value.message for one in said)


@pytest.mark.parametrize("off", [None, False, 0, [], {}])
def test_what_is_switched_off_needs_no_understanding(off: Any) -> None:
    config = page("llama", logit_softcap=off, rope_scaling=None, sliding_window=None)
    assert family_of(config).reference_dimensions(config).layers == 4


def test_a_size_that_is_not_there_is_named() -> None:
    config = page("qwen3")
    config.pop("intermediate_size")
    with pytest.raises(UsageError, match="has no 'intermediate_size', which qwen3 needs"):
        family_of(config).reference_dimensions(config)


def test_expert_parallel_without_experts_is_refused() -> None:
    dims = family_of(page("qwen3")).reference_dimensions(page("qwen3"))
    with pytest.raises(UsageError, match="no experts"):
        check_sizes(dims, Parallel(ep=2))


# -- tables -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_table_is_total_and_can_be_read_backwards(
    family: str, layout: CheckpointLayout, directories: Mapping[str, HuggingFaceDirectory]
) -> None:
    directory = directories[family]
    found = family_of(directory.config)
    dims = found.reference_dimensions(directory.config)
    mtp = bool(found.mtp_tensors(directory.names, dims))
    rules = found.rules(dims, layout, directory.names, mtp)
    check_total(rules)
    check_table(found, dims, directory, layout, mtp)
    for rule in rules:
        before = [directory.read(name) for name in rule.references]
        made = forward(rule.op, before)
        assert len(made) == len(rule.candidates)
        if not rule.op.lossy:
            assert all(torch.equal(one, other) for one, other in zip(before, rule.op.backward(made), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_candidates_family_is_told_by_its_tensors(
    family: str, layout: CheckpointLayout, directories: Mapping[str, HuggingFaceDirectory]
) -> None:
    directory = directories[family]
    found = family_of(directory.config)
    dims = found.reference_dimensions(directory.config)
    keys = [made.name for rule in found.rules(dims, layout, directory.names, False) for made in rule.candidates]
    args = conversion_args(found, directory.config, dims, layout, Parallel(), torch.bfloat16, False)
    told = family_of_tensors(args, layout, keys)
    theirs = told.candidate_dimensions(args)
    # two families that fit alike build the same candidate
    assert {made.name for rule in told.rules(theirs, layout, (), False) for made in rule.candidates} == set(keys)
    assert theirs == found.candidate_dimensions(args) or layout == "native"


def test_args_say_what_config_says(directories: Mapping[str, HuggingFaceDirectory]) -> None:
    for directory in directories.values():
        family = family_of(directory.config)
        dims = family.reference_dimensions(directory.config)
        args = conversion_args(family, directory.config, dims, "native", Parallel(), torch.bfloat16, False)
        theirs = family.candidate_dimensions(args)
        moe = ("experts", "top_k", "routed", "shared", "shared_gate", "expert_bias") if dims.experts else ()
        shape = ("layers", "hidden", "heads", "groups", "head_width", "kinds", "moe", "output_gate", "tied", "qk_norm", "qkv_bias")
        linear = ("key_rows", "value_rows", "kernel", "interleaved")
        different = [name for name in (*shape, *linear, *moe) if getattr(dims, name) != getattr(theirs, name)]
        assert different == []
        for layout in LAYOUTS:
            args = conversion_args(family, directory.config, dims, layout, Parallel(), torch.bfloat16, False)
            assert compare_settings(family, directory.config, args, layout)[0] == []


def test_a_share_of_the_rotation_counts_where_transformers_reads_it() -> None:
    """By transformers' own frequencies, for every family: half a head, or the whole of it where the code reads no such key."""
    read = set()
    for family in tiny.CONFIGS:
        said = page(family) | {"partial_rotary_factor": 0.5}
        said["rope_parameters"] = dict(said["rope_parameters"]) | {"partial_rotary_factor": 0.5}
        model_type, config = said["model_type"], {name: value for name, value in said.items() if name != "model_type"}
        dims = family_of(said).reference_dimensions(said)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
        (frequencies,) = [tensor for name, tensor in model.named_buffers() if name.endswith("rotary_emb.inv_freq")]
        assert dims.rotary_percent == 2 * len(frequencies) / dims.head_width
        read |= {family} if dims.rotary_percent == 0.5 else set()
    assert read == {"qwen3.5", "qwen3.5-tied", "qwen3-next", "glm4-moe"}


def test_an_extra_norm_and_a_lost_projection_are_listed_tensor_by_tensor(tmp_path: Path) -> None:
    directory = tiny.make("qwen3", tmp_path)
    stored = load_file(directory / "model.safetensors")
    stored |= {f"model.layers.{n}.post_ffn_norm.weight": torch.ones(48) for n in range(4)} | {"model.rotary.scale": torch.ones(1)}
    stored.pop("model.layers.2.self_attn.o_proj.weight")
    save_file(stored, directory / "model.safetensors")
    opened = open_hf(directory)
    family = family_of(opened.config)
    with pytest.raises(UsageError) as refused:
        check_table(family, family.reference_dimensions(opened.config), opened, "native", False)
    for said in (
        "model.layers.*.post_ffn_norm.weight (4 tensors) is not in the table of qwen3",
        "model.rotary.scale is not in the table of qwen3",
        "has no model.layers.2.self_attn.o_proj.weight, which the table of qwen3 reads",
    ):
        assert said in refused.value.message


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_every_module_of_a_reference_is_accounted_for(family: str) -> None:
    said = page(family)
    config = AutoConfig.for_model(said["model_type"], **{key: value for key, value in said.items() if key != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = family_of(said)
    dims = found.reference_dimensions(said)
    idle = found.reference_modules(dims) - {name for name, _ in model.named_modules()}
    assert {name.rpartition(".")[2] for name in idle} == ({"act"} if "linear_attention" in dims.kinds else set())  # an older release's
    check_known(model, found, dims)


class Grown(Qwen3ForCausalLM):  # type: ignore[misc]
    """What a later transformers might make of a class: norms without a weight, a scale at the end, a vector that no file holds."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.post_ffn_norm = torch.nn.LayerNorm(config.hidden_size, elementwise_affine=False)
            layer.self_attn.sinks = torch.nn.Parameter(torch.ones(config.num_attention_heads))
        self.logit_scale = torch.nn.Identity()


def test_modules_that_no_table_accounts_for_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.make("qwen3", tmp_path)
    monkeypatch.setitem(AutoModelForCausalLM._model_mapping._extra_content, Qwen3Config, Grown)
    assert run(["taps", "--reference", str(tmp_path), "--fire"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert "qwen3 does not understand 9 parts of Grown in transformers" in line
    for said in (
        "the module model.layers.*.post_ffn_norm of LayerNorm (4 modules)",
        "the module logit_scale of Identity",
        "the tensor model.layers.*.self_attn.sinks (4 tensors)",
    ):
        assert said in line


UNKNOWN_TYPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "olmo2": (
        {},
        [
            "the nearest, qwen3, does not understand",
            "the tensor model.layers.*.post_feedforward_layernorm.weight (4 tensors)",
            "that it has no model.layers.*.input_layernorm.weight (4 tensors)",
            "the module model.layers.*.post_feedforward_layernorm of Olmo2RMSNorm (4 modules)",
        ],
    ),
    "granite": (
        {"residual_multiplier": 0.5},
        ["the nearest, llama, does not understand", "config.json's residual_multiplier = 0.5"],
    ),
    "gpt_neox": ({}, ["does not understand", "the module gpt_neox.layers.*.attention.dense of Linear (4 modules)"]),
}  # fmt: skip


@pytest.mark.parametrize("model_type", UNKNOWN_TYPES)
def test_an_unknown_architecture_is_held_against_the_nearest(model_type: str, tmp_path: Path) -> None:
    more, said = UNKNOWN_TYPES[model_type]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(tiny.INITIAL | more))).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=f"unknown family: config.json has model_type '{model_type}'") as refused:
        family_in(open_hf(tmp_path))
    assert [one for one in said if one not in refused.value.message] == []


def test_an_unknown_type_that_is_known_in_all_but_name_is_said(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mistral", "sliding_window": None}))
    with pytest.raises(UsageError, match="the nearest, llama, knows every key, tensor and module of it"):
        family_in(open_hf(tmp_path))


def test_a_head_beside_the_embedding_it_is_tied_to_is_left_out(tmp_path: Path) -> None:
    directory = tiny.make("llama", tmp_path)
    stored = load_file(directory / "model.safetensors")
    stored |= {"lm_head.weight": torch.zeros(211, 48), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(stored, directory / "model.safetensors")
    opened = open_hf(directory)
    family = family_of(opened.config)
    left = check_table(family, family.reference_dimensions(opened.config), opened, "native", False)
    assert sorted(left.values()) == [1, 1] and any("tied" in why for why in left)


@repeatable
@given(heads=st.integers(1, 4), sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4), columns=st.integers(1, 3))
def test_deinterleave_and_back(heads: int, sizes: list[int], columns: int) -> None:
    op = Deinterleave(heads=heads, sizes=tuple(sizes))
    packed = torch.arange(heads * sum(sizes) * columns).reshape(-1, columns)
    parts = forward(op, [packed])
    assert [len(part) for part in parts] == [heads * size for size in sizes]
    assert torch.equal(op.backward(parts)[0], packed)
    assert torch.equal(parts[0][: sizes[0]], packed[: sizes[0]])  # the first head's first part comes first
    for index, part in enumerate(parts):  # a few rows of a part are made of its rows in every head
        start, stop = len(part) // 3, len(part)
        spans = op.spans(index, start, stop, [tuple(packed.shape)])
        assert torch.equal(op.make([packed[a:b] for _, a, b in spans]), part[start:stop])


# -- routing ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next", "glm4-moe"])
def test_the_rule_is_transformers_rule(family: str, renormalised: bool) -> None:
    if family == "glm4-moe" and not renormalised:
        pytest.skip("refused: megatron-core renormalises sigmoid scores always")
    said = page(family, norm_topk_prob=renormalised)
    found = family_of(said)
    dims = found.reference_dimensions(said)
    config = AutoConfig.for_model(said.pop("model_type"), **said)
    modeling = import_module(found.modeling)  # type: ignore[attr-defined]
    router_class = next(getattr(modeling, name) for name in dir(modeling) if re.search(r"Top[kK]Router$", name))
    router = router_class(config)
    generator = torch.Generator().manual_seed(5)
    bias = None
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator) / 5)
        if dims.expert_bias:
            bias = 0.3 * torch.randn(dims.experts, generator=generator)
            router.e_score_correction_bias.copy_(bias)
        logits, weights, index = router(torch.randn(64, dims.hidden, generator=generator))
    probs, chosen, ranked = route(logits, dims, bias)
    assert torch.equal(chosen.nonzero()[:, 1].reshape(64, -1), index.sort(-1).values)
    torch.testing.assert_close(probs.gather(-1, index), weights)
    assert bias is None or not torch.equal(ranked.topk(dims.top_k).indices, torch.sigmoid(logits).topk(dims.top_k).indices)


def test_the_expert_bias_is_a_site_of_its_own() -> None:
    config = page("glm4-moe")
    family = family_of(config)
    dims = family.reference_dimensions(config)
    site = Site("router", 1, "expert_bias")
    for taps in (family.reference_taps(dims), family.candidate_taps(dims, "native")):
        (tap,) = [tap for tap in taps if tap.site == site]
        assert tap.at == "parameter"


# -- third parties ------------------------------------------------------------------------------------------------------------


def offered(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """One more entry point, as an installed package would have it."""
    point = metadata.EntryPoint("theirs", value, "bisect_tool.families")
    monkeypatch.setattr("bisect_hooks.family.entry_points", lambda group: (point,) if group == point.group else ())
    families.cache_clear()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("bisect_hooks.families.llama:FAMILY", "two families are called 'llama'"),
        ("no_such_package:FAMILY", r"the family theirs \(no_such_package:FAMILY\) can't be loaded: No module named 'no_such_package'"),
    ],
    ids=["a name that is taken", "a package that is not there"],
)
def test_an_entry_point_that_can_not_be_used_is_refused(value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, value)
    try:
        with pytest.raises(UsageError, match=said):
            families()
    finally:
        families.cache_clear()
