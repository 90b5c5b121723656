"""Move warnings from lines of nbddp to the user's line.

A library names its caller by a number of stack frames (``stacklevel``). If nbddp wraps a function
of torch, or calls one for the user, that frame belongs to nbddp.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import filterfalse
from types import FrameType
from typing import Any

from nbddp.worker.watch.main_thread import frames_from, is_called_from, library_of_file, line_of


def remove_filters_of_tools() -> None:
    """Remove the warning filters of modules that a plain program would not have imported.

    joblib pickles the filters for each of its workers, which would import IPython and sympy.
    """
    filters: Any = warnings.filters
    filters[:] = [
        f for f in filters if f[2].__module__.partition(".")[0] not in ("IPython", "sympy")
    ]


def name_users_lines(is_cell_file: Callable[[str], bool]) -> None:
    """Replace Python's display of warnings: a warning for nbddp names the line that called nbddp.

    A warning is hidden if no cell made the call, because the user can do nothing about it. Set
    ``PYTHONWARNINGS`` to any value to show it.

    Args:
        is_cell_file: returns whether a file name belongs to a cell or a script.
    """
    module: Any = warnings
    show = module._showwarnmsg  # Python calls it for each warning that passes the filters

    def show_at_users_line(warning: warnings.WarningMessage) -> None:
        nbddp_frame = _nbddp_frame_of(warning)
        if nbddp_frame is None:
            show(warning)
            return
        # Forget that the filters saw nbddp's line: they must decide again for the user's line.
        nbddp_frame.f_globals.pop("__warningregistry__", None)
        module.onceregistry.pop((str(warning.message), warning.category), None)
        frame = next(filterfalse(_is_of_nbddp, frames_from(nbddp_frame)), None)
        if frame is not None and is_called_from(frame, is_cell_file):
            warnings.warn_explicit(
                warning.message,
                warning.category,
                frame.f_code.co_filename,
                line_of(frame),
                module=frame.f_globals.get("__name__"),
                registry=frame.f_globals.setdefault("__warningregistry__", {}),
                source=warning.source,
            )
        elif sys.warnoptions:
            show(warning)

    module._showwarnmsg = show_at_users_line


def _nbddp_frame_of(warning: warnings.WarningMessage) -> FrameType | None:
    """Return the frame of nbddp that a warning names, or None if it names another file."""
    line = warning.filename, warning.lineno
    ours = filter(_is_of_nbddp, frames_from(sys._getframe(2)))
    return next((each for each in ours if (each.f_code.co_filename, each.f_lineno) == line), None)


def _is_of_nbddp(frame: FrameType) -> bool:
    return library_of_file(frame.f_code.co_filename) == "nbddp"
