"""The TCP connections of a rank, by purpose: nbddp's messages, process groups, the user's own.

Connections of a process group are recorded when it is created. So a stuck rank can be freed without
inspecting any other process, which would cost the square of their number.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

MAX_DESCRIPTORS = 65_536  # file descriptors that are tried if they cannot be listed
Ends = tuple[Any, Any]  # the addresses of both ends, unique among open connections


class Connections:
    """Tracks the connections of this process, and shuts down those that a thread may wait on."""

    def __init__(self) -> None:
        self._protected: set[Ends] = set()
        self._waited_on: set[Ends] = set()
        self._of_groups: set[Ends] = set()
        self._held: dict[Ends, int] = {}
        self._bytes_moved: dict[Ends, bytes] = {}

    def protecting(self) -> AbstractContextManager[None]:
        """Never shut down the connections that are opened in this context."""
        return _collecting(self._protected)

    def recording(self) -> AbstractContextManager[None]:
        """Record connections opened in this context as those of a group or its rendezvous."""
        return _collecting(self._waited_on)

    def recording_group(self) -> AbstractContextManager[None]:
        """Record connections opened in this context as those of groups; they end together."""
        return _collecting(self._waited_on, self._of_groups)

    def close_groups(self) -> None:
        """Shut down the connections between ranks, after all process groups were destroyed."""
        for fd, ends in connected():
            if ends in self._of_groups:
                shut_down(fd, ends)
        self._waited_on -= self._of_groups
        self._of_groups.clear()
        while self._held:
            os.close(self._held.popitem()[1])

    def had_traffic(self) -> bool:
        """Return whether process groups have sent or received anything since the last call.

        If a connection ends while a message is partly received, Gloo never wakes the wait for it
        (its ``Pair::signalException`` forgets it). So a connection must be quiet when it is shut
        down.
        """
        open_now = {ends: fd for fd, ends in connected()}
        before, self._bytes_moved = self._bytes_moved, {}
        for ends in self._waited_on & open_now.keys():
            self._bytes_moved[ends] = bytes_moved(open_now[ends])
        return any(before.get(ends, count) != count for ends, count in self._bytes_moved.items())

    def shut_down(self, *, others_too: bool = False) -> None:
        """Shut down the connections that process groups wait on.

        With ``others_too``, shut down all connections that are not protected.

        A connection between ranks is shut down for reading only, and held open until the groups are
        closed. Gloo then treats it as ended, but no rank's write fails. A send that fails before
        Gloo has seen the end would wait forever: in torch 2.13 ``Pair::signalException`` does not
        wake the sends that ``Pair::write`` has dropped. Shutting down both directions hung one of
        three ranks in 16 of 150 rounds of small messages; this hung none of 150. All ranks are
        interrupted together, so no rank needs another one to end its waits.
        """
        # the main thread may add connections that are not in open_now
        recorded = self._waited_on.copy()
        open_now = connected()
        # another connection may get the same ends later
        self._waited_on -= recorded - {ends for _, ends in open_now}
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
        # An interrupt struck in the `with` statement itself, and this runs when the garbage is
        # collected: connections opened since then have other owners.
        is_interrupted = True
    finally:
        opened = set() if is_interrupted else {each for _, each in connected()} - before
        for ends in sets:
            ends |= opened


# ---- all sockets of this process


def connected() -> list[tuple[int, Ends]]:
    """Return the file descriptors and both ends of all connected TCP sockets."""
    found: list[tuple[int, Ends]] = []
    for fd in descriptors():
        with suppress(OSError), _tcp(fd) as connection:  # closed by now, or not connected
            found.append((fd, _ends(connection)))
    return found


def listening() -> list[Any]:
    """Return the addresses that this process listens on."""
    found = []
    for fd in descriptors():
        with suppress(OSError), _tcp(fd) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(listener.getsockname())
    return found


def bytes_moved(fd: int) -> bytes:
    """Return the kernel's byte counts of both directions; constant if there are none (macOS).

    In Linux's ``struct tcp_info`` they are ``tcpi_bytes_acked`` and ``tcpi_bytes_received``.
    """
    if sys.platform != "linux":
        return b""
    with suppress(OSError), _borrowed(fd) as connection:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[120:136]
    return b""


def shut_down(
    fd: int, ends: Ends, how: int = socket.SHUT_RDWR, *, hold: bool = False
) -> int | None:
    """Shut down a connection, if it still has these ends.

    Returns:
        A second descriptor that keeps the connection open after its owner closes it. None if
        ``hold`` is false or no descriptor is free.
    """
    with suppress(OSError), _borrowed(fd) as connection:  # closed by now
        if _ends(connection) == ends:  # else the descriptor was reused
            held = _duplicate(fd) if hold else None
            connection.shutdown(how)
            return held
    return None


def descriptors() -> Iterable[int]:
    """Return the open file descriptors; all possible ones if no descriptor is free to list them."""
    try:
        return [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208 - names, not paths
    except OSError:
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MAX_DESCRIPTORS))


def check_free_descriptors(count: int) -> None:
    """Fail early if this rank has too few free file descriptors, before other ranks wait for it.

    Raises:
        OSError: there are too many open files.
    """
    with ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.dup(2))


def _ends(connection: socket.socket) -> Ends:
    return connection.getsockname(), connection.getpeername()


@contextmanager
def _tcp(fd: int) -> Iterator[socket.socket]:
    """Yield the socket of a file descriptor. Raise OSError if it is not a TCP socket."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise OSError(errno.ENOTSOCK, "not a socket")
    with _borrowed(fd) as connection:
        is_inet = connection.family in (socket.AF_INET, socket.AF_INET6)
        if not is_inet or connection.type != socket.SOCK_STREAM:
            raise OSError(errno.EPROTOTYPE, "not TCP")
        yield connection


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Yield a socket for another owner's file descriptor, through a duplicate descriptor.

    An interrupt may strike here too, and the socket that it leaves behind closes its descriptor.
    The owner's stays open.
    """
    duplicate = _duplicate(fd)
    connection = socket.socket(fileno=fd if duplicate is None else duplicate)
    try:
        yield connection
    finally:
        if duplicate is None:
            connection.detach()
        else:
            connection.close()


def _duplicate(fd: int) -> int | None:
    """Return a second file descriptor for the same file; None if no descriptor is free."""
    try:
        return os.dup(fd)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return None
