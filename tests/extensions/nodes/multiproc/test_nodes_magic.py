"""Nodes in a notebook: two nodes as one machine, a lost node, adoption by another notebook."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from limits import limit
from local_nodes import all_ended, is_process_running, process_tree
from notebook import Notebook
from processes import wait_until

from nbddp.group.recovery import UNKNOWN_CELLS

pytestmark = pytest.mark.timeout(400)

RANKS = "%%ddp\nimport os\nos.environ['GROUP_RANK'], dist.get_world_size()"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        with Notebook(folder) as notebook:
            yield notebook


def test_next_cell_runs_on_the_nodes_that_wait_waited_for(notebook: Notebook) -> None:
    text = notebook.run("%ddp nodes --local 2 --nproc-per-node 2 --wait 110").text
    assert re.search(r"\b2 nodes\b.* (\S+) \(2 ranks\), \1#2 \(2 ranks\)", text), text
    text = notebook.run(RANKS).text
    assert "Out [ranks 0-1] ('0', 4)\nOut [ranks 2-3] ('1', 4)\n" in text, text
    assert notebook.run("%ddp export job.py --slurm --force").status == "ok"
    job = (notebook.folder / "job.sbatch").read_text()
    assert "#SBATCH --nodes=2\n" in job
    assert "--nproc-per-node=2 " in job
    text = notebook.run("%ddp nodes --local 1 --wait 110").text
    assert re.search(r"\b3 nodes\b.* \S+#3 \(2 ranks\)", text), text
    table = notebook.run("%ddp nodes").text
    assert re.search(r"\b2\b.*\b1\b.* spare\b", table.splitlines()[-1]), table
    lost = re.search(r"^(\S+) .* 2-3 ", table, re.MULTILINE)
    assert lost is not None, table
    text = notebook.run(f"%ddp nodes --leave {lost[1]}").text
    assert lost[1] in text
    assert "ranks 2-3" in text
    gone = re.compile(rf"ranks? 2-3 .*\bgone\b.*{re.escape(lost[1])}")
    assert wait_until(lambda: gone.search(notebook.run("%ddp nodes").text) is not None)
    assert "ranks 2-3" in notebook.run("%ddp heal").text
    assert "Out [ranks 2-3] ('1', 4)\n" in notebook.run(RANKS).text


@pytest.mark.full
def test_wait_names_an_agent_that_exits_before_it_connects(notebook: Notebook) -> None:
    assert notebook.run("%ddp nodes --nnodes 2 --local 1").status == "ok"
    [agent] = agents_of(notebook)
    agent.kill()
    text = notebook.run("%ddp nodes --wait 110").text
    assert re.search(r"^UsageError: .*SIGKILL.* \S+-0\.log; 0 nodes", text), text
    assert notebook.run("%ddp nodes --rejoin").text.startswith("UsageError: ")
    assert re.search(r"\b2 nodes\b.*\b0\.5 s\b", notebook.run("%ddp nodes --wait 0.5").text)
    assert notebook.run("%ddp nodes --local 2 --wait 110").status == "ok"


@pytest.mark.full
def test_interrupt_ends_the_wait_and_keeps_the_listener_open(notebook: Notebook) -> None:
    assert notebook.run("%ddp nodes --nnodes 2 --local 1").status == "ok"
    reply = notebook.run_and_stop("%ddp nodes --wait 110", 0.5)
    assert reply.error.startswith("CommandInterruptedError: ")
    assert reply.traceback.count("%ddp nodes") == 2
    assert "2 nodes" in notebook.run("%ddp nodes --local 1 --wait 110").text


def test_options_that_need_a_listener_do_not_open_it(notebook: Notebook) -> None:
    for line, words in {
        "--wait 1": "no nodes can join",
        "--leave x": "no nodes can join",
        "--slurm": "--host",
        "--rejoin": "nodes to rejoin",
        "--rejoin nothere": "nothere",
        "--wait no": "--wait: ",
    }.items():
        text = notebook.run(f"%ddp nodes {line}").text
        assert text.startswith("UsageError: ")
        assert words in text
        assert "no nodes can join" in notebook.run("%ddp nodes").text


NAMES = """%%ddp
import os
torch.manual_seed(0)
model = nbddp.prepare(torch.nn.Linear(2, 1))
kept, place = [rank], os.getpid()
print("written before")
"""
SAME = """%%ddp
total = torch.tensor(float(rank))
dist.all_reduce(total)
model(torch.ones(1, 2)).sum().backward()
(kept, place == os.getpid(), total.item(), model.module.weight.grad.sum().item())
"""


@pytest.fixture
def make_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Notebook]]:
    """Start notebooks in different folders of one home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with ExitStack() as stack:

        def make(name: str) -> Notebook:
            (tmp_path / name).mkdir()
            return stack.enter_context(Notebook(tmp_path / name))

        yield make


@pytest.fixture
def first(make_notebook: Callable[[str], Notebook]) -> Notebook:
    return make_notebook("first")


def agents_of(notebook: Notebook) -> list[psutil.Process]:
    children = psutil.Process(notebook.pid).children()
    return [each for each in children if "torch.distributed.run" in each.cmdline()]


@pytest.fixture
def processes(first: Notebook) -> Iterator[list[psutil.Process]]:
    reply = first.run("%ddp nodes --local 2 --nproc-per-node 2 --orphan-timeout 120 --wait 110")
    assert reply.status == "ok", reply
    assert "written before" in first.run(NAMES).text
    node_processes = [process for agent in agents_of(first) for process in process_tree(agent)]
    yield [psutil.Process(first.pid), *node_processes]
    for process in node_processes:
        if is_process_running(process):
            process.kill()


def test_nodes_end_their_processes_after_the_kernel_is_killed(first: Notebook) -> None:
    assert first.run("%ddp nodes --local 1 --orphan-timeout 3 --wait 110").status == "ok"
    request = first.begin("%%ddp\nprint('begun', flush=True)\nimport time; time.sleep(100)")
    first.finish(request, until="begun")
    node_processes = [process for agent in agents_of(first) for process in process_tree(agent)]
    os.kill(first.pid, signal.SIGKILL)
    assert all_ended(node_processes)


@pytest.mark.full
def test_notebook_suspended_for_a_while_keeps_its_nodes(notebook: Notebook) -> None:
    assert notebook.run("%ddp nodes --local 2 --orphan-timeout 60 --wait 110").status == "ok"
    notebook.run("%%ddp\nkept = rank")
    os.kill(notebook.pid, signal.SIGSTOP)
    # longer than a node waits for a sign of life
    time.sleep(limit("notebook_silent_after") + limit("agent_connects") + 3.0)
    os.kill(notebook.pid, signal.SIGCONT)
    time.sleep(2.0)
    text = notebook.run("%%ddp\ndist.barrier()\nkept").text
    assert text.startswith("Out [rank 0] 0\nOut [rank 1] 1\n"), text


ALL_BACK = re.compile(r"\b4 ranks\b.* back\b")


def test_next_notebook_adopts_the_ranks_of_a_killed_notebook(
    make_notebook: Callable[[str], Notebook], processes: list[psutil.Process]
) -> None:
    kernel, *node_processes = processes
    os.kill(kernel.pid, signal.SIGKILL)
    notebook = make_notebook("second")
    text = notebook.run("%ddp nodes --rejoin").text
    assert ALL_BACK.search(text), text
    assert "2 nodes" in text
    text = notebook.run(SAME).text
    for rank in range(4):
        assert f"([{rank}], True, 6.0, 2.0)" in text, text
    assert "written before" in notebook.run("%ddp logs 3 -n 1000").text
    reply = notebook.run("%%ddp --sweep lr=1,2\nnbddp.log(lr=lr)")
    assert "name 'model' is not defined" in reply.error  # no cell of this notebook made it
    assert "--fresh" in reply.error
    assert notebook.run("%%ddp --fresh --sweep lr=1,2\nnbddp.log(lr=lr)").status == "ok"
    assert notebook.run("%%ddp\nkept[0] == rank").text == "Out [ranks 0-3] True\n"
    assert "[rank 2] and after" in notebook.run("%%ddp\nprint('and after')").text
    assert notebook.run("%ddp stop").status == "ok"
    assert all_ended(node_processes)


@pytest.mark.full
def test_restarted_kernel_adopts_its_ranks_and_an_exited_kernel_ends_them(
    processes: list[psutil.Process], first: Notebook
) -> None:
    first.restart()
    assert first.run("%load_ext nbddp").status == "ok"
    assert ALL_BACK.search(first.run("%ddp nodes --rejoin").text)
    assert "([1], True, 6.0, 2.0)" in first.run(SAME).text
    assert UNKNOWN_CELLS in first.run("%ddp restart --replay").text
    first.run("exit")
    assert all_ended(processes[1:])


GOES_ON = """\
import time
for step in range(60):
    dist.barrier()
    print("step", step)
    if step == 3:
        print("begun", flush=True)
    nbddp.log(step=step, loss=1.0 / (step + 1))
    time.sleep(0.3)
step
"""


@pytest.mark.full
def test_an_adopted_cell_goes_on_and_shows_all_its_output(
    make_notebook: Callable[[str], Notebook], processes: list[psutil.Process], first: Notebook
) -> None:
    kernel = processes[0]
    request = first.begin(f"%%ddp\n{GOES_ON}")
    first.finish(request, until="begun", times=4)
    os.kill(kernel.pid, signal.SIGKILL)
    notebook = make_notebook("second")
    text = notebook.run("%ddp nodes --rejoin").text
    assert ALL_BACK.search(text), text
    for rank in range(4):
        printed = re.findall(rf"\[.*\b{rank}\b.*\] step (\d+)$", text, re.MULTILINE)
        assert printed == [str(step) for step in range(60)], text
    assert "Out [ranks 0-3] 59" in text, text
    assert "([1], True, 6.0, 2.0)" in notebook.run(SAME).text


@pytest.mark.full
def test_ranks_of_a_node_lost_before_adoption_are_healed_on_another_node(
    make_notebook: Callable[[str], Notebook], processes: list[psutil.Process]
) -> None:
    agents = [each for each in processes[1:] if "torch.distributed.run" in each.cmdline()]
    os.kill(processes[0].pid, signal.SIGKILL)
    node_processes = agents[0].children(recursive=True)
    agents[0].kill()
    assert not psutil.wait_procs(node_processes, timeout=60)[1]
    notebook = make_notebook("second")
    text = notebook.run("%ddp nodes --rejoin --wait 12").text
    assert re.search(r"\b2 of 4 ranks\b.*\b1 node\b.* \(2 ranks\).*`%ddp heal`", text), text
    assert notebook.run("%ddp nodes --local 1 --wait 110").status == "ok"
    assert re.search(r"\branks (0-1|2-3)\b", notebook.run("%ddp heal").text)
    values = notebook.run("%%ddp\nmodel(torch.ones(1, 2)).item()\ndist.get_world_size()").text
    assert "Out [ranks 0-3] 4\n" in values
    assert notebook.run("%ddp stop").status == "ok"
