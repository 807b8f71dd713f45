"""The case study: its page is of a run, and what it tells people to type is offered."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from bisect_tool.cli import cli

PAGE = Path(__file__).parent.parent / "docs/case-397b.md"


def commands() -> list[str]:
    """Every command line of the page, as blocks, as screens and in its tables."""
    text = PAGE.read_text()
    return sorted({one.strip().strip("`") for one in re.findall(r"bisect-tool (?:[a-z]+ )[^`|\n]*", text)})


@pytest.mark.parametrize("command", commands())
def test_what_the_page_says_to_type_is_offered(command: str) -> None:
    name, *words = shlex.split(command)[1:]
    offered = {flag for one in cli.commands[name].params if isinstance(one, click.Option) for flag in one.opts}
    assert {word for word in words if word.startswith("--")} <= offered


def test_the_page_tells_of_a_whole_run() -> None:
    text = PAGE.read_text()
    for words in (
        "expert e holds the reference's expert e mod 4; 12 of 16 are",
        "expert e mod 32",
        "480 of 512",
        "AGREES",
        "DIFFERS: 1 fault.",
    ):
        assert words in text
    assert not re.search(r"\bNone\b|\{|\}", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
