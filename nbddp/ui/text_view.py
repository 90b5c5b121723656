"""A cell as plain text: for a terminal, nbclient, papermill, and scripts."""

from __future__ import annotations

import logging
import math
import shutil
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence

from nbddp.charts.axes import format_number
from nbddp.controller.session import Session
from nbddp.formatting import plural
from nbddp.record.cell import CellHandle, CellResult
from nbddp.record.log_reader import MAX_PANEL_LINE, LineAssembler, log_name
from nbddp.record.notices import (
    ControllerMessage,
    InputClosed,
    InputRequest,
    Notice,
    OutputText,
    RichOutput,
)
from nbddp.record.snapshot import RankSnapshot
from nbddp.sigint import import_interruptibly
from nbddp.ui.frontend import (
    COALESCE_SECONDS,
    Check,
    StreamTarget,
    View,
    colored_rank_tag,
    is_plain_text,
    no_check,
    show_rich,
    show_rich_value,
)
from nbddp.ui.html_pieces import MAX_CHARTS
from nbddp.ui.input_requests import InputBackend, InputQueue
from nbddp.ui.log_lines import group_ranks_by_value
from nbddp.ui.report.findings import findings_text
from nbddp.ui.wording import describe_straggler, format_progress_bar, format_seconds, format_step
from nbddp.wire.messages import Display, JsonDict

logger = logging.getLogger(__name__)

FLUSH_PERIOD = 0.02  # seconds, on average; ipykernel sends every 200 ms unless flushed
PAUSE_ALLOWANCE = 0.1  # seconds of pieces not shown that may be made up for at once
PERIOD_PER_LINE = 60e-6  # seconds more for each line that is shown already
MAX_PERIOD = 1.0  # seconds
MAX_PENDING = 1 << 20  # characters
NOTICE_TIMEOUT = 1.0  # seconds; news ends the wait
BURST_SIZE = 8e6  # characters that may come at once
CATCH_UP_PERIOD = 0.05  # seconds between two looks while the page catches up
UNFINISHED_LINE_DELAY = 0.15  # seconds until it is shown; most lines are finished before
PROGRESS_PERIOD = 30.0  # seconds between two lines of progress
TERMINAL_PERIOD = 1.0  # where a line takes the place of the one before
SHOWN_METRICS = 4  # in a line
_ERASE = "\r\x1b[K"


class TextView:
    """Prints what ranks write, a line at a time, with the rank in front.

    After a moment, an unfinished line is shown as far as it was written.

    Args:
        screen: where.
        is_quiet: whether values and nbddp's own words are all that is shown.
        has_color: whether ranks have colours.
        pace: characters a second that the screen can follow. Of what comes faster for long, the
            end is shown, as a kernel's output queue would grow without end, and the cell's end
            wait behind it.
        progress: says how far the cell is; None where nobody shall.
        input_queue: asks what ranks ask; None where nobody can be asked.
        check: what checks find in the cell, once it has ended.
    """

    has_record = False

    def __init__(
        self,
        screen: StreamTarget,
        *,
        is_quiet: bool = False,
        has_color: bool = False,
        pace: float = math.inf,
        progress: ProgressLine | None = None,
        input_queue: InputQueue | None = None,
        check: Check = no_check,
    ) -> None:
        self._screen = screen
        self._input_queue = input_queue or InputQueue(InputBackend(), lambda *_: None)
        self._check = check
        self._progress = progress
        self._pace = pace
        self._caught_up_at = 0.0  # when the screen has followed
        self._is_quiet = is_quiet
        self._has_color = has_color
        self._assemblers: dict[int, LineAssembler] = {}
        self._unfinished = UnfinishedLines()
        self._pending: list[str] = []
        self._pending_size = 0
        self._shown_lines = 0
        self._pauses_end = 0.0  # when the pieces shown so far are made up for
        self._next_flush = 0.0
        self._burst_began = 0.0  # when ranks began to write, after a pause,
        self._burst_ranks: set[int] = set()  # and which have written since

    def continue_from(self, before: View) -> None:
        """Go on below what the earlier attempt printed."""

    def show_status(self, text: str) -> None:
        """Print it below."""
        self._end_line()
        self._screen.write(f"nbddp: {text}\n")
        self._screen.flush()

    def show(self, handle: CellHandle) -> CellResult:
        """Show a cell from its beginning to its end."""
        try:
            self.follow(handle)
        except BaseException:
            self._end_line()
            raise
        finally:
            self._input_queue.close()
            if self._input_queue.leftover_hint:
                self.show_status(self._input_queue.leftover_hint)
        if handle.result is None:
            raise RuntimeError("the cell's notices ended before the cell did")
        self.finish(handle.result)
        if findings := findings_text(self._check(handle)):
            self._screen.write(f"{findings}\n")
            self._screen.flush()
        return handle.result

    def follow(self, handle: CellHandle) -> None:
        """Show what a cell says until it ends; may be called again after an interrupt."""
        while not handle.is_drained:
            behind = self._caught_up_at - time.monotonic()
            if behind > 0 and not handle.is_finished:  # the screen cannot follow
                time.sleep(min(behind, CATCH_UP_PERIOD))
                continue
            timeout = self._next_flush - time.monotonic() if self._pending else NOTICE_TIMEOUT
            timeout = min(timeout, self._unfinished.next_due - time.monotonic())
            timeout = min(timeout, self._input_queue.poll_interval)
            self._input_queue.poll(handle.has_ended)
            notice = handle.next_notice(max(0.0, timeout))
            if notice is not None:
                self._show_notice(notice)
            while (due := self._unfinished.pop_due(time.monotonic())) is not None:
                rank, text, end = due
                self._write(f"{end}{colored_rank_tag([rank], has_color=self._has_color)} {text}")
            if self._pending and (
                time.monotonic() >= self._next_flush or self._pending_size > MAX_PENDING
            ):
                self._flush()
            if self._progress is not None:
                self._progress.update(self._screen, handle, self._end_line)

    def _flush(self) -> None:
        """Show what is held back: at once after a pause, else less and less often.

        A page draws all lines of an output anew for each piece that is added to it.
        """
        if not self._pending:
            return
        self._clear_progress()
        text = "".join(self._pending)
        self._pending, self._pending_size = [], 0
        self._screen.write(text)
        self._screen.flush()
        self._shown_lines += text.count("\n")
        pause = min(MAX_PERIOD, max(FLUSH_PERIOD, PERIOD_PER_LINE * self._shown_lines))
        now = time.monotonic()
        self._caught_up_at = (
            max(self._caught_up_at, now - BURST_SIZE / self._pace) + len(text) / self._pace
        )
        self._pauses_end = max(self._pauses_end, now - PAUSE_ALLOWANCE) + pause
        self._next_flush = max(self._pauses_end, now + COALESCE_SECONDS)

    def _delay_flush_in_burst(self, rank: int) -> None:
        """Show what ranks print at the same moment in one piece, if they did so the last time."""
        now = time.monotonic()
        if now - self._burst_began > 2 * COALESCE_SECONDS:
            if len(self._burst_ranks) > 1:
                self._next_flush = max(self._next_flush, now + COALESCE_SECONDS)
            self._burst_began = now
            self._burst_ranks.clear()
        self._burst_ranks.add(rank)

    def _write_below(self, text: str) -> None:
        self._write(self._unfinished.end_open_line() + text)

    def _write(self, text: str) -> None:
        """Hold text that continues where the last text ended."""
        if text:
            self._pending.append(text)
            self._pending_size += len(text)

    def _end_line(self) -> None:
        """Show all held text, and end an unfinished line: the next output goes below it."""
        self._write(self._unfinished.end_open_line())
        self._flush()

    def finish(self, result: CellResult) -> None:
        """Show what is left and the values."""
        first = self._unfinished.open_rank  # its line goes on where it is
        for rank, lines in sorted(self._assemblers.items(), key=lambda it: (it[0] != first, it[0])):
            self._write_lines([rank], lines.flush())
        for ranks, bundle in group_ranks_by_value(result.results):
            self._show_value(ranks, bundle)
        self._flush()
        if self._progress is not None:
            self._progress.finish(self._screen)

    def _clear_progress(self) -> None:
        if self._progress is not None:
            self._progress.clear(self._screen)

    def _show_notice(self, notice: Notice) -> None:
        match notice:
            case ControllerMessage(text=text):
                self._write_below(f"nbddp: {text}\n")
            case OutputText(rank=rank, text=text) if not self._is_quiet:
                self._delay_flush_in_burst(rank)
                lines = self._assembler_of(rank)
                self._write_lines([rank], lines.add(text))
                self._write(self._unfinished.update(rank, text, lines.partial, time.monotonic()))
            case RichOutput(rank=rank, message=message) if not self._is_quiet:
                self._show_display(rank, message)
            case InputRequest() | InputClosed():
                self._end_line()
                self._input_queue.handle_notice(notice)

    def _show_display(self, rank: int, message: Display) -> None:
        self._write_lines([rank], self._assembler_of(rank).flush())  # it was printed before
        self._unfinished.discard(rank)
        if is_plain_text(message):
            self._write_lines([rank], str(message.data["text/plain"]).split("\n"))
        else:
            self._end_line()
            self._clear_progress()
            show_rich(self._screen, rank, message, has_color=self._has_color)

    def _show_value(self, ranks: Sequence[int], bundle: JsonDict) -> None:
        data = bundle["data"]
        if set(data) == {"text/plain"}:
            self._write_lines(ranks, str(data["text/plain"]).split("\n"), mark="Out")
        elif data:
            self._flush()
            self._clear_progress()
            show_rich_value(self._screen, ranks, bundle, has_color=self._has_color)

    def _assembler_of(self, rank: int) -> LineAssembler:
        return self._assemblers.setdefault(rank, LineAssembler(log_name(rank)))

    def _write_lines(self, ranks: Sequence[int], lines: Sequence[str], mark: str = "") -> None:
        rest = self._unfinished.finish(ranks[0], lines[0]) if lines and not mark else None
        if rest is not None:
            self._write(f"{rest}\n")
            lines = lines[1:]
        if lines:
            tag = colored_rank_tag(ranks, mark, has_color=self._has_color)
            if mark and len(lines) > 1:  # the columns of a value stay aligned below one tag
                self._write_below("\n".join([tag, *lines, ""]))
            else:
                self._write_below("".join(f"{tag} {line}\n" for line in lines))


class ProgressLine:
    """Says how far a cell is, where there is something to say.

    Args:
        session: whose cell it is.
        is_terminal: whether a line can take the place of the one before.
        has_pictures: whether charts can be shown.
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
        self, screen: StreamTarget, handle: CellHandle, leave_line: Callable[[], object]
    ) -> None:
        """Print the progress, if an update is due and the progress has changed.

        ``leave_line`` ends a rank's unfinished line, so that this text starts on a new line.
        """
        seconds = time.time() - handle.began_at
        if seconds < self._next_at:
            return
        self._next_at = (seconds // self._period + 1) * self._period
        text = self._describe(handle)
        if not text or (text == self._last_text and not self._is_terminal):
            return
        self._last_text = text
        leave_line()
        line = f"nbddp: {format_seconds(seconds)} · {text}"
        if self._is_terminal:
            self._is_on_line = True
            screen.write(f"{_ERASE}{line[: shutil.get_terminal_size().columns - 1]}")
        else:
            screen.write(f"{line}\n")
        screen.flush()

    def clear(self, screen: StreamTarget) -> None:
        """Take away the line that another one would take the place of: something else comes."""
        if self._is_on_line:
            self._is_on_line = False
            screen.write(_ERASE)

    def finish(self, screen: StreamTarget) -> None:
        """Show the charts, if there are any and they can be shown."""
        self.clear(screen)
        if self._has_pictures:
            show_charts(screen, self._session)

    def _describe(self, handle: CellHandle) -> str:
        snapshot = self._session.snapshot(handle)
        ranks = [each for each in snapshot.ranks if each.progress_bars or each.step]
        progress: list[str] = []
        if ranks:
            slowest = min(ranks, key=_progress_key)
            progress = [*map(format_progress_bar, slowest.progress_bars)] or [
                f"step {format_step(slowest)}"
            ]
        straggler = [describe_straggler(snapshot.straggler)] if snapshot.straggler else []
        return " · ".join([*progress, *_format_metrics(self._session), *straggler])


def _progress_key(each: RankSnapshot) -> tuple[float, int]:
    return each.step or 0.0, sum(bar.done for bar in each.progress_bars)


def _format_metrics(session: Session) -> Iterator[str]:
    """The newest value of each metric, as a mean over ranks."""
    store = session.rank_monitor.metrics
    for name in store.names()[:SHOWN_METRICS]:
        if last := store.last(name).values():
            yield f"{name} {format_number(sum(last) / len(last))}"


def show_charts(screen: StreamTarget, session: Session) -> None:
    """Show the charts of the metrics that have more than a point, as one picture."""
    metrics = session.rank_monitor.metrics.snapshot({}, most=MAX_CHARTS)
    curves = {
        name: each
        for name, each in metrics.curves.items()
        if any(len(curve.steps) > 1 for curve in each.values())
    }
    if not curves:
        return
    import_interruptibly("nbddp.charts.figure")  # loads matplotlib: not before there is a curve
    from nbddp.charts.chart_lines import rank_chart
    from nbddp.charts.figure import draw_charts, png_of

    try:
        png, width = png_of(draw_charts([rank_chart(*each) for each in curves.items()]))
    except Exception as error:
        logger.exception("the charts could not be drawn")
        screen.write(f"nbddp: the charts could not be drawn: {type(error).__name__}: {error}\n")
        return
    values = " · ".join(_format_metrics(session))
    data = {"image/png": b64encode(png).decode(), "text/plain": values}
    sizes = {"image/png": {"width": width}}
    screen.display(data, sizes, display_id="", is_update=False)
    if metrics.hidden:
        many = plural(metrics.hidden, "more metric")
        screen.write(f"nbddp: {many} {'is' if metrics.hidden == 1 else 'are'} in metrics.jsonl\n")


class UnfinishedLines:
    """Decides which unfinished lines are shown, when, and which text continues them.

    Only one can be at the end of the screen. If other output is shown below it, the whole line is
    shown again once it is finished. While it is unfinished, it is shown again after a delay that
    doubles each time: ranks that print dots at the same time do not flood the screen. A progress
    bar, which overwrites itself by carriage returns, is shown only once it is finished.
    """

    def __init__(self) -> None:
        self.open_rank: int | None = None  # the rank whose line is at the end of the screen
        self._shown = ""  # what is shown of it
        self._texts: dict[int, str] = {}  # unfinished lines that are not shown in full
        self._due: dict[int, float] = {}
        self._delays: dict[int, float] = {}  # seconds until a rank's line is shown again
        self._bars: set[int] = set()

    @property
    def next_due(self) -> float:
        """When an unfinished line is to be shown; infinite without one."""
        return min(self._due.values(), default=math.inf)

    def update(self, rank: int, written: str, partial: str, now: float) -> str:
        """Note a rank's output and its unfinished line. Return what to add to the open line."""
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
        self._texts[rank] = partial
        self._due.setdefault(rank, now + self._delays.get(rank, UNFINISHED_LINE_DELAY))
        return ""

    def discard(self, rank: int) -> None:
        """Note that a rank's line has ended."""
        for each in (self._texts, self._due, self._delays):
            each.pop(rank, None)
        self._bars.discard(rank)

    def pop_due(self, now: float) -> tuple[int, str, str] | None:
        """Return a rank whose line is due, the line, and the text that ends the open line."""
        for rank, due in self._due.items():
            if due <= now:
                del self._due[rank]
                self._delays[rank] = 2 * self._delays.get(rank, UNFINISHED_LINE_DELAY)
                end = self.end_open_line()
                self.open_rank, self._shown = rank, self._texts.pop(rank)
                return rank, self._shown, end
        return None

    def finish(self, rank: int, line: str) -> str | None:
        """Return the rest of a rank's finished line; None if its beginning is not the open line."""
        if rank != self.open_rank or not line.startswith(self._shown):
            return None
        self.open_rank = None
        return line[len(self._shown) :]

    def end_open_line(self) -> str:
        """Leave the open line, as other output follows below it. Return the text that ends it."""
        if self.open_rank is None:
            return ""
        self.open_rank = None
        return "\x1b[0m\n" if "\x1b" in self._shown else "\n"
