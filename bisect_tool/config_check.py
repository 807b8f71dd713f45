"""The config stage: do the candidate's args describe the same model as config.json?"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bisect_hooks.family import CheckpointLayout, Family, Setting
from bisect_hooks.parallel import Parallel

from bisect_tool.faults import Finding, Proof, Relation
from bisect_tool.model_args import every_setting, held, narrowed
from bisect_tool.shards import shard_of


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A setting, what the candidate has for it, and where the candidate got that (`source`, when it is not the checkpoint's args)."""

    setting: Setting
    value: Any
    given: bool
    source: str = ""

    @property
    def shown(self) -> str:
        source = f" ({self.source})" if self.source else "" if self.given else ", Megatron's default: the flag is not given"
        value, expected = self.said(self.value), self.said(self.setting.expected)
        return f"{self.setting.flag} is {value}{source}; config.json asks for {expected}: {self.setting.effect} ({self.reach})"

    def said(self, value: Any) -> str:
        """A value of the setting as a person says it of the flag: `--disable-bias-linear` is on where its arg is False."""
        if isinstance(value, bool):
            return "on" if value != self.setting.flag.startswith(("--disable-", "--no-")) else "off"
        return "none" if value is None else short(value)

    @property
    def reach(self) -> str:
        """'router in 60 layers': the first module it goes wrong in, and how many layers have it."""
        sites = self.setting.sites
        layers = {site.layer for site in sites if site.layer is not None}
        module = sites[0].module.replace("_", " ")
        return f"{module} in layer {min(layers)}" if len(layers) == 1 else f"{module} in {len(layers)} layers" if layers else module


def short(value: Any) -> str:
    """A value for a line of text; a long pattern as its runs, `[0]*3+[1]*57`."""
    if not isinstance(value, list) or len(value) < 9:
        return str(value)
    runs = [(one, len(list(many))) for one, many in itertools.groupby(value)]
    return (
        "+".join(f"[{one}]*{count}" for one, count in runs)
        if len(runs) < 5
        else f"[{', '.join(map(str, value[:8]))}, ...] ({len(value)} entries)"
    )


def compare_settings(
    family: Family, config: Mapping[str, Any], args: Mapping[str, Any], layout: CheckpointLayout
) -> tuple[list[Mismatch], int]:
    """(settings that differ, how many were compared).  An arg that is absent or None has Megatron's default."""
    dims, found, settings = family.reference_dimensions(config), [], every_setting(family, config, layout)
    for setting in settings:
        said = held(setting.arg, args)
        value = setting.default if said is None else said
        if not setting.same(value, setting.expected):
            found.append(Mismatch(narrowed(setting, value, dims), value, said is not None))
    return found, len(settings)


def switched_off(mismatches: Sequence[Mismatch]) -> dict[str, Setting]:
    """Modules that the candidate's own args leave out."""
    return {one.setting.sites[0].module: one.setting for one in mismatches if one.setting.expected and not one.value}


def findings(mismatches: Sequence[Mismatch], parallel: Parallel, of: str, layers: int) -> list[Finding]:
    """One finding for each site that a wrong setting reaches; they group into one fault a setting."""
    found = []
    control = (
        "every other setting compared is equal" if len(mismatches) == 1 else f"{len(mismatches) - 1} other settings differ, each on its own"
    )
    for one in mismatches:
        relation = config_relation(one)
        proof = Proof(f"set {one.setting.flag} as config.json has it", None, None, control)
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
    source = one.source or ("the checkpoint's args say so" if one.given else "nobody gave it, so Megatron's default holds")
    said, expected = one.said(one.value), one.said(one.setting.expected)
    text = f"Model-definition fault: {one.setting.flag} is {said} ({source}), config.json asks for {expected}; {one.setting.effect} ({one.reach})."
    if expected in ("off", "none"):
        return text, f"Drop {one.setting.flag}."
    return text, f"Give {one.setting.flag}{'' if expected == 'on' else f' {shlex.quote(expected)}'}."
