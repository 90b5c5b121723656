"""How a running cell is interrupted: in Python by a signal, in a wait by ending what it waits on.

The notebook sends a signal, then a message. C code that holds the GIL but checks for signals, such
as ``re``, releases the GIL when the signal arrives, so that a thread can read the message. The
message decides what the interrupt does in the cell, and how often.

SIGINT does not reach Python while C++ waits in a collective: the handler runs when the main
thread is back in Python. So if it has not run shortly after the signal, the wait itself is ended:
first what process groups wait on, then all connections but those of the mail. As long as they send
and receive, the wait will end by itself. A cell that catches KeyboardInterrupt to clean up is told
once and left to it; one in which Python throws the interrupt away, as it does where an object is
freed, gets it again. A library that is being imported is waited for: what has half of it keeps half
of it, and every later cell fails with "partially initialized module".
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from types import FrameType
from typing import Any

from nbddp.worker.watch import main_thread

SIGNAL_TIMEOUT = 0.1  # seconds that Python gets to react to the signal before a wait is broken open
TIMEOUT_AFTER_DEATH = 0.05  # the same where a rank has died: who waits for it waits in vain
REPEAT_TIMEOUT = 4.0  # seconds after which a cell that has heard it is left to itself
TRANSFER_TIMEOUT = 10.0  # seconds for which a process group may go on to send and receive
IMPORT_TIMEOUT = 10.0  # seconds that a library gets to be imported in whole
# seconds of CPU in one round of SIGNAL_TIMEOUT: the main thread does not merely wait
BUSY_CPU_TIME = 0.005
GROUP_TIMEOUT = 1.0  # seconds that a new process group gets, which stands before the cell
MESSAGE_TIMEOUT = 1.0  # seconds that a signal of the notebook may come before its message
# rounds of SIGNAL_TIMEOUT after which any wait is ended, not only a process group's
OTHER_WAITS_AFTER = 3


class CellInterrupter:
    """Turns one Interrupt message into a KeyboardInterrupt in the running cell.

    Args:
        is_cell_file: whether code of this file name is a cell's.
        cancel_task: cancels what an event loop of the cell runs; false where none runs.
        record_wait: notes what the cell waits in, before anything ends that.
        is_transferring: whether process groups sent or received anything since it was asked last.
        abort_waits: ends what process groups wait on; with ``others_too=True`` any other wait, too.
        acknowledge: tells the controller that this rank has heard.
    """

    def __init__(
        self,
        *,
        is_cell_file: Callable[[str], bool],
        cancel_task: Callable[[], bool],
        record_wait: Callable[[], None],
        is_transferring: Callable[[], bool],
        abort_waits: Callable[..., None],
        acknowledge: Callable[[int], None],
    ) -> None:
        self._is_cell_file = is_cell_file
        self._cancel_task = cancel_task
        self._record_wait = record_wait
        self._is_transferring = is_transferring
        self._abort_waits = abort_waits
        self._acknowledge = acknowledge
        self._changed = threading.Condition()
        self._cell = 0  # the newest that has begun
        self._interrupted_cell = 0  # the newest that an interrupt was asked for
        self._is_in_cell = False
        self._signals_handled = 0  # times that the signal came through to Python
        self._raised = 0  # times that it became an exception in the cell
        self._requested = 0  # times that messages have asked for one
        self._is_forking = False
        self._importing_since = 0.0  # when an interrupt met the import of a library; 0 if none did
        self._request = 0  # the one that is being answered,
        self._joins_group = False  # and whether ranks meet for it

    def install_hooks(self) -> None:
        """From here on no interrupt is lost, nor breaks off what is done around a fork.

        Of what is raised where an object is freed, Python only says that it was ignored. So it
        does around a fork, where logging gives its lock back, without which threads stand still.
        """
        before = sys.unraisablehook

        def note(unraisable: Any) -> None:
            frames = [frame for frame, _ in walk_tb(unraisable.exc_traceback)]
            is_ours = bool(frames) and frames[-1].f_code is CellInterrupter._on_sigint.__code__
            if self._is_interruptible and is_ours:
                self._raised -= 1
            else:
                before(unraisable)

        sys.unraisablehook = note
        # registered last: before the others when a fork begins, and after them when it ends
        begin, end = (partial(setattr, self, "_is_forking", is_it) for is_it in (True, False))
        os.register_at_fork(before=begin, after_in_parent=end, after_in_child=end)

    @property
    def was_interrupted(self) -> bool:
        """Whether the cell that runs, or ran last, was to be interrupted."""
        return self._interrupted_cell >= self._cell > 0

    def begin_cell(self, cell: int) -> bool:
        """A cell begins; false if it was interrupted before, and shall not run at all.

        Whatever handler an earlier one installed is replaced.
        """
        self.install_signal_handler()
        with self._changed:
            self._cell = cell
            self._importing_since = 0.0
            self._requested = self._raised
            self._is_in_cell = not self.was_interrupted
            self._changed.notify_all()
            return self._is_in_cell

    def install_signal_handler(self) -> None:
        """Handle SIGINT, whatever handler a cell has set; called on the main thread."""
        signal.signal(signal.SIGINT, self._on_sigint)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def end_cell(self) -> None:
        """The cell is over: later signals and messages are for nobody."""
        with self._changed:
            self._is_in_cell = False
            self._changed.notify_all()

    def interrupt(self, cell: int, *, is_for_death: bool = False) -> None:
        """Interrupt this cell unless it is over; called on the control thread."""
        with self._changed:
            is_over = cell < self._cell or (cell == self._cell and not self._is_in_cell)
            if not is_over:
                self._interrupted_cell = cell
            has_begun = cell == self._cell
        if is_over:
            if has_begun:  # its result may be large, and still on its way
                self._acknowledge(cell)
        elif not has_begun:
            self._interrupt_next_cell(cell)
        elif not self._interrupt_running_cell(
            cell, TIMEOUT_AFTER_DEATH if is_for_death else SIGNAL_TIMEOUT
        ):
            self._acknowledge(cell)  # how it ended may take long to describe, and to come

    # ---- what is asked between cells

    @contextmanager
    def interruptible(self, request: int, joins_group: bool = False) -> Iterator[None]:  # noqa: FBT001, FBT002
        """Within it an answer is made, which :meth:`cancel` may end.

        With ``joins_group`` the ranks meet for it in a new process group, whose waits are then
        ended.
        """
        self.install_signal_handler()
        with self._changed:
            self._request, self._joins_group = request, joins_group
        try:
            yield
        finally:
            with self._changed:
                self._request = 0
                self._changed.notify_all()

    def cancel(self, request: int) -> None:
        """Interrupt whoever makes the answer to this request; called on the control thread.

        It waits for nothing.
        """
        name = "nbddp-drop"
        threading.Thread(
            target=self._interrupt_request, args=[request], name=name, daemon=True
        ).start()

    def _interrupt_request(self, request: int) -> None:
        timeout = TIMEOUT_AFTER_DEATH
        self._is_transferring()
        deadline = time.monotonic() + TRANSFER_TIMEOUT
        with self._changed:
            if self._request == request:
                self._requested = self._raised + 1
            while self._request == request:
                if self._is_pending:
                    signal.pthread_kill(main_thread.main_thread_id(), signal.SIGINT)
                if self._changed.wait_for(lambda: self._request != request, timeout):
                    return
                timeout = SIGNAL_TIMEOUT
                if self._joins_group and (
                    not self._is_transferring() or time.monotonic() > deadline
                ):
                    self._abort_waits(others_too=False)

    # ---- the cell that is to be interrupted

    def _interrupt_next_cell(self, cell: int) -> None:
        """The cell is to come: it will not run. A process group that cannot be formed is ended."""
        self._is_transferring()
        deadline, cpu_time, has_acknowledged = (
            time.monotonic() + TRANSFER_TIMEOUT,
            main_thread.main_cpu_time(),
            False,
        )
        timeout = GROUP_TIMEOUT
        with self._changed:
            while not self._changed.wait_for(lambda: self._cell >= cell, timeout):
                timeout = SIGNAL_TIMEOUT
                cpu_time, before = main_thread.main_cpu_time(), cpu_time
                is_transferring = self._is_transferring()
                if not has_acknowledged and (is_transferring or cpu_time - before > BUSY_CPU_TIME):
                    has_acknowledged = True
                    self._acknowledge(cell)
                if not is_transferring or time.monotonic() > deadline:
                    self._abort_waits(others_too=False)

    def _interrupt_running_cell(self, cell: int, timeout: float) -> bool:
        """Send the signal until it arrives in the cell, and end the waits it cannot get through.

        Args:
            cell: its number.
            timeout: seconds in one round, of which the later ones take SIGNAL_TIMEOUT.

        Returns:
            Whether the controller was told that the rank has heard.
        """
        position, rounds, has_acknowledged = self._position(), 0, False
        began, cpu_time = time.monotonic(), main_thread.main_cpu_time()
        self._record_wait()
        self._is_transferring()
        self._requested = self._raised + 1
        while True:
            seen = self._signals_handled
            if self._is_pending:
                signal.pthread_kill(main_thread.main_thread_id(), signal.SIGINT)
            with self._changed:
                if self._changed.wait_for(lambda: not self._is_in_cell, timeout):
                    return has_acknowledged
            timeout = SIGNAL_TIMEOUT
            position, previous = self._position(), position
            cpu_time, before = main_thread.main_cpu_time(), cpu_time
            has_arrived = self._signals_handled > seen or not self._is_pending
            waits_for_bytes = (
                self._is_transferring() and time.monotonic() < began + TRANSFER_TIMEOUT
            )
            if not has_acknowledged and (
                has_arrived or waits_for_bytes or cpu_time - before > BUSY_CPU_TIME
            ):
                has_acknowledged = True  # it will answer: nobody needs to kill it for that
                self._acknowledge(cell)
            is_left_alone = has_arrived and not self._importing_since
            if is_left_alone and time.monotonic() > began + REPEAT_TIMEOUT:
                return has_acknowledged
            if waits_for_bytes:
                continue
            waits_in_torch = "torch/distributed" in main_thread.main_frame().f_code.co_filename
            if not has_arrived or (position == previous and waits_in_torch):
                rounds += 1
                with self._changed:
                    if self._is_in_cell:  # else what is opened now would be ended
                        self._abort_waits(
                            others_too=rounds >= OTHER_WAITS_AFTER and not has_arrived
                        )

    def _on_sigint(self, _signum: int, frame: FrameType | None) -> None:
        self._signals_handled += 1
        if not self._is_interruptible or self._is_forking or not self._should_act():
            return
        if main_thread.is_called_from(frame, self._is_cell_file):
            if self._waits_for_import(frame):
                return
            self._raised += 1
            raise KeyboardInterrupt
        if self._cancel_task():
            self._raised += 1

    def _should_act(self) -> bool:
        """Release the GIL until the control thread has read the message of this signal.

        If no message comes, the cell has sent the signal itself, unless it was interrupted before.
        """
        requested, deadline = self._requested, time.monotonic() + MESSAGE_TIMEOUT
        while not self._is_pending and self._requested == requested and time.monotonic() < deadline:
            time.sleep(0.001)  # the interrupt itself may strike here
        return self._is_pending or not self.was_interrupted

    @property
    def _is_pending(self) -> bool:
        return self._raised < self._requested

    def _waits_for_import(self, frame: FrameType | None) -> bool:
        if not _imports_library(frame, self._is_cell_file):
            self._importing_since = 0.0
            return False
        now = time.monotonic()
        self._importing_since = self._importing_since or now
        return now < self._importing_since + IMPORT_TIMEOUT

    @property
    def _is_interruptible(self) -> bool:
        return self._is_in_cell or self._request > 0

    def _position(self) -> tuple[int, int]:
        frame = main_thread.main_frame()
        return id(frame), frame.f_lasti


def _imports_library(frame: FrameType | None, is_cell_file: Callable[[str], bool]) -> bool:
    """Whether a cell is in the middle of an import, and it is none of the user's own modules."""
    while frame is not None and not is_cell_file(frame.f_code.co_filename):
        is_module = frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] != "__main__"
        if is_module and main_thread.library_of_file(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
