"""The TCP connections of a rank, told apart: the mail's, the process groups', the user's own.

What a process group opened is noted when it is made. So a rank that is stuck can be freed without
looking at any other process, which would cost the square of their number.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

MOST = 65_536  # descriptors that are tried where they cannot be listed
Ends = tuple[Any, Any]  # the addresses of both ends: no two open connections have the same


class Connections:
    """Knows the connections of this process, and shuts down those that may be waited on."""

    def __init__(self) -> None:
        self._kept: set[Ends] = set()
        self._noted: set[Ends] = set()
        self._of_groups: set[Ends] = set()
        self._moved: dict[Ends, bytes] = {}

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """What is opened in here is never shut down."""
        yield from self._collecting(self._kept)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What is opened in here is what a process group, or its rendezvous, waits on."""
        yield from self._collecting(self._noted)

    def _collecting(self, ends: set[Ends]) -> Iterator[None]:
        before = {each for _, each in _connected()}
        try:
            yield
        except GeneratorExit:
            # an interrupt struck within `with` itself, and this comes as late as the garbage is
            # collected: what was opened meanwhile is somebody else's
            return
        except BaseException:
            ends |= _opened_since(before)
            raise
        ends |= _opened_since(before)

    def note_new_groups(self) -> None:
        """Note what torch's process groups open from here on, those that a cell makes included."""
        module: Any = dist.distributed_c10d
        name = "_new_process_group_helper"
        make: Callable[..., Any] | None = getattr(module, name, None)
        if make is None:
            return  # then they are among the connections of nobody in particular

        @functools.wraps(make)
        def make_noted(*args: Any, **options: Any) -> Any:
            with self._noting_group():
                return make(*args, **options)

        setattr(module, name, make_noted)

    @contextmanager
    def _noting_group(self) -> Iterator[None]:
        fresh: set[Ends] = set()
        try:
            yield from self._collecting(fresh)
        finally:
            self._noted |= fresh
            self._of_groups |= fresh

    def close_groups(self) -> None:
        """End what process groups have open among the ranks: all of them are destroyed."""
        for fd, ends in _connected():
            if ends in self._of_groups:
                _shut_down(fd, ends)
        self._noted -= self._of_groups
        self._of_groups.clear()

    def have_moved(self) -> bool:
        """Whether process groups sent or received anything since this was asked last.

        Gloo never wakes who waits for a message of which a part is here when its connection ends
        (its ``Pair::signalException`` forgets it). So a connection is to be quiet when it is shut.
        """
        open_now = {ends: fd for fd, ends in _connected()}
        before, self._moved = self._moved, {}
        for ends in self._noted & open_now.keys():
            with suppress(OSError), _borrowed(open_now[ends]) as connection:
                self._moved[ends] = _bytes_moved(connection)
        return any(before.get(ends, count) != count for ends, count in self._moved.items())

    def shut_down(self, *, others_too: bool = False) -> None:
        """End what process groups wait on; with ``others_too`` all that does not carry the mail."""
        open_now = _connected()
        self._noted &= {ends for _, ends in open_now}  # what is closed may be another's one day
        for fd, ends in open_now:
            if ends in self._noted or (others_too and ends not in self._kept):
                _shut_down(fd, ends)


def _opened_since(before: set[Ends]) -> set[Ends]:
    return {each for _, each in _connected()} - before


def _connected() -> list[tuple[int, Ends]]:
    """The descriptors of all connected TCP sockets, with both ends of each."""
    found = []
    for fd in _descriptors():
        with suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with _borrowed(fd) as connection:
                    if _is_tcp(connection):
                        found.append((fd, _ends(connection)))
    return found


def _is_tcp(connection: socket.socket) -> bool:
    is_inet = connection.family in (socket.AF_INET, socket.AF_INET6)
    return is_inet and connection.type == socket.SOCK_STREAM


def _ends(connection: socket.socket) -> Ends:
    return connection.getsockname(), connection.getpeername()


def _bytes_moved(connection: socket.socket) -> bytes:
    """What the kernel counts of both directions; the same always where it does not (macOS).

    In Linux's ``struct tcp_info`` it is ``tcpi_bytes_acked`` and ``tcpi_bytes_received``.
    """
    if sys.platform != "linux":
        return b""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[120:136]


def _shut_down(fd: int, ends: Ends) -> None:
    with suppress(OSError), _borrowed(fd) as connection:  # closed meanwhile
        if _ends(connection) == ends:  # and not another one's by now
            connection.shutdown(socket.SHUT_RDWR)


def _descriptors() -> Iterable[int]:
    """Those that are open; where none is left to list them with, all that there may be."""
    try:
        return [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208 - names, no paths
    except OSError:
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MOST))


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
