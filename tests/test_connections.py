"""A rank's connections are told apart by when they were opened, and shut down accordingly."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch.distributed as dist

from nbddp.worker import sockets
from nbddp.worker.connections import Connections
from nbddp.worker.meeting_store import MeetingStore
from nbddp.worker.sockets import Ends


@contextmanager
def connected(family: socket.AddressFamily = socket.AF_INET) -> Iterator[socket.socket]:
    """One end of a connection; the other reads what is left and tells when it is shut down."""
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


def test_what_process_groups_opened_is_shut_down_and_nothing_else() -> None:
    connections = Connections()
    with ExitStack() as stack:
        earlier = stack.enter_context(connected())
        with connections.keeping():
            mail = stack.enter_context(connected())
        with connections.noting():
            groups = stack.enter_context(connected())
        later = stack.enter_context(connected())
        connections.shut_down()
        assert [is_shut(each) for each in (earlier, mail, groups, later)] == [
            *(False, False, True, False)
        ]


def test_of_what_ranks_send_each_other_only_the_reading_ends_until_the_groups_are_closed() -> None:
    connections = Connections()
    listener = socket.create_server(("127.0.0.1", 0))
    with connections.noting_group():
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
        before = len(list(sockets.descriptors()))
        connections.close_groups()
        assert len(list(sockets.descriptors())) == before - 1
        theirs.settimeout(5.0)
        assert theirs.recv(1) == b""


def test_with_others_too_only_the_mail_goes_on() -> None:
    connections = Connections()
    with ExitStack() as stack:
        earlier = stack.enter_context(connected())
        with connections.keeping():
            mail = stack.enter_context(connected())
        later = stack.enter_context(connected())
        connections.shut_down(others_too=True)
        assert [is_shut(each) for each in (earlier, mail, later)] == [True, False, True]


def test_what_is_opened_while_a_group_fails_to_form_is_noted_too() -> None:
    connections = Connections()
    half: list[socket.socket] = []

    def form(stack: ExitStack) -> None:
        with connections.noting():
            half.append(stack.enter_context(connected()))
            raise RuntimeError("no group")

    with ExitStack() as stack:
        with pytest.raises(RuntimeError, match="no group"):
            form(stack)
        connections.shut_down()
        assert is_shut(half[0])


def test_a_noting_that_an_interrupt_tore_notes_nothing_when_it_is_collected() -> None:
    connections = Connections()
    with ExitStack() as stack:
        torn = connections.noting()
        torn.__enter__()
        users = stack.enter_context(connected())
        del torn
        gc.collect()
        connections.shut_down()
        assert not is_shut(users)


def test_a_connection_that_takes_a_closed_ones_descriptor_is_left_alone() -> None:
    connections = Connections()
    with ExitStack() as stack:
        with connections.noting(), connected() as groups:
            number = groups.fileno()
        users = stack.enter_context(connected())
        assert users.fileno() in range(number - 3, number + 3)
        connections.shut_down()
        assert not is_shut(users)


def test_what_is_noted_while_connections_are_shut_down_stays_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections = Connections()
    with ExitStack() as stack:
        late: list[socket.socket] = []

        def listed() -> list[tuple[int, Ends]]:
            found = sockets.connected()
            if not late:
                late.append(stack.enter_context(connected()))
                with monkeypatch.context() as patch:
                    patch.setattr("nbddp.worker.connections.connected", sockets.connected)
                    with connections.noting():  # as the main thread may, just now
                        late.append(stack.enter_context(connected()))
            return found

        monkeypatch.setattr("nbddp.worker.connections.connected", listed)
        connections.shut_down()
        connections.shut_down()
        assert [is_shut(each) for each in late] == [False, True]


def test_a_store_that_is_lost_while_it_is_opened_is_opened_again() -> None:
    connections = Connections()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with connections.noting():
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    store = MeetingStore(client, connections)
    noting = connections.noting

    @contextmanager
    def interrupted() -> Iterator[None]:
        with noting():
            yield
        store.lose()
        connections.shut_down()

    store.lose()
    connections.shut_down()
    connections.noting = interrupted  # type: ignore[method-assign]
    with pytest.raises(dist.DistNetworkError):
        store.open().set("where", "nowhere")
    connections.noting = noting  # type: ignore[method-assign]
    store.open().set("where", "here")
    assert server.get("where") == b"here"


def test_other_kinds_of_sockets_and_addresses() -> None:
    connections = Connections()
    with ExitStack() as stack:
        one, _other = (stack.enter_context(each) for each in socket.socketpair())
        datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        with connections.noting():
            newer = stack.enter_context(connected(socket.AF_INET6))
        connections.shut_down(others_too=True)
        assert is_shut(newer)
        assert not is_shut(one)
        assert datagrams.fileno() >= 0
        assert listener.getsockname()
