"""Moments at which tests act, as facts: a cell runs, words were said, ranks rest or hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from drivers.inside import imported
from drivers.ranks import Ranks
from processes import wait_until

from nbddp import CellInterruptedError
from nbddp.child_processes import cpu_time
from nbddp.worker.process_group import process_group

RESTING = 0.2  # seconds in which who has come to rest does not wake
COMPUTING = 0.1  # seconds of CPU that take whoever computes past what it did before
# before what may take its time in a group that has a short timeout
NO_TIMEOUT = (
    f"from datetime import timedelta\n{imported(process_group)}"
    "process_group.set_timeout(timedelta(minutes=2))\n"
)
SHORT = 3.0  # seconds without progress that make a hang in a test; 10 for the user


def when(condition: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    """Do something, on a thread, as soon as something is so."""

    def wait_and_act() -> None:
        assert wait_until(condition)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def when_cell_runs(group: Ranks, act: Callable[[], object]) -> threading.Thread:
    """Do something, on a thread, as soon as the ranks have a cell."""
    return when(lambda: group.has_cell, act)


def run_and_act(
    group: Ranks,
    source: str,
    wanted: Callable[[str], bool],
    act: Callable[[], object],
) -> None:
    """Run a cell, do something once when what it has said is what is wanted; raise its failure."""

    has_acted = False

    def watch(said: str) -> None:
        nonlocal has_acted
        if not has_acted and wanted(said):
            has_acted = True
            act()

    group.run_and_watch(source, watch)


def come_to_rest(pids: Collection[int]) -> bool:
    """Wait until the main thread of each process waits for something; whether it came to that."""
    return wait_until(lambda: _rest(pids))


def are_computing(pids: Collection[int]) -> bool:
    """Wait until each process has computed for a moment from now on; whether it came to that."""
    began = {pid: cpu_time(pid) for pid in pids}
    return wait_until(lambda: all(cpu_time(pid) > began[pid] + COMPUTING for pid in pids))


def _rest(pids: Collection[int]) -> bool:
    before = [_seen_of_main_thread(pid) for pid in pids]
    time.sleep(RESTING)
    now = [_seen_of_main_thread(pid) for pid in pids]
    return now == before and all(state.startswith("S") for state, *_ in now)


def _seen_of_main_thread(pid: int) -> tuple[str, str, str]:
    """Its state, and how often it went to sleep and was put to sleep."""
    lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
    found = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return found["State"], found["voluntary_ctxt_switches"], found["nonvoluntary_ctxt_switches"]


def act_when_said(group: Ranks, words: str, act: Callable[[], None]) -> None:
    """Do something as soon as the group's alarm says these words."""

    def wait_and_act() -> None:
        wait_until(lambda: words in group.snapshot().alarm, timeout=60.0)
        act()  # said or not: the cell has to end

    threading.Thread(target=wait_and_act).start()


def said_of_a_hang(
    group: Ranks, source: str, capsys: pytest.CaptureFixture[str], after: float = SHORT
) -> str:
    """What is printed for a cell in which nothing moves, until it is interrupted."""
    group.hang_after(after)
    act_when_said(group, "no progress", group.interrupt)
    with pytest.raises(CellInterruptedError):
        group.run(source)
    return capsys.readouterr().out
