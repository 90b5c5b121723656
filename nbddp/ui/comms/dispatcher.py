"""Answer widget messages while the kernel's main thread waits in a cell.

A kernel answers widget messages only between cells, so a button that is pressed while a cell runs
has no effect until the cell ends. Some front ends ask for a second thread, but most do not, and
ipykernel 7.4 sends the message back to the thread that created the button. So this module
intercepts the messages of served widgets before the kernel reads them. All other messages reach the
kernel.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from ipywidgets import Widget

from nbddp.sigint import run_in_loop, sigint_deferred, wait_for_all
from nbddp.ui.comms.kernel_stream import (
    BUTTONS_WAIT,
    DispatchMode,
    StreamInterceptor,
    dispatch_mode_of,
)

logger = logging.getLogger(__name__)

# a page that opens or reloads asks for all widgets over this comm
CONTROL_TARGET = "jupyter.widget.control"
BUSY_PERIOD = 1.0  # seconds between two messages that the cell still runs
JOIN_TIMEOUT = 5.0  # seconds to wait for the kernel's reading thread, and for a running handler

_ATTRIBUTE = "_nbddp_live"
_KINDS = ("comm_open", "comm_msg", "comm_close")


@dataclass(eq=False)
class ServedWidgets:
    """Widgets whose messages are answered, in the context of the cell that shows them.

    Attributes:
        roots: the widgets, with all that they contain; none until the cell shows them.
        cell: the request of the cell that blocks the main thread; None if another thread waits.
        reloads: how often a page was opened or reloaded meanwhile, and asked for all widgets. Such
            a page has lost the printed output.
        pages: the pages that show the widgets, by the name that Jupyter's protocol calls session.
        rerun: the last request that runs the same cell again; it waits. JupyterLab has dropped the
            outputs of the running cell for it, and shows only outputs of the new request. Or the
            first request of a page that was reloaded and does not show the widgets, because it
            was not saved with them.
    """

    roots: Sequence[Widget]
    context: contextvars.Context
    cell: dict[str, Any] | None = None
    reloads: int = 0
    pages: set[str] = field(default_factory=set)
    rerun: dict[str, Any] | None = None

    @property
    def is_moved(self) -> bool:
        """Whether the output of another cell shows the widgets."""
        return self.rerun is not None and _cell_id(self.rerun) != _cell_id(self.cell)

    def contains(self, comm_id: str) -> bool:
        """Return whether the message of this comm is for one of the widgets."""
        return any(_contains(root, comm_id) for root in self.roots)


class CommDispatcher:
    """Answers the messages of served widgets on its own thread; there is one for each kernel.

    Attributes:
        cells_sent: how many cells the user has sent while widgets were served.
    """

    def __init__(self, kernel: Any) -> None:
        self.cells_sent = 0
        self._kernel = kernel
        self._kernel_mode = dispatch_mode_of(kernel)
        self._has_failed = False
        self._next_busy_at = 0.0
        self._has_logged_error = False
        # replaced but never changed, because other threads read it
        self._served: tuple[ServedWidgets, ...] = ()
        # held to replace _served, and to publish "busy" for a cell in it: see _stop()
        self._lock = threading.Lock()
        self._interceptor: StreamInterceptor | None = None
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[tuple[list[Any], ServedWidgets] | None] = SimpleQueue()
        self._control_ids: set[str] = set()
        self._to_close: defaultdict[int, deque[Callable[[], None]]] = defaultdict(deque)

    @classmethod
    def for_shell(cls, shell: InteractiveShell | None) -> CommDispatcher:
        """Return the dispatcher of the shell's kernel; without a kernel it does nothing."""
        kernel = getattr(shell, "kernel", None)
        dispatcher: CommDispatcher | None = getattr(kernel, _ATTRIBUTE, None)
        if dispatcher is None:
            dispatcher = cls(kernel)
            if kernel is not None:
                setattr(kernel, _ATTRIBUTE, dispatcher)
        return dispatcher

    @property
    def mode(self) -> DispatchMode:
        """How messages are intercepted; ``POLL`` needs calls of `process_pending`."""
        return DispatchMode.NONE if self._has_failed else self._kernel_mode

    @property
    def is_kernel_ending(self) -> bool:
        """Whether the kernel is about to shut down or restart: no page is connected any more."""
        return getattr(self._kernel, "_shutdown_message", None) is not None

    @contextmanager
    def serve(self, *roots: Widget) -> Iterator[ServedWidgets]:
        """Answer these widgets in the block; several blocks can be nested or overlap.

        All widgets in them, such as children, layouts and styles, are served too. The main thread
        must wait in the block. After it, the kernel answers the widgets between cells.
        """
        served = ServedWidgets(roots, contextvars.copy_context())
        try:
            self._start(served)
            yield served
        finally:
            self._stop(served)

    def process_pending(self) -> None:
        """Answer pending messages. Call it on the waiting main thread every 50 to 100 ms."""
        if threading.current_thread() is not threading.main_thread():
            return
        # On its first widget, a page asks for a second shell on the control channel, and shows the
        # kernel as idle after the answer. So repeat from time to time that the cell is running.
        if self._served and time.monotonic() >= self._next_busy_at:
            self._next_busy_at = time.monotonic() + BUSY_PERIOD
            self._publish_still_busy()
        if self.mode is not DispatchMode.POLL or self._interceptor is None:
            return
        with sigint_deferred():  # an interrupt would lose a message that the stream has given out
            self._kernel.shell_stream.flush()
            for item in self._pending_messages():
                self._answer(*item)

    def redirect_output(self, request: dict[str, Any]) -> None:
        """Send all further output of the running cell as output of this request."""
        shell = self._kernel.shell
        if hasattr(shell.display_pub, "set_parent"):  # `%%capture` has none
            # not kernel.set_parent: an early "idle" would end the request for the page
            shell.set_parent(request)

    def close_later(self, close: Callable[[], None], *, most: int) -> None:
        """Keep the widgets of the last ``most`` finished cells open, and close older ones.

        A page may still be drawing them, or may not follow the output that replaces them.
        """
        kept = self._to_close[most]
        kept.append(close)
        while len(kept) > most:
            kept.popleft()()

    # ---- start and stop

    def _start(self, served: ServedWidgets) -> None:
        if self._kernel_mode is DispatchMode.NONE:
            return
        # Another thread can wait too, but the cell that the page shows as busy is not its cell.
        if threading.current_thread() is threading.main_thread():
            served.cell = self._kernel.get_parent("shell")
            served.pages.add(served.cell["header"].get("session", ""))
        self._has_failed = False  # the kernel has read this cell, so it is not blocked
        with sigint_deferred():
            with self._lock:
                self._served = (*self._served, served)
            self._update_interceptor()

    def _stop(self, served: ServedWidgets) -> None:
        """Stop serving these widgets; after the last ones, restore the original kernel callback."""
        if served not in self._served:
            return
        with sigint_deferred():  # an interrupt would leave the interceptor until the next cell ends
            with self._lock:  # so that no thread publishes "busy" for its cell afterwards
                self._served = tuple(each for each in self._served if each is not served)
            thread = self._thread
            self._update_interceptor()
            # not under the lock: the handler that still runs takes it to publish "busy"
            if thread is not None and thread is not self._thread:
                _join(thread)

    # ---- interceptor and thread

    def _update_interceptor(self) -> None:
        """Create the interceptor and its thread, or remove both, as needed."""
        try:
            if self._kernel_mode is DispatchMode.THREAD:
                self._update_on_reading_thread()
            else:
                self._update_here()
        except TimeoutError:
            if not self._has_failed:
                logger.warning(
                    "%s: the kernel has read nothing for %g s", BUTTONS_WAIT, JOIN_TIMEOUT
                )
            self._has_failed = True
        except Exception:
            if not self.is_kernel_ending:  # its reading thread is ending too
                logger.warning(BUTTONS_WAIT, exc_info=True)
            self._has_failed = True

    def _update_on_reading_thread(self) -> None:
        async def update() -> None:
            # On the kernel's reading thread.
            self._update_here()

        loop = self._kernel.shell_channel_thread.io_loop.asyncio_loop
        updated = run_in_loop(loop, update())
        wait_for_all([updated], JOIN_TIMEOUT)  # no longer: the cell is more important than buttons
        if not updated.done():
            raise TimeoutError
        updated.result()

    def _update_here(self) -> None:
        # On the thread that reads the stream: in mode POLL this is the main thread.
        is_wanted = self.mode is not DispatchMode.NONE and bool(self._served)
        # unless a cell blocks the main thread, the kernel itself answers
        if self._kernel_mode is DispatchMode.POLL:
            is_wanted = is_wanted and any(each.cell is not None for each in self._served)
        if is_wanted and self._thread is None and self._kernel_mode is DispatchMode.THREAD:
            self._queue = SimpleQueue()  # a new one: an earlier thread may still read its own
            self._thread = threading.Thread(
                target=self._serve, args=(self._queue,), name="nbddp-widgets", daemon=True
            )
            self._thread.start()
        if self._interceptor is not None and not (is_wanted and self._interceptor.is_on_top):
            self._remove_interceptor(self._interceptor)
        if is_wanted and self._interceptor is None:
            comms = self._kernel.comm_manager.comms.copy().items()
            self._control_ids |= {key for key, each in comms if each.target_name == CONTROL_TARGET}
            self._interceptor = StreamInterceptor(self._kernel, self._intercept)
        if not is_wanted and self._thread is not None:
            self._queue.put(None)  # after the interceptor has gone: no message may follow it
            self._thread = None

    def _remove_interceptor(self, current: StreamInterceptor) -> None:
        current.remove()
        self._interceptor = None
        if self._kernel_mode is DispatchMode.POLL:
            for frames, _ in self._pending_messages():
                current.pass_on(frames)

    def _pending_messages(self) -> Iterator[tuple[list[Any], ServedWidgets]]:
        while not self._queue.empty():
            if (item := self._queue.get()) is not None:
                yield item

    # ---- which messages to intercept

    def _intercept(self, frames: list[Any]) -> bool:
        """Queue a message for a served widget. Return whether it was one."""
        # On the thread that reads the stream, which delivers nothing else meanwhile.
        try:
            served = self._find_recipient(frames)
        except Exception:
            if not self._has_logged_error:
                logger.warning("could not read a message; the kernel gets it", exc_info=True)
            self._has_logged_error = True
            return False
        if served is None:
            return False
        self._queue.put((frames, served))
        return True

    def _find_recipient(self, frames: list[Any]) -> ServedWidgets | None:
        _, message = self._read(frames, content=False)
        kind, candidates = message["header"]["msg_type"], self._served
        if kind == "execute_request":
            self.cells_sent += 1
            self._note_rerun(message, candidates)
        if kind not in _KINDS or not candidates:
            return None
        content = self._kernel.session.unpack(message["content"])
        comm_id = content["comm_id"]
        if kind == "comm_open" and content["target_name"] == CONTROL_TARGET:
            self._control_ids.add(comm_id)
        if comm_id in self._control_ids:
            return candidates[-1]
        recipient = next((each for each in reversed(candidates) if each.contains(comm_id)), None)
        # a page that draws the root of a panel sends how often it does: see _count_views_again
        if recipient is not None and content.get("data", {}).get("method") != "request_state":
            recipient.pages.add(message["header"]["session"])
        return recipient

    def _note_rerun(self, request: dict[str, Any], candidates: Sequence[ServedWidgets]) -> None:
        page, cell_id = request["header"]["session"], _cell_id(request)
        for served in candidates:
            if not cell_id or served.cell is None:
                continue
            is_again = cell_id in (_cell_id(served.cell), _cell_id(served.rerun))
            if is_again or (served.reloads and page not in served.pages):
                served.pages.add(page)
                served.rerun = request

    # ---- answers

    def _serve(self, queue: SimpleQueue[tuple[list[Any], ServedWidgets] | None]) -> None:
        # On the nbddp-widgets thread.
        while (item := queue.get()) is not None:
            try:
                self._answer(*item)
            except BaseException:  # such as sys.exit(): other buttons need this thread
                logger.exception("a widget's handler tried to end its thread")

    def _read(self, frames: list[Any], *, content: bool) -> tuple[list[bytes], dict[str, Any]]:
        """Return the identities and the message. With its content it can be read only once."""
        session, is_copy = self._kernel.session, self._kernel.shell_stream._recv_copy
        identities, parts = session.feed_identities(frames, copy=is_copy)
        return identities, session.deserialize(parts, content=content, copy=is_copy)

    def _answer(self, frames: list[Any], served: ServedWidgets) -> None:
        # On the nbddp-widgets thread, or on the main thread in process_pending().
        # In the context of the cell, the output of a handler appears in the cell. Each message
        # needs a copy: a handler may call process_pending(), and a context cannot be entered twice.
        served.context.copy().run(self._answer_in_context, frames)

    def _answer_in_context(self, frames: list[Any]) -> None:
        try:
            identities, message = self._read(frames, content=True)
            self._publish("busy", message)
            try:
                self._handle(identities, message)
            finally:
                # Until it gets "idle", the page holds back later input to the widget.
                self._publish("idle", message)
                self._publish_still_busy()
        except Exception:
            logger.exception("could not answer a message to a widget")

    def _handle(self, identities: list[bytes], message: dict[str, Any]) -> None:
        manager, kind = self._kernel.comm_manager, message["header"]["msg_type"]
        if kind != "comm_msg":
            getattr(manager, kind)(None, identities, message)
            return
        content = message["content"]
        comm = manager.comms.get(content["comm_id"])  # get_comm would print a warning in the cell
        if comm is None:
            return  # the widget has just been closed
        is_control = comm.comm_id in self._control_ids
        is_reload = is_control and content["data"]["method"] == "request_states"
        if is_reload:
            self._count_views_again()
        # Not comm.handle_msg: it triggers the events for the start and end of a cell. On these,
        # matplotlib shows and closes the figure that the running cell is still drawing.
        callback = getattr(comm, "_msg_callback", None) or comm.handle_msg
        callback(message)
        if is_reload:
            for served in self._served:
                served.reloads += 1

    def _count_views_again(self) -> None:
        """Have the page that asks for all widgets say which of the served ones it draws.

        A page sends ``_view_count`` if it differs from the state that it got.
        """
        for served in self._served:
            for root in served.roots:
                root._view_count = 0

    def _publish_still_busy(self) -> None:
        """Publish "busy" again: after "idle", a page shows the kernel as idle despite the cell."""
        with self._lock:
            blocked = [each.cell for each in self._served if each.cell is not None]
            if blocked:
                self._publish("busy", blocked[-1])

    def _publish(self, status: str, parent: dict[str, Any]) -> None:
        self._kernel._publish_status(status, "shell", parent=parent)


def _cell_id(request: dict[str, Any] | None) -> str:
    return request["metadata"].get("cellId", "") if request else ""


def _contains(widget: Widget, comm_id: str) -> bool:
    """Return whether the widget, or a widget in it, has this comm id."""
    parts = (getattr(widget, "layout", None), getattr(widget, "style", None))
    inner = (*getattr(widget, "children", ()), *(each for each in parts if each is not None))
    return widget.model_id == comm_id or any(_contains(each, comm_id) for each in inner)


def _join(thread: threading.Thread) -> None:
    if thread is threading.current_thread():
        return  # a handler stops its own dispatcher; the thread ends after the handler
    thread.join(JOIN_TIMEOUT)
    if thread.is_alive():
        logger.warning("a widget's handler still runs after %g s", JOIN_TIMEOUT)
