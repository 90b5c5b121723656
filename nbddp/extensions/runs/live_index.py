"""The index of this user's live runs: a file for each, with the folder of the run.

It is in the user's home, so that a terminal finds a run whose notebook is in another folder.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from nbddp.private_files import make_private_folders, open_private_file
from nbddp.record.run_folder import write_atomic

_FOLDERS = (".nbddp", "live")  # in the user's home
logger = logging.getLogger(__name__)


class IndexEntry:
    """The entry of one session: its current run."""

    def __init__(self) -> None:
        self._name = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._path: Path | None = None

    def write(self, run: Path) -> None:
        """Enter a run. Without an entry, a terminal finds the run in its notebook's folder."""
        try:
            folder = make_private_folders(Path.home(), *_FOLDERS)
            if self._path is None:
                remove_files_of_dead_kernels(folder, f"{platform.node()}-")
            write_atomic(folder / self._name, str(run.resolve()))
            self._path = folder / self._name
        except (OSError, RuntimeError) as error:  # there is no home, or it is read-only
            logger.info("the run %s is not in the index of live runs: %s", run, error)

    def remove(self) -> None:
        """Remove the entry, because the run has ended."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


def entered_runs() -> Iterator[Path]:
    """Yield the folders of the runs in the index. Some may have ended with a killed kernel."""
    with suppress(OSError, RuntimeError):
        for entry in sorted(Path.home().joinpath(*_FOLDERS).iterdir()):
            with suppress(OSError):
                file = open_private_file(entry, os.O_RDONLY)
                with os.fdopen(file, errors="replace") as lines:
                    yield Path(lines.read())


def remove_files_of_dead_kernels(folder: Path, prefix: str = "") -> None:
    """Remove the files ``PREFIX`` ``PID-TOKEN`` that killed kernels of this machine have left."""
    for file in folder.glob(f"{prefix}*-*"):
        pid = file.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            with suppress(OSError):
                file.unlink()
