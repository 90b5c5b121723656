"""Connect to a store on this machine without DNS.

On each connection torch's store client looks up the *name* of the server's address, for its log
messages. For ``::ffff:127.0.0.1`` this is a DNS query. With a slow name server or without a
network, each connection waits 5 s or more for the answer (seen with torch 2.13).
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_NSSWITCH = Path("/etc/nsswitch.conf")
_DEFAULT = "files dns"  # glibc's default if the file has no entry


@contextmanager
def without_dns() -> Iterator[None]:
    """Make this process resolve host names from /etc/hosts only, for a few milliseconds.

    Uses glibc's ``__nss_configure_lookup``. On other systems nothing changes.
    """
    configure = _configure_lookup()
    if configure is None:
        yield
        return
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        configure(b"hosts", _configured_lookup().encode())


def clone(store: Store) -> Store:
    """Open another connection to the same store.

    Each thread needs its own client: a blocking call delays all other calls on the same client.
    """
    with without_dns():
        return store.clone()  # type: ignore[attr-defined, no-any-return]  # not in torch's stubs


def _configure_lookup() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # musl has none


def _configured_lookup() -> str:
    """Return the host name sources that the system has configured."""
    try:
        text = _NSSWITCH.read_text()
    except OSError:
        return _DEFAULT
    line = re.search(r"^\s*hosts:\s*([^#\n]+)", text, re.MULTILINE)
    return line.group(1).strip() if line else _DEFAULT
