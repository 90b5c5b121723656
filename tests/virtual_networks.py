"""Networks on this machine: a switch, and a namespace with one cable for each node; for root."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import closing

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
