"""Any launch → a Launch: which kind of file it is, and which of its command lines starts the model."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from bisect_hooks.errors import UsageError, first_line

from bisect_tool.launch import hydra
from bisect_tool.launch.flags import CommandLine, says_flags, shapes
from bisect_tool.launch.launch import Launch
from bisect_tool.launch.names import megatron_args
from bisect_tool.launch.python_lists import Script
from bisect_tool.launch.shell import Shell
from bisect_tool.launch.shell_syntax import Reader
from bisect_tool.launch.shell_words import expand
from bisect_tool.launch.words import HINT, Where, Word, read_text, refuse

PROGRAM = re.compile(r"\.py$")


def read_launch(path: Path, given: Mapping[str, str] | None = None) -> Launch:
    """Reads a launch script without executing anything.

    given  what the environment would say: variables of a script
    Raises UsageError: naming the line of what is not understood, or that there are no Megatron flags at all.
    """
    try:
        return _read(path, given or {})
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply to be read", hint=HINT) from None


def _reads(path: Path, texts: Sequence[str], given: Mapping[str, str]) -> None:
    """Raises UsageError for a name that is said, and that no text does anything with but set it."""
    for name in given:
        if not any(re.search(rf"\$\{{?[#!]?{re.escape(name)}\b|(?<!\w){re.escape(name)}\b(?!\s*\+?=(?!=))", text) for text in texts):
            names = {one for text in texts for one in re.findall(r"[A-Za-z_]\w*", text)}
            near = ", ".join(difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.75))
            raise UsageError(f"--set {name}: nothing in {path.name} reads {name}", hint=f"it has {near}" if near else "")


def _read(path: Path, given: Mapping[str, str]) -> Launch:
    text = read_text(path)
    if path.suffix in (".yaml", ".yml", ".json", ".py"):
        _reads(path, [text], given)
    if path.suffix in (".yaml", ".yml"):
        return _run_config(path, text)
    if path.suffix == ".json":
        return _json(path, text)
    if path.suffix == ".py":
        return _python(path, text, given)
    first = next((line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")), "")
    if re.match(r"[\"']?--?[A-Za-z]", first) or hydra.is_override(first.split()[0] if first.split() else ""):
        _reads(path, [text], given)
        return _flag_file(path, text, given)
    return _bash(path, given)


def _bash(path: Path, given: Mapping[str, str]) -> Launch:
    shell = Shell(path, given=given)
    shell.run()
    _reads(path, shell.texts, given)
    lines = [one for one in shell.commands if shapes(one.words) or hydra.shapes(one.words)]
    lost = [f"{where}: {why}" for where, why in dict.fromkeys(shell.lost)]
    notes = [*shell.notes, *lost, *(f"{line}, which is not there: what it would set is not known" for line in shell.missing)]
    if lines:
        launch = _one_of(path, "bash script", [([*_after_ray(one.words), *_piped(one.words)], one.where) for one in lines])
        return replace(launch, notes=[*notes, *launch.notes], lost=[why for _, why in dict.fromkeys(shell.lost)])
    if shell.lost:
        raise refuse(*shell.lost[0])
    for text in shell.documents:
        if says_flags(text.text):
            raise refuse(text.where, "this here-document has flags, and what is done with it is not followed")
    for one in reversed(shell.commands):
        apart = next((word for word in one.words if word.unset and isinstance(shell.variables.get(word.text.strip("${}[@*]")), list)), None)
        if apart is not None:
            raise refuse(one.where, f"{apart.text} is a list, and no list is given to a shell that is started")
        hidden = next((word for word in one.words if word.unknown and not word.unset and word.text.startswith("${")), None)
        if hidden is not None and any(PROGRAM.search(word.text) or word.text == "-m" for word in one.words):
            raise refuse(one.where, f"{hidden.text} may hold the flags, and its value is not known: {hidden.unknown}")
    for name, held in shell.variables.items():
        if isinstance(held, Word) and held.unknown and held.text == f"${{{name}[@]}}":
            raise refuse(held.where, f"the list {name} is not known: {held.unknown}")
    listed = {name: value for name, value in shell.variables.items() if isinstance(value, list) and (shapes(value) or hydra.shapes(value))}
    if not listed:
        missing = f"; {shell.missing[0]}, which is not there" if shell.missing else ""
        raise UsageError(f"{path}: no command line and no list in it has a Megatron flag{missing}", hint=HINT)
    launch = _launched(path, "bash lists", _together(listed), whole=False)
    notes.append(f"no command line: the flags are those of {', '.join(listed)}")
    return replace(launch, notes=[*notes, *launch.notes])


def _piped(words: Sequence[Word]) -> list[Word]:
    """`xargs command`: the words that it reads are given to the command too."""
    found = next((word for word in words if word.text.rpartition("/")[2] == "xargs"), None)
    return [] if found is None else [Word("${...[@]}", found.where, "xargs reads it from the outside")]


def _after_ray(words: Sequence[Word]) -> Sequence[Word]:
    """`ray job submit -- command`: ray joins the command with spaces and gives it to a shell again, so quotes inside are taken
    off, and file patterns are open once more."""
    texts = [word.text for word in words]
    if texts[:3] != ["ray", "job", "submit"] or "--" not in texts:
        return words
    made = []
    for word in words[texts.index("--") + 1 :]:
        found = re.fullmatch(r"'([^']*)'|\"([^\"$`]*)\"", word.text)
        spaced = " " in word.text
        text = word.text if spaced or not found else (found[1] if found[1] is not None else found[2])
        made.append(replace(word, text=text, bare=word.bare or (not spaced and not found and bool(re.search(r"[*?\[]", text)))))
    return made


def _one_of(path: Path, kind: str, commands: Sequence[tuple[Sequence[Word], Where]]) -> Launch:
    """The last of several command lines; the others are held against it."""
    made = [_launched(path, kind, words, whole=not words[0].text.startswith("-")) for words, _ in commands]
    launch, at = made[-1], commands[-1][1]
    if len(made) == 1:
        return launch
    others = [(str(where), str(at), one) for one, (_, where) in zip(made[:-1], commands, strict=False)]
    said = f"{len(made)} commands carry Megatron flags ({', '.join(one for one, _, _ in others)} and {at}); the last one is read"
    return replace(launch, notes=[said, *launch.notes], others=[*launch.others, *others])


def _launched(path: Path, kind: str, words: Sequence[Word], whole: bool = True) -> Launch:
    """One command line."""
    at = next((i for i, word in enumerate(words) if PROGRAM.search(word.text)), None)
    module = next((i + 1 for i, word in enumerate(words[:-1]) if word.text == "-m"), None)
    start = at if at is not None else module
    program = words[start].text if start is not None else words[0].text if words and not words[0].text.startswith("-") else ""
    rest = words[start + 1 :] if start is not None else words
    if hydra.shapes(rest) and not shapes(rest):
        told = hydra.read_overrides(rest)
        kind = f"{kind}, Hydra overrides"
        role = Launch(path, kind, told.args | told.reference, told.said, unsaid="reference", changed=told.changed)
        return Launch(
            path, kind, told.args, told.said, told.unknown, told.notes, whole=whole, unsaid="reference", program=program, changed=told.changed,
            doubts=told.doubts, others=[("its actor", "its ref", role)] if told.reference else [],
        )  # fmt: skip
    line = CommandLine().read(rest)
    bridged = line.args.get("megatron_to_hf_mode") == "bridge"
    return Launch(
        path,
        kind,
        line.args,
        line.said,
        line.unknown,
        line.notes,
        whole and bool(program),
        "reference" if bridged else "megatron",
        program,
        doubts=[*line.doubts, *_code(words)],
    )


def _code(words: Sequence[Word]) -> list[tuple[str, str]]:
    """Flags that are given to code, and not to a program: what it makes of them is not followed."""
    for at, word in enumerate(words):
        shell = re.fullmatch(r"(?:.*/)?(?:python[\d.]*|(bash|sh|zsh))", word.text)
        options = list(itertools.takewhile(lambda one: one.text.startswith("-") and not one.text.startswith("--"), words[at + 1 :]))
        for option in options if shell else ():
            if option.text in (("-s",) if shell and shell[1] else ("-", "-c")):
                return [("the model's flags", f"{word.where}: {word.text} {option.text} is code that may change them")]
    return []


def _flag_file(path: Path, text: str, given: Mapping[str, str]) -> Launch:
    """Flags or overrides, one or more a line: what a shell would have left of its words."""
    shell = Shell(path, given=given)
    shell.files.append(path)
    body = Reader(f"A=({text}\n)", path).script()
    words = [
        replace(word, bare=False)
        for node in body
        for assign in getattr(node, "assigns", ())
        for raw in assign.value
        for word in expand(raw, shell)
    ]
    if not shapes(words) and not hydra.shapes(words):
        raise UsageError(f"{path}: none of its {len(words)} words is a Megatron flag that we know", hint=HINT)
    return _launched(path, "list of flags", words, whole=False)


def _python(path: Path, text: str, given: Mapping[str, str]) -> Launch:
    script = Script(path, given)
    script.run(text)
    commands = list({(one.where, tuple(one.words)): one for one in script.commands}.values())
    with_flags = [one for one in commands if one.words]
    started = [one for one in with_flags if one.starts] or (with_flags if len(with_flags) == 1 else [])
    if started:
        command = started[-1]
        launch = _one_of(
            path, "Python lists", [([*_model(path, one.model, one.where), *_after_ray(one.words)], one.where) for one in started]
        )
        return replace(launch, notes=[f"the flags are those of the call in {command.where}", *launch.notes])
    listed = {name: words for name, words in dict(script.lists).items() if words}
    if not listed:
        raise UsageError(f"{path}: no list in it has a Megatron flag", hint=HINT)
    name, best = max(reversed(listed.items()), key=lambda one: shapes(one[1]))
    held = set(best)
    apart = {other: words for other, words in listed.items() if other != name and not held.issuperset(words)}
    for one in (name, *apart):
        if (behind := script.behind.get(one)) is not None and behind.at is not None:
            raise refuse(behind.at, behind.lost)
    if (unread := next((one for one in commands if not one.words), None)) is not None:
        raise refuse(unread.where, "the command that is run here is not known, and whether it has these lists is not either")
    launch = _launched(path, "Python lists", _together({name: best} | apart), whole=not apart and not best[0].text.startswith("-"))
    notes = [f"the flags are those of {', '.join([name, *apart])}"]
    return replace(launch, notes=[*notes, *launch.notes])


def _model(path: Path, named: Any, where: Where) -> Sequence[Word]:
    """The flags of scripts/models/NAME.sh, which slime's and miles' launchers put in front of those that they are given."""
    if named is None:
        return []
    file = Path("scripts/models") / f"{named}.sh"
    found = next((root / file for root in [*path.absolute().parents][:4] if (root / file).is_file()), None)
    if found is None:
        raise refuse(where, f"the model's flags are those of {file}, which is not there")
    shell = Shell(found)
    shell.run()
    flags = shell.variables.get("MODEL_ARGS")
    if not isinstance(flags, list):
        raise refuse(where, f"{file} has no list MODEL_ARGS")
    return [Word("train.py", where), *flags]


def _together(lists: Mapping[str, Sequence[Word]]) -> list[Word]:
    """Lists that no command joins.  Raises UsageError where two give a flag otherwise: which comes last is not known."""
    said: dict[str, tuple[str, Any]] = {}
    for name, words in lists.items():
        line = CommandLine().read(words)
        for arg, value in line.args.items():
            before, other = said.setdefault(arg, (name, value))
            if before != name and other != value:
                raise refuse(
                    line.said[arg], f"{name} has {arg} {value}, {before} has {other}, and nothing here says which is used, or comes last"
                )
    return [word for words in lists.values() for word in words]


def _json(path: Path, text: str) -> Launch:
    """A list of words, or a transformer_config.json."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {first_line(error)}") from None
    if isinstance(found, list) and all(isinstance(one, str) for one in found):
        return _launched(path, "list of flags", [Word(one, Where(path, 1)) for one in found], whole=False)
    if isinstance(found, dict) and "num_layers" in found:
        return _configured(path, "transformer_config.json", found, {})
    raise UsageError(f"{path} is neither a list of flags nor a transformer_config.json", hint=HINT)


def _run_config(path: Path, text: str) -> Launch:
    """Megatron-Bridge's run_config.yaml: its `model`, the whole provider."""
    try:
        tree, found = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path} is not YAML that can be read safely: {first_line(error)}", hint=HINT) from None
    model = found.get("model") if isinstance(found, dict) else None
    if not isinstance(model, dict) or not isinstance(tree, yaml.MappingNode):
        raise UsageError(f"{path} has no `model:` section", hint="give the run_config.yaml that Megatron-Bridge writes beside a checkpoint")
    lines: dict[str, int] = {}
    for key, value in tree.value:
        if key.value == "model" and isinstance(value, yaml.MappingNode):
            lines = {str(one.value): one.start_mark.line + 1 for one, _ in value.value}
    return _configured(path, "run_config.yaml", model, lines)


def _configured(path: Path, kind: str, config: Mapping[str, Any], lines: Mapping[str, int]) -> Launch:
    named = {str(name): value for name, value in config.items()}
    args, said = megatron_args(named, {name: Where(path, lines.get(name, 1), name) for name in named})
    given = {arg: value for arg, value in args.items() if value is not None}
    return Launch(path, kind, given, said, unsaid="reference", program=str(config.get("_target_") or ""))
