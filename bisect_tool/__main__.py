"""The entry point: runs the command line and turns every way to end into the contract's exit codes."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import click
from bisect_hooks.errors import BisectError

from bisect_tool.allocator import give_back_what_is_freed
from bisect_tool.cli import cli


def run(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code; nothing but the report goes to stdout."""
    # threads that wait for work sleep: reference and ranks share the cores, and spinning would take them from each other
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    give_back_what_is_freed()
    try:
        code = cli.main(args=arguments, prog_name="bisect-tool", standalone_mode=False)
        return int(code or 0)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.Abort:
        return _interrupted()
    except click.ClickException as error:
        error.show()
        return 2
    except KeyboardInterrupt:
        return _interrupted()
    except BisectError as error:
        _say(f"Error: {error}")
        if error.exit_code == 70:
            _keep_traceback()
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # a full disk, a directory that can't be written: the user's to mend, not a crash
        _say(f"Error: {error.strerror or error}: {error.filename or 'a file'}")
        return 2
    except Exception as error:
        kept = _keep_traceback()
        text = str(error).splitlines()[0] if str(error) else "no message"
        _say(f"Error: {type(error).__name__}: {text} (an error of ours; traceback in {kept})")
        return 70


def interrupt_again(ignored: Any) -> None:
    """An interrupt that comes while an object is being deleted is ignored by Python, and the run goes on: it comes again a moment later."""
    if ignored.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(ignored)
        return
    timer = threading.Timer(0.05, _thread.interrupt_main)
    timer.daemon = True
    timer.start()


def main() -> None:
    """Console script."""
    sys.unraisablehook = interrupt_again
    code = run()
    _stop_ranks()
    if code == 130:
        # an interrupt that came while a C extension ran Python code is remembered by CPython, which would then end by the signal
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _interrupted() -> int:
    _stop_ranks()
    _say("Error: interrupted")
    return 130


def _stop_ranks() -> None:
    ranks = sys.modules.get("bisect_tool.ranks")
    if ranks is not None:
        ranks.WORLDS.close()


def _keep_traceback() -> Path:
    from bisect_tool.cli import last_out

    out = last_out()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "traceback.txt"
    file.write_text(traceback.format_exc())
    return file


def _say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
