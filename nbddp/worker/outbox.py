"""The one thread of a rank that mails: its log and numbers in batches, its reports in between."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

from nbddp.wire.mailbox import Postbox
from nbddp.wire.messages import Display, Report

POLL = 0.05  # seconds between two looks for what C code wrote, which nobody tells us
PERIOD = 0.02  # seconds between batches, on average; a line after a pause goes at once
SLACK = 0.1  # seconds of batches not sent that may be made up for at once
FLUSH_PATIENCE = 2.0  # seconds
MAX_BACKLOG = 128  # letters nobody has read: beyond that the rest waits in the file


class Source(Protocol):
    """Something that fills up and is mailed in batches, such as the log."""

    def read(self) -> Report | None:
        """The next piece, None when there is nothing more."""


class Outbox:
    """Mails what the sources hold before each report, so that order is kept within a rank."""

    def __init__(self, postbox: Postbox, *sources: Source) -> None:
        self._postbox = postbox
        self._sources = sources
        self._reports: deque[Report] = deque()
        self._wake = threading.Condition()
        self._has_output = False
        self._is_closing = False
        self._is_asked = False
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name="nbddp-outbox", daemon=True)

    def start(self) -> None:
        """Begin to mail."""
        self._thread.start()

    def poke(self) -> None:
        """Say that a source has something; cheap enough for every line that is printed."""
        if not self._has_output:
            with self._wake:
                self._has_output = True
                self._wake.notify()

    def post(self, report: Report) -> None:
        """Mail a report, after all output that precedes it."""
        with self._wake:
            self._reports.append(report)
            self._wake.notify()

    def flush(self) -> None:
        """Wait until all that there is now was mailed; briefly, if the mail is stuck."""
        with self._wake:
            enough = self._rounds + 2  # the one under way may have read its sources already
            self._wake.wait_for(lambda: self._nudge(enough), FLUSH_PATIENCE)
            self._is_asked = False

    def _nudge(self, enough: int) -> bool:
        self._is_asked = self._rounds < enough
        self._wake.notify_all()
        return not self._is_asked

    def close(self) -> None:
        """Mail what is left, then end the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        self._thread.join()

    def _run(self) -> None:
        next_batch = 0.0
        is_last = False
        while not is_last:
            reports, is_last = self._await_work(next_batch)
            if sum(self._mail(source) for source in self._sources):
                next_batch = max(next_batch, time.monotonic() - SLACK) + PERIOD
            for report in reports:
                self._post(report)
            with self._wake:
                self._rounds += 1
                self._wake.notify_all()

    def _await_work(self, next_batch: float) -> tuple[list[Report], bool]:
        with self._wake:
            # a timeout, because C code writes to the file without telling us
            self._wake.wait_for(lambda: self._is_urgent() or self._has_output, POLL)
            self._wake.wait_for(self._is_urgent, max(0.0, next_batch - time.monotonic()))
            self._has_output = False
            reports = list(self._reports)
            self._reports.clear()
            return reports, self._is_closing

    def _is_urgent(self) -> bool:
        return bool(self._reports) or self._is_closing or self._is_asked

    def _post(self, report: Report) -> None:
        """Post it; what cannot be written as JSON is said instead, and the mail goes on."""
        try:
            self._postbox.post(report)
        except (TypeError, ValueError) as error:
            text = f"nbddp: a {type(report).__name__} could not be sent: {error}"
            self._postbox.post(Display(cell=0, data={"text/plain": text}, metadata={}))

    def _mail(self, source: Source) -> bool:
        piece = source.read()
        has_any = piece is not None
        while piece is not None:
            self._post(piece)
            piece = source.read()
            if piece is not None:
                self._await_room()
        return has_any

    def _await_room(self) -> None:
        while self._postbox.backlog() > MAX_BACKLOG:
            with self._wake:
                self._wake.wait(PERIOD / 4)
