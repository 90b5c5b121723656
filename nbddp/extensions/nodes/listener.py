"""The listener in the notebook: accepts nodes, and starts, signals and watches the ranks on them.

All of it runs in an event loop on one thread; other threads submit work to it.
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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbddp
from nbddp.controller.surviving_group import SurvivingRank, run_folder_of
from nbddp.errors import WireError
from nbddp.extensions.nodes.clock_offset import ClockOffset
from nbddp.extensions.nodes.handshake import Handshake, listener_context
from nbddp.extensions.nodes.join_file import JoinFile
from nbddp.extensions.nodes.log_sync import LogReceiver
from nbddp.extensions.nodes.node_connection import (
    FRAME_ERRORS,
    Frame,
    FrameConnection,
    FrameType,
    decode_json,
    forward,
    start_task,
)
from nbddp.extensions.nodes.remote_start import start_facts
from nbddp.sigint import run_in_loop, start_thread, wait_for_result
from nbddp.wire.rank_start import RankStart

logger = logging.getLogger(__name__)

HEARTBEAT_PERIOD = 1.0  # seconds between two heartbeats
SILENT_AFTER = 5.0  # seconds without a frame after which a node is lost
THREAD_TIMEOUT = 5.0  # seconds for the listener's thread to close


@dataclass(slots=True, eq=False)
class Node:
    """A node that has joined.

    Attributes:
        name: its host name, with a number if several nodes have the same.
        address: its own address, as seen from the listener.
        nproc: how many ranks it can run.
        number: its number, which its store connections send.
        since: ``time.time()`` when it joined.
        clock: the offset of its clock.
        is_leaving: whether it was released; it may still be connected.
        lost_reason: why it was lost; empty while it is connected.
        survivors: ranks that were running when it joined, and that this notebook rejoins.
    """

    name: str
    address: str
    nproc: int
    facts: dict[str, Any]
    number: int = 0
    since: float = field(default_factory=time.time)
    clock: ClockOffset = field(default_factory=ClockOffset)
    is_leaving: bool = False
    lost_reason: str = ""
    handles: dict[int, RemoteRankHandle] = field(default_factory=dict)
    survivors: list[SurvivingRank] = field(default_factory=list)
    forwarding: set[asyncio.Task[None]] = field(default_factory=set)


def sort_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Sort nodes by SLURM's node number, then by host name; node2 precedes node10."""

    def place(node: Node) -> tuple[int, list[str | int]]:
        parts = re.split(r"(\d+)", str(node.facts["host"]))
        return int(node.facts["order"]), [int(part) if part.isdigit() else part for part in parts]

    return sorted(nodes, key=place)


def placeholder_node(nproc: int) -> Node:
    """Return a node for ranks whose node has not rejoined."""
    return Node(
        name="?",
        address="?",
        nproc=nproc,
        facts={"gpus": 0, "cores": 1},
        lost_reason="it has not rejoined",
    )


class RemoteRankHandle:
    """A rank's process on a node; see :class:`nbddp.launch.local_launcher.RankHandle`."""

    def __init__(self, listener: NodeListener, node: Node, number: int, folder: Path) -> None:
        self._listener = listener
        self._number = number
        self.node = node
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.exit_reason = ""
        self.cpu_sample = 0.0, 0.0  # a time on the node, and the CPU seconds used until then
        self.log_receiver = LogReceiver(folder, listener.on_copy_failed)
        self._pipe: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._has_ended = threading.Event()

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process ends.

        It is opened when it is first needed: a rejoin that fails watches no process.
        """
        with self._lock:
            if self._pipe is None:
                self._pipe = os.pipe()
                if self._has_ended.is_set():
                    os.close(self._pipe[1])
            return self._pipe[0]

    def is_stopped(self) -> bool:
        """Return False: the node does not report it."""
        return False

    is_ending = is_stopped

    def busy_time(self) -> tuple[float, float]:
        """Return the node's newest sample."""
        return self.cpu_sample

    def join(self) -> None:
        """Wait until the process has exited, and close the descriptor."""
        self._has_ended.wait()
        with self._lock:
            if self._pipe is not None:
                os.close(self._pipe[0])
                self._pipe = None

    def interrupt(self) -> None:
        """Send SIGINT."""
        self._listener.send(self.node, FrameType.INTERRUPT, self._number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._listener.send(self.node, FrameType.TERMINATE, self._number)

    def kill(self) -> None:
        """Send SIGKILL. A node that lost its connection kills its ranks itself."""
        self._listener.send(self.node, FrameType.KILL, self._number)

    def set_exited(self, exitcode: int | None, reason: str = "") -> None:
        """Mark the process as exited, or as lost with its node."""
        with self._lock:
            if self._has_ended.is_set():
                return
            self.exitcode, self.exit_reason = exitcode, reason
            self._has_ended.set()
            self.log_receiver.close()
            if self._pipe is not None:
                os.close(self._pipe[1])


class NodeListener:
    """Listens for nodes, on a thread of its own.

    Args:
        host: the only address to listen on.
        port: 0 for any free port.
        join: the join file of an earlier listener. Its nodes' ranks are then kept as long as
            ``accepts_rejoin`` is true; else they are killed.
        on_change: called on the listener's thread when a node has joined or was lost.
        on_copy_failed: called there, once for each folder into which logs cannot be copied.

    Raises:
        RequestError: the address does not belong to this machine, or the port is in use.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        join: JoinFile | None = None,
        on_change: Callable[[Node], None] = lambda _: None,
        on_copy_failed: Callable[[Path, OSError], None] = lambda *_: None,
    ) -> None:
        self._on_change = on_change
        self._on_copy_failed = on_copy_failed
        self._failed_folders: set[Path] = set()  # folders into which logs could not be copied
        self._numbers = itertools.count(1)
        self._store_port = 0
        self._store_ready = asyncio.Event()  # set when there is a store
        # replaced as a whole, for other threads
        self._connections: dict[Node, FrameConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.refusal = ""  # why the last node with the right secret was refused
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nbddp-nodes")
        self._thread.daemon = True
        self.accepts_rejoin = join is not None
        self.join = join or JoinFile.new(host, port)
        self._handshake = Handshake(listener_context(self.join.secret), self._admit)
        start_thread(self._thread)
        try:
            self._run(self._listen(host, port))
        except BaseException:
            self._stop_loop()
            raise

    @property
    def refused(self) -> int:
        """The number of connections that did not prove the secret or are not nodes."""
        return self._handshake.refused

    @property
    def nodes(self) -> list[Node]:
        """The nodes that are connected."""
        return list(self._connections)

    @property
    def available_nodes(self) -> list[Node]:
        """The nodes that are connected and were not released."""
        return [node for node in self.nodes if not node.is_leaving]

    async def _listen(self, host: str, port: int) -> None:
        address, number = await self._handshake.listen(host, port)
        self.join = replace(self.join, address=address, port=number)
        self._loop.call_later(HEARTBEAT_PERIOD, self._check_nodes, self._loop.time())

    def _run(self, work: Any) -> Any:
        return wait_for_result(run_in_loop(self._loop, work))

    # ---- nodes that join and leave

    def _admit(self, connection: FrameConnection, frame: Frame) -> None:
        """Admit a connection that has proved the secret, depending on its first frame."""
        kind, number, data = frame
        match kind:
            case FrameType.HELLO:
                self._admit_node(connection, decode_json(data))
            case FrameType.STORE:
                self._admit_store(connection, number)
            case _:
                raise WireError(f"a connection does not begin with {kind.name}")

    def _admit_node(self, connection: FrameConnection, facts: dict[str, Any]) -> None:
        reason = incompatibility(facts)
        if reason:
            connection.send_json(FrameType.REFUSED, reason=reason)
            self.refusal = reason
            raise WireError(reason)
        node = Node(
            name=self._unique_name(str(facts["host"])),
            address=str(facts.get("address") or connection.peer),
            nproc=int(facts["nproc"]),
            facts=facts,
            number=next(self._numbers),
        )
        keep = self._rejoin_ranks(node, facts.pop("living", []))
        connection.send_json(FrameType.WELCOME, node.number, keep=keep)
        self._connections = {**self._connections, node: connection}
        start_task(self._tasks, self._read_frames(node, connection))
        self._on_change(node)

    def _admit_store(self, connection: FrameConnection, number: int) -> None:
        node = next((each for each in self.nodes if each.number == number), None)
        if node is None:  # the node was lost a moment ago
            connection.abort()
            return
        start_task(node.forwarding, self._forward(node, connection))

    async def _read_frames(self, node: Node, connection: FrameConnection) -> None:
        try:
            while True:
                self._on_frame(node, *await connection.read())
        except FRAME_ERRORS as error:
            # a killed process resets a connection with unread bytes
            is_end = isinstance(error, (EOFError, ConnectionResetError))
            how = "closed" if is_end else f"lost ({error})"
            self._drop_node(node, f"the connection was {how}")
        finally:
            connection.abort()

    async def _forward(self, node: Node, connection: FrameConnection) -> None:
        """Connect a rank of this node to the store, once there is one."""
        try:
            await self._store_ready.wait()
            with suppress(OSError):  # the store was closed, and this connection with it
                store = await asyncio.open_connection("127.0.0.1", self._store_port)
                await forward(store, connection, self._connections[node])
        finally:
            connection.close()

    def _rejoin_ranks(self, node: Node, living: list[dict[str, Any]]) -> dict[int, dict[str, int]]:
        """Rejoin the processes of a node. Return the sizes of each one's copied logs."""
        if not self.accepts_rejoin:
            return {}
        keep = {}
        for process in living:
            number, start = int(process["number"]), process["start"]
            if start["store_prefix"]:
                continue  # ranks of scripts end with their notebook
            folder = run_folder_of(start)
            handle = RemoteRankHandle(self, node, number, folder)
            handle.pid = process["pid"]
            node.handles[number] = handle
            node.survivors.append(SurvivingRank(handle, start))
            self._numbers = itertools.count(max(next(self._numbers), number + 1))
            log = folder / str(start["log"])
            keep[number] = {log.name: log.stat().st_size} if log.exists() else {}
        return keep

    def _unique_name(self, host: str) -> str:
        taken = {node.name for node in self.nodes}
        names = itertools.chain([host], (f"{host}#{count}" for count in itertools.count(2)))
        return next(name for name in names if name not in taken)

    def _check_nodes(self, last: float) -> None:
        """Once a second, send a heartbeat to each node, and drop silent nodes."""
        now = self._loop.time()
        # this process was stopped: it read no frames
        was_held_up = now - last > 2 * HEARTBEAT_PERIOD
        for node, connection in self._connections.items():
            if was_held_up:
                connection.last_received_at = now
            elif now - connection.last_received_at > SILENT_AFTER:
                self._drop_node(node, f"no sign of life for {SILENT_AFTER:.0f} s")
                connection.abort()
                continue
            connection.send_json(FrameType.BEAT, at=time.time())
        self._loop.call_later(HEARTBEAT_PERIOD, self._check_nodes, now)

    def _drop_node(self, node: Node, reason: str) -> None:
        if node.lost_reason:
            return
        node.lost_reason = reason
        self._connections = {
            other: connection
            for other, connection in self._connections.items()
            if other is not node
        }
        for task in node.forwarding:
            task.cancel()
        for handle in node.handles.values():
            handle.set_exited(None, f"node {node.name}: {reason}")
        self._on_change(node)

    # ---- frames from nodes

    def _on_frame(self, node: Node, kind: FrameType, number: int, data: bytes) -> None:
        match kind:
            case FrameType.LOG:
                name, _, text = data.partition(b"\0")
                node.handles[number].log_receiver.append(Path(name.decode()).name, text)
            case FrameType.STARTED:
                node.handles[number].pid = int(decode_json(data)["pid"])
            case FrameType.FAILED:
                node.handles[number].set_exited(None, str(decode_json(data)["reason"]))
            case FrameType.EXITED:
                node.handles.pop(number).set_exited(decode_json(data)["exitcode"])
            case FrameType.BEAT:
                facts = decode_json(data)
                for started, seconds in facts.get("cpu", {}).items():
                    if handle := node.handles.get(int(started)):
                        handle.cpu_sample = float(facts["at"]), float(seconds)
            case FrameType.ECHO:
                facts = decode_json(data)
                node.clock.add_round(float(facts["sent"]), float(facts["at"]), time.time())
            case FrameType.LEAVE:
                self._drop_node(node, str(decode_json(data)["reason"]) or "it left")
            case _:
                raise ValueError(f"a node does not send {kind.name}")

    def on_copy_failed(self, folder: Path, error: OSError) -> None:
        """Report, once for each folder, that logs cannot be copied into it."""
        if folder not in self._failed_folders:
            self._failed_folders.add(folder)
            self._on_copy_failed(folder, error)

    # ---- called by the notebook, from any thread

    def set_store_port(self, port: int) -> None:
        """Set the port of the store, and forward the store connections that wait for it."""
        self._store_port = port
        self._loop.call_soon_threadsafe(self._store_ready.set)

    def launch(self, node: Node, start: RankStart) -> RemoteRankHandle:
        """Ask a node to start a rank, and do not wait.

        If the node is lost, the rank counts as exited.
        """
        handle = RemoteRankHandle(self, node, next(self._numbers), Path(start.log_path).parent)
        facts = start_facts(start, is_here=bool(node.facts.get("is_kept")))

        def add_handle() -> None:
            node.handles[handle._number] = handle
            if node.lost_reason:
                handle.set_exited(None, f"node {node.name}: {node.lost_reason}")
            self._send(node, FrameType.START, handle._number, facts)

        self._loop.call_soon_threadsafe(add_handle)
        return handle

    def send(self, node: Node, kind: FrameType, number: int = 0, **facts: Any) -> None:
        """Send a frame to a node; drop it if the node is lost."""
        self._loop.call_soon_threadsafe(self._send, node, kind, number, facts)

    def _send(self, node: Node, kind: FrameType, number: int, facts: dict[str, Any]) -> None:
        if connection := self._connections.get(node):
            connection.send_json(kind, number, **facts)

    def close(self, *, releases_nodes: bool = True) -> None:
        """Close the listener. Release all nodes, or leave them to a later notebook."""
        self._run(self._close(releases_nodes=releases_nodes))
        self._stop_loop()

    async def _close(self, *, releases_nodes: bool) -> None:
        self._handshake.close()
        for node, connection in self._connections.items():
            if releases_nodes:
                connection.send_json(FrameType.LEAVE, reason="")
            self._drop_node(node, "the listener was closed")
            connection.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        _, late = await asyncio.wait(others, timeout=THREAD_TIMEOUT)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(THREAD_TIMEOUT)
        if not self._thread.is_alive():
            self._loop.close()


def incompatibility(facts: Mapping[str, Any]) -> str:
    """Return why a node with these facts cannot be used; empty if it can."""
    versions = facts["versions"]
    in_notebook = nbddp.__version__
    if versions["nbddp"] != in_notebook:
        return f"nbddp is {versions['nbddp']} on {facts['host']} and {in_notebook} in the notebook"
    python, here = str(facts["python"]).rsplit(".", 1)[0], platform.python_version()
    if python != here.rsplit(".", 1)[0]:
        return f"Python is {facts['python']} on {facts['host']} and {here} in the notebook"
    torch, here = str(versions["torch"]), version("torch")
    if torch.partition("+")[0] != here.partition("+")[0]:  # builds such as +cpu and +cu128 mix
        return f"torch is {torch} on {facts['host']} and {here} in the notebook"
    return ""
