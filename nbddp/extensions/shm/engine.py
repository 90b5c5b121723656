"""Calls of a group: run at once or, if they are asynchronous, on a thread of their channel.

A channel is for the collectives of a group, or for the messages in one direction between two ranks.
Each channel has its own thread, so two groups that ranks call in different orders do not deadlock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.utils._mode_utils import no_dispatch

BUFFER_SIZE = 400  # calls that are recorded, as in torch's flight recorder


@dataclass
class Record:
    """A call, for the hang card and the timeline.

    Attributes:
        number: its number in its group.
        group: name and description of the group.
        ended: nanoseconds, 0 before the end.
    """

    number: int
    name: str
    group: tuple[str, str]
    inputs: Sequence[tuple[torch.dtype, torch.Size]]
    is_message: bool
    index: int
    began: int = field(default_factory=time.time_ns)
    ended: int = 0

    def entry(self) -> dict[str, Any]:
        """Return the record in the form of torch's flight recorder."""
        entry = {
            "record_id": self.index,
            "recorder": "shm",
            "backend": "shm",
            "name": self.name,
            "process_group": self.group,
            "pg_id": self.group[0],
            "collective_seq_id": self.number,
            "is_p2p": self.is_message,
            "is_synchronizing": not self.is_message,
            "input_dtypes": [str(dtype).removeprefix("torch.") for dtype, _ in self.inputs],
            "input_sizes": [list(shape) for _, shape in self.inputs],
            "time_created_ns": self.began,
            "retired": bool(self.ended),
        }
        return entry | ({"duration_ms": (self.ended - self.began) / 1e6} if self.ended else {})


class Recorder:
    """The last calls of this process."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self._records: deque[Record] = deque(maxlen=BUFFER_SIZE)

    def add(
        self, number: int, name: str, group: Any, tensors: Sequence[Any], *, is_message: bool
    ) -> Record:
        """Record the start of a call."""
        inputs = [(tensor.dtype, tensor.shape) for tensor in tensors]
        record = Record(number, name, group.label, inputs, is_message, next(self._count))
        self._records.append(record)
        return record

    def entries(self) -> list[dict[str, Any]]:
        """Return all records, oldest first."""
        return [record.entry() for record in list(self._records)]


class Call(dist.Work):
    """A call of a group, which is also what torch waits for.

    Args:
        act: carries it out; it may return the rank whose message it has received.
        results: the tensors that its future has.
        record: its record.
        fail: a method that is told of an error that leaves the group unusable.
    """

    def __init__(
        self,
        act: Callable[[], int | None],
        results: Sequence[Any],
        record: Record,
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__()
        self._act: Callable[[], int | None] | None = act
        self._results, self._record = results, record
        self._fail = WeakMethod(fail)  # a call that has ended keeps no memory
        self._has_ended = threading.Event()
        self._error: BaseException | None = None
        self._source: int | None = None
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None

    def run(self) -> None:
        """Carry out the call, and keep its error."""
        try:
            if self._act is not None:
                with no_dispatch():  # modes such as MemTracker's must not count the shared memory
                    self._source = self._act()
        except BaseException as error:  # noqa: BLE001 - the wait raises it
            self.end(error.with_traceback(None))  # whose frames would keep the memory
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """End the call."""
        if error is not None:
            self._tell(error)
        self._record.ended = time.time_ns()
        self._error, self._act = error, None
        with self._lock:
            self._has_ended.set()
        if self._future is not None:
            self._future.set_result(None)

    def _tell(self, error: BaseException) -> None:
        if (fail := self._fail()) is not None:
            fail(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end."""
        seconds = timeout.total_seconds()
        try:
            has_ended = self._has_ended.wait(seconds if seconds > 0 else None)
        except BaseException as error:  # an interrupt has ended the wait
            self._tell(error)
            raise
        if not has_ended:
            raise dist.DistBackendError(
                f"Timed out waiting {seconds:g} s for {self._record.name} over shared memory"
            )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._has_ended.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._results

    def source_rank(self) -> int:
        return -1 if self._source is None else self._source

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors.

        An error is raised in ``then``: torch's C++ does not see that of ``set_exception``.
        """
        with self._lock:
            if self._future is None:
                self._future = Future()
                if self._has_ended.is_set():
                    self._future.set_result(None)
            return self._future.then(lambda _: self.result())


class Channel:
    """Calls that must keep their order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._pending: deque[Call] = deque()
        self._is_busy = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._caller: threading.Thread | None = None  # runs a call at once

    def submit(self, call: Call, *, at_once: bool) -> None:
        """Run a call on this thread if ``at_once``, and nothing is before it; else on another.

        Raises:
            RuntimeError: this thread runs an earlier call, which this one would wait for.
        """
        with self._changed:
            if threading.current_thread() is self._caller:
                raise RuntimeError(
                    "a signal handler has called a collective inside another one of the same "
                    "group: set a flag in the handler, and call the collective outside it"
                )
            if threading.current_thread() is self._thread:
                # A callback of an earlier call makes this one, as in PowerSGD, and may wait for it:
                # another thread must serve the channel from now on.
                self._thread, self._is_busy = None, False
            at_once = at_once and not (self._is_busy or self._pending)
            if at_once:
                self._is_busy, self._caller = True, threading.current_thread()
            else:
                self._pending.append(call)
                self._changed.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._serve, name=self._name, daemon=True
                    )
                    self._thread.start()
        if at_once:
            call.run()
            with self._changed:
                self._is_busy, self._caller = False, None
                self._changed.notify_all()

    def close(self) -> None:
        """Let the thread end after the calls that are submitted."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._is_busy and (self._pending or self._is_closed)
                )
                if not self._pending:
                    return
                self._is_busy, call = True, self._pending.popleft()
            call.run()
            del call  # and its tensors
            with self._changed:
                if threading.current_thread() is not self._thread:
                    return  # a callback has made a call, so another thread serves the channel
                self._is_busy = False
                self._changed.notify_all()
