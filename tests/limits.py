"""The timeouts and limits that tests change, each by a short name.

A test must not wait as long as a user, nor use as much memory.
"""

from importlib import import_module
from typing import Any

import pytest
from drivers.inside import imported

LIMITS = {
    "peers_timeout": ("lifecycle.transitions", "PEERS_TIMEOUT"),
    "stuck_after": ("lifecycle.transitions", "STUCK_AFTER"),
    "cancel_timeout": ("lifecycle.heal_steps", "CANCEL_TIMEOUT"),
    "write_interval": ("controller.group_actor", "WRITE_INTERVAL"),
    "rank_silent_after": ("record.hang_detector", "SILENT_AFTER"),
    "hang_after": ("record.hang_detector", "HANG_AFTER"),
    "node_silent_after": ("extensions.nodes.listener", "SILENT_AFTER"),
    "notebook_silent_after": ("extensions.nodes.node_agent", "SILENT_AFTER"),
    "agent_connects": ("extensions.nodes.node_agent", "CONNECT_TIMEOUT"),
    "handshake": ("extensions.nodes.handshake", "HANDSHAKE_TIMEOUT"),
    "agent_exit_timeout": ("extensions.nodes.local_agents", "EXIT_TIMEOUT"),
    "panel_opens_after": ("ui.panel.panel_view", "OPEN_DELAY"),
    "completion_timeout": ("magics.completion", "TAB_TIMEOUT"),
    "help_timeout": ("magics.completion", "HELP_TIMEOUT"),
}


def find(name: str) -> tuple[Any, str]:
    """Return the module and the name of a limit; its extension may have been deleted."""
    module, constant = LIMITS[name]
    return import_module(f"nbddp.{module}"), constant


def limit(name: str) -> Any:
    return getattr(*find(name))


def set_limits(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(*find(name), value)


def limits_source(**limits: Any) -> str:
    lines = []
    for name, value in limits.items():
        module, constant = find(name)
        short = module.__name__.rpartition(".")[2]
        lines.append(f"{imported(module)}{short}.{constant} = {value!r}\n")
    return "".join(lines)
