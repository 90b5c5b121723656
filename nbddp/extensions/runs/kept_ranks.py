"""Ranks that outlive their kernel: an extension that keeps ranks offers a list of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from nbddp.errors import RequestError
from nbddp.extension.installed import offered
from nbddp.formatting import format_bytes, format_seconds, plural
from nbddp.wire.frozen import Frozen

END_TIMEOUT = 15.0  # seconds for the ranks and their agent to end


class KeptRanks(Frozen):
    """The ranks of an agent.

    Attributes:
        run: the folder of their run.
        agent: the process that keeps them.
        join_file: the join file of their notebook.
        has_notebook: whether their notebook is alive.
        seconds: how long they are kept without a notebook.
        remaining: for how long they are still kept.
        count: the number of ranks.
        memory: bytes of memory that the agent and all its processes use.
    """

    run: Path
    agent: psutil.Process
    join_file: Path
    has_notebook: bool
    seconds: float
    remaining: float
    count: int
    memory: int

    def describe(self) -> str:
        """Return how long they are kept."""
        what = f"{plural(self.count, 'rank')}, {format_bytes(self.memory)}"
        if self.has_notebook:
            return f"{what}, kept for {format_seconds(self.seconds)} after the end of the kernel"
        time = format_seconds(self.remaining)
        return f"{what}, kept for {time}, `%ddp rejoin {self.run.name}`"

    def end(self) -> str:
        """End the ranks, and wait until their agent has removed its files; return what was done.

        Raises:
            RequestError: they did not end.
        """
        self.agent.terminate()
        try:
            self.agent.wait(END_TIMEOUT)
        except psutil.TimeoutExpired:
            raise RequestError(
                f"the agent (process {self.agent.pid}) of run {self.run.name} has not ended within "
                f"{END_TIMEOUT:.0f} s: try again"
            ) from None
        return f"{plural(self.count, 'rank')} ended; their variables are lost"


def kept_ranks() -> dict[Path, KeptRanks]:
    """Return the kept ranks of this user on this machine, by the folder of their run."""
    found: list[KeptRanks] = [kept for look in offered("kept ranks") for kept in look()]
    return {kept.run: kept for kept in sorted(found, key=lambda kept: kept.run.name)}


def kept_facts(kept: KeptRanks | None) -> dict[str, Any] | None:
    """Return them as JSON values."""
    if kept is None:
        return None
    return {
        "ranks": kept.count,
        "memory": kept.memory,
        "seconds": kept.seconds,
        "remaining": None if kept.has_notebook else kept.remaining,
        "text": kept.describe(),
    }
