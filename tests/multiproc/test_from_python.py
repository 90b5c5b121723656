"""WorkerGroup in scripts and tests: documented examples, interrupts, forks, spawned ranks."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from drivers.inside import imported
from drivers.ranks import Capture, Ranks, new_launcher
from virtual_networks import has_namespaces, without_reverse_names

from nbddp import ArgumentError, CellFailedError, compare, runs

PAGE = Path(__file__).parents[2] / "docs" / "from_python.md"


def run(
    folder: Path, *command: str, inside: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*inside, sys.executable, "-W", "ignore", *command],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
        start_new_session=True,
    )


def run_script(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(source)
    return run(folder, "script.py")


@pytest.mark.full
def test_examples_of_the_python_page_run(folder: Path) -> None:
    for name, code in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / name).write_text(code)
    done = run(folder, "train.py")  # which needs no main guard
    assert done.returncode == 0, done.stderr
    assert re.search(r"-train\n\[\d\S+, \d\S+\]\n\{\(", done.stdout), done.stdout
    [shown] = re.findall(r"```python\n# division.*?```\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = run(folder, "division.py")
    assert (done.stdout, done.stderr) == (shown, "")
    done = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0")
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_a_group_traces_steps_without_a_notebook(group: Ranks, folder: Path) -> None:
    source = "for step in range(4): dist.barrier(); nbddp.log(step=step, loss=1.0)"
    trace = group.trace(source, 1, 2)
    assert (sorted(trace.ranks), trace.missing, trace.steps) == ([0, 1], {}, [1, 2])
    assert trace.events > 0
    assert trace.path is not None
    assert trace.path.is_relative_to(folder)
    for refused in (
        lambda: group.trace(source, 1, 2, ranks=[5]),
        lambda: group.trace(source, 2, 1),
        lambda: group.run(None),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError):
            refused()
    with pytest.raises(CellFailedError) as error:
        group.run("import os; os._exit(3)", ranks=[1], quiet=True)
    assert "`group.heal()` replaces rank 1" in error.value.report  # rank 0 is alive


def test_a_group_can_sweep_scale_and_compare(group: Ranks, folder: Path, capsys: Capture) -> None:
    group.run("kept = [7]\ndef train(lr):\n    nbddp.log(step=0, loss=lr + rank)")
    group.push({"offset": 1})
    found = group.sweep("kept.append(lr); train(lr + offset)", {"lr": [1, 2], "model": ["cnn"]})
    output = capsys.readouterr()
    assert "nbddp: sweep, 2 of 2: lr=2, model=cnn; the last one" in output.out.splitlines()
    assert output.err == ""
    assert [run.config for run in found] == [{"lr": lr, "model": "cnn"} for lr in (1, 2)]
    sizes = group.scale("train(0.1)", [1, 2], quiet=True)
    assert [size["ranks"] for size in sizes] == [1, 2]
    assert group.pull("kept") == [[7], [7]]
    lines = str(compare(*found)).splitlines()
    table = next(at for at, line in enumerate(lines) if line.startswith("line  run"))
    assert "2.5 (2 to 3)" in lines[table + 1]
    assert "3.5 (3 to 4)" in lines[table + 2]
    assert len(runs(folder)) == 1 + 2 + 6


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
def test_interrupt_of_the_kernels_process_group_spares_spawning_ranks(folder: Path) -> None:
    done = run_script(folder, INTERRUPTED)
    assert (done.stdout, done.returncode) == ("[0, 1]\n", 0), done.stderr


@pytest.mark.full
def test_forked_child_cannot_use_the_parents_group_but_can_start_its_own(folder: Path) -> None:
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


NO_REVERSE_NAMES = """
import socket, threading, nbddp
errors, is_over = [], threading.Event()
def resolve():
    while not is_over.wait(0.01):
        try:
            socket.getaddrinfo("bucket.example", 80, socket.AF_INET)
        except OSError as error:
            errors.append(error)
thread = threading.Thread(target=resolve)
thread.start()
with nbddp.WorkerGroup(nproc=2) as group:
    is_over.set()
    thread.join()
    group.run("dist.barrier()")
print(errors)
"""


@pytest.mark.skipif(not has_namespaces(), reason="needs root, and namespaces")
def test_a_start_asks_for_no_name_of_an_address_and_leaves_dns_on(folder: Path) -> None:
    (folder / "script.py").write_text(NO_REVERSE_NAMES)
    with without_reverse_names(folder) as (inside, asked):
        done = run(folder, "script.py", inside=inside)
    assert (done.stdout, done.stderr) == ("[]\n", "")  # torch warns about the name server
    assert asked == []
