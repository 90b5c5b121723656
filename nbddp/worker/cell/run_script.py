"""Run a script as ``torchrun`` does, in a rank that runs nothing else.

``python FILE`` and ``-m`` follow Python's documentation of its command line and of ``runpy``.

The end of a script follows Python's ``Py_FinalizeEx``: join threads that are not daemons, then call
the ``atexit`` functions, the last registered first. One of them joins the processes of
``multiprocessing``; it is registered before those of the script.
"""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import importlib
import io
import linecache
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import tokenize
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from importlib.machinery import SourceFileLoader
from multiprocessing import util
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from nbddp.wire.rank_start import Script
from nbddp.worker.open_files import SAVE_TIMEOUT, OpenFiles
from nbddp.worker.output.log_writer import flush_python_streams
from nbddp.worker.watch.main_thread import is_installed, library_of_file

_MAIN = "__main__"
EXIT_FILENAME = __file__  # waits at a script's end are in this file, and can be interrupted


class UserFiles:
    """Tells the user's files of a script from those of libraries."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._names: dict[str, str] = {}

    def set_script(self, script: Script) -> None:
        """Set the script. Modules that it imports from its own folder belong to the user."""
        self._folder = Path(script.folder)
        self._names = {script.path: Path(script.path).name} if script.path else {}

    def name(self, filename: str) -> str:
        """Return the name of a user's file, or "" for a library's file or a cell."""
        if filename not in self._names:
            path, folder = Path(filename), self._folder
            is_here = folder is not None and path.is_relative_to(folder)
            is_own = is_here and not is_installed(filename)
            self._names[filename] = str(path.relative_to(folder)) if folder and is_own else ""
        return self._names[filename]


def run(script: Script, files: UserFiles) -> None:
    """Run a script and the exit functions of a program, in a process that runs nothing else.

    Args:
        script: the script.
        files: receives the script, to recognize the user's files.

    Raises:
        BaseException: the error that ended the script, such as SystemExit.
    """
    files.set_script(script)
    for name in ("__IPYTHON__", "display"):  # by which code detects a notebook
        vars(builtins).pop(name, None)
    # a .pyc stores its time in seconds, so it may hide an edit within the same second
    sys.dont_write_bytecode = True
    with exiting_as_program():
        sys.path[:] = [script.folder, *filter(None, sys.path)]  # "" means the working folder
        main = ModuleType(_MAIN)
        code, names = _load(script)
        vars(main).update(names)
        # a spawned process may send back objects of __mp_main__
        sys.modules.update({_MAIN: main, "__mp_main__": main})
        exec(code, vars(main))


def run_in_namespace(namespace: dict[str, Any], script: Script, files: UserFiles) -> None:
    """Run a script in the namespace of the cells, as IPython's ``%run -i`` does."""
    files.set_script(script)
    arguments = [*sys.argv]
    sys.path.insert(0, script.folder)
    try:
        code, names = _load(script)
        namespace["__file__"] = names["__file__"]
        exec(code, namespace)
    finally:
        namespace.pop("__file__", None)
        with suppress(ValueError):  # the script removed it
            sys.path.remove(script.folder)
        sys.argv[:] = arguments


def _load(script: Script) -> tuple[CodeType, dict[str, Any]]:
    """Set ``sys.argv`` as Python does. Return the code and the initial names of ``__main__``."""
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
    module: Any = runpy
    _, spec, code = module._get_module_details(script.name, ModuleNotFoundError)
    names |= {"__spec__": spec, "__loader__": spec.loader, "__package__": spec.parent}
    names["__file__"] = spec.origin
    sys.argv[:] = [str(spec.origin), *script.arguments]
    return code, names


@contextmanager
def exiting_as_program() -> Iterator[None]:
    """Run a script in this context. At its end, do what Python does at the end of a program."""
    with ExitStack() as on_exit:  # runs each callback, last first, even after errors
        # a failed process stays alive for a debugger: the script's timers must not end it
        on_exit.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        on_exit.callback(faulthandler.cancel_dump_traceback_later)
        on_exit.callback(_save_files, os.getpid())
        on_exit.callback(_destroy_groups, os.getpid())
        on_exit.callback(util._exit_function)  # type: ignore[attr-defined]
        on_exit.callback(atexit._run_exitfuncs)
        on_exit.callback(threading._shutdown)  # type: ignore[attr-defined]
        try:
            yield
        except SystemExit as error:
            if _has_message(error):
                print(error.code, file=sys.stderr)  # noqa: T201 - as Python does
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # as a terminal does; Python joins them
                for child in multiprocessing.active_children():
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGINT)  # type: ignore[arg-type]
            with redirect_stderr(io.StringIO()):  # the failure report has the traceback
                sys.excepthook(type(error), error, _user_traceback(error))  # such as W&B's hook
            raise


def _destroy_groups(pid: int) -> None:
    """Destroy the process groups, so that peers stop waiting. Do nothing in a forked child."""
    if os.getpid() == pid and dist.is_initialized():
        dist.destroy_process_group()


def _save_files(pid: int) -> None:
    """Flush the files of this process, which may wait for a debugger; save those of a child."""
    files = OpenFiles()
    if os.getpid() == pid:
        thread = threading.Thread(target=files.flush, daemon=True)  # a full pipe would block it
        thread.start()
        thread.join(SAVE_TIMEOUT)
    else:
        files.save()
    files.print_unsaved()


def _has_message(error: SystemExit) -> bool:
    """Return whether Python prints the argument of ``sys.exit()``. The exit code is then 1."""
    return error.code is not None and not isinstance(error.code, int)


def exit_code(error: BaseException | None) -> int:
    """Return the exit code of a program that ended with this error.

    >>> [exit_code(each) for each in (None, SystemExit(), SystemExit(3), SystemExit(256))]
    [0, 0, 3, 0]
    >>> [exit_code(each) for each in (SystemExit("no data"), SystemExit(0.0), ValueError())]
    [1, 1, 1]
    """
    if error is None:
        return 0
    if isinstance(error, SystemExit) and not _has_message(error):
        return int(error.code or 0) & 0xFF
    return 1


def exit_forked_child(error: BaseException | None) -> NoReturn:
    """Exit a child process that a cell forked, at the end of the cell."""
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, _user_traceback(error))
    flush_python_streams()
    os._exit(exit_code(error))


def _user_traceback(error: BaseException) -> TracebackType | None:
    step = error.__traceback__
    while step is not None and library_of_file(step.tb_frame.f_code.co_filename) == "nbddp":
        step = step.tb_next
    return step
