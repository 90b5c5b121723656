"""A real ipykernel, driven as by a front end."""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any, Self

from jupyter_client.manager import KernelManager
from processes import wait_until

PATIENCE = 120.0  # seconds that a cell may take; a slow machine is not hung
DROPPED_AFTER = 3.0  # seconds until the reply, once the kernel is idle
Answer = str | Callable[[], object]
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Reply:
    status: str = ""
    text: str = ""
    error: str = ""
    traceback: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)  # the final displays
    widget_texts: list[str] = field(default_factory=list)
    result: str = ""
    asked: list[tuple[str, bool]] = field(default_factory=list)  # prompts; whether it is a secret
    waits: list[float] = field(default_factory=list)  # from the last answer to the next prompt
    counts: set[int] = field(default_factory=set)  # the prompt number
    seconds: float = 0.0

    def lines(self, rank: int) -> list[str]:
        tag = f"[rank {rank}] "
        return [line[len(tag) :] for line in self.text.splitlines() if line.startswith(tag)]


class Notebook:
    """A kernel with nbddp loaded; a context manager."""

    _has_died = False
    _is_page = False
    _is_stopped = False
    _heard = 0.0
    asked: dict[str, Any]  # the last request for input

    def __init__(self, folder: Path, *, loads: bool = True, is_page: bool = False) -> None:
        # not by TCP: kernels that start at the same time may choose the same port
        self._sockets = TemporaryDirectory(dir="/tmp")
        self._manager = KernelManager(transport="ipc", ip=f"{self._sockets.name}/kernel")
        self.folder = folder  # in which cells work
        self._is_page = is_page
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        env = os.environ | {"TMPDIR": str(self.temporary)}
        self._manager.start_kernel(cwd=str(folder), env=env)
        self.client = self._manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        if loads:
            assert self.run("%load_ext nbddp").status == "ok"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel()
        self._sockets.cleanup()

    @property
    def pid(self) -> int:
        provisioner: Any = self._manager.provisioner
        return int(provisioner.pid)

    def next_message(self, timeout: float) -> dict[str, Any]:
        """Return the next message of any cell; raise ``Empty`` if none arrives in time."""
        message: dict[str, Any] = self.client.get_iopub_msg(timeout=timeout)
        return message

    def run(self, source: str, *, timeout: float = PATIENCE) -> Reply:
        """Run a cell and wait for its end.

        For a moment after an error ipykernel 6 aborts new requests; a person types more slowly.
        """
        while True:
            reply = self.finish(self.begin(source), timeout=timeout)
            if reply.status != "aborted":
                return reply

    def converse(self, source: str, *answers: Answer, timeout: float = PATIENCE) -> Reply:
        """Run a cell that asks for input; each answer is a text to type, or a function to call."""
        request, began, reply = self.begin(source, asks=True), time.monotonic(), Reply()
        unused = list(answers)
        while time.monotonic() - began < timeout:
            if self._is_asked(request, reply) and unused:
                answer = unused.pop(0)
                reply.waits.append(time.monotonic() - self._heard)
                answer() if callable(answer) else self.client.input(answer)
                self._heard = time.monotonic()
            with suppress(Empty):
                message = self.next_message(0.005)
                is_ours = message["parent_header"].get("msg_id") == request
                if is_ours and self._read(message, reply):
                    break
        reply.status = self._status(request, reply, timeout=timeout)
        reply.seconds = time.monotonic() - began
        return reply

    def _is_asked(self, request: str, reply: Reply) -> bool:
        with suppress(Empty):
            message = self.client.get_stdin_msg(timeout=0.005)
            if message["parent_header"].get("msg_id") == request:
                self.asked, content = message, message["content"]
                reply.asked.append((content["prompt"], content["password"]))
                return True
        return False

    def begin(self, source: str, *, asks: bool = False) -> str:
        """Send a cell, from a front end with or without input boxes. Return the message id."""
        content = {
            "code": source,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": asks or self._is_page,
            "stop_on_error": True,
        }
        names = {"cellId": "a-cell"} if self._is_page else {}  # as JupyterLab does
        message = self.client.session.msg("execute_request", content, metadata=names)
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def read_until(
        self,
        request: str,
        reply: Reply,
        wanted: Callable[[Reply], bool],
        *,
        timeout: float = PATIENCE,
    ) -> bool:
        """Collect the output of a cell until it is as wanted. Return false if the cell ended."""
        deadline = time.monotonic() + timeout
        while not wanted(reply):
            message = self.next_message(max(0.01, deadline - time.monotonic()))
            is_ours = message["parent_header"].get("msg_id") == request
            if is_ours and self._read(message, reply):
                return False
        return True

    def finish(
        self,
        request: str,
        *,
        timeout: float = PATIENCE,
        until: str = "",
        times: int = 1,
        so_far: Reply | None = None,
    ) -> Reply:
        """Collect the output of a cell, to its end or until a text occurred this many times."""
        reply, began = so_far or Reply(), time.monotonic()

        def has_text(so_far: Reply) -> bool:
            return bool(until) and so_far.text.count(until) >= times

        is_running = self.read_until(request, reply, has_text, timeout=timeout)
        reply.seconds = time.monotonic() - began
        if not is_running:
            reply.status = self._status(request, reply, timeout=timeout)
        return reply

    def _status(self, request: str, reply: Reply, *, timeout: float) -> str:
        """Return the status of the reply; "dropped" if an interrupt dropped the request.

        It drops the request if it is interrupted in its own code, before the cell (seen with 7.4).
        """
        is_stopped, self._is_stopped = self._is_stopped, False
        try:
            answer = self.client.get_shell_msg(timeout=DROPPED_AFTER if is_stopped else timeout)
            while answer["parent_header"].get("msg_id") != request:
                answer = self.client.get_shell_msg(timeout=timeout)
        except (Empty, ValueError) as error:
            is_damaged = "Invalid Signature" in str(error)  # interrupted while it signed its answer
            if is_stopped and (is_damaged or isinstance(error, Empty)):
                return "dropped"
            raise
        if "execution_count" in answer["content"]:
            reply.counts.add(answer["content"]["execution_count"])
        return str(answer["content"]["status"])

    def _read(self, message: dict[str, Any], reply: Reply) -> bool:
        content = message["content"]
        match message["msg_type"]:
            case "execute_input":
                reply.counts.add(content["execution_count"])
            case "stream":
                reply.text += _ANSI.sub("", content["text"])
            case "error":
                reply.error = f"{content['ename']}: {content['evalue']}"
                reply.traceback = _ANSI.sub("", "\n".join(content["traceback"]))
            case "execute_result":
                reply.result = content["data"]["text/plain"]
            case "display_data":
                reply.displays.append(content["data"])
                place = content.get("transient", {}).get("display_id", f"#{len(reply.places)}")
                reply.places[place] = content["data"]
            case "update_display_data":
                reply.updates.append(content["data"])
                place = content["transient"]["display_id"]
                if place in reply.places:  # else it is another cell's
                    reply.places[place] = content["data"]
            case "comm_open" | "comm_msg":
                state = content["data"].get("state", {})
                reply.widget_texts.append(str(state.get("value", "")))
            case "status":
                return bool(content["execution_state"] == "idle")
        return False

    def run_until(self, source: str, wanted: Callable[[Reply], bool]) -> Reply:
        """Run a cell that waits for a file ``go_on``; create it once the condition is true."""
        go_on = self.folder / "go_on"
        go_on.unlink(missing_ok=True)
        request, reply = self.begin(source), Reply()
        assert self.read_until(request, reply, wanted), f"it was over before: {reply}"
        go_on.touch()
        return self.finish(request, so_far=reply)

    def complete(self, code: str) -> list[str]:
        content = self.client.complete(code, reply=True, timeout=PATIENCE)["content"]
        word_begins = len(code) - len(code.split()[-1])
        return [code[word_begins : content["cursor_start"]] + match for match in content["matches"]]

    def hint(self, code: str) -> str:
        """Return the text of Shift+Tab at the end of some code, or an empty text."""
        content = self.client.inspect(code, len(code), reply=True, timeout=PATIENCE)["content"]
        return _ANSI.sub("", content["data"].get("text/plain", ""))

    def interrupt(self) -> None:
        self._is_stopped = True
        self._manager.interrupt_kernel()

    def run_and_stop(self, source: str, seconds: float) -> Reply:
        """Run a cell and interrupt it this many seconds after its start.

        An interrupt between cells can end ipykernel itself: without nbddp, on two busy
        cores, one of 9,700 did. So the first kernel that ends in this way is replaced.
        """
        while True:
            try:
                request, reply = self.begin(source), Reply()
                # before the kernel runs the cell, an interrupt has no effect
                self.read_until(request, reply, lambda it: bool(it.counts))
                time.sleep(seconds)
                self.interrupt()
                self.finish(request, so_far=reply, until="Error in callback")
                if not reply.status:  # IPython prints an interrupt of its callbacks, and goes on
                    self.interrupt()
                    self.finish(request, so_far=reply)
            except Empty:
                if self._manager.is_alive() or Notebook._has_died:
                    raise
                Notebook._has_died = True
                self.restart()
                assert self.run("%load_ext nbddp").status == "ok"
                continue
            if reply.status != "dropped":  # before nbddp, or any code of a cell, could see it
                return reply

    def run_and_stop_at(self, source: str, *marks: str) -> Reply:
        """Run a cell and interrupt it once these files exist in the kernel's first folder.

        The reply has the seconds since the interrupt.
        """
        paths = [self.folder / mark for mark in marks]
        for path in paths:
            path.unlink(missing_ok=True)
        request = self.begin(source)
        are_there = wait_until(lambda: all(path.exists() for path in paths), timeout=PATIENCE)
        assert are_there, "the cell did not create the files"
        began = time.monotonic()
        self.interrupt()
        reply = self.finish(request)
        reply.seconds = time.monotonic() - began
        return reply

    def restart(self) -> None:
        self._manager.restart_kernel()
        self.client.wait_for_ready(timeout=PATIENCE)

    def shut_down(self) -> None:
        """Shut the kernel down as Jupyter's server does: it interrupts it first."""
        self._manager.shutdown_kernel()

    def kill(self) -> None:
        self._manager.shutdown_kernel(now=True)
