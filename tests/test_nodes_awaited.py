"""A door that is waited at: who came, or who is missing, in one line."""

from __future__ import annotations

import errno
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLauncher
from guests import Guest
from processes import wait_until

from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.group.nodes import Nodes, NodesSpec
from nbddp.nodes.frames import Kind
from nbddp.nodes.keeper import about_this_node

HOST = socket.gethostname()


class AtTheDoor:
    """A door for two nodes, and who comes there."""

    def __init__(self) -> None:
        self.session = Session(FakeLauncher())
        self.nodes = Nodes(self.session, NodesSpec(least=2, most=3))
        self.guests: list[Guest] = []

    def bring(self, **facts: Any) -> Guest:
        """Have one come in, or be refused."""
        seen = self._seen
        guest = Guest(self.nodes.door)
        self.guests.append(guest)
        guest.tell(Kind.HELLO, **about_this_node(4) | facts)
        wait_until(lambda: self._seen > seen)
        return guest

    @property
    def _seen(self) -> int:
        return len(self.nodes.door.nodes) + self.nodes.door.refused

    def close(self) -> None:
        for guest in self.guests:
            guest.close()
        self.nodes.close()


@pytest.fixture
def at_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AtTheDoor]:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = AtTheDoor()
    yield made
    made.close()


def test_who_waits_is_told_at_once_who_has_come(at_the_door: AtTheDoor) -> None:
    at_the_door.bring()
    threading.Timer(0.3, at_the_door.bring).start()
    began = time.monotonic()
    said = at_the_door.nodes.wait(50)
    assert said.startswith(f"2 nodes are here: {HOST} (4 ranks), {HOST}#2 (4 ranks), after ")
    assert time.monotonic() - began < 10


def test_who_waits_where_all_have_come_does_not_wait(at_the_door: AtTheDoor) -> None:
    for _ in range(3):
        at_the_door.bring()
    at_the_door.nodes.wait(50)
    assert at_the_door.nodes.wait(0.001).endswith(" ms")


def test_who_is_missing_is_one_clear_sentence(at_the_door: AtTheDoor) -> None:
    nodes = at_the_door.nodes
    with pytest.raises(RequestError) as caught:
        nodes.wait(0.2)
    line = f"; on each machine: `{nodes.command}`"
    assert str(caught.value) == f"2 nodes are missing after 0.2 s; 0 nodes are here{line}"
    at_the_door.bring(host="gpu-01")
    with pytest.raises(RequestError) as caught:
        nodes.wait(0.2)
    said = f"1 node is missing after 0.2 s; 1 node is here: gpu-01 (4 ranks){line}"
    assert str(caught.value) == said


def test_the_line_names_the_notebooks_python_and_may_be_changed(at_the_door: AtTheDoor) -> None:
    said = at_the_door.nodes.opened()
    assert f"\n    {shlex.quote(sys.executable)} -m torch.distributed.run --nnodes=1 " in said
    assert "change Python's path if it differs" in said


def test_who_was_refused_is_named_with_the_reason(at_the_door: AtTheDoor) -> None:
    at_the_door.bring(python="3.8.1", host="old")
    with pytest.raises(
        RequestError, match=r"; the last one that was refused: Python is 3\.8\.1 on old"
    ):
        at_the_door.nodes.wait(0.2)


def test_a_node_that_goes_while_one_waits_is_missing_again(at_the_door: AtTheDoor) -> None:
    guest = at_the_door.bring()
    threading.Timer(0.1, guest.leave).start()
    with pytest.raises(RequestError, match=r"2 nodes are missing after 2\.0 s; 0 nodes are here"):
        at_the_door.nodes.wait(2.0)


def test_a_node_that_was_sent_home_gets_no_ranks_while_it_packs(at_the_door: AtTheDoor) -> None:
    for _ in range(3):
        at_the_door.bring()
    nodes = at_the_door.nodes
    sent, *others = nodes.door.nodes
    nodes.leave(sent.name)
    assert sent in nodes.door.nodes, "it has not gone yet"
    assert nodes.launcher.room() == 8
    nodes.launcher.settle(8)
    assert [slot.node for slot in nodes.launcher.slots] == others


@pytest.mark.parametrize(
    ("arrive", "ordered"),
    [
        ([("b", {}), ("a", {})], ["a", "b"]),
        ([("node10", {}), ("node2", {}), ("node1", {})], ["node1", "node2", "node10"]),
        ([("a", {"order": 1}), ("b", {"order": 0})], ["b", "a"]),
        ([("a", {}), ("b", {"order": 0}), ("c", {"order": 1})], ["b", "c", "a"]),
        ([("pod-1-x", {}), ("pod-x", {}), ("1", {})], ["1", "pod-1-x", "pod-x"]),
    ],
)
def test_ranks_follow_slurms_order_or_the_host_names(
    at_the_door: AtTheDoor, arrive: list[tuple[str, dict[str, int]]], ordered: list[str]
) -> None:
    nodes = at_the_door.nodes
    for host, facts in arrive:
        at_the_door.bring(host=host, **facts)
    nodes.launcher.settle(nodes.launcher.room())
    assert [slot.node.name for slot in nodes.launcher.slots] == ordered
    assert re.findall(r"^(\S+) +127\.0\.0\.1 ", nodes.table(), re.MULTILINE) == ordered
    assert list(nodes.launcher.nodes().values()) == [host for host in ordered for _ in range(4)]


def test_a_spare_moves_no_rank_whatever_its_name(at_the_door: AtTheDoor) -> None:
    nodes = at_the_door.nodes
    for host in ("d", "c", "b", "a"):
        at_the_door.bring(host=host)
    nodes.launcher.settle(nodes.launcher.room())
    assert [slot.node.name for slot in nodes.launcher.slots] == ["b", "c", "d"]
    assert re.findall(r"^([a-d]) +127", nodes.table(), re.MULTILINE) == ["b", "c", "d", "a"]


def test_two_nodes_of_one_host_keep_the_order_in_which_they_arrived(
    at_the_door: AtTheDoor,
) -> None:
    nodes = at_the_door.nodes
    first = at_the_door.bring(host="a")
    at_the_door.bring(host="a")
    first.leave()
    assert wait_until(lambda: [node.name for node in nodes.door.nodes] == ["a#2"])
    at_the_door.bring(host="a")
    assert [node.name for node in nodes.launcher.chosen()] == ["a#2", "a"]


def test_who_has_started_nodes_here_is_told_to_wait_for_them(
    at_the_door: AtTheDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = at_the_door.nodes
    with pytest.raises(RequestError) as caught:
        nodes.launcher.room()
    assert str(caught.value) == f"0 of 2 nodes are here; on each machine: `{nodes.command}`"
    monkeypatch.setattr(nodes._agents.__class__, "awaited", 2)
    with pytest.raises(RequestError) as caught:
        nodes.launcher.room()
    assert str(caught.value) == (
        "0 of 2 nodes are here; 2 are starting on this machine: `%ddp nodes --wait 60` waits for "
        "them"
    )
    assert nodes.table().endswith("are here; now 0, and 2 are starting on this machine.")


def test_a_cell_uses_as_many_as_were_asked_for_and_the_others_are_spares(
    at_the_door: AtTheDoor,
) -> None:
    nodes = at_the_door.nodes
    assert nodes.table().endswith("A %%ddp cell runs when 2 nodes are here; now 0.")
    for _ in range(2):
        at_the_door.bring()
    nodes.wait(20)
    assert nodes.table().endswith("A %%ddp cell runs on all of them.")
    for _ in range(2):
        at_the_door.bring()
    nodes.spec = NodesSpec(least=4, most=4)
    nodes.wait(20)
    nodes.spec = NodesSpec(least=2, most=3)
    assert nodes.table().endswith("A %%ddp cell runs on the first 3 of them, 1 is a spare.")


def test_copies_of_logs_that_are_not_whole_are_told_of(at_the_door: AtTheDoor) -> None:
    nodes = at_the_door.nodes
    nodes._note_lost(Path("/runs/7"), OSError(errno.ENOSPC, "No space left on device"))
    [event] = at_the_door.session.time_line.since(0.0)
    assert event.facts["what"] == (
        "the logs in /runs/7 are not whole: No space left on device; "
        "each node has those of its ranks"
    )
