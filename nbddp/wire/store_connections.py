"""Connections to the store on this machine."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nbddp.wire.dns import without_dns

FOREVER = timedelta(days=365)
_ERROR = 2  # c10::GLOG_ERROR


def connect(port: int, listener: socket.socket | None = None) -> dist.TCPStore:
    """Open a connection to the store at a port of this machine.

    Each thread needs its own client: a blocking call delays all other calls on the same client.

    Args:
        port: port of the store on 127.0.0.1.
        listener: a socket at this port, to start the store on it.
    """
    with without_dns():
        return dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=listener is not None,
            timeout=FOREVER,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )


def hide_torch_warnings() -> Callable[[], None]:
    """Hide the warnings of torch's C++ code in this process. Return a function that ends this.

    The store's server writes a C++ stack for each client that sends garbage, and its clients warn
    about the name of the server. ipykernel would show both below the user's cell. Python warnings
    are not affected, and a level that the user has set stays.
    """
    library = next(Path(torch.__file__).parent.glob("lib/libc10.*"), None)  # .so, or .dylib
    if library is None or "TORCH_CPP_LOG_LEVEL" in os.environ:
        return lambda: None
    level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    before, level.value = level.value, max(level.value, _ERROR)
    return lambda: setattr(level, "value", before)
