"""Sites print, parse and sort: one name on both sides, in compute order."""

from __future__ import annotations

import re

import pytest
from bisect_hooks.errors import UsageError
from bisect_hooks.site import IN_LAYER, MODULES, PARTS, Site, parse_site
from hypothesis import given
from hypothesis import strategies as st
from properties import repeatable

NAMED = [(module, part) for module in MODULES for part in (None, *PARTS.get(module, ()))]

# rule 2 of the contract, with the parts in the order in which they are computed
IN_COMPUTE_ORDER = [
    "tokens",
    "embedding",
    "layers.0.input",
    "layers.0.input_norm",
    "layers.0.linear_attention.in_proj",
    "layers.0.linear_attention.conv1d",
    "layers.0.linear_attention.core",
    "layers.0.linear_attention.out_proj",
    "layers.0.pre_mlp_norm",
    "layers.0.router.logits",
    "layers.0.router.probs",
    "layers.0.router.topk",
    "layers.0.experts.fc1",
    "layers.0.experts.fc2",
    "layers.0.shared_expert.fc1",
    "layers.0.shared_expert_gate",
    "layers.0.mlp",
    "layers.0.output",
    "layers.2.input_norm",
    "layers.2.attention.qkv",
    "layers.2.attention.rope",
    "layers.2.attention.core",
    "layers.2.attention_gate",
    "layers.2.pre_mlp_norm",
    "layers.10.input_norm",
    "layers.10.output",
    "final_norm",
    "lm_head",
    "mtp.0.enorm",
    "mtp.0.eh_proj",
    "mtp.0.layer",
    "mtp.1.enorm",
]


@st.composite
def sites(draw: st.DrawFn) -> Site:
    module, part = draw(st.sampled_from(NAMED))
    layer = draw(st.integers(0, 300)) if module in IN_LAYER or module == "mtp" else None
    return Site(module, layer, part)


@repeatable
@given(sites())
def test_a_site_parses_to_itself(site: Site) -> None:
    assert parse_site(str(site)) == site


@pytest.mark.parametrize(
    ("site", "text"),
    [
        (Site("attention", 3, "rope"), "layers.3.attention.rope"),
        (Site("output", 12), "layers.12.output"),
        (Site("lm_head"), "lm_head"),
        (Site("mtp", 0, "eh_proj"), "mtp.0.eh_proj"),
        (Site("tokens"), "tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_site_is_written_as_the_contract_has_it(site: Site, text: str) -> None:
    assert str(site) == text
    assert parse_site(text) == site


@repeatable
@given(st.permutations(IN_COMPUTE_ORDER))
def test_sites_sort_in_compute_order(shuffled: list[str]) -> None:
    assert [str(site) for site in sorted(map(parse_site, shuffled))] == IN_COMPUTE_ORDER


@repeatable
@given(sites(), sites())
def test_two_different_sites_never_share_a_place_in_the_order(one: Site, other: Site) -> None:
    assert (one == other) == (one.order == other.order)
    assert (one < other) + (other < one) + (one == other) == 1


def test_a_layer_is_done_before_the_next_one_begins() -> None:
    inside = [Site(module, 4, part) for module, part in NAMED if module in IN_LAYER]
    assert max(inside) == Site("output", 4)
    assert max(inside) < min(Site(site.module, 5, site.part) for site in inside)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers.3.atention", "attention"),
        ("layers.3.router.logit", "logits"),
        ("layers.3.linear_attention.alog", "a_log"),
        ("final_nrom", "final_norm"),
        ("mtp.0.eh_projection", "eh_proj"),
        ("layers.3.lm_head", "unknown module inside a layer 'lm_head'"),
        ("embedding.weight", "unknown part of embedding 'weight'"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_site(text)


@pytest.mark.parametrize(
    "text", ["", "layers", "layers.3", "layers.x.output", "layers.-1.output", "layers.3.attention.qkv.q", "lm_head.a.b"]
)
def test_a_text_that_is_no_site_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_site(text)


@pytest.mark.parametrize("text", ["attention.qkv", "output", "layers.².output", "embedding.3"])
def test_a_text_that_can_not_be_written_back_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_site(text)


@pytest.mark.parametrize(("module", "part"), [("atention", None), ("attention", "in_proj"), ("final_norm", "weight")])
def test_a_site_of_unknown_words_can_not_be_made(module: str, part: str | None) -> None:
    with pytest.raises(UsageError, match="unknown"):
        Site(module, 0 if module in IN_LAYER else None, part)
