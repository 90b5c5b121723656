"""Remove old files of listeners, agents and nodes from ``~/.nbddp``, if no process uses them.

A node's log folder may hold data that never reached the notebook, so it stays for a week. Each
process locks its files; a lock ends with its process in any case. On a file system without locks
(such as NFS), only the time of the last heartbeat counts.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nbddp.errors import RequestError
from nbddp.extensions.nodes.join_file import FOLDER, JoinFile

HOME = ".nbddp"  # in the home folder
MAX_AGE = 7 * 86400.0  # seconds since the last heartbeat
TOUCH_PERIOD = 60.0  # seconds between two heartbeats
_NAMES = {
    "nodes": re.compile(r".+-\d+"),  # a host, and the process id of its agent
    "agents": re.compile(r"[0-9a-f]{8}-\d+\.log"),
    "join": re.compile(r"[0-9a-f]{8}"),
}


class LockedPath:
    """A lock on a file or folder: it is not removed while this process is alive.

    Args:
        path: an existing file or folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched_at = time.monotonic()
        self._lock: int | None = _open_for_lock(path)
        with suppress(OSError):  # no locks on this file system
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def touch(self) -> None:
        """Update the modification time at intervals, for file systems without locks."""
        if time.monotonic() - self._touched_at > TOUCH_PERIOD:
            self._touched_at = time.monotonic()
            with suppress(OSError):  # it was deleted
                os.utime(self._path)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def find_left_join_file(name: str = "") -> JoinFile:
    """Return the join file of a notebook that ended without releasing its nodes.

    Args:
        name: the path of the join file, or its last part; empty for the newest unlocked one.

    Raises:
        RequestError: there is none, or its notebook is still running.
    """
    folder = Path.home() / FOLDER
    if name:
        path = Path(name).expanduser()
        path = path if path.exists() else folder / name
        join = JoinFile.load(path)
        if is_locked(path):
            raise RequestError(
                f"the notebook that wrote {path} is still running: end it or restart its "
                "kernel, then its ranks can be rejoined"
            )
        return join
    files = [each for each in folder.glob("*") if _NAMES["join"].fullmatch(each.name)]
    unlocked = [each for each in files if not is_locked(each)]
    if not unlocked:
        raise RequestError(f"no earlier notebook has left nodes to rejoin: see {folder}")
    return JoinFile.load(max(unlocked, key=lambda path: path.stat().st_mtime))


def is_locked(path: Path) -> bool:
    """Return whether another process holds the lock of a path."""
    with _try_lock(path) as is_held:
        return is_held


def remove_stale_files(home: Path) -> None:
    """Remove all old, unlocked files of nbddp in a home folder."""
    for name in _NAMES:
        remove_stale_in(home / HOME / name, _NAMES[name])


def remove_stale_in(folder: Path, names: re.Pattern[str] = _NAMES["nodes"]) -> None:
    """Remove old, unlocked files whose names match; other files are not nbddp's."""
    with suppress(OSError):  # no such folder, or it cannot be read
        for path in folder.iterdir():
            if names.fullmatch(path.name):
                _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    with suppress(OSError):  # another process is removing it
        facts = path.lstat()
        is_link = stat.S_ISLNK(facts.st_mode)
        if is_link or facts.st_uid != os.getuid() or time.time() - facts.st_mtime < MAX_AGE:
            return
        with _try_lock(path) as is_held:
            if is_held:
                return
            if stat.S_ISDIR(facts.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _open_for_lock(path: Path) -> int:
    """Open a path for a lock: a file for writing, as NFS requires, a folder for reading."""
    mode = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR
    return os.open(path, mode | os.O_NOFOLLOW)


@contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Try to lock a path within the block. Yield whether another process holds the lock."""
    lock, is_held = _open_for_lock(path), False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # any other error: no locks on this file system
        is_held = isinstance(error, BlockingIOError)
    try:
        yield is_held
    finally:
        os.close(lock)
