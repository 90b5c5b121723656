"""The TCP connections of a rank, told apart: the mail's, the process groups', the user's own.

What a process group opened is noted when it is made. So a rank that is stuck can be freed without
looking at any other process, which would cost the square of their number.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

MAX_DESCRIPTORS = 65_536  # descriptors that are tried where they cannot be listed
Ends = tuple[Any, Any]  # the addresses of both ends: no two open connections have the same


class Connections:
    """Knows the connections of this process, and shuts down those that may be waited on."""

    def __init__(self) -> None:
        self._protected: set[Ends] = set()
        self._waited_on: set[Ends] = set()
        self._of_groups: set[Ends] = set()
        self._held: dict[Ends, int] = {}
        self._bytes_moved: dict[Ends, bytes] = {}

    def protecting(self) -> AbstractContextManager[None]:
        """What is opened in here is never shut down."""
        return _collecting(self._protected)

    def recording(self) -> AbstractContextManager[None]:
        """What is opened in here is what a process group, or its rendezvous, waits on."""
        return _collecting(self._waited_on)

    def recording_group(self) -> AbstractContextManager[None]:
        """What is opened in here is a process group's, and ends with all of them."""
        return _collecting(self._waited_on, self._of_groups)

    def close_groups(self) -> None:
        """End what process groups have open among the ranks: all of them are destroyed."""
        for fd, ends in connected():
            if ends in self._of_groups:
                shut_down(fd, ends)
        self._waited_on -= self._of_groups
        self._of_groups.clear()
        while self._held:
            os.close(self._held.popitem()[1])

    def had_traffic(self) -> bool:
        """Whether process groups sent or received anything since this was asked last.

        Gloo never wakes who waits for a message of which a part is here when its connection ends
        (its ``Pair::signalException`` forgets it). So a connection is to be quiet when it is shut.
        """
        open_now = {ends: fd for fd, ends in connected()}
        before, self._bytes_moved = self._bytes_moved, {}
        for ends in self._waited_on & open_now.keys():
            self._bytes_moved[ends] = bytes_moved(open_now[ends])
        return any(before.get(ends, count) != count for ends, count in self._bytes_moved.items())

    def shut_down(self, *, others_too: bool = False) -> None:
        """End what process groups wait on; with ``others_too`` all that does not carry the mail.

        Of a connection among the ranks only the reading is ended, and it is held open until the
        groups are closed. Gloo then takes it for ended, but nobody's writing fails: a send that
        fails before Gloo has seen the end waits on (in torch 2.13 ``Pair::signalException`` tells
        none of those that ``Pair::write`` has left). That hung one of three ranks in 16 of 150
        rounds of small messages whose connections were shut down in both directions, and none of
        150 so. All ranks are interrupted together; none needs another one to end its waits.
        """
        noted = self._waited_on.copy()  # what the main thread notes meanwhile is not in our list
        open_now = connected()
        self._waited_on -= noted - {ends for _, ends in open_now}  # may be another's one day
        for fd, ends in open_now:
            if ends in self._of_groups:
                held = shut_down(fd, ends, socket.SHUT_RD, hold=ends not in self._held)
                if held is not None:
                    self._held[ends] = held
            elif ends in self._waited_on or (others_too and ends not in self._protected):
                shut_down(fd, ends)


@contextmanager
def _collecting(*sets: set[Ends]) -> Iterator[None]:
    before = {each for _, each in connected()}
    is_interrupted = False
    try:
        yield
    except GeneratorExit:
        # an interrupt struck within `with` itself, and this comes as late as the garbage is
        # collected: what was opened meanwhile is somebody else's
        is_interrupted = True
    finally:
        opened = set() if is_interrupted else {each for _, each in connected()} - before
        for ends in sets:
            ends |= opened


# ---- sockets of this process, whoever opened them


def connected() -> list[tuple[int, Ends]]:
    """The descriptors of all connected TCP sockets, with both ends of each."""
    found: list[tuple[int, Ends]] = []
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


def shut_down(
    fd: int, ends: Ends, how: int = socket.SHUT_RDWR, *, hold: bool = False
) -> int | None:
    """End a connection, if it still is the one between these ends.

    Returns:
        Another descriptor, with which it stays open though its owner closes his; None if there is
        none to spare, or it is not to be held.
    """
    with suppress(OSError), _borrowed(fd) as connection:  # closed meanwhile
        if _ends(connection) == ends:  # and not another one's by now
            held = _duplicate(fd) if hold else None
            connection.shutdown(how)
            return held
    return None


def descriptors() -> Iterable[int]:
    """Those that are open; where none is left to list them with, all that there may be."""
    try:
        return [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208 - names, no paths
    except OSError:
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MAX_DESCRIPTORS))


def check_free_descriptors(count: int) -> None:
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
