"""Files in folders that only this user can change, opened without following a link.

Another user who can write to a folder can put a link in the place of a file or of a folder. A write
through it would change a file of this user elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@contextmanager
def open_private_folder(path: Path) -> Iterator[int]:
    """Open a folder within the block. Yield its descriptor, for the argument ``dir_fd``.

    Raises:
        OSError: it is a link, belongs to another user, or can be changed by another user.
    """
    folder = os.open(path, _FOLDER | os.O_NOFOLLOW)
    try:
        _check(folder, path.name)
        yield folder
    finally:
        os.close(folder)


def path_through(folder: int, path: Path) -> Path:
    """Return a path to an open folder for code that takes no ``dir_fd``, such as torch's.

    Nobody can replace the folder in this path. Systems without ``/proc`` get the path itself.
    """
    through = Path(f"/proc/self/fd/{folder}")
    return through if through.is_dir() else path


def open_private_file(path: Path, flags: int) -> int:
    """Open a file in a private folder; a new file is for its owner only. Return the descriptor.

    Raises:
        OSError: it cannot be opened, or the folder is not private.
    """
    with open_private_folder(path.parent) as folder:
        try:
            return os.open(path.name, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        except OSError as error:
            error.filename = str(path)
            raise


def is_private_folder(path: Path) -> bool:
    """Return whether a path is a folder that only this user can change."""
    with suppress(OSError), open_private_folder(path):
        return True
    return False


def make_private_folders(base: Path, *names: str) -> Path:
    """Create folders, one in the other, in ``base``, which may be open to others. Return the last.

    An existing folder of this user becomes private: with the umask 002, earlier versions of nbddp
    made folders that a group can write to. A link to such a folder is used if it is this user's.

    Raises:
        OSError: a folder cannot be created, belongs to another user, or cannot become private.
    """
    folder = os.open(base, _FOLDER)
    try:
        for name in names:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=folder)
            _check_owner(os.stat(name, dir_fd=folder, follow_symlinks=False), name)
            outer, folder = folder, os.open(name, _FOLDER, dir_fd=folder)
            os.close(outer)
            facts = os.fstat(folder)
            _check_owner(facts, name)
            if facts.st_mode & _WRITABLE_BY_OTHERS:
                os.fchmod(folder, stat.S_IMODE(facts.st_mode) & ~_WRITABLE_BY_OTHERS)
            _check(folder, name)  # some file systems ignore a change of the mode
    finally:
        os.close(folder)
    return base.joinpath(*names)


def open_new_file(path: Path) -> int:
    """Open a new file for writing, in place of an old file or link of that name.

    Raises:
        OSError: it cannot be created, or another user creates one at the same time.
    """
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def check_owner(path: Path) -> None:
    """Check that a path is this user's.

    Raises:
        OSError: it belongs to another user, or does not exist.
    """
    _check_owner(path.lstat(), path.name)


def _check(folder: int, name: str) -> None:
    facts = os.fstat(folder)
    _check_owner(facts, name)
    if facts.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(errno.EPERM, f"other users can write to {name}")


def _check_owner(facts: os.stat_result, name: str) -> None:
    if facts.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{name} belongs to another user")
