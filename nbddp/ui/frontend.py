"""What the front end can show, and where: widgets, rich output, or a stream of text."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import publish_display_data

from nbddp.charts.palette import terminal_color
from nbddp.checks.registry import Finding
from nbddp.record.cell import CellHandle, CellResult
from nbddp.ui.wording import format_rank_tag
from nbddp.wire.messages import Display, JsonDict

COALESCE_SECONDS = 0.002  # output that ranks print within this time is shown in one or two pieces
# replaces an output that is to go; a rule of the style sheet removes the room that it takes
EMPTY_OUTPUT: JsonDict = {"text/html": '<div class="nbddp-fallback"></div>', "text/plain": ""}
PAGE_CHARACTERS_PER_SECOND = 1e6  # on average; Jupyter's server drops more
PAGE_PROTOCOL_VERSION = "5.2"  # of Jupyter's JavaScript; jupyter_client sends 5.3 since 2017
COLAB_VARIABLE = "COLAB_RELEASE_TAG"  # it is in the environment of every kernel there
KAGGLE_VARIABLE = "KAGGLE_KERNEL_RUN_TYPE"  # "Interactive" in the editor, "Batch" when saved


Check = Callable[[CellHandle], Sequence[Finding]]  # what is to be said under a cell that ended


def no_check(_handle: CellHandle) -> Sequence[Finding]:
    """Nothing."""
    return ()


class View(Protocol):
    """Shows one cell; ``has_record`` tells whether that includes why it failed."""

    has_record: bool

    def show(self, handle: CellHandle) -> CellResult:
        """Show a cell from its beginning to its end."""

    def continue_from(self, before: View) -> None:
        """Go on in the place of the view of an earlier attempt, which has failed."""

    def show_status(self, text: str) -> None:
        """Say what is done about the failure that it has shown."""


class StreamTarget:
    """Where a view puts things: here a text stream, which shows rich things as their text."""

    def write(self, text: str) -> None:
        """Print."""
        sys.stdout.write(text)

    def flush(self) -> None:
        """Print now: ipykernel would hold it for 200 ms."""
        sys.stdout.flush()

    def display(
        self, data: JsonDict, metadata: JsonDict, *, display_id: str, is_update: bool
    ) -> None:
        """Print the text/plain form, if there is one and it is new."""
        del metadata, display_id  # for screens that can show more
        if not is_update and "text/plain" in data:
            sys.stdout.write(f"{data['text/plain']}\n")


class NotebookTarget(StreamTarget):
    """Prints to standard output, as a stream does, and displays through the running IPython."""

    def display(
        self, data: JsonDict, metadata: JsonDict, *, display_id: str, is_update: bool
    ) -> None:
        """Display a MIME bundle."""
        transient = {"display_id": display_id} if display_id else {}
        publish_display_data(data, metadata, transient=transient, update=is_update)


def new_display_id() -> str:
    """Return an id under which an output can be replaced."""
    return f"nbddp-{uuid.uuid4().hex}"


def publish(data: JsonDict, display_id: str, *, is_update: bool = False) -> None:
    """Show an output of the cell, or replace it."""
    publish_display_data(data, transient={"display_id": display_id}, update=is_update)


def supports_color(shell: InteractiveShell) -> bool:
    """Whether escape sequences become colours: in a notebook, or a terminal that allows them."""
    if os.environ.get("NO_COLOR") or str(shell.colors).lower() == "nocolor":
        return False
    return hasattr(shell, "kernel") or sys.stdout.isatty()


def supports_widgets(shell: InteractiveShell) -> bool:
    """Whether the cell that runs was sent by a notebook page, which draws widgets.

    A page can ask the user for input, and names the cell that it asks for (JupyterLab, Notebook 7
    and VS Code do, Colab in a way of its own) or speaks the version of the protocol that pages
    have stayed with (the classic Notebook). On Colab and in Kaggle's editor it is a page, whatever
    it names. nbclient, papermill and nbconvert ask for no input; consoles speak a newer version;
    nobody looks at a batch run of Kaggle's, whatever runs it.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None or os.environ.get(KAGGLE_VARIABLE) == "Batch":
        return False
    request: dict[str, Any] = kernel.get_parent("shell") or {}
    metadata: dict[str, Any] = request.get("metadata", {})
    if metadata.get("colab", {}).get("cell_id"):  # as google.colab reads it; nobody else says it
        return True
    takes_input = bool(request.get("content", {}).get("allow_stdin"))
    speaks_as_page = request.get("header", {}).get("version") == PAGE_PROTOCOL_VERSION
    is_there = bool(os.environ.get(COLAB_VARIABLE) or os.environ.get(KAGGLE_VARIABLE))
    return takes_input and (bool(metadata.get("cellId")) or speaks_as_page or is_there)


def is_restarting(shell: InteractiveShell) -> bool:
    """Whether the kernel ends because its user wants it to start anew."""
    asked = getattr(getattr(shell, "kernel", None), "_shutdown_message", None) or {}
    return bool(asked.get("content", {}).get("restart"))


def is_plain_text(message: Display) -> bool:
    """Whether it can as well be printed."""
    return not message.display_id and set(message.data) == {"text/plain"}


def show_rich(screen: StreamTarget, rank: int, message: Display, *, has_color: bool) -> None:
    """Show what a rank displayed, or change what it displayed before."""
    if not message.is_update:
        screen.write(f"{colored_rank_tag([rank], has_color=has_color)}\n")
        screen.flush()
    screen.display(
        message.data,
        message.metadata,
        display_id=message.display_id and f"nbddp-{rank}-{message.display_id}",
        is_update=message.is_update,
    )


def show_rich_value(
    screen: StreamTarget, ranks: Sequence[int], bundle: JsonDict, *, has_color: bool
) -> None:
    """Show a value that some ranks agree on, which is more than text."""
    screen.write(f"{colored_rank_tag(ranks, has_color=has_color)}\n")
    screen.flush()
    screen.display(bundle["data"], bundle["metadata"], display_id="", is_update=False)


def colored_rank_tag(ranks: Sequence[int], mark: str = "", *, has_color: bool) -> str:
    """The name of some ranks, as it stands before what they wrote, in the colour of the first."""
    text = format_rank_tag(ranks, mark)
    if not has_color:
        return text
    return f"\x1b[38;5;{terminal_color(ranks[0])}m{text}\x1b[0m"
