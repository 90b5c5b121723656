"""A page's buttons are answered by a real kernel whose main thread waits in a cell."""

import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from drivers.inside import imported
from notebook import PATIENCE, Notebook

from nbddp.ui.comms.dispatcher import CommDispatcher

pytestmark = pytest.mark.notebook

# the installed ipykernel, and the last 6, which pip installs
VERSIONS = ["installed", pytest.param("6.31.0", marks=pytest.mark.full)]

PRELUDE = (
    imported(CommDispatcher)
    + """
import threading, time
import ipykernel
import ipywidgets as widgets
from IPython.display import display

kernel = get_ipython().kernel
live = CommDispatcher.for_shell(get_ipython())
before = kernel.shell_stream._recv_callback
never = threading.Event()

def block(until, limit=20):
    print("blocked", flush=True)
    deadline = time.monotonic() + limit
    while not until() and time.monotonic() < deadline:
        never.wait(0.05)
        live.process_pending()

def make(handler=None):
    button = widgets.Button()
    button.times = []
    button.on_click(lambda _: button.times.append(time.time()))
    if handler:
        button.on_click(handler)
    return button

def look_again():  # ipykernel 7.0 to 7.3 can miss what arrives just when it sends a reply
    kernel.shell_stream.flush()
    kernel.shell_channel_thread.io_loop.call_later(0.02, look_again)

if (7, 0) <= ipykernel.version_info[:2] < (7, 4):
    kernel.shell_channel_thread.io_loop.add_callback(look_again)

def state():
    is_same = kernel.shell_stream._recv_callback == before
    threads = [each.name for each in threading.enumerate() if each.name == "nbddp-widgets"]
    return is_same, threads
"""
)


class Page(Notebook):
    """A front end with widgets: it keeps all messages of the IOPub channel."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[dict[str, Any]] = []
        super().__init__(folder, loads=False)

    def next_message(self, timeout: float) -> dict[str, Any]:
        self.seen.append(super().next_message(timeout))
        return self.seen[-1]

    def begin(self, source: str, *, asks: bool = False) -> str:
        """Send a cell; the others run on if it fails."""
        return str(self.client.execute(source, allow_stdin=asks, stop_on_error=False))

    def value(self, source: str) -> str:
        reply = self.run(source)
        assert reply.status == "ok", reply.traceback
        return reply.text.strip()

    def see(self, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_there():
            self.next_message(max(0.01, deadline - time.monotonic()))

    def of(self, request: str, kind: str) -> list[dict[str, Any]]:
        return [
            message["content"]
            for message in self.seen
            if message["parent_header"].get("msg_id") == request and message["msg_type"] == kind
        ]

    def text(self, request: str) -> str:
        return "".join(each["text"] for each in self.of(request, "stream"))

    def says(self, request: str, text: str) -> None:
        self.see(lambda: text in self.text(request))

    def await_end(self, request: str) -> None:
        self.see(lambda: {"execution_state": "idle"} in self.of(request, "status"))

    def send(self, kind: str, content: dict[str, Any], *, subshell: str = "", **more: Any) -> str:
        message = self.client.session.msg(kind, content, **more)
        if subshell:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def press(self, model: str, *, subshell: str = "") -> str:
        """Press a button; JupyterLab may ask for a shell besides the main one to hear it."""
        click = {"method": "custom", "content": {"event": "click"}}
        return self.send("comm_msg", {"comm_id": model, "data": click}, subshell=subshell)

    def statuses(self, *requests: str) -> list[tuple[str, str]]:
        """In which order these requests were reported busy and idle, without repetitions."""
        names = {request: str(index) for index, request in enumerate(requests)}
        statuses = [
            (names[parent], message["content"]["execution_state"])
            for message in self.seen
            if message["msg_type"] == "status"
            and (parent := message["parent_header"].get("msg_id")) in names
        ]
        return [status for status, _ in groupby(statuses)]

    def serve(
        self, handler: str = "", *, until: str = "b.times", then: str = ""
    ) -> tuple[str, str]:
        """Begin a cell that serves a button ``b`` and waits; the button's model and the cell."""
        model = self.value(f"b = make({handler}); print(b.model_id)")
        return model, self.block(f"with live.serve(b):\n block(lambda: {until})\n{then}")

    def block(self, source: str) -> str:
        cell = self.begin(source)
        self.says(cell, "blocked")
        return cell


@pytest.fixture(scope="module", params=VERSIONS)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    """A page on a kernel of a version of ipykernel, which is installed if need be."""
    folder = tmp_path_factory.mktemp("ipykernel")
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "installed":
            what = f"ipykernel=={request.param}"
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--retries=1"]
            command += ["--timeout=10", "--target", str(folder), what]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"pip could not install {what}: {done.stderr.strip()[-200:]}")
            patch.setenv("PYTHONPATH", str(folder))
        with Page(tmp_path_factory.mktemp("page")) as page:
            page.value(PRELUDE)
            yield page


@pytest.fixture
def page(shared: Page) -> Iterator[Page]:
    """A page on a kernel that is left as it was found by each test."""
    shared.seen.clear()
    assert shared.value("print(state())") == "(True, [])"
    yield shared
    assert shared.value("print(state())") == "(True, [])"


@pytest.fixture
def is_tap(page: Page) -> bool:
    """Whether a thread answers, as it must with ipykernel 7."""
    version, way = page.value("print(ipykernel.version_info[0], live.mode.value)").split()
    assert way == ("thread" if int(version) >= 7 else "poll")
    return way == "thread"


def test_button_pressed_through_a_subshell_is_answered(page: Page, is_tap: bool) -> None:
    subshell = ""
    if is_tap:
        control = page.client.session.msg("create_subshell_request", {})
        page.client.control_channel.send(control)
        subshell = page.client.get_control_msg(timeout=60)["content"]["subshell_id"]
    model, cell = page.serve("lambda _: print('heard')")
    page.press(model, subshell=subshell)
    page.await_end(cell)
    assert page.text(cell).splitlines() == ["blocked", "heard"]
    page.await_end(page.press(model))  # and the kernel answers, with the main shell
    assert page.value("print(len(b.times))").endswith("2")
    if is_tap:
        delete = page.client.session.msg("delete_subshell_request", {"subshell_id": subshell})
        page.client.control_channel.send(delete)
        assert page.client.get_control_msg(timeout=60)["content"]["status"] == "ok"


def test_cells_sent_during_a_cell_run_afterwards_in_order(page: Page) -> None:
    page.value("order = []")
    model, blocked = page.serve(then="order.append(0)")
    cells = [page.begin(f"order.append({number})") for number in range(1, 6)]
    click = page.press(model)
    page.await_end(cells[-1])
    assert page.value("print(order)") == "[0, 1, 2, 3, 4, 5]"
    order = page.statuses(blocked, *cells, click)
    assert order.index(("6", "idle")) < order.index(("0", "idle")) < order.index(("1", "busy"))


def test_exception_of_a_handler_is_shown_in_the_cell_and_ends_nothing(
    page: Page, is_tap: bool
) -> None:
    # in the main thread, which is the cell's, an exit would end the cell
    error = "SystemExit: 3" if is_tap else "ZeroDivisionError"
    page.value(f"def fail(_): {'raise SystemExit(3)' if is_tap else '1 / 0'}")
    model, cell = page.serve("fail", until="len(b.times) == 2", then="print('over')")
    for _ in range(2):
        page.press(model)
    page.await_end(cell)
    shown = [page.text(cell), *(each["ename"] for each in page.of(cell, "error"))]
    assert " ".join(shown).count(error) == 2
    assert "over" in page.text(cell)


def test_output_of_a_handler_appears_in_the_cell(page: Page) -> None:
    page.value(
        "def show(_):\n"
        "    print('from the handler')\n"
        "    display({'text/plain': 'shown'}, raw=True, display_id='it')\n"
        "    display({'text/plain': 'again'}, raw=True, display_id='it', update=True)\n"
    )
    model, cell = page.serve("show")
    click = page.press(model)
    page.await_end(cell)
    assert page.text(cell).splitlines() == ["blocked", "from the handler"]
    shown = page.of(cell, "display_data") + page.of(cell, "update_display_data")
    assert [each["data"]["text/plain"] for each in shown] == ["shown", "again"]
    assert page.of(click, "stream") == page.of(click, "display_data") == []
    first, *others = page.statuses(cell, click)
    # the cell says now and then that it is still busy
    without_repetitions = [first, *(status for status in others if status != ("0", "busy"))]
    expected = [("0", "busy"), ("1", "busy"), ("1", "idle"), ("0", "idle")]
    assert without_repetitions == expected


def test_reloaded_page_gets_the_state_of_all_widgets(page: Page) -> None:
    model = page.value("b = make(); b.description = 'Stop'; print(b.model_id)")
    cell = page.block(
        "with live.serve(b) as serving:\n"
        "    block(lambda: serving.reloads)\n"
        "print('reloads:', serving.reloads)"
    )
    control = uuid.uuid4().hex
    opened = {"comm_id": control, "target_name": "jupyter.widget.control", "data": {}}
    page.send("comm_open", opened, metadata={"version": "1.0.0"})
    page.send("comm_msg", {"comm_id": control, "data": {"method": "request_states"}})
    page.says(cell, "reloads: 1")
    [answer] = [each for each in page.of(cell, "comm_msg") if each["comm_id"] == control]
    assert answer["data"]["states"][model]["state"]["description"] == "Stop"
    page.send("comm_close", {"comm_id": control, "data": {}})


def test_click_fires_no_cell_execution_events(page: Page) -> None:
    page.value(
        "events, note = [], lambda: events.append(1)\n"
        "def listen(act):\n"
        "    for name in ('pre_execute', 'post_execute'):\n"
        "        act(name, note)\n"
    )
    model = page.value("b = make(); print(b.model_id)")
    cell = page.block(
        "listen(get_ipython().events.register)\n"
        "with live.serve(b):\n"
        "    block(lambda: b.times)\n"
        "listen(get_ipython().events.unregister)\n"
        "print(events)"
    )
    page.press(model)
    page.says(cell, "[]")


def test_interrupt_ends_the_wait_and_the_kernel_still_works(page: Page) -> None:
    _, cell = page.serve()
    behind = page.begin("print('behind')")
    page.interrupt()
    page.await_end(behind)
    assert [error["ename"] for error in page.of(cell, "error")] == ["KeyboardInterrupt"]
    assert page.text(behind) == "behind\n"
