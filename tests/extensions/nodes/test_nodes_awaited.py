"""A listener that waits for nodes: present and missing nodes in one line."""

import errno
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from console import refused
from fake_nodes import FakeNodes
from fakes import FakeLauncher
from life_states import IDLE
from processes import wait_until
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.extensions.nodes import notebook as nodes
from nbddp.extensions.nodes.node_pool import NodePool, NodesSpec
from nbddp.extensions.nodes.notebook import JOB_FILE
from nbddp.lifecycle.events import NodeEvent
from nbddp.lifecycle.refusals import describe_node

HOST = socket.gethostname()


class ListenerWithNodes(FakeNodes):
    def __init__(self) -> None:
        self.session = Session(FakeLauncher())
        self.nodes = NodePool(self.session, NodesSpec(min_nodes=2, max_nodes=3))
        super().__init__(self.nodes.listener)


@pytest.fixture
def arriving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ListenerWithNodes]:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = ListenerWithNodes()
    yield made
    made.close()
    made.nodes.close()


def said_by(arriving: ListenerWithNodes, seconds: float) -> str:
    """The error of a wait that timed out, with COMMAND for the command that starts a node."""
    nodes = arriving.nodes
    return refusal(RequestError, nodes.wait, seconds).replace(nodes.command, "COMMAND")


def test_waiting_for_nodes_returns_at_once_with_the_nodes_that_joined(
    arriving: ListenerWithNodes,
) -> None:
    arriving.bring()
    coming = threading.Timer(0.3, arriving.bring)
    coming.start()
    began = time.monotonic()
    reason = arriving.nodes.wait(50)
    assert f"{HOST} (4 ranks), {HOST}#2 (4 ranks)" in reason
    assert time.monotonic() - began < 10
    coming.join()
    arriving.nodes.wait(50)  # all have come
    assert arriving.nodes.wait(0.001).endswith(" ms")


def test_missing_nodes_and_the_last_refused_node_are_named_in_one_sentence(
    arriving: ListenerWithNodes, snapshot: SnapshotAssertion
) -> None:
    reasons = [said_by(arriving, 0.2)]
    arriving.bring(host="gpu-01")
    reasons.append(said_by(arriving, 0.2))
    arriving.bring(python="3.8.1", host="old")
    refused = said_by(arriving, 0.2)
    assert re.search(r"3\.8\.1 .*\bold\b", refused)
    assert reasons == snapshot


def test_the_join_command_uses_the_notebooks_python(arriving: ListenerWithNodes) -> None:
    text = arriving.nodes.instructions()
    assert f"\n    {shlex.quote(sys.executable)} -m torch.distributed.run --nnodes=1 " in text


def test_nodes_need_a_home_folder_that_can_be_written(
    arriving: ListenerWithNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".nbddp/agents").touch()
    assert str(tmp_path) in refusal(RequestError, arriving.nodes.start_local, 1)
    monkeypatch.setenv("HOME", str(tmp_path / ".nbddp/agents"))  # a file
    reason = refusal(RequestError, NodePool, Session(FakeLauncher()), NodesSpec())
    assert "Not a directory; set HOME" in reason
    listening = [each for each in threading.enumerate() if each.name == "nbddp-nodes"]
    assert len(listening) == 1, "the one of the fixture"


def test_a_job_file_that_cannot_be_written_is_named(
    arriving: ListenerWithNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / JOB_FILE).mkdir()
    monkeypatch.setattr(nodes, "LOOPBACK", "")  # the fixture's address
    group = Mock(nodes=arriving.nodes)
    assert refused("nodes --slurm", group=group) == f"{JOB_FILE} cannot be written: Is a directory"


def test_a_restart_is_offered_only_if_enough_nodes_are_left(
    arriving: ListenerWithNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = type(arriving.nodes.launcher)
    monkeypatch.setattr(launcher, "lost_assignments", property(lambda _self: ["node 1"]))
    assert "`%ddp restart` needs" in arriving.nodes.instructions()
    for _ in range(arriving.nodes.spec.min_nodes):
        arriving.bring()
    assert "`%ddp restart` continues" in arriving.nodes.instructions()


def test_a_node_that_leaves_during_the_wait_is_missing_again(arriving: ListenerWithNodes) -> None:
    fake_node = arriving.bring()
    threading.Timer(0.1, fake_node.leave).start()
    assert "2 nodes missing" in said_by(arriving, 2.0)


def test_a_node_that_was_told_to_leave_gets_no_ranks(arriving: ListenerWithNodes) -> None:
    for _ in range(3):
        arriving.bring()
    nodes = arriving.nodes
    sent, *others = nodes.listener.nodes
    nodes.release(sent.name)
    assert sent in nodes.listener.nodes, "it has not gone yet"
    assert nodes.launcher.capacity() == 8
    nodes.launcher.assign(8)
    assert [slot.node for slot in nodes.launcher.assignments] == others


@pytest.mark.parametrize(
    ("arrive", "ordered"),
    [
        ([("b", {}), ("a", {})], ["a", "b"]),
        ([("node10", {}), ("node2", {}), ("node1", {})], ["node1", "node2", "node10"]),
        ([("a", {"order": 1}), ("b", {"order": 0})], ["b", "a"]),
        ([("a", {}), ("b", {"order": 0}), ("c", {"order": 1})], ["b", "c", "a"]),
        ([("pod-1-x", {}), ("pod-x", {}), ("1", {})], ["1", "pod-1-x", "pod-x"]),
        ([("d", {}), ("c", {}), ("b", {}), ("a", {})], ["b", "c", "d"]),
    ],
    ids=["by name", "by number", "as Slurm says", "Slurm's first", "by parts", "with a spare"],
)
def test_nodes_get_ranks_in_slurm_order_or_by_host_name_and_a_spare_node_comes_last(
    arriving: ListenerWithNodes, arrive: list[tuple[str, dict[str, int]]], ordered: list[str]
) -> None:
    nodes = arriving.nodes
    for host, facts in arrive:
        arriving.bring(host=host, **facts)
    nodes.launcher.assign(nodes.launcher.capacity())
    assert [slot.node.name for slot in nodes.launcher.assignments] == ordered
    spare = [host for host, _ in arrive if host not in ordered]
    shown = re.findall(r"^(\S+) +127\.0\.0\.1 ", nodes.table(), re.MULTILINE)
    assert shown == [*ordered, *spare]
    assert list(nodes.launcher.nodes().values()) == [host for host in ordered for _ in range(4)]


def test_two_nodes_of_one_host_keep_the_order_in_which_they_arrived(
    arriving: ListenerWithNodes,
) -> None:
    nodes = arriving.nodes
    first = arriving.bring(host="a")
    arriving.bring(host="a")
    first.leave()
    assert wait_until(lambda: [node.name for node in nodes.listener.nodes] == ["a#2"])
    arriving.bring(host="a")
    assert [node.name for node in nodes.launcher.selected_nodes()] == ["a#2", "a"]


def test_message_texts_about_present_spare_and_starting_nodes(
    arriving: ListenerWithNodes, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    nodes = arriving.nodes

    def refused_capacity() -> str:
        return refusal(RequestError, nodes.launcher.capacity).replace(nodes.command, "COMMAND")

    def last_line() -> str:
        return nodes.table().splitlines()[-1]

    lines = [refused_capacity(), last_line()]
    monkeypatch.setattr(nodes._agents.__class__, "pending", 2)
    lines += [refused_capacity(), last_line()]
    for _ in range(2):
        arriving.bring()
        arriving.bring()
        lines.append(last_line())
    assert lines == snapshot


def test_node_changes_and_lost_log_copies_are_reported(
    arriving: ListenerWithNodes, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    events: list[NodeEvent] = []
    monkeypatch.setattr(arriving.session, "on_node_event", events.append)
    arriving.bring(host="near")
    fake_node = arriving.bring(host="far")
    arriving.nodes.launcher.assign(8)
    fake_node.leave()
    assert wait_until(lambda: len(events) == 3)
    nodes = arriving.nodes
    nodes._on_log_lost(Path("/runs/7"), OSError(errno.ENOSPC, "No space left on device"))
    assert [describe_node(IDLE, each) for each in events] == snapshot
