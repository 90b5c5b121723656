"""Write the metrics, progress and events of a cell to a file, then send them in batches.

What a loop reports in each step, metrics and a changed progress bar, waits for the next poll of the
outbox, 0.05 s at most: the reader of the messages often shares the cores with the ranks.

There is no lock. A signal handler of the user may report inside another report, and may wait for
a thread that reports, such as the writer of a checkpoint. So a report changes each shared object
with one atomic operation.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbddp.private_files import open_private_file
from nbddp.reporting.log_and_track import ProgressBar, Sink
from nbddp.wire.messages import (
    ConfigReported,
    EventReported,
    MessageFromRank,
    Metrics,
    Progress,
)
from nbddp.worker.output.outbox import Outbox, build_notice

MAX_ROWS = 1000  # in one message
MAX_QUEUED_ROWS = 100_000  # above it, the live view leaves out the oldest rows
MAX_QUEUED_EVENTS = 1000  # above it, ``record_event`` waits until they are sent
MAX_BARS = 8  # nested loops to show


class MetricSink(Sink):
    """The sink of a rank: the main thread reports values, and the outbox thread sends them.

    Args:
        path: the file that all ranks append to.
        outbox: is notified of each report, and sends a notice if a write fails.
        rank: the rank to write in each line.
        attempt: the attempt to write in each line.

    Attributes:
        report_count: the number of reported steps, events and changes of a progress bar.
        steps: the last step of each loop, by the first metric name that the loop reports.
    """

    def __init__(self, path: Path, outbox: Outbox, *, rank: int, attempt: int) -> None:
        self._outbox = outbox
        self._identity = {"rank": rank, "attempt": attempt}
        self._fd = open_private_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._path = path
        self._cell_start = 0  # the size of the file
        self._rewound_at = 0.0  # in ``time.time()``; earlier rows are in ``_repeated``
        self._repeated: deque[list[Any]] = deque(maxlen=MAX_QUEUED_ROWS)
        self._rows: deque[list[Any]] = deque()
        self._events: deque[EventReported] = deque()
        self._bars: dict[int, ProgressBar] = {}  # by id, outermost first
        self._counts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._dropped = self._reported_dropped = 0  # rows; only the outbox changes the second one
        self._bars_changed = False
        self._has_reported_loss = False
        self._is_line_cut = False
        self._is_recorded = True
        os.register_at_fork(after_in_child=self._keep_file_only)
        self.report_count = 0
        self.steps: dict[str, int] = {}

    def flush(self) -> None:
        """Wait until all reports are sent."""
        self._outbox.flush()

    # ---- called by the cell

    def log(self, step: int | None, values: dict[str, float]) -> None:
        """Write values to the file, and queue them for the outbox."""
        at = round(time.time(), 6)
        head = self._identity if step is None else self._identity | {"step": step}
        line = json.dumps({"time": at, **head, **values})
        if self._is_recorded:
            self._write(f"{line}\n".encode())
        loop = next(iter(values), "")
        self.steps[loop] = next(self._counts[loop]) if step is None else step
        self._rows.append([at, step, values])
        if len(self._rows) > MAX_QUEUED_ROWS:
            with suppress(IndexError):  # a handler has waited until all rows were sent
                self._rows.popleft()
                self._dropped += 1
        self.report_count += 1

    def open_bar(self, bar: ProgressBar) -> None:
        """Show the bar of a new loop, inside those that have not ended."""
        for key, shown in [*self._bars.items()]:
            if not shown.is_open:
                self._bars.pop(key, None)
        self._bars[id(bar)] = bar
        self._bars_changed = True
        self._count_report()

    def update_bar(self, bar: ProgressBar) -> None:  # noqa: ARG002 - all bars are read together
        """Mark that a bar has changed."""
        self._bars_changed = True
        self.report_count += 1

    def close_bar(self, bar: ProgressBar) -> None:
        """Remove the bar of a loop. Keep the outermost bar until the next loop, to show its end."""
        bar.close()
        self._bars_changed = True
        self._count_report()

    def record_event(
        self, kind: str, facts: dict[str, Any], message: type[EventReported] = EventReported
    ) -> None:
        """Queue an event for the event log."""
        plain = json.loads(json.dumps(facts, default=str))  # str: for paths and tensors
        self._events.append(message(kind=kind, facts=plain))
        self._count_report()
        if len(self._events) >= MAX_QUEUED_EVENTS:
            self.flush()

    def record_config(self, values: dict[str, Any]) -> None:
        """Queue settings for the event log."""
        self.record_event("config", {"values": values}, ConfigReported)

    def _count_report(self) -> None:
        self.report_count += 1
        self._outbox.notify()

    def begin_cell(self, *, is_recorded: bool = True) -> None:
        """Remove the step numbers and the progress bars of the earlier cell.

        Without ``is_recorded``, a replay runs the cell: the file has the values of its first run.
        """
        self._is_recorded = is_recorded
        self._cell_start = os.fstat(self._fd).st_size
        self.steps, self._bars = {}, {}
        self._counts.clear()
        self._bars_changed = False

    def _write(self, line: bytes) -> None:
        """Append a line in one write, because all ranks append to this file."""
        try:
            line = b"\n" + line if self._is_line_cut else line
            self._is_line_cut = os.write(self._fd, line) < len(line)  # the disk is full
        except OSError as error:
            if not self._has_reported_loss:
                self._has_reported_loss = True
                what = f"metrics.jsonl is incomplete from here on: {error.strerror}"
                self._outbox.post(build_notice(what))

    def _keep_file_only(self) -> None:
        """Queue nothing in a child process, such as a DataLoader worker: it has no outbox."""
        self._rows, self._events = deque(maxlen=0), deque(maxlen=0)

    # ---- called by the outbox

    def position(self) -> int:
        """Return 0: ``read`` ignores the position, and may return reports that were added later."""
        return 0

    def read(self, upto: int | None = None) -> MessageFromRank | None:  # noqa: ARG002 - see Source
        """Return the next message with unsent reports, or None."""
        # On the nbddp-outbox thread.
        if self._events:
            return self._next_event()
        if self._repeated:
            count = min(len(self._repeated), MAX_ROWS)
            return Metrics(rows=[self._repeated.popleft() for _ in range(count)])
        if self._rows:
            rows = [self._rows.popleft() for _ in range(min(len(self._rows), MAX_ROWS))]
            rows = [row for row in rows if row[0] > self._rewound_at]
            missed = self._dropped - self._reported_dropped
            self._reported_dropped += missed
            return Metrics(rows=rows, missed=missed)
        if self._bars_changed:
            self._bars_changed = False
            bars = [*self._bars.values()]
            shown = [each for each in bars if each.is_open or each is bars[0]]
            return Progress(bars=[each.state() for each in shown[:MAX_BARS]])
        return None

    def rewind(self) -> None:
        """Send the rows of the cell again, from the file, and the progress bars."""
        # On the nbddp-outbox thread.
        self._bars_changed = True
        self._repeated.clear()
        if not self._is_recorded:
            return
        self._rewound_at, self._reported_dropped = time.time(), self._dropped
        with os.fdopen(open_private_file(self._path, os.O_RDONLY), "rb") as file:
            file.seek(self._cell_start)
            for line in file:
                with suppress(ValueError):  # another rank is writing it, or the disk was full
                    self._repeat(json.loads(line))

    def _repeat(self, row: dict[str, Any]) -> None:
        is_own = all(row.pop(name, None) == own for name, own in self._identity.items())
        if is_own and (at := row.pop("time")) <= self._rewound_at:
            self._repeated.append([at, row.pop("step", None), row])

    def _next_event(self) -> EventReported:
        """Return the oldest event; merge those of ``nbddp.config``, which a loop may call often."""
        event, events = self._events.popleft(), self._events
        while isinstance(event, ConfigReported) and events and type(events[0]) is ConfigReported:
            event.facts["values"].update(events.popleft().facts["values"])
        return event
