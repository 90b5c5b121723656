"""What the other end can show: a page with widgets, or text."""

from __future__ import annotations

import os
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

OF_PAGES = "5.2"  # jupyter_client has said 5.3 since 2017, Jupyter's JavaScript never did
OF_COLAB = "COLAB_RELEASE_TAG"  # it is in the environment of every kernel there
OF_KAGGLE = "KAGGLE_KERNEL_RUN_TYPE"  # "Interactive" in the editor, "Batch" in a saved version


def shows_widgets(shell: InteractiveShell) -> bool:
    """Whether the cell that runs was sent by a notebook page, which draws widgets.

    A page can ask the user for input, and names the cell that it asks for (JupyterLab, Notebook 7
    and VS Code do, Colab in a way of its own) or speaks the version of the protocol that pages
    have stayed with (the classic Notebook). On Colab and in Kaggle's editor it is a page, whatever
    it names. nbclient, papermill and nbconvert ask for no input; consoles speak a newer version;
    nobody looks at a batch run of Kaggle's, whatever runs it.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None or os.environ.get(OF_KAGGLE) == "Batch":
        return False
    request: dict[str, Any] = kernel.get_parent("shell") or {}
    metadata: dict[str, Any] = request.get("metadata", {})
    if metadata.get("colab", {}).get("cell_id"):  # as google.colab reads it; nobody else says it
        return True
    takes_input = bool(request.get("content", {}).get("allow_stdin"))
    speaks_as_page = request.get("header", {}).get("version") == OF_PAGES
    is_there = bool(os.environ.get(OF_COLAB) or os.environ.get(OF_KAGGLE))
    return takes_input and (bool(metadata.get("cellId")) or speaks_as_page or is_there)


def begins_anew(shell: InteractiveShell) -> bool:
    """Whether the kernel ends because its user wants it to start anew."""
    asked = getattr(getattr(shell, "kernel", None), "_shutdown_message", None) or {}
    return bool(asked.get("content", {}).get("restart"))
