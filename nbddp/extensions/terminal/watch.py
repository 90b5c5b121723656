"""Show a run again and again until it ends, as ``top`` does."""

from __future__ import annotations

import select
import shutil
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from nbddp.extensions.terminal.answer_texts import logs_text, status_text, to_line
from nbddp.extensions.terminal.answers import logs, status
from nbddp.ui.ansi import strip

PERIOD = 1.0  # seconds
MIN_LOG_LINES = 3  # of all ranks together, also on a low screen
CLEAR = "\x1b[H\x1b[2J"  # the screen, with the cursor at its top


def watch(path: Path, *, is_json: bool) -> None:
    """Show a run every second until it ends, or until its kernel is dead.

    Without a terminal, such as in a pipe, print the status only when it has changed.

    Raises:
        BrokenPipeError: the reader of the pipe has ended.
    """
    shown, reader = "", select.poll()
    reader.register(1, 0)  # only for the end of the reader
    while True:
        state = status(path)
        if is_json:
            text = to_line({name: value for name, value in state.items() if name != "age"})
        elif sys.stdout.isatty():
            text = CLEAR + "\n".join(_screen(path, state))
        else:
            text = strip(status_text(state))
        if text != shown:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        shown = text
        if state["is_over"] or state["kernel"]["is_alive"] is False:
            return
        time.sleep(PERIOD)
        if reader.poll(0):  # a write would tell, but there may be none for hours
            raise BrokenPipeError


def _screen(path: Path, state: dict[str, Any]) -> list[str]:
    """Return the lines that fill a terminal: the status, the metrics, and the ends of the logs."""
    size = shutil.get_terminal_size()
    lines = [*strip(status_text(state)).split("\n"), ""]
    values = (f"{name} {value['mean']}" for name, value in state["metrics"].items())
    lines += textwrap.wrap(" · ".join(values), size.columns)
    ranks = max(1, len(state["ranks"]))
    rest = max(MIN_LOG_LINES, size.lines - 2 - len(lines))
    found = logs(path, None, max(1, rest // ranks))
    lines += ["", *logs_text(found).split("\n")[:rest]]
    return [line[: size.columns] for line in lines]
