"""The output targets of a view, and the capabilities of the front end."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import publish_display_data

from nbddp.charts.palette import terminal_color
from nbddp.record.cell import CellHandle, CellResult
from nbddp.ui.report.blocks import Block
from nbddp.ui.wording import format_rank_tag
from nbddp.wire.messages import Display, JsonDict

logger = logging.getLogger(__name__)

SHUTDOWN_DELAY = 0.5  # seconds from the interrupt to the request, when Jupyter ends a busy kernel
COALESCE_SECONDS = 0.002  # output that ranks print within this time is shown in one or two pieces
# removes an output by replacing it; a rule in panel.css hides the empty space
EMPTY_OUTPUT: JsonDict = {"text/html": '<div class="nbddp-fallback"></div>', "text/plain": ""}
PAGE_PROTOCOL_VERSION = "5.2"  # of Jupyter's JavaScript; jupyter_client sends 5.3 since 2017
COLAB_VARIABLE = "COLAB_RELEASE_TAG"  # set in every kernel on Colab
KAGGLE_VARIABLE = "KAGGLE_KERNEL_RUN_TYPE"  # "Interactive" in the editor, "Batch" when saved


Remarks = Callable[[CellHandle], Sequence[Block]]  # returns what extensions say below a cell


class View(Protocol):
    """Shows one cell; ``has_record`` is whether the view also shows why a cell failed."""

    has_record: bool

    def show(self, handle: CellHandle) -> CellResult:
        """Show a cell until it ends."""

    def continue_from(self, before: View) -> None:
        """Replace the view of an earlier attempt, which has failed."""

    def show_status(self, text: str) -> None:
        """Show how nbddp recovers from the failure that this view has shown."""


class ErrorBoundary:
    """Keeps an error of a view from ending the supervision of its cell.

    It logs the first error with its traceback, and tells the user once. A broken pipe is not
    caught: then the program that reads the output has ended, as in ``python train.py | head``.

    Args:
        screen: where the user is told.
    """

    def __init__(self, screen: StreamTarget) -> None:
        self._screen = screen
        self._has_caught = False

    @contextmanager
    def logging_errors(self) -> Iterator[None]:
        """Log an error in the block, tell the user, and continue after the block."""
        try:
            yield
        except BrokenPipeError:
            raise
        except Exception as error:
            if self._has_caught:
                return
            self._has_caught = True
            logger.exception("the output of a cell could not be shown")
            with suppress(OSError, ValueError):  # the screen itself may be closed
                self._screen.write_line(
                    f"nbddp: a part of the output cannot be shown ({type(error).__name__}: {error})"
                    ". The cell goes on; `%ddp logs RANK` prints what a rank wrote"
                )


class StreamTarget:
    """The output target of a view; this one prints, and shows rich output as plain text.

    Attributes:
        has_color: whether each rank has a colour.
        pace: characters a second that the target can show.
    """

    pace = math.inf

    def __init__(self, *, has_color: bool = False) -> None:
        self.has_color = has_color

    def write(self, text: str) -> None:
        sys.stdout.write(text)

    def flush(self) -> None:
        """Flush standard output, which ipykernel would buffer for 200 ms."""
        sys.stdout.flush()

    def write_line(self, text: str) -> None:
        """Write a line, and show it at once."""
        self.write(f"{text}\n")
        self.flush()

    def display(
        self, data: JsonDict, metadata: JsonDict, *, display_id: str, is_update: bool
    ) -> None:
        """Print the text/plain form of a new MIME bundle, if it has one."""
        del metadata, display_id  # for targets that support rich output
        if not is_update and "text/plain" in data:
            sys.stdout.write(f"{data['text/plain']}\n")

    def show_picture(self, png: bytes, width: int, *, text: str) -> None:
        """Display a PNG, this many CSS pixels wide, or print the text instead."""
        data = {"image/png": b64encode(png).decode(), "text/plain": text}
        self.display(data, {"image/png": {"width": width}}, display_id="", is_update=False)

    def show_rich(self, rank: int, message: Display) -> None:
        """Display a rank's rich output, or update an earlier one."""
        if not message.is_update:
            self.write_line(self.tag([rank]))
        self.display(
            message.data,
            message.metadata,
            display_id=message.display_id and f"nbddp-{rank}-{message.display_id}",
            is_update=message.is_update,
        )

    def show_value(self, ranks: Sequence[int], bundle: JsonDict) -> None:
        """Display a rich value that some ranks have in common."""
        self.write_line(self.tag(ranks))
        self.display(bundle["data"], bundle["metadata"], display_id="", is_update=False)

    def tag(self, ranks: Sequence[int], mark: str = "") -> str:
        """Return the tag before the output of some ranks, in the colour of the first rank."""
        text = format_rank_tag(ranks, mark)
        return f"\x1b[38;5;{terminal_color(ranks[0])}m{text}\x1b[0m" if self.has_color else text


class NotebookTarget(StreamTarget):
    """Prints to standard output, and displays rich output with IPython."""

    pace = 1e6  # sustained; above this rate, Jupyter's server drops output

    def display(
        self, data: JsonDict, metadata: JsonDict, *, display_id: str, is_update: bool
    ) -> None:
        """Display a MIME bundle."""
        transient = {"display_id": display_id} if display_id else {}
        publish_display_data(data, metadata, transient=transient, update=is_update)


def new_display_id() -> str:
    """Return a unique id, by which an output can be replaced."""
    return f"nbddp-{uuid.uuid4().hex}"


def publish(data: JsonDict, display_id: str, *, is_update: bool = False) -> None:
    """Publish an output of the cell, or replace one."""
    publish_display_data(data, transient={"display_id": display_id}, update=is_update)


def supports_color(shell: InteractiveShell) -> bool:
    """Return whether ANSI colours work: in a notebook, or in a terminal that allows them."""
    if os.environ.get("NO_COLOR") or str(shell.colors).lower() == "nocolor":
        return False
    return hasattr(shell, "kernel") or sys.stdout.isatty()


def supports_widgets(shell: InteractiveShell) -> bool:
    """Return whether the running cell was sent by a notebook page, which can draw widgets.

    A request from a page allows input. It also has a cell id (JupyterLab, Notebook 7, VS Code, and
    Colab under a different key), or the protocol version 5.2 (the classic Notebook). On Colab and
    in Kaggle's editor, a request that allows input is enough. Requests of nbclient, papermill and
    nbconvert allow no input. Consoles send a newer protocol version. A batch run on Kaggle has no
    page.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None or os.environ.get(KAGGLE_VARIABLE) == "Batch":
        return False
    request: dict[str, Any] = kernel.get_parent("shell") or {}
    metadata: dict[str, Any] = request.get("metadata", {})
    if metadata.get("colab", {}).get("cell_id"):  # the key that google.colab reads, unique to Colab
        return True
    takes_input = bool(request.get("content", {}).get("allow_stdin"))
    has_page_protocol = request.get("header", {}).get("version") == PAGE_PROTOCOL_VERSION
    is_hosted = bool(os.environ.get(COLAB_VARIABLE) or os.environ.get(KAGGLE_VARIABLE))
    return takes_input and (bool(metadata.get("cellId")) or has_page_protocol or is_hosted)


def is_restarting(shell: InteractiveShell) -> bool:
    """Return whether the kernel shuts down because the user restarts it."""
    request = getattr(getattr(shell, "kernel", None), "_shutdown_message", None) or {}
    return bool(request.get("content", {}).get("restart"))


def is_shutting_down(shell: InteractiveShell) -> bool:
    """Return whether the kernel shuts down. After the interrupt before it, wait for the request."""
    deadline = time.monotonic() + SHUTDOWN_DELAY
    kernel = getattr(shell, "kernel", None)
    while (request := getattr(kernel, "_shutdown_message", None)) is None:
        if kernel is None or time.monotonic() > deadline:
            return False
        time.sleep(0.01)  # the control thread receives it
    return bool(request)


def is_plain_text(message: Display) -> bool:
    """Return whether the output is only plain text, and can be printed."""
    return not message.display_id and set(message.data) == {"text/plain"}
