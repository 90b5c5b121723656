"""A cell in which nothing moves says who waits where, and goes on waiting."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest
from drivers.ranks import Ranks
from hangs import NO_TIMEOUT, SHORT, act_when_said, said_of_a_hang
from limits import limit, set_limits
from moments import run_and_act, when_cell_runs

from nbddp import CellFailedError, CellInterruptedError, RequestError

pytestmark = pytest.mark.multiproc


def test_mismatched_collectives_and_a_rank_that_never_came_are_shown(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(3)
    source = (
        "import time\nx = torch.ones(4)\nif rank == 0:\n    dist.all_reduce(x)\n"
        "elif rank == 1:\n    dist.broadcast(x, src=2)\nelse:\n    time.sleep(80)"
    )
    assert said_of_a_hang(group, source, capsys, after=limit("hang_after")).splitlines()[:5] == [
        "nbddp: no progress for 10 s: rank 0 called all_reduce #1, rank 1 broadcast #1, "
        "rank 2 never came",
        "  rank 0 waiting in all_reduce #1 float [4], line 4",
        "  rank 1 waiting in broadcast #1 float [4], line 6",
        "  rank 2 never came: line 8",
        "  the cell goes on waiting; interrupt it to end it and keep all names",
    ]
    group.run("dist.barrier()")


def test_a_rank_that_returned_early_is_shown(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(3)
    source = "def step(x):\n    dist.all_reduce(x)\nif rank < 2: step(torch.ones(2, 2))"
    text = said_of_a_hang(group, source, capsys)
    assert "  ranks 0-1 waiting in all_reduce #1 float [2, 2], line 2\n" in text
    assert "  rank 2 done with the cell: will not come\n" in text


LOADER = "next(iter(torch.utils.data.DataLoader(Stuck(), num_workers=1)))"
STUCK = "class Stuck(torch.utils.data.Dataset):\n    def __len__(self): return 4\n"
WAKES = {
    "a loader whose sample cannot be pickled": (
        f"{STUCK}    def __getitem__(self, index): return threading.Lock()\n"
        f"if rank == 1: {LOADER.replace('Stuck()', 'Stuck(), collate_fn=list')}"
    ),
    "a loader whose worker sleeps": (
        f"{STUCK}    def __getitem__(self, index): time.sleep(900)\nif rank == 1: {LOADER}"
    ),
    "a loader whose worker was forked with a lock": (
        f"lock = threading.Lock()\n{STUCK}    def __getitem__(self, index): lock.acquire()\n"
        f"lock.acquire()\nif rank == 1: {LOADER}"
    ),
    "a command": "if rank == 1:\n    !sleep 900",
    "a process with a timeout": "if rank == 1: subprocess.run(['sleep', '900'], timeout=900)",
    "a lock that is asked for": (
        "lock = filelock.FileLock('lock')\nif rank == 0: lock.acquire()\n"
        "dist.barrier()\nif rank == 1: lock.acquire()"
    ),
}


@pytest.mark.gate_runs("a command", "a loader whose worker sleeps")
@pytest.mark.parametrize("source", WAKES.values(), ids=WAKES)
def test_a_rank_that_waits_in_a_call_that_wakes_by_itself_is_shown(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str], source: str
) -> None:
    group = make_group(2)
    source = f"import filelock, subprocess, threading, time\n{source}\ndist.barrier()"
    text = said_of_a_hang(
        group, source, capsys, after=limit("hang_after")
    )  # a loader wakes every 5 s
    assert re.search(r"rank 0 called barrier #\d+, rank 1 never came\n", text)
    assert re.search(r"  rank 1 never came: line \d+ in \w+\(\)\n", text)
    group.run("dist.barrier()")


def test_a_rank_that_is_stopped_is_named_and_kill_works(
    group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    os.kill(group.pids[1], signal.SIGSTOP)
    act_when_said(group, "no sign of life", lambda: group.kill(1))
    with pytest.raises(CellFailedError, match=r"^rank 1 was killed by SIGKILL"):
        group.run("dist.barrier()")
    text = capsys.readouterr().out
    said = "no sign of life from rank 1: stopped (SIGSTOP); `%ddp kill 1` ends it"
    assert re.findall(r"no sign.*", text) == [said]


def test_a_pull_from_a_rank_that_dies_comes_back(group: Ranks) -> None:
    with pytest.raises(RequestError, match="rank 1 exited with code 3 before it could answer; "):
        group.pull("__import__('os')._exit(3) if rank == 1 else 0")
    assert group.pull("rank", rank=0) == 0


def test_a_full_disk_is_said_once_and_training_goes_on(
    group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    group.run("print('fits')")
    group.run(
        "import resource\n_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))  # a file of 6 bytes is full\n"
        "for i in range(100): print('too much')\nx = torch.ones(1)\ndist.all_reduce(x)"
    )
    text = capsys.readouterr().out
    assert len(re.findall("what this rank prints is lost from here on", text)) == 2
    assert group.pull("x.item()") == [2.0, 2.0]


def test_a_run_folder_that_cannot_be_written_is_said_once_and_the_ranks_start(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    with open(".nbddp", "w"):  # noqa: PTH123 - a file where the folder should be
        pass
    group = make_group(1)
    group.run("print('works')")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("nbddp: ")
    assert "cannot be written" in lines[0]
    assert lines[1:] == ["[rank 0] works"]


TIMEOUT = 4.0  # seconds, of groups in which a rank may stand still for shorter
TIMEOUTS = {
    "other sizes": "dist.all_reduce(torch.ones(2 if rank == 1 else 4))",
    "a late rank": "import time\nif rank == 1: time.sleep(60)\ndist.barrier()",
    "a late backward": (
        "import time\nmodel = nbddp.prepare(torch.nn.Linear(4, 1))\n"
        "loss = model(torch.ones(1, 4).to(device)).sum()\n"
        "if rank == 1: time.sleep(60)\nloss.backward()"
    ),
}


THREAD = """import threading
def meet():
    dist.all_reduce(torch.ones(3))
if rank == 0:
    thread = threading.Thread(target=meet)
    thread.start()
    thread.join()"""
SAVE = """import torch.distributed.checkpoint as dcp
saved = dcp.async_save({"x": torch.ones(1)}, checkpoint_id="saved")
if rank == 0:
    dist.barrier()
saved.result()"""
ASYNC = """import asyncio
async def read():
    await asyncio.sleep(100)
if rank == 0: dist.barrier()
else:
    asyncio.run(read())"""
OPEN = """import os
if rank == 1:
    os.mkfifo("fifo"); open("fifo")
dist.barrier()"""
PLACES = {
    "thread": (
        THREAD,
        "rank 0 waiting in all_reduce #1 float [3] in a background thread (line 3); "
        "the main thread is at line 7 in join()",
    ),
    "async_save": (
        SAVE,
        "rank 1 waiting in all_gather #1 long [1] in a background thread; "
        "the main thread is at line 5 in result()",
    ),
    "both threads": (SAVE, "rank 0 waiting in barrier #1, line 4"),
    "await": (
        "import asyncio\nif rank == 0: dist.barrier()\nelse:\n    await asyncio.sleep(100)",
        "rank 1 never came: line 4 in sleep()",
    ),
    "asyncio.run": (ASYNC, "rank 1 never came: line 3 in sleep()"),
    "open": (OPEN, "rank 1 never came: line 3 in open()"),
}


@pytest.mark.gate_runs("both threads", "await")
@pytest.mark.parametrize("case", PLACES)
def test_the_card_names_the_thread_and_the_line_that_wait(
    group: Ranks, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    source, place = PLACES[case]
    assert f"  {place}\n" in said_of_a_hang(group, source, capsys)


def test_an_interrupt_names_the_collective_of_the_main_thread(group: Ranks) -> None:
    group.hang_after(SHORT)
    act_when_said(group, "all_gather", group.interrupt)
    with pytest.raises(CellInterruptedError) as caught:
        group.run(SAVE)
    assert "rank 0: interrupted in barrier #1, line 4" in caught.value.report


@pytest.mark.parametrize("source", TIMEOUTS.values(), ids=TIMEOUTS)
def test_after_a_timeout_the_next_cell_has_a_new_process_group(
    make_group: Callable[..., Ranks], source: str
) -> None:
    group = make_group(2, timeout=TIMEOUT)
    with pytest.raises(CellFailedError):
        group.run(source)
    group.run(f"{NO_TIMEOUT}x = torch.ones(1)\ndist.all_reduce(x)")
    assert group.pull("x.item()") == [2.0, 2.0]


def test_the_rank_that_hangs_is_named_and_not_the_one_that_waited_for_it(
    make_group: Callable[..., Ranks],
) -> None:
    group = make_group(2, timeout=TIMEOUT)
    with pytest.raises(CellFailedError) as caught:
        group.run("import time\nif rank == 1: time.sleep(60)\ndist.all_reduce(torch.ones(1))")
    report = caught.value.report
    assert str(caught.value) == "rank 1 did not come to all_reduce #1: it was in line 2"
    assert re.search(r"rank 0: RuntimeError: Timed out waiting .* \(a consequence\)", report)
    assert "time.sleep(60)" in report
    assert "interrupt.py" not in report, "the traceback shows the cell, and not who interrupted it"


ABSENT = "from datetime import timedelta\nimport time\nshort = timedelta(seconds=2)\n"
OWN_TIMEOUTS = {
    "monitored_barrier": (
        "if rank == 1: time.sleep(60)\ndist.monitored_barrier(timeout=short, wait_all_ranks=True)",
        "line 4",
    ),
    "init_process_group": (
        "dist.destroy_process_group()\nif rank == 1: time.sleep(60)\n"
        "dist.init_process_group('gloo', timeout=short)",
        "line 5",
    ),
    "all_reduce #1 of group [0, 1, 2]": (
        "own = dist.new_group(timeout=short)\nif rank == 1: time.sleep(60)\n"
        "dist.all_reduce(torch.ones(1), group=own)",
        "line 5",
    ),
    "recv(src=1, tag=5) of group [0, 1]": (
        "own = dist.new_group([0, 1], timeout=short)\nif rank: time.sleep(60)\n"
        "dist.recv(torch.ones(1), src=1, tag=5, group=own)",
        "line 5",
    ),
}


@pytest.mark.gate_runs("all_reduce", "monitored")
@pytest.mark.parametrize("call", OWN_TIMEOUTS)
def test_so_is_it_where_the_timeout_is_that_of_the_call_or_of_its_group(
    make_group: Callable[..., Ranks], call: str
) -> None:
    group = make_group(3)
    source, place = OWN_TIMEOUTS[call]
    with pytest.raises(CellFailedError) as caught:
        group.run(ABSENT + source)
    assert str(caught.value) == f"rank 1 did not come to {call}: it was in {place}"
    group.run("dist.barrier()")


def test_so_is_it_where_the_rank_has_ended_the_cell(make_group: Callable[..., Ranks]) -> None:
    group = make_group(3)
    with pytest.raises(CellFailedError) as caught:
        group.run(
            f"{ABSENT}own = dist.new_group([0, 1], timeout=short)\n"
            "if rank == 0: dist.all_reduce(torch.ones(1), group=own)"
        )
    call = "all_reduce #1 of group [0, 1]"
    assert str(caught.value) == f"rank 1 did not come to {call}: it had already finished the cell"
    group.run("dist.barrier()")


def test_who_came_with_another_size_and_went_on_is_not_called_absent(
    make_group: Callable[..., Ranks],
) -> None:
    group = make_group(2, timeout=TIMEOUT)
    with pytest.raises(CellFailedError, match="rank 0: RuntimeError: Timed out waiting"):
        group.run("import time\ndist.all_reduce(torch.ones(2 if rank == 1 else 4))\ntime.sleep(60)")


def test_torch_compares_the_calls_of_all_ranks_when_it_is_told_to(
    make_group: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    with pytest.raises(CellFailedError, match="mismatch between collectives"):
        group.run("dist.all_reduce(torch.ones(2 if rank == 1 else 4))")
    group.run("dist.barrier()")
    assert "Warning" not in capsys.readouterr().out


def test_an_interrupt_says_of_a_rank_that_was_stopped_that_it_is_and_what_wakes_it(
    make_group: Callable[..., Ranks],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_limits(monkeypatch, stuck_after=3.0)  # rank 0 may be slow
    group = make_group(2, grace=12.0)
    pid = group.pids[1]
    os.kill(pid, signal.SIGSTOP)
    when_cell_runs(group, group.interrupt)
    with pytest.raises(CellInterruptedError):
        run_and_act(
            group,
            "import time\ntime.sleep(60)",
            lambda said: "stopped by SIGSTOP" in said,
            lambda: os.kill(pid, signal.SIGCONT),
        )
    text = capsys.readouterr().out
    stopped = f"nbddp: rank 1 stopped by SIGSTOP (`kill -CONT {pid}` wakes)"
    assert f"{stopped}; will be killed in 9 s, or" in text
    assert group.alive == [0, 1]


def test_output_that_a_cell_closed_is_said_to_be_lost_until_its_end_and_is(
    group: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    group.run("import os\nif rank == 0: os.close(1)\nprint('not seen' if rank == 0 else 'seen')")
    text = capsys.readouterr().out
    lost = "what this rank prints is lost until its cell ends: it closed its own output"
    assert text.count(lost) == 1
    assert ("[rank 1] seen" in text, "not seen" in text) == (True, False)
    group.run("print('seen again')")
    assert capsys.readouterr().out.count("seen again") == 2
