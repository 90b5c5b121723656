"""System commands in a cell: ``!command``, ``names = !command`` and ``os.system()``.

IPython gives a command a terminal as its input, in which the user cannot type. If the command is
interrupted, IPython goes on with the cell. C's ``system()`` ignores SIGINT until the command has
ended, and a rank that does not answer a stop is killed. Here a command gets the end of file, and a
stop ends the cell.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from shlex import quote
from typing import Any

import pexpect  # type: ignore[import-untyped]
from IPython.core import interactiveshell

LOOK = 0.05  # polling interval in seconds, as in IPython
ENDING = 0.2  # seconds that an interrupted command gets to end by itself, as in IPython
CHUNK = 1 << 16


def take_over() -> None:
    """Replace the functions by which cells run system commands."""
    ipythons: Any = interactiveshell
    ipythons.system = run
    ipythons.getoutput = output_of
    os.system = system


def run(command: str) -> int:
    """Run a command and print what it writes. Return its exit code; a signal's is negative.

    It writes to a terminal: most programs hold back their output when they write to a pipe.
    """
    script = f"exec {quote(_shell())} -c {quote(command)} </dev/null"
    child = pexpect.spawn("/bin/sh", ["-c", script], encoding="utf-8", codec_errors="replace")
    try:
        while _print_piece(child):
            pass
    except KeyboardInterrupt:
        child.sendintr()
        deadline = time.monotonic() + ENDING
        while time.monotonic() < deadline and _print_piece(child):
            pass
        raise
    finally:
        child.terminate(force=True)
    if child.signalstatus is not None:
        return -int(child.signalstatus)
    code = int(child.exitstatus or 0)
    return 128 - code if code > 128 else code


def _print_piece(child: Any) -> bool:
    """Print what the command has written within a moment. Return whether there may be more."""
    with suppress(pexpect.TIMEOUT):
        try:
            print(child.read_nonblocking(CHUNK, LOOK), end="", flush=True)  # noqa: T201
        except pexpect.EOF:
            return False
    return True


def output_of(command: str) -> str:
    """Run a command. Return what it writes to standard output and error."""
    done = subprocess.run(
        [_shell(), "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.stdout.decode(errors="replace")


def system(command: str | bytes | os.PathLike[Any]) -> int:
    """Run a command for ``os.system()``. Return its wait status."""
    code = subprocess.call(command, shell=True, close_fds=False)
    return code << 8 if code >= 0 else -code


def _shell() -> str:
    return os.environ.get("SHELL", "sh")
