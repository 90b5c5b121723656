"""The timeouts and limits that tests change, each by a short name.

A test must not wait as long as a user, nor use as much memory.
"""

from typing import Any

import pytest
from drivers.inside import imported

from nbddp.controller import group_actor
from nbddp.extensions.nodes import handshake, listener, local_agents, node_agent
from nbddp.lifecycle import heal_steps, transitions
from nbddp.magics import completion
from nbddp.record import hang_detector
from nbddp.ui.panel import panel_view

LIMITS = {
    "peers_timeout": (transitions, "PEERS_TIMEOUT"),
    "stuck_after": (transitions, "STUCK_AFTER"),
    "cancel_timeout": (heal_steps, "CANCEL_TIMEOUT"),
    "write_interval": (group_actor, "WRITE_INTERVAL"),
    "rank_silent_after": (hang_detector, "SILENT_AFTER"),
    "hang_after": (hang_detector, "HANG_AFTER"),
    "node_silent_after": (listener, "SILENT_AFTER"),
    "notebook_silent_after": (node_agent, "SILENT_AFTER"),
    "agent_connects": (node_agent, "CONNECT_TIMEOUT"),
    "handshake": (handshake, "HANDSHAKE_TIMEOUT"),
    "agent_exit_timeout": (local_agents, "EXIT_TIMEOUT"),
    "panel_opens_after": (panel_view, "OPEN_DELAY"),
    "completion_timeout": (completion, "TAB_TIMEOUT"),
    "help_timeout": (completion, "HELP_TIMEOUT"),
}


def limit(name: str) -> Any:
    module, constant = LIMITS[name]
    return getattr(module, constant)


def set_limits(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(*LIMITS[name], value)


def limits_source(**limits: Any) -> str:
    lines = []
    for name, value in limits.items():
        module, constant = LIMITS[name]
        short = module.__name__.rpartition(".")[2]
        lines.append(f"{imported(module)}{short}.{constant} = {value!r}\n")
    return "".join(lines)
