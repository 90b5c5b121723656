"""Switch off DNS for the thread that connects to a store.

On each connection torch's store client looks up the *name* of the server's address, for its log.
``::ffff:127.0.0.1`` is rarely in /etc/hosts, so this is a query to the name server. If the server
does not answer, the connection waits 10 s (resolv.conf(5); seen with torch 2.13 and 2.15).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _ResolverState(ctypes.Structure):
    """The first fields of glibc's ``struct __res_state`` (resolv.h). Each thread has its own."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    )


@contextmanager
def without_dns() -> Iterator[None]:
    """Resolve host names of this thread from /etc/hosts only. Other threads are not affected.

    On systems without glibc nothing changes.
    """
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "__res_state"):
        yield
        return
    libc.__res_state.restype = ctypes.POINTER(_ResolverState)
    libc.__res_init()  # else the first look-up sets the number of servers
    state = libc.__res_state().contents
    servers, state.nscount = state.nscount, 0  # a query without a server fails at once
    try:
        yield
    finally:
        state.nscount = servers
