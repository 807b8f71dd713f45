"""The report's other views: each made from report.json alone, well formed, and none the worse for what a page holds."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file

from bisect_tool import golden
from bisect_tool.__main__ import run
from bisect_tool.formats.rendering import FORMATS

ROOT = Path(__file__).parent.parent
HOSTILE = "</td><script>alert(1)</script>\x00\x1b[31m\x07\ud800 %0A::error::]]>&amp;\"'\r\nsecond line, with: commas"
Page = dict[str, Any]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An audit of an export with E01 in it: expert e holds expert e mod 4."""
    folder = tmp_path_factory.mktemp("faulty")
    shutil.copytree(golden.reference(), folder / "export")
    for file in (folder / "export").glob("*.safetensors"):
        tensors = {
            name: one[torch.arange(len(one)) % 4] if ".mlp.experts." in name and one.dim() == 3 else one
            for name, one in load_file(file).items()
        }
        save_file({name: one.contiguous() for name, one in tensors.items()}, file, {"format": "pt"})
    audit = ["audit", "--reference", str(golden.reference()), "--export", str(folder / "export"), "--out", str(folder / "report")]
    assert run(audit) == 1
    return folder / "report"


def agreeing(folder: Path) -> Path:
    (folder / "report.json").write_text((golden.folder() / "expected-report.json").read_text())
    return folder


def changed(source: Path, folder: Path, change: Any) -> Path:
    page = json.loads((source / "report.json").read_text())
    change(page)
    (folder / "report.json").write_text(json.dumps(page))
    return folder


def incomparable(page: Page) -> None:
    page["verdict"], page["first"], page["faults"] = "incomparable", None, []
    page["stages"][2] |= {"verdict": "incomparable", "notes": ["not compared: a.weight: it is not there"]}


def hostile(thing: Any) -> Any:
    """The same page with other people's words in every text that a view may show."""
    if isinstance(thing, dict):
        return {key: value if key in KEPT else hostile(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [hostile(one) for one in thing]
    return f"{thing}{HOSTILE}" if isinstance(thing, str) else thing


KEPT = ("schema", "verdict", "class", "kind", "name", "stage", "versions")


def said(directory: Path, form: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run(["report", str(directory), "--format", form]) == 0
    return capsys.readouterr().out


# -- junit ----------------------------------------------------------------------------------------------------------------------

# Jenkins' junit-10.xsd: attributes of a suite and of a case, and what a case may hold
SUITE = {"name", "tests", "failures", "errors", "group", "time", "skipped", "timestamp", "hostname", "id", "package", "file", "log", "url", "version"}  # fmt: skip
CASE = {"name", "time", "classname", "group", "assertions", "status", "class", "file", "line"}
OUTCOMES = {"skipped", "error", "failure"}


def suite_of(text: str) -> ElementTree.Element:
    """The suite, checked against the schema's rules."""
    suite = ElementTree.fromstring(text.encode())
    assert suite.tag == "testsuite" and {"name", "tests"} <= set(suite.attrib) <= SUITE
    for case in suite:
        assert case.tag == "testcase" and {"name", "classname"} <= set(case.attrib) <= CASE
        assert {one.tag for one in case} <= OUTCOMES and all(set(one.attrib) <= {"type", "message"} for one in case)
        assert re.fullmatch(r"\d+\.\d+", case.attrib["time"])
    for word, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert int(suite.attrib[word]) == len(list(suite.iter(tag)))
    assert int(suite.attrib["tests"]) == len(suite)
    return suite


def outcomes(suite: ElementTree.Element) -> dict[str, str]:
    return {case.attrib["name"]: case[0].tag if len(case) else "passed" for case in suite}


def test_junit_has_a_case_a_stage(faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idle = {name: "skipped" for name in ("inputs", "config", "forward", "engine")}
    suite = suite_of(said(faulty, "junit", capsys))
    assert outcomes(suite) == idle | {"weights": "failure"}
    assert "slime#1799" in (next(suite.iter("failure")).text or "")
    gap = suite_of(said(changed(faulty, tmp_path, incomparable), "junit", capsys))
    assert outcomes(gap) == idle | {"weights": "error"}
    good = suite_of(said(agreeing(tmp_path), "junit", capsys))
    assert outcomes(good) == {"inputs": "passed", "config": "passed", "weights": "passed", "forward": "passed", "engine": "skipped"}


def test_junit_counts_what_strict_counts(faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def only_minor(page: Page) -> None:
        page["minor"], page["faults"], page["first"] = page["faults"], [], None
        page["stages"][2]["verdict"] = "agrees"

    suite = suite_of(said(changed(faulty, tmp_path, only_minor), "junit", capsys))
    assert outcomes(suite)["minor"] == "failure"


# -- sarif ----------------------------------------------------------------------------------------------------------------------


def checked(log: Page) -> Page:
    """The one run of a log that has what SARIF 2.1.0 requires of the objects that we write, and their enumerations."""
    assert {"version", "runs"} <= set(log) and log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (one,) = log["runs"]
    driver = one["tool"]["driver"]
    assert driver["name"] == "bisect-tool" and all(re.fullmatch(r"\S+", rule["id"]) for rule in driver["rules"])
    assert all(rule["shortDescription"]["text"] for rule in driver["rules"])
    assert one["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    assert all(isinstance(invocation["executionSuccessful"], bool) for invocation in one["invocations"])
    for result in one["results"]:
        assert result["message"]["text"] and driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["kind"] in ("notApplicable", "pass", "fail", "review", "open", "informational")
        assert result["level"] in ("none", "note", "warning", "error") and (result["kind"] == "fail" or result["level"] == "none")
        for place in result["locations"]:
            assert all(isinstance(logical["fullyQualifiedName"], str) for logical in place["logicalLocations"])
            uri = place.get("physicalLocation", {}).get("artifactLocation", {}).get("uri", "x")
            assert re.fullmatch(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]+", uri)
        assert all(isinstance(value, str) for value in result.get("partialFingerprints", {}).values())
    return dict(one)


def test_sarif_has_a_result_a_fault_and_an_open_one_a_gap(faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = checked(json.loads(said(faulty, "sarif", capsys)))["results"]
    assert (result["ruleId"], result["level"]) == ("conversion/duplicate", "error")
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "layers.0.experts.fc1"
    assert result["properties"]["relation"]["detail"]["modulus"] == 4
    gap = checked(json.loads(said(changed(faulty, tmp_path, incomparable), "sarif", capsys)))["results"]
    assert [(one["ruleId"], one["kind"], one["message"]["text"]) for one in gap] == [
        ("incomparable", "open", "not compared: a.weight: it is not there")
    ]
    assert checked(json.loads(said(agreeing(tmp_path), "sarif", capsys)))["results"] == []


# -- github ---------------------------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[tuple[str, str, str]]:
    """What a runner makes of a log: (command, title, message)."""
    for line in text.splitlines():
        command, heading, message = re.fullmatch(r"::(error|warning|notice) title=([^:,]*)::(.*)", line).groups()  # type: ignore[union-attr]
        yield command, back(heading), back(message)


def back(text: str) -> str:
    for code, sign in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, sign)
    return text


def test_github_has_a_command_a_fault_and_one_for_a_gap(faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((command, heading, message),) = commands(said(faulty, "github", capsys))
    assert (command, heading) == ("error", "conversion fault at layers.0.experts.fc1 (duplicate)") and "e mod 4" in message
    ((command, heading, message),) = commands(said(changed(faulty, tmp_path, incomparable), "github", capsys))
    assert (command, heading, message) == ("warning", "weights: incomparable", "not compared: a.weight: it is not there")
    assert [one[:2] for one in commands(said(agreeing(tmp_path), "github", capsys))] == [("notice", "bisect-tool: agrees")]


# -- html -----------------------------------------------------------------------------------------------------------------------

VOID = {"meta", "br"}
TAGS = {
    *("html", "head", "title", "style", "body", "h1", "h2", "span", "section", "p", "strong", "table", "tr", "th", "td"),
    *VOID,
}


class Reader(HTMLParser):
    """Every tag is one of ours, closed in order, and asks for nothing from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS and not {name for name, _ in attrs} - {"class", "charset", "content", "http-equiv", "lang", "name"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "url(" not in data and "@import" not in data
        self.text += data


def read(text: str) -> str:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader.text


def test_html_is_one_page_with_the_fault_its_proof_and_what_is_cleared(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = read(said(faulty, "html", capsys))
    for words in (
        "expert e holds the reference's expert e mod 4",
        "'e mod 8' leaves 8 of 16 experts different",
        "equal byte by byte, in every layer",
    ):
        assert words in text


# -- all of them ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_words_of_other_people_stay_words(form: str, faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(changed(faulty, tmp_path, lambda page: page.update(hostile(copy.deepcopy(page)))), form, capsys)
    if form == "junit":
        suite_of(text)
    elif form == "sarif":
        checked(json.loads(text))
    elif form == "github":
        assert len(list(commands(text))) == 1
    elif form == "html":
        assert "<script>alert(1)</script>" in read(text)
    assert not {"\x1b", "\x07", "\x00"} & set(text)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "json"])
@pytest.mark.parametrize("lacking", ["faults", "stages", "provenance"])
def test_half_a_page_is_one_clear_error(form: str, lacking: str, faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(faulty, tmp_path, lambda page: page.update({lacking: [{}]}))
    capsys.readouterr()
    code, printed = run(["report", str(tmp_path), "--format", form]), capsys.readouterr()
    if code != 0:  # a view that shows nothing of it may well be made
        assert code == 2 and printed.err.startswith("Error: ") and printed.err.count("\n") == 1 and "is damaged" in printed.err
    assert (code, form, lacking) in {(2, form, lacking), (0, "junit", "provenance"), (0, "github", "provenance")}


def test_several_formats_are_files_and_one_goes_to_stdout(faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(faulty), "--format", "text,json,html,junit,sarif,github"]) == 0
    printed = capsys.readouterr().out
    assert "::error title=" in printed and f"wrote {faulty / 'report.html'}" in printed
    assert {file.name for file in faulty.iterdir()} == {"report.json", *(name for name, _ in FORMATS.values() if name)}
    assert run(["report", str(faulty), "--format", "junit", "--out", str(tmp_path / "ci")]) == 0
    suite_of((tmp_path / "ci" / "report.junit.xml").read_text())
    # a run may write its report over all of them
    audit = ["audit", "--reference", str(golden.reference()), "--export", str(golden.reference()), "--out", str(faulty)]
    before = (faulty / "report.json").read_text()
    assert run(audit) == 0
    (faulty / "report.json").write_text(before)


def test_a_format_that_nobody_knows_is_refused(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(faulty), "--format", "text,pdf"]) == 2
    assert "unknown format 'pdf' known: text, json, html, junit, sarif, github" in " ".join(
        capsys.readouterr().err.replace(";", "").split()
    )
