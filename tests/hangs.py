"""Cells in which nothing moves: act when that is said, and read what was said."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from drivers.inside import imported
from drivers.ranks import Ranks
from processes import wait_until

from nbddp import CellInterruptedError
from nbddp.worker import process_group

# before what may take its time in a group that has a short timeout
NO_TIMEOUT = (
    f"from datetime import timedelta\n{imported(process_group)}"
    "process_group.set_timeout(timedelta(minutes=2))\n"
)
SHORT = 3.0  # seconds without progress that make a hang in a test; 10 for the user


def act_when_said(group: Ranks, words: str, act: Callable[[], None]) -> None:
    """Do something as soon as the group's alarm says these words."""

    def wait_and_act() -> None:
        wait_until(lambda: words in group.snapshot().alarm, timeout=60.0)
        act()

    threading.Thread(target=wait_and_act).start()


def said_of_a_hang(
    group: Ranks, source: str, capsys: pytest.CaptureFixture[str], after: float = SHORT
) -> str:
    """What is printed for a cell in which nothing moves, until it is interrupted."""
    group.hang_after(after)
    act_when_said(group, "no progress", group.interrupt)
    with pytest.raises(CellInterruptedError):
        group.run(source)
    return capsys.readouterr().out
