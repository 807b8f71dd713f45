"""The config stage from a launch: every flag that changes the model against config.json, and against the checkpoint's own args.

A flag that changes the model and differs is a finding.  One that differs and changes nothing here is a note that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bisect_hooks.blocks.args import Args
from bisect_hooks.errors import UsageError
from bisect_hooks.family import CheckpointLayout, Dimensions, Family, Setting
from bisect_hooks.site import Site

from bisect_tool.config_check import Mismatch, short
from bisect_tool.launch.flags import FLAGS, nearest
from bisect_tool.launch.launch import Launch

KINDS = (
    "linear_attention_freq",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
SPEC_PLUGINS = ("slime_plugins", "miles_plugins")
PATTERNS: dict[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda i, n: i % n == 0,
    "linear_attention_freq": lambda i, n: (i + 1) % n != 0,
}


@dataclass
class Judged:
    """What the comparison found.  cleared: flags that people suspect and that change nothing here, with the reason"""

    mismatches: list[Mismatch] = field(default_factory=list)
    compared: int = 0
    notes: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
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
    for setting in (*family.settings(config, layout), *more_settings(config, dims)):
        setting = _text_only(setting, config)
        given = launch.args.get(setting.arg) is not None
        if setting.arg in by_spec and not given:
            continue
        held = None if checkpoint is None else checkpoint.get(setting.arg)
        value = launch.args.get(setting.arg) if given else default(setting, launch.args)
        judged = given or launch.unsaid == "megatron"
        if (not judged and held is None) or (setting.arg in PATTERNS and _other_depth(launch.args, value, dims)):
            continue
        found.compared += 1
        if judged and not setting.same(value, setting.expected):
            source = f"{launch.said[setting.arg]}" if given else "the launch does not give it, so Megatron's default holds"
            against = "" if held is None or held == value else f"; the checkpoint's args say {short(held)}"
            found.mismatches.append(Mismatch(narrowed(setting, value, dims), value, given, source + against))
        elif held is not None and not setting.same(held, setting.expected):
            against = f"; the launch says {short(value)}" if judged else ""
            found.mismatches.append(Mismatch(narrowed(setting, held, dims), held, True, f"the checkpoint's args say so{against}"))
    if launch.unsaid == "reference":
        said = "what it does not say," if found.compared else "it says nothing of the model itself: that"
        found.notes.append(f"{said} the bridge reads from config.json")
    inert(launch, dims, found)
    found.notes += misspelled(launch)
    if found.compared and not found.mismatches:
        found.cleared.append(
            ("norms, rotary, router, gates and sizes as they are told", f"{found.compared} settings are those of config.json")
        )
    _vocabulary(launch, dims, found)
    _mtp(launch, dims, found)
    return found


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


def narrowed(setting: Setting, value: Any, dims: Dimensions) -> Setting:
    """A pattern over layers that differs in some of them reaches those alone."""
    if setting.arg not in PATTERNS:
        return setting
    try:
        found = Args({setting.arg: value}).pattern(setting.arg, dims.layers, every=PATTERNS[setting.arg])
    except UsageError:
        return setting
    expected = [bool(one) for one in setting.expected]
    wrong = {n for n in range(dims.layers) if found[n] != expected[n]}
    return replace(setting, sites=tuple(site for site in setting.sites if site.layer in wrong) or setting.sites)


def more_settings(config: Mapping[str, Any], dims: Dimensions) -> list[Setting]:
    """Flags that no config.json asks for, and that make another model of any when they are given."""
    text = config.get("text_config", config)
    every = range(dims.layers)
    full = [n for n in every if dims.kinds[n] == "attention"]
    moe = [n for n in every if dims.moe[n]]

    def at(layers: Sequence[int], module: str, part: str | None = None) -> tuple[Site, ...]:
        return tuple(Site(module, n, part) for n in layers)

    rope, core, topk, fc1 = (
        at(full, "attention", "rope"),
        at(full, "attention", "core"),
        at(moe, "router", "topk"),
        at(moe, "experts", "fc1"),
    )
    activation = fc1 or at(every, "mlp", "fc1")
    rope_type = (text.get("rope_parameters") or text.get("rope_scaling") or {}).get("rope_type", "default")
    norms, dispatch = at(every, "input_norm"), at(moe, "experts", "dispatch")

    def off(
        arg: str, flag: str, sites: tuple[Site, ...], effect: str, same: Callable[[Any, Any], bool] = lambda a, b: not a or a == b
    ) -> Setting:
        return Setting(arg, flag, False if same is _off else None, sites, effect, default=None, same=same)

    def _off(value: Any, _expected: Any) -> bool:
        return not value

    found = [
        off("multi_latent_attention", "--multi-latent-attention", core, "another kind of attention", _off),
        off("qk_l2_norm", "--qk-l2-norm", at(full, "attention", "q_norm"), "queries and keys are normed by their length", _off),
        off("squared_relu", "--squared-relu", activation, "another activation", _off),
        off("openai_gelu", "--openai-gelu", activation, "another activation", _off),
        off("apply_residual_connection_post_layernorm", "--apply-residual-connection-post-layernorm", norms, "the residual is taken after the norm", _off),
        off("window_size", "--window-size", core, "each token sees a window of the ones before it"),
        off("no_rope_freq", "--no-rope-freq", rope, "some layers rotate nothing"),
        off("softmax_type", "--softmax-type", core, "another softmax", lambda value, _: value in (None, "vanilla")),
    ]  # fmt: skip
    if rope_type == "default":
        found += [
            off("use_rope_scaling", "--use-rope-scaling", rope, "rotary frequencies are scaled as Llama 3.1 does", _off),
            off("rotary_seq_len_interpolation_factor", "--rotary-seq-len-interpolation-factor", rope, "positions are interpolated", lambda value, _: value in (None, 1)),
        ]  # fmt: skip
    if moe:
        found += [
            off("moe_expert_capacity_factor", "--moe-expert-capacity-factor", dispatch, "tokens beyond an expert's capacity are dropped", lambda value, _: value is None or value < 0),
            off("moe_router_force_load_balancing", "--moe-router-force-load-balancing", topk, "experts are chosen at random", _off),
            off("moe_router_num_groups", "--moe-router-num-groups", topk, "experts are chosen inside groups", lambda value, _: value in (None, 1)),
            off("moe_router_load_balancing_type", "--moe-router-load-balancing-type", topk, "experts are chosen by Sinkhorn's rule", lambda value, _: value is None or "sinkhorn" not in value),
            off("moe_apply_probs_on_input", "--moe-apply-probs-on-input", fc1, "experts get scaled inputs instead of giving scaled outputs", _off),
        ]  # fmt: skip
    found = [setting for setting in found if setting.sites]
    vocabulary = Setting(
        "vocab_size", "--vocab-size", text.get("vocab_size"), (Site("embedding"), Site("lm_head")), "the embedding and the output layer have other rows",
        default=text.get("vocab_size"),
    )  # fmt: skip
    depth = Setting(
        "mtp_num_layers", "--mtp-num-layers", dims.mtp, (Site("mtp"),), "another number of MTP layers: drafts differ, the text does not", default=dims.mtp,
        same=lambda value, expected: value == expected or not value,
    )  # fmt: skip
    return [*found, vocabulary, depth]


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


def misspelled(launch: Launch) -> list[str]:
    """Flags that are not in our table and look like one that is."""
    near = [(name, where, nearest(name)) for name, where in launch.unknown]
    return [
        f"{where}: {name} is no flag that we know; {flag} is, and is {_said(launch, flag)}"
        for name, where, flag in near
        if flag is not None
    ]


def _said(launch: Launch, flag: str) -> str:
    arg = FLAGS[flag].arg
    return f"given in {launch.said[arg]}" if arg in launch.said else "not given"
