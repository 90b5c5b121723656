"""The TCP sockets of this process, whoever opened them, as the kernel knows them."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

MOST = 65_536  # descriptors that are tried where they cannot be listed
Ends = tuple[Any, Any]  # the addresses of both ends: no two open connections have the same


def connected() -> list[tuple[int, Ends]]:
    """The descriptors of all connected TCP sockets, with both ends of each."""
    found = []
    for fd in descriptors():
        with suppress(OSError), _tcp(fd) as connection:  # closed meanwhile, or not connected
            found.append((fd, _ends(connection)))
    return found


def listening() -> list[Any]:
    """The addresses that this process listens at."""
    found = []
    for fd in descriptors():
        with suppress(OSError), _tcp(fd) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(listener.getsockname())
    return found


def bytes_moved(fd: int) -> bytes:
    """What the kernel counts of both directions; the same always where it does not (macOS).

    In Linux's ``struct tcp_info`` it is ``tcpi_bytes_acked`` and ``tcpi_bytes_received``.
    """
    if sys.platform != "linux":
        return b""
    with suppress(OSError), _borrowed(fd) as connection:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[120:136]
    return b""


def shut_down(fd: int, ends: Ends) -> None:
    """End a connection, if it still is the one between these ends."""
    with suppress(OSError), _borrowed(fd) as connection:  # closed meanwhile
        if _ends(connection) == ends:  # and not another one's by now
            connection.shutdown(socket.SHUT_RDWR)


def read_no_more(fd: int, ends: Ends, *, hold: bool) -> int | None:
    """Let whoever reads from the connection between these ends see its end.

    Returns:
        Another descriptor, with which it stays open though its owner closes his; None if there is
        none to spare, or it is not to be held.
    """
    with suppress(OSError), _borrowed(fd) as connection:  # closed meanwhile
        if _ends(connection) == ends:  # and not another one's by now
            held = _duplicate(fd) if hold else None
            connection.shutdown(socket.SHUT_RD)
            return held
    return None


def descriptors() -> Iterable[int]:
    """Those that are open; where none is left to list them with, all that there may be."""
    try:
        return [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208 - names, no paths
    except OSError:
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MOST))


def check_room(count: int) -> None:
    """Open and close so many files. A rank that could not must not keep the others waiting.

    Raises:
        OSError: there are too many open files.
    """
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.dup(2))
    finally:
        for fd in opened:
            os.close(fd)


def _ends(connection: socket.socket) -> Ends:
    return connection.getsockname(), connection.getpeername()


@contextmanager
def _tcp(fd: int) -> Iterator[socket.socket]:
    """The socket of a descriptor; an OSError if it has none, or one of another kind."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise OSError(errno.ENOTSOCK, "not a socket")
    with _borrowed(fd) as connection:
        is_inet = connection.family in (socket.AF_INET, socket.AF_INET6)
        if not is_inet or connection.type != socket.SOCK_STREAM:
            raise OSError(errno.EPROTOTYPE, "not TCP")
        yield connection


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """The socket of somebody else's descriptor, which stays open, through a descriptor of our own.

    An interrupt may strike here too, and a socket that it leaves behind closes its descriptor.
    """
    own = _duplicate(fd)
    connection = socket.socket(fileno=fd if own is None else own)
    try:
        yield connection
    finally:
        if own is None:
            connection.detach()
        else:
            connection.close()


def _duplicate(fd: int) -> int | None:
    """Another descriptor for the same; None where a cell has used them up."""
    try:
        return os.dup(fd)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return None
