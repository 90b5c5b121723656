"""A rank's connections are told apart by when they were opened, and shut down accordingly."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from nbddp.worker.connections import Connections


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
