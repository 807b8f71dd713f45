"""SARIF 2.1.0: a result a fault, a rule a class and relation.  What was not compared is a result of kind "open"."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bisect_tool.formats.page import Page, missing, sentence, title

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
RULES = {
    "conversion": "The checkpoint is not what the weight table makes of the reference",
    "model-definition": "The weights are right and the model computes another function",
    "parallel": "Right on one rank, wrong under the layout",
    "rollout": "The engine's weights or what it computes",
    "rollout-config": "Other tokens, sampling or definition of log-probs",
    "reference": "The reference itself is wrong",
    "capture": "What was recorded is not what was computed",
    "open": "The evidence does not tell whose fault it is",
    "incomparable": "Something expected was not compared",
}


def render(page: Page) -> str:
    """The page as one run of one tool."""
    results = [_result(fault, page, "error") for fault in page["faults"]]
    results += [_result(fault, page, "error" if page["verdict"] == "differs" and not page["faults"] else "note") for fault in page["minor"]]
    results += [_open(stage, line) for stage in page["stages"] if stage["verdict"] == "incomparable" for line in missing(stage)]
    rules = sorted({result["ruleId"] for result in results})
    for result in results:
        result["ruleIndex"] = rules.index(result["ruleId"])
    name, _, version = str(page["provenance"]["tool"]).partition(" ")
    driver = {"name": name, "version": version, "rules": [_rule(rule) for rule in rules]}
    command = page["provenance"].get("command")
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True} | ({"commandLine": str(command)} if command else {})],
        "results": results,
        "columnKind": "unicodeCodePoints",
        "properties": {"verdict": page["verdict"], "cleared": page.get("cleared", [])},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rule(rule: str) -> dict[str, Any]:
    cls, _, kind = rule.partition("/")
    text = RULES.get(cls, cls) + (f": {kind}" if kind else "")
    return {"id": rule, "shortDescription": {"text": text}}


def _result(fault: Page, page: Page, level: str) -> dict[str, Any]:
    cls = fault["class"] or "open"
    kind = fault["relation"]["kind"] if fault["relation"] else None
    mark = json.dumps([cls, kind, fault["between"], fault["site"], fault["layers"], fault["modules"], fault["parts"]])
    return {
        "ruleId": f"{cls}/{kind}" if kind else cls,
        "level": level,
        "kind": "fail",
        "message": {"text": f"{title(fault)}: {sentence(fault)}"},
        "locations": [_location(fault, page)],
        "partialFingerprints": {"fault/v1": hashlib.sha256(mark.encode()).hexdigest()},
        "properties": dict(fault),
    }


def _location(fault: Page, page: Page) -> dict[str, Any]:
    """The file or directory that is at fault, and the site in it."""
    come, side = page["provenance"], fault["between"][-1]
    found: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": str(fault["site"]), "kind": "module"}]}
    named = come.get("rollout") if side == "engine" else come.get(side)
    path = named or come.get("candidate") or come.get("reference")
    if path:
        found["physicalLocation"] = {"artifactLocation": {"uri": _uri(str(path).split(" (")[0].split(", ")[0])}}
    return found


def _uri(path: str) -> str:
    return Path(path).as_uri() if Path(path).is_absolute() else quote(path)


def _open(stage: Page, line: str) -> dict[str, Any]:
    site = {"logicalLocations": [{"fullyQualifiedName": str(stage["name"]), "kind": "module"}]}
    return {"ruleId": "incomparable", "level": "none", "kind": "open", "message": {"text": line}, "locations": [site]}
