"""The one thread of a rank that mails: its log and numbers in batches, its reports in between.

There are two ways up. What tells of the rank itself, such as a sign of life or an answer, goes at
once and on a way of its own. All that a cell says goes in order on the other: what was printed
before a picture comes before it, and all of it before the cell's end. No log is so long that this
takes time: of a flood it is only said where it stands in the file.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import floor
from typing import Protocol

from nbddp.formatting import with_article
from nbddp.wire.messages import URGENT, Answer, CellEnded, Display, Metrics, Output, Report
from nbddp.wire.queues import QueueWriter
from nbddp.worker.remarks import remark

logger = logging.getLogger(__name__)

POLL = 0.05  # seconds between two looks for output of C code and child processes, in a cell
IDLE_POLL = 1.0  # and between cells
PERIOD = 0.1  # seconds between batches, on average; a line after a pause goes at once
CROWD = 10  # ranks; more of them send fewer batches each, for one process reads all
FEW = 2  # lines or rows of numbers: after a batch of no more, the next one may follow sooner
SLACK = 0.1  # seconds of batches not sent that may be made up for at once
FLUSH_PATIENCE = 2.0  # seconds
MAX_PIECES = 1000  # of one source in one batch: one that never ends holds up nobody
MAX_HELD = 32 << 20  # characters of pictures that may wait here: beyond that display() waits


class Source(Protocol):
    """Something that fills up and is mailed in batches, such as the log."""

    def mark(self) -> int:
        """How far it is filled now."""

    def read(self, upto: int | None = None) -> Report | None:
        """The next piece, no further than to a mark; None when there is nothing more."""


class Mailer:
    """Mails what a source held when a report came before it, so that order is kept within a rank.

    Nothing that goes wrong with one message ends the thread, and a cell's end is always mailed.

    Args:
        writer: for output, numbers, and the end of a cell.
        urgent: for what does not wait for those.
        sources: what is mailed in batches.
        ranks: how many mail to the same reader.
    """

    def __init__(
        self, writer: QueueWriter, urgent: QueueWriter, *sources: Source, ranks: int = 1
    ) -> None:
        self._writer = writer
        self._urgent_writer = urgent
        self._sources = sources
        self._period = PERIOD * max(1.0, ranks / CROWD)
        self._short_period = PERIOD * (ranks / CROWD)
        self._failed: set[Source] = set()
        self._reports: deque[tuple[Report | None, list[int]]] = deque()
        self._urgent: deque[Report] = deque()
        self._held = 0
        # Taken as the C lock that it is: an interrupt cannot strike between its taking and the
        # block, as it can in a Condition's own __enter__, and then nobody gives it back.
        self._lock = threading.RLock()  # of a signal's handler too, which may print
        self._wake = threading.Condition(self._lock)
        self._has_output = False
        self._is_in_cell = False
        self._is_closing = False
        self._taken = self._sent = 0  # reports
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._mail_in_turn, name="nbddp-mailer", daemon=True)

    def start(self) -> None:
        """Begin to mail."""
        self._thread.start()

    def poke(self) -> None:
        """Say that a source has something; cheap enough for every line that is printed."""
        if not self._has_output and not self._is_elsewhere():
            with self._lock:
                self._has_output = True
                self._wake.notify_all()

    def begin_cell(self) -> None:
        """Look often for output of C code and child processes, until the cell's end is posted."""
        with self._lock:
            self._is_in_cell = self._has_output = True  # which ends the long wait
            self._wake.notify_all()

    def post(self, report: Report) -> None:
        """Mail a report: at once if it is urgent, else after all output that precedes it.

        Waits while there is no room for a picture, as a print into a full pipe does.
        """
        if self._is_elsewhere():
            return
        with self._lock:
            if isinstance(report, URGENT):
                self._urgent.append(report)
            else:
                if isinstance(report, Display) and threading.current_thread() is not self._thread:
                    self._wake.wait_for(lambda: self._held < MAX_HELD)
                if isinstance(report, CellEnded):
                    self._is_in_cell = False
                self._put(report)
                self._held += _size(report)
            self._wake.notify_all()

    def _put(self, report: Report | None) -> int:
        """Queue a report behind the output that precedes it. Return its number."""
        self._reports.append((report, [_mark(source) for source in self._sources]))
        self._taken += 1
        return self._taken

    def _is_elsewhere(self) -> bool:
        """Whether this is a process that a cell forked: it has no mail.

        Nor may it touch the lock: if the mail's thread held it just then, nobody gives it back.
        """
        return os.getpid() != self._pid

    def renew(self) -> None:
        """Another reader is there, at another store."""
        self._writer.renew()
        self._urgent_writer.renew()

    def flush(self) -> None:
        """Wait until the controller has read all output and reports so far, for at most 2 s.

        Otherwise the controller may notice the death of a rank before it reads the last reports.
        """
        if self._is_elsewhere():
            return
        until = time.monotonic() + FLUSH_PATIENCE
        with self._lock:
            number = self._put(None)
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._sent >= number, FLUSH_PATIENCE)
        with suppress(RuntimeError):  # torch's: there is no store any more
            while time.monotonic() < until and not self._writer.is_read():
                time.sleep(PERIOD / 50)

    def close(self) -> None:
        """Mail what is left, then end the thread."""
        with self._lock:
            self._is_closing = True
            self._wake.notify_all()
        self._thread.join()

    # ---- the thread

    def _mail_in_turn(self) -> None:
        next_batch = 0.0
        is_last = False
        while not is_last:
            with self._lock:
                # a timeout, because C code writes to the file without telling us
                poll = POLL if self._is_in_cell else IDLE_POLL
                self._wake.wait_for(lambda: self._has_output or self._has_news(), poll)
                self._wake.wait_for(self._has_news, max(0.0, next_batch - time.monotonic()))
            self._post_urgent()
            if self._is_pressing() or time.monotonic() >= next_batch:
                mailed, is_last = self._mail_batch()
                if mailed:
                    next_batch = self._due_after(next_batch, mailed)

    def _due_after(self, batch: float, mailed: int) -> float:
        """When the next batch is due after the one that was due then and had so many lines.

        On a beat that all ranks of a machine share. Most of what a letter costs its reader is to
        get threads out of their sleep, with cold caches: for 64 letters that come together it
        does so once.
        """
        period = self._short_period if mailed <= FEW else self._period
        due = max(batch, time.monotonic() - SLACK) + period
        return floor(due / period + 1e-6) * period

    def _has_news(self) -> bool:
        return bool(self._urgent) or self._is_pressing()

    def _is_pressing(self) -> bool:
        """Whether the next batch should not wait for its time."""
        return bool(self._reports) or self._is_closing

    def _mail_batch(self) -> tuple[int, bool]:
        """Mail all that there is; how many lines there were, and whether it was the last time."""
        with self._lock:
            self._has_output = False
            reports, is_last = list(self._reports), self._is_closing
            now = [_mark(source) for source in self._sources]  # before any report to come
            self._reports.clear()
        mailed = 0
        for number, (report, marks) in enumerate(reports):
            mailed += self._mail_sources(marks)
            if number:
                self._await_room()
            if report is not None:
                self._post(self._writer, report)
            with self._lock:
                self._held -= _size(report)
                self._sent += 1
                self._wake.notify_all()
        mailed += self._mail_sources(now)
        self._post_urgent()
        return mailed, is_last

    def _mail_sources(self, marks: Sequence[int]) -> int:
        """Mail what the sources hold up to these marks; how many lines or rows that were."""
        mailed = 0
        for pieces in _put_together(self._pieces(marks)):
            if mailed:
                self._await_room()
            self._post_together(pieces)
            mailed += max(map(_lines, pieces))
        return mailed

    def _pieces(self, marks: Sequence[int]) -> Iterator[Report]:
        for source, mark in zip(self._sources, marks, strict=True):
            for _ in range(MAX_PIECES):
                try:
                    piece = source.read(mark)
                except Exception as error:  # noqa: BLE001 - whatever it is, the mail goes on
                    if source not in self._failed:
                        self._failed.add(source)
                        what = "what this rank writes cannot be read back to be shown"
                        self._try(self._writer, remark(f"{what}: {error!r}"))
                    break
                self._failed.discard(source)
                if piece is None:
                    break
                yield piece

    def _await_room(self) -> None:
        self._post_urgent()
        with suppress(RuntimeError):  # torch's: posting connects anew
            while self._writer.is_full():
                with self._lock:
                    self._wake.wait_for(lambda: self._urgent, PERIOD / 4)
                self._post_urgent()

    def _post_urgent(self) -> None:
        while self._urgent:
            self._post(self._urgent_writer, self._urgent.popleft())

    def _post_together(self, pieces: Sequence[Report]) -> None:
        try:
            self._writer.post_together(pieces)
        except Exception:  # noqa: BLE001 - which of them it was is said when each goes alone
            for piece in pieces:
                self._post(self._writer, piece)

    def _post(self, writer: QueueWriter, report: Report) -> None:
        """Post it; what cannot be sent is said instead, and the mail goes on."""
        try:
            writer.post(report)
        except Exception as error:  # noqa: BLE001 - whatever it is, the mail goes on
            what = f"{with_article(type(report).__name__)} could not be sent: {error}"
            self._try(self._writer, remark(what))
            if isinstance(report, CellEnded | Answer):
                self._try(writer, _bare(report, f"it could not be sent: {error}"))

    def _try(self, writer: QueueWriter, message: Report) -> None:
        try:
            writer.post(message)
        except Exception:  # the store is gone, and with it whoever would read this
            logger.exception("nbddp could not mail")


def _bare(report: CellEnded | Answer, reason: str) -> CellEnded | Answer:
    """The end without what made it impossible to send: somebody waits for it."""
    if isinstance(report, Answer):
        return Answer(request=report.request, error=reason)
    name = str(report.failure.get("name", ""))
    failure = report.failure and {"name": name, "text": reason, "traceback": reason}
    return replace(report, failure=failure, result={})


def _put_together(pieces: Iterable[Report]) -> Iterator[list[Report]]:
    """What fits into a letter: no more than one of each kind, which is long enough."""
    together: list[Report] = []
    for piece in pieces:
        if any(type(piece) is type(each) for each in together):
            yield together
            together = []
        together.append(piece)
    if together:
        yield together


def _mark(source: Source) -> int:
    try:
        return source.mark()
    except OSError:
        return sys.maxsize  # to read it fails as well, which is said


def _lines(report: Report) -> int:
    """How many lines or rows it holds, at least one."""
    match report:
        case Output(text=text):
            return max(1, text.count("\n"))
        case Metrics(rows=rows):
            return max(1, len(rows))
    return 1


def _size(report: Report | None) -> int:
    if not isinstance(report, Display):
        return 0
    return sum(len(value) for value in report.data.values() if isinstance(value, str))
