"""The panel view of a cell: live widgets while it runs, then a record that replaces them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from IPython.display import clear_output

from nbddp.charts.axes import AxisScale
from nbddp.controller.session import Session
from nbddp.errors import NbddpError
from nbddp.record import notices
from nbddp.record.cell import CellHandle, CellResult
from nbddp.record.snapshot import Snapshot
from nbddp.ui import frontend
from nbddp.ui.comms.dispatcher import CommDispatcher, ServedWidgets
from nbddp.ui.comms.kernel_stream import DispatchMode
from nbddp.ui.html_pieces import MAX_CHARTS
from nbddp.ui.input_requests import InputQueue
from nbddp.ui.log_lines import LogBuffer, LogLine, split_text_and_rich
from nbddp.ui.panel.controls import ButtonPress
from nbddp.ui.panel.log_area import MAX_ROWS, describe_earlier, log_path
from nbddp.ui.panel.output_slot import OutputSlot, delayed_hint_html, record_hint
from nbddp.ui.panel.redraw_pacer import RedrawPacer, next_redraw
from nbddp.ui.panel.widgets import PanelWidgets
from nbddp.ui.report.blocks import Cell, Dot, Report
from nbddp.ui.report.finished_cell import CellReport, EarlierAttempt, record_html, record_text
from nbddp.ui.report.render import render_html
from nbddp.ui.wording import describe_events, relative_path
from nbddp.wire.messages import Display

FIRST_DRAW_DELAY = 0.1  # seconds; a cell that ends earlier is shown as a record at once
OPEN_DELAY = 1.0  # seconds until the panel opens; before that, a preview of the record is shown
DRAW_PERIOD = 0.1  # seconds between two previews
RETRY_PERIOD = 1.0  # seconds until the next drawing after one that failed
CHECK_PERIOD = 0.05  # seconds between two checks for changes without a notice, such as a step
POLL_PERIOD = 0.03  # seconds between two checks for pressed buttons on ipykernel 6
PANELS_KEPT = 4  # panels that stay open after their cells, because a page may still draw them
RECORDS_KEPT = 32  # record widgets that stay open, for pages that do not follow the outputs
RECORD_LINES = 200  # of the merged log, in the record
RANK_LINES = 50  # of each rank, in the record of a longer log
NO_WIDGETS = (
    "nbddp: this page cannot show the live panel. A record appears when the cell ends. "
    "`%ddp view text` prints the output while the cell runs."
)
PAGE_RELOADED = (
    "nbddp: the page was reloaded and has lost the output of cell [{cell}], so it is here. "
    "In a terminal, `nbddp status` shows a running cell."
)


class PanelView:
    """Shows one cell until it ends, on the thread that calls ``show``.

    Attributes:
        slot: the output of the panel in its cell.
        has_record: false if the record could not be drawn.
    """

    has_record = True

    def __init__(
        self,
        session: Session,
        comms: CommDispatcher,
        screen: frontend.StreamTarget,
        *,
        input_queue: InputQueue,
        remarks: frontend.Remarks,
        slot: OutputSlot | None = None,
    ) -> None:
        self.log_buffer = LogBuffer(max_merged=MAX_ROWS)
        self.attempt = 0
        self.session = session
        self._comms = comms
        self._screen = screen
        self._errors = frontend.ErrorBoundary(screen)
        self._widgets: PanelWidgets | None = None
        self._serving = ExitStack()
        self._served: ServedWidgets | None = None
        self._rerun: dict[str, Any] | None = None  # the waiting request that gets the output
        self._is_moved = False  # whether that request is of another cell
        self._input_queue, self._remarks = input_queue, remarks
        self.slot = slot or OutputSlot()
        self._earlier_attempts: list[EarlierAttempt] = []
        self._opens_at = 0.0
        self._run_folder = ""
        self._log_pacer = RedrawPacer(0.015, least=0.1, most=0.3)
        self._state_pacer = RedrawPacer(0.01, least=0.25, most=1.0, tick=0.5)
        self._chart_pacer = RedrawPacer(0.015, least=0.5, most=5.0)  # charts change slowly
        self._next_draw = 0.0

    def continue_from(self, before: frontend.View) -> None:
        """Replace the panel of an earlier attempt, and take over its log and its output slot."""
        if isinstance(before, PanelView):
            is_healed = before._handle.attempt == self.session.life.attempt
            failed = EarlierAttempt(before._handle, time.time(), is_healed)
            self._earlier_attempts = [*before._earlier_attempts, failed]
            self.log_buffer, self.slot = before.log_buffer, before.slot
            self._rerun, self._is_moved = before._rerun, before._is_moved

    def show_status(self, text: str) -> None:
        """Show how nbddp recovers from the failure, instead of the panel."""
        self.log_buffer.write_notice(text)
        self.announce(text)

    def announce(self, text: str) -> None:
        """Show a message where the panel will open."""
        announced = render_html(Report(Cell(text, dot=Dot.BUSY)))
        self.slot.show_placeholder(announced, f"nbddp: {text}")

    @contextmanager
    def showing_start(self, text: str) -> Iterator[None]:
        """Show a message while the ranks start; the cell may also run in the block."""
        with self._comms.serve() as self._served:
            self.announce(text)
            yield

    def cancel_start(self) -> None:
        """Remove the message, because the ranks did not start; an error follows."""
        self._comms.process_pending()
        self._follow_rerun()
        self.slot.remove_output()

    def show(self, handle: CellHandle) -> CellResult:
        """Show a cell until it ends, then replace the panel with its record."""
        self.attempt, self._handle = handle.attempt, handle
        self._run_folder = relative_path(self.session.snapshot(handle).folder)
        self._next_draw = time.monotonic() + FIRST_DRAW_DELAY
        self._opens_at = time.monotonic() + OPEN_DELAY
        if threading.current_thread() is not threading.main_thread():
            self._served = None  # what served the start ends with the cell that started this one
        try:
            self._serve()  # before it has widgets: the user may run the cell again at once
            while not handle.notice_queue.is_drained:
                can_batch = time.monotonic() < self._next_draw
                # outside of the boundary: after an error, the next notice is read
                notice = handle.notice_queue.get(self._wait_seconds(), batch_text=can_batch)
                with self._errors.logging_errors():
                    self._handle_notice(notice)
                with self._errors.logging_errors():
                    self._comms.process_pending()
                    self._show_again()
                    self._poll_input()
                with self._errors.logging_errors():
                    if time.monotonic() >= self._next_draw:
                        if notice is not None:
                            self._handle_burst(
                                timeout=0.0 if can_batch else frontend.COALESCE_SECONDS
                            )
                        self._draw()
            if handle.result is None:
                raise RuntimeError("the cell's notices ended before the cell did")
            self.has_record = False
            with self._errors.logging_errors():
                self._finish(handle.result)
                self.has_record = True
            return handle.result
        finally:
            self._input_queue.close()
            self._serving.close()
            if self._widgets is not None and not self._comms.is_kernel_ending:
                self.slot.close()  # a widget closed by an ending kernel shows an error

    def _serve(self) -> ServedWidgets:
        if self._served is None:
            self._served = self._serving.enter_context(self._comms.serve())
        return self._served

    def _show_again(self) -> None:
        """Show the cell again if the user has run it again, or has reloaded the page."""
        if not self._follow_rerun():
            return
        if self._is_moved:
            self._screen.write_line(PAGE_RELOADED.format(cell=self._handle.prompt))
        if self._widgets is not None:
            self._publish_panel()
        else:
            self._preview()

    def _follow_rerun(self) -> bool:
        """Send all output to the request that runs the cell again; return whether it is new."""
        rerun = self._served.rerun if self._served is not None else None
        if rerun is None or rerun is self._rerun:
            return False
        self._rerun = rerun
        self._comms.redirect_output(rerun)
        self.slot.forget_outputs()
        self._is_moved = self._served is not None and self._served.is_moved
        return True

    def _poll_input(self) -> None:
        reloads = self._served.reloads if self._served is not None else 0
        self._input_queue.cancel_if_page_changed((self._comms.cells_sent, reloads))
        answer = self._input_queue.poll(self._handle.has_ended)
        if answer is not None:
            rank, text = answer
            self.log_buffer.flush(rank)
            self.log_buffer.write(rank, f"{text}\n")

    def _wait_seconds(self) -> float:
        """Return how long to wait for a notice; shorter if this thread also handles presses."""
        if self._widgets is not None and self._comms.mode is DispatchMode.POLL:
            return POLL_PERIOD
        seconds = self._next_draw - time.monotonic()
        pause = seconds if seconds > 0 else CHECK_PERIOD  # after a pause, a notice is drawn at once
        return min(pause, self._input_queue.poll_interval)

    # ---- notices and input

    def _handle_burst(self, *, timeout: float) -> None:
        """Handle all notices that arrive together, so that they are drawn together."""
        deadline, queue = time.monotonic() + frontend.COALESCE_SECONDS, self._handle.notice_queue
        while (seconds := deadline - time.monotonic()) > 0 and not queue.is_drained:
            notice = queue.get(min(seconds, timeout))
            if notice is None:
                return
            self._handle_notice(notice)

    def _handle_notice(self, notice: notices.Notice | None) -> None:
        match notice:
            case notices.OutputText(rank=rank, text=text):
                self.log_buffer.write(rank, text)
            case notices.ControllerMessage(text=text):
                if not self._is_shown(text):
                    self.log_buffer.write_notice(text)
            case notices.RichOutput(rank=rank, message=message):
                self._show_display(rank, message)
            case notices.InputRequest() | notices.InputClosed():
                self._opens_at = 0.0  # open the panel, so that the user sees which rank asks
                self._input_queue.handle_notice(notice)

    def _is_shown(self, text: str) -> bool:
        """Return whether the panel shows a text as its hang card or as an event."""
        snapshot = self._snapshot()
        is_alarm = self._widgets is not None and text == snapshot.alarm
        return is_alarm or any(text == event for *_, event in describe_events(snapshot))

    def _show_display(self, rank: int, message: Display) -> None:
        self.log_buffer.flush(rank)  # printed before the display
        if frontend.is_plain_text(message):
            self.log_buffer.write(rank, f"{message.data['text/plain']}\n")
            return
        if not self.slot.is_published:  # else the record would be below the display
            self._preview()
        self._screen.show_rich(rank, message)
        self.slot.has_output_below = True

    # ---- the running cell

    def _draw(self) -> None:
        """Redraw the parts that have changed, and elapsed times."""
        self._next_draw = time.monotonic() + RETRY_PERIOD
        if self._widgets is not None:
            self._redraw(self._widgets)
        elif time.monotonic() >= self._opens_at:
            self._open()
        else:
            if self.slot.is_published or self.log_buffer.version:
                self._preview()
            self._next_draw = min(time.monotonic() + DRAW_PERIOD, self._opens_at)

    def _preview(self) -> None:
        """Show a preview that looks like the record, so that a short cell has a stable layout."""
        merged = self.log_buffer.lines()
        record = CellReport(
            snapshot=self._snapshot(),
            lines=merged[-RECORD_LINES:],
            earlier=self._describe_earlier(merged, RECORD_LINES),
        )
        html = record_html(record) + delayed_hint_html(record.snapshot.run, self._handle.prompt)
        self.slot.show_placeholder(html, record_text(record))

    def _redraw(self, widgets: PanelWidgets) -> None:
        log_state = (self.log_buffer.version, widgets.log.user_choice)
        with self._errors.logging_errors():
            self._log_pacer.draw_if_changed(
                log_state, lambda: widgets.log.draw(self.log_buffer, self._run_folder)
            )
        can_press = self._comms.mode is not DispatchMode.NONE
        with self._errors.logging_errors():
            self._state_pacer.draw_if_changed(
                self.session.version, lambda: widgets.draw(self._snapshot(), can_press=can_press)
            )
        chart_state = (self.session.version, widgets.charts.choice)
        with self._errors.logging_errors():
            self._chart_pacer.draw_if_changed(chart_state, widgets.charts.draw)
        self._next_draw = next_redraw(self._log_pacer, self._state_pacer, self._chart_pacer)

    def _open(self) -> None:
        metrics = self.session.rank_monitor.metrics.snapshot
        self._widgets = PanelWidgets(self._handle.ranks, self._run_button, metrics)
        self._redraw(self._widgets)
        if self.slot.root is None:
            self._comms.close_later(self.slot.close, most=RECORDS_KEPT)
        self._serve().roots = (self.slot.open(self._widgets.parts),)
        self._publish_panel()

    def _publish_panel(self) -> None:
        run = self.session.snapshot(self._handle).run
        self.slot.show_panel(NO_WIDGETS, record_hint(run, self._handle.prompt))

    def _describe_earlier(
        self, lines: Sequence[LogLine], shown: int, rank: int | None = None
    ) -> str:
        count = self.log_buffer.dropped_count(rank) + max(0, len(lines) - shown)
        return describe_earlier(count, log_path(self._run_folder, rank))

    def _run_button(self, press: ButtonPress, rank: int) -> None:
        """Start the action of a button without waiting; the panel shows the result."""
        actions: dict[ButtonPress, Callable[[], object]] = {
            ButtonPress.INTERRUPT: self.session.interrupt,
            ButtonPress.RESTART: self.session.request_restart,
            ButtonPress.STOP: self.session.request_stop,
            ButtonPress.KILL: partial(self.session.request_kill, rank),
        }
        try:
            actions[press]()
        except NbddpError as error:
            self._handle.notice_queue.put(notices.ControllerMessage(str(error)))

    # ---- the finished cell

    def _finish(self, result: CellResult) -> None:
        self._show_again()
        self._input_queue.close()  # the record says if an input box is still open
        self.log_buffer.flush()
        self.log_buffer.note_repeated_warnings()
        values, rich = split_text_and_rich(result.results)
        record = self._record(result, values)
        self.slot.show_record(record_html(record), record_text(record))
        for ranks, bundle in rich:
            self._screen.show_value(ranks, bundle)
        if self._widgets is not None:
            self._comms.close_later(self._widgets.close, most=PANELS_KEPT)
            self._widgets = None
        if self._rerun is not None and result.is_ok and not self._is_moved:
            clear_output(wait=True)  # the waiting run follows; it replaces this record

    def _record(self, result: CellResult, values: Sequence[LogLine]) -> CellReport:
        scale, chosen = self._widgets.charts.choice if self._widgets else (AxisScale.AUTO, None)
        curves = partial(self._widgets.sparklines.draw, is_static=True) if self._widgets else None
        merged, snapshot = self.log_buffer.lines(), self._snapshot()
        earlier = self._describe_earlier(merged, RECORD_LINES)
        missed = f"{snapshot.missed_rows:,} more rows of numbers are in metrics.jsonl"
        return CellReport(
            snapshot=snapshot,
            result=result,
            lines=[*merged[-RECORD_LINES:], *values],
            earlier=earlier,
            log_path=log_path(self._run_folder, None),
            rank_lines=self._rank_lines() if earlier else [],
            metrics=self.session.rank_monitor.metrics.snapshot(most=MAX_CHARTS, chosen=chosen),
            scale=scale,
            attempts=self._earlier_attempts,
            curves=curves,
            notes=[missed if snapshot.missed_rows else "", self._input_queue.leftover_hint],
            remarks=self._remarks(self._handle),
        )

    def _snapshot(self) -> Snapshot:
        """Return a snapshot of the cell since its first attempt."""
        snapshot = self.session.snapshot(self._handle)
        if not self._earlier_attempts:
            return snapshot
        began = self._earlier_attempts[0].handle.began_at
        seconds = snapshot.seconds + self._handle.began_at - began
        events = self.session.event_log.since(began)
        return replace(snapshot, began=began, seconds=seconds, events=events)

    def _rank_lines(self) -> list[tuple[int, Sequence[LogLine], str]]:
        return [
            (rank, lines[-RANK_LINES:], self._describe_earlier(lines, RANK_LINES, rank))
            for rank in self._handle.ranks
            if (lines := self.log_buffer.lines(rank))
        ]
