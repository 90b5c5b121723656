"""`%ddp nodes` in a kernel: nodes are waited for, one more is a spare, and a stop ends the wait."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psutil
import pytest
from notebook import Notebook
from processes import wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]

RANKS = "%%ddp\nimport os\nos.environ['GROUP_RANK'], dist.get_world_size()"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        with Notebook(folder) as notebook:
            yield notebook


def agents(notebook: Notebook) -> list[psutil.Process]:
    """Those that the kernel has started."""
    children = psutil.Process(notebook.pid).children()
    return [each for each in children if "torch.distributed.run" in each.cmdline()]


def test_nodes_that_are_waited_for_are_there_in_the_next_cell(notebook: Notebook) -> None:
    reply = notebook.run("%ddp nodes --local 2 --nproc-per-node 2 --wait 110")
    assert re.fullmatch(
        r"nbddp: 2 nodes are here: (\S+) \(2 ranks\), \1#2 \(2 ranks\), after \d+\.\d s\n",
        reply.text,
    ), reply
    reply = notebook.run(RANKS)
    assert "Out [ranks 0-1] ('0', 4)\nOut [ranks 2-3] ('1', 4)\n" in reply.text, reply
    reply = notebook.run("%ddp nodes --local 1 --wait 110")
    assert re.match(r"nbddp: 3 nodes are here: .*, \S+#3 \(2 ranks\), after", reply.text), reply
    table = notebook.run("%ddp nodes").text
    assert table.endswith("A %%ddp cell runs on the first 2 of them, 1 is a spare.\n")
    lost = re.search(r"^(\S+) .* 2-3 ", table, re.MULTILINE)
    assert lost is not None, table
    reply = notebook.run(f"%ddp nodes --leave {lost[1]}")
    assert reply.text == f"nbddp: node {lost[1]} is sent home, and ranks 2-3\n"
    assert wait_until(lambda: "are gone with node" in notebook.run("%ddp nodes").text)
    reply = notebook.run("%ddp heal")
    assert reply.text.startswith("nbddp: ranks 2-3 healed"), reply
    assert "Out [ranks 2-3] ('1', 4)\n" in notebook.run(RANKS).text


@pytest.mark.full
def test_an_agent_that_ends_before_it_comes_in_is_named(notebook: Notebook) -> None:
    assert notebook.run("%ddp nodes --nnodes 2 --local 1").status == "ok"
    [agent] = agents(notebook)
    agent.kill()
    reply = notebook.run("%ddp nodes --wait 110")
    assert reply.text.startswith("UsageError: an agent on this machine was killed by SIGKILL be")
    assert re.search(r"its log is \S+-0\.log; 0 nodes are here\n$", reply.text), reply
    reply = notebook.run("%ddp nodes --rejoin")
    assert "UsageError: this notebook has an open door: `%ddp nodes` lists who is" in reply.text
    reply = notebook.run("%ddp nodes --wait 0.5")
    assert "2 nodes are missing after 0.5 s; 0 nodes are here" in reply.text
    assert notebook.run("%ddp nodes --local 2 --wait 110").status == "ok"


@pytest.mark.full
def test_a_stop_ends_the_wait_and_the_door_stays_open(notebook: Notebook) -> None:
    assert notebook.run("%ddp nodes --nnodes 2 --local 1").status == "ok"
    reply = notebook.run_and_stop("%ddp nodes --wait 110", 0.5)
    assert reply.traceback == (
        "`%ddp nodes` was interrupted; nodes on their way still come in, `%ddp nodes` lists them; "
        "there are no ranks; the next cell starts them"
    )
    reply = notebook.run("%ddp nodes --local 1 --wait 110")
    assert reply.text.startswith("nbddp: 2 nodes are here"), reply


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--wait 1", "no door is open, all ranks are on this machine: "),
        ("--leave x", "no door is open, all ranks are on this machine: "),
        ("--slurm", "a job's machines do not reach 127.0.0.1: open the door with --host"),
        ("--wait no", "argument --wait: expected seconds above 0 and up to a year, got 'no'"),
    ],
)
def test_what_needs_a_door_opens_none(notebook: Notebook, line: str, words: str) -> None:
    reply = notebook.run(f"%ddp nodes {line}")
    assert words in reply.text, reply
    assert notebook.run("%ddp nodes").text.startswith("nbddp: no door is open")
