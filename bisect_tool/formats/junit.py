"""JUnit XML, as Jenkins' schema (junit-10.xsd) has it: a test case a stage.

A stage that found faults has one failure, which lists them; one that was incomparable is an error, because it must not look like a
pass; one that was not run is skipped.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from bisect_tool.formats.page import Page, faults_of, missing, printable, sentence, title, why_not_run

SUITE = "bisect-tool"


def render(page: Page) -> str:
    """The page as one test suite."""
    suite = ElementTree.Element("testsuite", name=SUITE)
    for stage in page["stages"]:
        case = ElementTree.SubElement(suite, "testcase", classname=SUITE, name=_text(stage["name"]), time=f"{float(stage['seconds']):.3f}")
        _outcome(case, page, stage)
    minor = [fault for fault in page["minor"] if page["verdict"] == "differs" and not page["faults"]]
    if minor:  # --strict
        case = ElementTree.SubElement(suite, "testcase", classname=SUITE, name="minor", time="0.000")
        _say(case, "failure", "minor", [title(fault) for fault in minor], [sentence(fault) for fault in minor])
    for word, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(word, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    suite.set("time", f"{sum(float(stage['seconds']) for stage in page['stages']):.3f}")
    ElementTree.indent(suite, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _outcome(case: ElementTree.Element, page: Page, stage: Page) -> None:
    verdict, faults = stage["verdict"], faults_of(page, stage["name"])
    if verdict is None:
        ElementTree.SubElement(case, "skipped", message=_text(why_not_run(stage)))
    elif verdict == "differs":
        shown = [note for note in stage["notes"] if "they show" in note] or ["it shows a fault that an earlier stage found"]
        _say(case, "failure", "differs", [title(fault) for fault in faults] or shown[:1], [sentence(fault) for fault in faults] or shown)
    elif verdict != "agrees":
        _say(case, "error", "incomparable", missing(stage)[:1], missing(stage))


def _say(case: ElementTree.Element, tag: str, kind: str, titles: list[str], lines: list[str]) -> None:
    more = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
    ElementTree.SubElement(case, tag, type=kind, message=_text(titles[0] + more)).text = _text("\n".join(lines))


def _text(value: Any) -> str:
    return printable(str(value))
