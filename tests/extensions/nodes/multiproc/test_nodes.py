"""Ranks on nodes started by torchrun work as on one machine; nodes can be lost.

The nodes are several agents on this machine, with separate processes.
"""

import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from conditions import BEGUN, run_and_interrupt, when_cell_runs
from drivers.ranks import Capture, Ranks
from limits import set_limits
from local_nodes import CONNECT_TIMEOUT, OnNodes, all_ended, process_tree
from processes import wait_until

from nbddp import CellFailedError, CellInterruptedError
from nbddp.errors import RequestError, StartError

pytestmark = pytest.mark.timeout(300)

TRAIN = """
import time
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    time.sleep(.01)
    if step == 3: print("trains")
"""


@pytest.fixture
def on_nodes(make_nodes: Callable[..., OnNodes]) -> OnNodes:
    return make_nodes()


@pytest.mark.full
def test_a_rank_that_computes_on_a_node_is_interrupted(on_nodes: OnNodes) -> None:
    on_nodes.group.spec = replace(on_nodes.group.spec, grace=3.0)
    group = on_nodes.start()
    group.run("import re\nkept, has_gone_on = rank, False")
    computes = "re.match('(a+)+$', 'a' * 28 + 'b')"
    source = f"{BEGUN}\nif rank == 3:\n    {computes}\n    has_gone_on = True\ndist.barrier()"
    with pytest.raises(CellInterruptedError):
        run_and_interrupt(group, source, rests=[0, 1, 2])
    assert group.pull("kept, has_gone_on") == [(rank, False) for rank in range(4)]


def test_cells_run_on_two_nodes(on_nodes: OnNodes, capsys: Capture) -> None:
    group = on_nodes.start()
    result = group.run(
        "import os\nx = torch.ones(3) * rank\ndist.all_reduce(x)\n"
        "places = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'GROUP_RANK', 'WORLD_SIZE',"
        " 'LOCAL_WORLD_SIZE', 'GROUP_WORLD_SIZE')]\n"
        "leaks = [name for name in os.environ if name.startswith('TORCHELASTIC_USE')]\n"
        "print('hello of', rank)\nnbddp.log(step=1, loss=rank)\nx.sum().item(), places, leaks",
        wants_value=True,
    )
    assert result.values() == [
        (18.0, ["0", "0", "0", "4", "2", "2"], []),
        (18.0, ["1", "1", "0", "4", "2", "2"], []),
        (18.0, ["2", "0", "1", "4", "2", "2"], []),
        (18.0, ["3", "1", "1", "4", "2", "2"], []),
    ]
    out = capsys.readouterr().out
    assert all(f"hello of {rank}" in out for rank in range(4))
    named = [on_nodes.node_of(rank).name for rank in range(4)]
    assert [each.node for each in group.snapshot().ranks] == named
    _secret_is_in_no_argument_and_no_environment(on_nodes)
    _listens_only_on_the_named_address(on_nodes)
    _logs_are_here(group)
    group.push({"big": bytes(12 << 20)})  # more than the store takes in one piece
    assert group.pull("len(big)") == [12 << 20] * 4
    assert len(group.pull("big", rank=3)) == 12 << 20
    when_cell_runs(group, group.interrupt)
    with pytest.raises(CellInterruptedError):
        group.run("if rank: dist.barrier()\nelse:\n    import time; time.sleep(100)")
    assert group.run("x.sum().item()", wants_value=True).values() == [18.0] * 4
    group.kill(3)
    group.heal()
    assert group.run("x.sum().item()", wants_value=True).values() == [18.0] * 4
    group.run("nbddp.log(step=2, loss=rank)")  # into a file that the dead rank wrote, too
    _logs_are_here(group, steps=2)
    pids = group.pids
    group.restart()
    assert not set(pids.values()) & set(group.pids.values())
    assert group.run("'x' in globals()", wants_value=True).values() == [False] * 4
    agents = [on_nodes.agent_of(rank) for rank in (0, 2)]
    group.stop()
    assert all_ended(agents)
    assert not on_nodes.messages[2:]
    assert group.nodes is None


def _secret_is_in_no_argument_and_no_environment(on_nodes: OnNodes) -> None:
    token = on_nodes.nodes.join_file.read_text().strip()
    looked_at = [each for rank in (0, 2) for each in process_tree(on_nodes.agent_of(rank))]
    assert len(looked_at) >= 8
    for process in looked_at:
        assert token not in " ".join(process.cmdline())
        assert token not in " ".join(process.environ().values())
    for log in Path.home().rglob("*.log"):
        assert token not in log.read_text()


def _listens_only_on_the_named_address(on_nodes: OnNodes) -> None:
    node_agents = [on_nodes.node_of(rank).facts["pid"] for rank in (0, 2)]
    for pid in (os.getpid(), *node_agents, *on_nodes.group.pids.values()):
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip == "127.0.0.1", pid


def _has_hello(log: Path, rank: int) -> bool:
    return f"hello of {rank}\n" in log.read_text()


def _logs_are_here(group: Ranks, *, steps: int = 1) -> None:
    for rank in range(4):
        assert wait_until(partial(_has_hello, group.log(rank), rank))
    assert wait_until(lambda: len(group.read_lines("metrics.jsonl")) == 4 * steps)


@pytest.mark.full
def test_new_node_replaces_a_lost_node(on_nodes: OnNodes) -> None:
    group = on_nodes.start()
    group.run(
        "model = nbddp.prepare(torch.nn.Linear(2, 2))\nmine = rank\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=.1)"
    )
    survivors = {rank: group.pids[rank] for rank in (0, 1)}
    agent = psutil.Process(on_nodes.node_of(2).facts["pid"])
    processes = agent.children(recursive=True)
    name = on_nodes.node_of(2).name
    with pytest.raises(CellFailedError) as caught:
        group.run_and_act(TRAIN, lambda output: output.count("trains") == 4, agent.kill)
    assert f"node {name}: " in caught.value.report
    [told] = [said for said in on_nodes.messages if "ranks 2-3" in said]
    assert told.startswith(f"node {name} (127.0.0.1): ")
    assert group.alive == [0, 1]
    assert all_ended(processes)
    with pytest.raises(RequestError, match=f"node {name} "):
        group.heal()
    with pytest.raises(RequestError, match="1 of 2 nodes"):
        on_nodes.nodes.fit(group.spec)
    on_nodes.bring()
    group.heal()
    now = group.pids
    assert {rank: now[rank] for rank in (0, 1)} == survivors
    assert group.evaluate("mine")[:2] == [0, 1]
    sums = group.evaluate("sum(p.sum().item() for p in model.parameters())")
    assert len(set(sums)) == 1


@pytest.mark.full
def test_rank_can_be_killed_while_its_node_starts_it(on_nodes: OnNodes) -> None:
    on_nodes.bring(2)
    group = on_nodes.group
    group.spec = on_nodes.nodes.fit(group.spec)
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(group.start)
        while group.state != "starting":
            time.sleep(0)
        group.kill(3)
        with pytest.raises(StartError, match="rank 3"):
            starting.result(timeout=60.0)
    assert group.state == "not started"
    group.start()
    group.assert_works()


ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",  # a kernel's, without the folder of the environment's programs
    "PET_MASTER_ADDR": "job-node-0-0.job",  # what Kubeflow's trainer or a PyTorchJob sets in a pod
    "PET_MASTER_PORT": "29400",
    "PET_MAX_RESTARTS": "3",
    "PET_NNODES": "2:3",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "job-worker-0:23456",
    "PET_RDZV_ID": "job",
}


def test_the_join_command_works_in_any_environment(on_nodes: OnNodes) -> None:
    listener = on_nodes.nodes.listener
    line = ["sh", "-c", f"exec {on_nodes.nodes.command}"]
    with subprocess.Popen(line, env=os.environ | ENVIRONMENT, start_new_session=True) as agent:
        wait_until(
            lambda: bool(listener.nodes) or agent.poll() is not None, timeout=CONNECT_TIMEOUT
        )
        sizes = [node.nproc for node in listener.nodes]
        agent.terminate()
    assert sizes == [2]


def test_stop_does_not_wait_for_agents_that_are_still_connecting(
    on_nodes: OnNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, agent_exit_timeout=50.0)
    join, file = on_nodes.nodes.listener.join, on_nodes.nodes.join_file
    file.write_text(replace(join, port=1).token())  # no listener there: they retry
    on_nodes.nodes.start_local(1)
    me = psutil.Process()

    def dialing() -> list[psutil.Process]:
        found = []
        for agent in me.children():
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                node_agents = [each for each in agent.children() if each.children()]
                found += [each for each in node_agents if "nbddp.nodes" in each.cmdline()]
        return found

    assert wait_until(lambda: bool(dialing()), timeout=CONNECT_TIMEOUT)
    processes = [process for each in dialing() for process in process_tree(each)]
    began = time.monotonic()
    on_nodes.group.stop()
    assert time.monotonic() - began < 40
    assert all_ended(processes)
