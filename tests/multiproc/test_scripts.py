"""WorkerGroup in scripts, and ranks that are spawned where forking is not safe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from drivers.inside import imported
from drivers.ranks import Ranks, new_launcher

pytestmark = pytest.mark.multiproc


def run_script(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a session of its own."""
    (folder / "script.py").write_text(source)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "script.py"],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
        start_new_session=True,
    )


def test_a_script_needs_no_main_guard_and_leaves_nothing(folder: Path) -> None:
    done = run_script(
        folder,
        "import nbddp\n"
        "with nbddp.WorkerGroup(nproc=2) as group:\n"
        "    group.run('x = torch.ones(1) * rank; dist.all_reduce(x)')\n"
        "    print(group.pull('x.item()'))\n",
    )
    assert (done.stdout, done.returncode) == ("[1.0, 1.0]\n", 0), done.stderr


def test_a_script_that_fails_in_a_cell_fails_with_the_ranks_traceback(folder: Path) -> None:
    done = run_script(
        folder, "import nbddp\nwith nbddp.WorkerGroup(nproc=2) as group:\n    group.run('1 / 0')\n"
    )
    assert done.returncode == 1
    last = "nbddp.errors.CellFailedError: ranks 0-1: ZeroDivisionError: division by zero, line 1"
    assert last in done.stderr.splitlines()
    assert "----> 1 1 / 0" in done.stderr


INTERRUPTED = f"""
import os, signal, threading
{imported(Ranks, new_launcher)}
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # of a notebook: between two cells
    group = Ranks(nproc=2, launcher=new_launcher("spawn"))
    started = threading.Event()

    def interrupt():
        while not started.wait(0.1):
            os.killpg(0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        group.start()
    finally:
        started.set()
    print(group.pull("rank"))
    group.close()
"""


@pytest.mark.full
def test_an_interrupt_of_the_kernels_group_ends_no_rank_that_is_being_spawned(folder: Path) -> None:
    done = run_script(folder, INTERRUPTED)
    assert (done.stdout, done.returncode) == ("[0, 1]\n", 0), done.stderr


@pytest.mark.full
def test_a_forked_child_of_a_script_leaves_the_group_alone_and_may_have_its_own(
    folder: Path,
) -> None:
    done = run_script(
        folder,
        "import nbddp, os, sys\n"
        "with nbddp.WorkerGroup(nproc=2) as group:\n"
        "    group.run('kept = rank')\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            group.pull('kept')\n"
        "        except nbddp.RequestError as error:\n"
        "            print(f'process {os.getppid()}' in str(error))\n"
        "        with nbddp.WorkerGroup(nproc=1) as own:\n"
        "            print(own.pull('world_size'), flush=True)\n"
        "        sys.exit(3)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), group.pull('kept'))\n",
    )
    assert done.stdout.splitlines() == ["True", "[1]", "3 [0, 1]"]
    assert (done.stderr, done.returncode) == ("", 0)
