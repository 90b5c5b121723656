"""Which kernel messages are taken, which thread answers them, and how the kernel is restored.

``notebooks/test_live.py`` tests what only a real kernel and its page can show.
"""

import asyncio
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import comm
import ipywidgets
import pytest
from jupyter_client.session import Session
from processes import wait_until
from syrupy.assertion import SnapshotAssertion

from nbddp.ui.comms import dispatcher as live_module
from nbddp.ui.comms.dispatcher import CommDispatcher, ServedWidgets
from nbddp.ui.comms.kernel_stream import DispatchMode

Check = Callable[[], None]
CELL = {"header": {"msg_id": "the cell"}, "metadata": {"cellId": "a"}}


class Stream:
    """A zmq stream to which messages, and interrupts, come in a known order."""

    def __init__(self, callback: Callable[[list[Any]], Any]) -> None:
        self._recv_callback: Any = callback
        self._recv_copy = True
        self.arrived: deque[list[bytes] | None] = deque()

    def on_recv(self, callback: Any, copy: bool = True) -> None:
        self._recv_callback, self._recv_copy = callback, copy

    def _run_callback(self, callback: Any, *values: Any) -> None:
        callback(*values)

    def flush(self) -> None:
        while self.arrived:
            frames = self.arrived.popleft()
            if frames is None:
                signal.raise_signal(signal.SIGINT)
            else:
                self._run_callback(self._recv_callback, frames)


class Kernel:
    """The used parts of an ipykernel; its session and its comms are real."""

    def __init__(self, way: DispatchMode) -> None:
        self.session = Session(key=b"secret")
        self.comm_manager = comm.get_comm_manager()
        self.passed: list[list[bytes]] = []
        self.statuses: list[tuple[str, str]] = []
        self.shell_stream = Stream(self.passed.append)
        self.original = self.shell_stream._recv_callback
        self.loop = asyncio.new_event_loop()
        self.reader = threading.Thread(target=self.loop.run_forever)
        self.reader.start()
        if way is DispatchMode.THREAD:
            io_loop = SimpleNamespace(asyncio_loop=self.loop)
            self.shell_channel_thread = SimpleNamespace(io_loop=io_loop)
        self.shell: Any = SimpleNamespace(kernel=self, display_pub=SimpleNamespace())
        self.live = CommDispatcher.for_shell(self.shell)
        assert CommDispatcher.for_shell(self.shell) is self.live

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.reader.join()
        self.loop.close()

    def get_parent(self, channel: str) -> dict[str, Any]:
        assert channel == "shell"
        return CELL

    def _publish_status(self, status: str, _channel: str, parent: dict[str, Any]) -> None:
        self.statuses.append((status, parent["header"]["msg_id"]))

    def receive(self, *messages: list[bytes] | None) -> None:
        """Deliver messages; a kernel with its own reading thread handles them at once."""
        self.shell_stream.arrived.extend(messages)
        if hasattr(self, "shell_channel_thread"):
            self.shell_stream.flush()

    def answered(self, condition: Callable[[], object]) -> bool:
        """Wait as a blocked cell does."""

        def is_true() -> bool:
            self.live.process_pending()
            return bool(condition())

        return wait_until(is_true)

    def is_as_before(self) -> bool:
        return self.shell_stream._recv_callback is self.original and not our_threads()


class Button(ipywidgets.Button):
    """A button that notes on which thread it was pressed."""

    def __init__(self, handler: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.presses: list[str] = []
        self.on_click(lambda _: self.presses.append(threading.current_thread().name))
        self.on_click(lambda _: handler())


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nbddp-widgets"]


def on_another_thread(act: Callable[[], ServedWidgets]) -> ServedWidgets:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


def message(
    kind: str, content: dict[str, Any], sender: Session | None = None, **more: Any
) -> list[bytes]:
    sender = sender or Session(key=b"secret")
    return [b"client", *sender.serialize(sender.msg(kind, content, **more))]


def click(widget: ipywidgets.Widget, page: Session | None = None) -> list[bytes]:
    data = {"method": "custom", "content": {"event": "click"}}
    return message("comm_msg", {"comm_id": widget.model_id, "data": data}, page)


@pytest.fixture(params=[DispatchMode.THREAD, DispatchMode.POLL], ids=["thread", "poll"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A kernel of each kind; with the two marks below, of one alone."""
    kernel = Kernel(request.param)
    yield kernel
    kernel.close()
    assert wait_until(kernel.is_as_before)


@pytest.fixture
def logs_once(caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion) -> Check:
    """Checks that one thing was logged, and what."""
    caplog.set_level(logging.INFO)

    def check() -> None:
        [record] = [each for each in caplog.records if each.name.startswith("nbddp")]
        error = record.exc_info[0] if record.exc_info else None
        assert (record.levelname, record.getMessage(), error and error.__name__) == snapshot

    return check


tapped = pytest.mark.parametrize("kernel", [DispatchMode.THREAD], indirect=True, ids=["thread"])
pumped = pytest.mark.parametrize("kernel", [DispatchMode.POLL], indirect=True, ids=["poll"])


# -- which kernels


def test_without_a_supported_kernel_nothing_is_done_and_an_unsupported_one_is_logged_once(
    logs_once: Check,
) -> None:
    unsupported = SimpleNamespace(kernel=SimpleNamespace(session=Session()))
    for shell in (None, SimpleNamespace(), unsupported, unsupported):
        live = CommDispatcher.for_shell(shell)
        assert live.mode is DispatchMode.NONE
        with live.serve(Button()) as serving:
            live.process_pending()
        assert serving.cell is None
    logs_once()


@tapped
def test_an_unresponsive_reading_thread_is_abandoned(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, logs_once: Check
) -> None:
    monkeypatch.setattr(live_module, "JOIN_TIMEOUT", 0.05)
    is_free = threading.Event()
    kernel.loop.call_soon_threadsafe(is_free.wait)
    with kernel.live.serve(Button()):
        assert kernel.live.mode is DispatchMode.NONE
    logs_once()
    is_free.set()
    monkeypatch.setattr(live_module, "JOIN_TIMEOUT", 5.0)
    button = Button()
    with kernel.live.serve(button):  # the next cell was read, so it reads again
        assert kernel.live.mode is DispatchMode.THREAD
        kernel.receive(click(button))
        assert wait_until(lambda: button.presses == ["nbddp-widgets"])


# -- which messages are taken, and which thread answers


def test_serving_a_widget_includes_its_child_widgets(kernel: Kernel) -> None:
    inner, closed, box = Button(), Button(), ipywidgets.Tab()
    states = message("comm_msg", {"comm_id": inner.style.model_id, "data": {"method": "x"}})
    others = [click(closed)]
    closed.close()
    with kernel.live.serve(box, closed):
        box.children = [ipywidgets.HBox([inner])]
        kernel.receive(*others, states, click(inner))
        assert kernel.answered(lambda: inner.presses)
    assert kernel.passed == others


def test_widgets_are_answered_until_their_last_serving_stops(kernel: Kernel) -> None:
    one, two = Button(), Button()
    first, *both = servings = [ExitStack() for _ in range(3)]
    for cell, serving in zip((one, two, two), servings, strict=True):
        serving.enter_context(kernel.live.serve(cell))
    kernel.receive(click(one), click(two))
    assert kernel.answered(lambda: one.presses and two.presses)
    first.close()
    both[0].close()
    unserved = click(one)
    kernel.receive(unserved, click(two))
    assert kernel.answered(lambda: len(two.presses) == 2)
    both[1].close()
    assert kernel.passed == [unserved]


def test_a_waiting_cell_is_reported_again(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "BUSY_PERIOD", 0.0)
    with kernel.live.serve():
        for _ in range(3):
            kernel.live.process_pending()
    assert kernel.statuses == [("busy", "the cell")] * 3


@tapped
def test_strange_messages_are_logged_once_and_passed_on(kernel: Kernel, logs_once: Check) -> None:
    button = Button()
    once, forged = click(button), click(button)
    forged[2] = b"0" * 64
    strange = [once, [], [b"x"], forged, message("comm_msg", {"data": {}})]
    with kernel.live.serve(button):
        kernel.receive(once)
        assert kernel.answered(lambda: bool(button.presses))
        kernel.receive(*strange, click(button))
        assert kernel.answered(lambda: len(button.presses) == 2)
    assert kernel.passed == strange
    logs_once()


def test_a_new_request_of_the_running_cell_gets_its_output(kernel: Kernel) -> None:
    parents: list[Any] = []
    kernel.shell.set_parent = parents.append
    with kernel.live.serve() as serving:
        again = [message("execute_request", {}, metadata={"cellId": each}) for each in "ba"]
        for frames, is_same in zip(again, (False, True), strict=True):
            kernel.receive(frames)
            kernel.live.process_pending()
            assert (serving.rerun is not None) == is_same
        assert serving.rerun is not None
        kernel.live.redirect_output(serving.rerun)
        assert parents == []  # as under `%%capture`
        kernel.shell.display_pub.set_parent = parents.append
        kernel.live.redirect_output(serving.rerun)
        assert parents == [serving.rerun]
    assert kernel.passed == again


@pytest.mark.parametrize("shows_widget", [False, True])
def test_a_reloaded_page_gets_the_output_in_its_next_cell_unless_it_shows_the_widget(
    kernel: Kernel, shows_widget: bool
) -> None:
    page, button = Session(key=b"secret"), Button()
    cells = [message("execute_request", {}, page, metadata={"cellId": each}) for each in "bc"]
    with kernel.live.serve(button) as serving:
        serving.reloads = 1
        if shows_widget:
            kernel.receive(click(button, page))
            assert kernel.answered(lambda: button.presses)
        kernel.receive(*cells)
        kernel.live.process_pending()
        moved_to = serving.rerun and serving.rerun["metadata"]["cellId"]
        assert (moved_to, serving.is_moved) == ((None, False) if shows_widget else ("b", True))
    assert kernel.passed == cells


def test_a_background_thread_that_serves_widgets_does_not_block_cells(kernel: Kernel) -> None:
    def wait() -> ServedWidgets:
        with kernel.live.serve() as serving:
            kernel.live.process_pending()
        return serving

    assert on_another_thread(wait).cell is None
    assert kernel.statuses == []


@pumped
def test_the_kernel_answers_background_panels_while_the_main_thread_is_free(kernel: Kernel) -> None:
    button = Button()
    background = ExitStack()
    on_another_thread(lambda: background.enter_context(kernel.live.serve(button)))
    assert kernel.is_as_before()
    with kernel.live.serve():  # but while a cell waits, it is answered with that one's
        kernel.receive(click(button))
        kernel.live.process_pending()
    assert kernel.is_as_before()
    background.close()
    assert button.presses == ["MainThread"]


@tapped
def test_an_exception_in_a_comm_callback_is_logged(kernel: Kernel, logs_once: Check) -> None:
    button, good = Button(), Button()
    button.comm.on_msg(lambda _: dict[str, int]()["nothing"])
    with kernel.live.serve(button, good):
        kernel.receive(click(button), click(good))
        assert kernel.answered(lambda: good.presses)
    logs_once()


@pumped
def test_a_handler_may_wait_and_pump_itself(kernel: Kernel) -> None:
    inner = Button()

    def wait() -> None:
        with kernel.live.serve(inner):
            kernel.receive(click(inner))
            assert kernel.answered(lambda: inner.presses)

    outer = Button(wait)
    with kernel.live.serve(outer):
        kernel.receive(click(outer))
        kernel.live.process_pending()
    assert (len(outer.presses), len(inner.presses)) == (1, 1)


# -- after serving ends


@tapped
def test_messages_received_before_the_end_are_still_answered(kernel: Kernel) -> None:
    go = threading.Event()
    button = Button(lambda: go.wait(30))
    with kernel.live.serve(button):
        kernel.receive(*(click(button) for _ in range(5)))
        assert wait_until(lambda: bool(button.presses))
        go.set()
    assert len(button.presses) == 5


@tapped
def test_stopping_does_not_wait_forever_for_a_stuck_handler(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, logs_once: Check
) -> None:
    monkeypatch.setattr(live_module, "JOIN_TIMEOUT", 0.05)
    go = threading.Event()
    button = Button(lambda: go.wait(30))
    with kernel.live.serve(button):
        kernel.receive(click(button))
        assert wait_until(lambda: bool(button.presses))
    logs_once()
    go.set()


def test_a_handler_may_stop_its_own_dispatcher(kernel: Kernel) -> None:
    serving = ExitStack()
    button = Button(serving.close)
    serving.enter_context(kernel.live.serve(button))
    kernel.receive(click(button))
    assert kernel.answered(kernel.is_as_before)


def test_a_foreign_filter_installed_over_ours_stays(kernel: Kernel, logs_once: Check) -> None:
    stream, button, seen = kernel.shell_stream, Button(), []
    with kernel.live.serve(button):
        ours = stream._recv_callback

        def foreign(frames: list[Any]) -> None:
            seen.append(frames)
            ours(frames)

        stream.on_recv(foreign)
        kernel.receive(click(button))
        assert kernel.answered(lambda: len(button.presses) == 1)
    assert stream._recv_callback is foreign
    logs_once()
    kernel.receive(click(button))
    stream.flush()
    assert len(kernel.passed) == 1
    with kernel.live.serve(button):  # now ours is before it, and behind
        kernel.receive(click(button))
        assert kernel.answered(lambda: len(button.presses) == 2)
        kernel.receive(message("kernel_info_request", {}))
        kernel.live.process_pending()
    assert stream._recv_callback is foreign
    assert (len(seen), len(kernel.passed)) == (3, 2)
    stream.on_recv(ours)  # as if the other one went, too: ours is inert, and gone with the next
    with kernel.live.serve(button):
        pass
    assert stream._recv_callback is kernel.original


def test_a_foreign_filter_that_dropped_ours_is_treated_as_the_original(kernel: Kernel) -> None:
    stream, button, seen = kernel.shell_stream, Button(), []
    foreign: Any = seen.append
    with kernel.live.serve(button):
        stream.on_recv(foreign)
        with kernel.live.serve():  # the next to begin finds itself replaced, and goes before it
            kernel.receive(click(button), message("kernel_info_request", {}))
            assert kernel.answered(lambda: bool(button.presses))
    assert stream._recv_callback is foreign
    assert len(seen) == 1
    stream.on_recv(kernel.original)


# -- interrupts


@pumped
def test_an_interrupt_during_message_handling_is_raised_after_the_last(kernel: Kernel) -> None:
    button = Button()
    cells = [message("execute_request", {"code": str(number)}) for number in range(3)]
    kernel.receive(click(button), cells[0], None, cells[1], click(button), cells[2])
    with kernel.live.serve(button), pytest.raises(KeyboardInterrupt):
        kernel.live.process_pending()
    assert len(button.presses) == 2
    assert kernel.passed == cells


@pumped
def test_a_second_interrupt_stops_a_handler_and_passes_the_rest_on(kernel: Kernel) -> None:
    def insist() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    button, other = Button(insist), Button()
    behind = [click(other), click(button)]
    kernel.receive(click(button), *behind)
    with kernel.live.serve(button, other), pytest.raises(KeyboardInterrupt):
        kernel.live.process_pending()
    assert kernel.passed == behind
    assert kernel.statuses[-2][0] == "idle"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupted_start_leaves_no_filter(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_recv = kernel.shell_stream.on_recv

    def interrupted(callback: Any, copy: bool = True) -> None:
        signal.raise_signal(signal.SIGINT)
        on_recv(callback, copy)

    monkeypatch.setattr(kernel.shell_stream, "on_recv", interrupted)
    with pytest.raises(KeyboardInterrupt), kernel.live.serve(Button()):
        raise AssertionError("not reached")
    assert kernel.is_as_before()
