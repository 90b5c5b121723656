"""Wait for a condition before a test acts: a running cell, an output, waiting ranks, a hang."""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import psutil
import pytest
from drivers.inside import imported
from drivers.ranks import Ranks
from processes import wait_until

from nbddp import CellInterruptedError
from nbddp.record.cell import CellHandle
from nbddp.worker.process_group import revival

RESTING = 0.2  # seconds in which a blocked thread must not wake
COMPUTING = 0.1  # seconds of CPU time that show new computation
# before slow work in a group with a short timeout
NO_TIMEOUT = (
    f"from datetime import timedelta\n{imported(revival)}"
    "revival.set_timeout(timedelta(minutes=2))\n"
)
BEGUN = "open(f'begun{rank}', 'w').close()"  # in a cell, for run_and_interrupt()
SHORT = 3.0  # seconds without progress that make a hang in a test; 10 for the user


def when(condition: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    def wait_and_act() -> None:
        assert wait_until(condition)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def when_cell_runs(group: Ranks, act: Callable[[], object]) -> threading.Thread:
    return when(lambda: bool(group.ranks_in_cell), act)


def run_and_interrupt(group: Ranks, source: str, *, rests: Sequence[int] | None = None) -> None:
    """Run source, interrupt it when all ranks have begun and wait, and raise the failure.

    A rank whose C code holds the GIL cannot send a message: it creates a file.
    With ``rests`` only these ranks wait, and the others compute.
    """
    pids = group.pids
    resting = [pids[rank] for rank in (pids if rests is None else rests)]
    begun = [Path(f"begun{rank}") for rank in pids]
    for path in begun:
        path.unlink(missing_ok=True)

    def interrupt() -> None:
        assert wait_until_blocked(resting)
        assert wait_until_computing(set(pids.values()) - set(resting))
        group.interrupt()

    pressing = when(lambda: all(map(Path.exists, begun)), interrupt)
    try:
        group.run(source)
    finally:
        pressing.join()


def interrupt_at(group: Ranks, handle: CellHandle, *marks: str) -> None:
    """Interrupt a cell or a script once it has created these files; it ends as interrupted."""
    assert wait_until(lambda: all(Path(mark).exists() for mark in marks))
    group.interrupt()
    with pytest.raises(CellInterruptedError):
        group.finish(handle).raise_for_failure()


def wait_until_blocked(pids: Collection[int]) -> bool:
    return wait_until(lambda: _rest(pids))


def wait_until_computing(pids: Collection[int]) -> bool:
    began = {pid: cpu_time(pid) for pid in pids}
    return wait_until(lambda: all(cpu_time(pid) > began[pid] + COMPUTING for pid in pids))


def cpu_time(pid: int) -> float:
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


def _rest(pids: Collection[int]) -> bool:
    before = [_seen_of_main_thread(pid) for pid in pids]
    time.sleep(RESTING)
    now = [_seen_of_main_thread(pid) for pid in pids]
    return now == before and all(state.startswith("S") for state, *_ in now)


def _seen_of_main_thread(pid: int) -> tuple[str, str, str]:
    lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
    found = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return found["State"], found["voluntary_ctxt_switches"], found["nonvoluntary_ctxt_switches"]


def act_on_alarm(group: Ranks, words: str, act: Callable[[], None]) -> None:
    """Call a function on a thread as soon as the group's alarm contains these words."""
    when(lambda: words in group.snapshot().alarm, act)


def output_of_hang(
    group: Ranks,
    source: str,
    capsys: pytest.CaptureFixture[str],
    after: float = SHORT,
    *,
    ranks: Sequence[int] | None = None,
) -> str:
    group.hang_after(after)
    act_on_alarm(group, "no progress", group.interrupt)
    with pytest.raises(CellInterruptedError):
        group.run(source, ranks=ranks)
    return capsys.readouterr().out
