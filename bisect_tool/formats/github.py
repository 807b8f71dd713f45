"""GitHub's workflow commands: an annotation a fault, which a job's log shows wherever it is printed."""

from __future__ import annotations

from bisect_tool.formats.page import Page, missing, printable, sentence, title


def render(page: Page) -> str:
    """One line a fault, a minor finding and a gap; a notice where everything agrees."""
    strict = page["verdict"] == "differs" and not page["faults"]
    lines = [_command("error", title(fault), sentence(fault)) for fault in page["faults"]]
    lines += [_command("error" if strict else "notice", f"minor: {title(fault)}", sentence(fault)) for fault in page["minor"]]
    for stage in page["stages"]:
        if stage["verdict"] == "incomparable":
            lines.append(_command("warning", f"{stage['name']}: incomparable", "\n".join(missing(stage))))
    if page["verdict"] == "agrees":
        ran = ", ".join(stage["name"] for stage in page["stages"] if stage["verdict"] is not None)
        lines.append(_command("notice", "bisect-tool: agrees", f"everything expected was compared and agrees ({ran})"))
    return "".join(f"{line}\n" for line in lines)


def _command(kind: str, heading: str, text: str) -> str:
    return f"::{kind} title={_property(heading)}::{_data(text)}"


def _data(text: str) -> str:
    """A command is one line; runners turn these back."""
    return printable(str(text)).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
