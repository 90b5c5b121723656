"""The thread that sends what a rank reports: its log and numbers in batches, and single reports.

Urgent reports, such as a status or an answer, have a queue of their own and are sent at once. All
others keep their order: output that was printed before a picture is sent before it, and all of it
before the end of the cell. A long log does not delay them: of a flood only its position in the file
is sent.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import floor
from typing import Protocol

from nbddp.formatting import with_article
from nbddp.wire.messages import (
    URGENT_MESSAGES,
    CellEnded,
    Display,
    MessageFromRank,
    Metrics,
    Output,
)
from nbddp.wire.queues import QueueWriter
from nbddp.wire.request_messages import Answer

logger = logging.getLogger(__name__)

# seconds between two looks for output of C code and child processes, in a cell
POLL_INTERVAL = 0.05
IDLE_POLL_INTERVAL = 1.0  # and between cells
BATCH_PERIOD = 0.1  # seconds between batches, on average; a line after a pause is sent at once
# ranks; more of them send fewer batches each, because one process reads all
RANKS_AT_FULL_RATE = 10
# lines or rows of numbers: after a batch of no more, the next one may follow sooner
SMALL_BATCH = 2
CATCH_UP = 0.1  # seconds of batches not sent that may be made up for at once
FLUSH_TIMEOUT = 2.0  # seconds
MAX_PIECES = 1000  # of one source in one batch: an endless source must not delay the others
# characters of pictures that may wait here: beyond that display() waits
MAX_QUEUED_CHARACTERS = 32 << 20


class Source(Protocol):
    """Something that fills up and is sent in batches, such as the log."""

    def position(self) -> int:
        """Return how far it is filled now."""

    def read(self, upto: int | None = None) -> MessageFromRank | None:
        """Return the next piece, up to a mark, or None."""


class Outbox:
    """Sends the output that precedes a report before the report.

    No error of one message ends the thread, and the end of a cell is always sent.

    Args:
        writer: for output, numbers, and the end of a cell.
        urgent: for reports that do not wait for those.
        ranks: how many ranks have the same reader.
    """

    def __init__(self, writer: QueueWriter, urgent: QueueWriter, *, ranks: int = 1) -> None:
        self._writer = writer
        self._urgent_writer = urgent
        self._sources: tuple[Source, ...] = ()
        self._period = BATCH_PERIOD * max(1.0, ranks / RANKS_AT_FULL_RATE)
        self._short_period = BATCH_PERIOD * (ranks / RANKS_AT_FULL_RATE)
        self._unreadable: set[Source] = set()
        # What is sent from a mark of each source on, in order.
        self._queue: deque[tuple[Callable[[], None], list[int]]] = deque()
        self._urgent: deque[MessageFromRank] = deque()
        self._queued_characters = 0  # characters of the pictures in the queue
        # An RLock, because a handler of a signal may print. It is used as the C lock that it is:
        # an interrupt cannot strike between acquiring it and the block, as in Condition.__enter__.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._has_output = False
        self._is_in_cell = False
        self._is_open = True
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="nbddp-outbox", daemon=True)

    def start(self, *sources: Source) -> None:
        """Start to send: reports, and what these sources have, in batches."""
        self._sources = sources
        self._thread.start()

    def notify(self) -> None:
        """Say that a source has something; cheap enough for every line that is printed."""
        if not self._has_output and not self._is_in_child():
            with self._lock:
                self._has_output = True
                self._wake.notify_all()

    def begin_cell(self) -> None:
        """Look often for output of C code and child processes, until the cell's end is posted."""
        with self._lock:
            self._is_in_cell = self._has_output = True  # which ends the long wait
            self._wake.notify_all()

    def post(self, message: MessageFromRank) -> None:
        """Send a report: at once if it is urgent, else after all output that precedes it.

        Wait while too many pictures are in the queue, as a print into a full pipe does.
        """
        if self._is_in_child():
            return
        with self._lock:
            if isinstance(message, URGENT_MESSAGES):
                self._urgent.append(message)
                self._wake.notify_all()
                return
            if isinstance(message, Display) and threading.current_thread() is not self._thread:
                self._wake.wait_for(lambda: self._queued_characters < MAX_QUEUED_CHARACTERS)
            if isinstance(message, CellEnded):
                self._is_in_cell = False
            self._queued_characters += _count_characters(message)
            self._enqueue(partial(self._send_message, message))

    def _enqueue(self, action: Callable[[], None]) -> None:
        """Do something after the output that precedes it was sent."""
        with self._lock:
            self._queue.append((action, self._positions()))
            self._wake.notify_all()

    def _positions(self) -> list[int]:
        return [_position_of(source) for source in self._sources]

    def _is_in_child(self) -> bool:
        """Return whether a cell forked this process: it has no outbox.

        A child must not touch the lock: if the thread held it at the fork, nothing releases it.
        """
        return os.getpid() != self._pid

    def reconnect(self) -> None:
        """Send to another reader, at another store."""
        self._writer.reconnect()
        self._urgent_writer.reconnect()

    def flush(self) -> None:
        """Wait until the controller has read all output and reports so far, for at most 2 s.

        Otherwise the controller may notice the death of a rank before it reads the last reports.
        """
        if self._is_in_child():
            return
        deadline = time.monotonic() + FLUSH_TIMEOUT
        lock = threading.Lock()
        lock.acquire()
        self._enqueue(lock.release)
        lock.acquire(timeout=FLUSH_TIMEOUT)
        with suppress(RuntimeError):  # torch's: there is no store any more
            while time.monotonic() < deadline and not self._writer.is_read():
                time.sleep(BATCH_PERIOD / 50)

    def close(self) -> None:
        """Send what is left, then end the thread."""
        self._enqueue(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._is_open = False

    # ---- the thread

    def _run(self) -> None:
        next_batch = 0.0
        while self._is_open:
            with self._lock:
                # a timeout, because C code writes to the file without telling us
                timeout = POLL_INTERVAL if self._is_in_cell else IDLE_POLL_INTERVAL
                self._wake.wait_for(lambda: self._has_output or self._has_messages(), timeout)
                self._wake.wait_for(self._has_messages, max(0.0, next_batch - time.monotonic()))
            self._send_urgent()
            if self._queue or time.monotonic() >= next_batch:
                lines = self._send_batch()
                if lines:
                    next_batch = self._next_due(next_batch, lines)

    def _has_messages(self) -> bool:
        return bool(self._urgent or self._queue)

    def _next_due(self, batch: float, lines: int) -> float:
        """Return when the next batch is due, after one that was due then and had so many lines.

        All ranks of a machine send at the same instants. Most of the cost of a message for its
        reader is to wake threads with cold caches: for 64 messages that arrive together once.
        """
        period = self._short_period if lines <= SMALL_BATCH else self._period
        due = max(batch, time.monotonic() - CATCH_UP) + period
        return floor(due / period + 1e-6) * period

    def _send_batch(self) -> int:
        """Send all that there is. Return how many lines of output it had."""
        with self._lock:
            self._has_output = False
            queue, now = list(self._queue), self._positions()
            self._queue.clear()
        lines = 0
        for number, (action, positions) in enumerate(queue):
            lines += self._send_sources(positions)
            if number:
                self._wait_for_reader()
            action()
        lines += self._send_sources(now)
        self._send_urgent()
        return lines

    def _send_sources(self, positions: Sequence[int]) -> int:
        """Send what the sources have up to these marks. Return how many lines that were."""
        lines = 0
        for pieces in _group_into_messages(self._read_sources(positions)):
            if lines:
                self._wait_for_reader()
            try:
                self._writer.put_batch(pieces)
            except Exception:  # noqa: BLE001 - sent alone, the piece at fault is named
                for piece in pieces:
                    self._send(self._writer, piece)
            lines += max(map(_count_lines, pieces))
        return lines

    def _read_sources(self, positions: Sequence[int]) -> Iterator[MessageFromRank]:
        for source, position in zip(self._sources, positions, strict=True):
            for _ in range(MAX_PIECES):
                try:
                    piece = source.read(position)
                except Exception as error:  # noqa: BLE001 - the thread goes on after any error
                    if source not in self._unreadable:
                        self._unreadable.add(source)
                        what = "what this rank writes cannot be read back to be shown"
                        self._send(self._writer, notify_user(f"{what}: {error!r}"))
                    break
                self._unreadable.discard(source)
                if piece is None:
                    break
                yield piece

    def _wait_for_reader(self) -> None:
        self._send_urgent()
        with suppress(RuntimeError):  # torch's: posting connects anew
            while self._writer.is_full():
                with self._lock:
                    self._wake.wait_for(lambda: self._urgent, BATCH_PERIOD / 4)
                self._send_urgent()

    def _send_urgent(self) -> None:
        while self._urgent:
            self._send(self._urgent_writer, self._urgent.popleft())

    def _send_message(self, message: MessageFromRank) -> None:
        self._send(self._writer, message)
        with self._lock:
            self._queued_characters -= _count_characters(message)
            self._wake.notify_all()

    def _send(self, writer: QueueWriter, message: MessageFromRank) -> None:
        """Send a report. If that fails, say why, and send an end or an answer without content."""
        try:
            writer.put(message)
        except Exception as error:  # noqa: BLE001 - the thread goes on after any error
            what = with_article(type(message).__name__)
            fallbacks: list[tuple[QueueWriter, MessageFromRank]] = [
                (self._writer, notify_user(f"{what} could not be sent: {error}"))
            ]
            if isinstance(message, CellEnded | Answer):
                fallbacks.append(
                    (writer, _without_content(message, f"it could not be sent: {error}"))
                )
            for fallback_writer, fallback in fallbacks:
                try:
                    fallback_writer.put(fallback)
                except Exception:  # the store is gone, and with it the reader
                    logger.exception("nbddp could not send")


def notify_user(text: str, cell: int = 0) -> Display:
    """Return a line of nbddp's own for the user, under a cell, or of no cell in particular."""
    return Display(cell=cell, data={"text/plain": f"nbddp: {text}"}, metadata={})


def _without_content(message: CellEnded | Answer, reason: str) -> CellEnded | Answer:
    """Return the end without what made it impossible to send: the controller waits for it."""
    if isinstance(message, Answer):
        return Answer(request=message.request, error=reason)
    name = str(message.failure.get("name", ""))
    failure = message.failure and {"name": name, "text": reason, "traceback": reason}
    return replace(message, failure=failure, result={})


def _group_into_messages(pieces: Iterable[MessageFromRank]) -> Iterator[list[MessageFromRank]]:
    """Group pieces into messages: one piece of each kind is long enough."""
    group: list[MessageFromRank] = []
    for piece in pieces:
        if type(piece) in map(type, group):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _position_of(source: Source) -> int:
    try:
        return source.position()
    except OSError:
        return sys.maxsize  # reading it fails as well, and that error is reported


def _count_lines(message: MessageFromRank) -> int:
    """Return how many lines or rows a report has, at least one."""
    match message:
        case Output(text=text):
            return max(1, text.count("\n"))
        case Metrics(rows=rows):
            return max(1, len(rows))
    return 1


def _count_characters(message: MessageFromRank) -> int:
    if not isinstance(message, Display):
        return 0
    return sum(len(value) for value in message.data.values() if isinstance(value, str))
