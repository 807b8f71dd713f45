"""The weight table: every operation goes there and back, every cut is Megatron's, every tensor has one row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.families.qwen3_5_moe import FAMILY
from bisect_hooks.family import LAYOUTS, CheckpointLayout, family_of
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site
from bisect_hooks.table import Cut, GroupHeads, Join, Made, MinusOne, Op, Rule, Same, Split, Stack, check_total, forward

from bisect_tool.checkpoint import Checkpoint, open_checkpoint
from bisect_tool.hf_directory import HuggingFaceDirectory, open_hf

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="module")
def reference() -> HuggingFaceDirectory:
    return open_hf(GOLDEN / "tiny-qwen3.5-moe")


@pytest.fixture(scope="module")
def candidate() -> Checkpoint:
    return open_checkpoint(GOLDEN / "tiny-qwen3.5-moe-torch_dist")


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def regrouped_slowly(
    q_proj: torch.Tensor, k_proj: torch.Tensor, v_proj: torch.Tensor, groups: int, heads: int, width: int, gated: bool
) -> torch.Tensor:
    """Row by row: for each KV group its query heads, then their gates, then its k, then its v."""
    packed, each, kinds = [], heads // groups, 2 if gated else 1
    for group in range(groups):
        for kind in range(kinds):
            for head in range(group * each, (group + 1) * each):
                for row in range(width):
                    packed.append(q_proj[(head * kinds + kind) * width + row])
        for own in (k_proj, v_proj):
            for row in range(width):
                packed.append(own[group * width + row])
    return torch.stack(packed)


SIZES = [(2, 8, 4, True), (2, 8, 4, False), (4, 4, 3, True), (1, 6, 2, True), (3, 6, 5, False)]


@pytest.mark.parametrize(("groups", "heads", "width", "gated"), SIZES)
def test_heads_are_grouped_as_the_slow_loop_has_it(groups: int, heads: int, width: int, gated: bool) -> None:
    q = rows(heads * width * (2 if gated else 1), 7)
    k, v = rows(groups * width, 7), rows(groups * width, 7) + 9
    (packed,) = forward(GroupHeads(groups, heads, width, gated), [q, k, v])
    assert torch.equal(packed, regrouped_slowly(q, k, v, groups, heads, width, gated))


def test_a_packed_tensor_names_its_rows() -> None:
    heads = GroupHeads(groups=2, heads=4, width=1, gated=True)
    (packed,) = forward(heads, [torch.arange(8.0)[:, None], torch.tensor([[80.0], [81.0]]), torch.tensor([[90.0], [91.0]])])
    named = {name: part.flatten().tolist() for name, part in heads.named(packed).items()}
    assert named == {"q": [0, 2, 4, 6], "gate": [1, 3, 5, 7], "k": [80, 81], "v": [90, 91]}
    rule = Rule(Site("attention", 3, "qkv"), ("q", "k", "v"), (Made("qkv"),), heads)
    parts = rule.parts("qkv", packed)
    assert parts[Site("attention_gate", 3)].flatten().tolist() == [1, 3, 5, 7]
    assert parts[Site("attention", 3, "qkv")].flatten().tolist() == [0, 2, 4, 6, 80, 81, 90, 91]


@pytest.mark.parametrize(
    ("op", "references"),
    [
        (Same(), [rows(4, 3)]),
        (Split(sizes=(2, 3, 5)), [rows(10, 3)]),
        (Join(sizes=(4, 6)), [rows(4, 3), rows(6, 3)]),
        (Stack(each=2), [rows(4, 3) + i for i in range(6)]),
        (Stack(each=1), [rows(4, 3) + i for i in range(5)]),
        *((GroupHeads(g, h, w, gated), [rows(h * w * (1 + gated), 3), rows(g * w, 3), rows(g * w, 4)[:, :3]]) for g, h, w, gated in SIZES),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_there_and_back_is_the_same(op: Op, references: list[torch.Tensor]) -> None:
    again = op.backward(forward(op, references))
    assert len(again) == len(references)
    assert all(torch.equal(one, other) for one, other in zip(again, references, strict=True))
    assert not op.lossy


def test_stacked_experts_are_gate_above_up_one_expert_after_the_other() -> None:
    (stacked,) = forward(Stack(each=2), [torch.full((1, 2), float(i)) for i in range(6)])
    assert stacked[:, :, 0].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_taking_one_off_rounds_small_weights_and_says_so() -> None:
    every = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)

    def lost(low: float, high: float) -> float:
        weights = every[(every >= low) & (every < high)]
        (again,) = MinusOne().backward(forward(MinusOne(), [weights]))
        return float((again != weights).double().mean())

    assert MinusOne().lossy
    assert lost(0.5, 2.0) == 0
    assert lost(0.25, 0.5) == 0.5
    assert lost(0.125, 0.25) == 0.75
    weight = torch.tensor([0.251953125], dtype=torch.bfloat16)
    assert MinusOne().backward(forward(MinusOne(), [weight]))[0] != weight


@pytest.mark.parametrize(
    ("text", "parallel", "held"),
    [
        ("", Parallel(tp=2), [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]),
        ("tp@0", Parallel(tp=2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("tp@0", Parallel(tp=4), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("tp@0/2", Parallel(tp=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("tp@0/2", Parallel(tp=4), [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_a_tensor_is_cut_over_tp_as_its_row_says(text: str, parallel: Parallel, held: list[list[int]]) -> None:
    whole = torch.arange(8)[:, None].expand(8, 2)
    taken = [Cut(text).take(whole, parallel.coordinates(rank), parallel)[:, 0].tolist() for rank in range(parallel.world)]
    assert taken == held


def test_columns_are_cut_over_tp_on_the_second_dim() -> None:
    parallel = Parallel(tp=2)
    taken = Cut("tp@1").take(torch.arange(8).reshape(2, 4), parallel.coordinates(1), parallel)
    assert taken.tolist() == [[2, 3], [6, 7]]


def test_experts_are_cut_over_ep_and_each_half_of_them_over_etp() -> None:
    parallel, whole = Parallel(tp=2, ep=2, etp=2), torch.arange(16).reshape(4, 4, 1)  # 4 experts of [gate gate up up]
    assert parallel.world == 4
    taken = [Cut("ep@0 etp@1/2").take(whole, parallel.coordinates(rank), parallel).flatten().tolist() for rank in range(4)]
    assert taken == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]


def test_a_cut_that_does_not_divide_or_can_not_be_read_is_refused() -> None:
    with pytest.raises(UsageError, match="3 does not divide by tp 2"):
        Cut("tp@0/2").take(torch.zeros(6, 1), Parallel(tp=2).coordinates(0), Parallel(tp=2))
    with pytest.raises(UsageError, match="unknown way to shard 'tp:0'"):
        Cut("tp:0").take(torch.zeros(6, 1), Parallel().coordinates(0), Parallel())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
def test_the_table_reads_every_reference_tensor_once(reference: HuggingFaceDirectory, layout: CheckpointLayout, mtp: bool) -> None:
    family = family_of(reference.config)
    rules = family.rules(family.reference_dimensions(reference.config), layout, reference.names, mtp)
    read = Counter(name for rule in rules for name in rule.references)
    made = Counter(candidate.name for rule in rules for candidate in rule.candidates)
    left = {name for name in reference.names if name not in read}
    assert set(read.values()) == set(made.values()) == {1}
    assert set(read) <= set(reference.names)
    assert left == (set() if mtp else {name for name in reference.names if name.startswith("mtp.")})
    dims = family.reference_dimensions(reference.config)
    assert all(family.left_out(name, dims) for name in left)
    assert [rule.site for rule in rules] == sorted(rule.site for rule in rules)
    check_total(rules)


def test_the_table_makes_the_golden_checkpoint_that_megatron_wrote(reference: HuggingFaceDirectory, candidate: Checkpoint) -> None:
    family = family_of(reference.config)
    rules = family.rules(family.reference_dimensions(reference.config), "slime", reference.names, mtp=True)
    made = {name: tensor for rule in rules for name, tensor in rule.forward([reference.read(name) for name in rule.references]).items()}
    assert made.keys() == candidate.tensors.keys()
    for name, tensor in made.items():
        stored = candidate.read(name)
        padding = stored[len(tensor) :]
        assert torch.equal(stored[: len(tensor)], tensor), name
        assert len(padding) == (12 if name in ("embedding.word_embeddings.weight", "output_layer.weight") else 0)


def test_a_name_that_two_rows_have_is_an_error_of_ours() -> None:
    def rule(reference: str, candidate: str) -> Rule:
        return Rule(Site("embedding"), (reference,), (Made(candidate),))

    check_total([rule("a", "x"), rule("b", "y")])
    with pytest.raises(AssertionError, match="'a'"):
        check_total([rule("a", "x"), rule("a", "y")])
    with pytest.raises(AssertionError, match="'x'"):
        check_total([rule("a", "x"), rule("b", "x")])


def test_a_long_table_is_checked_too() -> None:
    with pytest.raises(AssertionError):
        check_total([Rule(Site("experts", 0, "fc1"), tuple(f"expert {e % 4999}" for e in range(5000)), (Made("fc1"),))])


def test_fused_and_single_experts_give_the_same_tensors(reference: HuggingFaceDirectory) -> None:
    family = FAMILY
    dims = family.reference_dimensions(reference.config)
    prefix = "model.layers.0.mlp.experts."
    fused = {name: reference.read(f"{prefix}{name}") for name in ("gate_up_proj", "down_proj")}
    single: dict[str, torch.Tensor] = {}
    for e, (both, down) in enumerate(zip(fused["gate_up_proj"], fused["down_proj"], strict=True)):
        gate, up = both.chunk(2)
        single |= {f"{prefix}{e}.{name}_proj.weight": tensor for name, tensor in (("gate", gate), ("up", up), ("down", down))}
    names = [name for name in reference.names if not name.startswith(prefix)] + list(single)

    def made(listed: list[str], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rules = [rule for rule in family.rules(dims, "slime", listed, False) if rule.site.layer == 0 and rule.site.module == "experts"]
        return {name: tensor for rule in rules for name, tensor in rule.forward([tensors[name] for name in rule.references]).items()}

    one, other = made(list(reference.names), {prefix + name: tensor for name, tensor in fused.items()}), made(names, single)
    assert one.keys() == other.keys()
    assert len(one) == 2
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"model_type 'gpt5'.*known: .*qwen3\.5-moe"):
        family_of({"model_type": "gpt5"})
