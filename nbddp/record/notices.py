"""Notices of a cell: text, pictures, questions and messages, on their way to the view.

The session never waits for a slow or absent reader. Text that exceeds the memory limit is read from
the logs later. Pictures that exceed it are dropped and counted.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from nbddp.formatting import format_bytes
from nbddp.record.log_reader import LogSpan
from nbddp.wire.messages import Display, InputRequested

MAX_TEXT = 2 << 20  # characters of output kept in memory; the rest stays in the logs
MAX_RICH = 64 << 20  # characters of pictures and other rich output in memory; more are dropped


@dataclass(frozen=True, slots=True)
class OutputText:
    """Output of a rank; ``log`` is its position in the rank's log, if known."""

    rank: int
    text: str
    log: LogSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RichOutput:
    """Rich output that a rank displayed, such as a picture."""

    rank: int
    message: Display


@dataclass(frozen=True, slots=True)
class ControllerMessage:
    """A message of the controller to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class HangReport(ControllerMessage):
    """A hang, or a rank without a sign of life; also shown during a replay."""


@dataclass(frozen=True, slots=True)
class InputRequest:
    """A rank asks the user for input."""

    rank: int
    message: InputRequested


@dataclass(frozen=True, slots=True)
class InputClosed:
    """A rank no longer needs the answer to a question."""

    rank: int
    question: int


Notice = OutputText | RichOutput | ControllerMessage | InputRequest | InputClosed


class NoticeQueue:
    """The notices of one cell, in order: written by the session, read by one view.

    Attributes:
        is_drained: whether the reader got the last notice of a closed queue.
        has_reader: whether a view reads the queue.
    """

    def __init__(self, *, max_text: int = MAX_TEXT) -> None:
        self.is_drained, self.has_reader = False, True
        self._max_text = max_text
        self._changed = threading.Condition()
        self._urgent = threading.Event()  # set for notices that must not wait for a batch of text
        self._waiting: deque[Notice | LogSpan] = deque()
        self._newest_spans: dict[int, LogSpan] = {}  # the last span of each rank, while it may grow
        self._open_span: Iterator[OutputText] = iter(())
        self._text = self._rich = 0
        self._left_out: Counter[int] = Counter()
        self._is_closed = False

    # ---- the session's side

    def put(self, notice: Notice | LogSpan) -> None:
        """Add a notice, without blocking."""
        with self._changed:
            if self.has_reader and not self._is_closed:
                self._add(notice)
                self._changed.notify_all()

    def _add(self, notice: Notice | LogSpan) -> None:
        if isinstance(notice, OutputText) and notice.log and self._text >= self._max_text:
            notice = notice.log
        if isinstance(notice, LogSpan):
            last = self._newest_spans.get(notice.rank)
            if last is not None and last.path == notice.path and last.end == notice.start:
                last.end = notice.end
                return
            self._newest_spans[notice.rank] = notice
            self._waiting.append(notice)
            return
        self._newest_spans.clear()  # later output gets spans after this notice
        if isinstance(notice, OutputText):
            self._text += len(notice.text)
        elif isinstance(notice, RichOutput):
            if self._rich >= MAX_RICH:
                self._left_out[notice.rank] += 1
                return
            self._rich += _size(notice)
        self._waiting.append(notice)
        if not isinstance(notice, OutputText | ControllerMessage):
            self._urgent.set()

    def close(self, *, is_urgent: bool = False) -> None:
        """Close the queue. If it is urgent, the reader gets only the end of text in the logs."""
        with self._changed:
            for notice in self._waiting:
                if isinstance(notice, LogSpan):
                    notice.is_urgent = is_urgent
            self._waiting.extend(self._describe_left_out())
            self._is_closed = True
            self._urgent.set()
            self._changed.notify_all()

    def _describe_left_out(self) -> Iterator[ControllerMessage]:
        for rank, count in sorted(self._left_out.items()):
            subject = "a picture" if count == 1 else f"{count:,} pictures"
            yield ControllerMessage(
                f"{subject} of rank {rank} left out: they came faster than they were shown"
            )

    # ---- the reader's side

    def get(self, timeout: float, *, batch_text: bool = False) -> Notice | None:
        """Return the next notice; None after the timeout and at the end of the queue.

        With ``batch_text``, new text does not end the wait: waking up for each piece costs more
        than reading it.
        """
        while True:
            text = next(self._open_span, None)
            if text is not None:
                return text
            if batch_text:
                self._wait_for_urgent(timeout)
                timeout = 0.0
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed, max(0.0, timeout))
                if not self._waiting:
                    self.is_drained = self._is_closed
                    return None
                notice = self._pop()
            if not isinstance(notice, LogSpan):
                return notice
            self._open_span = (OutputText(notice.rank, text) for text in notice.texts())

    def _wait_for_urgent(self, timeout: float) -> None:
        with self._changed:
            if self._waiting or self._is_closed:
                return
            self._urgent.clear()
        self._urgent.wait(timeout)

    def _pop(self) -> Notice | LogSpan:
        notice = self._waiting.popleft()
        if isinstance(notice, LogSpan):
            if self._newest_spans.get(notice.rank) is notice:
                del self._newest_spans[notice.rank]
        elif isinstance(notice, OutputText):
            self._text -= len(notice.text)
        elif isinstance(notice, RichOutput):
            self._rich -= _size(notice)
        return notice

    def attach_reader(self) -> None:
        """Give the notices from now on to a new reader, after the last one was detached."""
        with self._changed:
            self.has_reader = True

    def detach_reader(self) -> None:
        """Drop all notices from now on. The log files stay complete."""
        with self._changed:
            self.has_reader = False
            self._remove_all()

    def _remove_all(self) -> list[Notice | LogSpan]:
        """Remove and return all waiting notices."""
        waiting = [*self._waiting]
        self._waiting.clear()
        self._newest_spans.clear()
        self._left_out.clear()
        self._text = self._rich = 0
        return waiting

    def drop_rank_output(self) -> None:
        """Drop the output of ranks, but keep the messages of the controller."""
        with self._changed:
            self._waiting += [
                notice for notice in self._remove_all() if isinstance(notice, ControllerMessage)
            ]

    def take_messages(self) -> list[str]:
        """Remove and return the messages of the controller; output and pictures stay."""
        with self._changed:
            taken = [each for each in self._waiting if isinstance(each, ControllerMessage)]
            for message in taken:
                self._waiting.remove(message)
        return [message.text for message in taken]

    def move_to(self, other: NoticeQueue) -> None:
        """Move the waiting notices to another queue; replace long text by the name of the log."""
        with self._changed:
            left_out = [*self._describe_left_out()]
            waiting = [*self._remove_all(), *left_out]
        for notice in waiting:
            if isinstance(notice, LogSpan) and notice.size > self._max_text:
                text = f"rank {notice.rank} wrote {format_bytes(notice.size)} between the cells"
                notice = ControllerMessage(f"{text}; it is in {notice.path.name}")
            other.put(notice)


def _size(notice: RichOutput) -> int:
    return sum(len(value) for value in notice.message.data.values() if isinstance(value, str))
