"""An interrupt ends only its own cell, whether that cell runs or is about to begin."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import HashStore

from nbddp.wire.collective import Collective
from nbddp.worker.cell import interrupt, last_step
from nbddp.worker.cell.interrupt import CellInterrupter
from nbddp.worker.cell.last_step import LastStep
from nbddp.worker.watch.flight_recorder import RecordedCollective

CELL = "<a cell>"
FOREVER = "while True: time.sleep(0.01)"


class Cells(CellInterrupter):
    """An interrupter, the cells that it interrupts, and its actions."""

    def __init__(self) -> None:
        self.aborts: list[bool] = []
        self.acknowledged: list[int] = []
        self.cancels = 0
        self.awaits_something = False
        self.begun = threading.Event()
        self.flow: Iterator[bool] = iter(())
        self.on_break: Callable[[], None] = lambda: None
        self.on_record: Callable[[], None] = lambda: None
        super().__init__(
            is_cell_file=lambda name: name == CELL,
            cancel_task=self.cancel_task,
            record_wait=lambda: self.on_record(),
            is_transferring=lambda: next(self.flow, False),
            abort_waits=self.abort_waits,
            acknowledge=self.acknowledged.append,
            announce_wait=lambda *_: None,
            last_step=LastStep(HashStore(), 1, 0),
        )

    def cancel_task(self) -> bool:
        self.cancels += 1
        return self.awaits_something

    def abort_waits(self, *, others_too: bool) -> None:
        self.aborts.append(others_too)
        self.on_break()

    def run(self, number: int, source: str, **names: object) -> str:
        if not self.begin_cell(number):
            return "not begun"
        self.begun.set()
        try:
            exec(compile(source, CELL, "exec"), {"time": time, "signal": signal, **names})
        except BaseException as error:  # noqa: BLE001 - any end of a cell
            return type(error).__name__
        finally:
            self.end_cell()
        return "done"

    def interrupt_soon(
        self, cell: int, *, after: float | None = None, rank_died: bool = False
    ) -> threading.Thread:
        """Interrupt a cell from another thread, as the control thread does.

        That is so many seconds from now; without a number, shortly after the cell has begun.
        """
        self.begun.clear()

        def interrupt() -> None:
            if after is None:
                assert self.begun.wait(30.0)
                time.sleep(0.05)
            self.interrupt(cell, rank_died=rank_died)

        thread = threading.Timer(after or 0.0, interrupt)
        thread.start()
        return thread

    def interrupted(self, source: str, **names: object) -> str:
        asked = self.interrupt_soon(1)
        ended = self.run(1, source, **names)
        asked.join()
        return ended


@pytest.fixture
def cells() -> Iterator[Cells]:
    before = signal.getsignal(signal.SIGINT)
    yield Cells()
    signal.signal(signal.SIGINT, before)


@contextmanager
def in_c_code() -> Iterator[None]:
    """Let no signal through, as C code that waits."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a pending interrupt belongs to no cell
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def test_an_interrupt_raises_in_a_python_cell_and_not_in_the_next_cell(cells: Cells) -> None:
    assert cells.interrupted(FOREVER) == "KeyboardInterrupt"
    assert cells.was_interrupted
    assert cells.aborts == []
    assert cells.acknowledged == [1]  # to say how it ended may take longer than a rank gets to obey
    assert cells.run(2, "time.sleep(0.2)") == "done"
    assert not cells.was_interrupted


def test_an_interrupt_before_the_start_of_a_cell_ends_it(cells: Cells) -> None:
    assert cells.run(2, "pass") == "done"
    asked = cells.interrupt_soon(3, after=0.0)
    while not cells.was_interrupted:
        time.sleep(0.001)
    assert cells.run(3, "raise AssertionError('must not run')") == "not begun"
    assert cells.was_interrupted
    asked.join()
    assert cells.run(4, "pass") == "done"


@pytest.mark.parametrize("late", [1, 2])
def test_an_interrupt_for_a_finished_cell_has_no_effect(cells: Cells, late: int) -> None:
    assert cells.run(1, "pass") == cells.run(2, "pass") == "done"
    cells.interrupt(late)
    assert not cells.was_interrupted
    assert cells.run(3, "time.sleep(0.1)") == "done"
    assert cells.aborts == []
    assert cells.acknowledged == ([2] if late == 2 else [])  # its result may be on its way


def test_an_interrupt_does_not_hit_the_next_cell_that_begins_just_before_the_signal(
    cells: Cells,
) -> None:
    def begin_next() -> None:
        cells.end_cell()
        assert cells.begin_cell(2)

    assert cells.begin_cell(1)
    cells.on_record = begin_next
    cells.interrupt(1)
    assert cells.cancels == 0
    assert cells.acknowledged == [1]
    cells.end_cell()


def test_an_interrupt_does_not_hit_the_next_cell_that_begins_between_two_signals(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "REPEAT_TIMEOUT", 60.0)
    assert cells.begin_cell(1)
    with in_c_code():
        has_aborted = threading.Event()
        cells.on_break = has_aborted.set
        asked = cells.interrupt_soon(1, after=0.0)
        assert has_aborted.wait(30.0)
        with cells._changed:  # so that the other thread sees only the second cell
            cells.end_cell()
            assert cells.begin_cell(2)
        asked.join(30.0)
    assert not asked.is_alive()
    cells.end_cell()


def test_the_signal_is_repeated_if_it_arrives_before_the_first_line_of_the_cell(
    cells: Cells,
) -> None:
    def get_ready() -> None:  # what IPython does before it runs a cell's code
        deadline = time.monotonic() + 0.35
        while time.monotonic() < deadline:
            time.sleep(0.01)

    assert cells.begin_cell(1)
    asked = cells.interrupt_soon(1, after=0.1)
    get_ready()
    with pytest.raises(KeyboardInterrupt):
        exec(compile(FOREVER, CELL, "exec"), {"time": time})
    cells.end_cell()
    asked.join()
    assert cells.aborts == []
    assert cells.acknowledged == [1]


def test_a_rank_that_waits_for_a_dead_rank_is_freed_without_the_signal_timeout(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "SIGNAL_TIMEOUT", 60.0)
    assert cells.begin_cell(1)
    with in_c_code():
        cells.on_break = cells.end_cell
        cells.interrupt_soon(1, after=0.0, rank_died=True).join(30.0)
        assert cells.aborts == [False]


def test_a_call_that_blocks_the_signal_ends_by_closing_all_connections(cells: Cells) -> None:
    heard: list[list[int]] = []

    def is_freed() -> None:
        if cells.aborts[-1]:
            heard.append([*cells.acknowledged])
            cells.end_cell()

    assert cells.begin_cell(1)
    with in_c_code():
        cells.on_break = is_freed
        cells.interrupt_soon(1, after=0.0).join(30.0)
        assert heard == [[]]
    assert cells.aborts == [False] * (interrupt.OTHER_WAITS_AFTER - 1) + [True]
    assert cells.acknowledged == [1]


def test_connections_are_not_aborted_while_the_process_group_transfers_data(cells: Cells) -> None:
    asked_of_flow: list[bool] = []

    def flow() -> Iterator[bool]:
        while len(asked_of_flow) < 6:
            asked_of_flow.append(not cells.aborts)
            yield True

    cells.flow = flow()
    assert cells.begin_cell(1)
    with in_c_code():
        asked = cells.interrupt_soon(1, after=0.0)
        while not cells.aborts:
            time.sleep(0.01)
        cells.end_cell()
        asked.join()
    assert asked_of_flow == [True] * 6
    assert cells.acknowledged == [1]  # it will answer: it is not killed for being deaf


@pytest.mark.parametrize("is_signalled", [False, True])
def test_an_awaited_task_is_cancelled_once_even_if_a_signal_arrives_too(
    cells: Cells, monkeypatch: pytest.MonkeyPatch, is_signalled: bool
) -> None:
    monkeypatch.setattr(interrupt, "MESSAGE_TIMEOUT", 60.0)
    cells.awaits_something = True
    assert cells.begin_cell(1)
    asked = cells.interrupt_soon(1, after=0.1)
    began = time.monotonic()
    if is_signalled:
        signal.raise_signal(signal.SIGINT)  # as the notebook does, before its message
    assert time.monotonic() < began + 30  # and nothing is cancelled until the handler returns
    while not cells.cancels:
        time.sleep(0.01)
    cells.end_cell()
    asked.join()
    assert cells.cancels == 1


def test_a_cell_that_cleans_up_after_an_interrupt_is_interrupted_once(cells: Cells) -> None:
    source = (
        "try:\n    while True: time.sleep(0.01)\n"
        "except KeyboardInterrupt:\n    for _ in range(50): time.sleep(0.01)"
    )
    assert cells.interrupted(source) == "done"
    assert cells.acknowledged == [1]
    assert cells.aborts == []


def test_a_signal_and_the_interrupt_message_that_follows_count_as_one_interrupt(
    cells: Cells,
) -> None:
    asked = cells.interrupt_soon(1, after=0.3)
    source = (
        "try:\n    signal.raise_signal(signal.SIGINT)\n    done.append('went on')\n"
        "except KeyboardInterrupt:\n    for _ in range(100): time.sleep(0.01)\n"
        "    done.append('cleaned up')\n    raise"
    )
    done: list[str] = []
    assert cells.run(1, source, done=done) == "KeyboardInterrupt"
    asked.join()
    assert cells.was_interrupted
    assert done == ["cleaned up"]
    assert cells.acknowledged == [1]


@pytest.mark.parametrize("has_had_it", [False, True])
def test_a_signal_without_a_message_interrupts_the_cell_unless_it_was_interrupted_before(
    cells: Cells, monkeypatch: pytest.MonkeyPatch, has_had_it: bool
) -> None:
    monkeypatch.setattr(interrupt, "MESSAGE_TIMEOUT", 0.1)
    source = (
        "try:\n    while has_had_it: time.sleep(0.01)\nexcept KeyboardInterrupt:\n    pass\n"
        "signal.raise_signal(signal.SIGINT)"
    )
    run = cells.interrupted if has_had_it else partial(cells.run, 1)
    ended = run(source, has_had_it=has_had_it)
    assert ended == ("done" if has_had_it else "KeyboardInterrupt")
    assert cells.run(2, "signal.raise_signal(signal.SIGINT)") == "KeyboardInterrupt"


def imported(seconds: float, *, filename: str, name: str = "a_library") -> None:
    """Run a module's code for so long."""
    source = "end = time.monotonic() + seconds\nwhile time.monotonic() < end: time.sleep(0.01)\n"
    code = compile(source, filename, "exec")
    exec(code, {"time": time, "seconds": seconds, "__name__": name})


IN_A_LIBRARY = str(Path(pytest.__file__).parent / "a_module.py")


def test_an_interrupt_waits_until_a_library_import_is_complete(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "REPEAT_TIMEOUT", 0.2)  # is over long before the import is
    done: list[int] = []
    source = f"imported(0.8, filename=library)\ndone.append(1)\n{FOREVER}"
    names = {"imported": imported, "library": IN_A_LIBRARY, "done": done}
    assert cells.interrupted(source, **names) == "KeyboardInterrupt"
    assert done
    assert cells.acknowledged == [1]
    assert cells.aborts == []


@pytest.mark.parametrize(
    ("filename", "name", "importing"),
    [
        ("/home/somebody/helpers.py", "helpers", 10.0),
        (IN_A_LIBRARY, "__main__", 10.0),  # `%ddp run -m` of a library
        (IN_A_LIBRARY, "a_library", 0.2),  # it takes too long
    ],
)
def test_imports_of_user_modules_and_endless_imports_are_interrupted(
    cells: Cells,
    monkeypatch: pytest.MonkeyPatch,
    filename: str,
    name: str,
    importing: float,
) -> None:
    monkeypatch.setattr(interrupt, "IMPORT_TIMEOUT", importing)
    source = "imported(5.0, filename=filename, name=name)\nlibrary_is_whole = 1 / 0"
    names = {"imported": imported, "filename": filename, "name": name}
    assert cells.interrupted(source, **names) == "KeyboardInterrupt"


class SlowSGD(torch.optim.SGD):
    """Its step takes 0.6 s in Python."""

    whole_steps = 0

    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        for _ in range(60):
            time.sleep(0.01)
        self.whole_steps += 1


@pytest.mark.parametrize(
    ("step_timeout", "began_at", "whole_steps"),
    [(10.0, 0.0, 1), (0.2, 0.0, 0), (10.0, math.inf, 0)],
    ids=["whole", "too slow", "with a collective"],
)
def test_an_interrupt_waits_until_a_step_of_an_optimizer_is_complete(
    cells: Cells,
    monkeypatch: pytest.MonkeyPatch,
    step_timeout: float,
    began_at: float,
    whole_steps: int,
) -> None:
    newest = RecordedCollective(Collective("all_reduce", 1), is_in_flight=True, began_at=began_at)
    monkeypatch.setattr(last_step, "newest_collective", lambda: newest)
    monkeypatch.setattr(interrupt, "STEP_TIMEOUT", step_timeout)
    optimizer = SlowSGD([torch.ones(1)])
    assert cells.interrupted("while True: step()", step=optimizer.step) == "KeyboardInterrupt"
    assert optimizer.whole_steps == whole_steps
    assert cells.acknowledged == [1]
    assert cells.aborts == []


def test_forming_a_process_group_is_aborted_before_the_cell(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "GROUP_TIMEOUT", 0.05)
    formed = threading.Event()
    cells.on_break = formed.set
    asked = cells.interrupt_soon(1, after=0.0)
    assert formed.wait(10)  # where the main thread would be stuck
    assert cells.run(1, "pass") == "not begun"
    asked.join()
    assert set(cells.aborts) == {False}


def test_an_interrupt_that_python_discards_is_raised_again(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", complaints.append)
    cells.install_hooks()
    source = (
        "class Slow:\n    def __del__(self):\n        while True: time.sleep(0.01)\n"
        f"Slow()\n{FOREVER}"
    )
    assert cells.interrupted(source) == "KeyboardInterrupt"
    assert complaints == []  # no message shows one of our lines
    broken = "class Broken:\n    def __del__(self): raise ValueError\nBroken()"
    assert cells.run(2, broken) == "done"
    assert len(complaints) == 1


def test_fork_hooks_are_not_interrupted(cells: Cells) -> None:
    ended: list[str] = []
    forks: list[Cells] = [cells]
    others = set(psutil.Process().children())

    def hold() -> None:  # as logging does with its lock: it must release a lock that it has taken
        deadline = time.monotonic() + 0.3
        while forks and time.monotonic() < deadline:
            time.sleep(0.01)
        ended.append("whole")

    forking = threading.Event()
    os.register_at_fork(before=forking.set, after_in_parent=hold)
    cells.install_hooks()

    def interrupt_during_fork() -> None:
        forking.wait(30.0)
        cells.interrupt(1)

    asked = threading.Thread(target=interrupt_during_fork)
    asked.start()
    source = f"if not fork(): leave(0)\n{FOREVER}"
    assert cells.run(1, source, fork=os.fork, leave=os._exit) == "KeyboardInterrupt"
    forks.clear()
    asked.join()
    for child in set(psutil.Process().children()) - others:
        os.waitpid(child.pid, 0)
    assert ended == ["whole"]


def test_cancel_interrupts_only_the_request_with_that_number(cells: Cells) -> None:
    source = compile(f"begin()\n{FOREVER}", CELL, "exec")
    asked = threading.Timer(0.05, cells.cancel, [7])
    with pytest.raises(KeyboardInterrupt), cells.interruptible(7):
        exec(source, {"time": time, "begin": asked.start})
    asked.join()
    with cells.interruptible(8):
        cells.cancel(7)
        exec(compile("time.sleep(0.3)", CELL, "exec"), {"time": time})
    assert cells.run(9, "time.sleep(0.3)") == "done"
    assert not cells.aborts


def test_a_collective_is_not_aborted_in_the_middle_of_a_message(cells: Cells) -> None:
    flows = iter([False, True, True, False])
    abort_counts: list[int] = []

    def flow() -> Iterator[bool]:
        for flowing in flows:
            assert not cells.aborts
            yield flowing

    def leave() -> None:
        abort_counts.append(len(cells.aborts))

    cells.flow, cells.on_break = flow(), leave
    asked = threading.Timer(0.0, cells.cancel, [7])
    with cells.interruptible(7, joins_group=True):
        asked.start()
        while not abort_counts:
            time.sleep(0.01)
    asked.join()
    assert next(flows, None) is None
    assert abort_counts == [1]
