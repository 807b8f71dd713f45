"""Total accounting: every tensor on both sides is made by a row of the table, left out on purpose, or a finding by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bisect_hooks.site import Site
from bisect_hooks.table import Cut, Made, Rule

from bisect_tool.audit import Audit, Auditor
from bisect_tool.compare import same_tensor
from bisect_tool.faults import Finding, Proof, Relation, without_layer
from bisect_tool.hf_directory import HuggingFaceDirectory
from bisect_tool.places import Stored
from bisect_tool.sides import Cast, Expected, StoredSide, TableSide

# what Megatron and Hugging Face call the output layer
HEADS = ("output_layer.", "lm_head.")


def account(auditor: Auditor, missing: Sequence[str], audit: Audit) -> None:
    """Adds findings for what is missing, renamed, extra or stale, and lines for what was left out or is equal in other words."""
    for said, names in audit.settled.items():
        audit.notes.append(f"{names[0]} is {said}" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are {said}")
    if isinstance(auditor.candidate, StoredSide):
        _checkpoint(auditor, auditor.candidate, missing, audit)
    elif isinstance(auditor.candidate, TableSide):
        _export(auditor, auditor.candidate, missing, audit)
    if isinstance(auditor.reference, TableSide):
        _unread(auditor, auditor.reference.directory, audit)


def _checkpoint(auditor: Auditor, side: StoredSide, missing: Sequence[str], audit: Audit) -> None:
    extra = [key for key in side.checkpoint.tensors if key not in side.known]
    renamed: dict[str, str] = {}
    for name in missing:
        expected = auditor.expected(name)
        same = [
            key
            for key in extra
            if key not in renamed.values()
            and side.checkpoint.tensors[key].shape == expected.shape
            and same_tensor(Cast(expected, side.checkpoint.tensors[key].dtype), side.checkpoint.tensor(key))
        ]
        if same:
            renamed[name] = same[0]
            audit.findings.append(_names_only(auditor, name, side.checkpoint.tensors[same[0]].on_disk))
        else:
            audit.findings.append(_missing(auditor, name, extra))
    beyond = _beyond(auditor, side, [key for key in extra if key not in renamed.values()], audit)
    for key in extra:
        if key not in renamed.values() and key not in beyond and not _tied(auditor, key, side.checkpoint.tensors[key], audit):
            near = difflib.get_close_matches(key, auditor.row_of, n=1)
            mtp = re.match(r"mtp\.layers\.(\d+)\.", key)
            site = Site("mtp", int(mtp[1]), "layer") if mtp else auditor.row_of[near[0]][0].site if near else Site("embedding")
            site = Site("lm_head") if key.startswith(HEADS) else site
            audit.findings.append(_extra(auditor, side.checkpoint.tensors[key].on_disk, site))


def _beyond(auditor: Auditor, side: StoredSide, extra: Sequence[str], audit: Audit) -> set[str]:
    """Adds one finding for each layer that the model does not have; its tensors' names."""
    layers: dict[int, list[str]] = {}
    for key in extra:
        number = re.match(r"decoder\.layers\.(\d+)\.", key)
        if number and int(number[1]) >= auditor.dims.layers:
            layers.setdefault(int(number[1]), []).append(key)
    for layer, keys in sorted(layers.items()):
        near = difflib.get_close_matches(keys[0], auditor.row_of, n=1)
        site = replace(auditor.row_of[near[0]][0].site if near else Site("input_norm"), layer=auditor.dims.layers - 1, part=None)
        found = _extra(auditor, f"decoder.layers.{layer}.*", site)
        detail = {"name": f"decoder.layers.{layer}.*", "tensors": len(keys), "layers": auditor.dims.layers}
        relation = Relation("extra", detail, rule="a layer beyond the last")
        on_disk = tuple(side.checkpoint.tensors[key].on_disk for key in keys)
        audit.findings.append(replace(found, site=replace(site, layer=layer), relation=relation, tensors=((), on_disk)))
    return {key for keys in layers.values() for key in keys}


def _tied(auditor: Auditor, key: str, tensor: Stored, audit: Audit) -> bool:
    """Whether it is the output layer of a model that ties it, and the embedding once more: a note says so."""
    made = next((made.name for rule, made in auditor.rows if rule.site.module == "embedding"), "")
    embedding = auditor.candidate.tensor(made)
    if not key.startswith(HEADS) or embedding is None or not same_tensor(Cast(embedding, tensor.dtype), tensor):
        return False
    audit.notes.append(f"{tensor.on_disk} is the embedding once more: the reference ties the two")
    return True


def _names_only(auditor: Auditor, name: str, disk: str) -> Finding:
    rule, made = auditor.row_of[name]
    words = zip(name.split("."), disk.split("."), strict=False)
    word = next((found for wanted, found in words if wanted != found and not found.isdigit()), disk)
    proof = Proof(f"read it as {name}: every byte is equal", None, 0.0, "no other tensor of the candidate equals it")
    found = auditor.finding(rule.site, made, Relation("names-only", {"name": word, "as": name}, rule=word), proof)
    return _named(found, (disk,))


def _missing(auditor: Auditor, name: str, extra: Sequence[str]) -> Finding:
    rule, made = auditor.row_of[name]
    setting = auditor.off.get(rule.site.module)
    if setting is not None:
        detail = {"flag": setting.flag, "switched": "off"}
        said = f"the candidate's args say {setting.arg} is off, so no such tensor is made"
        proof = Proof(said, None, None, "tensors of the other modules are all there")
        return auditor.finding(rule.site, made, Relation("missing", detail), proof, cls="model-definition")
    near = difflib.get_close_matches(name, extra, n=1)
    proof = Proof("look for it by name and by bytes among the candidate's tensors", None, None, "every tensor that is there was found")
    relation = Relation("missing", {"nearest": near[0]} if near else {}, rule=without_layer(near[0]) if near else "")
    return auditor.finding(rule.site, made, relation, proof)


def _extra(auditor: Auditor, disk: str, site: Site) -> Finding:
    proof = Proof("look for a row of the table that makes it", None, None, "every other tensor has one")
    found = auditor.finding(site, Made("", Cut("")), Relation("extra", {"name": disk}, rule=without_layer(disk)), proof)
    return _named(found, (disk,), reference=())


def _named(found: Finding, candidate: tuple[str, ...], reference: tuple[str, ...] | None = None) -> Finding:
    return replace(found, tensors=(found.tensors[0] if reference is None else reference, candidate), made="")


def _export(auditor: Auditor, side: TableSide, missing: Sequence[str], audit: Audit) -> None:
    """What an exported directory lacks, and what it holds besides."""
    for name in missing:
        audit.findings.append(_missing(auditor, name, ()))
    read = {name for rule in side.rules for name in rule.references}
    left = [name for name in side.directory.names if name not in read]
    fused = {name: found for name, found in _other_style(auditor, side, read).items() if name in left}
    again = [name for name, found in fused.items() if not _stale(auditor, side, name, *found, audit)]
    if again:
        more = f" and {len(again) - 1} more hold" if len(again) > 1 else " holds"
        audit.notes.append(f"{side.directory.on_disk(again[0])}{more} again, with the same values, what is there one by one")
    spared: dict[str, int] = {}
    for name in left:
        if name in fused:
            continue
        why = auditor.family.left_out(name, auditor.dims)
        if why is None:
            near = difflib.get_close_matches(name, read, n=1)
            site = next((rule.site for rule in side.rules if near and near[0] in rule.references), Site("embedding"))
            site = Site("lm_head") if name.startswith(HEADS) else site
            audit.findings.append(_extra(auditor, side.directory.on_disk(name), site))
        else:
            spared[why] = spared.get(why, 0) + 1
    audit.skipped += [(f"{count} tensors of the {side.word}", why) for why, count in spared.items()]


def _other_style(auditor: Auditor, side: TableSide, read: Iterable[str]) -> dict[str, tuple[Rule, Made, Expected]]:
    """Tensors that would be read if those that were read were not there: experts kept fused and one by one."""
    names = [name for name in side.directory.names if name not in set(read)]
    layout = "slime" if any(".linear_attn." in name for name, _ in auditor.row_of.items()) else "native"
    found: dict[str, tuple[Rule, Made, Expected]] = {}
    for rule in auditor.family.rules(auditor.dims, layout, names, mtp=bool(auditor.family.mtp_tensors(names, auditor.dims))):  # type: ignore[arg-type]
        if set(rule.references) <= set(names):
            for index, made in enumerate(rule.candidates):
                if made.name in auditor.row_of:
                    tensor = Expected(rule, index, tuple(side.directory.tensor(one) for one in rule.references))
                    found |= dict.fromkeys(rule.references, (rule, made, tensor))
    return found


def _stale(auditor: Auditor, side: TableSide, name: str, rule: Rule, made: Made, tensor: Expected, audit: Audit) -> bool:
    """A second source of a tensor that was read from elsewhere: the same (False), the base model's, or something else."""
    chosen, base = side.tensor(made.name), auditor.expected(made.name)
    assert chosen is not None
    disk = side.directory.on_disk(name)
    if same_tensor(Cast(tensor, chosen.dtype), chosen):
        return False
    origin = auditor.origin.tensor(made.name) if auditor.origin is not None else base
    stale = origin is not None and same_tensor(Cast(tensor, origin.dtype), origin)
    source = "it is the reference's" if stale else "it is neither the reference's nor what is there one by one"
    proof = Proof(
        f"compare {disk} with what is there one by one: they disagree; {source}, every byte" if stale else f"compare {disk}: {source}",
        None, 0.0 if stale else None, "a loader takes one of the two, and the other is dropped in silence",
    )  # fmt: skip
    relation = Relation("stale" if stale else "extra", {"of": "reference"} if stale else {"name": disk}, rule="two sources")
    audit.findings.append(_named(auditor.finding(rule.site, made, relation, proof), (disk,)))
    return True


def _unread(auditor: Auditor, directory: HuggingFaceDirectory, audit: Audit) -> None:
    """Reference tensors that no row reads: left out for a reason, or not compared."""
    read = {name for rule in auditor.rules for name in rule.references}
    mtp = set(auditor.family.mtp_tensors(directory.names, auditor.dims))
    left: dict[str, int] = {}
    for name in directory.names:
        if name in read:
            continue
        why = auditor.family.left_out(name, auditor.dims)
        if why is None:
            near = difflib.get_close_matches(name, read, n=2)
            audit.missing.append(f"{directory.on_disk(name)}: no row of the table reads it (nearest: {', '.join(near) or 'none'})")
        elif name not in mtp or not any(what == "mtp.*" for what, _ in audit.skipped):
            left[why] = left.get(why, 0) + 1
    audit.skipped += [(f"{count} reference tensors", why) for why, count in left.items()]
    if directory.quantised:
        audit.notes.append(
            f"{len(directory.quantised)} matrices of {directory.path.name} are FP8: compared as bfloat16 times their block scales"
        )
    if directory.strays:
        audit.notes.append(
            f"{directory.path.name} holds files that its index does not name, which nothing reads: {', '.join(directory.strays[:3])}"
        )
