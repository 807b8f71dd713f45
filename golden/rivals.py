"""The same forty pairs of tensors before other tools' rules: `make scoreboard-rivals` writes docs/rivals.md.

golden/rivals.safetensors (`rivals.py --pairs` writes it, of the faults of `score.py`) holds what reference and candidate said at
the place of a fault, and the reference's noise there: five kinds of place x {full, unit, 1 %, clean} x {fp32, bf16}.  Every pair is
made on the reference's own inputs, which is more than the rivals get by themselves: they compare free runs.  Their rules are
written out here from their sources, with their defaults; the tools themselves were not run.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from bisect_hooks.parallel import Parallel
from models import Place, embedded, random_batch
from safetensors import safe_open
from safetensors.torch import save_file
from score import LENGTH, SEED, SEVERITIES, spoiled_of

from bisect_tool.floor import tolerance_of
from bisect_tool.flow import site_name, word
from bisect_tool.forward import judged
from bisect_tool.judge import Tolerance, Verdict
from bisect_tool.ladder import DTYPES
from bisect_tool.measure import measure
from bisect_tool.noise import Noise
from bisect_tool.ranks import WORLDS
from bisect_tool.reference import base_grafts

HERE = Path(__file__).resolve().parent
PAIRS, OUT = HERE / "rivals.safetensors", HERE.parent / "docs" / "rivals.md"
CLEAN = "clean"
# word of the site, and the layer of it that is spoiled
PLACES = {"linear_attention.in_proj": 2, "attention.qkv": 3, "pre_mlp_norm": 3, "router.logits": 2, "shared_expert.fc2": 3}
ROWS = 33


@dataclass(frozen=True)
class Pair:
    """What both sides said at one place [t f], and what the reference's noise allows there."""

    kind: str
    dtype: str
    severity: str
    reference: torch.Tensor
    candidate: torch.Tensor
    tolerance: Tolerance


Rule = Callable[[Pair], bool]


def ours(pair: Pair) -> bool:
    """A site as a whole, its worst token, its worst channel, its scale, each against its own allowance."""
    difference = measure(pair.reference, pair.candidate)
    return judged("pair", pair.reference, pair.candidate, difference, pair.tolerance).verdict is Verdict.DIFFERS


def sglang(pair: Pair) -> bool:
    """Its comparator's default: 1 - 2<r, c> / (<r, r> + <c, c>) above 1e-3."""
    r, c = pair.reference.double().flatten(), pair.candidate.double().flatten()
    return not 1 - 2 * float(r @ c) / float(r @ r + c @ c) <= 1e-3


def msprobe(pair: Pair) -> bool:
    """Its rules for a module whose inputs agree: the cosine of the output falls by more than 0.1 (warning), or fewer than a tenth of
    the elements are within one in a thousand (error)."""
    within = (pair.candidate - pair.reference).abs() <= 1e-3 * pair.reference.abs()
    return cosine(pair) < 0.9 or float(within.float().mean()) < 0.1


def cosine(pair: Pair) -> float:
    """Of the two tensors as vectors."""
    return float(torch.nn.functional.cosine_similarity(pair.reference.double().flatten(), pair.candidate.double().flatten(), dim=0))


RULES: dict[str, Rule] = {
    "bisect-tool": ours,
    "SGLang's comparator": sglang,
    "msprobe": msprobe,
    "cosine below 0.99": lambda pair: cosine(pair) < 0.99,
    "relative rms above 1e-3": lambda pair: measure(pair.reference, pair.candidate).relative_rms > 1e-3,
}


def made(place: Place) -> Iterator[Pair]:
    """The pairs of one dtype."""
    run = place.candidate(Parallel())
    bench = place.bench(random_batch(SEED, LENGTH, place.dims.vocabulary), run)
    run.build()
    grafts = (bench.recording.path, base_grafts(bench.dims))
    clean = run.record(grafts).tensors
    left = dict(PLACES)
    for rule in run.family.rules(place.dims, place.layout, place.directory.names, mtp=False):
        kind = word(rule.site)
        if rule.site.layer is None or left.get(kind) != rule.site.layer:
            continue
        del left[kind]  # one tensor of each kind
        tensor = rule.candidates[0].name
        for severity in (*SEVERITIES, CLEAN):
            said = clean
            if severity != CLEAN:
                spoiled = spoiled_of(run, bench, rule, tensor, severity)
                spoiled.build()
                said = spoiled.record(grafts).tensors
            of = {
                one: (bench.recording[one].float(), said[one].float()) for one in bench.recording.keys if site_name(one) == str(rule.site)
            }
            key = max(of, key=lambda one: measure(*of[one]).relative_rms)
            rows = torch.arange(ROWS)
            reference, candidate = (one[rows] for one in of[key])
            yield Pair(kind, place.dtype, severity, reference, candidate, tolerance_of(bench.recording, key).of_rows(rows))


def write_pairs() -> None:
    """Writes golden/rivals.safetensors."""
    tensors: dict[str, torch.Tensor] = {}
    said: list[list[str | float]] = []
    with tempfile.TemporaryDirectory() as name:
        for place in embedded(Path(name), ("slime",)):
            for pair in made(place):
                noise = pair.tolerance.noise
                assert noise is not None
                n = f"{len(said):02d}"
                parts = {"reference": pair.reference, "candidate": pair.candidate, "rows": noise.rows, "columns": noise.columns}
                tensors |= {f"{n}|{part}": value.float().clone() for part, value in parts.items()}
                said.append([pair.kind, pair.dtype, pair.severity, pair.tolerance.relative_rms, *noise.worst])
    WORLDS.close()
    save_file(tensors, PAIRS, metadata={"pairs": json.dumps(said)})


def read_pairs() -> list[Pair]:
    """As `write_pairs` wrote them."""
    pairs = []
    with safe_open(PAIRS, framework="pt") as file:
        for n, (kind, dtype, severity, allowed, *worst) in enumerate(json.loads(file.metadata()["pairs"])):
            reference, candidate, rows, columns = (
                file.get_tensor(f"{n:02d}|{part}") for part in ("reference", "candidate", "rows", "columns")
            )
            tolerance = Tolerance(allowed, "stored", Noise(rows, columns, *worst))
            pairs.append(Pair(kind, dtype, severity, reference, candidate, tolerance))
    return pairs


def page(pairs: list[Pair]) -> str:
    """The table as Markdown: what each rule says of each pair."""
    severities = (*SEVERITIES, CLEAN)
    heads = [f"{dtype} {severity}" for dtype in ("fp32", "bf16") for severity in severities]
    lines = [
        "# Rivals",
        "",
        f"Written by `make scoreboard-rivals`; do not edit. {len(pairs)} stored pairs: what both sides said at the place of the fault, on the",
        "reference's own inputs. Their rules with their defaults, written out from their sources; the tools were not run. A cell: how many",
        f"of {len(PLACES)} places a rule calls different; of clean ones that is a false alarm. Places: {', '.join(PLACES)}.",
        "",
        "| rule | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for name, rule in RULES.items():
        cells = []
        for dtype in ("fp32", "bf16"):
            for severity in severities:
                own = [pair for pair in pairs if (pair.dtype, pair.severity) == (dtype, severity)]
                cells.append(f"{sum(map(rule, own))}/{len(own)}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *least(pairs), ""])


def least(pairs: list[Pair]) -> list[str]:
    """The least scale of a whole tensor's output, rounded as it would be, that each rule calls different: bisected on the clean pairs."""
    lines = [
        "The least factor on the whole of a clean output, rounded to its dtype again, that a rule calls different (bisected; `clean`: it",
        "already alarms without one). Half a unit in the last place of bf16 is 3.9e-03: rounding one constant makes as large a factor.",
        "",
        "| rule | " + " | ".join(f"{pair.dtype} {pair.kind}" for pair in pairs if pair.severity == CLEAN) + " |",
        "|---" * (1 + sum(pair.severity == CLEAN for pair in pairs)) + "|",
    ]
    for name, rule in RULES.items():
        cells = [_least(rule, pair) for pair in pairs if pair.severity == CLEAN]
        lines.append(f"| {name} | " + " | ".join("clean" if one == 0 else f"{one:.1e}" for one in cells) + " |")
    return lines


def _least(rule: Rule, pair: Pair) -> float:
    def scaled(by: float) -> Pair:
        stored = (pair.candidate.double() * (1 + by)).to(DTYPES[pair.dtype]).float()
        return Pair(pair.kind, pair.dtype, pair.severity, pair.reference, stored, pair.tolerance)

    if rule(pair):
        return 0.0
    low, high = -9.0, 1.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if rule(scaled(10**middle)) else (middle, high)
    return math.pow(10, high)


@click.command()
@click.option("--pairs", is_flag=True, help="Make the stored pairs again.")
def main(pairs: bool) -> None:
    """Writes docs/rivals.md."""
    if pairs:
        write_pairs()
    OUT.write_text(page(read_pairs()))
    sys.stdout.write(OUT.read_text())


if __name__ == "__main__":
    main()
