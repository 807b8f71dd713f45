"""The formats that `bisect-tool report` knows: one goes to stdout, several are files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from bisect_hooks.errors import UsageError

from bisect_tool import text
from bisect_tool.formats import github, html, junit, sarif
from bisect_tool.formats.page import Page
from bisect_tool.report import FILE

FORMATS: dict[str, tuple[str, Callable[[Page], str]]] = {
    "text": ("report.txt", text.render),
    "json": ("report.json", lambda page: json.dumps(page, indent=1) + "\n"),
    "html": ("report.html", html.render),
    "junit": ("report.junit.xml", junit.render),
    "sarif": ("report.sarif", sarif.render),
    "github": ("", github.render),
}
# these only work where a job's log shows them
PRINTED = ("github",)


def named(formats: str) -> list[str]:
    """The formats of a list such as "html,junit".  Raises UsageError."""
    names = [word.strip() for word in formats.split(",") if word.strip()]
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        raise UsageError(f"unknown format {(unknown or [formats])[0]!r}", hint=f"known: {', '.join(FORMATS)}")
    return list(dict.fromkeys(names))


def rendered(page: Page, name: str, source: Path) -> str:
    """The page in one format.  Raises UsageError for a page that is none."""
    try:
        return FORMATS[name][1](page)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(f"{source} is damaged: {type(error).__name__} {error}", hint="run again") from error


def put(page: Page, names: Sequence[str], source: Path, out: Path | None) -> list[str]:
    """What goes to stdout, in order.  With `out`, or for several formats, all others are files (in `source` without `out`)."""
    to_files = out is not None or len(names) > 1
    folder = out or source
    pages = {name: rendered(page, name, source / FILE) for name in names}
    printed = []
    for name, said in pages.items():
        file = folder / FORMATS[name][0]
        if name in PRINTED or not to_files:
            printed.append(said)
        elif file.resolve() != (source / FILE).resolve():  # the page itself is there already
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(said)
            printed.append(f"wrote {file}\n")
    return printed
