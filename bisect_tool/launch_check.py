"""The config stage from a launch: every flag that changes the model against config.json, and against the checkpoint's own args.

A flag that changes the model and differs is a finding.  One that differs and changes nothing here is a note that says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout, Dimensions, Family, Setting
from bisect_hooks.site import Site

from bisect_tool.config_check import Mismatch, short
from bisect_tool.launch.launch import Launch
from bisect_tool.launch_doubts import doubts, kept_not_judged, not_judged
from bisect_tool.model_args import PATTERNS, every_setting, held, narrowed

KINDS = (
    "linear_attention_freq",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# with these, something else than the flags says what the model is
REPLACED = ("use_checkpoint_args", "yaml_cfg")
SPEC_PLUGINS = ("slime_plugins", "miles_plugins")


@dataclass
class Judged:
    """What the comparison found.  cleared: flags that people suspect and that change nothing here, with the reason

    undecided  something that the launch says of the model could not be compared (a skipped line says what)
    """

    mismatches: list[Mismatch] = field(default_factory=list)
    compared: int = 0
    notes: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    undecided: bool = False
    cleared: list[tuple[str, str]] = field(default_factory=list)


def layout_of(args: Mapping[str, Any], spec: str) -> CheckpointLayout:
    """The layout that a launch builds: slime's own linear attention where its spec is named, else megatron-core's."""
    return "slime" if any(plugin in spec for plugin in SPEC_PLUGINS) else "native"


def judge(family: Family, config: Mapping[str, Any], launch: Launch, checkpoint: Mapping[str, Any] | None = None) -> Judged:
    """Every setting of the launch, then what the checkpoint says otherwise."""
    found = Judged()
    dims = family.reference_dimensions(config)
    layout = layout_of(launch.args, launch.spec)
    by_spec = _read_by_spec(family, config, launch, found)
    for arg in REPLACED:
        if launch.args.get(arg) and checkpoint is None:
            why = f"{launch.said[arg]} gives --{arg.replace('_', '-')}: the flags that are judged are not those that count"
            found.skipped.append(("the model's flags", why))
            found.undecided = True
    for setting in every_setting(family, config, layout):
        setting = _text_only(setting, config)
        given = launch.args.get(setting.arg) is not None
        if setting.arg in by_spec and not given:
            continue
        stored = held(setting.arg, checkpoint)
        value = launch.args.get(setting.arg) if given else default(setting, launch.args)
        judged = given or launch.unsaid == "megatron"
        if (not judged and stored is None) or (setting.arg in PATTERNS and _other_depth(launch.args, value, dims)):
            continue
        found.compared += 1
        if judged and not setting.same(value, setting.expected):
            source = (
                f"{launch.said[setting.arg]}"
                if given
                else "; ".join(("the launch does not give it, so Megatron's default holds", *launch.lost))
            )
            against = "" if stored is None or stored == value else f"; the checkpoint's args say {short(stored)}"
            found.mismatches.append(Mismatch(narrowed(setting, value, dims), value, given, source + against))
        elif stored is not None and not setting.same(stored, setting.expected):
            against = f"; the launch says {short(value)}" if judged else ""
            found.mismatches.append(Mismatch(narrowed(setting, stored, dims), stored, True, f"the checkpoint's args say so{against}"))
    found.skipped += doubts(launch)
    found.undecided |= bool(doubts(launch))
    for other in launch.others:
        _held_against(family, config, launch, other, found)
    if launch.changed:
        _changed(family, config, launch, layout, found)
    if launch.unsaid == "reference":
        said = "what it does not say," if found.compared else "it says nothing of the model itself: that"
        found.notes.append(f"{said} the bridge reads from config.json")
    inert(launch, dims, found)
    found.notes += [*not_judged(launch), *kept_not_judged(checkpoint or {}, every_setting(family, config, layout))]
    if found.compared and not found.mismatches:
        found.cleared.append(
            ("norms, rotary, router, gates and sizes as they are told", f"{found.compared} settings are those of config.json")
        )
    _vocabulary(launch, dims, found)
    _mtp(launch, dims, found)
    return found


def _changed(family: Family, config: Mapping[str, Any], launch: Launch, layout: CheckpointLayout, found: Judged) -> None:
    """Values of config.json that the launch changes before a bridge reads it: the model is that of the changed config."""
    dims, other, lines = family.reference_dimensions(config), dict(config), []
    for path, (value, where) in launch.changed.items():
        held = _at(config, path)
        if held is not None and held == value:
            found.compared += 1
            found.notes.append(f"{where}: {path}={short(value)} is what config.json has")
            continue
        other = _with(other, _path(config, path), value)
        lines.append(f"{path}={short(value)} ({where})")
        try:
            family.settings(other, layout)
        except UsageError as error:
            if held is None:
                continue
            effect = f"no model can be read of the changed config.json ({error.message})"
            setting = Setting(path, path, held, tuple(Site("input_norm", n) for n in range(dims.layers)), effect)
            found.mismatches.append(Mismatch(setting, value, True, str(where)))
            return
    if not lines:
        return
    said = f"config.json is changed: {', '.join(lines)}"
    try:
        changed = {one.arg: one.expected for one in every_setting(family, other, layout)}
    except UsageError:
        changed = {}
    wrong = [one for one in every_setting(family, config, layout) if one.arg in changed and not one.same(changed[one.arg], one.expected)]
    given = {one.setting.arg for one in found.mismatches}
    for one in wrong:
        found.compared += 1
        if one.arg not in given:
            found.mismatches.append(Mismatch(narrowed(one, changed[one.arg], dims), changed[one.arg], True, said))
    if not wrong:
        found.skipped.append(("config.json's own values", f"{said}; no setting that is looked at comes of it"))
        found.undecided = True


def _held_against(family: Family, config: Mapping[str, Any], launch: Launch, other: tuple[str, str, Launch], found: Judged) -> None:
    """A launch beside this one.  What they say otherwise is no finding, but undecided: which of them is the candidate is not known."""
    there, here, beside = other
    settings = {one.arg: one for one in every_setting(family, config, layout_of(launch.args, launch.spec))}
    if not any(beside.args.get(arg) is not None for arg in settings) and not beside.changed:
        return  # it says nothing of a model
    values = [_values(family, config, one, settings) for one in (launch, beside)]
    differ = [arg for arg, one in settings.items() if not _alike(one, values[0][arg], values[1][arg])]
    named = [*(settings[arg].flag for arg in differ), *(["config.json's own values"] if _changes(launch) != _changes(beside) else [])]
    if not named:
        return
    found.mismatches = [one for one in found.mismatches if one.setting.arg not in differ]
    found.skipped.append(
        (", ".join(named), f"{there} and {here} start models that differ in {', '.join(named)}: which is meant is not known")
    )
    found.undecided = True


def _values(family: Family, config: Mapping[str, Any], launch: Launch, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The settings that a launch builds with: a bridge, and its own layer spec, say what config.json does."""
    told = settings if launch.unsaid == "reference" else _read_by_spec(family, config, launch, Judged())
    unsaid = {arg: one.expected if arg in told else default(one, launch.args) for arg, one in settings.items()}
    return unsaid | {arg: launch.args[arg] for arg in settings if launch.args.get(arg) is not None}


def _alike(setting: Setting, one: Any, other: Any) -> bool:
    return one == other or (setting.same(one, setting.expected) and setting.same(other, setting.expected))


def _changes(launch: Launch) -> dict[str, Any]:
    return {path: value for path, (value, _) in launch.changed.items()}


def _path(config: Mapping[str, Any], path: str) -> list[str]:
    """Where a value stands in config.json: in its text model's part where there is one, unless it is beside it."""
    parts = path.split(".")
    nested = isinstance(config.get("text_config"), Mapping) and (parts[0] in config["text_config"] or parts[0] not in config)
    return ["text_config", *parts] if nested else parts


def _at(config: Mapping[str, Any], path: str) -> Any:
    held: Any = config
    for part in _path(config, path):
        held = held.get(part) if isinstance(held, Mapping) else None
    return held


def _with(config: Mapping[str, Any], parts: Sequence[str], value: Any) -> dict[str, Any]:
    first, *rest = parts
    inner = config.get(first)
    return {**config, first: _with(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value}


def built_from(family: Family, config: Mapping[str, Any], launch: Launch, layout: CheckpointLayout) -> dict[str, Any]:
    """The args that a launch builds the model with: what it says, and Megatron's defaults for what it does not.

    Left out is what its own layer spec says, or a bridge reads from config.json.  config only says which args there are.
    """
    by_spec = _read_by_spec(family, config, launch, Judged())
    found = dict(launch.args)
    if launch.whole and launch.unsaid == "megatron":
        for setting in family.settings(config, layout):
            if found.get(setting.arg) is None and setting.arg not in by_spec and not setting.needed:
                found[setting.arg] = default(setting, launch.args)
    return found


def _other_depth(args: Mapping[str, Any], value: Any, dims: Dimensions) -> bool:
    """A pattern of another length, as another --num-layers wants it: the depth is the finding."""
    return isinstance(value, list) and len(value) == args.get("num_layers") != dims.layers


def default(setting: Setting, args: Mapping[str, Any]) -> Any:
    """What Megatron takes for a flag that is not given; some of its defaults are made of other flags."""
    if setting.arg == "kv_channels" and args.get("hidden_size") and args.get("num_attention_heads"):
        return args["hidden_size"] // args["num_attention_heads"]
    if setting.arg == "moe_ffn_hidden_size" and args.get("ffn_hidden_size"):
        return args["ffn_hidden_size"]
    if setting.arg == "position_embedding_type" and args.get("use_rotary_position_embeddings"):
        return "rope"
    return setting.default


def _read_by_spec(family: Family, config: Mapping[str, Any], launch: Launch, found: Judged) -> frozenset[str]:
    """Args that the launch need not give, because its layer spec says them; which spec, as a note or a skipped line."""
    dims = family.reference_dimensions(config)
    if "linear_attention" not in dims.kinds or launch.unsaid == "reference":
        return frozenset()
    if any(plugin in launch.spec for plugin in SPEC_PLUGINS):
        found.notes.append(
            f"linear attention's layers and sizes: {launch.spec.split()[0]} reads them from the Hugging Face directory itself"
        )
        return frozenset(KINDS)
    given = any(launch.args.get(arg) is not None for arg in (*KINDS, "experimental_attention_variant", "linear_attention_type"))
    if launch.spec and not given:
        found.skipped.append(("layer kinds, linear attention", f"the launch's own spec ({launch.spec}) builds the layers"))
        return frozenset(KINDS)
    if not launch.whole and not given:
        found.skipped.append(
            ("layer kinds, linear attention", "these flags name no layer spec, and are no command line: whoever uses them says it")
        )
        return frozenset(KINDS)
    return frozenset()


def _text_only(setting: Setting, config: Mapping[str, Any]) -> Setting:
    """Sectioned rotary positions (mrope) are plain ones for text: its three position ids are equal."""
    text = config.get("text_config", config)
    sectioned = bool((text.get("rope_parameters") or text.get("rope_scaling") or {}).get("mrope_section"))
    if setting.arg != "position_embedding_type" or not sectioned:
        return setting
    same = setting.same
    return replace(setting, same=lambda value, expected: value == "mrope" or same(value, expected))


def _vocabulary(launch: Launch, dims: Dimensions, found: Judged) -> None:
    args = launch.args
    if launch.unsaid == "reference":
        return
    divisor = int(args.get("make_vocab_size_divisible_by") or 128) * int(args.get("tensor_model_parallel_size") or 1)
    size = int(args.get("vocab_size") or dims.vocabulary)
    padded = -(-size // divisor) * divisor
    if args.get("vocab_size") is None:
        found.skipped.append(("--vocab-size", "not given: the framework takes it from the tokenizer or config.json"))
    elif padded != size:
        found.notes.append(
            f"vocabulary {size} is padded to {padded} rows (a multiple of {divisor}): {padded - size} rows that no token has"
        )


def _mtp(launch: Launch, dims: Dimensions, found: Judged) -> None:
    if dims.mtp and not launch.args.get("mtp_num_layers") and launch.unsaid == "megatron":
        found.skipped.append(("mtp", "left out by the launch (no --mtp-num-layers): the text is not touched"))


def inert(launch: Launch, dims: Dimensions, found: Judged) -> None:
    """What people suspect, and why it changes nothing here."""
    args, notes = launch.args, found.notes

    def note(flag: str, why: str) -> None:
        arg = flag.removeprefix("--").split()[0].replace("-", "_")
        at = f" ({launch.said[arg]})" if arg in launch.said else ""
        notes.append(f"inert here: {flag}{at}, because {why}")
        found.cleared.append((f"{flag}{at}", f"inert: {why}"))

    if args.get("use_gated_attention") and args.get("attention_output_gate"):
        note(
            "--use-gated-attention",
            "--attention-output-gate does the work, and slime 0.2.4 only declares this older name (older patches rename linear_qkv by it, slime#1575)",
        )
    elif args.get("use_gated_attention") and dims.output_gate and launch.unsaid == "megatron":
        notes.append(
            f"--use-gated-attention ({launch.said['use_gated_attention']}) is an older name of --attention-output-gate, which is not given: slime 0.2.4 only declares it"
        )
    if args.get("moe_token_drop_policy") and args.get("moe_expert_capacity_factor") is None:
        note(f"--moe-token-drop-policy {args['moe_token_drop_policy']}", "no --moe-expert-capacity-factor is given: nothing is dropped")
    if args.get("ffn_hidden_size") is not None and any(dims.moe) and all(dims.moe):
        note(
            f"--ffn-hidden-size {args['ffn_hidden_size']}",
            "no layer is dense" if args.get("moe_ffn_hidden_size") else "no layer is dense; experts take it as their width",
        )
    dispatcher = args.get("moe_token_dispatcher_type")
    if dispatcher and any(dims.moe):
        note(f"--moe-token-dispatcher-type {dispatcher}", "dispatchers carry tokens to experts, and each computes the same sum")
    if args.get("moe_shared_expert_overlap"):
        note("--moe-shared-expert-overlap", "the shared expert is computed at another time, not otherwise")
    if args.get("make_vocab_size_divisible_by"):
        note("--make-vocab-size-divisible-by", "it adds rows that no token has")
    if args.get("fp16") and launch.unsaid == "megatron":
        note("--fp16", "the function is the same; values beyond 65504 overflow, and rounding is not the reference's bfloat16")
    trains = launch.whole and "train" in launch.program and launch.unsaid == "megatron"
    for arg in ("attention_dropout", "hidden_dropout"):
        if args.get(arg) or (trains and arg not in args):
            value = args.get(arg, "0.1 (Megatron's default)")
            note(f"--{arg.replace('_', '-')} {value}", "it acts in training steps only; log-probs taken in training mode are then noisy")
