"""A hang is reported with waiting and missing ranks; slow progress is no hang."""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator

import pytest
from conditions import NO_TIMEOUT, SHORT, act_on_alarm, output_of_hang, when_cell_runs
from drivers.ranks import Capture, MakeRanks, Ranks
from limits import limit, set_limits
from multiproc.long_work import waits_for, works
from processes import wait_until

from nbddp import CellInterruptedError, RequestError


def test_hang_card_shows_mismatch_and_absent_ranks(make_group: MakeRanks, capsys: Capture) -> None:
    source = (
        "import time\nx = torch.ones(4)\nif rank == 0:\n    dist.all_reduce(x)\n"
        "elif rank == 1:\n    dist.broadcast(x, src=2)\nelif rank == 2:\n    time.sleep(80)"
    )
    group = make_group(4)
    text = output_of_hang(group, source, capsys)
    for line in (
        "nbddp: .* 3 s: rank 0 .*all_reduce #1, rank 1 .*broadcast #1, rank 2 .*, rank 3 ",
        r"  rank 0 .*all_reduce #1 float \[4\], line 4$",
        r"  rank 1 .*broadcast #1 float \[4\], line 6$",
        "  rank 2 .*: line 8$",
        "  rank 3 done",
    ):
        assert re.search(f"^{line}", text, re.MULTILINE), text
    group.assert_works()


SAVE = """import torch.distributed.checkpoint as dcp
saved = dcp.async_save({"x": torch.ones(1)}, checkpoint_id="saved")
if rank == 0:
    dist.barrier()
saved.result()"""
HANGS = {  # each with the place of a rank that waits
    "new_group": ("if rank == 0:\n    dist.new_group([0, 1])", r"rank 0 .*\bnew_group, line 2"),
    "tags": (
        "x = torch.ones(1)\nif rank: dist.send(x, 0, tag=6)\nelse: dist.recv(x, tag=5, src=1)",
        r"nbddp: .*: rank 0 .*\brecv\(src=1, tag=5\), rank 1 .*\bsend\(dst=0, tag=6\)",
    ),
    "store": (
        "store = dist.distributed_c10d._get_default_store()\nif rank == 0:\n    store.get('never')",
        r"rank 0 .*\bstore\.get\('never'\), line 3",
    ),
    "thread": (
        "import threading\ndef meet():\n    dist.all_reduce(torch.ones(3))\nif rank == 0:\n"
        "    thread = threading.Thread(target=meet)\n    thread.start()\n    thread.join()",
        r"rank 0 .*all_reduce #1 float \[3\].*thread \(line 3\).*main thread.* line 7 in join\(\)",
    ),
    # collectives of the other thread may be the first
    "both threads": (SAVE, "rank 0 .*barrier #[123], line 4"),
    "await": (
        "import asyncio\nif rank == 0: dist.barrier()\nelse:\n    await asyncio.sleep(100)",
        r"rank 1 .*: line 4 in sleep\(\)",
    ),
    "open": (
        "import os\nif rank == 1:\n    os.mkfifo('fifo'); open('fifo')\ndist.barrier()",
        r"rank 1 .*: line 3 in open\(\)",
    ),
    "a queue that stays empty": (
        "import queue\ndef ask(items):\n    try: items.get(timeout=0.3)\n"
        "    except queue.Empty: pass\nitems = queue.Queue()\nwhile rank == 1: ask(items)\n"
        "dist.barrier()",
        r"rank 1 .*: line 3 in get\(\)",
    ),
}
POLLS = {  # calls that wake up again and again
    "a loader whose worker sleeps": (
        "class Stuck(torch.utils.data.Dataset):\n    def __len__(self): return 4\n"
        "    def __getitem__(self, index): time.sleep(900)\n"
        "if rank == 1: next(iter(torch.utils.data.DataLoader(Stuck(), num_workers=1)))"
    ),
    "a command": "if rank == 1:\n    !sleep 900",
    "a lock that is asked for": (
        "lock = filelock.FileLock('lock')\nif rank == 0: lock.acquire()\n"
        "dist.barrier()\nif rank == 1: lock.acquire()"
    ),
}
HANGS |= {
    name: (f"import filelock, time\n{call}\ndist.barrier()", r"rank 1 .*: line \d+ in \w+\(\)")
    for name, call in POLLS.items()
}


@pytest.mark.gate_runs("new_group", "tags", "store", "both threads", "await", "a queue")
@pytest.mark.parametrize("name", HANGS)
def test_hang_card_shows_where_a_rank_waits(group: Ranks, capsys: Capture, name: str) -> None:
    source, place = HANGS[name]
    group.run("kept = rank")
    after = limit("hang_after") if name in POLLS else SHORT  # a loader wakes every 5 s
    text = output_of_hang(group, source, capsys, after)
    assert re.search(f"^ *{place}$", text, re.MULTILINE), text
    group.assert_works()
    assert group.pull("kept") == [0, 1]


def test_hang_card_names_the_ranks_outside_of_the_cell(group: Ranks, capsys: Capture) -> None:
    text = output_of_hang(group, "dist.barrier()", capsys, ranks=[0])
    assert re.search("^  rank 1 not in this cell", text, re.MULTILINE), text
    group.assert_works()


def test_a_hang_in_a_replay_is_shown_with_its_cell(group: Ranks, capsys: Capture) -> None:
    group.run("import os\nif rank == 1 and os.path.exists('fifo'): open('fifo')\ndist.barrier()")
    os.mkfifo("fifo")
    group.hang_after(SHORT)
    act_on_alarm(group, "no progress", lambda: os.close(os.open("fifo", os.O_WRONLY)))
    group.replay(group.replay_log)
    assert re.search(r"^nbddp: cell \[\d+\], run again: no progress", capsys.readouterr().out)


def test_an_interrupt_names_the_collective_of_the_main_thread(group: Ranks) -> None:
    group.hang_after(SHORT)
    act_on_alarm(group, "gather", group.interrupt)  # its all_gather, or the gather after it
    with pytest.raises(CellInterruptedError) as caught:
        group.run(SAVE)
    assert re.search("rank 0: .*barrier #[12], line 4", caught.value.report)


def test_rank_stopped_by_a_signal_is_named_and_can_be_killed(group: Ranks, capsys: Capture) -> None:
    pid = group.pids[1]
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: f"`kill -CONT {pid}`" in group.snapshot().ranks[1].state)
    act_on_alarm(group, "SIGSTOP", lambda: group.kill(1))
    assert re.match("rank 1 was killed by you", str(group.failure_of("dist.barrier()")))
    told = [line for line in capsys.readouterr().out.splitlines() if "SIGSTOP" in line]
    assert len(told) == 1
    assert re.search(r"rank 1: .*`group.kill\(1\)`", told[0])


def test_pull_from_a_dying_rank_returns(group: Ranks) -> None:
    with pytest.raises(RequestError, match=r"rank 1 .*\b3\b.*`group.heal\(\)`"):
        group.pull("__import__('os')._exit(3) if rank == 1 else 0")
    assert group.pull("rank", rank=0) == 0


# ---- output that cannot be recorded


TOLD = re.compile(r"^\[rank (\d)\] nbddp: ", re.MULTILINE)


def test_full_disk_is_told_once_per_cell_and_stops_nothing(group: Ranks, capsys: Capture) -> None:
    group.run("print('fits')")
    group.run(
        "import resource\n_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))  # a file of 6 bytes is full\n"
        "for i in range(100): print('too much')\nx = torch.ones(1)\ndist.all_reduce(x)"
    )
    assert sorted(TOLD.findall(capsys.readouterr().out)) == ["0", "1"]
    assert group.pull("x.item()") == [2.0, 2.0]
    group.run("print('still too much', end='')")
    assert sorted(TOLD.findall(capsys.readouterr().out)) == ["0", "1"]


# ---- timeouts

TIMEOUT = 4.0  # seconds; ranks can be blocked for a shorter time


@pytest.fixture
def hasty_group(make_group: MakeRanks) -> Iterator[Ranks]:
    """Two ranks with a short timeout, which work after the test."""
    group = make_group(2, timeout=TIMEOUT)
    yield group
    group.run(NO_TIMEOUT, quiet=True)
    group.assert_works()


def test_timeout_blames_the_hanging_rank_not_the_waiting_rank(hasty_group: Ranks) -> None:
    error = hasty_group.failure_of("import time\nif rank == 1: time.sleep(60)\ndist.barrier()")
    assert re.match("rank 1 .*barrier #1.* line 2$", str(error))
    assert re.search(
        r"rank 0: RuntimeError: Timed out waiting .* \(a consequence of rank 1\)", error.report
    )
    assert "time.sleep(60)" in error.report
    assert "interrupt.py" not in error.report, "the traceback shows the cell alone"
    error = hasty_group.failure_of("if rank: dist.barrier()\nelse: dist.all_reduce(torch.ones(1))")
    calls = r"rank 0 called all_reduce #(\d+), rank 1 barrier #\1"
    assert re.match(rf"{calls}; rank \d: RuntimeError: Timed out waiting", str(error)), error


@pytest.mark.full
def test_timeout_in_backward_fails_only_its_cell(hasty_group: Ranks) -> None:
    hasty_group.failure_of(
        "import time\nmodel = nbddp.prepare(torch.nn.Linear(4, 1))\n"
        "loss = model(torch.ones(1, 4).to(device)).sum()\n"
        "if rank == 1: time.sleep(60)\nloss.backward()"
    )


def test_rank_with_a_mismatched_size_is_not_reported_as_absent(hasty_group: Ranks) -> None:
    source = "import time\ndist.all_reduce(torch.ones(2 if rank == 1 else 4))\ntime.sleep(60)"
    assert "rank 0: RuntimeError: Timed out waiting" in str(hasty_group.failure_of(source))


def test_timeout_applies_to_a_receive(hasty_group: Ranks) -> None:
    source = "import time\nif rank: time.sleep(60)\nelse: dist.recv(torch.ones(1), src=1)"
    began = time.monotonic()
    error = hasty_group.failure_of(source)
    assert re.search("rank 0: .*[Tt]imed out waiting 4000ms", error.report)
    assert time.monotonic() - began < 30  # the group was made with 60


ABSENT = "from datetime import timedelta\nimport time\nshort = timedelta(seconds=2)\n"
OWN_TIMEOUTS = {
    "monitored_barrier": (
        "if rank == 1: time.sleep(60)\ndist.monitored_barrier(timeout=short, wait_all_ranks=True)",
        "line 4",
    ),
    "all_reduce #1 of group [0, 1, 2]": (
        "own = dist.new_group(timeout=short)\nif rank == 1: time.sleep(60)\n"
        "dist.all_reduce(torch.ones(1), group=own)",
        "line 5",
    ),
    "all_reduce #1 of group [0, 1]": (
        "own = dist.new_group([0, 1], timeout=short)\n"
        "if rank == 0: dist.all_reduce(torch.ones(1), group=own)",
        "finished the cell",
    ),
    "all_reduce #1": (  # torch says only "Operation timed out!", and no name
        "if rank == 1: time.sleep(60)\ndist.all_reduce(torch.ones(1), async_op=True).wait(short)",
        "line 4",
    ),
    "dist.irecv(torch.ones(1), src=1).wait(short)": (
        "if rank == 1: time.sleep(60)\nif rank == 0: dist.irecv(torch.ones(1), src=1).wait(short)",
        "line 4",
    ),
}


@pytest.mark.parametrize("call", OWN_TIMEOUTS)
def test_timeout_of_one_call_or_group_blames_absent_ranks(make_group: MakeRanks, call: str) -> None:
    group = make_group(3)
    source, place = OWN_TIMEOUTS[call]
    error = str(group.failure_of(ABSENT + source))
    assert re.match(rf"rank 1 .* {re.escape(call)}: .*{place}$", error), error
    group.assert_works()


def test_debug_detail_names_mismatched_collectives(make_group: MakeRanks, capsys: Capture) -> None:
    group = make_group(2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    error = group.failure_of("dist.all_reduce(torch.ones(2 if rank == 1 else 4))")
    assert "mismatch between collectives" in str(error)
    group.assert_works()
    assert "Warning" not in capsys.readouterr().out


def test_interrupt_reports_a_sigstopped_rank_and_how_to_continue_it(
    make_group: MakeRanks, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    set_limits(monkeypatch, stuck_after=3.0)  # rank 0 may be slow
    group = make_group(2, grace=12.0)
    pid = group.pids[1]
    os.kill(pid, signal.SIGSTOP)
    when_cell_runs(group, group.interrupt)
    with pytest.raises(CellInterruptedError):
        group.run_and_act(
            "import time\ntime.sleep(60)",
            lambda output: "SIGSTOP" in output,
            lambda: os.kill(pid, signal.SIGCONT),
        )
    text = capsys.readouterr().out
    assert re.search(rf"^nbddp: rank 1 .*SIGSTOP.*`kill -CONT {pid}`.* 9 s", text, re.MULTILINE)
    assert group.alive == [0, 1]


WORK = 2.3 * SHORT
WORKS = works(WORK)
QUICK = [name for name in WORKS if name != "torch.compile"]
COMPILES = pytest.param(
    "torch.compile",
    marks=[
        pytest.mark.timeout(300),  # the compiler alone takes 40 s of a core
        pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
    ],
)


@pytest.mark.gate_runs("one call of C", "beside", "into a pipe", "a thread that prints", "lock")
@pytest.mark.parametrize("name", [*QUICK, COMPILES])
def test_working_rank_is_not_reported_as_a_hang(
    make_group: MakeRanks, capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "Python's lock":  # then no heartbeat is sent
        set_limits(monkeypatch, rank_silent_after=SHORT)
    group = make_group(2)
    group.hang_after(7.0 if name == "a loader" else SHORT)  # torch looks at its workers every 5 s
    group.run(waits_for(WORKS[name], WORK))
    assert re.findall("nbddp:.*", capsys.readouterr().out) == []


@pytest.mark.full
def test_rendezvous_with_missing_ranks_is_explained(make_group: MakeRanks, capsys: Capture) -> None:
    group = make_group(2, init=False)
    group.run("kept = rank")
    text = output_of_hang(group, "if rank == 0:\n    dist.init_process_group()", capsys)
    assert re.search(r"rank 0 .*\binit_process_group, line 2$", text, re.MULTILINE)
    group.run("pass")
    assert group.pull("kept") == [0, 1]
