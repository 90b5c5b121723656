"""A notebook cell's output area, or a terminal IPython's screen."""

from __future__ import annotations

import os
import sys

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import publish_display_data

from nbddp.ui.text import StreamScreen
from nbddp.wire.messages import JsonDict


class IPythonScreen(StreamScreen):
    """Prints to standard output, as a stream does, and displays through the running IPython."""

    def display(
        self, data: JsonDict, metadata: JsonDict, *, display_id: str, is_update: bool
    ) -> None:
        """Display a MIME bundle."""
        transient = {"display_id": display_id} if display_id else {}
        publish_display_data(data, metadata, transient=transient, update=is_update)


def shows_color(shell: InteractiveShell) -> bool:
    """Whether escape sequences become colours: in a notebook, or a terminal that allows them."""
    if os.environ.get("NO_COLOR") or str(shell.colors).lower() == "nocolor":
        return False
    return hasattr(shell, "kernel") or sys.stdout.isatty()
