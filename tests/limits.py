"""The limits that tests change, each by a name of the tests' own.

A test must not wait for the seconds that a user would, nor fill the memory that a user may.
"""

from __future__ import annotations

from typing import Any

import pytest
from drivers.inside import imported

from nbddp.controller import executor
from nbddp.group import agents
from nbddp.lifecycle import heal_steps, transitions
from nbddp.magics import completion
from nbddp.nodes import door, handshake, keeper
from nbddp.record import hangs
from nbddp.ui.panel import view
from nbddp.worker import interrupt

LIMITS = {
    "peers_patience": (transitions, "PEERS_PATIENCE"),
    "stuck_after": (transitions, "STUCK_AFTER"),
    "coming_back": (heal_steps, "BACK_PATIENCE"),
    "time_between_facts": (executor, "PAUSE"),
    "rank_silent_after": (hangs, "SILENT_AFTER"),
    "hang_after": (hangs, "HANG_AFTER"),
    "node_silent_after": (door, "SILENT_AFTER"),
    "notebook_silent_after": (keeper, "SILENT_AFTER"),
    "keeper_greeting": (keeper, "GREETING"),
    "door_greeting": (handshake, "GREETING"),
    "agents_ending": (agents, "ENDING"),
    "panel_opens_after": (view, "OPENING"),
    "completion_waits": (completion, "TAB_TIMEOUT"),
    "hint_waits": (completion, "HELP_TIMEOUT"),
    "interrupted_import": (interrupt, "IMPORTING"),
}


def limit(name: str) -> Any:
    """Return the value of a limit."""
    module, constant = LIMITS[name]
    return getattr(module, constant)


def set_limits(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Change limits in this process until the end of the test."""
    for name, value in limits.items():
        monkeypatch.setattr(*LIMITS[name], value)


def limits_source(**limits: Any) -> str:
    """Return source that changes limits in the rank or kernel that runs it."""
    lines = []
    for name, value in limits.items():
        module, constant = LIMITS[name]
        short = module.__name__.rpartition(".")[2]
        lines.append(f"{imported(module)}{short}.{constant} = {value!r}\n")
    return "".join(lines)
