"""A fake launcher, a fake link and threads that a test steps by hand, for the controller.

With :class:`FakeLauncher` and :class:`FakeLink` a session has all its threads and no process. With
:class:`ManualEventThread` it has no thread either: the test runs each event in the order of its
choice, and can make each of them fail. :func:`recorder_entry` is an entry of torch's flight
recorder, for the worker.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

from nbddp.controller.session import Session
from nbddp.controller.threads import EventThread, Runtime
from nbddp.extension.guard import Hooks
from nbddp.launch.local_launcher import Launcher, RankHandle
from nbddp.lifecycle.events import Event
from nbddp.sigint import Future
from nbddp.wire import messages as msg
from nbddp.wire.envelope import Envelope
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.rank_start import RankStart
from nbddp.wire.request_messages import Answer, Complete, Inspect, Pull, Push

PIDS = itertools.count(1_000_000_000)  # larger than the id of any real process


class FakeHandle:
    """A fake process of a rank; it ends when nbddp or the test ends it."""

    exit_reason = ""

    def __init__(self, *, obeys: bool = True) -> None:
        self.pid: int | None = next(PIDS)
        self.exitcode: int | None = None
        self.obeys = obeys
        self.end_requested = False
        self.is_joined = False
        self.kill_error: Exception | None = None
        self.kill_failed = False
        self.interrupts = 0
        self._pipe: tuple[int, int] | None = None

    @property
    def sentinel(self) -> int:
        """A real descriptor that becomes readable, for the real watcher."""
        if self._pipe is None:
            self._pipe = os.pipe()
            if self.exitcode is not None:
                os.close(self._pipe[1])
        return self._pipe[0]

    def end(self, exitcode: int) -> None:
        if self.exitcode is None:
            self.exitcode = exitcode
            if self._pipe is not None:
                os.close(self._pipe[1])

    def join(self) -> None:
        """Release the process after its end; a test that waits here hangs."""
        assert self.exitcode is not None, "nbddp joins a process that still runs"
        if self._pipe is not None and not self.is_joined:
            os.close(self._pipe[0])
        self.is_joined = True

    def is_stopped(self) -> bool:
        return False

    def is_ending(self) -> bool:
        return False

    def busy_time(self) -> tuple[float, float]:
        return 0.0, 0.0

    def interrupt(self) -> None:
        self.interrupts += 1

    def terminate(self) -> None:
        self._obey(-15)

    def kill(self) -> None:
        if self.kill_error is not None:
            self.kill_failed = True
            raise self.kill_error
        self._obey(-9)

    def _obey(self, exitcode: int) -> None:
        self.end_requested = True
        if self.obeys:
            self.end(exitcode)


class FakeLauncher(Launcher):
    """Make fake processes.

    Attributes:
        handles: launched processes, by attempt and rank.
        faults: errors for the next launches, one each; None lets a launch succeed.
        gate: launches wait until it is set, as for a forkserver that still imports.
        on_launch: called with the settings of a new rank.
        obeys: whether the processes end on request.
        room: whether a restart would make more ranks.
    """

    room = False

    def __init__(self, *, obeys: bool = True) -> None:
        self.handles: dict[tuple[int, int], FakeHandle] = {}
        self.faults: deque[Exception | None] = deque()
        self.cleanup_error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.launch_began = threading.Event()
        self.on_launch: Callable[[RankStart], Any] = lambda _start: None
        self.obeys = obeys

    def has_free_capacity(self) -> bool:
        return self.room

    def launch(self, start: RankStart) -> FakeHandle:
        self.launch_began.set()
        self.gate.wait()
        if fault := self.faults.popleft() if self.faults else None:
            raise fault
        handle = FakeHandle(obeys=self.obeys)
        self.handles[start.attempt, start.topology.rank] = handle
        self.on_launch(start)
        return handle

    def kill_orphans(self, handle: RankHandle) -> None:  # noqa: ARG002 - the launcher's interface
        if self.cleanup_error is not None:
            raise self.cleanup_error

    def share(self) -> FakeLauncher:
        return FakeLauncher(obeys=self.obeys)

    def close(self) -> None:
        self.gate.set()

    def living(self) -> list[FakeHandle]:
        return [handle for handle in self.handles.values() if handle.exitcode is None]


class FakeLink:
    """Record sent commands, and deliver messages of ranks from the test.

    Attributes:
        sent: rank and command, in order.
        faults: errors for the next sends, one each; None lets a send succeed.
        is_broken: whether every send fails, and every opening of queues.
        on_send: called with attempt, rank and command.
        ended_waits: attempt and cell of each wait for a step that was ended.
    """

    secret = b"secret"
    port = 4242
    prefix = ""
    reserved_port = 4243
    refused = 0

    def __init__(self) -> None:
        self.attempt = 0
        self.sent: list[tuple[int, msg.MessageToRank]] = []
        self.faults: deque[Exception | None] = deque()
        self.is_broken = False
        self.ended_waits: list[tuple[int, int]] = []
        self.on_send: Callable[[int, int, msg.MessageToRank], Any] = lambda *_sent: None
        self.envelopes: SimpleQueue[Envelope | Exception | None] = SimpleQueue()
        self.urgent: SimpleQueue[Envelope | Exception | None] = SimpleQueue()
        self._values: dict[str, Any] = {}
        self._sequence = itertools.count(1)

    def create_sibling(self) -> FakeLink:
        return FakeLink()

    def use_secret(self, secret: bytes) -> None: ...

    def open_attempt(self, attempt: int, world_size: int) -> None:  # noqa: ARG002 - as the real one
        self._check_whole()
        self.attempt = attempt

    def open_incarnation(self, attempt: int, rank: int, incarnation: int) -> None:  # noqa: ARG002
        self._check_whole()

    def _check_whole(self) -> None:
        if self.is_broken:
            raise ConnectionError("the store is gone")

    def send(self, rank: int, command: msg.MessageToRank) -> None:
        self._check_whole()
        if fault := self.faults.popleft() if self.faults else None:
            raise fault
        self.sent.append((rank, command))
        self.on_send(self.attempt, rank, command)

    def deliver(self, rank: int, message: msg.Message, *, attempt: int | None = None) -> Envelope:
        number = self.attempt if attempt is None else attempt
        envelope = Envelope(rank, number, next(self._sequence), message)
        (self.urgent if isinstance(message, msg.URGENT_MESSAGES) else self.envelopes).put(envelope)
        return envelope

    def fail(self, error: Exception) -> None:
        self.envelopes.put(error)

    def get(self, *, is_urgent: bool = False) -> Envelope | None:
        envelope = (self.urgent if is_urgent else self.envelopes).get()
        if isinstance(envelope, Exception):
            raise envelope
        return envelope

    def end_step_wait(self, attempt: int, cell: int) -> None:
        self.ended_waits.append((attempt, cell))

    def store_payload(self, data: bytes) -> msg.JsonDict:
        key = f"value {next(self._sequence)}"
        self._values[key] = data
        return {"key": key}

    def load_payload(self, payload: msg.JsonDict) -> Any:
        return self._values[payload["key"]]

    def discard_payload(self, payload: msg.JsonDict) -> None:
        self._values.pop(payload["key"], None)

    def close(self) -> None:
        self.envelopes.put(None)
        self.urgent.put(None)


class SilentLink(FakeLink):
    """A link that delivers no message; the test passes messages to the session one by one."""

    def __init__(self) -> None:
        super().__init__()
        self._closed = threading.Event()

    def get(self, *, is_urgent: bool = False) -> Envelope | None:  # noqa: ARG002 - as the real one
        self._closed.wait()
        return None

    def close(self) -> None:
        self._closed.set()


class ManualEventThread(EventThread):
    """Run queued calls on the thread of the test, when the test calls ``run_next``."""

    def __init__(self) -> None:
        self.inbox: deque[Callable[[], Any]] = deque()
        self.urgent_inbox: deque[Callable[[], Any]] = deque()
        self.due: list[tuple[float, Callable[[], Any]]] = []
        self.watched: list[tuple[RankHandle, Callable[[], Any]]] = []
        self.watch_faults: deque[Exception | None] = deque()

    def run(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done: Future[Any] = Future()
        self.submit(done.complete_with, lambda: act(*args, **kwargs))
        while not done.done():
            self.run_next()
        return done.result()

    def submit(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        self.inbox.append(lambda: act(*args, **kwargs))
        return True

    def submit_urgent(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        self.urgent_inbox.append(lambda: act(*args, **kwargs))
        return True

    def call_later(
        self, seconds: float, act: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        self.due.append((seconds, lambda: act(*args, **kwargs)))

    def close(self, *, timeout: float | None = None) -> None:  # noqa: ARG002 - as the real one
        self.run_all()

    def run_next(self) -> None:
        (self.urgent_inbox or self.inbox).popleft()()

    def run_all(self) -> None:
        while self.inbox or self.urgent_inbox:
            self.run_next()

    def run_delayed(self, number: int = 0) -> None:
        self.due.pop(number)[1]()

    def watch(self, handle: RankHandle, on_exit: Callable[[], Any]) -> None:
        if fault := self.watch_faults.popleft() if self.watch_faults else None:
            raise fault
        self.watched.append((handle, on_exit))

    def report_exit(self) -> bool:
        """Report one ended process. Return whether there was one."""
        for watched in self.watched:
            handle, on_exit = watched
            if handle.exitcode is not None:
                self.watched.remove(watched)
                self.inbox.append(on_exit)
                return True
        return False


class ManualRuntime(Runtime):
    event_thread: ManualEventThread
    launch_thread: ManualEventThread


def manual_runtime(link: Any) -> ManualRuntime:
    return ManualRuntime(link, ManualEventThread(), ManualEventThread())


def manual_session(launcher: FakeLauncher, make_runtime: Callable[[], Runtime]) -> Session:
    """Return a session without threads, so also without those of extensions."""
    session = Session(launcher, make_runtime=make_runtime)
    session._hooks = Mock(spec=Hooks, made=())
    return session


def with_threads(link: Any) -> Runtime:
    return Runtime(link, EventThread("nbddp-session"), EventThread("nbddp-launch"))


def request_start(session: Session, spec: GroupSpec, event: Event, **more: Any) -> Future[None]:
    """Start ranks, and do not wait."""
    session._open(spec)
    return session._submit_start(spec, event, **more)


def fake_session(launcher: FakeLauncher, link: FakeLink, *, colors: str = "") -> Session:
    """Return a session with all its threads, whose ranks answer commands at once."""
    answer_commands(launcher, link)
    return Session(launcher, colors=colors, make_runtime=lambda: with_threads(link))


def answer_commands(launcher: FakeLauncher, link: FakeLink) -> None:
    def answer(attempt: int, rank: int, command: msg.MessageToRank) -> None:
        match command:
            case msg.RunCell(cell=cell):
                link.deliver(rank, msg.CellEnded(cell=cell, in_group=True), attempt=attempt)
            case (
                Push(request=request)
                | Pull(request=request)
                | Complete(request=request)
                | Inspect(request=request)
            ):
                link.deliver(rank, Answer(request=request), attempt=attempt)
            case msg.Shutdown():
                launcher.handles[attempt, rank].end(0)

    launcher.on_launch = lambda start: link.deliver(
        start.topology.rank, ready(start.topology.rank), attempt=start.attempt
    )
    link.on_send = answer


def ready(rank: int) -> msg.Ready:
    return msg.Ready(pid=1000 + rank, device="cpu", backend="gloo", host="here", cores=2, threads=1)


def recorder_entry(**facts: Any) -> dict[str, Any]:
    """Return an entry as torch 2.13 writes it to its flight recorder."""
    return {
        "record_id": 0,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 1,
        "profiling_name": "gloo:all_reduce",
        "time_created_ns": 0,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "retired": True,
    } | facts
