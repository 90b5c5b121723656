"""Save files that the user's code has left open, as Python does when it exits.

A rank ends by ``os._exit``, which saves nothing. Flushing is not enough for gzip, xz, bz2 and zip
files: their objects write the end of the file when they are closed or deleted. Deleting objects is
not enough for a file that a class or a thread still holds.
"""

from __future__ import annotations

import gc
import io
import sys
import threading
from types import ModuleType
from typing import Any

from nbddp.worker.lazy_preload import imported_modules
from nbddp.worker.watch.main_thread import is_installed

# the classes in C that all files are derived from, unlike those of `io`
_FILE, _BUFFERED_FILE = io.IOBase.__base__, io.BufferedIOBase.__base__
SAVE_TIMEOUT = 2.0  # seconds: a pipe may be full, or a destructor may not return


class OpenFiles:
    """The files that this process has open for writing, found among all its objects."""

    def __init__(self) -> None:
        self._unsaved: dict[str, str] = {}
        self._pending: list[str] = []

    def flush(self) -> None:
        """Flush the files."""
        self._call_each("flush", _find(_FILE))

    def save(self) -> None:
        """Flush the files, delete the user's objects, and flush the remaining files.

        Archives are closed before garbage is collected. Otherwise, in a reference cycle, Python may
        close the file below an archive before the archive has written its last bytes.
        """
        self.flush()
        self._pending[:] = ["archives"]
        _delete_names()
        # archives are files that are written in Python, such as gzip's
        files = (each for each in _find(_BUFFERED_FILE) if type(each).__module__ != "_io")
        self._call_each("close", [*files])
        gc.collect()
        self.flush()

    def _call_each(self, method: str, files: list[Any]) -> None:
        self._pending[:] = [_name(each) for each in files]
        for file in files:
            try:
                if not file.closed and file.writable():
                    getattr(file, method)()
            except Exception as error:  # noqa: BLE001 - also of the user's classes
                if not isinstance(error, ValueError):  # its buffer was closed or detached
                    self._unsaved[_name(file)] = getattr(error, "strerror", None) or str(error)
            self._pending.pop(0)

    def print_unsaved(self) -> None:
        """Print which files are not saved, and why, to the log of the rank."""
        unsaved = {**dict.fromkeys(self._pending, "it took too long"), **self._unsaved}
        if unsaved:
            files = ", ".join(f"{name} ({why})" for name, why in unsaved.items())
            print(f"nbddp: not saved completely: {files}", file=sys.stderr)  # noqa: T201


def _name(file: Any) -> str:
    try:
        return str(file.name)
    except Exception:  # noqa: BLE001 - it has none, or it is a class of the user
        return type(file).__name__


def _find(base: type | None) -> list[Any]:
    """Return all objects of a class. Of millions of objects, each class is looked at once."""
    objects = gc.get_objects()
    # isinstance() would run code of objects that imitate a class, such as mocks, and issubclass()
    # needs the hash of each class, which a metaclass with __eq__ does not have
    kinds = {id(kind): kind for kind in map(type, objects)}
    found = {key for key, kind in kinds.items() if any(each is base for each in kind.__mro__)}
    return [each for each in objects if id(type(each)) in found]


def _delete_names() -> None:
    """Set the names of the user's modules to None, as Python does when it exits."""
    threading.excepthook = lambda _: None  # Python stops daemon threads before this
    for module in [sys.modules["__main__"], *filter(_is_users, imported_modules())]:
        names = vars(module)
        for is_private in (True, False):
            for name in list(names):
                if (name[:1] == "_" != name[1:2]) is is_private and name != "__builtins__":
                    names[name] = None


def _is_users(module: object) -> bool:
    is_module = issubclass(type(module), ModuleType)
    file = vars(module).get("__file__") if is_module else None
    return bool(file) and not is_installed(str(file))
