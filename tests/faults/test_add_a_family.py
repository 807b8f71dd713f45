"""docs/add-a-family.md does what it says: its files are written, its commands run, in a temporary package that offers a family."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import ROOT

pytestmark = [pytest.mark.ranks, pytest.mark.wide]
PAGE = (ROOT / "docs/add-a-family.md").read_text()
STEPS = re.findall(r"(?:`([\w./]+)`:\n\n)?```(\w+(?: install)?)\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    tools, installed = tmp_path / "bin", tmp_path / "installed"
    tools.mkdir()
    (tools / "bisect-tool").write_text(f'#!/bin/sh\nexec {sys.executable} -m bisect_tool "$@"\n')
    (tools / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    paths = (str(ROOT), str(ROOT / "hooks"), str(installed))
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths)}

    def sh(commands: str) -> str:
        done = subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    said = ""
    for name, kind, text in STEPS:
        if name:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        elif kind == "sh install":  # into a directory of the test's own
            sh(f"python -m {text.strip()} --quiet --no-index --target {installed}")
        elif kind == "sh":
            said += sh(text)
    assert "unknown family: config.json has model_type 'qwen2_moe'" in said
    assert said.count("AGREES") == 1
    assert (red := PAGE.split("```\nFAULT")[1].split("\n")[0].strip()) and red in said
