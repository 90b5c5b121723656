"""Which messages are taken from a kernel, who answers them, and what is left behind."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import comm
import ipywidgets
import pytest
from jupyter_client.session import Session
from processes import wait_until

from nbddp.ui.buttons import live as live_module
from nbddp.ui.buttons.kernel_stream import Way
from nbddp.ui.buttons.live import CONTROL, LiveComms, Serving

CELL = {"header": {"msg_id": "the cell"}}


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
    """What is used of an ipykernel; its session and its comms are real."""

    def __init__(self, way: Way) -> None:
        self.session = Session(key=b"secret")
        self.comm_manager = comm.get_comm_manager()
        self.passed: list[list[bytes]] = []
        self.statuses: list[tuple[str, str]] = []
        self.shell_stream = Stream(self.passed.append)
        self.original = self.shell_stream._recv_callback
        self.loop = asyncio.new_event_loop()
        self.reader = threading.Thread(target=self.loop.run_forever)
        self.reader.start()
        if way is Way.TAP:
            io_loop = SimpleNamespace(asyncio_loop=self.loop)
            self.shell_channel_thread = SimpleNamespace(io_loop=io_loop)

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
        """Messages come in; a kernel whose own thread reads does so at once."""
        self.shell_stream.arrived.extend(messages)
        if hasattr(self, "shell_channel_thread"):
            self.shell_stream.flush()

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


def message(kind: str, content: dict[str, Any], **more: Any) -> list[bytes]:
    sender = Session(key=b"secret")
    return [b"client", *sender.serialize(sender.msg(kind, content, **more))]


def click(widget: ipywidgets.Widget) -> list[bytes]:
    data = {"method": "custom", "content": {"event": "click"}}
    return message("comm_msg", {"comm_id": widget.model_id, "data": data})


@pytest.fixture(params=[Way.TAP, Way.PUMP], ids=["tap", "pump"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    kernel = Kernel(request.param)
    yield kernel
    kernel.close()
    assert wait_until(kernel.is_as_before)


@pytest.fixture
def tapped() -> Iterator[Kernel]:
    kernel = Kernel(Way.TAP)
    yield kernel
    kernel.close()
    assert wait_until(kernel.is_as_before)


@pytest.fixture
def pumped() -> Iterator[Kernel]:
    kernel = Kernel(Way.PUMP)
    yield kernel
    kernel.close()
    assert kernel.is_as_before()


@pytest.fixture
def live(kernel: Kernel) -> LiveComms:
    return LiveComms.of(SimpleNamespace(kernel=kernel))


def answered(live: LiveComms, condition: Callable[[], object]) -> bool:
    """Wait as a blocked cell does."""

    def is_true() -> bool:
        live.pump()
        return bool(condition())

    return wait_until(is_true)


# -- which kernels


def test_there_is_one_for_each_kernel(kernel: Kernel) -> None:
    shell = SimpleNamespace(kernel=kernel)
    assert LiveComms.of(shell) is LiveComms.of(shell)


def test_without_a_kernel_nothing_is_done_and_nothing_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for shell in (None, SimpleNamespace()):
        live = LiveComms.of(shell)
        assert live.how is Way.NONE
        with live.serving(Button()) as serving:
            live.pump()
        assert serving.cell is None
    assert caplog.records == []


def test_a_kernel_that_is_not_known_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    shell = SimpleNamespace(kernel=SimpleNamespace(session=Session()))
    for _ in range(2):
        live = LiveComms.of(shell)
        with live.serving(Button()):
            live.pump()
    assert live.how is Way.NONE
    assert caplog.messages == [
        "buttons answer only when the cell is over: unknown kernel "
        "('types.SimpleNamespace' object has no attribute 'comm_manager')"
    ]


def test_a_reading_thread_that_does_not_react_is_given_up(
    tapped: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_module, "PATIENCE", 0.05)
    is_free = threading.Event()
    tapped.loop.call_soon_threadsafe(is_free.wait)
    live = LiveComms(tapped)
    with live.serving(Button()):
        assert live.how is Way.NONE
    assert caplog.messages == [
        "buttons answer only when the cell is over: the kernel has read nothing for 0.05 s"
    ]
    is_free.set()
    monkeypatch.setattr(live_module, "PATIENCE", 5.0)
    button = Button()
    with live.serving(button):  # the next cell was read, so it reads again
        assert live.how is Way.TAP
        tapped.receive(click(button))
        assert wait_until(lambda: button.presses == ["nbddp-widgets"])


# -- what is taken


def test_a_widget_comes_with_all_that_it_is_made_of() -> None:
    inner = Button()
    box = ipywidgets.Tab([ipywidgets.HBox([inner, ipywidgets.IntSlider()])])
    serving = LiveComms(None).serving(box)
    parts = [box, box.layout, box.children[0], inner, inner.layout, inner.style]
    assert {part.model_id for part in parts} <= serving.comm_ids
    assert Button().model_id not in serving.comm_ids


def test_a_closed_widget_has_nothing_to_serve() -> None:
    button = Button()
    button.close()
    assert LiveComms(None).serving(button).comm_ids == set()


def test_other_messages_go_on_untouched_and_in_order(kernel: Kernel, live: LiveComms) -> None:
    other, ours = Button(), Button()
    messages = [
        message("execute_request", {"code": "1"}),
        click(other),
        message("comm_open", {"comm_id": "it", "target_name": "another", "data": {}}),
        message("kernel_info_request", {}),
    ]
    copies = [list(each) for each in messages]
    with live.serving(ours):
        kernel.receive(*messages, click(ours))
        assert answered(live, lambda: ours.presses)
    assert kernel.passed == copies
    assert all(given is taken for given, taken in zip(messages, kernel.passed, strict=True))
    assert other.presses == []
    for each in kernel.passed:  # their signatures can still be used, which each can be only once
        identities, parts = kernel.session.feed_identities(each)
        assert identities == [b"client"]
        kernel.session.deserialize(parts)


def test_what_cannot_be_read_goes_on_and_is_logged_once(
    kernel: Kernel, live: LiveComms, caplog: pytest.LogCaptureFixture
) -> None:
    button = Button()
    forged = click(button)
    forged[2] = b"0" * 64
    strange = [[], [b"x"], forged, message("comm_msg", {"data": {}})]
    with live.serving(button):
        kernel.receive(*strange, click(button))
        assert answered(live, lambda: button.presses)
    assert kernel.passed == strange
    assert caplog.messages == ["left a message to the kernel, unread"]
    assert len(button.presses) == 1


def test_a_replayed_click_is_left_to_the_kernel_to_refuse(kernel: Kernel, live: LiveComms) -> None:
    button = Button()
    once = click(button)
    with live.serving(button):
        kernel.receive(once)
        assert answered(live, lambda: button.presses)
        kernel.receive(once)
        live.pump()
    assert kernel.passed == [once]
    assert len(button.presses) == 1


# -- who answers


def test_a_thread_of_its_own_answers_or_the_one_that_waits(kernel: Kernel, live: LiveComms) -> None:
    button = Button()
    with live.serving(button):
        kernel.receive(click(button))
        assert answered(live, lambda: button.presses)
    assert button.presses == ["nbddp-widgets" if live.how is Way.TAP else "MainThread"]


def test_the_page_is_told_of_the_end_and_that_the_cell_goes_on(
    kernel: Kernel, live: LiveComms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "BUSY_PERIOD", 1000.0)
    button = Button()
    with live.serving(button):
        live.pump()
        kernel.receive(click(button))
        assert answered(live, lambda: len(kernel.statuses) == 4)
    [_, busy, idle, still] = kernel.statuses
    assert kernel.statuses[0] == still == ("busy", "the cell")
    assert (busy[0], idle[0]) == ("busy", "idle")
    assert busy[1] == idle[1] != "the cell"


def test_while_it_waits_a_cell_says_again_that_it_is_busy(
    kernel: Kernel, live: LiveComms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "BUSY_PERIOD", 0.01)
    with live.serving():
        assert answered(live, lambda: len(kernel.statuses) == 3)
    live.pump()
    assert kernel.statuses == [("busy", "the cell")] * 3


def test_a_panel_in_the_background_never_calls_its_cell_busy(tapped: Kernel) -> None:
    live, button = LiveComms(tapped), Button()
    with live.serving(button, blocks=False):
        tapped.receive(click(button))
        assert answered(live, lambda: len(tapped.statuses) == 2)
    assert [status for status, _ in tapped.statuses] == ["busy", "idle"]
    assert "the cell" not in dict(tapped.statuses).values()


def test_a_waiting_thread_that_is_not_the_main_one_blocks_no_cell(kernel: Kernel) -> None:
    live, serving = LiveComms(kernel), []

    def wait() -> None:
        with live.serving() as mine:
            serving.append(mine)
            live.pump()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert serving[0].cell is None
    assert kernel.statuses == []


def test_where_the_main_thread_answers_a_panel_in_the_background_is_the_kernels(
    pumped: Kernel,
) -> None:
    live, button = LiveComms(pumped), Button()
    with live.serving(button, blocks=False):
        assert pumped.is_as_before()
        with live.serving():  # but while a cell waits, it is answered with that one's
            pumped.receive(click(button))
            live.pump()
        assert pumped.is_as_before()
    assert button.presses == ["MainThread"]


def test_a_handler_that_raises_ends_nothing(
    kernel: Kernel, live: LiveComms, caplog: pytest.LogCaptureFixture
) -> None:
    button = Button(lambda: 1 / 0)
    with live.serving(button):
        kernel.receive(click(button), click(button))
        assert answered(live, lambda: len(button.presses) == 2)
    assert caplog.text.count("ZeroDivisionError") >= 2  # without an IPython, ipywidgets logs it


def test_a_comm_whose_own_callback_raises_is_logged(
    kernel: Kernel, live: LiveComms, caplog: pytest.LogCaptureFixture
) -> None:
    button, good = Button(), Button()
    button.comm.on_msg(lambda _: {}["nothing"])
    with live.serving(button, good):
        kernel.receive(click(button), click(good))
        assert answered(live, lambda: good.presses)
    assert caplog.messages == ["a widget's message was not answered"]
    assert "KeyError: 'nothing'" in caplog.text


def test_a_handler_that_exits_does_not_end_the_thread(
    tapped: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    def leave() -> None:
        raise SystemExit

    live, button = LiveComms(tapped), Button(leave)
    with live.serving(button):
        tapped.receive(click(button), click(button))
        assert answered(live, lambda: len(button.presses) == 2)
    assert caplog.messages == ["a widget's handler tried to end its thread"] * 2


def test_a_handler_may_wait_and_pump_itself(pumped: Kernel) -> None:
    live = LiveComms(pumped)
    inner = Button()

    def wait() -> None:
        with live.serving(inner):
            pumped.receive(click(inner))
            assert answered(live, lambda: inner.presses)

    outer = Button(wait)
    with live.serving(outer):
        pumped.receive(click(outer))
        live.pump()
    assert (len(outer.presses), len(inner.presses)) == (1, 1)


def test_a_page_that_asks_for_all_widgets_is_answered_and_counted(
    kernel: Kernel, live: LiveComms
) -> None:
    ipywidgets.register_comm_target()
    control, first = uuid.uuid4().hex, Button()
    content = {"comm_id": control, "target_name": CONTROL, "data": {}}
    asks = {"comm_id": control, "data": {"method": "request_states"}}
    with live.serving(first) as serving:
        assert serving.reloads == 0
        kernel.receive(message("comm_open", content, metadata={"version": "1.0.0"}))
        kernel.receive(message("comm_msg", asks), message("comm_msg", asks))
        assert answered(live, lambda: serving.reloads == 2)
        with live.serving() as later:  # a comm from before is known
            kernel.receive(message("comm_msg", asks))
            assert answered(live, lambda: (serving.reloads, later.reloads) == (3, 1))
        kernel.receive(message("comm_close", {"comm_id": control, "data": {}}))
        assert answered(live, lambda: control not in kernel.comm_manager.comms)
    assert kernel.passed == []


# -- what is left behind


def test_the_kernel_is_as_before_when_the_last_is_left(kernel: Kernel, live: LiveComms) -> None:
    first, second = Button(), Button()
    one, two = live.serving(first).begin(), live.serving(second).begin()
    one.end()
    kernel.receive(click(second))
    assert answered(live, lambda: second.presses)
    assert not kernel.is_as_before()
    two.end()
    assert kernel.is_as_before()
    two.end()  # again: nothing more to leave
    kernel.receive(click(first))
    kernel.shell_stream.flush()
    assert len(kernel.passed) == 1


def test_the_same_widget_twice_is_served_until_it_is_left_twice(
    kernel: Kernel, live: LiveComms
) -> None:
    button = Button()
    with live.serving(button):
        with live.serving(button):
            pass
        kernel.receive(click(button))
        assert answered(live, lambda: button.presses)


def test_what_came_before_the_end_is_still_answered(tapped: Kernel) -> None:
    live, go = LiveComms(tapped), threading.Event()
    button = Button(lambda: go.wait(30))
    with live.serving(button):
        tapped.receive(*(click(button) for _ in range(5)))
        assert wait_until(lambda: button.presses)
        go.set()
    assert len(button.presses) == 5


def test_a_handler_that_does_not_return_is_not_waited_for(
    tapped: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_module, "PATIENCE", 0.05)
    live, go = LiveComms(tapped), threading.Event()
    button = Button(lambda: go.wait(30))
    with live.serving(button):
        tapped.receive(click(button))
        assert wait_until(lambda: button.presses)
    assert caplog.messages == ["a widget's handler still runs after 0.05 s"]
    go.set()


def test_a_handler_may_end_what_it_is_served_by(kernel: Kernel, live: LiveComms) -> None:
    held: list[Serving] = []
    button = Button(lambda: held[0].end())
    held.append(live.serving(button).begin())
    kernel.receive(click(button))
    assert answered(live, kernel.is_as_before)


def test_a_foreign_filter_on_top_of_ours_stays_and_is_passed_by(
    kernel: Kernel, live: LiveComms, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stream, button, seen = kernel.shell_stream, Button(), []
    with live.serving(button):
        ours = stream._recv_callback

        def foreign(frames: list[Any]) -> None:
            seen.append(frames)
            ours(frames)

        stream.on_recv(foreign)
        kernel.receive(click(button))
        assert answered(live, lambda: len(button.presses) == 1)
    assert stream._recv_callback is foreign
    assert caplog.messages == ["somebody else filters the kernel's messages; that is left as it is"]
    kernel.receive(click(button))
    stream.flush()
    assert len(kernel.passed) == 1
    with live.serving(button):  # now ours is before it, and behind
        kernel.receive(click(button))
        assert answered(live, lambda: len(button.presses) == 2)
        kernel.receive(message("kernel_info_request", {}))
        live.pump()
    assert stream._recv_callback is foreign
    assert (len(seen), len(kernel.passed)) == (3, 2)
    stream.on_recv(ours)  # as if the other one went, too: ours is inert, and gone with the next
    with live.serving(button):
        pass
    assert stream._recv_callback is kernel.original


def test_a_foreign_filter_that_forgot_ours_is_taken_for_the_kernels(
    kernel: Kernel, live: LiveComms
) -> None:
    stream, button, seen = kernel.shell_stream, Button(), []
    foreign: Any = seen.append
    with live.serving(button):
        stream.on_recv(foreign)
        with live.serving():  # the next to begin finds itself replaced, and goes before it
            kernel.receive(click(button), message("kernel_info_request", {}))
            assert answered(live, lambda: button.presses)
    assert stream._recv_callback is foreign
    assert len(seen) == 1
    stream.on_recv(kernel.original)


# -- interrupts


def test_an_interrupt_while_messages_are_read_comes_after_them(pumped: Kernel) -> None:
    live, button = LiveComms(pumped), Button()
    cells = [message("execute_request", {"code": str(number)}) for number in range(3)]
    pumped.receive(click(button), cells[0], None, cells[1], click(button), cells[2])
    with live.serving(button), pytest.raises(KeyboardInterrupt):
        live.pump()
    assert len(button.presses) == 2
    assert pumped.passed == cells


def test_a_second_interrupt_breaks_a_handler_and_the_rest_is_the_kernels(pumped: Kernel) -> None:
    def insist() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    live, button, other = LiveComms(pumped), Button(insist), Button()
    behind = [click(other), click(button)]
    pumped.receive(click(button), *behind)
    with live.serving(button, other), pytest.raises(KeyboardInterrupt):
        live.pump()
    assert pumped.passed == behind
    assert pumped.statuses[-2][0] == "idle"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_while_the_filter_is_put_in_leaves_none_behind(
    kernel: Kernel, live: LiveComms, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_recv = kernel.shell_stream.on_recv

    def interrupted(callback: Any, copy: bool = True) -> None:
        signal.raise_signal(signal.SIGINT)
        on_recv(callback, copy)

    monkeypatch.setattr(kernel.shell_stream, "on_recv", interrupted)
    with pytest.raises(KeyboardInterrupt), live.serving(Button()):
        raise AssertionError("not reached")
    assert kernel.is_as_before()
