"""The start parameters of a rank on a node: those from the notebook, and those that the node adds.

Of the notebook's environment, only variables that the user named are sent. The import path, the
working folder (if the notebook's does not exist there) and the rest come from the node.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from nbddp.topology import Topology
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.rank_start import RankStart

# set by the node, so they are not sent
_NODE_FIELDS = ("store_port", "log_path", "kernel_pid", "sys_path", "interface", "can_rejoin")
_TORCHELASTIC = "TORCHELASTIC_"  # prefix of the variables of torchrun's agent


def start_facts(start: RankStart, *, is_here: bool = False) -> dict[str, Any]:
    """Return the parameters to send; the environment has only what the user asked for.

    ``is_here``: the node is on this machine, and its ranks write into the run folder themselves.
    """
    facts = {name: value for name, value in asdict(start).items() if name not in _NODE_FIELDS}
    secret = base64.b64encode(start.secret).decode()
    path = Path(start.log_path)
    begin = path.stat().st_size if path.exists() else 0
    facts |= {"secret": secret, "log": path.name, "log_begin": begin}
    return facts | ({"log_path": start.log_path, "sys_path": start.sys_path} if is_here else {})


def build_start(
    facts: Mapping[str, Any], *, store_port: int, folder: Path, interface: str
) -> RankStart:
    """Return the complete parameters of a rank on this node.

    Args:
        facts: the parameters from the notebook.
        store_port: the port on which this node's agent accepts store connections.
        folder: where ranks write their logs first.
        interface: the network interface to ranks on other machines.
    """
    cwd = facts["cwd"] if Path(facts["cwd"]).is_dir() else str(Path.cwd())
    arguments = {name: value for name, value in facts.items() if name not in ("log", "log_begin")}
    return RankStart(
        **arguments
        | {
            "topology": Topology(**facts["topology"]),
            "spec": GroupSpec(**facts["spec"]),
            "secret": base64.b64decode(facts["secret"]),
            "store_port": store_port,
            "kernel_pid": os.getpid(),
            "sys_path": facts.get("sys_path") or list(sys.path),
            "log_path": facts.get("log_path") or str(_create_log(facts, folder)),
            "env": _environment() | dict(facts["env"]),
            "cwd": cwd,
            "interface": interface,
            "can_rejoin": True,
        }
    )


def _create_log(facts: Mapping[str, Any], folder: Path) -> Path:
    """Return a new log file, whose bytes have the same offsets as in the notebook's copy."""
    process = f"attempt-{int(facts['attempt'])}.{int(facts['incarnation'])}"
    log = folder / Path(facts["run_id"]).name / process / Path(facts["log"]).name
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log.touch(0o600)
    os.truncate(log, int(facts["log_begin"]))  # sparse: the missing part takes no space
    return log


def _environment() -> dict[str, str]:
    """Return the node's environment, without torchrun's variables for the agent."""
    return {name: text for name, text in os.environ.items() if not name.startswith(_TORCHELASTIC)}


def interface_of(address: str) -> str:
    """Return the network interface with this address; empty if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    return ""
