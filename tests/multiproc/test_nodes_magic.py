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


def test_nodes_that_are_waited_for_are_there_in_the_next_cell(notebook: Notebook) -> None:
    text = notebook.run("%ddp nodes --local 2 --nproc-per-node 2 --wait 110").text
    assert re.search(r"\b2 nodes\b.* (\S+) \(2 ranks\), \1#2 \(2 ranks\)", text), text
    text = notebook.run(RANKS).text
    assert "Out [ranks 0-1] ('0', 4)\nOut [ranks 2-3] ('1', 4)\n" in text, text
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
def test_an_agent_that_ends_before_it_comes_in_is_named(notebook: Notebook) -> None:
    assert notebook.run("%ddp nodes --nnodes 2 --local 1").status == "ok"
    children = psutil.Process(notebook.pid).children()
    [agent] = [each for each in children if "torch.distributed.run" in each.cmdline()]
    agent.kill()
    text = notebook.run("%ddp nodes --wait 110").text
    assert re.search(r"^UsageError: .*SIGKILL.* \S+-0\.log; 0 nodes", text), text
    assert notebook.run("%ddp nodes --rejoin").text.startswith("UsageError: ")
    assert re.search(r"\b2 nodes\b.*\b0\.5 s\b", notebook.run("%ddp nodes --wait 0.5").text)
    assert notebook.run("%ddp nodes --local 2 --wait 110").status == "ok"


@pytest.mark.full
def test_a_stop_ends_the_wait_and_the_door_stays_open(notebook: Notebook) -> None:
    assert notebook.run("%ddp nodes --nnodes 2 --local 1").status == "ok"
    reply = notebook.run_and_stop("%ddp nodes --wait 110", 0.5)
    assert reply.error.startswith("CommandInterruptedError: ")
    assert reply.traceback.count("%ddp nodes") == 2
    assert "2 nodes" in notebook.run("%ddp nodes --local 1 --wait 110").text


def test_what_needs_a_door_opens_none(notebook: Notebook) -> None:
    for line, words in {
        "--wait 1": "no nodes can join",
        "--leave x": "no nodes can join",
        "--slurm": "--host",
        "--rejoin": "door",
        "--rejoin nothere": "nothere",
        "--wait no": "--wait: ",
    }.items():
        text = notebook.run(f"%ddp nodes {line}").text
        assert text.startswith("UsageError: ")
        assert words in text
        assert "no nodes can join" in notebook.run("%ddp nodes").text
