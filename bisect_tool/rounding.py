"""What of the reference's weights is left on the candidate's side: rows of the table that round, and the dtype that is stored.

Both sides are to compute from the same stored values, so the reference is run through the rounding that the candidate's conversion
had to make (contract rule 8): once, to the stored dtype, but for what the family keeps in float32.  Only the dtype is taken from
the candidate, never a value, so what is wrong in its file stays wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from bisect_hooks.errors import by_kind
from bisect_hooks.family import CheckpointLayout, Family
from bisect_hooks.table import Made, Rule, forward

from bisect_tool.hf_directory import HuggingFaceDirectory
from bisect_tool.measure import measure

# narrower ones are stored with scales, or are a fault
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rounded_once(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The value as `dtype` keeps it, in float32 (None: the tensor as it is).  What overflows there is no rounding and stays."""
    if dtype is None:
        return tensor
    kept = tensor.to(dtype).float()
    return torch.where(kept.isfinite(), kept, tensor.float())


def dtype_of_rounding(made: Made, held: torch.dtype, stored: torch.dtype | None) -> torch.dtype | None:
    """The dtype that a candidate tensor made of `held` is rounded to where it is `stored` so; None where nothing rounds, or may."""
    if made.fp32 or stored not in DTYPES or held not in (*DTYPES, torch.float64) or torch.promote_types(held, stored) == stored:
        return None
    return stored


@dataclass(frozen=True)
class Rounding:
    """rules   the table, read from the directory · built  read from the model, where transformers has fused the experts
    dtypes  candidate tensors that are stored in a dtype which does not hold the reference's values, by the table's name
    """

    directory: HuggingFaceDirectory
    layout: CheckpointLayout
    rules: Sequence[Rule] = field(repr=False)
    built: Sequence[Rule] = field(repr=False)
    dtypes: Mapping[str, torch.dtype] = field(repr=False)

    @classmethod
    def of(
        cls, directory: HuggingFaceDirectory, family: Family, layout: CheckpointLayout, stored: Mapping[str, torch.dtype] | None = None
    ) -> Rounding:
        """stored  dtypes of the candidate's tensors by their name on its side; none where there is no candidate"""
        dims = family.reference_dimensions(directory.config)
        rules, built = (family.rules(dims, layout, names, mtp=False) for names in (directory.names, ()))
        held = dict(stored or {})
        held |= {own: held[alias] for rule in rules for own, alias in rule.aliases if alias in held and own not in held}
        found = {
            made.name: dtype_of_rounding(made, directory.dtypes[rule.references[0]], held.get(made.name))
            for rule in rules
            if rule.references[0] in directory.dtypes
            for made in rule.candidates
        }
        return cls(directory, layout, rules, built, {name: dtype for name, dtype in found.items() if dtype is not None})

    @property
    def shown(self) -> dict[str, str]:
        return {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()}

    @cached_property
    def _rule_of(self) -> dict[str, Rule]:
        """The row that rounds a reference tensor."""
        rounding = [rule for rule in self.rules if rule.op.lossy or any(made.name in self.dtypes for made in rule.candidates)]
        return {name: rule for rule in rounding for name in rule.references}

    def _kept(self, rule: Rule) -> list[torch.Tensor]:
        """The candidate tensors of a row, as they are stored."""
        made = forward(rule.op, [self.directory.read(name) for name in rule.references])
        return [rounded_once(tensor, self.dtypes.get(one.name)) for tensor, one in zip(made, rule.candidates, strict=True)]

    def read(self, name: str) -> torch.Tensor:
        """A reference tensor by its canonical name, as it is after the rounding."""
        rule = self._rule_of.get(name)
        if rule is None:
            return self.directory.read(name)
        return rule.op.backward(self._kept(rule))[rule.references.index(name)]

    def tensors(self, notes: list[str]) -> Iterator[dict[str, torch.Tensor]]:
        """The model's parameters that round, a row at a time; at the end `notes` has a line for each kind of rounding, with its size."""
        built = {rule.candidates: rule for rule in self.built}
        worst: dict[str, float] = {}
        names: dict[str, list[str]] = {}
        for rule in dict.fromkeys(self._rule_of.values()):
            kept = self._kept(rule)
            after = zip(rule.references, rule.op.backward(kept), strict=True)
            size = max(measure(self.directory.read(name), tensor).relative_rms for name, tensor in after)
            if rule.op.lossy:
                how = f"{rule.site.module}.{rule.site.part}: the {self.layout} layout stores it rounded"
            else:
                stored = next(self.shown[made.name] for made in rule.candidates if made.name in self.dtypes)
                held = str(self.directory.dtypes[rule.references[0]]).removeprefix("torch.")
                how = f"the candidate stores them in {stored}, the reference has them in {held}"
                names.setdefault(how, []).extend(made.name for made in rule.candidates)
            worst[how] = max(worst.get(how, 0.0), size)
            into = built[rule.candidates]
            yield dict(zip(into.references, into.op.backward(kept), strict=True))
        for how, size in worst.items():
            if size > 0:
                kinds = by_kind(names.get(how, []))
                which = f"{kinds[0]}{f' and {len(names[how]) - 1} more' if len(kinds) > 1 else ''}: " if kinds else ""
                notes.append(f"{which}{how} (relative rms up to {size:.1e}); the reference was run through the same rounding")
