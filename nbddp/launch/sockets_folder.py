"""The folder of a helper's sockets, and those that were left when kernel and helper were killed.

Whoever made a folder holds a lock on it for as long as it lives, which ends with the process
however that ends. So a folder that can be locked is nobody's any more, also where other machines
or containers share the temporary folder and a process id says nothing.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "nbddp_"
AGE = 60.0  # seconds: a younger one may not have been locked yet
MAX_ADDRESS = 103  # bytes of a socket's address on macOS, 107 on Linux (unix(7))
SHORT = ("/tmp", "/var/tmp", "/dev/shm")
_LONGEST = f"/{PREFIX}12345678/listener-12345678"  # as multiprocessing names its sockets
_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")  # as tempfile makes them


class SocketsFolder:
    """A folder that is there while this process lives, or until it is closed."""

    def __init__(self) -> None:
        self.path = ""
        self._lock: int | None = None

    def ensure(self) -> str:
        """Make it, unless it is there; takes away what others have left."""
        if not os.path.isdir(self.path):  # noqa: PTH112 - a name, until there is one
            self.close()
            self.path = tempfile.mkdtemp(prefix=PREFIX, dir=_short_enough(tempfile.gettempdir()))
            self._lock = _locked(Path(self.path))
            _take_away_left(Path(self.path).parent)
        return self.path

    def close(self) -> None:
        """Take it away, as far as it is still there."""
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self.path, self._lock = "", None


def _short_enough(temporary: str) -> str:
    """The temporary folder, or a shorter one: a cluster's can be too long for a socket's address.

    multiprocessing takes it as it is, and then cannot start a helper ("AF_UNIX path too long").
    """
    for folder in (temporary, *SHORT):
        is_short = len(os.fsencode(folder)) + len(_LONGEST) <= MAX_ADDRESS
        if is_short and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return temporary


def _take_away_left(temporary: Path) -> None:
    with suppress(OSError):  # it may be too full, or not ours, to be read
        for path in temporary.iterdir():
            if _NAME.fullmatch(path.name):
                _take_away_if_left(path)


def _take_away_if_left(path: Path) -> None:
    with suppress(OSError):  # another one takes it away at this moment
        facts = path.lstat()
        is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
        if not is_ours or time.time() - facts.st_mtime < AGE:
            return
        lock = _locked(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock of a folder; None if somebody else does."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is held, or this file system has no locks
        os.close(folder)
        return None
    return folder
