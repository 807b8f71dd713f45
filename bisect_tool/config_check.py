"""The config stage: do the candidate's args describe the same model as config.json?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bisect_hooks.family import CheckpointLayout, Family, Setting
from bisect_hooks.parallel import Parallel

from bisect_tool.faults import Finding, Proof, Relation
from bisect_tool.shards import shard_of


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A setting, what the candidate has for it, and where the candidate got that."""

    setting: Setting
    value: Any
    given: bool

    @property
    def shown(self) -> str:
        source = "" if self.given else ", Megatron's default: the flag is not given"
        return f"{self.setting.flag} is {self.value!r}{source}; config.json asks for {self.setting.expected!r}: {self.setting.effect}"


def compare_settings(
    family: Family, config: Mapping[str, Any], args: Mapping[str, Any], layout: CheckpointLayout
) -> tuple[list[Mismatch], int]:
    """(settings that differ, how many were compared).  An arg that is absent or None has Megatron's default."""
    found, settings = [], family.settings(config, layout)
    for setting in settings:
        given = args.get(setting.arg) is not None
        value = args[setting.arg] if given else setting.default
        if not setting.same(value, setting.expected):
            found.append(Mismatch(setting, value, given))
    return found, len(settings)


def switched_off(mismatches: Sequence[Mismatch]) -> dict[str, Setting]:
    """Modules that the candidate's own args leave out."""
    return {one.setting.sites[0].module: one.setting for one in mismatches if one.setting.expected and not one.value}


def findings(mismatches: Sequence[Mismatch], parallel: Parallel, of: str, layers: int) -> list[Finding]:
    """One finding for each site that a wrong setting reaches; they group into one fault a setting."""
    found = []
    for one in mismatches:
        relation = config_relation(one)
        proof = Proof(f"set {one.setting.flag} as config.json has it", None, None, "every other setting compared is equal")
        text = explanation(one)
        for site in one.setting.sites:
            found.append(
                Finding(
                    "model-definition",
                    site,
                    shard_of(site, parallel, of, layers),
                    relation=relation,
                    proof=proof,
                    explanation=text[0],
                    next=text[1],
                )
            )
    return found


def config_relation(one: Mismatch) -> Relation:
    """The relation of a wrong setting: the rule that makes all it reaches one fault."""
    return Relation("config", {"flag": one.setting.flag, "value": one.value, "expected": one.setting.expected})


def explanation(one: Mismatch) -> tuple[str, str]:
    """(what is wrong, what to do next)."""
    said = "is off" if one.value is False else f"is {one.value}"
    source = "the checkpoint's args say so" if one.given else "nobody gave it, so Megatron's default holds"
    layers = sorted({site.layer for site in one.setting.sites if site.layer is not None})
    reach = f" in {len(layers)} layers, first layer {layers[0]}" if layers else ""
    text = f"Model-definition fault: {one.setting.flag} {said} ({source}), config.json asks for {one.setting.expected}; {one.setting.effect}{reach}."
    value = "" if one.setting.expected is True else f" {one.setting.expected}"
    do = f"Give {one.setting.flag}{value}." if one.setting.expected is not False else f"Drop {one.setting.flag}."
    return text, do
