"""The case study, `make case-397b`: writes docs/case-397b.md, every number and every output in it from this run.

The model is the tiny one with 16 experts; the checkpoints are ours and those that slime's public converter wrote
(tests/data/cases); the geometry with 512 experts is one layer of sparse files.  Each step is checked: a verdict that is not as
the page says ends the run with 70, and the page stays as it was.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.family import family_of
from bisect_hooks.hf import Reference, Tokenizer
from bisect_hooks.parallel import Parallel
from case_397b_page import page_of
from drill_397b import EXPERTS, WIDTH, Sparse
from large import reference_shapes, write_candidate, write_reference
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from bisect_tool.__main__ import run
from bisect_tool.forward_stage import compare_answers
from bisect_tool.hf_directory import read_config
from bisect_tool.ladder import Job
from bisect_tool.prompts import Batch
from bisect_tool.ranks import WORLDS
from bisect_tool.reference import Wanted

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DATA = ROOT / "tests/data"
SUMS, ROLLOUTS, LENGTH = 60, 8, 16
# of each chunk of an expert, in the geometry with 512 of them
KEPT = 64 << 10
say = sys.stderr.write


class BrokenError(Exception):
    """A step that did not come out as the page tells it."""


@dataclass
class Case:
    """What was run, in a folder of its own, and what came out."""

    said: dict[str, str] = field(default_factory=dict)
    pages: dict[str, dict[str, Any]] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def tool(self, name: str, words: str, code: int, kind: str | None = None) -> None:
        """Runs `bisect-tool WORDS` and keeps what it prints.  kind: the relation of its one fault"""
        say(f"{name}: bisect-tool {words}\n")
        judges = words.split()[0] in ("audit", "config", "run", "rollout")
        argv = [*shlex.split(words), *(["--out", f"report-{name}"] if judges else [])]
        screen = io.StringIO()
        sys.argv = ["bisect-tool", *shlex.split(words)]
        with redirect_stdout(screen):
            found = run(argv)
        self.said[name] = _steady(screen.getvalue())
        self.commands[name] = f"bisect-tool {words}"
        if judges:
            self.pages[name] = json.loads(Path(f"report-{name}/report.json").read_text())
        kinds = [fault["relation"]["kind"] for fault in self.pages[name]["faults"]] if judges else []
        if found != code or kinds != ([kind] if kind else []):
            raise BrokenError(f"{name}: exit code {found}, relations {kinds}\n{screen.getvalue()}")


def _steady(text: str) -> str:
    """Without what differs from run to run."""
    text = re.sub(r"  \d+\.\d s$", "", text, flags=re.MULTILINE)
    return re.sub(r"^wrote .*\n", "", text, flags=re.MULTILINE).rstrip()


def main() -> int:
    """Runs every step, then writes the page."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="case-397b-") as folder:
        os.chdir(folder)
        case = Case()
        try:
            _files()
            _scripts(case)
            _ours(case)
            _theirs(case)
            _answers(case)
            _ladder(case)
            _geometry(case)
        except BrokenError as error:
            say(f"BROKEN: {error}\n")
            return 70
        finally:
            WORLDS.close()
            os.chdir(ROOT)
    (ROOT / "docs/case-397b.md").write_text(page_of(case.said, case.pages, case.commands, case.numbers))
    say("wrote docs/case-397b.md\n")
    return 0


def _files() -> None:
    """The reference with the tokenizer that belongs to it, the checkpoints of slime's converter, sums to ask for."""
    sys.path.insert(0, str(DATA / "make"))
    from slime_cases import unpacked

    for name, path in unpacked(DATA / "cases", Path("unpacked")).items():
        shutil.copytree(path, name)
    Path("tiny8-hf").rename("hf")
    _tokenizer(Path("hf"))
    shutil.copytree(DATA / "launch", "launch")
    shutil.copytree(DATA / "configs/Qwen3.5-397B-A17B", "397b")
    generator = torch.Generator().manual_seed(397)
    pairs = [torch.randint(10, 99, (2,), generator=generator).tolist() for _ in range(SUMS)]
    Path("sums.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+{b}="}) + "\n" for a, b in pairs))
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+{b}="}) + "\n" for a, b in pairs[:6]))


def _tokenizer(out: Path) -> None:
    """The words of the trained model: ten digits, + and =, ; behind an answer of three digits; 487 ids that it never saw."""
    words = {word: i for i, word in enumerate("0123456789+=;")} | {f"<{i}>": i for i in range(13, 500)}
    tokenizer = RawTokenizer(models.WordLevel(vocab=words, unk_token="<499>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<[0-9]+>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ";"}) + "\n")


def _scripts(case: Case) -> None:
    """The reporter's own launch arguments and conversion script against config.json."""
    case.tool("launch", "config --reference 397b --launch launch/run_397b_args.py", 0)
    case.tool("convert-script", "config --reference 397b --launch launch/convert_397b.txt", 0)


def _ours(case: Case) -> None:
    """Our own conversion at EP 1 and EP 4, and the fault planted at EP 4."""
    case.tool("convert-ep1", "convert --reference hf --out ours-ep1", 0)
    case.tool("convert-ep4", "convert --reference hf --out ours-ep4 --ep 4", 0)
    case.tool("plant", "plant E01 --candidate ours-ep4 --out ours-faulty-ep4 --ep 4", 0)
    case.tool("ours-ep1", "audit --reference hf --candidate ours-ep1", 0)
    case.tool("ours-ep4", "audit --reference hf --candidate ours-ep4", 0)
    case.tool("ours-faulty", "audit --reference hf --candidate ours-faulty-ep4 --ep 4", 1, "duplicate")


def _theirs(case: Case) -> None:
    """What the public converter wrote, its export, and the mended copy."""
    case.tool("slime-ep1", "audit --reference hf --candidate slime-0.2.4-ep1", 0)
    case.tool("slime-ep4", "audit --reference hf --candidate slime-0.2.4-ep4", 1, "duplicate")
    case.tool("slime-fixed", "audit --reference hf --candidate slime-fixed-ep4", 0)
    case.tool("export", "audit --reference hf --export export-ep4-hf", 1, "duplicate")
    case.tool("repair", "audit --reference hf --candidate slime-0.2.4-ep4 --repair repaired", 1, "duplicate")
    case.tool("repaired", "audit --reference hf --candidate repaired", 0)


def _answers(case: Case) -> None:
    """Sums that reference and candidates answer, each candidate run by megatron-core."""
    right: dict[str, int] = {}
    for name in ("slime-0.2.4-ep1", "slime-0.2.4-ep4", "repaired"):
        say(f"answers of {name}\n")
        job = Job(Path("hf"), Path(name), "sums.jsonl")
        candidate = job.candidate_run()
        candidate.build()
        reference, _ = Wanted(job.reference, job.family, job.candidate.layout, torch.float32).load()
        found = compare_answers(job, candidate, reference, SUMS, 4)
        right["reference"] = sum(_right(one["prompt"], one["reference"]) for one in found)
        right[name] = sum(_right(one["prompt"], one["candidate"]) for one in found)
        if name == "slime-0.2.4-ep4":
            case.numbers["garbled"] = [one for one in found if not _right(one["prompt"], one["candidate"])][:4]
        if name == "repaired":
            asked = {one["prompt"] for one in case.numbers["garbled"]}
            case.numbers["mended"] = {one["prompt"]: one["candidate"] for one in found if one["prompt"] in asked}
    if right["slime-0.2.4-ep4"] >= right["reference"] or right["repaired"] != right["reference"]:
        raise BrokenError(f"answers: {right}")
    case.numbers |= {"right": right, "sums": SUMS, "responses": ROLLOUTS}


def _right(prompt: str, answer: str) -> bool:
    a, b = prompt.rstrip("=").split("+")
    return answer[:3] == f"{int(a) + int(b):03}"


def _ladder(case: Case) -> None:
    """All evidence at once, with what an engine says that serves the export."""
    _rollouts(Path("rollout.jsonl"))
    evidence = "--reference hf --candidate slime-0.2.4-ep4 --export export-ep4-hf --rollout rollout.jsonl"
    case.tool("rollout", "rollout --reference hf --rollout rollout.jsonl", 1, "unknown")
    if case.pages["rollout"]["first"]["class"] is not None:
        raise BrokenError("rollouts alone decided the class")
    say("ladder\n")
    screen = io.StringIO()
    words = f"run --prompts prompts.jsonl {evidence} --all-stages"
    sys.argv = ["bisect-tool", *shlex.split(words)]
    with redirect_stdout(screen):
        code = run([*shlex.split(words), "--out", "report-ladder"])
    page = json.loads(Path("report-ladder/report.json").read_text())
    case.said["ladder"], case.commands["ladder"], case.pages["ladder"] = _steady(screen.getvalue()), f"bisect-tool {words}", page
    classes = {(fault["class"], fault["module"], fault["relation"]["kind"]) for fault in page["faults"]}
    if (
        code != 1
        or classes != {("conversion", "experts", "duplicate")}
        or not any(one["suspect"] == "the engine" for one in page["cleared"])
    ):
        raise BrokenError(f"ladder: exit code {code}, {classes}\n{screen.getvalue()}")
    case.tool("mended", "run --prompts prompts.jsonl --reference hf --candidate repaired", 0)


def _rollouts(out: Path) -> None:
    """What transformers samples from the export, with the log-probs it samples at."""
    config = read_config(Path("hf"))
    family = family_of(config)
    engine = Reference(Path("export-ep4-hf"), family, family.reference_dimensions(config), torch.float32, torch.device("cpu"))
    tokenizer = Tokenizer(Path("hf"))
    generator = torch.Generator().manual_seed(0)
    texts = [json.loads(line)["prompt"] for line in Path("sums.jsonl").read_text().splitlines()[:ROLLOUTS]]
    rows = [tokenizer.ids(text) for text in texts]
    starts, logs = [len(row) for row in rows], [[] for _ in rows]  # type: list[int], list[list[float]]
    for _ in range(LENGTH):
        batch = Batch(tuple(map(tuple, rows)))
        found = engine.forward(batch.ids(), batch.mask())
        for i, row in enumerate(rows):
            said = found[i, len(row) - 1].double().log_softmax(-1)
            token = int(torch.multinomial(said.exp(), 1, generator=generator))
            row.append(token)
            logs[i].append(float(said[token]))
    lines = [
        {"prompt": text, "prompt_ids": row[:start], "response_ids": row[start:], "logprobs": one}
        for text, row, start, one in zip(texts, rows, starts, logs, strict=True)
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _geometry(case: Case) -> None:
    """One layer of the real geometry, 512 experts, converted at EP 16 with the fault in it."""
    config = json.loads((HERE / "397b" / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": 1, "layer_types": text["layer_types"][:1], "mtp_num_hidden_layers": 0}
    family = family_of(config)
    shapes = reference_shapes(family.reference_dimensions(config), mtp=False)
    say("512 experts\n")
    write_reference(Path("layer-hf"), config, shapes, Sparse(shapes, filled=(0,), kept=KEPT))
    parallel = Parallel(ep=16)
    write_candidate(Path("layer-ep16"), family, config, shapes, parallel, Sparse(shapes, faulty=True, filled=(0,), kept=KEPT))
    case.tool("geometry", "audit --reference layer-hf --candidate layer-ep16 --jobs 1", 1, "duplicate")
    detail = case.pages["geometry"]["first"]["relation"]["detail"]
    if detail != {"map": f"e mod {WIDTH}", "modulus": WIDTH, "wrong": EXPERTS - WIDTH, "of": EXPERTS}:
        raise BrokenError(f"geometry: {detail}")
    case.numbers["bytes"] = sum(file.stat().st_size for name in ("layer-hf", "layer-ep16") for file in _all(Path(name)))


def _all(folder: Path) -> Sequence[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


if __name__ == "__main__":
    sys.exit(main())
