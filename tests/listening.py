"""Where a process listens, as Linux itself says it."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"


def listening(pid: int) -> set[str]:
    """The addresses at which a process takes TCP connections, from ``/proc``."""
    mine = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if found := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                mine.add(found[1])
    found_at = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTENS and rest[5] in mine:
                found_at.add(_address(local.partition(":")[0]))
    return found_at


def _address(text: str) -> str:
    """Words of four bytes, each in this machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))
