"""A cell as plain text: for a terminal, nbclient, papermill, and scripts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from nbddp.record.cell import CellHandle, CellResult
from nbddp.record.log_reader import LineAssembler, log_name
from nbddp.record.notices import Displayed, Notice, Question, Said, TakenBack, Wrote
from nbddp.ui.agreement import agreeing
from nbddp.ui.questions import Questions
from nbddp.ui.report.findings import findings_text
from nbddp.ui.screen import (
    TOGETHER,
    Check,
    Screen,
    View,
    is_text,
    no_check,
    show_rich,
    show_rich_value,
    tagged,
)
from nbddp.ui.text.progress import Progress
from nbddp.ui.text.unfinished import UnfinishedLines
from nbddp.wire.messages import Display, JsonDict

FLUSH_PERIOD = 0.02  # seconds, on average; ipykernel sends every 200 ms unless flushed
SLACK = 0.1  # seconds of pieces not shown that may be made up for at once
PERIOD_PER_LINE = 60e-6  # seconds more for each line that is shown already
MAX_PERIOD = 1.0  # seconds
MAX_HELD = 1 << 20  # characters
PATIENCE = 1.0  # seconds; news ends the wait
BURST = 8e6  # characters that may come at once
PACE_PERIOD = 0.05  # seconds between two looks while the page catches up


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
        questions: asks what ranks ask; None where they are told that nobody can.
        check: what checks find in the cell, once it has ended.
    """

    has_record = False

    def __init__(
        self,
        screen: Screen,
        *,
        is_quiet: bool = False,
        has_color: bool = False,
        pace: float = math.inf,
        progress: Progress | None = None,
        questions: Questions | None = None,
        check: Check = no_check,
    ) -> None:
        self._screen = screen
        self._questions = questions
        self._check = check
        self._progress = progress
        self._pace = pace
        self._followed_at = 0.0  # when the screen has followed
        self._is_quiet = is_quiet
        self._has_color = has_color
        self._lines: dict[int, LineAssembler] = {}
        self._unfinished = UnfinishedLines()
        self._held: list[str] = []
        self._held_size = 0
        self._shown = 0
        self._paid_until = 0.0  # when the pieces shown so far are made up for
        self._next_flush = 0.0
        self._moment = 0.0  # when ranks began to write, after a pause,
        self._writers: set[int] = set()  # and which have written since

    def take_over(self, before: View) -> None:
        """Go on below what the earlier attempt printed."""

    def note(self, text: str) -> None:
        """Print it below."""
        self._leave_line()
        self._screen.write(f"nbddp: {text}\n")
        self._screen.flush()

    def show(self, handle: CellHandle) -> CellResult:
        """Show a cell from its beginning to its end."""
        try:
            self.follow(handle)
        except BaseException:
            self._leave_line()
            raise
        finally:
            if self._questions is not None:
                self._questions.close()
                if self._questions.stays:
                    self.note(self._questions.stays)
        if handle.result is None:
            raise RuntimeError("the cell's notices ended before the cell did")
        self.finish(handle.result)
        if said := findings_text(self._check(handle)):
            self._screen.write(f"{said}\n")
            self._screen.flush()
        return handle.result

    def follow(self, handle: CellHandle) -> None:
        """Show what a cell says until it ends; may be called again after an interrupt."""
        while not handle.is_told:
            if not handle.is_finished and self._await_screen():
                continue
            left = self._next_flush - time.monotonic() if self._held else PATIENCE
            left = min(left, self._unfinished.next_due - time.monotonic())
            if self._questions is not None:
                left = min(left, self._questions.patience)
                self._questions.pump(handle.has_ended)
            notice = handle.next_notice(max(0.0, left))
            if notice is not None:
                self._show_notice(notice)
            while (due := self._unfinished.take_due(time.monotonic())) is not None:
                self._show_unfinished(*due)
            if self._held and (time.monotonic() >= self._next_flush or self._held_size > MAX_HELD):
                self._show_held()
            if self._progress is not None:
                self._progress.tell(self._screen, handle, self._leave_line)

    def _await_screen(self) -> bool:
        """Wait a moment if the screen cannot follow, and say so."""
        behind = self._followed_at - time.monotonic()
        if behind > 0:
            time.sleep(min(behind, PACE_PERIOD))
        return behind > 0

    def _show_held(self) -> None:
        """Show what is held back: at once after a pause, else less and less often.

        A page draws all lines of an output anew for each piece that is added to it.
        """
        if not self._held:
            return
        self._make_room()
        text = "".join(self._held)
        self._held, self._held_size = [], 0
        self._screen.write(text)
        self._screen.flush()
        self._shown += text.count("\n")
        pause = min(MAX_PERIOD, max(FLUSH_PERIOD, PERIOD_PER_LINE * self._shown))
        now = time.monotonic()
        self._followed_at = (
            max(self._followed_at, now - BURST / self._pace) + len(text) / self._pace
        )
        self._paid_until = max(self._paid_until, now - SLACK) + pause
        self._next_flush = max(self._paid_until, now + TOGETHER)

    def _await_others(self, rank: int) -> None:
        """Show what ranks print at the same moment in one piece, if they did so the last time."""
        now = time.monotonic()
        if now - self._moment > 2 * TOGETHER:
            if len(self._writers) > 1:
                self._next_flush = max(self._next_flush, now + TOGETHER)
            self._moment = now
            self._writers.clear()
        self._writers.add(rank)

    def _hold(self, text: str) -> None:
        self._go_on(self._unfinished.leave() + text)

    def _go_on(self, text: str) -> None:
        """Hold text that continues where the last text ended."""
        if text:
            self._held.append(text)
            self._held_size += len(text)

    def _show_unfinished(self, rank: int, text: str, end: str) -> None:
        self._go_on(f"{end}{tagged([rank], has_color=self._has_color)} {text}")

    def _leave_line(self) -> None:
        """Show all held text, and end an unfinished line: the next output goes below it."""
        if end := self._unfinished.leave():
            self._go_on(end)
        self._show_held()

    def finish(self, result: CellResult) -> None:
        """Show what is left and the values."""
        first = self._unfinished.open  # its line goes on where it is
        for rank, lines in sorted(self._lines.items(), key=lambda it: (it[0] != first, it[0])):
            self._write_lines([rank], lines.flush())
        for ranks, bundle in agreeing(result.results):
            self._show_value(ranks, bundle)
        self._show_held()
        if self._progress is not None:
            self._progress.finish(self._screen)

    def _make_room(self) -> None:
        if self._progress is not None:
            self._progress.make_room(self._screen)

    def _show_notice(self, notice: Notice) -> None:
        match notice:
            case Said(text=text):
                self._hold(f"nbddp: {text}\n")
            case Wrote(rank=rank, text=text) if not self._is_quiet:
                self._await_others(rank)
                lines = self._lines_of(rank)
                self._write_lines([rank], lines.add(text))
                self._go_on(self._unfinished.note(rank, text, lines.partial, time.monotonic()))
            case Displayed(rank=rank, message=message) if not self._is_quiet:
                self._show_display(rank, message)
            case Question() | TakenBack() if self._questions is not None:
                self._leave_line()
                self._questions.take(notice)

    def _show_display(self, rank: int, message: Display) -> None:
        self._write_lines([rank], self._lines_of(rank).flush())  # it was printed before
        self._unfinished.forget(rank)
        if is_text(message):
            self._write_lines([rank], str(message.data["text/plain"]).split("\n"))
        else:
            self._leave_line()
            self._make_room()
            show_rich(self._screen, rank, message, has_color=self._has_color)

    def _show_value(self, ranks: Sequence[int], bundle: JsonDict) -> None:
        data = bundle["data"]
        if set(data) == {"text/plain"}:
            self._write_lines(ranks, str(data["text/plain"]).split("\n"), mark="Out")
        elif data:
            self._show_held()
            self._make_room()
            show_rich_value(self._screen, ranks, bundle, has_color=self._has_color)

    def _lines_of(self, rank: int) -> LineAssembler:
        return self._lines.setdefault(rank, LineAssembler(log_name(rank)))

    def _write_lines(self, ranks: Sequence[int], lines: Sequence[str], mark: str = "") -> None:
        rest = self._unfinished.finish(ranks[0], lines[0]) if lines and not mark else None
        if rest is not None:
            self._go_on(f"{rest}\n")
            lines = lines[1:]
        if lines:
            tag = tagged(ranks, mark, has_color=self._has_color)
            if mark and len(lines) > 1:  # the columns of a value stay aligned below one tag
                self._hold("\n".join([tag, *lines, ""]))
            else:
                self._hold("".join(f"{tag} {line}\n" for line in lines))
