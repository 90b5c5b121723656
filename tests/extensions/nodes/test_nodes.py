"""What machines prove to each other, and what goes between them."""

import asyncio
import errno
import os
import re
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fake_nodes import FakeNodes
from processes import wait_until
from refusals import refusal
from syrupy.assertion import SnapshotAssertion
from typed import Typed

from nbddp.errors import RequestError
from nbddp.extensions.nodes import handshake
from nbddp.extensions.nodes import listener as listener_module
from nbddp.extensions.nodes import notebook as nodes
from nbddp.extensions.nodes.__main__ import main
from nbddp.extensions.nodes.clock_offset import ClockOffset
from nbddp.extensions.nodes.join_file import JoinFile
from nbddp.extensions.nodes.listener import Node, NodeListener, RemoteRankHandle
from nbddp.extensions.nodes.log_sync import LogReceiver, LogSender
from nbddp.extensions.nodes.node_agent import node_facts
from nbddp.extensions.nodes.node_connection import (
    FrameConnection,
    FrameType,
    StoreForwarder,
    decode_json,
    forward,
)
from nbddp.extensions.nodes.node_pool import NodesSpec

JOIN = JoinFile.new("127.0.0.1", 29400)
VERSIONS = node_facts(1)["versions"]


def test_only_the_owner_can_read_the_join_file_and_no_repr_shows_its_secret(tmp_path: Path) -> None:
    path = JOIN.save(tmp_path / "join")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert JoinFile.load(path) == JOIN
    assert "secret" not in repr(JOIN)


def test_invalid_join_files_are_refused_with_the_reason(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    readable = JOIN.save(tmp_path / "readable")
    readable.chmod(0o640)
    paths = [tmp_path / "nowhere", readable]
    for text in ("", "x", "bm90IGpzb24=", "WzEsIDIsIDMsICJ4Il0="):
        paths.append(tmp_path / f"file{len(paths)}")
        paths[-1].touch(0o600)
        paths[-1].write_text(text)
    reasons = [
        refusal(RequestError, JoinFile.load, path).replace(str(path), "PATH") for path in paths
    ]
    assert reasons == snapshot


def test_a_node_that_cannot_store_logs_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, taken = JOIN.save(tmp_path / "join"), tmp_path / "taken"
    taken.touch()
    assert main(["--join", str(path), "--folder", str(taken)]) == 2
    another = os.geteuid() + 1  # who has made the folder before, as in /tmp
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert main(["--join", str(path), "--folder", str(tmp_path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert f"{taken}/" in first
    assert "belongs to another user" in second
    assert "--folder" in first
    assert "--folder" in second


def test_an_agent_started_once_per_rank_is_refused_with_the_options_to_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert main(["--join", "any"]) == 2
    usage = capsys.readouterr().err
    assert "--nproc-per-node=1" in usage
    assert "--ranks=8" in usage


class ListenerWithNodes(FakeNodes):
    """A listener, fake nodes, and the node events that it reports."""

    def __init__(self) -> None:
        self.changes: list[Node] = []
        self.lost: list[Path] = []  # folders
        listener = NodeListener(
            "127.0.0.1",
            on_change=self.changes.append,
            on_copy_failed=lambda folder, _: self.lost.append(folder),
        )
        super().__init__(listener)

    def has_refused(self, count: int = 1) -> bool:
        return wait_until(lambda: self.listener.refused == count) and not self.listener.nodes


@pytest.fixture
def arriving() -> Iterator[ListenerWithNodes]:
    made = ListenerWithNodes()
    yield made
    made.close()
    made.listener.close()


def test_a_node_with_another_secret_is_refused(arriving: ListenerWithNodes) -> None:
    with pytest.raises(ssl.SSLError):
        arriving.connect(b"x" * 32)
    assert arriving.has_refused()


def test_connections_without_tls_or_a_certificate_are_refused(arriving: ListenerWithNodes) -> None:
    address = ("127.0.0.1", arriving.listener.join.port)
    for count in (1, 2):
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(100) in (b"", b"\x15\x03\x01\x00\x02\x02F")  # a TLS alert
        assert arriving.has_refused(count)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(address) as stranger,
        suppress(ssl.SSLError, ConnectionError),  # it may learn of it when it reads
        context.wrap_socket(stranger) as wrapped,
    ):
        assert wrapped.recv(1) == b""
    assert arriving.has_refused(3)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"python": "3.8.1"}, r"Python .*3\.8\.1 .*\bold\b.* 3\."),
        ({"versions": VERSIONS | {"torch": "2.0.1"}}, r"torch is 2\.0\.1 on old and 2\."),
        ({"versions": VERSIONS | {"nbddp": "0"}}, r"nbddp is 0 on old and \d"),
    ],
    ids=["Python", "torch", "nbddp"],
)
def test_a_node_with_another_version_is_refused_with_the_reason(
    facts: dict[str, Any], reason: str, arriving: ListenerWithNodes
) -> None:
    fake_node = arriving.bring(**facts, host="old")
    assert wait_until(fake_node.is_lost.is_set)
    [(kind, data)] = fake_node.frames
    assert kind is FrameType.REFUSED
    assert re.search(reason, decode_json(data)["reason"])
    assert arriving.has_refused()
    assert arriving.listener.refusal == decode_json(data)["reason"]


def test_a_node_with_another_build_of_the_same_torch_is_admitted(
    arriving: ListenerWithNodes,
) -> None:
    release = VERSIONS["torch"].partition("+")[0]
    arriving.bring(versions=VERSIONS | {"torch": f"{release}+cu999"})
    assert len(arriving.listener.nodes) == 1


def test_a_node_of_a_slurm_job_without_gpus_reports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    assert node_facts(1)["gpus"] == 0


@pytest.mark.parametrize("kind", [FrameType.DATA, FrameType.STARTED, FrameType.LEAVE])
def test_a_node_whose_first_frame_is_not_hello_is_disconnected(
    arriving: ListenerWithNodes, kind: FrameType
) -> None:
    fake_node = arriving.connect()
    fake_node.tell(kind)
    assert wait_until(fake_node.is_lost.is_set)
    assert arriving.has_refused()


@pytest.mark.parametrize(
    "kind", [None, FrameType.HELLO, FrameType.START, FrameType.WELCOME, FrameType.LOG]
)
def test_a_node_that_disconnects_or_sends_an_invalid_frame_counts_as_lost(
    arriving: ListenerWithNodes, kind: FrameType | None
) -> None:
    fake_node = arriving.bring()
    if kind is None:
        fake_node.leave()
    else:
        fake_node.tell(kind, number=99)
    assert wait_until(lambda: len(arriving.changes) == 2)
    gone = arriving.changes[1]
    assert "connection" in gone.lost_reason
    assert not arriving.listener.nodes


def test_a_silent_node_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch, arriving: ListenerWithNodes
) -> None:
    monkeypatch.setattr(listener_module, "SILENT_AFTER", 1.0)
    arriving.connect().tell(FrameType.HELLO, **node_facts(1))  # and no sign of life after that
    assert wait_until(lambda: len(arriving.changes) == 2)
    assert arriving.changes[1].lost_reason.endswith(" 1 s")


def test_too_many_silent_connections_are_closed_at_once(
    arriving: ListenerWithNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "MAX_PENDING_PER_ADDRESS", 2)
    address = ("127.0.0.1", arriving.listener.join.port)
    with socket.create_connection(address) as first, socket.create_connection(address):
        with socket.create_connection(address) as third, suppress(ConnectionError):
            assert third.recv(1) == b""
        assert arriving.has_refused(1)
        first.close()
        assert arriving.has_refused(2)
        arriving.bring()
    assert wait_until(lambda: arriving.listener.refused == 3)


def test_an_address_that_cannot_be_listened_on_is_named(arriving: ListenerWithNodes) -> None:
    port = arriving.listener.join.port
    for address, wanted, named in (
        ("203.0.113.1", 0, "203.0.113.1: "),
        ("127.0.0.1", port, f"127.0.0.1:{port}: "),
    ):
        with pytest.raises(RequestError, match=re.escape(named)):
            NodeListener(address, wanted)


class OneNode:
    """Both sides of a node's connections, without TLS, in one event loop."""

    def __init__(self) -> None:
        self.order: list[str] = []  # the frames that the notebook's side handled
        self.has_log = True  # whether a rank has always written something
        self.refusals = 0  # of the next connections
        self._far: list[FrameConnection] = []

    async def open(self) -> None:
        self._store = await asyncio.start_server(self._echo, "127.0.0.1", 0)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        control = await self._dial()
        assert control is not None
        self.control = control
        self.forwarder = StoreForwarder(self.control, 7, self._dial, self._before)
        self.forwarder.serve(self._listener)

    async def _dial(self) -> FrameConnection | None:
        self.refusals -= 1
        if self.refusals > 0:
            return None
        return FrameConnection(*await asyncio.open_connection(*port_of(self._server)))

    async def _accept(self, *streams: Any) -> None:
        """The control connection first, then those to the store."""
        self._far.append(FrameConnection(*streams))
        if len(self._far) == 1:
            await self._handle(self._far[0])
            return
        assert (await self._far[-1].read())[:2] == (FrameType.STORE, 7)
        store = await asyncio.open_connection(*port_of(self._store))
        await forward(store, self._far[-1], self._far[0])

    async def _handle(self, control: FrameConnection) -> None:
        with suppress(EOFError):
            while True:
                _, _, data = await control.read()
                await asyncio.sleep(0.05)  # this connection is the slower one
                self.order.append(data.decode())
        control.close()

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.order.append("connected")
        while data := await reader.read(1 << 20):
            writer.write(data)
            await writer.drain()
        writer.close()

    def _before(self) -> None:
        if self.has_log:
            self.control.send(FrameType.LOG, 0, b"log")

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Act as a rank."""
        return await asyncio.open_connection(*self._listener.getsockname())

    async def close(self) -> None:
        self.control.close()
        self.forwarder.close()
        for server in (self._store, self._server, self._listener):
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)
        await asyncio.sleep(0)  # the last closed connection


def port_of(server: asyncio.Server) -> Any:
    return server.sockets[0].getsockname()


def on_one_node(use: Callable[[OneNode], Awaitable[None]]) -> None:
    async def run() -> None:
        node = OneNode()
        await node.open()
        await use(node)
        await node.close()

    asyncio.run(run())


@pytest.mark.parametrize("size", [256, 20 << 20])
def test_requests_to_the_store_and_replies_are_forwarded_unchanged(size: int) -> None:
    async def use(node: OneNode) -> None:
        node.has_log, node.refusals = False, 2
        reader, writer = await node.dial()
        data = bytes(range(256)) * (size // 256)
        writer.write(data)
        assert await reader.readexactly(size) == data
        writer.close()

    on_one_node(use)


def test_forwarded_data_arrives_after_the_log_written_before_it() -> None:
    async def use(node: OneNode) -> None:
        reader, writer = await node.dial()
        for count in (1, 2):
            writer.write(b"x")
            await reader.readexactly(1)
            assert node.order == ["connected", *["log"] * count]
        writer.close()

    on_one_node(use)


def test_closing_the_forwarder_closes_all_connections_even_a_new_one() -> None:
    async def use(node: OneNode) -> None:
        early, writer = await node.dial()
        writer.write(b"x")
        await early.readexactly(1)
        late, other = await node.dial()
        node.forwarder.close()
        for reader in (early, late):
            assert await reader.read() == b""
        for connection in (writer, other):
            connection.close()

    on_one_node(use)


async def _ended(sock: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    return True


# a socket whose task was cancelled too early closes itself, with a ResourceWarning
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("turns", range(6))  # of the event loop, in which it is accepted
def test_a_connection_accepted_while_the_forwarder_closes_is_closed(turns: int) -> None:
    async def connect_and_lose() -> bool:
        async def no_way() -> None:
            return None

        with socket.create_server(("127.0.0.1", 0)) as listener:
            forwarder = StoreForwarder(Mock(FrameConnection), 1, no_way, lambda: None)
            forwarder.serve(listener)
            with socket.create_connection(listener.getsockname()) as rank:
                rank.setblocking(False)
                for _ in range(turns):
                    await asyncio.sleep(0)
                forwarder.close()
                await asyncio.sleep(0.05)
                listener.close()  # it ends a connection that was not accepted yet
                return await asyncio.wait_for(_ended(rank), 10)

    assert asyncio.run(connect_and_lose())


def test_a_log_copy_grows_with_the_log_on_the_node(tmp_path: Path) -> None:
    original, run = tmp_path / "rank0.log", tmp_path / "run"
    run.mkdir()
    lost: list[OSError] = []
    inlet = LogReceiver(run, lambda _folder, error: lost.append(error))
    outlet = LogSender(lambda _number, name, data: inlet.append(name, data))
    outlet.follow(1, original)
    outlet.send_new_data()
    for text in ("a line\n", "half", " and half\n", "x" * 3_000_000):
        with original.open("a") as file:
            file.write(text)
        outlet.send_new_data()
        assert (run / "rank0.log").read_bytes() == original.read_bytes()
    inlet.close()
    assert not lost


def test_a_failed_write_ends_one_log_copy_and_not_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[tuple[Path, int | None]] = []
    inlet = LogReceiver(tmp_path, lambda folder, error: lost.append((folder, error.errno)))
    inlet.append("rank0.log", b"before ")

    def full(file: int, data: memoryview) -> int:
        if len(data) < 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:4])

    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        inlet.append("rank0.log", b"1234 6789")
    inlet.append("rank0.log", b" after")
    inlet.append("rank1.log", b"another")
    assert (tmp_path / "rank0.log").read_bytes() == b"before 1234 678"
    assert (tmp_path / "rank1.log").read_bytes() == b"another"
    assert lost == [(tmp_path, errno.ENOSPC)]
    inlet.close()


def test_a_node_stays_connected_if_the_run_folder_is_deleted(
    tmp_path: Path, arriving: ListenerWithNodes
) -> None:
    fake_node, listener = arriving.bring(), arriving.listener
    [node] = listener.nodes
    handle = node.handles[1] = RemoteRankHandle(listener, node, 1, tmp_path / "gone")
    for name in (b"rank0.log", b"metrics.jsonl"):
        fake_node.send(FrameType.LOG, 1, name + b"\0a line\n")
    fake_node.tell(FrameType.STARTED, 1, pid=7)
    assert wait_until(lambda: handle.pid == 7)
    assert arriving.changes == [node]
    assert arriving.lost == [tmp_path / "gone"]
    fake_node.leave()
    handle.join()


def test_a_shared_file_is_sent_in_whole_lines_for_a_rank_that_still_runs(tmp_path: Path) -> None:
    original = tmp_path / "metrics.jsonl"
    sent: list[tuple[int, bytes]] = []
    outlet = LogSender(lambda number, _name, data: sent.append((number, data)))
    for number in (3, 4):
        outlet.follow(number, original, whole_lines=True)
    outlet.unfollow(4)
    for text in ('{"a": 1}\n{"a"', "", ": 2}\n"):
        with original.open("a") as file:
            file.write(text)
        outlet.send_new_data()
    outlet.unfollow(3)
    original.write_text("longer than all of it before\n")
    outlet.send_new_data()
    assert sent == [(3, b'{"a": 1}\n'), (3, b'{"a": 2}\n')]


def test_the_clock_offset_comes_from_the_shortest_round_trip() -> None:
    clock = ClockOffset()
    clock.add_round(0.0, 5.9, 1.0)  # ± 0.5
    clock.add_round(10.0, 15.05, 10.1)  # ± 0.05
    clock.add_round(20.0, 25.5, 20.8)  # ± 0.4
    assert clock.offset == pytest.approx(5.0)
    assert clock.error == pytest.approx(0.05)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("variables", "count", "backend"),
    [
        ({}, 3, "xccl"),
        ({"ZE_AFFINITY_MASK": "2"}, 1, "xccl"),
        ({"ZE_AFFINITY_MASK": ""}, 0, "nccl"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, "nccl"),
    ],
)
def test_a_node_counts_devices_without_torch(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int, backend: str
) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "", **variables})
    facts = node_facts(1)
    assert (facts["gpus"], facts["gpu_backend"]) == (count, backend)


def test_a_listener_opens_with_given_options(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Mock()
    monkeypatch.setattr(nodes, "open_nodes", opened)
    options = "--nnodes 2:4 --nproc-per-node 8 --host 10.0.0.7 --port 5555 --orphan-timeout 9"
    typed.line(f"nodes {options}")
    asked = {"min_nodes": 2, "max_nodes": 4, "nproc_per_node": 8, "host": "10.0.0.7", "port": 5555}
    spec = NodesSpec(**asked, orphan_timeout=9.0)
    opened.assert_called_once_with(typed.notebook.group, spec)
    for option in options.split("--")[1:]:  # each of them alone opens one
        typed.line(f"nodes --{option}")
    assert opened.call_count == 6
