"""What a rank on a node is told: what is everywhere the same, and what its own machine adds.

Of the notebook's environment only that travels which the user has named. The import path, the
folder to work in where the notebook's is not there, and the rest are the node's own.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from nbddp.topology import Topology
from nbddp.wire.rank_start import RankStart

_NODE_FIELDS = (
    "store_port",
    "log_path",
    "kernel_pid",
    "sys_path",
    "interface",
    "can_rejoin",
)  # the node's
_TORCHELASTIC = "TORCHELASTIC_"  # what the variables of torchrun's agent begin with


def pack_start(start: RankStart) -> dict[str, Any]:
    """What of it travels; its environment is what the user asked for."""
    facts = {name: value for name, value in asdict(start).items() if name not in _NODE_FIELDS}
    secret = base64.b64encode(start.secret).decode()
    path = Path(start.log_path)
    begin = path.stat().st_size if path.exists() else 0
    return facts | {"secret": secret, "log": path.name, "log_begin": begin}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What a node knows itself.

    Attributes:
        store_port: where its keeper takes connections for the store.
        folder: where ranks write their logs first.
        interface: through which ranks meet those of other machines.
    """

    store_port: int
    folder: Path
    interface: str

    def build_start(self, facts: Mapping[str, Any]) -> RankStart:
        """The whole of it, for a rank that is started here."""
        cwd = facts["cwd"] if Path(facts["cwd"]).is_dir() else str(Path.cwd())
        log = self._log(facts)
        known = {name: value for name, value in facts.items() if name not in ("log", "log_begin")}
        return RankStart(
            **known
            | {
                "topology": Topology(**facts["topology"]),
                "secret": base64.b64decode(facts["secret"]),
                "store_port": self.store_port,
                "kernel_pid": os.getpid(),
                "sys_path": list(sys.path),
                "log_path": str(log),
                "env": _environment() | dict(facts["env"]),
                "cwd": cwd,
                "interface": self.interface,
                "can_rejoin": True,
            }
        )

    def _log(self, facts: Mapping[str, Any]) -> Path:
        """A new file, in which every byte has the place that it has in the notebook's copy."""
        process = f"attempt-{int(facts['attempt'])}.{int(facts['incarnation'])}"
        folder = self.folder / Path(facts["run_id"]).name / process
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = folder / Path(facts["log"]).name
        log.touch(0o600)
        os.truncate(log, int(facts["log_begin"]))  # sparse: no room is taken for what is not here
        return log


def _environment() -> dict[str, str]:
    """The node's own, without what torchrun has told the keeper of its store and its files."""
    return {name: text for name, text in os.environ.items() if not name.startswith(_TORCHELASTIC)}


def interface_of(address: str) -> str:
    """The network interface that has an address of this machine; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    return ""
