"""What several views ask of a report page.  A page may be somebody else's: everything in it is text to be escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Page = Mapping[str, Any]
# what XML 1.0 has no place for, however it is escaped
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def faults_of(page: Page, stage: str) -> list[Page]:
    """The faults that a stage found first; of a page that does not say which, all are the first stage's that differs."""
    differing = next((one["name"] for one in page["stages"] if one["verdict"] == "differs"), None)
    return [fault for fault in page["faults"] if fault.get("stage", differing) == stage]


def sentence(fault: Page) -> str:
    """What is wrong and what to do about it."""
    return f"{fault['explanation']} {fault['next']}".strip()


def title(fault: Page) -> str:
    """A fault in a few words: its class, where it is, what relation holds."""
    kind = fault["relation"]["kind"] if fault["relation"] else None
    cls = fault["class"] or " or ".join(fault.get("class_candidates") or ["open"])
    return f"{cls} fault at {fault['site']}" + (f" ({kind})" if kind and kind != "unknown" else "")


def missing(stage: Page) -> list[str]:
    """Why a stage could not tell."""
    said = [note for note in stage["notes"] if note.startswith(("not compared: ", "open: "))]
    return said or [f"{one['what']}: {one['why']}" for one in stage["skipped"]] or ["something expected was not compared"]


def why_not_run(stage: Page) -> str:
    """Why a stage has no verdict."""
    return "; ".join(str(one["why"]) for one in stage["skipped"]) or "not run"


def printable(text: str) -> str:
    """The text with a replacement where XML has no character."""
    return FORBIDDEN.sub("\ufffd", text)
