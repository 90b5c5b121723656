"""Interrupt a cell: Python code by a signal, a blocking call by closing its connection.

The notebook sends a signal, then a message. C code that holds the GIL but checks for signals, such
as ``re``, releases the GIL when the signal arrives, so that a thread can read the message. The
message decides what the interrupt does in the cell, and how often.

While C++ waits in a collective, SIGINT does not reach Python: the handler runs when the main thread
returns to Python. If it has not run shortly after the signal, nbddp ends the wait. It first closes
the connections of process groups, then all connections except those to the controller. While
process groups send and receive, nbddp lets the wait end by itself.

A cell that catches KeyboardInterrupt to clean up gets it once, and may finish. If Python discards
the interrupt, as it does in a destructor, the cell gets it again. nbddp waits for the import of a
library to end: a library imported in part stays so, and later cells fail with "partially
initialized module". It also waits for the end of an optimizer's step, which would leave a model
with some old and some new parameters, and for the start and end of a library's ``with`` block: an
interrupt in ``torch.no_grad.__exit__`` would leave gradients off for the rest of the session.

If all ranks train, they first try to stop after the iteration of the same step; see
:mod:`nbddp.worker.cell.last_step`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from types import FrameType
from typing import Any

from nbddp.worker.cell.last_step import LastStep
from nbddp.worker.watch import main_thread

# Seconds for Python to handle the signal before nbddp ends the wait. If it is shorter, a rank that
# is only busy loses its connections.
SIGNAL_TIMEOUT = 0.1
TIMEOUT_AFTER_DEATH = 0.05  # the same if a rank has died: a wait for it cannot succeed
# Seconds after which a cell that got the interrupt gets no other one. Until then, a collective in
# its `finally` block is ended, too.
REPEAT_TIMEOUT = 4.0
# Seconds for which a process group may continue to send and receive: less than the controller waits
# for a rank that has acknowledged an interrupt, and for a cancelled join (CANCEL_TIMEOUT).
TRANSFER_TIMEOUT = 10.0
IMPORT_TIMEOUT = 10.0  # seconds for the import of a library to end
STEP_TIMEOUT = 2.0  # seconds for the step of an optimizer to end, or for __enter__ and __exit__
# seconds of CPU in one round of SIGNAL_TIMEOUT above which the main thread is computing
BUSY_CPU_TIME = 0.005
# Seconds to form the process group of a cell. If it is shorter, an interrupt ends a group that
# would have formed.
GROUP_TIMEOUT = 1.0
# Seconds from a signal of the notebook to its message. If it is shorter, a late message interrupts
# the cell a second time.
MESSAGE_TIMEOUT = 1.0
# Rounds of SIGNAL_TIMEOUT after which nbddp ends any wait, not only that of a process group: this
# also closes connections that the cell itself has opened.
OTHER_WAITS_AFTER = 3


@dataclass(eq=False, repr=False, kw_only=True)
class CellInterrupter:
    """Turn one Interrupt message into one KeyboardInterrupt in the running cell.

    Args:
        is_cell_file: returns whether a file name belongs to a cell.
        cancel_task: cancels the asyncio task of the cell. Returns False if there is none.
        record_wait: records the collective that the cell waits in, before the wait ends.
        is_transferring: returns whether process groups sent or received data since its last call.
        abort_waits: ends waits in process groups; with ``others_too=True``, all waits.
        acknowledge: tells the controller that this rank received the interrupt.
        announce_wait: tells the controller for how many seconds the cell may go on to a step's end.
        last_step: agrees with other ranks on the last step of an interrupted cell.
    """

    is_cell_file: Callable[[str], bool]
    cancel_task: Callable[[], bool]
    record_wait: Callable[[], None]
    is_transferring: Callable[[], bool]
    abort_waits: Callable[..., None]
    acknowledge: Callable[[int], None]
    announce_wait: Callable[[int, float], None]
    last_step: LastStep

    def __post_init__(self) -> None:
        self.last_step.raise_interrupt = self._raise_pending
        self.last_step.blocked_at = self._blocked_at
        self._text = ""  # of the KeyboardInterrupt: how the cell was interrupted
        # Guards the cell and the request that run. The signal handler must not take it: it can run
        # while the main thread holds it, and it waits for the control thread, which needs it.
        self._changed = threading.Condition()
        self._cell = 0  # the newest cell that has begun
        self._interrupted_cell = 0  # the newest cell to interrupt
        self._is_in_cell = False
        self._signals_handled = 0  # how often the signal handler ran
        self._raised = 0  # how often it raised an exception in the cell
        self._requested = 0  # how many exceptions messages have requested
        self._is_forking = False
        self._deferred_since = 0.0  # when library code first deferred the interrupt, or 0
        self._request = 0  # the request that the rank is answering,
        self._joins_group = False  # and whether ranks form a process group for it

    def install_hooks(self) -> None:
        """Install hooks so that no interrupt is lost, and none arrives during a fork.

        Python discards exceptions in destructors and passes them to ``sys.unraisablehook``. It does
        the same in fork hooks, such as the one that releases the lock of ``logging``. If that hook
        is interrupted, threads block forever.
        """
        previous_hook = sys.unraisablehook

        def on_unraisable(unraisable: Any) -> None:
            frames = [frame for frame, _ in walk_tb(unraisable.exc_traceback)]
            is_interrupt = bool(frames) and frames[-1].f_code is CellInterrupter._on_sigint.__code__
            if self._is_interruptible and is_interrupt:
                self._raised -= 1
            else:
                previous_hook(unraisable)

        sys.unraisablehook = on_unraisable
        # registered last, so that it runs first before a fork
        begin, end = (partial(setattr, self, "_is_forking", is_it) for is_it in (True, False))
        os.register_at_fork(before=begin, after_in_parent=end, after_in_child=end)

    @property
    def was_interrupted(self) -> bool:
        """Whether an interrupt was requested for the running cell, or else for the last one."""
        return self._interrupted_cell >= self._cell > 0

    def begin_cell(self, cell: int) -> bool:
        """Start a cell. Return False if it was interrupted before its start and must not run.

        Replace a signal handler that an earlier cell has installed.
        """
        self.install_signal_handler()
        with self._changed:
            self._cell = cell
            self._deferred_since = 0.0
            self._text = ""
            self.last_step.begin_cell()
            self._requested = self._raised  # a request of an earlier cell must not hit this one
            self._is_in_cell = not self.was_interrupted  # last: from here on a signal may raise
            self._changed.notify_all()  # the control thread may wait for this start
            return self._is_in_cell

    def install_signal_handler(self) -> None:
        """Handle SIGINT in place of a cell's own handler. Call this on the main thread."""
        # first: a blocked signal arrives at once, and Python's own handler would end the rank
        signal.signal(signal.SIGINT, self._on_sigint)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a rank starts with a block

    def end_cell(self) -> None:
        """End the cell. Ignore later signals and messages for it."""
        with self._changed:
            self._is_in_cell = False
            self._changed.notify_all()

    def interrupt(self, cell: int, *, rank_died: bool = False, ranks: Sequence[int] = ()) -> None:
        """Interrupt this cell unless it has ended.

        Args:
            cell: the number of the cell.
            rank_died: whether a rank has died, so that waits for it cannot end.
            ranks: the ranks that run the cell, if they try to stop after the same step.
        """
        # On the control thread.
        with self._changed:  # begin_cell() either sees the number, or has begun the cell before
            is_over = cell < self._cell or (cell == self._cell and not self._is_in_cell)
            if not is_over:
                self._interrupted_cell = cell
            has_begun = cell == self._cell
        if is_over:
            if has_begun:  # its result may be large and still be in transit
                self.acknowledge(cell)
        elif not has_begun:
            self._interrupt_next_cell(cell)
        else:
            try:
                if ranks:
                    self._wait_for_last_step(cell, ranks)
            finally:  # also if the store does not answer
                timeout = TIMEOUT_AFTER_DEATH if rank_died else SIGNAL_TIMEOUT
                if not self._interrupt_running_cell(cell, timeout, is_requested=bool(ranks)):
                    self.acknowledge(cell)  # to describe and send the end of the cell may take long

    def _wait_for_last_step(self, cell: int, ranks: Sequence[int]) -> None:
        # On the control thread.
        def has_ended(timeout: float) -> bool:
            with self._changed:
                is_over = self._changed.wait_for(lambda: not self._runs(cell), timeout)
                return is_over or not self._is_pending

        # First, whether a step is awaited: the signal handler waits for the request, then reads it,
        # and ignores the signal if so. C code such as re.match lets no second signal through.
        with self._changed:  # so that the request cannot hit the next cell
            if not self._runs(cell):
                return
            self.last_step.begin_wait()
            self._requested = self._raised + 1
        announce = partial(self.announce_wait, cell)
        try:
            reason = self.last_step.wait(cell, ranks, announce, has_ended)
            # before the wait ends: then the main thread may raise the interrupt with this text
            self._text = reason and (self.last_step.text or f"at once ({reason})")
        finally:
            self.last_step.is_awaited = self.last_step.is_undecided = False

    # ---- requests between cells

    @contextmanager
    def interruptible(self, request: int, *, joins_group: bool = False) -> Iterator[None]:
        """Answer a request in this context. :meth:`cancel` interrupts it.

        With ``joins_group``, the ranks form a new process group for it, whose waits can be ended.
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
        """Interrupt the answer to this request, without waiting."""
        # On the control thread, which must read on: the wait for the end has a thread of its own.
        interrupt = partial(self._interrupt_request, request)
        threading.Thread(target=interrupt, name="nbddp-cancel", daemon=True).start()

    def _interrupt_request(self, request: int) -> None:
        # On the nbddp-cancel thread.
        timeout = TIMEOUT_AFTER_DEATH  # another rank has failed, so a wait for it cannot succeed
        self.is_transferring()  # the next call compares with this one
        deadline = time.monotonic() + TRANSFER_TIMEOUT
        # All under the lock, which only the waits release. So the answer cannot end between a check
        # and a signal or an abort, which would hit the next cell and its connections.
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
                    not self.is_transferring() or time.monotonic() > deadline
                ):
                    self.abort_waits(others_too=False)

    # ---- the cell to interrupt

    def _interrupt_next_cell(self, cell: int) -> None:
        """Wait for the start of a cell, which then does not run.

        Abort its process group if the group does not form in time.
        """
        # On the control thread.
        self.is_transferring()  # the next call compares with this one
        deadline = time.monotonic() + TRANSFER_TIMEOUT
        cpu_time, has_acknowledged, timeout = main_thread.main_cpu_time(), False, GROUP_TIMEOUT
        with self._changed:  # so that the cell cannot begin between a check and an abort
            while not self._changed.wait_for(lambda: self._cell >= cell, timeout):
                timeout = SIGNAL_TIMEOUT
                cpu_time, before = main_thread.main_cpu_time(), cpu_time
                is_transferring = self.is_transferring()
                # not a rank that only waits: if nothing ends its wait, it must be killed
                if not has_acknowledged and (is_transferring or cpu_time - before > BUSY_CPU_TIME):
                    has_acknowledged = True
                    self.acknowledge(cell)
                if not is_transferring or time.monotonic() > deadline:
                    self.abort_waits(others_too=False)

    def _interrupt_running_cell(self, cell: int, timeout: float, *, is_requested: bool) -> bool:
        """Send the signal until it arrives in the cell. End waits that it does not interrupt.

        Args:
            cell: the number of the cell.
            timeout: seconds in the first round. Later rounds take SIGNAL_TIMEOUT.
            is_requested: whether the exception was requested before, and perhaps raised.

        Returns:
            Whether the interrupt was acknowledged.
        """
        # On the control thread.
        position, rounds, has_acknowledged = self._position(), 0, False
        began, cpu_time = time.monotonic(), main_thread.main_cpu_time()
        self.record_wait()  # before the signal: an aborted wait cannot be found any more
        self.is_transferring()  # the next call compares with this one
        with self._changed:  # so that the request cannot hit the next cell
            if not is_requested and self._runs(cell):
                self._requested = self._raised + 1
        while True:
            handled_before = self._signals_handled  # before the signal, which may come at once
            with self._changed:
                if self._is_pending and self._runs(cell):
                    signal.pthread_kill(main_thread.main_thread_id(), signal.SIGINT)
                if self._changed.wait_for(lambda: not self._runs(cell), timeout):
                    return has_acknowledged
            timeout = SIGNAL_TIMEOUT
            position, previous = self._position(), position
            cpu_time, before = main_thread.main_cpu_time(), cpu_time
            has_arrived = self._signals_handled > handled_before or not self._is_pending
            seconds = time.monotonic() - began
            is_transferring = self.is_transferring() and seconds < TRANSFER_TIMEOUT
            is_computing = cpu_time - before > BUSY_CPU_TIME
            if not has_acknowledged and (has_arrived or is_transferring or is_computing):
                has_acknowledged = True  # the rank responds, so it need not be killed
                self.acknowledge(cell)
            # an import or a step that must end first gets the signal again, however long it takes
            is_handling = has_arrived and not self._deferred_since
            if is_handling and seconds > REPEAT_TIMEOUT:
                return has_acknowledged
            if is_transferring:  # a wait that ends inside a message hangs: see had_traffic()
                continue
            # The signal has not reached Python. Or it has, and the cell waits in a collective for
            # others again, for example in a `finally` block.
            waits_in_torch = "torch/distributed" in main_thread.main_frame().f_code.co_filename
            if not has_arrived or (position == previous and waits_in_torch):
                rounds += 1
                others_too = rounds >= OTHER_WAITS_AFTER and not has_arrived
                with self._changed:
                    if self._runs(cell):  # else new connections would be closed
                        self.abort_waits(others_too=others_too)

    def _on_sigint(self, _signum: int, frame: FrameType | None) -> None:
        # On the main thread, between any two of its instructions.
        self._signals_handled += 1  # first: a signal that is ignored, too, shows that Python runs
        if not self._is_interruptible or self._is_forking or not self._should_act():
            return
        while self.last_step.is_undecided:  # here, because C code may let no second signal through
            time.sleep(0.001)
        if self.last_step.is_awaited:  # the end of the step raises it: see _raise_pending()
            return
        if main_thread.is_called_from(frame, self.is_cell_file):
            if self._must_wait(frame):
                return  # the control thread sends the signal again
            self._raised += 1  # first; the unraisable hook takes it back if Python discards it
            raise KeyboardInterrupt(self._text)
        # the main thread waits in the event loop of a cell with `await`, not in the cell's code
        if self.cancel_task():
            self._raised += 1

    def _raise_pending(self, text: str) -> None:
        """Raise the interrupt that has waited for the end of an optimizer's step."""
        if self._is_in_cell and self._is_pending:
            self._raised += 1
            raise KeyboardInterrupt(text or self._text)

    def _should_act(self) -> bool:
        """Release the GIL until the control thread has read the message of this signal.

        Return whether to interrupt the cell. A signal without a message was sent by the cell
        itself, unless the cell was interrupted before.
        """
        requested, deadline = self._requested, time.monotonic() + MESSAGE_TIMEOUT
        # no lock and no condition: the main thread may be in either when the signal arrives
        while not self._is_pending and self._requested == requested and time.monotonic() < deadline:
            time.sleep(0.001)  # another signal may arrive here
        return self._is_pending or not self.was_interrupted

    @property
    def _is_pending(self) -> bool:
        return self._raised < self._requested

    def _must_wait(self, frame: FrameType | None) -> bool:
        """Return whether library code must end first. It gets a limited time."""
        timeout = _library_timeout(frame, self.is_cell_file)
        if not timeout and self.last_step.is_in_step(frame):
            timeout = STEP_TIMEOUT
        now = time.monotonic()
        self._deferred_since = (self._deferred_since or now) if timeout else 0.0
        return now < self._deferred_since + timeout

    def _runs(self, cell: int) -> bool:
        return self._is_in_cell and self._cell == cell

    @property
    def _is_interruptible(self) -> bool:
        return self._is_in_cell or self._request > 0

    def _position(self) -> tuple[int, int]:
        frame = main_thread.main_frame()
        return id(frame), frame.f_lasti

    def _blocked_at(self) -> tuple[int, int] | None:
        call = main_thread.blocking_call(main_thread.main_frame(), self.is_cell_file)
        return self._position() if call else None


def _library_timeout(frame: FrameType | None, is_cell_file: Callable[[str], bool]) -> float:
    """Return how long an interrupt must wait for a library that a cell has called.

    It waits for an import, but not of a module of the user, and for the start and the end of a
    ``with`` block.
    """
    while frame is not None and not is_cell_file(frame.f_code.co_filename):
        name = frame.f_code.co_name
        is_module = name == "<module>" and frame.f_globals["__name__"] != "__main__"
        if is_module and main_thread.library_of_file(frame.f_code.co_filename):
            return IMPORT_TIMEOUT
        if name in ("__enter__", "__exit__"):
            return STEP_TIMEOUT
        frame = frame.f_back
    return 0.0
