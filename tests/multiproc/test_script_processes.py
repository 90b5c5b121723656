"""Scripts run in separate processes: they start and end as a plain program does."""

import time
from pathlib import Path

import psutil
import pytest
from conditions import interrupt_at
from drivers.ranks import Capture, Lines, MakeRanks, Ranks, Write
from golden.walks import KEEP, assert_ranks_work
from notebook import Notebook
from processes import free_port, wait_until

from nbddp import ArgumentError, CellFailedError, RequestError

SHARES_KERNEL = True


# ---- leftovers of a run


HOLDS = """
import fcntl, os, pathlib, socket, threading, time
begin = pathlib.Path("begun").touch
def main():
    lock = open("lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    served = socket.create_server(("127.0.0.1", PORT))
    ENDING
if os.environ["RANK"] == "0":
    main()
"""
ENDINGS = {
    "stopped": "begin(); time.sleep(600)",
    "waits for a thread": "threading.Thread(target=time.sleep, args=(30,)).start(); begin()",
    "failed": "1 / 0",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_resources_of_a_failed_script_are_free_in_the_next_run(
    group: Ranks, write: Write, ending: str
) -> None:
    source = HOLDS.replace("PORT", str(free_port()))
    script = write(source.replace("ENDING", ending))
    for _ in range(2):
        Path("begun").unlink(missing_ok=True)
        if ending == "1 / 0":
            with pytest.raises(CellFailedError, match="ZeroDivisionError"):
                group.run_script(script)
        else:
            interrupt_at(group, group.begin_script(script), "begun")
    group.run(source.replace("ENDING", "pass"))


def test_interrupt_ends_processes_spawned_by_a_script(group: Ranks, write: Write) -> None:
    script = write(
        "import os, pathlib, time\nimport torch.multiprocessing as mp\n"
        "def work(place):\n    pathlib.Path(f'pid{place}').write_text(str(os.getpid()))\n"
        "    if place == 0: pathlib.Path('begun').touch()\n    time.sleep(600)\n"
        "if __name__ == '__main__' and os.environ['RANK'] == '0':\n    mp.spawn(work, nprocs=2)"
    )
    interrupt_at(group, group.begin_script(script), "begun")
    group.run("pass")  # until then the processes of a script that failed stay for a debugger
    pids = [int(each.read_text()) for each in Path().glob("pid?") if each.read_text()]
    assert pids
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)))


# ---- environment of a run


def test_script_runs_in_the_current_environment_and_working_folder(
    notebook: Notebook, write: Write, folder: Path
) -> None:
    script = write("import os\nprint(os.environ.get('FOO'), os.getcwd())")
    other = folder / "other"
    other.mkdir()
    notebook.run(f"%cd -q {folder}\n%env FOO=0")
    look = "%%ddp\nimport os\nprint(os.environ.get('FOO'), os.getcwd())"
    found = notebook.run(look)
    assert found.lines(1) == [f"0 {folder}"], found
    notebook.run(f"%cd -q {other}\n%env FOO=1")
    assert notebook.run(f"%ddp run {script}").lines(1) == [f"1 {other}"]
    assert notebook.run(look).lines(1) == [f"0 {folder}"]
    notebook.run("%env FOO=")


@pytest.mark.parametrize("ending", ["pass", "dist.destroy_process_group()"])
def test_timeout_in_a_script_blames_the_absent_rank(
    make_group: MakeRanks, write: Write, ending: str
) -> None:
    group = make_group(2, timeout=2.0)
    script = write(
        "import time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "dist.barrier()\ntry:\n    if dist.get_rank() == 1: time.sleep(30)\n"
        f"    dist.all_reduce(torch.ones(1))\nfinally:\n    {ending}"
    )
    began = time.monotonic()
    with pytest.raises(CellFailedError) as failed:
        group.run_script(script)
    error = failed.value
    assert str(error) == "rank 1 did not come to all_reduce #2: it was in script.py line 5"
    assert "rank 0: RuntimeError: Timed out waiting 2000ms" in error.report
    assert time.monotonic() - began < 20


def test_restart_count_of_a_script_is_0_after_a_stop(notebook: Notebook, write: Write) -> None:
    script = write("import os\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'])")
    for _ in range(2):
        assert notebook.run(f"%ddp run {script}").lines(0) == ["0"]
        notebook.run("%ddp stop")


# ---- its ranks


def test_script_keeps_the_ranks_and_names_of_the_cells(
    group: Ranks, write: Write, lines: Lines
) -> None:
    script = write(
        "import os, torch.distributed as dist\ndist.init_process_group()\ndist.barrier()\n"
        "print('kept' in globals(), os.getpid())\nif os.environ['RANK'] == '1': os._exit(3)\n"
        "dist.barrier()"
    )
    group.run("kept = rank * 10")
    before = group.pids
    with pytest.raises(CellFailedError, match="rank 1 exited with code 3") as error:
        group.run_script(script)
    assert "no `group.heal()` is needed" in error.value.report
    has_names_of_cells, pid = lines()[0].split()
    assert has_names_of_cells == "False"
    assert int(pid) not in before.values()
    assert group.pids == before
    assert group.pull("kept") == [0, 10]
    group.assert_works()


def test_script_on_some_ranks_starts_only_those(
    make_group: MakeRanks, write: Write, capsys: Capture
) -> None:
    group = make_group(3)
    script = write("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])\n1 / 0")
    with pytest.raises(CellFailedError, match="ranks 0,2: ZeroDivisionError"):
        group.run_script(script, ranks=[0, 2])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[rank 0] 0 3", "[rank 2] 2 3"]
    states = [each.state for each in group.scripts.active_session.snapshot().ranks]
    assert states[1] == "not started"
    assert len(group.scripts.active_session.actor.state.pids()) == 2
    with pytest.raises(RequestError, match="rank 1 was not started"):
        group.kill(1)
    with pytest.raises(ArgumentError, match="there is no rank 3"):
        group.run_script(script, ranks=[3])


STEPS = """
import nbddp
for step in range(6):
    nbddp.log(step=step, loss=1.0)
"""


def test_armed_faults_fire_once_in_a_script(group: Ranks, write: Write) -> None:
    script = write(STEPS)
    for step in (3, 90):
        group.run(f"nbddp.faults.at(step={step}, rank=1, kind='raise')")
    with pytest.raises(CellFailedError, match=r"rank 1: FaultError.*step=3"):
        group.run_script(script)
    group.run_script(script)  # the fault has fired
    group.run(STEPS)
    assert group.pull("[each.step for each in nbddp.faults.armed()]") == [[], [90]]
    group.run("nbddp.faults.at(step=2, rank=0, kind='kill')")
    group.run_script(script, max_restarts=1)
    assert group.pull("len(nbddp.faults.armed())") == [0, 1]


# ---- in a notebook

WAITS = """
import os, pathlib, time
secret = 40 + int(os.environ["RANK"])
pathlib.Path("begun" + os.environ["RANK"]).touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
assert os.environ["RANK"] == "0", "one"
"""


@pytest.fixture
def waits(notebook: Notebook, write: Write, folder: Path) -> Notebook:
    """A notebook whose ranks have a name, while a script runs in other ranks."""
    write(WAITS, "waits.py")
    notebook.run(f"%cd -q {folder}")
    assert notebook.run(f"%%ddp --nproc 2\n{KEEP}").status == "ok"
    assert notebook.run("%ddp run --no-wait waits.py").status == "ok"
    assert wait_until(lambda: all((folder / f"begun{rank}").exists() for rank in range(2)))
    return notebook


def test_commands_apply_to_the_running_script(waits: Notebook) -> None:
    assert wait_until(lambda: "waits.py:" in waits.run("%ddp status").text)
    for magic in ("%%ddp\npass", "%ddp run waits.py"):
        assert "`%ddp wait` waits for it" in waits.run(magic).text
    assert waits.run("%ddp kill 1").status == "ok"
    assert waits.run("%ddp wait").error == "CellFailedError: rank 1 was killed by you"
    assert "all ranks of the cells are alive" in waits.run("%ddp heal").text
    assert_ranks_work(waits)


def test_interrupt_command_applies_to_the_running_script(waits: Notebook) -> None:
    assert waits.run("%ddp interrupt").status == "ok"
    assert waits.run("%ddp wait").error.startswith("CellInterruptedError: ranks 0-1 interrupted")
    assert "no cell is running" in waits.run("%ddp interrupt").text
    assert_ranks_work(waits)


def test_debugger_opens_a_failed_script_until_the_next_cell(waits: Notebook, folder: Path) -> None:
    (folder / "go").touch()
    assert (
        waits.run("%ddp wait").error
        == "CellFailedError: rank 1: AssertionError: one, waits.py line 7"
    )
    status = waits.run("%ddp status").text
    assert "`%ddp debug` opens a debugger on them" in status
    look = waits.run("%ddp debug -c 'p secret' -c q")
    assert "41" in look.text.split(), look.text
    assert "waits.py" in waits.run("%ddp show").text
    assert_ranks_work(waits)
    assert "`%ddp debug` looks" not in waits.run("%ddp status").text
    assert "nothing to debug" in waits.run("%ddp debug").text


def test_stop_ends_the_running_script(waits: Notebook) -> None:
    assert waits.run("%ddp stop").status == "ok"
    assert "the cell was ended by a stop" in waits.run("%ddp wait").error


def test_script_without_a_worker_group_records_its_own_run(
    notebook: Notebook, write: Write, folder: Path
) -> None:
    write("import os\nprint(os.getenv('MINE'), os.environ['WORLD_SIZE'])", "script.py")
    notebook.run(f"%cd -q {folder}")
    options = "--nproc 3 --env MINE=1 --name tried"
    assert notebook.run(f"%ddp run {options} script.py").lines(2) == ["1 3"]
    assert "there are no ranks" in notebook.run("%ddp status").text
    assert notebook.run("%ddp logs 2").text == "1 3\n"
    assert "script.py" in notebook.run("%ddp show").text
    assert notebook.run("%ddp run script.py").lines(1) == ["None 2"]  # no option of the first
    assert len(list((folder / ".nbddp" / "runs").glob("*-tried"))) == 1
    assert len(list((folder / ".nbddp" / "runs").glob("*"))) == 2
    assert notebook.run("%%ddp --nproc 1 --env MINE=1 --repeat 1\n1").status == "ok"
    reply = notebook.run("%%ddp\nimport os\nprint(os.getenv('MINE'), world_size)")
    assert reply.lines(1) == ["None 2"]  # nor of the sweep


# ---- on nodes


@pytest.mark.full
def test_script_runs_on_nodes_beside_the_ranks_of_the_cells(
    on_nodes: Ranks, write: Write, capsys: Capture
) -> None:
    script = write(
        "import os, sys, torch, torch.distributed as dist\ndist.init_process_group()\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\nprint(int(x), os.environ['GROUP_RANK'])\n"
        "if [os.environ['RANK']] == sys.argv[1:]: raise ValueError('here')\ndist.barrier()"
    )
    on_nodes.run("kept = rank * 10")
    before = on_nodes.pids
    for _ in range(2):
        on_nodes.run_script(script)
        output = capsys.readouterr().out
        assert [output.count(f"[rank {rank}] 2 {rank}\n") for rank in range(2)] == [1, 1]
    with pytest.raises(CellFailedError, match="rank 1: ValueError: here"):
        on_nodes.run_script(script, "1")
    assert on_nodes.scripts.are_kept
    on_nodes.run("dist.barrier()")
    assert not on_nodes.scripts.are_kept
    assert on_nodes.pids == before
    assert on_nodes.pull("kept") == [0, 10]


@pytest.mark.full
def test_elastic_script_restarts_when_a_node_joins(
    fresh_notebook: Notebook, write: Write, folder: Path
) -> None:
    write(
        "import os, pathlib, time\nsize = os.environ['WORLD_SIZE']\n"
        "pathlib.Path(f'of{size}').touch()\nprint(size)\nwhile size == '1': time.sleep(0.01)",
        "script.py",
    )
    fresh_notebook.run(f"import os; os.environ['HOME'] = {str(folder)!r}")
    fresh_notebook.run("%ddp nodes --nnodes 1:2 --local 1 --wait 60")
    fresh_notebook.run("%ddp run --elastic --no-wait script.py")
    assert wait_until((folder / "of1").exists)
    fresh_notebook.run("%ddp nodes --local 1 --wait 60")
    assert fresh_notebook.run("%ddp wait").status == "ok"
    assert (folder / "of2").exists()
    fresh_notebook.run("%ddp stop")
