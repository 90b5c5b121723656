"""Add the magics, Tab completion and auto mode to a shell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbddp.errors import CellFailedError
from nbddp.magics.cell_magic import run_cell
from nbddp.magics.completion import Completion
from nbddp.magics.line_magic import HELP, run_command
from nbddp.magics.notebook_state import NotebookState
from nbddp.magics.parser import CELL
from nbddp.reporting.log_and_track import Sink, set_sink

ATTRIBUTE = "_nbddp"  # attribute of a shell: the extension that nbddp added
_RANK_NAMES = ("nbddp", "rank", "local_rank", "world_size", "device", "dist")


class _KernelSink(Sink):
    """The sink of a kernel: it says once that no rank runs a call, which then records nothing.

    Args:
        print_line: prints a line for the user.
    """

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line: Callable[[str], None] | None = print_line

    def log(self, step: int | None, values: dict[str, float]) -> None:
        """Send the numbers to the logger."""
        super().log(step, values)
        self._explain("nbddp.log")

    def record_config(self, values: dict[str, Any]) -> None:
        """Send the settings to the logger."""
        super().record_config(values)
        self._explain("nbddp.config")

    def _explain(self, function: str) -> None:
        print_line, self._print_line = self._print_line, None
        if print_line is not None:
            print_line(
                f"nbddp: `{function}` records nothing in a plain cell, because no rank runs it: "
                "use it in a `%%ddp` cell"
            )


class _Extension:
    """Everything that nbddp adds to one shell.

    torch's libraries are loaded after ``%load_ext`` has returned. Loading them holds Python's lock
    for long stretches, and would delay the reply to the cell with ``%load_ext``, even from a
    background thread.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.notebook = NotebookState(shell)
        set_sink(_KernelSink(self.notebook.presenter.print_line))
        self._magics: dict[tuple[str, str], Callable[..., object]] = {
            ("line", "ddp"): self._run_command,
            ("cell", "ddp"): self._run_on_ranks,
            ("cell", "local"): self._run_in_kernel,
            # IPython calls these if `%%ddp` or `%%local` is below the first line
            ("line", "%ddp"): _refuse_below_first_line,
            ("line", "%local"): _refuse_below_first_line,
            ("line", "load_ext"): self._load_ext_again,
        }
        self._load_ext = shell.magics_manager.magics["line"]["load_ext"]
        for (kind, name), function in self._magics.items():
            shell.magics_manager.register_function(function, kind, name)
        shell.events.register("post_run_cell", _explain_missing_cell_magic)
        self._debugger: Any = shell.debugger
        shell.debugger = self._debug  # type: ignore[method-assign]
        shell.input_transformers_cleanup.append(self.notebook.auto)
        self._completion = Completion(self.notebook.group, self.notebook.auto)
        self._completion.install(shell)
        setattr(shell, ATTRIBUTE, self)
        self.notebook.group.start_forkserver()
        shell.events.register("post_run_cell", self._warm_up)

    def _run_command(self, line: str) -> Any:
        """Control the worker group: `%ddp COMMAND`; `%ddp help` lists the commands."""
        return run_command(self.notebook, line)

    def _run_on_ranks(self, line: str, cell: str) -> None:
        run_cell(self.notebook, line, cell)

    _run_on_ranks.__doc__ = CELL.format_help()  # `%%ddp?` shows it

    def _run_in_kernel(self, _line: str, cell: str) -> None:
        """Run the cell in the notebook's kernel, even after `%ddp auto on`."""
        self.notebook.shell.run_cell(cell).raise_error()

    def _load_ext_again(self, name: str) -> None:
        """Run ``%load_ext``. Ignore it for nbddp, which is loaded: *Run All* repeats the line."""
        if name.strip() != "nbddp":
            self._load_ext(name)

    def _debug(self, force: bool = False) -> None:  # noqa: FBT001, FBT002 - IPython's
        """Debug the last error, for ``%debug``; on its rank if a cell of the ranks failed."""
        if force and isinstance(getattr(sys, "last_value", None), CellFailedError):
            self.notebook.shell.run_line_magic("ddp", "debug")
        else:
            self._debugger(force=force)

    def remove(self) -> None:
        """Remove everything that was added, restore the shell's own magics, and end the group."""
        shell = self.notebook.shell
        shell.input_transformers_cleanup.remove(self.notebook.auto)
        self._completion.remove(shell)
        shell.debugger = self._debugger  # type: ignore[method-assign]
        shell.events.unregister("post_run_cell", _explain_missing_cell_magic)
        for kind, name in self._magics:
            shell.magics_manager.magics[kind].pop(name, None)
        shell.magics_manager.register_function(self._load_ext, "line", "load_ext")
        set_sink(Sink())
        group = self.notebook.group
        nproc = group.spec.nproc if group.is_live else None
        group.stop()
        group.close()
        if nproc is not None:
            self.notebook.presenter.print_line(
                "nbddp: the extension was unloaded: all ranks are stopped and their variables are "
                f"lost; they ran with `--nproc {nproc}`"
            )

    def _warm_up(self, *_result: object) -> None:
        self.notebook.shell.events.unregister("post_run_cell", self._warm_up)
        self.notebook.group.preload()


def _explain_missing_cell_magic(result: Any) -> None:
    """Print a hint after a notebook cell that was probably meant for the ranks."""
    name = getattr(result.error_in_exec, "name", None)
    if _has_code_below_ddp(result.info.raw_cell or ""):
        print(  # noqa: T201 - for the user
            "nbddp: `%ddp` does not send the lines below it to the ranks. For the cell's code, "
            "write `%%ddp`"
        )
    elif isinstance(result.error_in_exec, NameError) and name in _RANK_NAMES:
        print(  # noqa: T201 - for the user
            f"nbddp: `{name}` is defined on the ranks, not in the notebook. Start the cell with "
            "`%%ddp`"
        )


def _has_code_below_ddp(cell: str) -> bool:
    r"""Return whether a cell begins with ``%ddp``, without a command, and has code below it.

    >>> [_has_code_below_ddp(f"%ddp{rest}") for rest in ("\nx = 1", " --nproc 2\n\nx = 1")]
    [True, True]
    >>> [_has_code_below_ddp(f"%ddp{rest}") for rest in ("", "\n%ddp runs", " stop\nx = 1")]
    [False, False, False]
    >>> [_has_code_below_ddp(cell) for cell in ("", "%%ddp\nx = 1", "%ddp --help\nx = 1")]
    [False, False, False]
    """
    lines = [line.strip() for line in cell.splitlines() if line.strip()]
    magic, *words = lines[0].split() if lines else [""]
    if magic != "%ddp" or any(word in HELP or not word.startswith("-") for word in words[:1]):
        return False
    return any(not line.startswith(("%", "!", "#")) for line in lines[1:])


def _refuse_below_first_line(_line: str) -> NoReturn:
    raise UsageError(
        "`%%ddp` and `%%local` must be on the first line of a cell. Move the lines above the "
        "command, comments included, below it"
    )


def load(shell: InteractiveShell) -> None:
    """Register the magics, the completer and the auto mode, and start to preload.

    Raises:
        UsageError: this Python is free-threaded.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():  # the function is new in Python 3.13
        raise UsageError(
            "nbddp was never tried on a free-threaded Python: use a build of Python with the GIL, "
            "or set PYTHON_GIL=1 before the notebook starts"
        )
    if getattr(shell, "is_rank", False):
        print("nbddp: loaded in the notebook already; this is one of its ranks")  # noqa: T201
        return
    if getattr(shell, ATTRIBUTE, None) is None:
        _Extension(shell)


def unload(shell: InteractiveShell) -> None:
    """Stop the group and remove everything that ``load`` registered."""
    extension: _Extension | None = getattr(shell, ATTRIBUTE, None)
    if extension is not None:
        setattr(shell, ATTRIBUTE, None)
        extension.remove()
