"""The terminal report, made from a report page.  One screen: what was compared, the floor, the probes, the fault, what to do."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

WIDTH = 118
# what moves a cursor or changes a colour: answers and names are other people's
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
# what tells any two float32 apart
MOST_DIGITS = 9
# suspects that a screen lists
SHOWN = 8
# what the engine stage was given
ENGINE = ("rollout", "train", "server", "hashes", "received", "consumed", "recordings")
# notes that are said again under what is cleared
RESTATED = "inert here: "


def render(page: Mapping[str, Any]) -> str:
    """The page as text."""
    lines = [*_sides(page), "", *_stages(page)]
    for number, fault in enumerate(page["faults"], 1):
        lines += ["", *_fault(fault, number if len(page["faults"]) > 1 else 0)]
        if number == 4 and len(page["faults"]) > 5:
            lines += ["", f"and {len(page['faults']) - 4} more faults, in report.json"]
            break
    lines += _cleared(page)
    for fault in page["minor"]:
        counted = "--strict counts it." if page["verdict"] == "differs" and not page["faults"] else "It changes no verdict."
        lines += ["", *_wrapped("minor", f"{fault['explanation']} {counted}")]
    for answer in page.get("answers", ()):
        lines += ["", *_wrapped("answer", f"to {answer['prompt']!r}: reference {answer['reference']!r}, candidate {answer['candidate']!r}")]
    return CONTROL.sub("\ufffd", "\n".join([*lines, "", *_conclusion(page)])) + "\n"


def _sides(page: Mapping[str, Any]) -> list[str]:
    come = page["provenance"]
    versions = come.get("versions", {})
    sizes = ", ".join(f"{axis} {size}" for axis, size in (come.get("parallel") or {}).items() if size and size != 1) or "one rank"
    questions = {"fp32": "fp32 both sides: is it the same function?", "bf16": "bf16 both sides: is it the same rounding?", None: ""}
    asked = questions.get(come.get("dtype"), str(come.get("dtype")))
    lines = [f"reference  {come.get('reference')}" + (f"  transformers {versions['transformers']}" if "transformers" in versions else "")]
    if come.get("candidate"):
        lines.append(
            f"candidate  {come['candidate']}"
            + (f"  megatron-core {versions['megatron-core']}" if "megatron-core" in versions else "")
            + f"  {come.get('layout') or ''}  {sizes}".rstrip()
        )
    lines += [f"{name:<10} {come[name]}" for name in ("launch", "export", *ENGINE) if come.get(name)]
    if come.get("prompts"):
        lines.append(f"prompts    {come['prompts']}" + (f"  {asked}" if asked else ""))
    return lines


def _stages(page: Mapping[str, Any]) -> list[str]:
    lines, number = [], 0
    for stage in page["stages"]:
        if stage["verdict"] is None:
            continue
        counts = ", ".join(f"{count} {what}" for what, count in stage["compared"].items()) or "-"
        lines.append(f"{stage['name']:<9}  {stage['verdict']:<12}  {counts}  {stage['seconds']:.1f} s")
        for probe in stage["probes"]:
            number += 1
            lines += _wrapped(f"  {number:>2}", probe, indent=5)
        most = 6 if page["faults"] else 12
        notes = [note for note in stage["notes"] if not note.startswith(RESTATED)]
        for note in notes[:most]:
            lines += _wrapped("  note", note, indent=7)
        if len(notes) > most:
            lines.append(f"  note and {len(notes) - most} more notes, in report.json")
        for one in stage["skipped"][:4]:
            lines += _wrapped("  left out", f"{one['what']}: {one['why']}", indent=11)
    return lines


def _fault(fault: Mapping[str, Any], number: int) -> list[str]:
    difference, tolerance = fault["difference"], fault["tolerance"]
    lines = _wrapped(f"FAULT {number}" if number else "FAULT", fault["explanation"])
    if difference["compared"]:
        at = "".join(f"[{i}]" for i in difference["index"])
        place = f"{fault['site']}:{fault['piece']}" if "piece" in fault else fault["site"]
        values = zip(fault["between"], _apart(difference["reference_value"], difference["candidate_value"]), strict=True)
        lines += _wrapped(
            "  at", f"{place}: {_short(difference['relative_rms'])} relative rms (up to {_short(tolerance['relative_rms'])} allowed: {tolerance['source']}); "
            f"largest at {at}: {', '.join(f'{side} {value}' for side, value in values)}",
        )  # fmt: skip
    names = fault["tensors"]
    for side, word in zip(("reference", "candidate"), fault["between"], strict=True):
        if names[side]:
            more = f" and {len(names[side]) - 2} more" if len(names[side]) > 2 else ""
            lines += _wrapped(f"  {word}", ", ".join(names[side][:2]) + more)
    shape = fault.get("shape")
    if shape and shape["text"] not in fault["explanation"]:
        lines += _wrapped("  tokens", shape["text"])
    if fault["shows_at"]:
        lines += _wrapped("  shows at", fault["shows_at"])
    if fault["proof"]:
        proof = fault["proof"]
        levels = f": {_short(proof['before'])} → {_short(proof['after'])}" if proof["before"] is not None else ""
        lines += _wrapped("  proof", f"{proof['experiment']}{levels}")
        lines += _wrapped("  control", proof["control"])
    return lines + _wrapped("  next", fault["next"])


def _cleared(page: Mapping[str, Any]) -> list[str]:
    """What is no longer a suspect: the same suspect once, with every reason."""
    reasons: dict[str, dict[str, None]] = {}
    for one in page.get("cleared", ()):
        reasons.setdefault(one["suspect"], {})[one["why"]] = None
    lines = [line for suspect, why in list(reasons.items())[:SHOWN] for line in _wrapped("cleared", f"{suspect}: {'; '.join(why)}")]
    more = len(reasons) - SHOWN
    return ["", *lines, *([f"{'':<13}and {more} more suspects, in report.json"] if more > 0 else [])] if lines else []


def _conclusion(page: Mapping[str, Any]) -> list[str]:
    idle = [(stage["name"], stage["skipped"][0]["why"]) for stage in page["stages"] if stage["verdict"] is None and stage["skipped"]]
    by_reason: dict[str, list[str]] = {}
    for name, why in idle:
        by_reason.setdefault(why, []).append(name)
    lines = [line for why, names in by_reason.items() for line in _wrapped("not looked at", f"{', '.join(names)} ({why})")]
    said = {
        "agrees": "AGREES: everything expected was compared and agrees.",
        "differs": f"DIFFERS: {len(page['faults'])} fault{'s' if len(page['faults']) != 1 else ''}."
        if page["faults"]
        else f"DIFFERS: {len(page['minor'])} minor, which --strict counts.",
        "incomparable": "INCOMPARABLE: no fault found, and something expected was not compared; it is listed above.",
    }[page["verdict"]]
    return [*lines, said]


def _wrapped(label: str, text: str, indent: int = 13) -> list[str]:
    body = textwrap.wrap(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{label:<{indent - 1}} {body[0]}", *(" " * indent + line for line in body[1:])]


def _apart(one: Any, other: Any) -> tuple[str, str]:
    """Two values, in as many digits as tell them apart: two to MOST_DIGITS."""
    if not isinstance(one, float) or not isinstance(other, float):
        return _short(one), _short(other)
    shown = [(f"{one:.{digits}g}", f"{other:.{digits}g}") for digits in range(2, MOST_DIGITS + 1)]
    return next((pair for pair in shown if pair[0] != pair[1]), shown[0] if one == other else shown[-1])


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)
