"""What the other end can show: a page with widgets, or text."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell


def shows_widgets(shell: InteractiveShell) -> bool:
    """Whether the cell that runs was sent by a notebook page, which draws widgets.

    A page names the cell that it asks for (JupyterLab, Notebook 7 and VS Code do) and can ask the
    user for input. nbclient, papermill, nbconvert and consoles do not name cells.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return False
    request: dict[str, Any] = kernel.get_parent("shell") or {}
    names_cell = bool(request.get("metadata", {}).get("cellId"))
    return names_cell and bool(request.get("content", {}).get("allow_stdin"))
