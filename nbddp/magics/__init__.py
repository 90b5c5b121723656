"""``%ddp`` and ``%%ddp``: parse, delegate, show."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError

from nbddp.errors import CellFailedError
from nbddp.magics.cell import CellMagics
from nbddp.magics.completion import Completion
from nbddp.magics.desk import Desk
from nbddp.magics.line_magic import LineMagics
from nbddp.magics.timeline import ATTRIBUTE

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_NAMES_OF_RANKS = ("nbddp", "rank", "local_rank", "world_size", "device", "dist")


class _Extension:
    """All that was put into one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.desk = Desk(shell)
        self._events = shell.events
        shell.register_magics(CellMagics(self.desk), LineMagics(self.desk))
        for name in ("%ddp", "%local"):  # IPython calls these for `%%ddp` below the first line
            shell.magics_manager.register_function(_not_in_the_first_line, "line", name)
        shell.events.register("post_run_cell", _explain_names_of_ranks)
        self._load_ext = shell.magics_manager.magics["line"]["load_ext"]
        shell.magics_manager.register_function(self._load_ext_again, "line", "load_ext")
        self._debugger: Any = shell.debugger
        shell.debugger = self._debug  # type: ignore[method-assign]
        self.desk.auto.install(shell)
        self.completion = Completion(self.desk.group, self.desk.auto)
        self.completion.install(shell)

    def _load_ext_again(self, name: str) -> None:
        """Run ``%load_ext``; do nothing for nbddp, which is loaded: *Run All* repeats the line."""
        if name.strip() != "nbddp":
            self._load_ext(name)

    def _debug(self, force: bool = False) -> None:  # noqa: FBT001, FBT002 - IPython's
        """Look into the last error, for ``%debug``: on its rank if it is that of a cell there."""
        if force and isinstance(getattr(sys, "last_value", None), CellFailedError):
            self.desk.shell.run_line_magic("ddp", "debug")
        else:
            self._debugger(force=force)

    def restore(self, shell: InteractiveShell) -> None:
        """Restore the shell's own magics, and remove the hint about names of ranks."""
        shell.debugger = self._debugger  # type: ignore[method-assign]
        shell.events.unregister("post_run_cell", _explain_names_of_ranks)
        shell.magics_manager.register_function(self._load_ext, "line", "load_ext")

    def warm_up_after_this_cell(self) -> None:
        """Begin to import torch when ``%load_ext`` has returned.

        Loading torch's libraries holds Python's lock for long stretches: begun at once, in the
        background, it would still hold up the reply to the cell that says ``%load_ext``.
        """
        self.desk.group.start_helper()
        self._events.register("post_run_cell", self._warm_up)

    def _warm_up(self, *_result: object) -> None:
        self._events.unregister("post_run_cell", self._warm_up)
        self.desk.group.warm_up()


def _explain_names_of_ranks(result: Any) -> None:
    """Print a hint after a cell of the notebook that uses a name which only ranks have."""
    name = getattr(result.error_in_exec, "name", None)
    if isinstance(result.error_in_exec, NameError) and name in _NAMES_OF_RANKS:
        print(  # noqa: T201 - for the user
            f"nbddp: `{name}` is defined on the ranks, not in the notebook. Start the cell with "
            "`%%ddp`"
        )


def _not_in_the_first_line(_line: str) -> NoReturn:
    raise UsageError(
        "`%%ddp` and `%%local` must be on the first line of a cell. Move the lines above the "
        "command, comments included, below it"
    )


def load(shell: InteractiveShell) -> None:
    """Register the magics, the completer and the auto mode; begin to warm up."""
    if getattr(shell, "is_rank", False):
        print("nbddp: it is loaded in the notebook; this is one of its ranks")  # noqa: T201
        return
    if getattr(shell, ATTRIBUTE, None) is None:
        extension = _Extension(shell)
        setattr(shell, ATTRIBUTE, extension)
        extension.warm_up_after_this_cell()


def unload(shell: InteractiveShell) -> None:
    """Stop the group and take everything away that ``load`` put in."""
    extension: _Extension | None = getattr(shell, ATTRIBUTE, None)
    if extension is None:
        return
    setattr(shell, ATTRIBUTE, None)
    extension.desk.auto.remove(shell)
    extension.completion.remove(shell)
    extension.restore(shell)
    for kind, names in (("line", ("ddp", "%ddp", "%local")), ("cell", ("ddp", "local"))):
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    extension.desk.group.close()
