"""A rank's connections are distinguished by when they were opened, and shut down accordingly."""

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch.distributed as dist

from nbddp.worker.process_group.connections import Connections, Ends, descriptors
from nbddp.worker.process_group.connections import connected as connected_here
from nbddp.worker.store_clients import StoreClient


@contextmanager
def connected(family: socket.AddressFamily = socket.AF_INET) -> Iterator[socket.socket]:
    """One end of a connection; the other end reads the remaining data and sees the shutdown."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", 0), family=family))
        port = listener.getsockname()[1]
        host = "::1" if family is socket.AF_INET6 else "127.0.0.1"
        one = stack.enter_context(socket.create_connection((host, port)))
        other, _ = listener.accept()
        stack.enter_context(other)
        other.settimeout(5.0)
        yield one


def is_shut(connection: socket.socket) -> bool:
    """Whether this end can send no more."""
    try:
        connection.send(b"x")
    except BrokenPipeError:
        return True
    return False


Open = Callable[..., socket.socket]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens connections that end with the test."""
    with ExitStack() as stack:
        yield lambda family=socket.AF_INET: stack.enter_context(connected(family))


@pytest.fixture
def connections() -> Connections:
    return Connections()


@pytest.mark.parametrize("others_too", [False, True])
def test_other_connections_than_those_of_process_groups_are_shut_down_only_if_requested(
    connections: Connections, opened: Open, others_too: bool
) -> None:
    earlier = opened()
    with connections.protecting():
        mail = opened()
    with connections.recording():
        groups = opened(socket.AF_INET6)
    later = opened()
    one, other = socket.socketpair()
    with one, other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        connections.shut_down(others_too=others_too)
        found = [is_shut(each) for each in (earlier, mail, groups, later, one)]
        assert datagrams.fileno() >= 0
    assert found == [others_too, False, True, others_too, False]


def test_group_connections_are_shut_down_for_reading_until_the_groups_are_closed(
    connections: Connections,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with connections.recording_group():
        ours = socket.create_connection(listener.getsockname(), 5.0)
    theirs, _ = listener.accept()
    with listener, theirs:
        theirs.setblocking(False)
        connections.shut_down()
        connections.shut_down()
        assert ours.recv(1) == b""
        assert not is_shut(ours)
        ours.close()  # as Gloo does
        assert theirs.recv(2) == b"x"
        assert not is_shut(theirs)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        before = len(list(descriptors()))
        connections.close_groups()
        assert len(list(descriptors())) == before - 1
        theirs.settimeout(5.0)
        assert theirs.recv(1) == b""


def test_connections_of_a_group_that_failed_to_form_are_recorded(
    connections: Connections, opened: Open
) -> None:
    half: list[socket.socket] = []

    def form() -> None:
        with connections.recording():
            half.append(opened())
            raise RuntimeError("no group")

    with pytest.raises(RuntimeError, match="no group"):
        form()
    connections.shut_down()
    assert is_shut(half[0])


def test_an_interrupted_recording_records_nothing_when_it_is_collected(
    connections: Connections, opened: Open
) -> None:
    torn = connections.recording()
    torn.__enter__()
    users = opened()
    del torn
    gc.collect()
    connections.shut_down()
    assert not is_shut(users)


def test_a_connection_that_reuses_a_closed_descriptor_is_not_shut_down(
    connections: Connections, opened: Open
) -> None:
    with connections.recording(), connected() as groups:
        number = groups.fileno()
    users = opened()
    assert users.fileno() in range(number - 3, number + 3)
    connections.shut_down()
    assert not is_shut(users)


def test_connections_recorded_during_a_shutdown_stay_recorded(
    connections: Connections, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[socket.socket] = []

    def listed() -> list[tuple[int, Ends]]:
        found = connected_here()
        if not late:
            late.append(opened())
            with monkeypatch.context() as patch:
                patch.setattr("nbddp.worker.process_group.connections.connected", connected_here)
                with connections.recording():  # as the main thread may, just now
                    late.append(opened())
        return found

    monkeypatch.setattr("nbddp.worker.process_group.connections.connected", listed)
    connections.shut_down()
    connections.shut_down()
    assert [is_shut(each) for each in late] == [False, True]


def test_a_store_that_is_lost_while_it_is_opened_is_opened_again(connections: Connections) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with connections.recording():
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    store = StoreClient(client, connections.recording)

    @contextmanager
    def interrupted() -> Iterator[None]:
        with connections.recording():
            yield
        store.invalidate()
        connections.shut_down()

    store.invalidate()
    connections.shut_down()
    store._recording = interrupted
    with pytest.raises(dist.DistNetworkError):
        store.ensure_connected().set("where", "nowhere")
    store._recording = connections.recording
    store.ensure_connected().set("where", "here")
    assert server.get("where") == b"here"
