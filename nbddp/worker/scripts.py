"""Runs a script as ``torchrun`` does, in a rank that runs nothing else.

What is said of ``python FILE`` and ``-m`` follows Python's own documentation of its command line
and of ``runpy``.
"""

from __future__ import annotations

import builtins
import importlib.util
import itertools
import linecache
import multiprocessing.process
import random
import sys
import tokenize
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch

from nbddp.wire.script import Script
from nbddp.worker.endings import ending_as_a_program
from nbddp.worker.main_thread import library_of_file

_MAIN = "__main__"
_MAINS = (_MAIN, "__mp_main__")  # what a spawned process sends back may be of the second
_IPYTHONS = ("__IPYTHON__", "display")  # names of builtins: code recognizes a notebook by them
_INSTALLED = {"site-packages", "dist-packages"}


class OwnFiles:
    """Knows the files of the user's among those that a script consists of."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._known: dict[str, str] = {}

    def begin(self, script: Script) -> None:
        """A script begins: what it imports from its own folder is the user's."""
        self._folder = Path(script.folder)
        self._known.clear()
        if script.path:
            path = Path(script.path)
            self._known[script.path] = _shown(path, self._folder)

    def name(self, filename: str) -> str:
        """What a file of the user's is called; empty for one of a library's, and for a cell."""
        if filename not in self._known:
            self._known[filename] = self._find(filename)
        return self._known[filename]

    def __contains__(self, filename: str) -> bool:
        return bool(self.name(filename))

    def _find(self, filename: str) -> str:
        path = Path(filename)
        if self._folder is None or not path.is_absolute() or not path.is_relative_to(self._folder):
            return ""
        is_installed = library_of_file(filename) or _INSTALLED & set(path.parts)
        return "" if is_installed else _shown(path, self._folder)


def _shown(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name


def run(script: Script, files: OwnFiles) -> None:
    """Run a script to the end of the program, in a process that runs nothing else.

    Args:
        script: what to run.
        files: learns which are its own.

    Raises:
        BaseException: whatever ended it; SystemExit as well.
    """
    files.begin(script)
    _become_a_program()
    with ending_as_a_program():
        sys.path[:] = [script.folder, *filter(None, sys.path)]  # "" is the working folder
        main = ModuleType(_MAIN)
        code, names = _load(script)
        vars(main).update(names)
        sys.modules.update(dict.fromkeys(_MAINS, main))
        _execute(code, vars(main))


def run_in(namespace: dict[str, Any], script: Script, files: OwnFiles) -> None:
    """Run a script in the cells' namespace, without isolation, as IPython's ``%run -i`` does."""
    files.begin(script)
    arguments = [*sys.argv]
    sys.path.insert(0, script.folder)
    try:
        code, names = _load(script)
        namespace["__file__"] = names["__file__"]
        _execute(code, namespace)
    finally:
        namespace.pop("__file__", None)
        with suppress(ValueError):  # the script took it away
            sys.path.remove(script.folder)
        sys.argv[:] = arguments


def _become_a_program() -> None:
    """Undo what a forked rank has unlike a new process."""
    for name in _IPYTHONS:
        vars(builtins).pop(name, None)
    # the next edit may come within the second that the time of a .pyc is exact to
    sys.dont_write_bytecode = True
    known: Any = multiprocessing.process
    vars(known._current_process).update(_name="MainProcess", _identity=(), _parent_pid=None)
    known._parent_process, known._children = None, set()
    known._process_counter = itertools.count(1)
    for seed in (torch.default_generator.seed, random.seed, np.random.seed):
        seed()  # ranks are forked with the same state


def _execute(code: CodeType, namespace: dict[str, Any]) -> None:
    exec(code, namespace)


def _load(script: Script) -> tuple[CodeType, dict[str, Any]]:
    """Set ``sys.argv``, and return the code of ``__main__`` and its names, as Python's CLI does."""
    importlib.invalidate_caches()
    linecache.checkcache()
    names: dict[str, Any] = {"__builtins__": builtins, "__cached__": None}
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    if script.path:
        names |= {"__file__": script.path, "__loader__": SourceFileLoader(_MAIN, script.path)}
        sys.argv[:] = [script.name, *script.arguments]
        with tokenize.open(script.path) as file:
            return compile(file.read(), script.path, "exec", dont_inherit=True), names
    spec = _find_module(script.name)
    names |= {"__spec__": spec, "__loader__": spec.loader, "__package__": spec.parent}
    names["__file__"] = spec.origin
    sys.argv[:] = [str(spec.origin), *script.arguments]
    code: CodeType | None = spec.loader.get_code(spec.name)
    if code is None:
        raise ImportError(f"no code object available for {script.name}")
    return code, names


def _find_module(name: str) -> Any:
    """The module of ``-m``; of a package what it has for this, its ``__main__``."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.{_MAIN}")
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name}", name=name)
    return spec
