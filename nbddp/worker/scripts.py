"""Runs a script in a rank as ``torchrun`` would in a process of its own, and leaves no trace of it.

What is said of ``python FILE`` and ``-m`` follows Python's own documentation of its command line
and of ``runpy``.
"""

from __future__ import annotations

import builtins
import gc
import importlib.util
import linecache
import os
import sys
import tokenize
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch.distributed as dist

from nbddp.wire.script import Script
from nbddp.worker.endings import Leftovers, ending_as_a_program
from nbddp.worker.folding import library_of
from nbddp.worker.traces import MAINS, leaving_no_trace

_MAIN = "__main__"
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
        is_installed = library_of(filename) or _INSTALLED & set(path.parts)
        return "" if is_installed else _shown(path, self._folder)


def _shown(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name


def run(
    script: Script,
    files: OwnFiles,
    *,
    keep: Callable[[Mapping[str, Any]], None],
    say: Callable[[str], None],
) -> None:
    """Run it to its end, and put everything back as it was.

    Args:
        script: what to run.
        files: learns which are its own.
        keep: is handed its names when it is over, if they are to stay.
        say: is told in a line what it left behind and nobody can take away.

    Raises:
        BaseException: whatever ended it; SystemExit as well.
    """
    __tracebackhide__ = True
    files.begin(script)
    main, leftovers = ModuleType(_MAIN), Leftovers()
    with ExitStack() as stack:  # from here on the last goes first
        stack.callback(leftovers.tell, script.name, say)
        stack.callback(_forget, main, keep if script.keeps else None)
        stack.enter_context(leaving_no_trace(script, files.__contains__))
        stack.callback(_leave_groups, os.getpid())
        stack.enter_context(ending_as_a_program(leftovers))
        code = _load(main, script)
        sys.modules.update(dict.fromkeys(MAINS, main))
        _execute(code, main)


def _execute(code: CodeType, main: ModuleType) -> None:
    __tracebackhide__ = "__ipython_bottom__"  # IPython's word for: and all that is above
    exec(code, main.__dict__)


def _load(main: ModuleType, script: Script) -> CodeType:
    """Prepare the module ``__main__``, and ``sys.argv``, as Python's command line does."""
    importlib.invalidate_caches()
    linecache.checkcache()
    names = vars(main)
    names["__builtins__"] = builtins
    names["__cached__"] = None
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    if script.path:
        main.__file__ = script.path
        main.__loader__ = SourceFileLoader(_MAIN, script.path)
        sys.argv[:] = [script.name, *script.arguments]
        with tokenize.open(script.path) as file:
            return compile(file.read(), script.path, "exec", dont_inherit=True)
    spec = _find_module(script.name)
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    main.__file__ = spec.origin
    sys.argv[:] = [str(spec.origin), *script.arguments]
    code: CodeType | None = spec.loader.get_code(spec.name)
    if code is None:
        raise ImportError(f"no code object available for {script.name}")
    return code


def _find_module(name: str) -> Any:
    """The module of ``-m``; of a package what it has for this, its ``__main__``."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.{_MAIN}")
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name}", name=name)
    return spec


def _leave_groups(pid: int) -> None:
    """Its process groups end with it, but not with a process that it forked."""
    if os.getpid() == pid and dist.is_initialized():
        dist.destroy_process_group()


def _forget(main: ModuleType, keep: Callable[[Mapping[str, Any]], None] | None) -> None:
    """Free what it had: models, files, loaders with their workers; or hand it on."""
    if keep is not None:
        keep({name: value for name, value in vars(main).items() if not name.startswith("__")})
    else:
        main.__dict__.clear()
    gc.collect()
