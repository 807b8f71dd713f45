from __future__ import annotations

from pathlib import Path

import pytest
from bisect_hooks.errors import UsageError

from bisect_tool.launch.hydra import is_override, read_overrides, shapes
from bisect_tool.launch.words import Where, Word

HERE = Where(Path("run.sh"), 3)
ACTOR = "actor_rollout_ref.actor.megatron."


def words(*texts: str) -> list[Word]:
    return [Word(text, HERE) for text in texts]


def test_only_the_actors_model_is_read() -> None:
    found = words(
        f"{ACTOR}tensor_model_parallel_size=2",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
    )
    assert read_overrides(found).args == {"tensor_model_parallel_size": 2}
    assert shapes(found) == 1


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("moe_router_topk", "8", 8),
        ("rotary_base", "1e7", 1e7),
        ("qk_layernorm", "True", True),
        ("kv_channels", "null", None),
        ("moe_router_dtype", "fp32", "fp32"),
        ("moe_layer_freq", "[1,0]", [1, 0]),
    ],
)
def test_values_are_hydras(name: str, text: str, value: object) -> None:
    found = read_overrides(words(f"+{ACTOR}override_transformer_config.{name}={text}"))
    assert found.args == {name: value} and found.said == {name: HERE} and found.unknown == []
    whole = read_overrides(words(f"+{ACTOR}override_transformer_config={{{name}:{text}}}"))
    assert whole.args == {name: value} and whole.said == {name: HERE}


def test_the_last_counts_and_a_tilde_takes_away() -> None:
    key = f"{ACTOR}override_transformer_config.moe_router_topk"
    assert read_overrides(words(f"+{key}=8", f"++{key}=4")).args == {"moe_router_topk": 4}
    assert read_overrides(words(f"+{key}=8", f"~{key}=")).args == {}


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("num_hidden_layers", "num_hidden_layers"),
        ("model_config.num_hidden_layers", "num_hidden_layers"),
        ("text_config.num_hidden_layers", "text_config.num_hidden_layers"),
    ],
)
def test_overrides_of_config_json_are_kept_apart(key: str, place: str) -> None:
    found = read_overrides(words(f"+actor_rollout_ref.model.override_config.{key}=4"))
    assert found.changed == {place: (4, HERE)} and found.args == {}


def test_overrides_of_config_json_may_come_at_once() -> None:
    found = read_overrides(words("+actor_rollout_ref.model.override_config={num_hidden_layers:4}"))
    assert found.changed == {"num_hidden_layers": (4, HERE)}


def test_names_that_nobody_knows_are_said() -> None:
    assert read_overrides(words(f"+{ACTOR}override_transformer_config.residual_gain=2")).unknown == [("--residual-gain", HERE)]


def test_what_is_not_known_is_refused_where_it_matters() -> None:
    assert read_overrides([Word("data.files=${X}", HERE, "why")]).args == {}
    for word in (Word(f"{ACTOR}tensor_model_parallel_size=${{TP}}", HERE, "why"), Word("${ACTOR}", HERE, "why")):
        with pytest.raises(UsageError, match=r"run\.sh:3: .*why"):
            read_overrides([word])
    with pytest.raises(UsageError, match=r"run\.sh:3: .*not YAML"):
        read_overrides(words(f"{ACTOR}x=[1"))


def test_a_path_or_flag_is_no_override() -> None:
    assert not is_override("a/b.py") and not is_override("--x=1") and not is_override("X=1")
