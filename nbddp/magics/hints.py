"""Shift+Tab in a cell for the ranks: options in words, and names as the ranks know them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbddp.errors import RequestError
from nbddp.magics.complete import Completer

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.magics.steered import SteeredGroup

PATIENCE = 1.0  # seconds that a page may wait for it


class Hints:
    """Answers the kernel's inspect requests where it knows more than the kernel does.

    Args:
        group: whose names are asked for.
        completer: knows which part of a cell is whose.
    """

    def __init__(self, group: SteeredGroup, completer: Completer) -> None:
        self._group = group
        self._completer = completer
        self._before: Any = None

    def install(self, shell: InteractiveShell) -> None:
        """Have the kernel ask us first; a terminal has no such requests."""
        kernel: Any = getattr(shell, "kernel", None)
        if hasattr(kernel, "do_inspect"):
            self._before = kernel.do_inspect
            kernel.do_inspect = self._inspect

    def remove(self, shell: InteractiveShell) -> None:
        """Leave the kernel as it was, unless somebody else has come in between."""
        kernel: Any = getattr(shell, "kernel", None)
        if getattr(kernel, "do_inspect", None) == self._inspect:
            del kernel.do_inspect  # the class's own shows again

    def _inspect(self, code: str, cursor_pos: int, detail_level: int = 0, *more: Any) -> Any:
        text = self.about(code, cursor_pos, detail_level)
        if not text:
            return self._before(code, cursor_pos, detail_level, *more)
        data = {"text/plain": text}
        return {"status": "ok", "found": True, "data": data, "metadata": {}}

    def about(self, code: str, cursor: int, detail: int = 0) -> str:
        """What there is to say of a place in a cell; empty where only the kernel knows."""
        before = code[:cursor]
        row = before.count("\n")
        if self._completer.is_for_ranks(code, row):
            try:
                return self._group.inspect(code, cursor, detail=detail, timeout=PATIENCE)
            except RequestError:  # it ended, or became busy, this very moment
                return ""
        return self._completer.explain(code, row, cursor - before.rfind("\n") - 1)
