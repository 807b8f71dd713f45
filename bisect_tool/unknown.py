"""An architecture that no family answers to: what of it is not understood, held against the family whose tables fit it best."""

from __future__ import annotations

from dataclasses import dataclass

from bisect_hooks.errors import UsageError, by_kind
from bisect_hooks.family import Dimensions, Family, families, family_of

from bisect_tool.hf_directory import HuggingFaceDirectory


@dataclass(frozen=True)
class Fit:
    """What one family's tables make of a directory.

    keys    of config.json that it does not understand     unread  tensors that are not in its table
    absent  tensors that its table reads and that are not there
    """

    family: Family
    dims: Dimensions
    keys: list[str]
    unread: list[str]
    absent: list[str]

    @property
    def said(self) -> list[str]:
        return [
            *(f"config.json's {one}" for one in self.keys),
            *(f"the tensor {one}" for one in by_kind(self.unread)),
            *(f"that it has no {one}" for one in by_kind(self.absent)),
        ]


def family_in(directory: HuggingFaceDirectory) -> Family:
    """The family of a directory.  Raises UsageError; for an architecture that is not known, with all that is not understood of it."""
    try:
        return family_of(directory.config)
    except UsageError as error:
        fits = [fit for family in families().values() if (fit := fit_of(family, directory)) is not None]
        if not fits:
            raise
        nearest = min(fits, key=lambda fit: len(fit.said))
        said = [*nearest.said, *_modules(directory, nearest)]
        listed = f"does not understand {'; '.join(said)}" if said else "knows every key, tensor and module of it, and may say so in a file"
        raise UsageError(f"{error.message}; the nearest, {nearest.family.name}, {listed}", hint=error.hint) from error


def fit_of(family: Family, directory: HuggingFaceDirectory) -> Fit | None:
    """How a family's tables fit; None where config.json lacks a size that they need."""
    try:
        dims, keys = family.read(directory.config)
    except UsageError:
        return None
    rules = family.rules(dims, "native", directory.names, mtp=bool(family.mtp_tensors(directory.names, dims)))
    tabled = {name for rule in rules for name in rule.references}
    there = set(directory.names)
    unread = [name for name in directory.names if name not in tabled and family.left_out(name, dims) is None]
    return Fit(family, dims, keys, unread, sorted(tabled - there))


def _modules(directory: HuggingFaceDirectory, fit: Fit) -> list[str]:
    from bisect_hooks.hf import empty_model, not_known

    try:
        modules, _ = not_known(empty_model(directory.path), fit.family, fit.dims)
    except UsageError as error:
        return [f"its modules ({error.message})"]
    return [f"the module {one}" for one in by_kind(modules, "modules")]
