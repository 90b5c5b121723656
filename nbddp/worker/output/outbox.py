"""Send the messages of a rank from a thread: log and metrics in batches, other messages alone.

Urgent messages, such as a status or an answer, have a separate queue and are sent at once. All
others keep their order: output printed before an image is sent before the image, and all output is
sent before the end of the cell. A long log does not delay them: of very long output, only its
position in the file is sent.

There is no lock, because a signal handler of the user may print, log or save a checkpoint inside a
call of the outbox, and an interrupt may end that call anywhere. ``SimpleQueue.put`` and the methods
of a deque are atomic, because they are written in C.
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
from queue import Empty, SimpleQueue
from typing import Protocol

from nbddp.errors import WireError
from nbddp.formatting import with_article
from nbddp.wire import messages as msg
from nbddp.wire.collective_arrivals import CollectiveArrivals
from nbddp.wire.queues import QueueWriter
from nbddp.wire.request_messages import Answer

logger = logging.getLogger(__name__)

# seconds between checks for output of C code and child processes, in a cell
POLL_INTERVAL = 0.05
IDLE_POLL_INTERVAL = 1.0  # the same between cells
BATCH_PERIOD = 0.1  # mean seconds between batches; a line after a pause is sent at once
# with more ranks, each sends fewer batches, because one process reads all
RANKS_AT_FULL_RATE = 10
# lines or rows; after a batch of at most this size, the next one may follow sooner
SMALL_BATCH = 2
CATCH_UP = 0.1  # seconds of missed batches that may be sent at once
FLUSH_TIMEOUT = 2.0  # seconds
MAX_PIECES = 1000  # of one source in a batch, so that an endless source does not delay others
# characters of queued images above which display() waits
MAX_QUEUED_CHARACTERS = 32 << 20


class Source(Protocol):
    """A source of messages to send in batches, such as the log."""

    def position(self) -> int:
        """Return the current end of the source."""

    def read(self, upto: int | None = None) -> msg.MessageFromRank | None:
        """Return the next message, up to a position, or None."""

    def rewind(self) -> None:
        """Read everything since the start of the cell again, for another notebook."""


class Outbox:
    """Send messages in a thread, each after the output that precedes it.

    An error in one message does not end the thread, and the end of a cell is always sent.

    Args:
        writer: the queue for output, metrics and the end of a cell.
        urgent: the queue for urgent messages.
        ranks: the number of ranks with the same reader.
    """

    def __init__(self, writer: QueueWriter, urgent: QueueWriter, *, ranks: int = 1) -> None:
        self._writer = writer
        self._urgent_writer = urgent
        self._sources: tuple[Source, ...] = ()
        self._period = BATCH_PERIOD * max(1.0, ranks / RANKS_AT_FULL_RATE)
        self._short_period = BATCH_PERIOD * (ranks / RANKS_AT_FULL_RATE)
        self._unreadable: set[Source] = set()
        # actions in order, each with the position of every source when it was added
        self._queue: deque[tuple[Callable[[], None], list[int]]] = deque()
        self._urgent: deque[msg.MessageFromRank] = deque()
        self._queued_characters = 0  # characters of images since display() has waited
        self._wake: SimpleQueue[None] = SimpleQueue()  # an item wakes the thread
        self._has_output = False
        self._is_in_cell = False
        self._is_open = True
        self._connection = 0  # of the writer, to which the sources were sent
        self._left_out = 0  # pictures that no notebook was there to show
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="nbddp-outbox", daemon=True)

    def start(self, *sources: Source) -> None:
        """Start the thread, which sends messages, and the content of these sources in batches."""
        self._sources = sources  # first: an action keeps the positions of all sources
        self._thread.start()

    def notify(self) -> None:
        """Tell the thread that a source has output. This is cheap enough for each printed line."""
        # On any thread, and in signal handlers.
        if not self._has_output and not self._is_in_child():
            self._has_output = True  # first: the thread reads it when it wakes
            self._wake.put(None)

    def begin_cell(self) -> None:
        """Check often for output of C code and child processes, until the cell ends."""
        self._is_in_cell = self._has_output = True  # ends a wait of IDLE_POLL_INTERVAL
        self._wake.put(None)

    def post(self, message: msg.MessageFromRank) -> None:
        """Send a message: at once if it is urgent, else after all earlier output.

        Wait while the queue holds too many images, as ``print`` waits for a full pipe.
        """
        # On any thread, and in signal handlers.
        if self._is_in_child() or (self._is_cut_off and self._drops(message)):
            return
        if isinstance(message, msg.URGENT_MESSAGES):
            self._urgent.append(message)  # first: the thread looks for it when it wakes
            self._wake.put(None)
            return
        if isinstance(message, msg.CellEnded):
            self._is_in_cell = False
        self._enqueue(partial(self._send, self._writer, message))
        # the outbox's own thread must not wait here: it would wait for itself
        is_own = self._is_cut_off or threading.current_thread() is self._thread
        if isinstance(message, msg.Display) and not is_own:
            # a lost addition lets display() wait later
            self._queued_characters += _count_characters(message)
            if self._queued_characters > MAX_QUEUED_CHARACTERS:
                self._queued_characters = 0
                self._wait_until_sent()  # without a limit; an interrupt of the cell ends it

    @property
    def _is_cut_off(self) -> bool:
        """Whether the notebook has ended, and messages wait for the next one."""
        return self._writer.is_cut_off or self._urgent_writer.is_cut_off

    def _drops(self, message: msg.MessageFromRank) -> bool:
        """Return whether to drop a message while there is no notebook, so that memory suffices.

        A status describes a moment. Of pictures, the first ones are kept.
        """
        if isinstance(message, msg.Display):
            if self._queued_characters > MAX_QUEUED_CHARACTERS:
                self._left_out += 1
                return True
            self._queued_characters += _count_characters(message)
        return isinstance(message, msg.RankStatus | CollectiveArrivals)

    def _enqueue(self, action: Callable[[], None]) -> None:
        """Queue an action that runs after all earlier output is sent."""
        self._queue.append((action, self._positions()))
        self._wake.put(None)  # last: the thread looks into the queue when it wakes

    def _wait_until_sent(self, timeout: float = -1.0) -> None:
        """Wait until all messages so far are sent."""
        lock = threading.Lock()  # of this call, so that a signal handler may wait inside it
        lock.acquire()
        self._enqueue(lock.release)
        lock.acquire(timeout=timeout)

    def _positions(self) -> list[int]:
        return [_position_of(source) for source in self._sources]

    def _is_in_child(self) -> bool:
        """Return whether a cell forked this process. A child has no thread of the outbox."""
        return os.getpid() != self._pid

    def reconnect(self) -> None:
        """Connect to the store of another reader. It gets all output of the cell."""
        self._writer.reconnect()
        self._urgent_writer.reconnect()
        left_out, self._left_out, self._queued_characters = self._left_out, 0, 0
        if left_out:
            what = "a picture" if left_out == 1 else f"{left_out:,} pictures"
            notice = build_notice(f"{what} left out: there was no notebook to show more")
            self._enqueue(partial(self._send, self._writer, notice))
        self._has_output = True
        self._wake.put(None)

    def flush(self) -> None:
        """Wait until the controller has read all output and messages so far, for at most 2 s.

        Without it, the controller may learn of a rank's death before it reads the last messages.
        """
        if self._is_in_child():
            return
        deadline = time.monotonic() + FLUSH_TIMEOUT
        self._wait_until_sent(FLUSH_TIMEOUT)
        with suppress(RuntimeError):  # from torch: the store is gone
            # the store can tell the length of a queue, but not wait until it is empty
            while time.monotonic() < deadline and not self._writer.is_read():
                time.sleep(BATCH_PERIOD / 50)

    def close(self) -> None:
        """Send all queued messages, then end the thread."""
        self._enqueue(self._stop)
        self._thread.join()  # without a limit; the controller kills a rank that does not end

    def _stop(self) -> None:
        # On the nbddp-outbox thread, after all earlier messages.
        self._is_open = False

    # ---- the thread

    def _run(self) -> None:
        # On the nbddp-outbox thread, as all methods below.
        next_batch = 0.0
        while self._is_open:
            # a timeout, because C code writes to the file without a notification
            timeout = POLL_INTERVAL if self._is_in_cell else IDLE_POLL_INTERVAL
            self._wait_for(lambda: self._has_output or self._has_messages(), timeout)
            # then until the next batch is due; output does not end this wait, but messages do
            self._wait_for(self._has_messages, next_batch - time.monotonic())
            self._send_urgent()
            if self._queue or time.monotonic() >= next_batch:
                lines = self._send_batch()
                if lines:
                    next_batch = self._next_due(next_batch, lines)

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition() and (remaining := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                self._wake.get(timeout=remaining)

    def _has_messages(self) -> bool:
        return bool(self._urgent or self._queue)

    def _next_due(self, batch: float, lines: int) -> float:
        """Return when the next batch is due, from the due time and the lines of the last one.

        All ranks of a machine send at the same instants. For the reader, most of the cost of a
        message is to wake threads with cold caches, which 64 messages that arrive together do once.
        """
        period = self._short_period if lines <= SMALL_BATCH else self._period
        due = max(batch, time.monotonic() - CATCH_UP) + period
        # rounding may put `due` just below an instant, and the batch would come a period early
        return floor(due / period + 1e-6) * period

    def _send_batch(self) -> int:
        """Send all output and messages. Return the number of lines."""
        self._has_output = False  # before all reading: output that comes meanwhile sets it again
        now = self._positions()  # first: output after a queued message is not sent before it
        # only what is queued now: other threads may add messages faster than this one sends them
        queue = [self._queue.popleft() for _ in range(len(self._queue))]
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
        """Send the content of the sources up to these positions. Return the number of lines."""
        if self._connection != self._writer.connection:  # another notebook reads
            self._connection = self._writer.connection
            for source in self._sources:
                source.rewind()
        lines = 0
        for pieces in _group_into_messages(self._read_sources(positions)):
            if lines:
                self._wait_for_reader()
            try:
                if not self._writer.put_batch(pieces, self._connection):
                    return self._send_sources(positions)
            except WireError:  # send each alone, to name the faulty one
                for piece in pieces:
                    self._send(self._writer, piece)
            except Exception as error:  # noqa: BLE001 - the thread continues after any error
                # not each alone: the store may have received them, and would count rows twice
                self._put_or_log(self._writer, build_notice(f"output could not be sent: {error}"))
            lines += max(map(_count_lines, pieces))
        return lines

    def _read_sources(self, positions: Sequence[int]) -> Iterator[msg.MessageFromRank]:
        for source, position in zip(self._sources, positions, strict=True):
            for _ in range(MAX_PIECES):
                try:
                    piece = source.read(position)
                except Exception as error:  # noqa: BLE001 - the thread continues after any error
                    if source not in self._unreadable:
                        self._unreadable.add(source)
                        what = "output of this rank is not shown, because it cannot be read"
                        self._send(self._writer, build_notice(f"{what}: {error!r}"))
                    break
                self._unreadable.discard(source)
                if piece is None:
                    break
                yield piece

    def _wait_for_reader(self) -> None:
        self._send_urgent()
        with suppress(RuntimeError):  # from torch: the next message connects again
            while self._writer.is_full():  # urgent messages end the wait: they have another queue
                self._wait_for(lambda: bool(self._urgent), BATCH_PERIOD / 4)
                self._send_urgent()

    def _send_urgent(self) -> None:
        while self._urgent:
            self._send(self._urgent_writer, self._urgent.popleft())

    def _send(self, writer: QueueWriter, message: msg.MessageFromRank) -> None:
        """Send a message. If that fails, notify the user, and send a CellEnded or Answer empty."""
        try:
            writer.put(message)
        except Exception as error:  # noqa: BLE001 - the thread continues after any error
            what, reason = with_article(type(message).__name__), f"could not be sent: {error}"
            fallbacks: list[tuple[QueueWriter, msg.MessageFromRank]] = []
            fallbacks.append((self._writer, build_notice(f"{what} {reason}")))
            if isinstance(message, msg.CellEnded | Answer):
                fallbacks.append((writer, _without_content(message, f"it {reason}")))
            # the notice is first: after the end of the cell it would stand in the next one
            for fallback_writer, fallback in fallbacks:
                self._put_or_log(fallback_writer, fallback)

    def _put_or_log(self, writer: QueueWriter, message: msg.MessageFromRank) -> None:
        try:
            writer.put(message)
        except Exception:  # the store is gone, and so is the reader
            logger.exception("nbddp could not send")


def build_notice(text: str) -> msg.Display:
    """Return a line of text for the user."""
    return msg.Display(data={"text/plain": f"nbddp: {text}"}, metadata={})


def _count_characters(picture: msg.Display) -> int:
    return sum(len(each) for each in picture.data.values() if isinstance(each, str))


def _without_content(message: msg.CellEnded | Answer, reason: str) -> msg.CellEnded | Answer:
    """Return the message without the content that cannot be sent: the controller waits for it."""
    if isinstance(message, Answer):
        return Answer(request=message.request, error=reason)
    name = str(message.failure.get("name", ""))
    failure = message.failure and {"name": name, "text": reason, "traceback": reason}
    return replace(message, failure=failure, result={}, facts={})


def _group_into_messages(
    pieces: Iterable[msg.MessageFromRank],
) -> Iterator[list[msg.MessageFromRank]]:
    """Group messages to send together, with at most one of each type."""
    group: list[msg.MessageFromRank] = []
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
        return sys.maxsize  # reading it fails too and reports the error


def _count_lines(message: msg.MessageFromRank) -> int:
    """Return the number of lines or rows in a message, at least 1."""
    match message:
        case msg.Output(text=text):
            return max(1, text.count("\n"))
        case msg.Metrics(rows=rows):
            return max(1, len(rows))
    return 1
