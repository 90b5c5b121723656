"""The notebook's side: listens for nodes, and starts, ends and hears the ranks on them.

All of it happens on one thread of its own, in an event loop; what others ask is handed to it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from nbddp.interrupts import begin
from nbddp.launch.launcher import RankHandle
from nbddp.nodes.clocks import Clock
from nbddp.nodes.entrance import Entrance
from nbddp.nodes.frames import Kind, Wire, facts_of
from nbddp.nodes.joining import Join
from nbddp.nodes.keys import at_the_door
from nbddp.nodes.mirror import Inlet
from nbddp.nodes.returning import Living, folder_of
from nbddp.nodes.starts import packed
from nbddp.nodes.tunnel import Carried, Tunnel
from nbddp.promise import kept, promised_by
from nbddp.wire.start import RankStart

logger = logging.getLogger(__name__)

BEAT = 1.0  # seconds between two signs of life
SILENT_AFTER = 5.0  # seconds without one after which a node is gone
PATIENCE = 5.0  # seconds that the door's thread gets to open and to close


@dataclass(slots=True, eq=False)
class Node:
    """One that has come in, and is not gone.

    Attributes:
        name: its host's, with a number if several nodes have the same.
        address: its own, as seen from the door.
        nproc: ranks that it is to have.
        since: when it came, in seconds of ``time.time()``.
        clock: how its clock differs from this machine's.
        is_leaving: whether it was sent home, and may still be there.
        why_gone: empty while it is there.
        living: ranks that it had when it came, and which were taken back.
    """

    name: str
    address: str
    nproc: int
    facts: dict[str, Any]
    wire: Wire
    tunnel: Tunnel
    since: float = field(default_factory=time.time)
    clock: Clock = field(default_factory=Clock)
    is_leaving: bool = False
    why_gone: str = ""
    handles: dict[int, RemoteHandle] = field(default_factory=dict)
    living: list[Living] = field(default_factory=list)


def in_order(nodes: Iterable[Node]) -> list[Node]:
    """Sort nodes by SLURM's number of the node, then by host name; node2 precedes node10."""

    def place(node: Node) -> tuple[int, list[str | int]]:
        parts = re.split(r"(\d+)", str(node.facts["host"]))
        return int(node.facts["order"]), [int(part) if part.isdigit() else part for part in parts]

    return sorted(nodes, key=place)


def lost_node(nproc: int) -> Node:
    """One that had so many ranks and of which nothing else is known."""
    wire = Wire(lambda *_: None, lambda *_: None)
    return Node(
        name="?",
        address="?",
        nproc=nproc,
        facts={"gpus": 0, "cores": 1},
        wire=wire,
        tunnel=Tunnel(wire),
        why_gone="it has not come back",
    )


class RemoteHandle:
    """A rank's process on a node; see :class:`nbddp.launch.launcher.RankHandle`."""

    def __init__(self, door: Door, node: Node, number: int, folder: Path) -> None:
        self._door = door
        self._number = number
        self.node = node
        self.folder = folder
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.why = ""  # why it has ended, where no exit code tells
        self.cpu_time = 0.0, 0.0  # a time on the node, and the CPU seconds used by then
        self.sentinel, self._writer = os.pipe()
        self._has_ended = threading.Event()

    def join(self) -> None:
        """Wait until it has ended, and let go of the descriptor."""
        self._has_ended.wait()
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    def interrupt(self) -> None:
        """Send SIGINT."""
        self._door.tell(self.node, Kind.INTERRUPT, self._number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._door.tell(self.node, Kind.TERMINATE, self._number)

    def kill(self) -> None:
        """Send SIGKILL; a node that cannot be reached ends its ranks itself."""
        self._door.tell(self.node, Kind.KILL, self._number)

    def note_end(self, exitcode: int | None, why: str = "") -> None:
        """It has ended, or nobody will hear of it any more."""
        if not self._has_ended.is_set():
            self.exitcode, self.why = exitcode, why
            self._has_ended.set()
            os.close(self._writer)


def why_gone(handle: RankHandle) -> str:
    """Why a rank has ended, where that is not its process's own doing; else empty."""
    return handle.why if isinstance(handle, RemoteHandle) else ""


class Change(NamedTuple):
    """A node has come, or is gone."""

    node: Node
    has_come: bool


class Door:
    """Where nodes come in.

    Args:
        host: the address to listen on, and no other.
        port: 0 for any that is free.
        join: of a door that was there before. Ranks that its nodes have are taken back then, as
            long as ``takes_back`` says so; else they are ended.
        on_change: told on the door's thread when a node has come or gone.
        on_lost: told there of a folder where copies of nodes' files cannot be written.

    Raises:
        RequestError: that address is not this machine's, or the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        join: Join | None = None,
        on_change: Callable[[Change], None] = lambda _: None,
        on_lost: Callable[[Path, OSError], None] = lambda *_: None,
    ) -> None:
        self._on_change = on_change
        self._numbers = itertools.count(1)
        self._inlet = Inlet(on_lost)
        self._store_port = 0
        self._serves = asyncio.Event()  # whether there is a store
        self.nodes: list[Node] = []
        self.why_refused = ""  # the last of those that proved it, and do not fit
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nbddp-nodes")
        self._thread.daemon = True
        self.takes_back = join is not None
        self.join = join or Join.new(host, port)
        self._entrance = Entrance(at_the_door(self.join.secret), self._on_hello)
        begin(self._thread)
        try:
            self._call(self._listen(host, port))
        except BaseException:
            self._stop_loop()
            raise

    @property
    def refused(self) -> int:
        """Connections of those that could not prove who they are, or were no node."""
        return self._entrance.refused

    @property
    def staying(self) -> list[Node]:
        """Nodes that are here and were not sent home."""
        return [node for node in self.nodes if not node.is_leaving]

    async def _listen(self, host: str, port: int) -> None:
        address, number = await self._entrance.listen(host, port)
        self.join = replace(self.join, address=address, port=number)
        self._loop.call_later(BEAT, self._look, self._loop.time())

    def _call(self, work: Any) -> Any:
        return kept(promised_by(self._loop, work))

    # ---- nodes that come and go

    def _on_hello(self, wire: Wire, data: bytes) -> bool:
        """A node says who it is; whether it can come in."""
        facts = facts_of(data)
        reason = why_not(facts)
        if reason:
            wire.tell(Kind.REFUSED, reason=reason)
            wire.close()
            self.why_refused = reason
            return False
        address = str(facts.get("address") or wire.peer)
        node = Node(
            name=self._name(str(facts["host"])),
            address=address,
            nproc=int(facts["nproc"]),
            facts=facts,
            wire=wire,
            tunnel=Tunnel(wire),
        )
        wire.follow(
            lambda _wire, kind, number, data: self._on_frame(node, kind, number, data),
            lambda _wire, error: self._lose(node, _say_lost(error)),
        )
        wire.tell(Kind.WELCOME, keep=self._take_back(node, facts.pop("living", [])))
        self.nodes = [*self.nodes, node]
        self._on_change(Change(node, has_come=True))
        return True

    def _take_back(self, node: Node, living: list[dict[str, Any]]) -> dict[int, dict[str, int]]:
        """The processes that are wanted back, and how much of their logs is here."""
        if not self.takes_back:
            return {}
        keep = {}
        for each in living:
            number, start = int(each["number"]), each["start"]
            if start["store_prefix"]:
                continue  # a rank of a script ends with the notebook that started it
            folder = folder_of(start)
            handle = RemoteHandle(self, node, number, folder)
            handle.pid = each["pid"]
            node.handles[number] = handle
            node.living.append(Living(handle, start))
            self._numbers = itertools.count(max(next(self._numbers), number + 1))
            log = folder / str(start["log"])
            keep[number] = {log.name: log.stat().st_size} if log.exists() else {}
        return keep

    def _name(self, host: str) -> str:
        known = {node.name for node in self.nodes}
        names = itertools.chain([host], (f"{host}#{count}" for count in itertools.count(2)))
        return next(name for name in names if name not in known)

    def _look(self, last: float) -> None:
        """Once a second: say that this side lives, and see who does not."""
        now = self._loop.time()
        was_held_up = now - last > 2 * BEAT  # this process stood still: nobody could be heard
        for node in self.nodes:
            if was_held_up:
                node.wire.heard_at = now
            elif now - node.wire.heard_at > SILENT_AFTER:
                self._lose(node, f"no sign of life for {SILENT_AFTER:.0f} s")
                node.wire.abort()
                continue
            node.wire.tell(Kind.BEAT, at=time.time())
        self._loop.call_later(BEAT, self._look, now)

    def _lose(self, node: Node, why: str) -> None:
        if node.why_gone:
            return
        node.why_gone = why
        self.nodes = [each for each in self.nodes if each is not node]
        node.tunnel.close()
        for handle in node.handles.values():
            handle.note_end(None, f"node {node.name}: {why}")
        self._on_change(Change(node, has_come=False))

    # ---- what nodes say

    def _on_frame(self, node: Node, kind: Kind, number: int, data: bytes) -> None:  # noqa: C901
        match kind:
            case Kind.DATA | Kind.CREDIT | Kind.CLOSE:
                node.tunnel.take(kind, number, data)
            case Kind.OPEN:
                carried = node.tunnel.add(number)  # at once: what it carries comes with it
                self._loop.create_task(self._connect(node, number, carried))
            case Kind.LOG:
                name, _, text = data.partition(b"\0")
                folder = node.handles[number].folder
                self._inlet.append(folder / Path(name.decode()).name, text)
            case Kind.STARTED:
                node.handles[number].pid = int(facts_of(data)["pid"])
            case Kind.FAILED:
                node.handles[number].note_end(None, str(facts_of(data)["reason"]))
            case Kind.EXITED:
                node.handles.pop(number).note_end(facts_of(data)["exitcode"])
            case Kind.BEAT:
                facts = facts_of(data)
                for started, seconds in facts.get("cpu", {}).items():
                    if handle := node.handles.get(int(started)):
                        handle.cpu_time = float(facts["at"]), float(seconds)
            case Kind.ECHO:
                facts = facts_of(data)
                node.clock.note(float(facts["sent"]), float(facts["at"]), time.time())
            case Kind.LEAVE:
                self._lose(node, str(facts_of(data)["reason"]) or "it has left")
            case _:
                raise ValueError(f"a node does not say {kind.name}")

    async def _connect(self, node: Node, number: int, carried: Carried) -> None:
        """A rank of this node dials the store; one that has come back may be here before it."""
        await self._serves.wait()
        try:
            await self._loop.create_connection(lambda: carried, "127.0.0.1", self._store_port)
        except OSError:
            node.tunnel.refuse(number)

    # ---- what the notebook asks, from any thread

    def serve_store(self, port: int) -> None:
        """Ranks that dial the store find it at this port of this machine."""
        self._store_port = port
        self._loop.call_soon_threadsafe(self._serves.set)

    def launch(self, node: Node, start: RankStart) -> RemoteHandle:
        """Have a node start a rank; returns before it has.

        If the node is gone, or goes meanwhile, the rank has ended.
        """
        handle = RemoteHandle(self, node, next(self._numbers), Path(start.log_path).parent)
        facts = packed(start)

        def begin() -> None:
            node.handles[handle._number] = handle
            if node.why_gone:
                handle.note_end(None, f"node {node.name}: {node.why_gone}")
            node.wire.tell(Kind.START, handle._number, **facts)

        self._loop.call_soon_threadsafe(begin)
        return handle

    def tell(self, node: Node, kind: Kind, number: int = 0, **facts: Any) -> None:
        """Send something to a node; to one that is gone, nothing."""
        self._loop.call_soon_threadsafe(lambda: node.wire.tell(kind, number, **facts))

    def close(self, *, sends_home: bool = True) -> None:
        """End the thread, and send all nodes home; else they wait for somebody else."""
        self._call(self._close(sends_home=sends_home))
        self._stop_loop()

    async def _close(self, *, sends_home: bool) -> None:
        await self._entrance.close()
        wires = [node.wire for node in self.nodes]
        for node in self.nodes:
            if sends_home:
                node.wire.tell(Kind.LEAVE, reason="")
            self._lose(node, "the door was closed")
            node.wire.close()
        deadline = self._loop.time() + PATIENCE
        while any(wire.is_open for wire in wires) and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        for wire in wires:
            wire.abort()
        self._inlet.close()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        if not self._thread.is_alive():
            self._loop.close()


def why_not(facts: Mapping[str, Any]) -> str:
    """Why a node with these cannot work with this notebook; empty if it can."""
    versions = facts["versions"]
    mine = version("nbddp")
    if versions["nbddp"] != mine:
        return f"nbddp is {versions['nbddp']} on {facts['host']} and {mine} in the notebook"
    python, here = str(facts["python"]).rsplit(".", 1)[0], platform.python_version()
    if python != here.rsplit(".", 1)[0]:
        return f"Python is {facts['python']} on {facts['host']} and {here} in the notebook"
    return ""


def _say_lost(error: Exception | None) -> str:
    """Describe the end of a connection. A killed process resets it if it had unread bytes."""
    is_end = error is None or isinstance(error, ConnectionResetError)
    return "the connection was closed" if is_end else f"the connection was lost ({error})"
