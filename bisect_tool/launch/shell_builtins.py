"""The commands that bash itself does, as far as they set variables or print: echo, printf, source, test, cd and a few more.

Everything else is a command to the outside: it is listed, never run.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bisect_tool.launch.flags import FLAGS, says_flags
from bisect_tool.launch.shell_assign import NAMED, forget_set, put_named, without_element
from bisect_tool.launch.shell_tests import Condition
from bisect_tool.launch.shell_words import LONGEST, single
from bisect_tool.launch.words import Leave, Undecided, Where, Word, known, refuse, script_text

if TYPE_CHECKING:
    from bisect_tool.launch.shell import Shell

# sourced for the environment they set up, not for flags
ENVIRONMENTS = re.compile(
    r"activate|\.bashrc|\.profile|\.bash_profile|set_?env\S*\.sh|setvars\.sh|conda\.sh|nvm\.sh|\.env|cann\S*\.sh", re.IGNORECASE
)
# of these, those that say only where programs are
PROGRAMS = re.compile(r"activate|setvars\.sh|conda\.sh|nvm\.sh|cann\S*\.sh", re.IGNORECASE)
READERS = {"cat", "ls", "grep", "head", "tail", "wc", "diff", "stat", "file", "md5sum", "sha256sum", "chmod", "awk", "less", "which"}
Builtin = Callable[["Shell", list[Word], Where], "bool | None"]


def _say(shell: Shell, text: str) -> bool:
    if shell.output is not None:
        shell.output.append(text)
        if sum(map(len, shell.output)) > LONGEST:
            raise Undecided("it prints without end")
    return True


def _echo(shell: Shell, words: list[Word], _where: Where) -> bool | None:
    if shell.output is None:
        return True
    texts, options = known(words), ""
    while texts and re.fullmatch(r"-[neE]+", texts[0]):
        options += texts.pop(0)[1:]
    if "e" in options and any("\\" in one for one in texts):
        raise Undecided("the escapes of echo -e are not read")
    return _say(shell, " ".join(texts) + ("" if "n" in options else "\n"))


def _printf(shell: Shell, words: list[Word], where: Where) -> bool | None:
    if words[:1] and words[0].text == "-v" and len(words) > 2:
        name = _plainly(words[1], where)
        rest = words[2:] if words[2].text != "--" else words[3:]
        try:
            put_named(shell, name, Word(formatted(*_known_format(rest)), where))
        except Undecided as undecided:
            put_named(shell, name, Word(f"${{{name}}}", where, undecided.why))
        return True
    return True if shell.output is None else _say(shell, formatted(*_known_format([one for one in words if one.text != "--"])))


def _plainly(word: Word, where: Where) -> str:
    """A word that says what is set.  Raises UsageError for one that is not known: it could be anything."""
    if word.unknown:
        raise refuse(where, f"what is set here is not known: {word.unknown}")
    return word.text


def _known_format(words: list[Word]) -> tuple[str, list[str]]:
    texts = known(words)
    return (texts[0], texts[1:]) if texts else ("", [])


def formatted(pattern: str, arguments: list[str]) -> str:
    """printf: the format is used again until every argument is.  Raises Undecided for a conversion that is not read."""
    pieces = re.split(r"(%[-0 ]*\d{0,4}(?:\.\d{0,4})?[a-zA-Z]|%%)", pattern)
    made, left = "", list(arguments)
    while True:
        before = len(left)
        for piece in pieces:
            if piece == "%%":
                made += "%"
            elif piece.startswith("%"):
                made += _converted(piece, left.pop(0) if left else "")
            elif "%" in piece:
                raise Undecided(f"printf {pattern!r} is not read")
            else:
                if re.search(r"\\[^nt\\'\"]", piece):
                    raise Undecided(f"printf {pattern!r} is not read")
                made += re.sub(r"\\(.)", lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), piece)
        if not left or len(left) == before or len(made) > LONGEST:
            return made


def _converted(conversion: str, text: str) -> str:
    kind, spec = conversion[-1], conversion[:-1]
    try:
        if kind == "s" or (kind == "b" and "\\" not in text):
            return (spec + "s") % text
        if kind in "di" and not re.match(r"[-+]?0\d", text):
            return (spec + "d") % int(text or "0")
        if kind in "fgeE":
            return (spec + kind) % float(text or "0")
    except ValueError:
        pass
    raise Undecided(f"printf {conversion} of {text[:40]!r} is not read")


def _test(shell: Shell, words: list[Word], _where: Where) -> bool | None:
    inside = words[:-1] if words and words[-1].text == "]" else words
    return shell.decided(lambda: Condition(inside, False).value())


def _cd(shell: Shell, words: list[Word], _where: Where) -> bool | None:
    words = [word for word in words if word.text not in ("--", "-P", "-L")]
    if not words or words[0].unknown or words[0].text in ("", "-"):
        shell.directory = None
        return True
    shell.directory = posixpath.normpath(posixpath.join(shell.directory or str(shell.script.absolute().parent), words[0].text))
    return True


def _pwd(shell: Shell, _words: list[Word], _where: Where) -> bool | None:
    if shell.directory is None:
        raise Undecided("the working directory is not known")
    return _say(shell, shell.directory + "\n")


def _path(change: Callable[[str], str]) -> Builtin:
    def named(shell: Shell, words: list[Word], _where: Where) -> bool | None:
        if shell.output is None:
            return True
        texts = [text for text in known(words) if not text.startswith("-")]
        if len(texts) != 1:
            raise Undecided("more than one path")
        return _say(shell, change(texts[0]) + "\n")

    return named


def _seq(shell: Shell, words: list[Word], _where: Where) -> bool | None:
    texts, between = known(words), "\n"
    while texts and texts[0].startswith("-s"):
        first = texts.pop(0)
        between = first[2:] or texts.pop(0)
    try:
        numbers = [int(text) for text in texts]
    except ValueError:
        raise Undecided("seq of no whole numbers") from None
    if not 1 <= len(numbers) <= 3:
        raise Undecided("seq without numbers")
    low, step, high = ([1, 1, *numbers], [numbers[0], 1, numbers[-1]], numbers)[len(numbers) - 1]
    if step == 0 or abs(high - low) // abs(step) > LONGEST // 8:
        raise Undecided("seq without end")
    return _say(shell, between.join(map(str, range(low, high + (1 if step > 0 else -1), step))) + "\n")


def _source(shell: Shell, words: list[Word], where: Where) -> bool | None:
    """Follows a sourced file: beside the script, or up from it."""
    if not words:
        return True
    named = words[0].text
    if named.startswith(("<(", "/dev/")):
        raise refuse(where, f"{named[:40]}: what a command prints is sourced, and no command is run")
    if ENVIRONMENTS.search(posixpath.basename(named)):
        if not PROGRAMS.search(posixpath.basename(named)):
            shell.passed.append(f"{where} sources {named}")
        return True
    if words[0].unknown:
        tail = re.sub(r"^.*\}/?", "", named)
        file = _find(shell, tail) if tail and "$" not in tail else None
    else:
        file = _find(shell, named)
    if file is None:
        shell.missing.append(f"{where} sources {named}")
        return None
    _unwritten(shell, file, where)
    outside = shell.arguments
    if len(words) > 1:
        shell.arguments = words[1:]
    try:
        return shell.read(script_text(file), file)
    except Leave as leave:
        if leave.kind != "return":
            raise
        return None
    finally:
        shell.arguments = outside


def _unwritten(shell: Shell, file: Path, where: Where) -> None:
    """Raises UsageError where a line before this one writes the file, or gives its name to a command that may."""
    redirected = [(single(one, shell), one.where) for one in shell.targets if one.where.file != where.file or one.where.line < where.line]
    named = [(word, one.where) for one in shell.commands if not _only_reads(one.words) for word in _may_be_written(one.words)]
    for word, line in (*redirected, *named):
        found = _find(shell, re.sub(r"^.*\}/?", "", word.text)) if posixpath.basename(word.text) == file.name else None
        if found is not None and found.samefile(file):
            raise refuse(where, f"{line} writes {file.name} before it is sourced, and what it then holds is not known")


def _only_reads(words: Sequence[Word]) -> bool:
    name = posixpath.basename(words[0].text)
    return name in READERS or (name == "sed" and not any(re.match(r"-\w*i|--in-place", word.text) for word in words))


def _may_be_written(words: Sequence[Word]) -> Sequence[Word]:
    return words[-1:] if words[0].text in ("cp", "mv", "ln", "install", "rsync") else words[1:]


def _find(shell: Shell, named: str) -> Path | None:
    """A sourced file: from the working directory, the script's directory, those above it, or beside the script."""
    beside = shell.files[-1].parent if shell.files else shell.script.parent
    roots = [Path(shell.directory)] if shell.directory else []
    above = [*beside.absolute().parents][:4]
    tried = [*(root / named for root in (*roots, beside, *above)), beside / posixpath.basename(named)]
    return next((path for path in tried if path.is_file()), None)


def _leave(kind: str) -> Builtin:
    def leave(_shell: Shell, words: list[Word], _where: Where) -> bool | None:
        loops = words[0].text if words and kind in ("break", "continue") else "1"
        raise Leave(kind, int(loops) if loops.isdigit() else 1)

    return leave


def _eval(shell: Shell, words: list[Word], where: Where) -> bool | None:
    unknown = next((word.unknown for word in words if word.unknown), "")
    if unknown:
        raise refuse(where, f"eval of a text that is not known ({unknown})")
    return shell.read(" ".join(word.text for word in words), where.file, where.line)


def _set(shell: Shell, words: list[Word], _where: Where) -> bool | None:
    """Options are passed over; the first word that is none begins the arguments of the script."""
    at, texts = 0, [word.text for word in words]
    shell.exports_all |= any(re.fullmatch(r"-\w*a\w*", one) for one in texts) or "allexport" in texts
    while at < len(words) and re.fullmatch(r"[-+][A-Za-z]+", words[at].text):
        at += 1 + (words[at].text.endswith("o") and at + 1 < len(words) and not words[at + 1].text.startswith("-"))
    if at < len(words):
        shell.arguments = words[at + (words[at].text == "--") :]
    return True


def _shift(shell: Shell, words: list[Word], _where: Where) -> bool | None:
    count = int(words[0].text) if words and words[0].text.isdigit() and len(words[0].text) < 6 else 1
    shell.arguments = shell.arguments[count:]
    return True


def _unset(shell: Shell, words: list[Word], where: Where) -> bool | None:
    functions = bool(words) and words[0].text == "-f"
    for word in words[bool(words) and words[0].text in ("-f", "-v", "-n") :]:
        name, index = (NAMED.fullmatch(_plainly(word, where)) or refused(where, word)).groups()
        if functions or (name not in shell.variables and name in shell.functions):
            shell.functions.pop(name, None)
        elif index is None:
            shell.variables.pop(name, None)
        elif (held := shell.get(name)) is not None:
            try:
                shell.put(name, without_element(name, held, index, shell))
            except Undecided as undecided:
                shell.put(name, Word(f"${{{name}[@]}}", where, undecided.why))
    return True


def refused(where: Where, word: Word) -> re.Match[str]:
    """Raises UsageError: a name was wanted."""
    raise refuse(where, f"{word.text} is no name")


def _reads(why: str, *always: str) -> Builtin:
    """A command that fills variables from the outside."""

    def reads(shell: Shell, words: list[Word], where: Where) -> bool | None:
        several = "[@]" if why.endswith("lines") or any(re.fullmatch(r"-\w*a", word.text) for word in words) else ""
        for name in (*(word.text for word in words), *always):
            if found := NAMED.fullmatch(name):
                put_named(shell, name, Word(f"${{{found[1]}{several}}}", where, f"{found[1]} is {why}"))
                if several:
                    shell.put(found[1], Word(f"${{{found[1]}[@]}}", where, f"{found[1]} is {why}"))
        return None

    return reads


def _shopt(shell: Shell, words: list[Word], where: Where) -> bool | None:
    """Options that change how what follows is read are refused."""
    texts = [word.text for word in words]
    odd = {"nocasematch", "lastpipe", "expand_aliases", "nullglob", "failglob", "localvar_inherit"} & set(texts)
    if "-s" in texts and odd:
        raise refuse(where, f"shopt -s {min(odd)} changes how the script is read, and is not followed")
    return True


def _trap(shell: Shell, words: list[Word], where: Where) -> bool | None:
    """What a signal or the end would run is not run; what every command would run is refused."""
    if {"DEBUG", "RETURN"} & {word.text for word in words[1:]}:
        raise refuse(where, "a trap that every command runs is not followed")
    return True


def _let(shell: Shell, words: list[Word], _where: Where) -> bool | None:
    try:
        values = [shell.calculate(text) for text in known(words)]
    except Undecided as undecided:
        for word in words:
            forget_set(shell, word.text, _where, undecided.why)
        return None
    return bool(values and values[-1])


def _nothing(status: bool | None) -> Builtin:
    return lambda _shell, _words, _where: status


BUILTINS: dict[str, Builtin] = {
    "echo": _echo, "printf": _printf, "test": _test, "[": _test, "cd": _cd, "pushd": _cd, "pwd": _pwd, "seq": _seq,
    "dirname": _path(lambda path: posixpath.dirname(path.rstrip("/")) or ("/" if path[:1] == "/" else ".")),
    "basename": _path(lambda path: posixpath.basename(path.rstrip("/")) or path[:1]), "realpath": _path(posixpath.normpath), "readlink": _path(posixpath.normpath),
    "source": _source, ".": _source, "exit": _leave("exit"), "return": _leave("return"), "break": _leave("break"), "continue": _leave("continue"),
    "eval": _eval, "set": _set, "shift": _shift, "unset": _unset, "let": _let,
    "read": _reads("read from the outside", "REPLY"), "mapfile": _reads("read from the outside, in lines", "MAPFILE"),
    "readarray": _reads("read from the outside, in lines", "MAPFILE"), "getopts": _reads("an option of the script", "OPTARG", "OPTIND"),
    "true": _nothing(True), ":": _nothing(True), "false": _nothing(False),
    "export": _nothing(True), "declare": _nothing(True), "typeset": _nothing(True), "local": _nothing(True), "readonly": _nothing(True),
    "shopt": _shopt, "trap": _trap, "wait": _nothing(None), "ulimit": _nothing(None), "umask": _nothing(None),
}  # fmt: skip


def inner_script(words: list[Word]) -> str | None:
    """The text that `bash -c` is given, wherever in a command it stands; any word that is a command line with flags is one too."""
    for shell, option, script in zip(words, words[1:], words[2:], strict=False):
        if shell.text.rpartition("/")[2] in ("bash", "sh") and option.text in ("-c", "-lc", "-xc", "-ec") and not script.unknown:
            return script.text
    line = next((word for word in words if says_flags(word.text)), None)
    if line is None or any(word.text.partition("=")[0] in FLAGS or word.text.endswith(".py") for word in words):
        return None
    if line.unknown:
        raise refuse(line.where, f"{line.text[:60]} is a command line, and is not known: {line.unknown}")
    return line.text
