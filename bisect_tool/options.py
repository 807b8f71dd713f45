"""Options that several commands share.  Imports no torch, so that `-h` answers at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from bisect_hooks.errors import UsageError
from bisect_hooks.parallel import Parallel

DIRECTORY = click.Path(path_type=Path)


def parallel_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--tp --pp --vpp --ep --etp --cp --sp --pp-layers --dispatcher, as one Parallel (None when none was given)."""

    def with_parallel(*args: Any, **kwargs: Any) -> Any:
        names = ("tp", "pp", "vpp", "ep", "etp", "cp", "sp", "pp_layers", "dispatcher")
        given = {name: kwargs.pop(name) for name in names}
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        return command(*args, parallel=Parallel(**given) if given else None, **kwargs)

    with_parallel.__name__, with_parallel.__doc__ = command.__name__, command.__doc__
    if hasattr(command, "__click_params__"):
        with_parallel.__click_params__ = command.__click_params__  # type: ignore[attr-defined]
    size = click.IntRange(min=1)
    for option in reversed([
        click.option("--tp", type=size, help="Tensor parallel size."),
        click.option("--pp", type=size, help="Pipeline parallel size."),
        click.option("--vpp", type=size, help="Virtual pipeline chunks a stage."),
        click.option("--ep", type=size, help="Expert parallel size."),
        click.option("--etp", type=size, help="Expert tensor parallel size (default: --tp, as in Megatron)."),
        click.option("--cp", type=size, help="Context parallel size."),
        click.option("--sp", is_flag=True, help="Sequence parallel."),
        click.option("--pp-layers", callback=_numbers, metavar="N,N", help="Layers of each pipeline stage, e.g. 3,5."),
        click.option("--dispatcher", type=click.Choice(["alltoall", "allgather"]), help="MoE token dispatcher."),
    ]):  # fmt: skip
        with_parallel = option(with_parallel)
    return with_parallel


def _numbers(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 3,5") from None


def rollout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a rollout engine left: --rollout FILE... and what goes beside it."""
    for option in reversed([
        click.argument("more", nargs=-1, type=DIRECTORY, metavar="[FILE]...", callback=_behind_rollout),
        click.option("--rollout", "rollouts", multiple=True, type=DIRECTORY, metavar="FILE...", help="Dumps of slime, miles or verl, or JSONL lines."),
        click.option("--rollout-recording", "recordings", multiple=True, type=DIRECTORY, metavar="DIR", help="An engine's activations (import): a prefill, a decode, or both."),
        click.option("--train", multiple=True, type=DIRECTORY, metavar="FILE", help="The trainer's dump of the same rollouts (--save-debug-train-data)."),
        click.option("--server", metavar="URL", help="A running engine (SGLang, vLLM) that scores the same ids in one pass."),
        click.option("--hashes", multiple=True, type=DIRECTORY, metavar="FILE", help="What an engine holds, by digest (docs/engine-hash.md)."),
        click.option("--received", type=DIRECTORY, metavar="FILE", help="Names that the sync supplied: a listing or a log."),
        click.option("--consumed", type=DIRECTORY, metavar="FILE", help="Names that the engine took: a listing or a log."),
        click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Score only N responses, spread evenly."),
    ]):  # fmt: skip
        command = option(command)
    return command


ROLLOUT = ("rollouts", "recordings", "train", "server", "hashes", "received", "consumed", "samples")


def evidence_of(options: dict[str, Any]) -> dict[str, Any] | None:
    """Takes what `rollout_options` gave out of a command's options; None where nothing was given."""
    more = options.pop("more")
    found = {name: options.pop(name) for name in ROLLOUT}
    found["rollouts"] = (*found["rollouts"], *more)
    return found if any(found.values()) else None


def _behind_rollout(context: click.Context, _option: click.Parameter, more: tuple[Path, ...]) -> tuple[Path, ...]:
    if more and not context.params.get("rollouts"):
        raise UsageError(f"{more[0]} is no option", hint="files go behind --rollout")
    return more


def out_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where a judging command writes its report."""
    return click.option("--out", type=DIRECTORY, default=Path("bisect-report"), show_default=True, help="Where the report goes.")(command)


def reference_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The Hugging Face directory, where the embedded model will do."""
    return click.option("--reference", type=DIRECTORY, help="Hugging Face directory (default: the embedded tiny model).")(command)


def candidate_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The checkpoint, where the embedded one will do."""
    return click.option("--candidate", type=DIRECTORY, help="torch_dist checkpoint: the directory with .metadata, or its parent.")(command)


def spec_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The user's own layer spec."""
    said = "Build the candidate by this layer spec, as Megatron's and slime's --spec name it."
    return click.option("--spec", nargs=2, metavar="MODULE FUNCTION", help=said)(command)
