"""The text view of a cell: for terminals, nbclient, papermill, and scripts."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from io import StringIO

from nbddp.charts.axes import format_number
from nbddp.controller.session import Session
from nbddp.formatting import format_ranks, format_seconds
from nbddp.record import notices
from nbddp.record.cell import CellHandle, CellResult
from nbddp.record.log_reader import MAX_PANEL_LINE, LineAssembler, log_name
from nbddp.record.snapshot import RankSnapshot
from nbddp.sigint import import_interruptibly
from nbddp.ui import frontend, wording
from nbddp.ui.html_pieces import MAX_CHARTS
from nbddp.ui.input_requests import InputBackend, InputQueue
from nbddp.ui.log_lines import RepeatedWarnings, split_text_and_rich
from nbddp.ui.report.render import text_lines
from nbddp.wire.messages import Display

logger = logging.getLogger(__name__)

FLUSH_PERIOD = 0.02  # seconds on average; without a flush, ipykernel sends every 200 ms
PAUSE_ALLOWANCE = 0.1  # seconds of unused pauses that count towards the next flushes
PERIOD_PER_LINE = 60e-6  # seconds added to the period for each line on the screen
MAX_PERIOD = 1.0  # seconds
MAX_PENDING = 1 << 20  # characters
NOTICE_TIMEOUT = 1.0  # seconds to wait for a notice
BURST_SIZE = 8e6  # characters that the screen accepts at once
CATCH_UP_PERIOD = 0.05  # seconds between two checks while the page catches up
UNFINISHED_LINE_DELAY = 0.15  # seconds until it is shown; most lines are finished before
PROGRESS_PERIOD = 30.0  # seconds between two lines of progress
TERMINAL_PERIOD = 1.0  # the same in a terminal, where a line replaces the last one
SHOWN_METRICS = 4  # in a line of progress
_ERASE = "\r\x1b[K"


class TextView:
    """Prints the output of ranks, line by line, with the rank in front.

    After a short delay, an unfinished line is shown as far as it was written. Of a flood that is
    too long for the pace of the target, only the end is shown. Otherwise the kernel's output queue
    would grow without limit, and delay the end of the cell.

    Args:
        screen: the output target.
        is_quiet: print only values and notices of nbddp.
        progress: prints lines of progress; None for no progress.
        input_queue: asks the user for the input of ranks; None if input is not possible.
        remarks: returns what extensions say below a cell that has ended; None for no remarks.
    """

    has_record = False

    def __init__(
        self,
        screen: frontend.StreamTarget,
        *,
        is_quiet: bool = False,
        progress: ProgressLine | None = None,
        input_queue: InputQueue | None = None,
        remarks: frontend.Remarks | None = None,
    ) -> None:
        self._screen = screen
        self._errors = frontend.ErrorBoundary(screen)
        self._input_queue = input_queue or InputQueue(InputBackend(), lambda *_: None)
        self._remarks = remarks
        self._progress = progress
        self._caught_up_at = 0.0  # when the screen will have shown everything
        self._is_quiet = is_quiet
        self._assemblers: dict[int, LineAssembler] = {}
        self._unfinished = UnfinishedLines()
        self._warnings = RepeatedWarnings()
        self._pending = StringIO()
        self._shown_lines = 0
        self._pauses_end = 0.0  # when the pauses for all flushes until now end
        self._next_flush = 0.0

    def continue_from(self, before: frontend.View) -> None:
        """Do nothing: the output goes below the output of the earlier attempt."""

    def show_status(self, text: str) -> None:
        """Print a status line."""
        self._end_line()
        self._screen.write_line(f"nbddp: {text}")

    def show(self, handle: CellHandle) -> CellResult:
        """Show a cell until it ends."""
        try:
            self._follow(handle)
        except BaseException:
            self._end_line()
            raise
        finally:
            self._input_queue.close()
            if self._input_queue.leftover_hint:
                self.show_status(self._input_queue.leftover_hint)
        if handle.result is None:
            raise RuntimeError("the cell's notices ended before the cell did")
        with self._errors.logging_errors():
            self._finish(handle.result)
        with self._errors.logging_errors():
            remarks = self._remarks(handle) if self._remarks is not None else ()
            if text := "\n".join(text_lines(remarks)):
                self._screen.write_line(f"nbddp: {text}")
        return handle.result

    def _follow(self, handle: CellHandle) -> None:
        """Show the notices of a cell until it ends."""
        while not handle.notice_queue.is_drained:
            behind = self._caught_up_at - time.monotonic()
            if behind > 0 and not handle.is_finished:  # the screen cannot follow
                time.sleep(min(behind, CATCH_UP_PERIOD))
                continue
            next_flush = self._next_flush if self._pending.tell() else math.inf
            timeout = min(next_flush, self._unfinished.next_due) - time.monotonic()
            timeout = min(timeout, self._input_queue.poll_interval, NOTICE_TIMEOUT)
            # outside of the boundary: after an error, the next notice is read
            notice = handle.notice_queue.get(max(0.0, timeout))
            with self._errors.logging_errors():
                self._update(handle, notice)

    def _update(self, handle: CellHandle, notice: notices.Notice | None) -> None:
        """Show a notice, and everything that is due now."""
        if notice is not None:
            self._show_notice(notice)
        self._input_queue.poll(handle.has_ended)
        while (due := self._unfinished.pop_due(time.monotonic())) is not None:
            rank, text, end = due
            self._pending.write(f"{end}{self._screen.tag([rank])} {text}")
        size = self._pending.tell()
        if size > MAX_PENDING or (size and time.monotonic() >= self._next_flush):
            self._flush()
        if self._progress is not None:
            self._progress.update(self._screen, handle, self._end_line)

    def _flush(self) -> None:
        """Show pending text: at once after a pause, else less often as the output grows.

        A page redraws all lines of an output for each piece that is added to it.
        """
        if self._progress is not None:
            self._progress.clear(self._screen)
        text, self._pending = self._pending.getvalue(), StringIO()
        if not text:
            return
        self._screen.write(text)
        self._screen.flush()
        self._shown_lines += text.count("\n")
        pause = min(MAX_PERIOD, max(FLUSH_PERIOD, PERIOD_PER_LINE * self._shown_lines))
        now, pace = time.monotonic(), self._screen.pace
        self._caught_up_at = max(self._caught_up_at, now - BURST_SIZE / pace) + len(text) / pace
        self._pauses_end = max(self._pauses_end, now - PAUSE_ALLOWANCE) + pause
        self._next_flush = max(self._pauses_end, now + frontend.COALESCE_SECONDS)

    def _write_below(self, text: str) -> None:
        self._pending.write(self._unfinished.end_open_line() + text)

    def _end_line(self) -> None:
        """Show all pending text, and end an unfinished line, so that other output can follow."""
        self._write_below("")
        self._flush()

    def _finish(self, result: CellResult) -> None:
        """Show the remaining lines, the values and the charts."""
        first = self._unfinished.open_rank  # its line continues in place
        for rank, lines in sorted(self._assemblers.items(), key=lambda it: (it[0] != first, it[0])):
            self._write_lines(rank, lines.flush())
        if note := self._warnings.note():
            self._write_below(f"nbddp: {note}\n")
        values, rich = split_text_and_rich(result.results)
        for value in values:  # below the tag, the columns of several lines stay aligned
            separator = "\n" if "\n" in value.text else " "
            tag = self._screen.tag(value.ranks, value.mark)
            self._write_below(f"{tag}{separator}{value.text}\n")
        self._flush()
        for ranks, bundle in rich:
            self._screen.show_value(ranks, bundle)
        if self._progress is not None:
            self._progress.show_charts(self._screen)

    def _show_notice(self, notice: notices.Notice) -> None:
        match notice:
            case notices.ControllerMessage(text=text):
                self._write_below(f"nbddp: {text}\n")
            case notices.OutputText(rank=rank, text=text) if not self._is_quiet:
                lines = self._assembler_of(rank)
                self._write_lines(rank, lines.add(text))
                self._pending.write(
                    self._unfinished.update(rank, text, lines.partial, time.monotonic())
                )
            case notices.RichOutput(rank=rank, message=message) if not self._is_quiet:
                self._show_display(rank, message)
            case notices.InputRequest() | notices.InputClosed():
                self._end_line()
                self._input_queue.handle_notice(notice)

    def _show_display(self, rank: int, message: Display) -> None:
        self._write_lines(rank, self._assembler_of(rank).flush())  # printed before the display
        self._unfinished.discard(rank)
        if frontend.is_plain_text(message):
            self._write_lines(rank, str(message.data["text/plain"]).split("\n"))
        else:
            self._end_line()
            self._screen.show_rich(rank, message)

    def _assembler_of(self, rank: int) -> LineAssembler:
        return self._assemblers.setdefault(rank, LineAssembler(log_name(rank)))

    def _write_lines(self, rank: int, lines: Sequence[str]) -> None:
        if lines and (rest := self._unfinished.finish(rank, lines[0])) is not None:
            self._pending.write(f"{rest}\n")
            lines = lines[1:]
        if lines := self._warnings.without_repeats(rank, lines):
            tag = self._screen.tag([rank])
            self._write_below("".join(f"{tag} {line}\n" for line in lines))


class ProgressLine:
    """Prints the progress of a cell: loops, metrics and the straggler.

    Args:
        session: the session that runs the cell.
        is_terminal: whether a line can replace the last one.
        has_pictures: whether to show charts at the end.
    """

    def __init__(self, session: Session, *, is_terminal: bool, has_pictures: bool) -> None:
        self._session = session
        self._is_terminal = is_terminal
        self._has_pictures = has_pictures
        self._period = TERMINAL_PERIOD if is_terminal else PROGRESS_PERIOD
        self._next_at = self._period
        self._last_text = ""
        self._is_on_line = False

    def update(
        self, screen: frontend.StreamTarget, handle: CellHandle, end_line: Callable[[], object]
    ) -> None:
        """Print the progress if an update is due and the progress has changed.

        ``end_line`` ends a rank's unfinished line, so that this text starts on a new line.
        """
        seconds = time.time() - handle.began_at
        if seconds < self._next_at:
            return
        self._next_at = (seconds // self._period + 1) * self._period
        text = self._describe(handle)
        if not text:
            self.clear(screen)  # an import has ended
        if not text or (text == self._last_text and not self._is_terminal):
            return
        self._last_text = text
        end_line()
        line = f"nbddp: {format_seconds(seconds)} · {text}"
        if self._is_terminal:
            self._is_on_line = True
            screen.write(f"{_ERASE}{line[: shutil.get_terminal_size().columns - 1]}")
        else:
            screen.write(f"{line}\n")
        screen.flush()

    def clear(self, screen: frontend.StreamTarget) -> None:
        """Erase the progress line in a terminal, before other output."""
        if self._is_on_line:
            self._is_on_line = False
            screen.write(_ERASE)

    def show_charts(self, screen: frontend.StreamTarget) -> None:
        """Show the charts of the metrics with more than one point, as one picture, if possible.

        Print the newest values if no metric has more than one, as after an evaluation.
        """
        if not self._has_pictures:
            return
        metrics = self._session.rank_monitor.metrics.snapshot({}, most=MAX_CHARTS)
        curves = {
            name: by_rank
            for name, by_rank in metrics.curves.items()
            if any(len(curve.steps) > 1 for curve in by_rank.values())
        }
        values = " · ".join(self._values())
        if not curves:
            if values:
                screen.write(f"nbddp: {values}\n")
            return
        import_interruptibly("nbddp.charts.figure")  # loads matplotlib, so only if there is a curve
        from nbddp.charts.chart_lines import rank_chart
        from nbddp.charts.figure import draw_charts, png_of

        try:
            picture = png_of(draw_charts([rank_chart(*each) for each in curves.items()]))
        except Exception as error:
            logger.exception("the charts could not be drawn")
            screen.write(f"nbddp: the charts could not be drawn: {type(error).__name__}: {error}\n")
            return
        screen.show_picture(*picture, text=values)
        for note in wording.note_hidden_metrics(metrics.hidden_names, metrics.hidden):
            screen.write(f"nbddp: {note}\n")

    def _describe(self, handle: CellHandle) -> str:
        snapshot = self._session.snapshot(handle)
        ranks = [rank for rank in snapshot.ranks if rank.progress_bars or rank.step]
        progress: list[str] = []
        if ranks:
            slowest = min(ranks, key=_progress_key)
            bars = [*map(wording.format_progress_bar, slowest.progress_bars)]
            progress = bars or [f"step {wording.format_step(slowest)}"]
        straggler = [wording.describe_straggler(snapshot.straggler)] if snapshot.straggler else []
        return " · ".join([*progress, *self._values(), *straggler, *_imports(snapshot.ranks)])

    def _values(self) -> Iterator[str]:
        """Yield the name and newest value of the first metrics, averaged over ranks."""
        store = self._session.rank_monitor.metrics
        for name in store.names()[:SHOWN_METRICS]:
            if last := store.last(name).values():
                yield f"{name} {format_number(sum(last) / len(last))}"


def _imports(ranks: Sequence[RankSnapshot]) -> Iterator[str]:
    """Say which ranks import which module."""
    for name in dict.fromkeys(rank.importing for rank in ranks if rank.importing):
        which = format_ranks([rank.rank for rank in ranks if rank.importing == name])
        yield f"{which}: importing {name}"


def _progress_key(rank: RankSnapshot) -> tuple[float, int]:
    return rank.step or 0.0, sum(bar.done for bar in rank.progress_bars)


class UnfinishedLines:
    """Decides when to show unfinished lines, and which text continues them.

    Only one unfinished line can be at the end of the screen: the open line. If other output follows
    it, the whole line is shown again: when it is finished, or after a delay that doubles each time.
    So ranks that print dots at the same time do not flood the screen. A progress bar, which
    overwrites itself with carriage returns, is shown only when it is finished.
    """

    def __init__(self) -> None:
        self.open_rank: int | None = None  # the rank of the open line
        self._shown = ""  # the part of the open line on the screen
        self._due: dict[int, tuple[float, str]] = {}  # when to show other lines, and their texts
        self._delays: dict[int, float] = {}  # seconds until an unfinished line is shown again
        self._bars: set[int] = set()

    @property
    def next_due(self) -> float:
        """The time at which to show the next unfinished line; infinite if there is none."""
        return min((due for due, _ in self._due.values()), default=math.inf)

    def update(self, rank: int, written: str, partial: str, now: float) -> str:
        """Record the output and the unfinished line of a rank. Return text for the open line."""
        _, has_ended, last = written.rpartition("\n")
        if has_ended:
            self.discard(rank)
        if "\r" in last:
            self._bars.add(rank)
        if not partial or rank in self._bars or len(partial) > MAX_PANEL_LINE or "\n" in partial:
            self._due.pop(rank, None)
            return ""
        if rank == self.open_rank and partial.startswith(self._shown):
            rest, self._shown = partial[len(self._shown) :], partial
            return rest
        due = now + self._delays.get(rank, UNFINISHED_LINE_DELAY)
        self._due[rank] = self._due.get(rank, (due, ""))[0], partial
        return ""

    def discard(self, rank: int) -> None:
        """Forget the unfinished line of a rank, which has ended."""
        self._due.pop(rank, None)
        self._delays.pop(rank, None)
        self._bars.discard(rank)

    def pop_due(self, now: float) -> tuple[int, str, str] | None:
        """Return a rank with a due line, the line, and the text that ends the open line."""
        for rank, (due, text) in self._due.items():
            if due <= now:
                del self._due[rank]
                self._delays[rank] = 2 * self._delays.get(rank, UNFINISHED_LINE_DELAY)
                end = self.end_open_line()
                self.open_rank, self._shown = rank, text
                return rank, text, end
        return None

    def finish(self, rank: int, line: str) -> str | None:
        """Return the rest of a rank's finished line; None if the open line is not its start."""
        if rank != self.open_rank or not line.startswith(self._shown):
            return None
        self.open_rank = None
        return line[len(self._shown) :]

    def end_open_line(self) -> str:
        """End the open line before other output. Return the text that ends it."""
        if self.open_rank is None:
            return ""
        self.open_rank = None
        return "\x1b[0m\n" if "\x1b" in self._shown else "\n"
