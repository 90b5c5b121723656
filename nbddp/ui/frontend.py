"""What the other end can show: a page with widgets, or text."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell

OF_PAGES = "5.2"  # jupyter_client has said 5.3 since 2017, Jupyter's JavaScript never did


def shows_widgets(shell: InteractiveShell) -> bool:
    """Whether the cell that runs was sent by a notebook page, which draws widgets.

    A page can ask the user for input, and names the cell that it asks for (JupyterLab, Notebook 7
    and VS Code do) or speaks the version of the protocol that pages have stayed with (the classic
    Notebook). nbclient, papermill, nbconvert and Kaggle's batch runs ask for no input; consoles
    speak a newer version.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return False
    request: dict[str, Any] = kernel.get_parent("shell") or {}
    names_cell = bool(request.get("metadata", {}).get("cellId"))
    speaks_as_page = request.get("header", {}).get("version") == OF_PAGES
    takes_input = bool(request.get("content", {}).get("allow_stdin"))
    return takes_input and (names_cell or speaks_as_page)
