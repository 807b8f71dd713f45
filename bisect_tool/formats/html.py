"""One self-contained page of HTML: no script, nothing loaded from anywhere, every word of the report escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from bisect_tool.formats.page import Page, printable, why_not_run

STYLE = """
:root { color-scheme: light dark; --bad: #b3261e; --good: #1b6e3c; --open: #8a6100; --line: #8886; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 span, td.differs { color: var(--bad); } h1 span.agrees, td.agrees { color: var(--good); }
h1 span.incomparable, td.incomparable { color: var(--open); }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; } th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
th { font-weight: 600; white-space: nowrap; } code, pre { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
section.fault { border-left: 4px solid var(--bad); padding: .1rem 1rem; margin: 1rem 0; } section.minor { border-color: var(--open); }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a80; --good: #7bd88f; --open: #ffd166; } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
WORDS = {"agrees": "agrees", "differs": "differs", "incomparable": "incomparable"}


def render(page: Page) -> str:
    """The page: verdict, faults, what is cleared, stages, answers, where everything comes from."""
    verdict = WORDS[page["verdict"]]
    body = [
        f'<h1>bisect-tool: <span class="{verdict}">{verdict}</span></h1>',
        *(_fault(fault, "fault") for fault in page["faults"]),
        *(_fault(fault, "fault minor") for fault in page["minor"]),
        *_section("Cleared", ("suspect", "why", "stage"), ((one["suspect"], one["why"], one["stage"]) for one in page.get("cleared", ()))),
        "<h2>Stages</h2>",
        _table(("stage", "verdict", "compared", "seconds", "notes"), (_stage(stage) for stage in page["stages"])),
        *_section("Answers", ("prompt", "reference", "candidate"), ((one["prompt"], one["reference"], one["candidate"]) for one in page.get("answers", ()))),
        "<h2>Where it comes from</h2>",
        _table((), ((f"<th>{_text(key)}</th>", _cell(value)) for key, value in page["provenance"].items() if value not in (None, {}, []))),
    ]  # fmt: skip
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>bisect-tool: {verdict}</title><style>{STYLE}</style>'
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _section(heading: str, columns: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    cells = [tuple(_cell(value) for value in row) for row in rows]
    return [f"<h2>{heading}</h2>", _table(columns, cells)] if cells else []


def _fault(fault: Page, kind: str) -> str:
    difference, tolerance = fault["difference"], fault["tolerance"]
    rows = [
        ("class", fault["class"] or f"open: {', '.join(fault.get('class_candidates') or [])}"),
        ("site", fault["site"]),
        ("piece", fault.get("piece")),
        ("layers", fault["layers"]),
        ("modules", fault["modules"]),
        ("parts", fault["parts"]),
        ("shard", fault["shard"]),
        ("difference", {**difference, "allowed": tolerance["relative_rms"], "allowed by": tolerance["source"]}),
        ("relation", fault["relation"]),
        *((side, names) for side, names in fault["tensors"].items()),
        ("shows at", fault["shows_at"]),
        ("proof", fault["proof"]),
        ("next", fault["next"]),
    ]
    cells = ((f"<th>{name}</th>", _cell(value)) for name, value in rows if value not in (None, [], {}, ""))
    return f'<section class="{kind}"><p><strong>{_text(fault["explanation"])}</strong></p>{_table((), cells)}</section>'


def _stage(stage: Page) -> tuple[str, ...]:
    verdict = stage["verdict"]
    notes = [*stage["probes"], *stage["notes"], *(f"left out: {one['what']}: {one['why']}" for one in stage["skipped"])]
    counts = ", ".join(f"{count} {what}" for what, count in stage["compared"].items())
    if verdict is None:
        return (_cell(stage["name"]), "<td>not run</td>", _cell(""), _cell(""), _cell(why_not_run(stage)))
    return (
        _cell(stage["name"]),
        f'<td class="{WORDS[verdict]}">{WORDS[verdict]}</td>',
        _cell(counts),
        _cell(stage["seconds"]),
        _cell(notes),
    )


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head = f"<tr>{''.join(f'<th>{_text(name)}</th>' for name in columns)}</tr>" if columns else ""
    body = "".join("<tr>" + "".join(row) + "</tr>" for row in rows)
    return f"<table>{head}{body}</table>"


def _cell(value: Any) -> str:
    """A value of a page: lists a line each, tables as name: value."""
    if isinstance(value, dict):
        lines = [f"{name}: {_words(one)}" for name, one in value.items() if one not in (None, [], {}, "")]
    elif isinstance(value, list) and all(isinstance(one, str) for one in value):
        lines = value
    else:
        lines = [_words(value)]
    return f"<td>{'<br>'.join(map(_text, lines))}</td>"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    return ", ".join(map(_words, value)) if isinstance(value, list) else str(value)


def _text(value: Any) -> str:
    return escape(printable(str(value)), quote=True)
