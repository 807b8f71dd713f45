"""An exported Hugging Face directory as vLLM and SGLang would read it: which class, which names, which files beside the weights.

Each note says the setting that makes it load, and whether text is affected.  What makes an engine read another model is a finding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.errors import UsageError
from bisect_hooks.family import Dimensions, Family, family_of
from bisect_hooks.parallel import Parallel
from bisect_hooks.site import Site
from bisect_hooks.table import Rule
from safetensors import SafetensorError, safe_open

from bisect_tool.config_check import Mismatch, config_relation
from bisect_tool.faults import Finding, Proof, Relation, span
from bisect_tool.hf_directory import PREFIXES, canonical, inside, read_config
from bisect_tool.model_args import narrowed
from bisect_tool.shards import Shard, shard_of

BETWEEN = ("reference", "export")
INDEX = "model.safetensors.index.json"
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
SAMPLED_ROWS = 64


@dataclass
class Served:
    """What an engine makes of a directory."""

    findings: list[Finding] = field(default_factory=list)
    minor: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cleared: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Names:
    """Tensor names on disk with the file that holds each; `absent` are names whose file is not there, or does not hold them."""

    files: Mapping[str, Path]
    absent: Mapping[str, str]


def read_export(path: Path, family: Family, reference: Mapping[str, Any], beside: Path | None = None) -> Served:
    """Reads config.json, the index and the headers of an export; of tensors at most a few rows.

    beside  the reference's directory, where it holds more than config.json: what should have been copied
    """
    config = read_config(path)
    if family_of(config).name != family.name:
        raise UsageError(
            f"{path} has model_type {config.get('model_type')!r}, the reference is {family.name}", hint="is it the export of another model?"
        )
    names, found = read_names(path), Served()
    dims = family.reference_dimensions(config)
    _settings(family, reference, config, found)
    rules = family.rules(dims, "slime", [canonical(name) for name in (*names.files, *names.absent)], mtp=False)
    _absent(names, rules, family, dims, found)
    _twice(names, dims, found)
    _class(config, names, rules, dims, found)
    _vision(config, names, found)
    _mtp(family, config, names, dims, found)
    _tied(config, path, names, dims, found)
    _files(path, beside, found)
    return found


def read_names(path: Path) -> Names:
    """Names by the index, or by the files there are.  Raises UsageError for an index or a file that is damaged."""
    index = path / INDEX
    listed: dict[str, str] = {}
    if index.is_file():
        try:
            listed = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{index} is damaged: {type(error).__name__}", hint="write it again from the files it should list") from error
    held: dict[str, Path] = {}
    here = sorted({path / inside(path, file, "the index") for file in listed.values()} if listed else path.glob("*.safetensors"))
    if not here:
        raise UsageError(f"{path} has no *.safetensors files", hint="give the exported directory itself")
    for file in here:
        if not file.is_file():
            continue
        try:
            with safe_open(file, framework="pt") as opened:
                held |= dict.fromkeys(opened.keys(), file)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file} can't be read: {error}", hint="is the copy complete?") from error
    absent = {name: file for name, file in listed.items() if name not in held}
    return Names(held, absent)


def _shard(site: Site, dims: Dimensions) -> Shard:
    return shard_of(site, Parallel(), "unknown", dims.layers)


def _settings(family: Family, reference: Mapping[str, Any], config: Mapping[str, Any], found: Served) -> None:
    """The export's config.json against the reference's: the same settings that a launch is judged by."""
    dims = family.reference_dimensions(reference)
    exported = {setting.arg: setting.expected for setting in family.settings(config, "native")}
    compared = 0
    for setting in family.settings(reference, "native"):
        compared += 1
        value = exported.get(setting.arg)
        if value == setting.expected or setting.same(value, setting.expected):
            continue
        one = Mismatch(narrowed(setting, value, dims), value, True)
        text = f"Model-definition fault: the export's config.json makes {setting.flag} {value}, the reference's {setting.expected}; {setting.effect}."
        proof = Proof("write the export's config.json as the reference has it", None, None, "every other setting compared is equal")
        for site in one.setting.sites:
            found.findings.append(
                Finding("model-definition", site, _shard(site, dims), relation=config_relation(one), proof=proof, explanation=text, between=BETWEEN,
                        next="Copy the reference's config.json into the export, and drop only what the export really left out.")
            )  # fmt: skip
    found.notes.append(f"export: {compared} settings of its config.json compared with the reference's")


def _absent(names: Names, rules: Sequence[Rule], family: Family, dims: Dimensions, found: Served) -> None:
    """Tensors that an engine looks for and does not get."""
    there = {canonical(name) for name in names.files}
    files = {canonical(name): file for name, file in names.absent.items()}
    for rule in rules:
        lacking = [name for name in rule.references if name not in there]
        if not lacking:
            continue
        listed = sorted({files[name] for name in lacking if name in files})
        why = f"the index lists {', '.join(listed)}, which is not there" if listed else "no file holds it"
        said = f"Conversion fault: {lacking[0]}{f' and {len(lacking) - 1} more are' if len(lacking) > 1 else ' is'} missing in the export ({why})"
        do = f"Copy {', '.join(listed)}" if listed else "Export again with this tensor"
        found.findings.append(
            Finding(
                "conversion", rule.site, _shard(rule.site, dims), (tuple(lacking), ()), relation=Relation("missing", {"file": listed[0]} if listed else {}),
                proof=Proof("names of the index against names in the files", None, None, f"{len(there)} tensors are where the index says"),
                explanation=f"{said}; engines refuse it, or leave the module uninitialised: text is affected.",
                next=f"{do}: no setting of an engine makes up for it.", between=BETWEEN,
            )
        )  # fmt: skip
    others = [name for name in names.absent if family.left_out(canonical(name), dims)]
    if others:
        found.notes.append(
            f"export: the index lists {len(others)} tensors that no file holds, such as {others[0]}: drop them from {INDEX}, or copy their files"
        )


def _twice(names: Names, dims: Dimensions, found: Served) -> None:
    """Experts both fused and one by one: which of the two an engine takes is its own affair (slime#1904)."""
    there = {canonical(name) for name in names.files}
    twice = [
        n
        for n in range(dims.layers)
        if f"model.layers.{n}.mlp.experts.gate_up_proj" in there and f"model.layers.{n}.mlp.experts.0.gate_proj.weight" in there
    ]
    for n in twice:
        site = Site("experts", n, "fc1")
        fused, single = f"model.layers.{n}.mlp.experts.gate_up_proj", f"model.layers.{n}.mlp.experts.0.gate_proj.weight"
        found.findings.append(
            Finding(
                "conversion", site, _shard(site, dims), ((fused,), (single,)), relation=Relation("extra", {"name": "experts.gate_up_proj"}),
                proof=Proof("names alone: both forms are there", None, None, "the other modules are there once"),
                explanation=f"Conversion fault in layer{'s' * (len(twice) > 1)} {span(twice)}: the experts are in the export twice, fused and one by one; an engine takes either, "
                "and the fused ones are usually the base model's (slime#1904).",
                next="Export again without adding the origin's fused tensors.", between=BETWEEN,
            )
        )  # fmt: skip


def _class(config: Mapping[str, Any], names: Names, rules: Sequence[Rule], dims: Dimensions, found: Served) -> None:
    """The class that `architectures` names, against the prefix of the names."""
    wanted = config.get("architectures") or []
    if not wanted:
        found.notes.append('export: config.json names no "architectures": engines choose the class by it; copy the line from the reference')
        return
    name = str(wanted[0])
    nested = any(one.startswith(PREFIXES) for one in names.files)
    whole = name.endswith("ForConditionalGeneration")
    if whole != ("text_config" in config) and (whole or nested):
        found.notes.append(
            f"export: architectures says {name}, and config.json is {'flat' if whole else 'nested (text_config)'}: "
            f"engines read {'text_config under that class' if whole else 'a flat config under that class'}; copy the reference's config.json"
        )
    if whole == nested:
        if not whole and name.startswith("Qwen3_5"):
            found.notes.append(
                f"export: {name} is registered by neither vLLM nor SGLang for serving (vllm#36289): they know Qwen3.5 as "
                "ForConditionalGeneration with model.language_model.* names; export with those, and serve with --language-model-only"
            )
        return
    has, needs = ("model.language_model.", "model.") if nested else ("model.", "model.language_model.")
    on_disk = {canonical(one): one for one in names.files}
    do = "Write the names as that class has them" + (
        f", or set architectures to {name.replace('ForCausalLM', 'ForConditionalGeneration')}." if nested else "."
    )
    for rule in rules:
        held = tuple(on_disk[one] for one in rule.references if one in on_disk and on_disk[one].startswith("model."))
        if held:
            found.findings.append(
                Finding(
                    "conversion", rule.site, _shard(rule.site, dims), (tuple(one for one in rule.references if one in on_disk), held),
                    relation=Relation("names-only", {"name": f"{has}*"}), proof=Proof("compare the prefix with the class", None, None, "values are not looked at"),
                    explanation=f"Conversion fault: architectures says {name}, whose tensors are {needs}*, and the export's are {has}*; "
                    "engines find none of them, and refuse the directory or serve what they initialised: text is affected.",
                    next=do, between=BETWEEN,
                )
            )  # fmt: skip


def _vision(config: Mapping[str, Any], names: Names, found: Served) -> None:
    if not str((config.get("architectures") or [""])[0]).endswith("ForConditionalGeneration"):
        return
    if any(canonical(name).startswith(("model.visual.", "visual.")) for name in names.files):
        return
    found.skipped.append(("vision", "the export has no visual.* tensors: text is not affected"))
    found.cleared.append(("vision weights stripped from the export", "no text token reaches them"))
    found.notes.append(
        "export: the class is ForConditionalGeneration and no visual.* is there: vLLM loads it with --language-model-only; SGLang builds the tower "
        "anyway and wants preprocessor_config.json (copy it, sglang#27212). Text is not affected, images are"
    )


def _mtp(family: Family, config: Mapping[str, Any], names: Names, dims: Dimensions, found: Served) -> None:
    if not dims.mtp or family.mtp_tensors(map(canonical, names.files), dims):
        return
    site, key = Site("mtp"), family.mtp_key(config)
    promised = f"the export's config.json promises {dims.mtp} MTP layer ({key})" if key else "checkpoints of this family have an MTP layer"
    found.minor.append(
        Finding(
            "conversion", site, _shard(site, dims), (("mtp.*",), ()), relation=Relation("missing", {"key": key} if key else {}), between=BETWEEN, minor=True,
            explanation=f"Multi-token prediction: {promised}, and none of its tensors is there; text is not affected, "
            "speculative decoding with these drafts is.",
            next=f"{f'Set {key} to 0, serve' if key else 'Serve'} without --speculative-..., or export its tensors too.",
        )
    )  # fmt: skip


def _tied(config: Mapping[str, Any], path: Path, names: Names, dims: Dimensions, found: Served) -> None:
    """`tie_word_embeddings` says that the head is the embedding; a head on disk is then not read."""
    inner = config.get("text_config", {})
    if "tie_word_embeddings" in inner and "tie_word_embeddings" in config and inner["tie_word_embeddings"] != config["tie_word_embeddings"]:
        found.notes.append(
            f"export: tie_word_embeddings is {config['tie_word_embeddings']} at the top of config.json and {inner['tie_word_embeddings']} in text_config: "
            "engines read one or the other (slime#1730); make them equal. Text is affected where the wrong one is read"
        )
    head = next((name for name in names.files if canonical(name) == "lm_head.weight"), None)
    embedding = next((name for name in names.files if canonical(name) == "model.embed_tokens.weight"), None)
    said = any(one.relation and one.relation.detail.get("flag") == "--untie-embeddings-and-output-weights" for one in found.findings)
    if not dims.tied or head is None or embedding is None or said:
        return
    if torch.equal(_rows(names.files[head], head), _rows(names.files[embedding], embedding)):
        found.notes.append(
            "export: tied, and lm_head.weight is there too, equal to the embedding in the rows looked at: engines skip it, text is not affected"
        )
        return
    site = Site("lm_head")
    found.findings.append(
        Finding(
            "conversion", site, _shard(site, dims), ((embedding,), (head,)), relation=Relation("config", {"flag": "tie_word_embeddings", "value": True, "expected": False}),
            proof=Proof(f"compare {SAMPLED_ROWS} rows of both", None, None, "the embedding itself is read either way"),
            explanation="Conversion fault: config.json ties the head to the embedding, and lm_head.weight in the export is another tensor, which engines skip: text is affected.",
            next="Set tie_word_embeddings to false (in text_config too), or drop lm_head.weight if the model is tied.", between=BETWEEN,
        )
    )  # fmt: skip


def _rows(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_slice(name)[:SAMPLED_ROWS]  # type: ignore[no-any-return]


def _files(path: Path, beside: Path | None, found: Served) -> None:
    """Tokenizer, generation_config and chat template: copied or not."""

    def lacks(name: str) -> bool:
        return not (path / name).is_file()

    if not any(all((path / name).is_file() for name in one) for one in TOKENIZERS) or lacks("tokenizer_config.json"):
        found.notes.append(
            "export: the tokenizer is not copied (tokenizer.json, tokenizer_config.json): vLLM takes --tokenizer REFERENCE, SGLang --tokenizer-path REFERENCE; "
            "without it no text goes in or out"
        )
    elif not _template(path) and (beside is None or _template(beside)):
        found.notes.append(
            "export: no chat template (chat_template.jinja, or in tokenizer_config.json): give --chat-template FILE; chat is affected, plain completions are not"
        )
    had = beside is not None and (beside / "generation_config.json").is_file()
    if lacks("generation_config.json"):
        found.notes.append(
            f"export: generation_config.json is not copied{'' if had else ' (nor is it in the reference)'}: stop tokens and default sampling are then config.json's "
            "eos_token_id and the engine's own; vLLM takes --generation-config REFERENCE. Where answers end is affected, what they say is not"
        )
    elif had and beside is not None:
        differing = _differing(path / "generation_config.json", beside / "generation_config.json")
        if differing:
            found.notes.append(
                f"export: generation_config.json differs from the reference's in {', '.join(differing)}: stop tokens or default sampling change with it"
            )


def _template(path: Path) -> bool:
    if any((path / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool(_table(path / "tokenizer_config.json").get("chat_template"))


def _differing(one: Path, other: Path) -> Iterable[str]:
    a, b = _table(one), _table(other)
    return sorted(key for key in {*a, *b} if a.get(key) != b.get(key) and key != "transformers_version")


def _table(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}", hint="copy it again") from error
    return found if isinstance(found, dict) else {}
