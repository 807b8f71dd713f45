"""Findings with one cause are one fault; a shard says which coordinates hold a wrong piece; pages are strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bisect_hooks.parallel import Coordinates, Parallel
from bisect_hooks.site import parse_site
from bisect_hooks.table import Cut

from bisect_tool.explain import explanation
from bisect_tool.faults import Fault, Finding, Proof, Relation, group, joint, number, span, without_layer
from bisect_tool.judge import EXACT
from bisect_tool.measure import measure
from bisect_tool.shards import Shard, pieces_of, shard_of

MOD_4 = Relation("duplicate", {"map": "e mod 4", "modulus": 4, "wrong": 12, "of": 16})
MODULES = ("input_norm", "linear_attention", "pre_mlp_norm", "router", "experts")
LAYOUT = Parallel(tp=2, pp=2, ep=4, etp=1)


def modules_of(_layer: int) -> tuple[str, ...]:
    return MODULES


def shard(*places: tuple[int, ...], expert: bool = False, stages: Sequence[int] = (0,), parallel: Parallel = LAYOUT) -> Shard:
    return Shard(parallel, "conversion", expert, frozenset((stage, *place) for stage in stages for place in places))


def finding(site: str, relation: Relation | None = None, where: Shard | None = None, cls: str = "conversion", **more: Any) -> Finding:
    tensors = ((f"reference {site}",), (f"candidate {site}",))
    return Finding(cls, parse_site(site), where or shard((0, 0)), tensors, relation=relation, **more)


def grouped(*findings: Finding) -> list[dict[str, Any]]:
    return [fault.to_json() for fault in group(findings, modules_of)]


def test_two_parts_broken_by_one_rule_are_one_fault_over_all_its_layers() -> None:
    wrong = [finding(f"layers.{n}.experts.{part}", MOD_4) for n in (5, 2, 11) for part in ("fc2", "fc1")]
    (page,) = grouped(*wrong)
    assert (page["layer"], page["layers"]) == (2, [2, 5, 11])
    assert (page["module"], page["modules"]) == ("experts", ["experts"])
    assert (page["part"], page["parts"]) == (None, ["fc1", "fc2"])
    assert page["site"] == "layers.2.experts.fc1"
    assert page["relation"] == {"kind": "duplicate", "detail": MOD_4.detail, "also": []}
    assert page["tensors"]["reference"] == ["reference layers.2.experts.fc1", "reference layers.2.experts.fc2"]


def test_one_part_is_named_as_the_part() -> None:
    (page,) = grouped(finding("layers.4.experts.fc1", MOD_4), finding("layers.3.experts.fc1", MOD_4))
    assert (page["part"], page["parts"], page["layer"]) == ("fc1", ["fc1"], 3)


@pytest.mark.parametrize(
    "other",
    [
        finding("layers.3.experts.fc1", Relation("duplicate", {**MOD_4.detail, "map": "e mod 8", "modulus": 8})),
        finding("layers.3.experts.fc1", Relation("permutation", MOD_4.detail)),
        finding("layers.3.shared_expert.fc1", MOD_4),
        finding("layers.3.experts.fc1", MOD_4, cls="parallel"),
        finding("layers.3.experts.fc1", MOD_4, between=("candidate", "export")),
        finding("layers.3.experts.fc1"),
    ],
    ids=["detail", "kind", "module", "class", "between", "no relation"],
)
def test_findings_of_different_causes_stay_apart(other: Finding) -> None:
    assert len(grouped(finding("layers.2.experts.fc1", MOD_4), other)) == 2


@pytest.mark.parametrize("relation", [None, Relation("unknown")], ids=["none", "unknown"])
def test_without_a_relation_part_and_shard_have_to_be_the_same(relation: Relation | None) -> None:
    def one(site: str, *places: tuple[int, ...]) -> Finding:
        return finding(site, relation, shard(*places))

    (page,) = grouped(one("layers.2.router.logits", (0, 0)), one("layers.3.router.logits", (0, 0)))
    assert page["layers"] == [2, 3]
    assert len(grouped(one("layers.2.router.logits", (0, 0)), one("layers.3.router.logits", (1, 0)))) == 2
    assert len(grouped(one("layers.2.experts.fc1", (0, 0)), one("layers.2.experts.fc2", (0, 0)))) == 2


def test_an_offset_over_all_modules_of_its_layers_has_no_module() -> None:
    offset = Relation("other-layer", {"offset": 1})
    every = [finding(f"layers.{n}.{module}", offset) for n in (4, 5) for module in MODULES]
    (page,) = grouped(*every)
    assert page["module"] is None
    assert page["modules"] == list(MODULES)
    assert page["layers"] == [4, 5]
    (page,) = grouped(*every[:-1])
    assert page["module"] == "input_norm"


def test_an_exchange_of_two_modules_is_one_fault_that_lists_both() -> None:
    exchange = [
        finding("layers.3.shared_expert.fc1", Relation("other-tensor", {"name": "b"}, rule="a = b 3")),
        finding("layers.3.router.logits", Relation("other-tensor", {"name": "a"}, rule="a = b 3")),
    ]
    (page,) = grouped(*exchange)
    assert (page["module"], page["modules"], page["part"]) == ("router", ["router", "shared_expert"], None)
    assert page["site"] == "layers.3.router.logits"


def test_an_exchange_is_told_as_one_and_a_copy_is_not() -> None:
    norms = ("layers.0.input_norm", "layers.0.pre_mlp_norm")

    def told(names: dict[str, str]) -> str:
        found = [finding(one, Relation("other-tensor", {"name": f"candidate {other}"}, rule="pair")) for one, other in names.items()]
        return explanation(group(found, modules_of)[0])[0]

    assert "each holds what belongs in another of them" in told(dict(zip(norms, norms[::-1], strict=True)))
    assert "it holds what belongs in candidate layers.0.pre_mlp_norm" in told({norms[0]: norms[1]})
    assert "it holds what belongs in candidate final_norm" in told(dict.fromkeys(norms, "final_norm"))


def told(*findings: Finding) -> tuple[str, str]:
    """What is said of findings of one fault, and what to do."""
    (fault,) = group(findings, modules_of)
    text, do = explanation(fault)
    return text.partition("): ")[2], do


def in_rows(start: int, stop: int) -> Relation:
    return Relation("scale", {"value": 1.25, "rows": [[start, stop]]}, rule="scale 1.25")


def test_tensors_changed_by_one_rule_in_other_rows_are_told_one_by_one() -> None:
    wrong = [finding("layers.0.experts.fc1", in_rows(130, 131)), finding("layers.0.experts.fc2", in_rows(2, 4))]
    (page,) = grouped(*wrong)
    each = [
        {"tensor": "candidate layers.0.experts.fc1", "kind": "scale", "detail": {"value": 1.25, "rows": [[130, 131]]}},
        {"tensor": "candidate layers.0.experts.fc2", "kind": "scale", "detail": {"value": 1.25, "rows": [[2, 4]]}},
    ]
    assert page["relation"] == {"kind": "scale", "detail": {"value": 1.25, "each": each}, "also": []}
    assert told(*wrong)[0] == "fc1: it is the reference's times 1.25 in row 130; fc2: it is the reference's times 1.25 in rows 2 to 3."
    text, _ = told(finding("layers.0.experts.fc1", in_rows(7, 8)), finding("layers.3.experts.fc1", in_rows(9, 10)))
    assert text.startswith("candidate layers.0.experts.fc1: it is the reference's times 1.25 in row 7; candidate layers.3.experts.fc1: ")


def test_one_site_whose_tensors_have_other_relations_says_what_was_done_to_each() -> None:
    zero = Relation("zero", {"rows": [[130, 131]]}, rule="zero {}")
    relation = joint([finding("layers.0.experts.fc1", zero), finding("layers.0.experts.fc2", in_rows(2, 3))])
    assert relation is not None
    assert (relation.kind, relation.rule) == ("unknown", "")
    text, _ = told(finding("layers.0.experts.fc1", relation))
    assert text == "fc1: every element is zero in row 130; fc2: it is the reference's times 1.25 in row 2."
    assert joint([finding("layers.0.experts.fc1", zero), finding("layers.0.experts.fc2", zero)]) == zero
    assert joint([finding("layers.0.experts.fc1")]) is None


@pytest.mark.parametrize(
    ("site", "axis", "advised"),
    [("attention.qkv", 0, True), ("attention_gate", 0, True), ("attention.out_proj", 1, False), ("attention.q_norm", 0, False)],
)
def test_how_attention_is_packed_is_said_only_where_it_is(site: str, axis: int, advised: bool) -> None:
    order = Relation("permutation", {"axis": axis, "unit": 1, "map": [1, 0, 2, 3]})
    text, do = told(finding(f"layers.3.{site}", order))
    assert text == f"its {'columns' if axis else 'rows'} 0 and 1 have changed places."
    assert ("Megatron packs" in do) == advised


def test_rows_that_hold_others_are_named_and_the_map_is_not_printed() -> None:
    mapped = list(range(500))
    mapped[40:45] = [41, 42, 43, 44, 45]
    order = {"axis": 0, "map": mapped, "modulus": None, "wrong": 5, "of": 500}
    text, _ = told(finding("embedding", Relation("duplicate", order)))
    named = "; ".join(f"row {i} holds the reference's row {i + 1}" for i in (40, 41, 42))
    assert text == f"{named}, and 2 more (5 of 500 are wrong)."
    text, _ = told(finding("embedding", Relation("duplicate", order | {"map": "e mod 125", "modulus": 125, "wrong": 375})))
    assert text == "rows repeat each other, 375 of 500 are wrong; row i holds row i mod 125."


def test_an_order_says_which_rows_of_which_experts_are_in_it() -> None:
    order = {"axis": 1, "unit": 1, "map": [*range(40)[::-1], *range(40, 80)], "experts": [13], "wrong": 1, "of": 16}
    text, _ = told(finding("layers.5.experts.fc1", Relation("permutation", order)))
    assert text == "its rows 0 to 39 are the reference's in reverse order in 1 of 16 experts (13)."


@pytest.mark.parametrize(
    ("layers", "do"),
    [
        ((1,), "Look at how layers are numbered in the mapping."),
        ((1, 6), "Look at how layers are numbered in the mapping."),
        ((4, 5, 6, 7), "Look at the layer offset of the pipeline stages."),
    ],
)
def test_a_stage_is_told_from_single_layers_that_hold_another(layers: tuple[int, ...], do: str) -> None:
    offset = Relation("other-layer", {"offset": -4})
    assert told(*(finding(f"layers.{n}.{module}", offset) for n in layers for module in MODULES))[1] == do


def test_faults_come_in_compute_order_and_not_by_size() -> None:
    sites = ["lm_head", "layers.10.output", "embedding", "layers.2.experts.fc1", "layers.2.attention.qkv", "final_norm"]
    assert [page["site"] for page in grouped(*map(finding, sites))] == [
        "embedding",
        "layers.2.attention.qkv",
        "layers.2.experts.fc1",
        "layers.10.output",
        "final_norm",
        "lm_head",
    ]


def test_what_is_outside_the_layers_has_no_layer() -> None:
    (page,) = grouped(finding("mtp.0.eh_proj"))
    assert (page["layer"], page["layers"], page["module"], page["part"]) == (None, [], "mtp", "eh_proj")


def test_a_fault_that_can_not_be_classed_lists_the_candidates() -> None:
    page = Fault((Finding(None, parse_site("lm_head"), shard()),)).to_json()
    assert page["class"] is None
    assert set(page["class_candidates"]) == {"conversion", "model-definition", "parallel"}


def test_the_shards_of_one_fault_are_united() -> None:
    parallel = Parallel(ep=4, pp=2)
    one = finding("layers.1.experts.fc1", MOD_4, shard((1, 0), expert=True, stages=(0,), parallel=parallel))
    other = finding("layers.5.experts.fc1", MOD_4, shard((1, 0), (2, 0), expert=True, stages=(1,), parallel=parallel))
    (page,) = grouped(one, other)
    assert (page["shard"]["ep"], page["shard"]["pp"]) == ([1, 2], [0, 1])


def test_a_shard_that_is_a_product_of_lists_names_no_ranks() -> None:
    page = shard((0, 0), (1, 0), stages=(1,)).to_json()
    assert page == {"layout": {"tp": 2, "pp": 2, "ep": 4, "etp": 1, "cp": 1}, "of": "conversion", "pp": [1], "tp": [0, 1]}
    assert "etp" not in shard((2, 0), expert=True).to_json()  # of size 1
    assert shard((2, 0), (3, 0), expert=True).to_json()["ep"] == [2, 3]


def test_a_shard_that_is_no_product_lists_its_ranks() -> None:
    parallel = Parallel(tp=2, ep=2, etp=2)
    page = shard((0, 0), (1, 1), expert=True, parallel=parallel).to_json()
    assert (page["ep"], page["etp"]) == ([0, 1], [0, 1])
    assert page["ranks"] == [{"ep": 0, "etp": 0}, {"ep": 1, "etp": 1}]
    assert "pp" not in page


def test_places_that_differ_from_stage_to_stage_are_no_product() -> None:
    page = shard((0, 0), stages=(0,)).joined(shard((1, 0), stages=(1,))).to_json()
    assert page["ranks"] == [{"pp": 0, "tp": 0}, {"pp": 1, "tp": 1}]


def test_a_shard_of_an_unknown_layout_names_no_axes() -> None:
    page = Shard(LAYOUT, "unknown", True, frozenset({(1, 0, 0)})).to_json()
    assert page.keys() == {"layout", "of"}


def test_the_wrong_piece_is_found_by_cutting_as_the_table_does() -> None:
    parallel = Parallel(tp=2, ep=2, etp=2)
    unequal = torch.zeros(4, 4, 3, dtype=torch.bool)
    unequal[3, 2] = True  # expert 3, first row of its second half

    def wrong(cut: str, where: torch.Tensor) -> set[tuple[int, ...]]:
        pieces = pieces_of(Cut(cut), tuple(where.shape), parallel)
        return {place for place, regions in pieces.items() if any(bool(where[region].any()) for region in regions)}

    assert wrong("ep@0 etp@1/2", unequal) == {(1, 0)}
    assert wrong("tp@0", unequal[:, :, 0]) == {(1, 0)}
    assert wrong("", unequal) == {(0, 0), (1, 0)}
    assert wrong("tp@0", torch.zeros(4, 2, dtype=torch.bool)) == set()


def test_the_pieces_of_a_tensor_are_what_its_ranks_hold() -> None:
    whole = torch.arange(4 * 8 * 3).reshape(4, 8, 3)
    for cut in ("ep@0 etp@1/2", "ep@0 etp@2", "ep@0"):
        parallel = Parallel(tp=3 if "@2" in cut else 2, ep=2)
        for (ep, etp), regions in pieces_of(Cut(cut), (4, 8, 3), parallel).items():
            at = Coordinates(tp=etp, pp=0, dp=0, ep=ep, etp=etp)
            held = torch.cat([whole[region] for region in regions], 1)
            assert torch.equal(held, Cut(cut).take(whole, at, parallel))


def test_stages_are_those_that_hold_the_layers() -> None:
    def stages(site: str, parallel: Parallel) -> list[int]:
        return shard_of(parse_site(site), parallel, "run", 8).ranks_of("pp")

    assert stages("layers.3.router.logits", Parallel(pp=4)) == [1]
    assert stages("layers.2.router.logits", Parallel(pp=2, pp_layers=(3, 5))) == [0]
    assert stages("layers.3.router.logits", Parallel(pp=2, pp_layers=(3, 5))) == [1]
    assert (stages("embedding", Parallel(pp=2)), stages("lm_head", Parallel(pp=2))) == ([0], [1])


@pytest.mark.parametrize(("value", "page"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (0.5, 0.5), (None, None), (0, 0)])
def test_a_number_that_json_lacks_is_a_word(value: float | None, page: float | str | None) -> None:
    assert number(value) == page


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_page_of_a_fault_is_strict_json(bad: float) -> None:
    difference = measure(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, bad]]))
    wrong = finding(
        "layers.2.router.logits", MOD_4, difference=difference, tolerance=EXACT, proof=Proof("put it back", bad, 0.0, "as it was")
    )
    page = json.loads(json.dumps(grouped(wrong, finding("lm_head")), allow_nan=False))
    assert page[0]["difference"]["candidate_value"] == number(bad)
    assert page[0]["difference"]["index"] == [0, 1]
    assert page[0]["difference"]["nonfinite"] == 1
    assert page[0]["proof"]["before"] == number(bad)
    assert page[1]["difference"]["compared"] == 0


def test_a_span_of_numbers_is_written_as_one_says_it() -> None:
    assert [span(numbers) for numbers in ([0, 1, 2, 3], [3, 7], [5], [1, 2, 4], [])] == ["0 to 3", "3 and 7", "5", "1, 2 and 4", "none"]
    assert without_layer("decoder.layers.12.mlp.router.weight") == without_layer("decoder.layers.3.mlp.router.weight")
