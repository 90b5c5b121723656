"""Auto mode: cells without a cell magic run on the ranks."""

from __future__ import annotations

AUTO_PREFIX = "%%ddp --auto\n"
_UNLOADS = [["%unload_ext", "nbddp"], ["%reload_ext", "nbddp"]]


class AutoMode:
    r"""An input transformer that inserts ``%%ddp`` before a cell, and removes ``%%local``.

    Cells that start with a cell magic, or that use ``%ddp`` or unload nbddp, do not change.

    >>> auto = AutoMode()
    >>> auto.is_on = True
    >>> auto(["x = rank\n"]), auto(["%%time\n", "x = 1\n"]), auto(["%%local\n", "x = 1\n"])
    (['%%ddp --auto\n', 'x = rank\n'], ['%%time\n', 'x = 1\n'], ['\n', 'x = 1\n'])
    """

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, lines: list[str]) -> list[str]:
        """Transform the lines of a cell."""
        first = next((line for line in lines if line.strip()), "")
        if first.rstrip() == "%%local":
            return ["\n" if line is first else line for line in lines]
        words = [line.split() for line in lines]
        uses_ddp = any(each[:1] == ["%ddp"] or each[:2] in _UNLOADS for each in words)
        # IPython generates lines with get_ipython()
        is_unchanged = uses_ddp or first.startswith(("%%", "get_ipython()"))
        return [AUTO_PREFIX, *lines] if self.is_on and first and not is_unchanged else lines
