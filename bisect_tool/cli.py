"""The command line: options → one call → one report.  Imports no torch, so that `-h` answers at once."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import click
from bisect_hooks.errors import UsageError
from bisect_hooks.parallel import Parallel

from bisect_tool import __version__
from bisect_tool.options import (
    DIRECTORY,
    candidate_option,
    evidence_of,
    out_option,
    parallel_options,
    reference_option,
    rollout_options,
    spec_option,
)

EXIT_CODES = """
\b
Exit codes
  0    everything expected was compared and agrees (or the command is done)
  1    a fault was found; the report names it
  2    usage, or an input that can't be read
  70   an error of ours
  125  incomparable: no fault, but something expected was not compared
  130  interrupted
"""

STAGES = ("inputs", "config", "weights", "forward", "engine")
_OUT: list[Path] = []


def last_out() -> Path:
    """Where a traceback goes: the out directory of the command that ran."""
    return _OUT[-1] if _OUT else Path("bisect-report")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=EXIT_CODES)
@click.version_option(__version__, prog_name="bisect-tool")
def cli() -> None:
    """Find the first layer, module and shard where a Megatron conversion stops agreeing with its Hugging Face original.

    \b
    bisect-tool run --prompts golden/prompts.jsonl          the embedded tiny model: see the ladder work
    bisect-tool run --prompts FILE --reference HF --candidate MEGATRON
    bisect-tool audit --reference HF --candidate MEGATRON   the weights alone: no model, no GPU
    """


def _stages(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[str, ...]:
    if text is None:
        return STAGES
    named = tuple(word.strip() for word in text.split(",") if word.strip())
    unknown = [word for word in named if word not in STAGES]
    if unknown or not named:
        raise click.BadParameter(f"unknown stage {', '.join(unknown) or 'list'}; known: {', '.join(STAGES)}")
    return named


@cli.command()
@click.option("--prompts", required=True, help="Text file (one a line), JSONL (prompt, messages, text, input_ids), or -.")
@click.option("--input-key", help="The JSONL field to read prompts from.")
@reference_option
@candidate_option
@click.option("--launch", type=DIRECTORY, help="Launch script: its flags say how the candidate is built.  Read, never executed.")
@click.option("--export", type=DIRECTORY, help="Hugging Face directory exported from the candidate.")
@rollout_options
@click.option("--golden", type=DIRECTORY, help="Golden directory: its recording stands for the reference's forward, which is not run.")
@click.option("--stages", callback=_stages, metavar="A,B", help=f"Run just these of {', '.join(STAGES)}.")
@click.option("--all-stages", is_flag=True, help="Go on after the first stage that finds a fault.")
@click.option("--strict", is_flag=True, help="Minor findings (precision lost, extras missing) count as faults.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="fp32: same function? bf16: same rounding?"
)
@click.option("--padding", type=click.Choice(["right", "left"]), default="right", show_default=True, help="Where prompts are padded.")
@click.option("--no-answers", is_flag=True, help="Where they differ, do not let both sides answer two prompts (8 forwards each).")
@click.option("--device", default="cpu", show_default=True, help="Where both sides compute.")
@click.option("--candidate-patch", type=DIRECTORY, help="A patch.py whose patch(model, parallel) is run on the built candidate.")
@spec_option
@parallel_options
@out_option
def run(prompts: str, reference: Path | None, candidate: Path | None, parallel: Parallel | None, out: Path, **options: Any) -> int:
    """Climb the ladder (inputs, config, weights, forward, engine) and name the first fault.

    With --prompts alone it runs on the embedded tiny Qwen3.5-MoE and its converted checkpoint.
    """
    engine = evidence_of(options)
    given = candidate or options["launch"] or options["export"]
    if (given is not None and reference is None) or (reference is not None and given is None and engine is None):
        raise UsageError("give --reference with --candidate, --launch, --export or --rollout, or none of them (the embedded model)")
    _start(out)
    from bisect_tool import golden, ladder

    own = reference is None
    reference, candidate = reference or golden.reference(), golden.candidate() if own else candidate
    job = ladder.Job(
        reference_path=reference,
        candidate_path=candidate,
        launch=options["launch"],
        export=options["export"],
        golden=options["golden"],
        prompts=prompts,
        input_key=options["input_key"],
        parallel=parallel or Parallel(),
        dtype=options["dtype"],
        device=options["device"],
        patch=options["candidate_patch"],
        left=options["padding"] == "left",
        spec=options["spec"],
        stages=options["stages"],
        everything=options["all_stages"],
        answers=not options["no_answers"],
        strict=options["strict"],
        command=_command(),
        progress=Progress(),
        rollout=_evidence(engine, reference, candidate, prompts, options) if engine else None,
    )
    return _judge(ladder.climb(job), out)


def _evidence(engine: dict[str, Any], reference: Path, candidate: Path | None, prompts: str, options: dict[str, Any]) -> Any:
    """An engine's evidence beside a run's, with the words that give the run again."""
    from bisect_tool.rollouts.evidence import Evidence

    words = ["bisect-tool", "run", "--prompts", prompts, "--reference", str(reference)]
    words += [word for flag, path in (("--candidate", candidate), ("--export", options["export"])) if path for word in (flag, str(path))]
    return Evidence(
        reference, export=options["export"], device=options["device"], command=_command(), progress=Progress(), base=shlex.join(words), **engine
    )  # fmt: skip


@cli.command("audit")
@click.option("--reference", type=DIRECTORY, required=True, help="Hugging Face directory.")
@click.option("--candidate", type=DIRECTORY, help="Megatron checkpoint: torch_dist or legacy (mp_rank_*).")
@click.option("--export", type=DIRECTORY, help="Hugging Face directory exported from the candidate; instead of it, or beside it.")
@click.option("--repair", type=DIRECTORY, metavar="OUT", help="Write the candidate as reference and table say it should be.")
@click.option("--sibling-reference", type=DIRECTORY, help="A model that works, to hold this one against: its Hugging Face directory.")
@click.option("--sibling-candidate", type=DIRECTORY, help="And its checkpoint.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes (default: one a core for large models).")
@click.option("--strict", is_flag=True, help="Minor findings count as faults.")
@parallel_options
@out_option
def audit_command(reference: Path, candidate: Path | None, parallel: Parallel | None, out: Path, **options: Any) -> int:
    """The weights stage alone: no model is built, no forward is run.

    The parallel flags say how the candidate was converted; without them its args do, or the files its ranks wrote.
    Killed and run again with the same --out, it goes on where it was.  Under torchrun the ranks share the work.
    """
    if candidate is None and options["export"] is None:
        raise UsageError("audit needs --candidate, --export or both")
    if (options["sibling_reference"] is None) != (options["sibling_candidate"] is None):
        raise UsageError("give --sibling-reference and --sibling-candidate together")
    if options["repair"] is not None and candidate is None:
        raise UsageError("--repair writes a candidate: give --candidate")
    _start(out)
    from bisect_tool import auditing, ladder

    job = ladder.Job(
        reference, candidate, converted=parallel, parallel=parallel or Parallel(), stages=("weights",), strict=options["strict"],
        command=_command(), progress=Progress(), export=options["export"], jobs=options["jobs"], out=out,
    )  # fmt: skip
    sibling = (options["sibling_reference"], options["sibling_candidate"]) if options["sibling_reference"] else None
    found = auditing.audit(job, options["repair"], sibling)
    return _judge(found, out) if found is not None else 0


@cli.command("config")
@click.option("--reference", type=DIRECTORY, required=True, help="Hugging Face directory; it may hold only config.json.")
@click.option("--launch", type=DIRECTORY, help="Launch script, file of flags, or run_config.yaml: read, never executed.")
@click.option("--candidate", type=DIRECTORY, help="Checkpoint whose args are compared too.")
@click.option("--export", type=DIRECTORY, help="Exported Hugging Face directory, as vLLM and SGLang would read it.")
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="A variable that the environment gives the launch script.")
@click.option("--strict", is_flag=True, help="Minor findings count as faults.")
@out_option
def config_command(reference: Path, out: Path, given: tuple[str, ...], **evidence: Any) -> int:
    """The config stage alone: launch flags against config.json.  Builds nothing and asks for nothing."""
    unnamed = [one for one in given if "=" not in one]
    if unnamed:
        raise UsageError(f"--set {unnamed[0]}: give NAME=VALUE")
    _start(out)
    from bisect_tool import config_stage

    values = dict(one.split("=", 1) for one in given)
    return _judge(config_stage.run_config(config_stage.Evidence(reference, given=values, command=_command(), **evidence)), out)


@cli.command("rollout")
@click.option("--reference", type=DIRECTORY, required=True, help="Hugging Face directory.")
@rollout_options
@click.option("--export", type=DIRECTORY, help="Hugging Face directory that was sent to the engine, where it is not the reference.")
@click.option("--device", default="cpu", show_default=True, help="Where the reference computes.")
@click.option("--strict", is_flag=True, help="Minor findings count as faults.")
@out_option
def rollout_command(reference: Path, export: Path | None, device: str, strict: bool, out: Path, **options: Any) -> int:
    """The engine stage alone: what the rollout engine said, and what it holds, against the reference.

    Give any of --rollout, --rollout-recording, --hashes, and --received with --consumed.  Dumps are read, never executed.
    """
    _start(out)
    from bisect_tool.rollouts.evidence import Evidence
    from bisect_tool.rollouts.stage import run_rollout

    given = evidence_of(options) or {}
    asked = Evidence(reference, export=export, device=device, strict=strict, command=_command(), progress=Progress(), **given)
    return _judge(run_rollout(asked), out)


@cli.command()
@click.option("--reference", type=DIRECTORY, required=True, help="Hugging Face directory.")
@click.option("--out", type=DIRECTORY, required=True, help="Where the checkpoint goes (empty or new).")
@click.option(
    "--layout",
    type=click.Choice(["slime", "native"]),
    default="slime",
    show_default=True,
    help="Linear attention as slime or megatron-core has it.",
)
@click.option("--mtp/--no-mtp", default=None, help="Convert the MTP layers (default: if the reference has mtp.*).")
@parallel_options
def convert(reference: Path, out: Path, layout: Any, mtp: bool | None, parallel: Parallel | None) -> int:
    """Write a known-good conversion of a Hugging Face checkpoint to torch_dist, with megatron-core's own writer."""
    from bisect_tool import conversion

    done = conversion.convert(reference, out, layout, parallel or Parallel(), mtp)
    click.echo(done.shown())
    return 0


@cli.command()
@click.argument("fault", required=False)
@click.option("--list", "listed", is_flag=True, help="List the faults with their carriers.")
@click.option("--candidate", type=DIRECTORY, help="A good torch_dist checkpoint.")
@click.option("--out", type=DIRECTORY, help="Where the faulty copy goes (empty or new).")
@parallel_options
def plant(fault: str | None, listed: bool, candidate: Path | None, out: Path | None, parallel: Parallel | None) -> int:
    """Write a copy of a checkpoint with one known fault in it."""
    if listed:
        from bisect_tool import planting

        click.echo(planting.listing())
        return 0
    if fault is None or candidate is None or out is None:
        raise click.UsageError("plant needs FAULT, --candidate and --out (or --list)")
    from bisect_tool import planting

    click.echo(planting.plant(fault, candidate, out, parallel))
    return 0


@cli.command()
@click.option("--golden", "golden_directory", type=DIRECTORY, required=True, help="Directory of golden references (make golden).")
@click.option("--candidate", type=DIRECTORY, required=True, help="torch_dist checkpoint to gate.")
@spec_option
@parallel_options
@out_option
def gate(golden_directory: Path, candidate: Path, spec: tuple[str, str] | None, parallel: Parallel | None, out: Path) -> int:
    """The CI tolerance gate: a candidate against golden references, in seconds, without running the reference."""
    _start(out)
    from bisect_tool import gating

    return _judge(gating.gate(golden_directory, candidate, parallel or Parallel(), _command(), spec), out)


@cli.command()
@click.option("--side", type=click.Choice(["reference", "candidate"]), required=True, help="Which side to record.")
@click.option("--prompts", required=True, help="Text file, JSONL, or -.")
@click.option("--input-key", help="The JSONL field to read prompts from.")
@reference_option
@candidate_option
@click.option("--out", type=DIRECTORY, required=True, help="Where the recording goes (empty or new).")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="What is computed in.")
@click.option("--device", default="cpu", show_default=True, help="Where it computes.")
@spec_option
@parallel_options
def record(side: str, prompts: str, reference: Path | None, candidate: Path | None, out: Path, **options: Any) -> int:
    """Write a Recording: activations by site, one side."""
    if side == "candidate" and (reference is None) != (candidate is None):
        raise UsageError("give --candidate with its --reference, or neither of them (the embedded model)")
    from bisect_tool import golden, ladder, recorded

    job = ladder.Job(
        reference or golden.reference(), candidate or golden.candidate(), prompts, options["input_key"],
        options["parallel"] or Parallel(), spec=options["spec"], dtype=options["dtype"], device=options["device"], command=_command(),
    )  # fmt: skip
    click.echo(recorded.record(job, side, out))
    return 0


@cli.command("compare")
@click.argument("reference", type=DIRECTORY)
@click.argument("candidate", type=DIRECTORY)
@click.option("--strict", is_flag=True, help="Minor findings count as faults.")
@out_option
def compare_command(reference: Path, candidate: Path, strict: bool, out: Path) -> int:
    """Judge two Recordings: ours, imported, or a directory of ranks' shards.

    Nothing is run: a drift is placed by how it grows, and its class is said where the tokens that are wrong decide it.
    """
    _start(out)
    from bisect_tool import comparing

    return _judge(comparing.compare(reference, candidate, strict=strict, command=_command(), progress=Progress()), out)


@cli.command("import")
@click.argument("form", metavar="FORMAT", type=click.Choice(["sglang", "msprobe", "slime", "torch"]))
@click.argument("path", type=DIRECTORY)
@click.option("--reference", type=DIRECTORY, required=True, help="Hugging Face directory of the model; it may hold only config.json.")
@click.option("--out", type=DIRECTORY, required=True, help="Where the recording goes (empty or new).")
@click.option("--map", "given", type=DIRECTORY, help="JSON object, their name to ours; * stands for a layer's number.")
@click.option("--decode", is_flag=True, help="Put the decode steps behind the prefill (sglang, a dump of one request).")
@parallel_options
def import_command(form: str, path: Path, reference: Path, out: Path, given: Path | None, parallel: Parallel | None, decode: bool) -> int:
    """Make a Recording of a foreign dump: sglang, msprobe, slime, or torch (a dict of tensors).

    The parallel flags say how the dump's ranks were laid out, where it does not say so itself.
    """
    from bisect_tool import importing

    click.echo(importing.import_dump(form, path, out, reference, parallel, given, decode=decode))
    return 0


@cli.command()
@reference_option
@click.option("--candidate", type=DIRECTORY, help="A checkpoint; without one both of the family's layouts are listed.")
@click.option("--fire", is_flag=True, help="Run one short forward a side, and say which taps fired.")
@click.option("--prompts", help="What --fire runs (default: a few token ids).")
def taps(reference: Path | None, candidate: Path | None, fire: bool, prompts: str | None) -> int:
    """List sites, module paths on both sides, layouts, and with --fire which of them are heard."""
    if prompts is not None and not fire:
        raise UsageError("--prompts is what --fire runs: give --fire too")
    from bisect_tool import golden, listing

    if reference is None:
        reference, candidate = golden.reference(), candidate or golden.candidate()
    click.echo(listing.taps(reference, candidate, fire, prompts))
    return 0


@cli.command("hash")
@click.argument("directory", type=DIRECTORY)
def hash_command(directory: Path) -> int:
    """One line a tensor: name, shape, dtype, digest (Hugging Face or torch_dist)."""
    from bisect_tool import listing

    for line in listing.hashes(directory):
        click.echo(line)
    return 0


@cli.command()
@click.argument("directory", type=DIRECTORY)
@click.option("--format", "formats", default="text", show_default=True, metavar="A,B", help="text, json, html, junit, sarif, github.")
@click.option("--out", type=DIRECTORY, help="Where files go (default: one format to stdout, several into DIRECTORY).")
def report(directory: Path, formats: str, out: Path | None) -> int:
    """Render a finished run again.

    github writes workflow commands, always to stdout: they work where a job's log shows them.
    """
    from bisect_tool import report as pages
    from bisect_tool.formats import rendering

    for said in rendering.put(pages.read(directory), rendering.named(formats), directory, out):
        click.echo(said, nl=False)
    return 0


class Progress:
    """Says on stderr what is being done, once a run takes longer than two seconds."""

    def __init__(self) -> None:
        self.started = self.said = time.monotonic()

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        seconds = now - self.started
        if seconds > 2 and now - self.said > 1:
            self.said = now
            click.echo(f"{seconds:5.1f} s  {what}", err=True)


def _start(out: Path) -> None:
    from bisect_tool.report import prepare_out

    prepare_out(out)
    _OUT.append(out)


def _judge(found: Any, out: Path) -> int:
    from bisect_tool import report as pages
    from bisect_tool import text

    file = pages.write(found, out)
    click.echo(text.render(found.to_json()), nl=False)
    click.echo(f"wrote {file}")
    return int(found.exit_code)


def _command() -> str:
    return shlex.join(["bisect-tool", *sys.argv[1:]])
