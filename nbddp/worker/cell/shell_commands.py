"""Run system commands in a cell: ``!command``, ``names = !command`` and ``os.system()``.

IPython gives a command a terminal as its input, in which the user cannot type. If the command is
interrupted, IPython continues the cell. C's ``system()`` ignores SIGINT until the command ends, and
nbddp kills a rank that does not respond to a stop. So a command gets an empty input here, and a
stop ends the cell.

All ranks of a node share one environment, and a package manager (``%pip``, ``!pip``, ``%conda``,
``!apt``) fails while another one runs. So the first rank of a node that reaches such a command runs
it, and the other ranks wait until it ends.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import site
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shlex import quote
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import pexpect  # type: ignore[import-untyped]
from IPython.core import interactiveshell
from IPython.core.magics import packaging

from nbddp.formatting import cut_text, format_few
from nbddp.topology import Topology
from nbddp.worker.cell.shell import RankShell
from nbddp.worker.lazy_preload import inherited_modules

POLL_INTERVAL = 0.05  # polling interval in seconds, as in IPython
EXIT_TIMEOUT = 0.2  # seconds for an interrupted command to end by itself, as in IPython
CHUNK_BYTES = 1 << 16


def run(command: str) -> int:
    """Run a command and print its output. Return its exit code, negative for a signal.

    The command writes to a terminal, because most programs buffer their output to a pipe.
    """
    script = f"exec {quote(_shell())} -c {quote(command)} </dev/null"
    child = pexpect.spawn("/bin/sh", ["-c", script], encoding="utf-8", codec_errors="replace")
    try:
        while _print_available(child):
            pass
    except KeyboardInterrupt:
        child.sendintr()
        deadline = time.monotonic() + EXIT_TIMEOUT
        while time.monotonic() < deadline and _print_available(child):
            pass
        raise
    finally:
        child.terminate(force=True)
    if child.signalstatus is not None:
        return -int(child.signalstatus)
    code = int(child.exitstatus or 0)
    return 128 - code if code > 128 else code


def _print_available(child: Any) -> bool:
    """Print the output available within POLL_INTERVAL. Return whether more may follow."""
    with suppress(pexpect.TIMEOUT):
        try:
            print(child.read_nonblocking(CHUNK_BYTES, POLL_INTERVAL), end="", flush=True)  # noqa: T201
        except pexpect.EOF:
            return False
    return True


def get_output(command: str) -> str:
    """Run a command. Return its standard output and error."""
    words = [_shell(), "-c", command]
    done = subprocess.run(words, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, check=False)
    return done.stdout.decode(errors="replace")


def system(command: str | bytes | os.PathLike[Any]) -> int:
    """Run a command for ``os.system()``. Return its wait status."""
    code = subprocess.call(command, shell=True, close_fds=False)
    return code << 8 if code >= 0 else -code


def _shell() -> str:
    return os.environ.get("SHELL", "sh")


MAX_COMMAND = 60  # characters of a command in a message
_COMMAND_START = (
    r"(?:^|[;&|(\n])\s*(?:(?:\w+=\S*|sudo|env|-\S+)\s+)*(?:\"[^\"]*/|'[^']*/|[^\s\"';&|]*/)?"
)
_PACKAGE_MANAGER = re.compile(
    _COMMAND_START + r"(?:(?:pip[\d.]*|apt|apt-get|dpkg|yum|dnf|apk|brew)"
    r"|(?:conda|mamba|micromamba|uv)(?![\"']?\s+run\b)"
    r"|python[\d.]*[\"']?\s+-m\s+(?:pip|conda|uv(?!\s+run\b)))[\"']?(?=\s|$)"
)
_CHANGES_PACKAGES = re.compile(r"\b(?:un)?install\b|\b(?:add|create|remove|sync|update|upgrade)\b")


class PackageCommands:
    """Run the package managers of cells once on each node.

    Args:
        store: a store that all ranks share.
        prefix: the prefix of this attempt's keys in the store.
        topology: this rank's position.
        shell: the shell, for the number of the running cell.
    """

    def __init__(self, store: Any, prefix: str, topology: Topology, shell: RankShell) -> None:
        self._store = store
        self._prefix = prefix
        self._topology = topology
        self._shell = shell
        # how often each cell has run each command
        self._counts: Counter[tuple[int, str]] = Counter()

    def install_hooks(self) -> None:
        """Replace the functions that run system commands in cells."""
        ipython_shell: Any = interactiveshell
        ipython_shell.system = self._once_per_node(run)  # for ``!command`` and magics
        ipython_shell.getoutput = self._once_per_node(get_output)
        os.system = system
        pip_magics: Any = packaging  # it prints to restart the kernel; nbddp prints more
        pip_magics.print = lambda *_: None

    def _once_per_node(self, run: Callable[[str], Any]) -> Callable[[str], Any]:
        def run_once(command: str) -> Any:
            if _PACKAGE_MANAGER.search(command) is None:
                return run(command)
            cell, node = self._shell.display_pub.cell, self._topology.node_rank
            self._counts[cell, command] += 1
            digest = hashlib.sha256(command.encode()).hexdigest()[:16]
            key = f"{self._prefix}/{cell}/{node}/{digest}/{self._counts[cell, command]}"
            own_rank = str(self._topology.rank)
            if self._store.compare_set(f"{key}/by", "", own_rank).decode() != own_rank:
                while not self._store.check([f"{key}/done"]):  # another rank runs the command
                    time.sleep(POLL_INTERVAL)
                value = json.loads(self._store.get(f"{key}/done"))
            else:
                value = self._run_for_node(run, command, f"{key}/done")
            importlib.invalidate_caches()  # else a new package is not found for a second
            return value

        return run_once

    def _run_for_node(self, run: Callable[[str], Any], command: str, key: str) -> Any:
        started_at, value = time.time(), None
        try:
            value = run(command)
        finally:
            self._store.set(key, json.dumps(value))
        if type(value) is int and value != 0:
            outcome = f"it failed with exit code {value}"
        elif _CHANGES_PACKAGES.search(command):
            outcome = self._next_step(started_at)
        else:
            return value
        line = command.replace(sys.executable, "python").strip().partition("\n")[0]
        shown = cut_text(line, MAX_COMMAND, " ...")
        print(  # noqa: T201 - for the user, with the command's own output
            f"nbddp: rank {self._topology.rank} ran `{shown}` for all ranks of its node: {outcome}"
        )
        return value

    def _next_step(self, started_at: float) -> str:
        """Describe how to use the installed packages on the ranks."""
        changed = {
            name
            for name, module in [*sys.modules.items()]
            if "." not in name and _has_changed(getattr(module, "__file__", None), started_at)
        }
        folders = [*site.getsitepackages(), site.getusersitepackages()]
        paths = [str(file) for folder in folders for file in Path(folder).glob("*.pth")]
        inherited = sorted(changed & inherited_modules)
        # Python reads .pth files at its start
        if inherited or any(_has_changed(path, started_at) for path in paths):
            return f"restart the kernel to use {format_few(inherited) or 'a new import path'}"
        if changed:
            return f"run `%ddp restart` to reload {format_few(sorted(changed))} (already imported)"
        return "no restart is needed"


def _has_changed(file: Any, started_at: float) -> bool:
    """Return whether a file has changed since a time. Use ctime: unpacked files keep old mtimes."""
    if not isinstance(file, str) or not file.startswith(os.sep):
        return False
    try:
        return Path(file).stat().st_ctime >= started_at
    except OSError:
        return True
