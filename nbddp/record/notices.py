"""What a cell says, on its way from the session to whoever shows it.

Nobody waits for a slow reader, or for one who never reads: what is too much for memory is text,
which the logs have anyway, or else pictures, and those that are left out are counted and told.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from nbddp.formatting import format_bytes
from nbddp.record.log_reader import LogSpan
from nbddp.wire.messages import Display, InputCancelled, InputRequested

MAX_TEXT = 2 << 20  # characters of output that wait in memory; the rest waits in the logs
MAX_RICH = 64 << 20  # characters of pictures and the like that wait; more are left out


@dataclass(frozen=True, slots=True)
class OutputText:
    """A piece of a rank's output; ``log`` is where it stands in the rank's log, if it is known."""

    rank: int
    text: str
    log: LogSpan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RichOutput:
    """Something rich that a rank displayed."""

    rank: int
    message: Display


@dataclass(frozen=True, slots=True)
class ControllerMessage:
    """A word of the controller to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class InputRequest:
    """Something that a rank asks the user."""

    rank: int
    message: InputRequested


@dataclass(frozen=True, slots=True)
class InputClosed:
    """What the rank asked needs no answer."""

    rank: int
    question: int


Notice = OutputText | RichOutput | ControllerMessage | InputRequest | InputClosed


def notice_of(rank: int, message: Display | InputRequested | InputCancelled) -> Notice:
    """What a rank's message is to whoever reads what its cell says."""
    match message:
        case Display():
            return RichOutput(rank, message)
        case InputRequested():
            return InputRequest(rank, message)
        case InputCancelled(question=question):
            return InputClosed(rank, question)


class NoticeQueue:
    """The notices of one cell, in their order; fed by the session, taken by one reader.

    Attributes:
        is_drained: whether the reader has been told that nothing more will come.
        has_reader: whether somebody reads them.
    """

    def __init__(self, *, max_text: int = MAX_TEXT) -> None:
        self.is_drained, self.has_reader = False, True
        self._max_text = max_text
        self._changed = threading.Condition()
        self._urgent = threading.Event()  # something that does not wait for what piles up
        self._waiting: deque[Notice | LogSpan] = deque()
        self._newest_spans: dict[int, LogSpan] = {}  # the last of each rank, as long as it may grow
        self._open_span: Iterator[OutputText] = iter(())
        self._text = self._rich = 0
        self._left_out: Counter[int] = Counter()
        self._is_closed = False

    # ---- the session's side

    def put(self, notice: Notice | LogSpan) -> None:
        """Hand over a notice; never waits."""
        with self._changed:
            if self.has_reader and not self._is_closed:
                self._add(notice)
                self._changed.notify_all()

    def _add(self, notice: Notice | LogSpan) -> None:
        if (
            isinstance(notice, OutputText)
            and self._text >= self._max_text
            and notice.log is not None
        ):
            notice = notice.log
        if isinstance(notice, LogSpan):
            last = self._newest_spans.get(notice.rank)
            if last is not None and last.path == notice.path and last.end == notice.start:
                last.end = notice.end
                return
            self._newest_spans[notice.rank] = notice
            self._waiting.append(notice)
            return
        self._newest_spans.clear()  # what is written from here on comes after this
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
        """Nothing more will come; if it is urgent, of what waits in the logs the end will do."""
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

    def get(self, timeout: float | None = None, *, batch_text: bool = False) -> Notice | None:
        """The next notice; None when none came in so many seconds, or all are told.

        Where it may pile up, text that comes meanwhile ends no wait: to wake for each piece of it
        costs more than to read it.
        """
        while True:
            text = next(self._open_span, None)
            if text is not None:
                return text
            if batch_text:
                self._wait_for_urgent(timeout)
                timeout = 0.0
            with self._changed:
                wait = None if timeout is None else max(0.0, timeout)
                self._changed.wait_for(lambda: self._waiting or self._is_closed, wait)
                if not self._waiting:
                    self.is_drained = self._is_closed
                    return None
                notice = self._pop()
            if not isinstance(notice, LogSpan):
                return notice
            self._open_span = (OutputText(notice.rank, text) for text in notice.texts())

    def _wait_for_urgent(self, timeout: float | None) -> None:
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

    def detach_reader(self) -> None:
        """Nobody reads any more; the files go on."""
        with self._changed:
            self.has_reader = False
            self._remove_all()

    def _remove_all(self) -> list[Notice | LogSpan]:
        """Forget what waits, and return it."""
        waiting = [*self._waiting]
        self._waiting.clear()
        self._newest_spans.clear()
        self._left_out.clear()
        self._text = self._rich = 0
        return waiting

    def drop_rank_output(self) -> None:
        """Let go what ranks have said, but not what the controller has."""
        with self._changed:
            self._waiting += [
                notice for notice in self._remove_all() if isinstance(notice, ControllerMessage)
            ]

    def move_to(self, other: NoticeQueue) -> None:
        """Hand on what nobody has read, but of a log no more than a few lines."""
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
