"""Connecting to a store on this machine without asking a name server.

torch's store client looks the *name* of its server's address up on every connection, for its log
messages. For ``::ffff:127.0.0.1`` that is a question to DNS, and where the name server is slow, or
there is no network, each connection waits 5 s or more for the answer (seen with torch 2.13).
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
_DEFAULT = "files dns"  # glibc's own, when the file says nothing


@contextmanager
def without_dns() -> Iterator[None]:
    """Have this process resolve host names from /etc/hosts alone, for a few milliseconds.

    Through glibc's ``__nss_configure_lookup``; elsewhere nothing is changed.
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
    """A client of its own for another thread: a blocking call holds up all calls on a client."""
    with without_dns():
        return store.clone()  # type: ignore[attr-defined, no-any-return]  # not in torch's stubs


def _configure_lookup() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # musl has none


def _configured_lookup() -> str:
    """What the system says of host names, as it stands in its file."""
    try:
        text = _NSSWITCH.read_text()
    except OSError:
        return _DEFAULT
    line = re.search(r"^\s*hosts:\s*([^#\n]+)", text, re.MULTILINE)
    return line.group(1).strip() if line else _DEFAULT
