"""What a rank's cell reports of itself: written to the file first, then mailed in batches."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from nbddp.train.log_and_track import ProgressBar, Sink
from nbddp.wire.messages import EventReported, MessageFromRank, Metrics, Progress
from nbddp.worker.output.outbox import Outbox, notify_user

MAX_ROWS = 1000  # in one letter
MAX_QUEUED_ROWS = 100_000  # rows; beyond that the oldest are left out of the live view
MAX_QUEUED_EVENTS = 1000  # that wait for the mail; the next one waits too
MAX_BARS = 8  # loops inside each other that are shown
CONFIG = "config"  # what happens where settings are said


class MetricSink(Sink):
    """The sink of a rank: what the main thread reports, the outbox's thread mails.

    Args:
        path: the file that all ranks append to.
        outbox: is told of each report, and once if the file can no longer be written.
        rank: this rank, and ``attempt``, are in each line.

    Attributes:
        report_count: how often something was reported: a step, a bar that moved, an event.
        steps: the last step of each loop, by the first name that the loop reports.
    """

    def __init__(self, path: Path, outbox: Outbox, *, rank: int, attempt: int) -> None:
        self._outbox = outbox
        self._identity = {"rank": rank, "attempt": attempt}
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._rows: deque[list[Any]] = deque()
        self._events: deque[EventReported] = deque()
        self._bars: list[ProgressBar] = []
        self._dropped = 0
        self._bars_changed = False
        self._has_reported_loss = False
        self._is_line_cut = False
        self.report_count = 0
        self.steps: dict[str, int] = {}

    def flush(self) -> None:
        """Wait until all that was reported was mailed."""
        self._outbox.flush()

    # ---- the cell's side

    def log(self, step: int | None, values: dict[str, float]) -> None:
        """Write the numbers down, and keep them for the mail."""
        at = round(time.time(), 6)
        head = self._identity if step is None else self._identity | {"step": step}
        line = json.dumps({"time": at, **head, **values})
        self._write(f"{line}\n".encode())
        if self._is_in_child():
            return
        loop = next(iter(values), "")
        with self._lock:
            self.steps[loop] = self.steps.get(loop, -1) + 1 if step is None else step
            self._rows.append([at, step, values])
            if len(self._rows) > MAX_QUEUED_ROWS:
                self._rows.popleft()
                self._dropped += 1
        self._count_report()

    def open_bar(self, bar: ProgressBar) -> None:
        """A loop begins, inside those that have not ended."""
        if self._is_in_child():
            return
        with self._lock:
            self._bars = [*(each for each in self._bars if each.is_open), bar]
            self._bars_changed = True
        self._count_report()

    def update_bar(self, bar: ProgressBar) -> None:  # noqa: ARG002 - all bars are read together
        """A loop has moved."""
        if self._is_in_child():
            return
        self._bars_changed = True
        self._count_report()

    def close_bar(self, bar: ProgressBar) -> None:
        """A loop is over; the outermost stays until another begins, so that its end is seen."""
        if self._is_in_child():
            return
        with self._lock:
            bar.close()
            if not self._bars or bar is not self._bars[0]:  # begun in an earlier cell: no bar
                self._bars = [each for each in self._bars if each is not bar]
            self._bars_changed = True
        self._count_report()

    def record_event(self, kind: str, facts: dict[str, Any]) -> None:
        """Something for the record."""
        if self._is_in_child():
            return
        with self._lock:
            plain = json.loads(json.dumps(facts, default=str))  # a path, a tensor
            if kind == CONFIG and self._events and self._events[-1].kind == CONFIG:
                # it is not mailed yet, and a loop may say its settings in each step
                self._events[-1].facts["values"].update(plain["values"])
            else:
                self._events.append(EventReported(kind=kind, facts=plain))
            is_full = len(self._events) >= MAX_QUEUED_EVENTS
        self._count_report()
        if is_full:
            self.flush()

    def _count_report(self) -> None:
        self.report_count += 1
        self._outbox.notify()

    def begin_cell(self) -> None:
        """What an earlier cell was in the middle of is over."""
        with self._lock:
            self.steps = {}
            self._bars = []
            self._bars_changed = False

    def _write(self, line: bytes) -> None:
        """Append a line in one piece: all ranks append to this file."""
        try:
            written = os.write(self._fd, b"\n" + line if self._is_line_cut else line)
            self._is_line_cut = written < len(line)  # a full disk took a part of it
        except OSError as error:
            if not self._has_reported_loss:
                self._has_reported_loss = True
                what = f"metrics.jsonl is not complete from here on: {error.strerror}"
                self._outbox.post(notify_user(what))

    def _is_in_child(self) -> bool:
        """Whether this is a child, such as a DataLoader's worker: it has the file, but no mail."""
        return os.getpid() != self._pid

    # ---- the outbox's side

    def position(self) -> int:
        """Nothing: what is reported later may as well be read."""
        return 0

    def read(self, upto: int | None = None) -> MessageFromRank | None:  # noqa: ARG002 - a source's
        """The next piece that was reported since the last call, or None."""
        with self._lock:
            if self._events:
                return self._events.popleft()
            if self._rows:
                rows = [self._rows.popleft() for _ in range(min(len(self._rows), MAX_ROWS))]
                missed, self._dropped = self._dropped, 0
                return Metrics(rows=rows, missed=missed)
            if self._bars_changed:
                self._bars_changed = False
                return Progress(bars=[each.state() for each in self._bars[:MAX_BARS]])
        return None
