"""Networks on this machine: a switch, and a namespace with one cable for each node; for root."""

import os
import shlex
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

NET = "10.207.83"  # probably unused on this machine


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Cables:
    """A switch on this machine, and a namespace for each node."""

    def __init__(self, name: str, net: str = NET) -> None:
        self.switch = f"{name}s"
        self._name, self.net = name, net
        self._spaces: list[str] = []
        self.address = f"{net}.1"
        ip("link", "add", self.switch, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", self.switch)
        ip("link", "set", self.switch, "up")

    def add(self) -> str:
        """Add a namespace with a cable. Return its name."""
        number = len(self._spaces) + 2
        space = f"{self._name}{number}"
        ip("netns", "add", space)
        self._spaces.append(space)
        ip("link", "add", space, "type", "veth", "peer", "name", "cable0", "netns", space)
        ip("link", "set", space, "master", self.switch, "up")
        ip("-n", space, "addr", "add", f"{self.net}.{number}/24", "dev", "cable0")
        ip("-n", space, "link", "set", "cable0", "up")
        ip("-n", space, "link", "set", "lo", "up")
        return space

    def cut(self, space: str) -> None:
        ip("link", "set", space, "down")

    def mend(self, space: str) -> None:
        ip("link", "set", space, "up")

    @staticmethod
    def inside(space: str) -> tuple[str, ...]:
        """Return the prefix of a command that runs in this namespace."""
        return ("ip", "netns", "exec", space)

    def close(self) -> None:
        for space in self._spaces:
            subprocess.run(["ip", "link", "del", space], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.switch], check=False, capture_output=True)


def has_namespaces() -> bool:
    """Return whether namespaces and bridges are allowed; some containers forbid bridges."""
    if os.getuid() or shutil.which("ip") is None:
        return False
    name = f"nbt{os.getpid() % 100_000}x"
    try:
        with closing(Cables(name)) as cables:
            cables.add()
    except subprocess.CalledProcessError:
        subprocess.run(["ip", "link", "del", f"{name}s"], check=False, capture_output=True)
        return False
    return True


@contextmanager
def without_reverse_names(folder: Path) -> Iterator[tuple[tuple[str, ...], list[bytes]]]:
    """Serve names on this machine, and never answer which name an address has.

    Yield the prefix of a command that asks this server, in a mount namespace, and the list of the
    queries for the name of an address.
    """
    settings = folder / "resolv.conf"
    address = f"127.77.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
    settings.write_text(f"nameserver {address}\noptions timeout:2 attempts:1\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        asked: list[bytes] = []
        thread = threading.Thread(target=_answer_names, args=(server, asked))
        thread.start()
        mount = f"mount --bind {shlex.quote(str(settings))} /etc/resolv.conf"
        yield ("unshare", "--mount", "sh", "-c", f'{mount}; exec "$@"', "sh"), asked
        server.sendto(b"", server.getsockname())
        thread.join()


def _answer_names(server: socket.socket, asked: list[bytes]) -> None:
    while (received := server.recvfrom(512))[0]:
        query, client = received
        if b"\4arpa\0" in query:
            asked.append(query)
        else:
            is_address = query[12:].split(b"\0", 1)[1].startswith(b"\0\1")
            record = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4\x0a\0\0\1" if is_address else b""
            counts = struct.pack("!4H", 1, is_address, 0, 0)
            server.sendto(query[:2] + b"\x81\x80" + counts + query[12:] + record, client)
