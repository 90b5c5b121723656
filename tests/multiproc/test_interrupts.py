"""An interrupt ends the cell and keeps every name, wherever the ranks are."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from conditions import run_and_act, wait_until_blocked, wait_until_computing, when
from drivers.ranks import Capture, MakeRanks, Ranks, new_launcher
from limits import limits_source, set_limits
from notebook import Notebook, Reply

from nbddp import CellFailedError, CellInterruptedError

pytestmark = pytest.mark.multiproc
SHARES_KERNEL = True

BEGUN = "open(f'begun{rank}', 'w').close()"

# C code that keeps Python's lock, and that no signal ends: it locks a second time
NEVER_RETURNS = (
    "import ctypes\nc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)\n"
    "c.pthread_mutex_init(lock, None)\nc.pthread_mutex_lock(lock)\n"
    f"{BEGUN}\nif rank == 1: c.pthread_mutex_lock(lock)\ndist.barrier()"
)

AFTER = "%%ddp\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(kept, x.item())"


def interrupted(notebook: Notebook, body: str) -> Reply:
    """Run an endless body, and interrupt it when all three ranks run it.

    The body calls ``begin()`` first. Then all ranks wait, or compute if the body is ``pass``.
    """
    begin = "def begin():\n    print('begun', os.getpid())"
    notebook.run(f"%%ddp --nproc 3\nkept = rank\nimport os, time\n{begin}")
    pids = begun(notebook, request := notebook.begin(f"%%ddp\n\n\n{body}"), 3)
    assert wait_until_computing(pids) if "pass" in body else wait_until_blocked(pids)
    notebook.interrupt()
    began = time.monotonic()
    reply = notebook.finish(request)
    reply.seconds = time.monotonic() - began
    return reply


def begun(notebook: Notebook, request: str, nproc: int) -> list[int]:
    """The process ids that all ranks of a cell have printed in the end."""
    reply = notebook.finish(request, until="begun", times=nproc)
    return [int(pid) for pid in re.findall(r"begun (\d+)", reply.text)]


@pytest.mark.gate_runs("python", "waiting", "deadlock", "swallowed")
@pytest.mark.parametrize(
    ("body", "place"),
    [
        ("begin(); time.sleep(60)", "ranks 0-2 interrupted, line 4"),
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
            "pair = dist.new_group([0, 1])\nx = torch.ones(1)\nbegin()\n"
            "if rank == 0: dist.recv(x, src=1, group=pair)\nelse: dist.barrier()",
            r"interrupted in barrier #\d+, line 8",
        ),
        (
            "class Slow:\n    def __del__(self):\n        begin()\n        time.sleep(60)\n"
            "Slow()\ntime.sleep(60)",
            "ranks 0-2 interrupted, line 9",
        ),
        (
            "w = dist.all_reduce(torch.ones(3), async_op=True) if rank else None\n"
            "begin()\nw.wait() if w else time.sleep(60)",
            r"ranks 1-2:? interrupted in all_reduce #\d+, line 6",
        ),
        (
            "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\nbegin()\n"
            "if rank == 0: time.sleep(60)\nmodel(torch.ones(2, 4)).sum().backward()",
            r"ranks 1-2:? interrupted in all_reduce #\d+, line 7",
        ),
    ],
    ids=["sleep", "python", "waiting", "deadlock", "subgroup", "swallowed", "async", "backward"],
)
def test_the_stop_button_ends_the_cell_and_keeps_the_names(
    notebook: Notebook, body: str, place: str
) -> None:
    reply = interrupted(notebook, body)
    assert reply.error.startswith("CellInterruptedError: ")
    assert re.search(place, reply.traceback)
    assert reply.seconds < 20  # the promise is 1 s; a busy machine gets more
    after = notebook.run(AFTER)
    assert [after.lines(rank)[-1:] for rank in range(3)] == [["0 3.0"], ["1 3.0"], ["2 3.0"]]
    assert (" pair: " in after.text) == ("pair" in body)  # it has to be made again


@pytest.mark.full
def test_import_interrupted_halfway_works_in_later_cells(notebook: Notebook) -> None:
    patient = limits_source(import_timeout=90.0)  # a library gets its time on a slow machine
    notebook.run(f"%%ddp --nproc 2\nimport sys, threading, time\n{patient}")
    request = notebook.begin(
        "%%ddp\ndef watch():\n    while 'sympy.polys' not in sys.modules: time.sleep(0.01)\n"
        "    print('half way')\nthreading.Thread(target=watch).start()\n"
        "import torch._dynamo\ntime.sleep(60)"
    )
    notebook.finish(request, until="half way")
    notebook.interrupt()
    assert "interrupted, line " in notebook.finish(request).traceback
    # the first step of an optimizer imports it; half imported, it failed in every later cell
    step = "torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).step()\nprint('stepped')"
    assert notebook.run(f"%%ddp\n{step}").text.count("stepped") == 2


def test_cell_can_catch_the_interrupt_and_a_swallowed_one_is_reported(
    group: Ranks, capsys: Capture
) -> None:
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


@pytest.mark.gate_runs("sum")
@pytest.mark.parametrize(
    "compute",
    [
        "sum(range(2 * 10**8))",
        "import collections, itertools\n"
        "    collections.deque(itertools.repeat(0, 3 * 10**9), maxlen=0)",
    ],
    ids=["sum", "itertools"],
)
def test_interrupt_waits_for_c_code_that_holds_the_gil(
    make_group: MakeRanks, capsys: Capture, compute: str
) -> None:
    group = make_group(2, grace=1.0)
    group.run("kept = rank")
    source = f"{BEGUN}\nif rank == 1:\n    {compute}\ndist.barrier()"
    with pytest.raises(CellInterruptedError):
        run_and_interrupt(group, source, rests=[0])
    assert re.search("nbddp: rank 1 .*GIL.* 59 s", capsys.readouterr().out)
    assert group.pull("kept") == [0, 1]


LOOKS_FOR_SIGNALS = "re.match('(a+)+$', 'a' * 28 + 'b')"  # for minutes, with Python's lock


@pytest.mark.gate_runs("re")
@pytest.mark.parametrize(
    "compute",
    [LOOKS_FOR_SIGNALS, "str(many_digits)", "ctypes.PyDLL(None).sleep(60)"],
    ids=["re", "int", "sleep"],
)
def test_c_code_that_checks_signals_is_interrupted(group: Ranks, compute: str) -> None:
    check_interrupt(group, compute, rests=[0, 1] if "sleep" in compute else [])


@pytest.mark.full
def test_c_code_in_a_spawned_rank_is_interrupted(
    folder: Path,  # noqa: ARG001 - where the run is recorded
) -> None:
    group = Ranks(nproc=2, launcher=new_launcher("spawn"))
    try:
        group.start()
        check_interrupt(group, LOOKS_FOR_SIGNALS)
    finally:
        group.close()


def check_interrupt(group: Ranks, compute: str, *, rests: Sequence[int] = ()) -> None:
    """Interrupt C code on all ranks: the cell does not go on, and every name is kept."""
    group.run(
        "import ctypes, re, sys\nkept, has_gone_on = rank, False\n"
        "if hasattr(sys, 'set_int_max_str_digits'): sys.set_int_max_str_digits(0)\n"
        "many_digits = 3 ** 1_500_000"
    )
    with pytest.raises(CellInterruptedError, match="ranks 0-1 interrupted, line 2"):
        run_and_interrupt(group, f"{BEGUN}\n{compute}\nhas_gone_on = True", rests=rests)
    assert group.pull("kept, has_gone_on") == [(0, False), (1, False)]
    group.run("dist.barrier()")


@pytest.mark.full
def test_rank_with_a_slow_error_report_is_not_killed(make_group: MakeRanks) -> None:
    group = make_group(2, grace=4.0)
    group.run(
        "import time\nkept = rank\nclass Slow(Exception):\n    asked = 0\n"
        "    def __str__(self):\n        self.asked += 1  # first while the cell still runs\n"
        "        time.sleep(6 if self.asked == 2 else 0)\n        return 'slow'"
    )
    source = f"try:\n    {BEGUN}\n    time.sleep(60)\nexcept KeyboardInterrupt:\n"
    with pytest.raises(CellInterruptedError):
        run_and_interrupt(group, f"{source}    raise Slow from None")
    assert group.pull("kept") == [0, 1]


@pytest.mark.full
def test_suspended_notebook_does_not_kill_interrupted_ranks(notebook: Notebook) -> None:
    notebook.run("%%ddp --nproc 2 --grace 3\nimport os, time\nkept = rank")
    request = notebook.begin(
        "%%ddp\ntry:\n    print('begun', os.getpid()); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(7)\n    raise"
    )
    assert wait_until_blocked(begun(notebook, request, 2))
    notebook.interrupt()
    time.sleep(0.03)  # the ranks get the interrupt, and the notebook cannot read their answers
    os.kill(notebook.pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(notebook.pid, signal.SIGCONT)
    reply = notebook.finish(request)
    assert re.search(r"interrupted, line \d", reply.error)
    assert "killed" not in reply.text
    assert "kept 1" in notebook.run("%%ddp --ranks 1\nprint('kept', kept)").text


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
        run_and_act(group, NEVER_RETURNS, lambda said: "interrupt again" in said, group.interrupt)
    pressing.join()
    assert time.monotonic() - began < 30  # without a second interrupt it takes the grace period


def run_and_interrupt(group: Ranks, source: str, *, rests: Sequence[int] | None = None) -> None:
    """Run source, interrupt it when all ranks have begun and wait, and raise the failure.

    A rank whose C code holds the GIL cannot send a message: it creates a file.
    With ``rests`` only these ranks wait, and the others compute.
    """
    pids = group.pids
    resting = [pids[rank] for rank in (pids if rests is None else rests)]
    begun = [Path(f"begun{rank}") for rank in pids]

    def interrupt() -> None:
        assert wait_until_blocked(resting)
        assert wait_until_computing(set(pids.values()) - set(resting))
        group.interrupt()

    pressing = when(lambda: all(map(Path.exists, begun)), interrupt)
    try:
        group.run(source)
    finally:
        pressing.join()


TRAINING = (
    "for _ in range({steps}):\n    optimizer.zero_grad()\n"
    "    model(torch.randn(8, 4)).square().sum().backward()\n    optimizer.step()\n"
)


@pytest.mark.gate_runs("0.37")
@pytest.mark.parametrize("delay", [0.31, 0.37, 0.43])
def test_interrupted_training_continues_with_the_same_model(
    notebook: Notebook, delay: float
) -> None:
    notebook.run(
        "%%ddp --nproc 2\nimport time\ntorch.manual_seed(rank)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)\n"
        "alias = model\nkept = rank"
    )
    request = notebook.begin(f"%%ddp\nprint('begun')\n{TRAINING.format(steps=10**9)}")
    notebook.finish(request, until="begun", times=2)
    time.sleep(delay)  # to interrupt at different points of a step
    notebook.interrupt()
    assert notebook.finish(request).error.startswith("CellInterruptedError")
    reply = notebook.run(
        f"%%ddp --out sums\n{TRAINING.format(steps=20)}"
        "sum(p.double().sum().item() for p in model.parameters())"
    )
    assert reply.status == "ok", reply.traceback
    assert "nbddp: alias, optimizer: " in reply.text
    assert notebook.run("sums[0] == sums[1]").result == "True"


def test_after_a_failure_on_one_rank_models_and_optimizers_agree_again(
    group: Ranks, capsys: Capture
) -> None:
    group.run(
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "if rank == 0:\n    model.module(torch.ones(1, 2)).sum().backward()\n    optimizer.step()"
    )
    group.failure_of(
        "from pathlib import Path\nif rank == 1:\n    while not Path('waits').exists(): pass\n"
        "    raise ValueError('before its first step')\nPath('waits').touch(); dist.barrier()"
    )
    group.run("pass")
    assert "nbddp: model, optimizer: " in capsys.readouterr().out
    one, other = group.pull(
        "[p.tolist() for p in model.parameters()], "
        "{k: float(v['step']) for k, v in optimizer.state_dict()['state'].items()}"
    )
    assert one == other
    assert one[1] == {0: 1.0, 1: 1.0}


def test_signal_between_cells_does_not_run_a_handler_set_by_a_cell(group: Ranks) -> None:
    group.run("import signal\nkept = rank\nsignal.signal(signal.SIGINT, signal.SIG_DFL)")
    for pid in group.pids.values():
        os.kill(pid, signal.SIGINT)
    assert group.pull("kept") == [0, 1]
