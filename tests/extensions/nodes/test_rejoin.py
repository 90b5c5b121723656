"""A listener that another notebook left open, and nodes that do or do not return to it."""

import os
import re
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fake_nodes import FakeNode, FakeNodes
from fakes import FakeLauncher
from processes import wait_until
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.controller.session import Session
from nbddp.errors import RequestError, StartError
from nbddp.extensions.nodes.join_file import JoinFile
from nbddp.extensions.nodes.listener import NodeListener
from nbddp.extensions.nodes.node_agent import node_facts
from nbddp.extensions.nodes.node_connection import FrameType
from nbddp.extensions.nodes.node_pool import NodePool, NodesSpec
from nbddp.extensions.nodes.notebook import open_nodes, rejoin
from nbddp.extensions.nodes.remote_start import start_facts
from nbddp.extensions.nodes.stale_files import LockedPath, find_left_join_file
from nbddp.group.rank_group import RankGroup
from nbddp.launch.local_launcher import Launcher
from nbddp.topology import Topology
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.rank_start import RankStart


class Back:
    """A notebook whose predecessor left a listener open."""

    def __init__(self) -> None:
        before = NodeListener("127.0.0.1")
        self.join_file = before.join.save()
        before.close()
        self.launcher = FakeLauncher()
        self.group = RankGroup(GroupSpec(nproc=1), Session(self.launcher))

    def take_back(self, seconds: float) -> str:
        join = find_left_join_file()
        spec = NodesSpec(host=join.address, port=join.port)
        return rejoin(self.group, spec, join, seconds)


@pytest.fixture
def back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Back]:
    monkeypatch.setenv("HOME", str(folder))
    made = Back()
    yield made
    made.group.close()


def test_adopting_nodes_can_be_repeated_after_a_timeout_or_an_interrupt(
    back: Back, snapshot: SnapshotAssertion
) -> None:
    def interrupt() -> None:
        assert wait_until(lambda: back.group.nodes is not None)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    for has_stopped in (False, True, False):
        if has_stopped:
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                back.take_back(60)
            interrupting.join()
        else:
            assert refusal(RequestError, back.take_back, 0.2) == snapshot(name="in vain")
        assert back.group.nodes is None
        assert back.group.session.launcher is back.launcher
        JoinFile.load(back.join_file)


def test_an_interrupt_while_a_listener_opens_or_closes_leaves_none_open(
    back: Back, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks would be looked for on nodes for ever: there is nothing to close."""
    group = back.group
    use, closed = group.session.use_launcher, NodeListener.close

    def use_and_stop(chosen: Launcher) -> None:
        use(chosen)
        signal.raise_signal(signal.SIGINT)

    def stop_and_close(self: NodeListener, *, releases_nodes: bool = True) -> None:
        signal.raise_signal(signal.SIGINT)
        closed(self, releases_nodes=releases_nodes)

    monkeypatch.setattr(group.session, "use_launcher", use_and_stop)
    with pytest.raises(KeyboardInterrupt):
        open_nodes(group, NodesSpec())
    assert group.nodes is not None
    monkeypatch.setattr(group.session, "use_launcher", use)
    monkeypatch.setattr(NodeListener, "close", stop_and_close)
    with pytest.raises(KeyboardInterrupt):
        group.stop()
    assert group.nodes is None
    assert group.session.launcher is back.launcher


def test_a_listener_of_a_living_notebook_is_not_taken_over(
    back: Back, snapshot: SnapshotAssertion
) -> None:
    with_it = LockedPath(back.join_file)
    for name in (str(back.join_file), back.join_file.name):
        reason = refusal(RequestError, find_left_join_file, name)
        assert reason.replace(str(back.join_file), "FILE") == snapshot(name="open")
    with_it.close()
    assert find_left_join_file(back.join_file.name) == find_left_join_file()


@contextmanager
def nodes_that_join(back: Back, *living: list[dict[str, Any]]) -> Iterator[list[FakeNode]]:
    """Connect a node with each of these lists of ranks, once the listener is open."""
    nodes: list[FakeNode] = []
    fakes: list[FakeNodes] = []

    def join() -> None:
        assert wait_until(lambda: back.group.nodes is not None)
        assert isinstance(back.group.nodes, NodePool)
        fakes.append(FakeNodes(back.group.nodes.listener))
        for processes in living:
            nodes.append(fakes[0].connect())
            nodes[-1].tell(FrameType.HELLO, **node_facts(4), living=processes)

    joining = threading.Thread(target=join)
    joining.start()
    yield nodes
    joining.join()
    fakes[0].close()


def test_adopted_nodes_without_ranks_stay_available_for_the_next_cell(back: Back) -> None:
    with nodes_that_join(back, [], []):
        reason = back.take_back(1.5)
        nodes = back.group.nodes
        assert isinstance(nodes, NodePool)
        assert re.match(r"2 nodes .* \(4 ranks\)", reason)
        assert nodes.launcher.capacity() == 8


def count_pipes() -> int:
    count = 0
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - names, not paths
        with suppress(OSError):  # the descriptor of the folder itself
            if stat.S_ISFIFO(os.fstat(int(name)).st_mode):
                count += 1
    return count


def test_a_rejoin_that_cannot_record_the_run_leaves_nodes_and_ranks_to_the_next_one(
    back: Back, folder: Path
) -> None:
    (folder / ".nbddp" / "runs" / "left" / "events.jsonl").mkdir(parents=True)
    start: dict[str, Any] = {"run_id": "left", "cwd": str(folder), "log_path": "rank-0.log"}
    start |= {"topology": Topology.local(1)[0], "attempt": 2, "store_port": 1, "kernel_pid": 1}
    facts = start_facts(RankStart(**start, spec=GroupSpec(), secret=b"", env={}, sys_path=[]))
    rank = {"number": 1, "pid": 1, "start": facts}
    pipes: list[int] = []
    for _ in range(2):
        with nodes_that_join(back, [rank]) as joined:
            with pytest.raises(StartError, match="the ranks still run"):
                back.take_back(20)
            assert back.group.nodes is None
            assert back.group.session.launcher is back.launcher
            assert joined[0].is_lost.wait(20)
            sent = {kind for kind, _ in joined[0].frames}
            assert not sent & {FrameType.KILL, FrameType.TERMINATE, FrameType.LEAVE}
        pipes.append(count_pipes())
    assert pipes[0] == pipes[1]
