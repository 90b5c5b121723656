"""An interrupt ends the cell and keeps every name, wherever the ranks are."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from conditions import (
    BEGUN,
    interrupt_at,
    run_and_interrupt,
    wait_until_blocked,
    wait_until_computing,
    when,
)
from drivers.ranks import Capture, MakeRanks, Ranks
from golden.walks import KEEP, assert_ranks_work
from limits import set_limits
from notebook import Notebook, Reply

from nbddp import CellFailedError, CellInterruptedError

SHARES_KERNEL = True

# C code that keeps Python's lock, and that no signal ends: it locks a second time
NEVER_RETURNS = (
    "import ctypes\nc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)\n"
    "c.pthread_mutex_init(lock, None)\nc.pthread_mutex_lock(lock)\n"
    f"{BEGUN}\nif rank == 1: c.pthread_mutex_lock(lock)\ndist.barrier()"
)


def interrupted(notebook: Notebook, body: str) -> Reply:
    """Run an endless body, and interrupt it when all three ranks run it.

    The body calls ``begin()`` first. Then all ranks wait, or compute if the body is ``pass``.
    """
    begin = "def begin():\n    print('begun', os.getpid())"
    notebook.run(f"%%ddp --nproc 3\n{KEEP}\nimport os, time\n{begin}")
    request = notebook.begin(f"%%ddp\n\n\n{body}")
    printed = notebook.finish(request, until="begun", times=3).text
    pids = [int(pid) for pid in re.findall(r"begun (\d+)", printed)]
    assert wait_until_computing(pids) if "pass" in body else wait_until_blocked(pids)
    notebook.interrupt()
    began = time.monotonic()
    reply = notebook.finish(request)
    reply.seconds = time.monotonic() - began
    return reply


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ("begin()\nwhile True: pass", "ranks 0-2 interrupted, line 5"),
        (
            "x = torch.ones(1)\nbegin()\nif rank == 1: time.sleep(60)\ndist.all_reduce(x)",
            r"ranks 0,2:? interrupted in all_reduce #\d+, line 7",
        ),
        (
            "x = torch.ones(1)\nbegin()\n"
            "if rank == 0: dist.recv(x, src=1)\nelse: dist.all_reduce(x)",
            r"rank 0:? interrupted in recv\(src=1, tag=0\), line 6",
        ),
        (
            "class Slow:\n    def __del__(self):\n        begin()\n        time.sleep(60)\n"
            "Slow()\ntime.sleep(60)",
            "ranks 0-2 interrupted, line 9",
        ),
    ],
    ids=["python", "waiting", "deadlock", "swallowed"],
)
def test_stop_button_ends_a_cell_and_keeps_names(notebook: Notebook, body: str, place: str) -> None:
    reply = interrupted(notebook, body)
    assert reply.error.startswith("CellInterruptedError: ")
    assert re.search(place, reply.traceback)
    assert reply.seconds < 20  # the promise is 1 s; a busy machine gets more
    assert_ranks_work(notebook, 3)


def test_cell_can_catch_an_interrupt_and_swallowing_is_told(group: Ranks, capsys: Capture) -> None:
    source = f"import time\ntry:\n    {BEGUN}\n    time.sleep(60)\nexcept KeyboardInterrupt:\n"
    with pytest.raises(CellInterruptedError):
        run_and_interrupt(group, f"{source}    print('cleaned')\n    raise")
    told = capsys.readouterr().out
    assert told.count("cleaned") == 2
    assert "nbddp: " not in told
    run_and_interrupt(group, f"{source}    pass")
    assert "nbddp: the interrupt" in capsys.readouterr().out


def test_c_code_that_never_returns_is_killed_after_the_grace(
    make_group: MakeRanks, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    set_limits(monkeypatch, stuck_after=3.0)  # rank 0 may be slow
    group = make_group(2, grace=6.0)
    group.run("kept = rank")
    with pytest.raises(CellFailedError) as failure:
        run_and_interrupt(group, NEVER_RETURNS)
    waited, killed = re.findall("nbddp: (rank 1 .*)", capsys.readouterr().out)[:2]
    assert "in 3 s" in waited
    assert "in 6 s: killed" in killed
    assert re.fullmatch("rank 1 .*SIGKILL", str(failure.value))
    assert group.run("kept", ranks=[0], wants_value=True).values() == [0]


def test_interrupt_waits_for_c_code_with_the_gil(make_group: MakeRanks, capsys: Capture) -> None:
    group = make_group(2, grace=1.0)
    group.run("kept = rank")
    source = f"{BEGUN}\nif rank == 1: sum(range(2 * 10**8))\ndist.barrier()"
    with pytest.raises(CellInterruptedError):
        run_and_interrupt(group, source, rests=[0])
    assert re.search("nbddp: rank 1 .*GIL.* 59 s", capsys.readouterr().out)
    assert group.pull("kept") == [0, 1]


def test_c_code_that_checks_signals_is_interrupted(group: Ranks) -> None:
    group.run("import re\nkept, has_gone_on = rank, False")
    computes = "re.match('(a+)+$', 'a' * 28 + 'b')"  # for minutes, with Python's lock
    with pytest.raises(CellInterruptedError, match="ranks 0-1 interrupted, line 2"):
        run_and_interrupt(group, f"{BEGUN}\n{computes}\nhas_gone_on = True", rests=[])
    assert group.pull("kept, has_gone_on") == [(0, False), (1, False)]
    group.run("dist.barrier()")


def test_second_interrupt_kills_at_once_after_the_notice(make_group: MakeRanks) -> None:
    group = make_group(2, grace=40.0)
    pids = group.pids
    begun = [Path(f"begun{rank}") for rank in pids]

    def press_twice() -> None:
        assert wait_until_blocked(pids.values())
        group.interrupt()
        group.interrupt()  # no message has announced the effect yet

    pressing = when(lambda: all(map(Path.exists, begun)), press_twice)
    began = time.monotonic()
    with pytest.raises(CellFailedError, match=r"^rank 1 was killed by SIGKILL"):
        group.run_and_act(
            NEVER_RETURNS, lambda output: "interrupt again" in output, group.interrupt
        )
    pressing.join()
    assert time.monotonic() - began < 30  # without a second interrupt it takes the grace period


def test_signal_between_cells_does_not_run_a_handler_set_by_a_cell(group: Ranks) -> None:
    group.run("import signal\nkept = rank\nsignal.signal(signal.SIGINT, signal.SIG_DFL)")
    for pid in group.pids.values():
        os.kill(pid, signal.SIGINT)
    assert group.pull("kept") == [0, 1]


def test_interrupt_ends_an_await_at_once(group: Ranks) -> None:
    source = (
        "import asyncio, pathlib\ntry:\n"
        "    asyncio.get_running_loop().call_later(0.1, pathlib.Path(f'waits{rank}').touch)\n"
        "    await asyncio.sleep(300)\nfinally:\n    cleaned = True"
    )
    group.run("kept, cleaned = rank, False")
    began = time.monotonic()
    interrupt_at(group, group.begin(source), "waits0", "waits1")
    assert time.monotonic() - began < 40  # it takes a second, not 60
    assert group.pull("kept") == [0, 1]
    assert group.pull("cleaned") == [True, True]
    group.run("import asyncio\nawait asyncio.sleep(0)\ndist.barrier()")


def test_objects_of_an_interrupted_cell_are_gone_in_the_next_cell(make_group: MakeRanks) -> None:
    group = make_group(2, init=False)
    group.run("import gc, time, weakref\nclass Big: pass\ngc.disable()")
    source = (
        "def work():\n    global seen\n    big = Big()\n    seen = weakref.ref(big)\n"
        f"    {BEGUN}\n    time.sleep(60)\nwork()"
    )
    with pytest.raises(CellInterruptedError):
        run_and_interrupt(group, source)
    group.run("held = seen() is not None")
    assert group.pull("held") == [False, False]


def test_loader_workers_of_an_interrupted_loop_do_not_delay_the_next_cell(group: Ranks) -> None:
    group.run(
        "import multiprocessing, time\nfrom torch.utils.data import DataLoader, _utils\n"
        "_utils.MP_STATUS_CHECK_INTERVAL *= 10"  # seconds that torch waits for each worker
    )
    # not in a put: of that, an interrupt may lose the next wakeup (CPython's Condition)
    source = f"for each in DataLoader(range(99), num_workers=3):\n    {BEGUN}\n    time.sleep(60)"
    with pytest.raises(CellInterruptedError):
        run_and_interrupt(group, source)
    began = time.monotonic()
    group.run("assert not multiprocessing.active_children()")
    assert time.monotonic() - began < 40  # it was 15 s, and would be 150 s


def test_persistent_workers_survive_an_interrupt_at_the_start_of_an_epoch(group: Ranks) -> None:
    group.run(
        "import os, signal\nfrom torch.utils.data import DataLoader\n"
        "loader = DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True)\n"
        "assert len(list(loader)) == 4\n"
        "workers = [each.pid for each in loader._iterator._workers]"
    )
    source = (  # one worker answers too late
        f"os.kill(workers[1], signal.SIGSTOP)\n{BEGUN}\n"
        "try: list(loader)\nfinally: os.kill(workers[1], signal.SIGCONT)"
    )
    with pytest.raises(CellInterruptedError):
        run_and_interrupt(group, source)
    group.run(
        "for _ in range(3):\n"
        "    assert [each.tolist() for each in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]"
    )
