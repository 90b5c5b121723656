"""Processes and threads of a cell end with its rank and do not delay it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from drivers.ranks import Capture, MakeRanks, Ranks, new_launcher
from local_nodes import all_ended, is_process_running
from notebook import Notebook
from processes import wait_until

SHARES_KERNEL = True

GRACE = 40.0  # seconds: long enough that a wait for it is noticed
IMPORTS = (
    "import atexit, multiprocessing, os, pathlib, signal, subprocess, sys, threading, time\n"
    "from concurrent.futures import ThreadPoolExecutor\n"
)
CHILDREN = {
    "process": "multiprocessing.Process(target=time.sleep, args=(600,)).start()",
    "own session": "subprocess.Popen(['sleep', '600'], start_new_session=True)",
    "deaf": "subprocess.Popen(['sh', '-c', 'trap \"\" TERM; echo; while :; do sleep 99; done'],"
    " stdout=subprocess.PIPE).stdout.read(1)",
    "daemon": "subprocess.run(['sh', '-c', 'setsid sleep 600 & echo'], stdout=subprocess.DEVNULL)",
    "daemon of a daemon": "subprocess.run(['sh', '-c', 'setsid sh -c \"sleep 600 & sleep 601\" &'],"
    " stdout=subprocess.DEVNULL)",
    "a loader's worker": "from torch.utils.data import DataLoader\n"
    "from torch.utils.data._utils import worker\n"
    # seconds after which a worker notices that its rank has ended
    "worker.MP_STATUS_CHECK_INTERVAL = 600.0\n"
    "it = iter(DataLoader(range(99), num_workers=1, persistent_workers=True)); next(it)",
}
ALL_CHILDREN = "\n".join(CHILDREN.values())
STARTED = 8  # at least so many processes
THREADS = {
    "thread": "threading.Thread(target=time.sleep, args=(600,)).start()",
    "executor": "ThreadPoolExecutor().submit(time.sleep, 600)",
    "collective": "wait = lambda: rank or dist.recv(torch.ones(1), src=1)\n"
    "threading.Thread(target=wait).start()",
    "printing": "def talk():\n    step = 0\n    while True:\n        print('on and on')\n"
    "        nbddp.log(step=(step := step + 1), loss=1.0)\n        time.sleep(0.001)\n"
    "threading.Thread(target=talk).start()",
}


def started_by(rank_pid: int, expected: int = STARTED) -> list[psutil.Process]:
    """Return the child processes of a rank, once they have started."""
    rank = psutil.Process(rank_pid)
    assert wait_until(lambda: len(rank.children(recursive=True)) >= expected)
    return rank.children(recursive=True)


@pytest.fixture
def patient(make_group: MakeRanks) -> Ranks:
    """Return two ranks with a long grace period."""
    return make_group(2, grace=GRACE)


@pytest.mark.parametrize("how", ["stop", "restart"])
def test_processes_and_threads_of_a_cell_end_with_the_ranks(patient: Ranks, how: str) -> None:
    patient.run(IMPORTS + "\n".join([ALL_CHILDREN, *THREADS.values()]), quiet=True)
    started = [each for pid in patient.pids.values() for each in started_by(pid)]
    began = time.monotonic()
    getattr(patient, how)()
    assert time.monotonic() - began < GRACE / 2
    assert not any(map(is_process_running, started))
    if how == "restart":
        patient.run("assert 'time' not in globals()\ndist.barrier()")


def test_child_processes_end_only_with_their_own_rank(patient: Ranks) -> None:
    patient.run(IMPORTS + ALL_CHILDREN, quiet=True)
    spared, lost = (started_by(pid) for pid in patient.pids.values())
    os.kill(patient.pids[1], signal.SIGKILL)
    assert all_ended(lost)
    assert all(map(is_process_running, spared))
    patient.run("pass", ranks=[0])
    assert all(map(is_process_running, spared))


def test_child_processes_of_stopped_ranks_end_with_the_kernel(fresh_notebook: Notebook) -> None:
    assert fresh_notebook.run(f"%%ddp --nproc 2\n{IMPORTS}{ALL_CHILDREN}").status == "ok"
    pids = json.loads(fresh_notebook.run("%ddp pull __import__('os').getpid()").result)
    started = [each for pid in pids for each in started_by(pid)]
    for pid in pids:
        psutil.Process(pid).suspend()  # it cannot end them itself
    psutil.Process(fresh_notebook.pid).kill()
    assert all_ended(started)


def test_stopped_rank_runs_exit_handlers(group: Ranks, folder: Path) -> None:
    group.run(
        f"{IMPORTS}import tempfile, weakref\n"
        "class Kept: pass\nkept = Kept()\n"
        "weakref.finalize(kept, pathlib.Path(f'finalized{rank}').touch)\n"
        "atexit.register(pathlib.Path(f'hook{rank}').touch)\n"
        "atexit.register(print, 'goodbye from', rank)\n"
        "temporary = tempfile.TemporaryDirectory()\n"
        "pathlib.Path(f'named{rank}').write_text(temporary.name)"
    )
    logs = [group.log(rank) for rank in range(2)]
    group.stop()
    for rank in range(2):
        assert (folder / f"hook{rank}").exists()
        assert (folder / f"finalized{rank}").exists()
        assert not Path((folder / f"named{rank}").read_text()).exists()
        assert f"goodbye from {rank}" in logs[rank].read_text()


def test_rank_that_ignores_stop_is_killed_and_named(make_group: MakeRanks, capsys: Capture) -> None:
    group = make_group(2, grace=4.0)  # rank 0 ends in it, on a slow machine too
    group.run(f"{IMPORTS}if rank == 1: atexit.register(time.sleep, 600)")
    group.restart()
    group.run("dist.barrier()")
    assert re.search("^nbddp: rank 1 .* 4 s.*killed$", capsys.readouterr().out, re.MULTILINE)


def test_exception_of_a_signal_handler_between_cells_fails_the_next_cell(group: Ranks) -> None:
    group.run(
        f"{IMPORTS}kept = rank\n"
        "def on_alarm(*_):\n    raise TimeoutError('the time is over')\n"
        "_ = signal.signal(signal.SIGALRM, on_alarm)"
    )
    for _ in range(3):
        os.kill(group.pids[1], signal.SIGALRM)
        error = group.failure_of("if rank == 1: time.sleep(50)\ndist.barrier()")
        assert str(error).startswith("rank 1: TimeoutError: the time is over")
        assert group.pull("kept") == [0, 1]
    group.run("assert signal.getsignal(signal.SIGALRM) is on_alarm")


def test_loader_worker_killed_between_cells_keeps_all_names(group: Ranks) -> None:
    group.run(
        "from torch.utils.data import DataLoader\nkept = rank\n"
        "loader = DataLoader(range(99), num_workers=2, persistent_workers=True)\n"
        "it = iter(loader)\n_ = next(it)"
    )
    started_by(group.pids[1], 2)[0].kill()
    error = group.failure_of("import time\nif rank == 1: time.sleep(50)\ndist.barrier()")
    assert re.match(r"rank 1: RuntimeError: DataLoader worker .* killed", str(error))
    assert group.pull("kept") == [0, 1]
    group.run("it = loader = None\ndist.barrier()")


@pytest.mark.full
def test_importing_forkserver_exits_cleanly_after_a_kill_of_the_kernels_group(
    fresh_notebook: Notebook,
) -> None:
    assert fresh_notebook.run("%load_ext nbddp\n%ddp status").status == "ok"
    kernel = fresh_notebook.pid
    helpers = psutil.Process(kernel).children(recursive=True)
    # it leaves the group first; if killed before that, the next start removes its folder
    assert wait_until(lambda: all(os.getpgid(each.pid) != kernel for each in helpers))
    os.killpg(kernel, signal.SIGKILL)
    assert not psutil.wait_procs(helpers, timeout=40)[1]
    assert wait_until(lambda: not list(fresh_notebook.temporary.glob("nbddp_*")))


def test_forkserver_starts_after_ipython_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    del main.__spec__  # as `%reset -f` does
    monkeypatch.setitem(sys.modules, "__main__", main)
    launcher = new_launcher("forkserver")
    launcher.preload()
    assert psutil.pid_exists(launcher.forkserver.pid)
    launcher.close()
