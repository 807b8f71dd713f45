"""Regenerate what golden/ keeps of the embedded model: `make golden`.

The conversion (kept as it is when every tensor and every argument is the same: megatron-core's .metadata holds a random id), the
reference Recording that the gate holds candidates against, and the report that `run` is expected to write.  Bit for bit the
same on the same machine.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bisect_hooks.parallel import Parallel

from bisect_tool.checkpoint import open_checkpoint
from bisect_tool.conversion import convert
from bisect_tool.ladder import Job, climb
from bisect_tool.ranks import WORLDS
from bisect_tool.recorded import record
from bisect_tool.reference_recording import RECORDING

HERE = Path(__file__).resolve().parent
MODEL, CONVERTED = "golden/tiny-qwen3.5-moe", "golden/tiny-qwen3.5-moe-torch_dist"


def same_checkpoint(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same args and tensors."""
    a, b = open_checkpoint(one), open_checkpoint(other)
    return a.args == b.args and a.tensors.keys() == b.tensors.keys() and all(torch.equal(a.read(key), b.read(key)) for key in a.tensors)


def expected_page(job: Job) -> dict[str, Any]:
    """The report without what differs from run to run or from machine to machine."""
    page = climb(job).to_json()
    for stage in page["stages"]:
        stage["seconds"] = 0
    page["provenance"]["versions"] = {}
    return page


def main() -> int:
    """Regenerates golden/."""
    os.chdir(HERE.parent)
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "converted"
        convert(Path(MODEL), fresh, "slime", Parallel(), None)
        if not Path(CONVERTED).is_dir() or not same_checkpoint(fresh, Path(CONVERTED)):
            shutil.rmtree(CONVERTED, ignore_errors=True)
            shutil.copytree(fresh, CONVERTED)
    job = Job(Path(MODEL), Path(CONVERTED), "golden/gate-prompts.jsonl", command="make golden")
    sys.stdout.write(record(job, "reference", HERE / RECORDING) + "\n")
    job = Job(Path(MODEL), Path(CONVERTED), "golden/prompts.jsonl", command="bisect-tool run --prompts golden/prompts.jsonl")
    (HERE / "expected-report.json").write_text(json.dumps(expected_page(job), indent=1) + "\n")
    WORLDS.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
