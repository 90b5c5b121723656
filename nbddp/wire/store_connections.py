"""Connections to the store on this machine, which a process opens at the same time.

On each connection torch's store client looks up the *name* of the server's address, for its log.
``::ffff:127.0.0.1`` is rarely in /etc/hosts, so this is a query to the name server. If the server
does not answer, the query takes 10 s (resolv.conf(5)); after that, torch 2.13 makes no other one in
this process. Switching off DNS is no way out: glibc can do it for the whole process only.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

FOREVER = timedelta(days=365)
_ERROR = 2  # c10::GLOG_ERROR


class Opened(NamedTuple):
    """Connections to the store, and the seconds that a look-up as torch's took meanwhile."""

    stores: list[dist.TCPStore]
    look_up: float


def connect(port: int, count: int, listener: socket.socket | None = None) -> Opened:
    """Open connections to the store at a port of this machine, all at the same time.

    Each thread needs its own client: a blocking call delays all other calls on the same client.

    Args:
        port: port of the store on 127.0.0.1.
        count: the number of connections.
        listener: a socket at this port, if the first connection is to start the store on it.
    """

    def open_one(number: int) -> dist.TCPStore:
        is_server = listener is not None and number == 0
        return dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=is_server,
            timeout=FOREVER,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener and is_server else None,
        )

    with ThreadPoolExecutor(count + 1) as pool:
        look_up = pool.submit(_time_look_up, port)
        return Opened([*pool.map(open_one, range(count))], look_up.result())


def clone(store: dist.Store) -> dist.Store:
    """Open another connection to the same store."""
    return store.clone()  # type: ignore[attr-defined, no-any-return]  # not in torch's stubs


def _time_look_up(port: int) -> float:
    """Return the seconds that a look-up as torch's takes: the reason of a slow start."""
    before = time.monotonic()
    with suppress(OSError):
        socket.getnameinfo(("::ffff:127.0.0.1", port), socket.NI_NUMERICSERV)
    return time.monotonic() - before


def hide_torch_warnings() -> Callable[[], None]:
    """Hide the warnings of torch's C++ code in this process. Return a function that undoes it.

    The store's server writes a C++ stack for each client that sends garbage, and its clients warn
    about the name server. ipykernel would show both below the user's cell. Python warnings are not
    affected, and a level that the user has set stays.
    """
    library = next(Path(torch.__file__).parent.glob("lib/libc10.*"), None)  # .so, or .dylib
    if library is None or "TORCH_CPP_LOG_LEVEL" in os.environ:
        return lambda: None
    level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    before, level.value = level.value, max(level.value, _ERROR)
    return lambda: setattr(level, "value", before)
