"""What doors, agents and nodes have left in ``~/.nbddp``: taken away when nobody holds it any more.

A node's log folder may hold what never reached the notebook, so it stays for a week. Whoever lives
holds a lock on what is his, which ends with the process however that ends. Where a file system has
no locks (a folder on NFS), the time of the last sign of life decides alone.
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
from nbddp.nodes.join_file import FOLDER, JoinFile

HOME = ".nbddp"  # in the home folder
MAX_AGE = 7 * 86400.0  # seconds since the last sign of life
TOUCH_PERIOD = 60.0  # seconds between two signs of life
_NAMES = {
    "nodes": re.compile(r".+-\d+"),  # a host, and its keeper's process
    "agents": re.compile(r"[0-9a-f]{8}-\d+\.log"),
    "join": re.compile(r"[0-9a-f]{8}"),
}


class LockedPath:
    """A file or folder of ours: nobody takes it away while this process lives.

    Args:
        path: it is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched_at = time.monotonic()
        self._lock: int | None = _open_for_lock(path)
        with suppress(OSError):  # no locks here
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def touch(self) -> None:
        """Say now and then that we live, where locks say nothing."""
        if time.monotonic() - self._touched_at > TOUCH_PERIOD:
            self._touched_at = time.monotonic()
            with suppress(OSError):  # somebody deleted it
                os.utime(self._path)

    def close(self) -> None:
        """It is nobody's from here on."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def find_left_join_file(name: str = "") -> JoinFile:
    """The door that a notebook has left open which is gone.

    Args:
        name: its join file, or only the last part of it; empty for the newest that nobody holds.

    Raises:
        RequestError: there is none, or its notebook is not gone.
    """
    folder = Path.home() / FOLDER
    if name:
        path = Path(name).expanduser()
        path = path if path.exists() else folder / name
        join = JoinFile.load(path)
        if _is_locked(path):
            raise RequestError(
                f"the notebook that has opened the door of {path} is still there: restart its "
                "kernel, or end it, and its ranks can be taken back"
            )
        return join
    files = [each for each in folder.glob("*") if _NAMES["join"].fullmatch(each.name)]
    left = [each for each in files if not _is_locked(each)]
    if not left:
        raise RequestError(f"no notebook that is gone has left a door open: see {folder}")
    return JoinFile.load(max(left, key=lambda path: path.stat().st_mtime))


def _is_locked(path: Path) -> bool:
    with _try_lock(path) as is_held:
        return is_held


def remove_stale_files(home: Path) -> None:
    """Take away all that is old and nobody's, in what belongs to us of a home folder."""
    for name in _NAMES:
        remove_stale_in(home / HOME / name, _NAMES[name])


def remove_stale_in(folder: Path, names: re.Pattern[str] = _NAMES["nodes"]) -> None:
    """Take away what is old and nobody's; what is called otherwise is not ours."""
    with suppress(OSError):  # there is no such folder, or it cannot be read
        for path in folder.iterdir():
            if names.fullmatch(path.name):
                _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    with suppress(OSError):  # another one takes it away at this moment
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
    """For a lock: a file for writing, as NFS wants it, a folder as that can be."""
    mode = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR
    return os.open(path, mode | os.O_NOFOLLOW)


@contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Lock a file or folder within; yield whether another process holds it."""
    lock, is_held = _open_for_lock(path), False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # any other error: no locks here
        is_held = isinstance(error, BlockingIOError)
    try:
        yield is_held
    finally:
        os.close(lock)
