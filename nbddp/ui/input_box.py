"""The input box of a notebook's page, asked without waiting: a cell is shown while one types.

ipykernel's own ``raw_input()`` waits. What it does around the wait is done here: the request goes
out on the stdin channel, as the messaging protocol of Jupyter has it, and the answer is looked for.
"""

from __future__ import annotations

import sys
import time
import uuid
from typing import Any

import zmq
from IPython.display import publish_display_data

from nbddp.ui.frontend import shows_widgets
from nbddp.ui.questions import LOOK, WAY_OUT, RefusedError
from nbddp.ui.screen import EMPTY

END = "\x04"  # what a page sends for the end of file
CLOSING = 1.0  # seconds within which a page closes a box; JupyterLab 4.6 needs 10 to 60 ms
# JupyterLab runs a script before it puts its output on the page, hence the timer. The box comes on
# another channel than the script, possibly later. Only boxes of the same cell are closed.
_PRESS_ENTER = """
function press(tries) {
  const area = typeof element === "undefined" ? null : element.closest?.(".jp-OutputArea");
  const open = ".jp-OutputArea-stdin-item:not(.jp-OutputArea-stdin-hiding) input";
  const boxes = area?.querySelectorAll?.(open) ?? [];
  for (const box of boxes) {
    box.value = "";
    box.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
  }
  if (!boxes.length && tries) setTimeout(press, 50, tries - 1);
}
setTimeout(press, 0, 10);
"""


class KernelBox:
    """The page that runs the cell; used on the kernel's main thread.

    No message takes a box off a page. JupyterLab runs no other cell while it believes that one is
    open: until somebody presses Enter in it, or the kernel is interrupted. So a box that needs no
    answer is closed by a script, where the page runs scripts.
    """

    stays = (
        "the input box takes no answer any more: if the page waits for its “pending input”, "
        "press Enter in it, or interrupt the kernel"
    )

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._asked = ""  # the request's id

    def begin(self, prompt: str, *, is_secret: bool) -> None:
        """Show the box; answers to an earlier one are dropped."""
        kernel = self._kernel
        if not kernel._allow_stdin:
            raise RefusedError(WAY_OUT)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        while self._has_message():
            kernel.stdin_socket.recv_multipart(zmq.NOBLOCK)
        sent = kernel.session.send(
            kernel.stdin_socket,
            "input_request",
            {"prompt": prompt, "password": is_secret},
            kernel.get_parent("shell"),
            ident=self._identity(),
        )
        self._asked = sent["header"]["msg_id"]

    def _identity(self) -> Any:
        """Who asked for the cell: ipykernel 7 has it in a variable of each shell, 6 in a dict."""
        kernel = self._kernel
        if hasattr(kernel, "_get_shell_context_var"):
            return kernel._get_shell_context_var(kernel._shell_parent_ident)
        return kernel._parent_ident["shell"]

    def _has_message(self) -> bool:
        return bool(self._kernel.stdin_socket.poll(0))

    def poll(self) -> str | None:
        """What was typed, None while nothing was."""
        text = self._reply()
        if text == END:
            raise EOFError
        return text

    def _reply(self) -> str | None:
        if not self._has_message():
            return None
        _, reply = self._kernel.session.recv(self._kernel.stdin_socket)
        if reply is None:
            return None
        if reply["parent_header"].get("msg_id", self._asked) != self._asked:
            return None  # a box that was left open
        return str(reply["content"].get("value", ""))

    def close(self) -> bool:
        """Press Enter in the box. Return whether the page did so."""
        if not shows_widgets(self._kernel.shell):
            return False
        place = {"display_id": f"nbddp-{uuid.uuid4().hex}"}
        script = {"application/javascript": _PRESS_ENTER, "text/plain": ""}
        publish_display_data(script, transient=place)
        try:
            deadline = time.monotonic() + CLOSING
            while (reply := self._reply()) is None and time.monotonic() < deadline:
                time.sleep(LOOK)
            return reply is not None
        finally:  # remove the script: a notebook that is opened again must not run it
            publish_display_data(EMPTY, transient=place, update=True)
