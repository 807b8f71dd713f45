"""What the drill needs: conversions and plants made once a session, and a run of the command as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_hooks.parallel import Parallel

from bisect_tool.__main__ import run
from bisect_tool.conversion import convert
from bisect_tool.planting import plant

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "golden/tiny-qwen3.5-moe"
PROMPTS = ROOT / "golden/gate-prompts.jsonl"

LAYOUTS = {
    "one": Parallel(),
    "tp2": Parallel(tp=2),
    "tp2sp": Parallel(tp=2, sp=True),
    "pp2": Parallel(pp=2),
    "ep2": Parallel(ep=2),
    "ep4": Parallel(ep=4),
    "tp2ep2": Parallel(tp=2, ep=2, etp=1, sp=True),
    "tp4": Parallel(tp=4, sp=True),
    "pp3+5": Parallel(pp=2, pp_layers=(3, 5)),
    "vpp2": Parallel(pp=2, vpp=2),
    "tp2pp2": Parallel(tp=2, pp=2, sp=True),
    "etp2": Parallel(tp=2, ep=2, sp=True, dispatcher="allgather"),
}
FLAGS = {
    "one": [],
    "tp2": ["--tp", "2"],
    "tp2sp": ["--tp", "2", "--sp"],
    "pp2": ["--pp", "2"],
    "ep2": ["--ep", "2"],
    "ep4": ["--ep", "4"],
    "tp2ep2": ["--tp", "2", "--ep", "2", "--etp", "1", "--sp"],
    "tp4": ["--tp", "4", "--sp"],
    "pp3+5": ["--pp", "2", "--pp-layers", "3,5"],
    "vpp2": ["--pp", "2", "--vpp", "2"],
    "tp2pp2": ["--tp", "2", "--pp", "2", "--sp"],
    "etp2": ["--tp", "2", "--ep", "2", "--sp", "--dispatcher", "allgather"],
}


@dataclass
class Workshop:
    """Checkpoints by how they were made, each made once."""

    folder: Path
    reference: Path = REFERENCE
    made: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def good(self, layout: str, written: str) -> Path:
        key = (layout, written)
        if key not in self.made:
            out = self.folder / f"{layout}-{written}"
            convert(self.reference, out, layout, LAYOUTS[written], None)  # type: ignore[arg-type]
            self.made[key] = out
        return self.made[key]

    def faulty(self, layout: str, written: str, *faults: str) -> Path:
        """A good conversion with the faults planted one after another."""
        key = (layout, written, *faults)
        if not faults:
            return self.good(layout, written)
        if key not in self.made:
            out = self.folder / "-".join(key)
            plant(faults[-1], self.faulty(layout, written, *faults[:-1]), out, None)
            self.made[key] = out
        return self.made[key]


def judge(
    candidate: Path, out: Path, run_under: str, *more: str, reference: Path = REFERENCE, prompts: Path = PROMPTS
) -> tuple[int, dict[str, Any]]:
    """Exit code and report of `bisect-tool run` on a candidate."""
    arguments = ["run", "--prompts", str(prompts), "--reference", str(reference), "--candidate", str(candidate), "--out", str(out)]
    code = run([*arguments, *FLAGS[run_under], *more])
    page: dict[str, Any] = json.loads((out / "report.json").read_text())
    return code, page


def verdict_of(fault: Mapping[str, Any]) -> dict[str, Any]:
    """What a test asserts of a fault: everything but numbers, names and sentences."""
    shard = {key: value for key, value in fault["shard"].items() if key not in ("layout", "of")}
    return {
        "class": fault["class"],
        "layers": fault["layers"],
        "module": fault["module"],
        "modules": fault["modules"],
        "parts": fault["parts"],
        "shard": shard,
        "of": fault["shard"]["of"],
        "relation": fault["relation"]["kind"] if fault["relation"] else None,
    }
