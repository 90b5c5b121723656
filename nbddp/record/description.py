"""What ``run.json`` says of a run, put together from what happens to it.

CONTRIBUTING.md describes the file field by field.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

FORMAT = 2  # 1 had only what was known at the start, and no such number
MAX_CELLS = 1000
MAX_SOURCE = 16 << 10  # characters of a cell's; ``events.jsonl`` has all of it
MAX_SOURCES = 256 << 10  # of all cells together

Facts = Mapping[str, Any]


class Description:
    """The facts of one run; the session's thread tells it what happens.

    Args:
        known: what is known already, as of a run that goes on.
    """

    def __init__(self, known: Facts | None = None) -> None:
        self._facts: dict[str, Any] = {"format": FORMAT, "outcome": "", "cells": [], "config": {}}
        self._facts |= dict.fromkeys(("restarts", "heals", "failures"), 0) | {"seconds_lost": 0.0}
        self._facts |= dict(known or {}) | {"format": FORMAT}
        self._sources = sum(len(each.get("source", "")) for each in self._facts["cells"])

    def add(self, facts: Facts) -> None:
        """More is known; what was known before is known better."""
        self._facts |= facts

    def note(self, kind: str, facts: Facts) -> None:
        """Something happened."""
        act = _ACTS.get(kind)
        if act is not None:
            act(self, facts)

    def has_config(self, values: Facts) -> bool:
        """Whether these settings are known."""
        known = self._facts["config"]
        return all(name in known and known[name] == value for name, value in values.items())

    def facts(self) -> dict[str, Any]:
        """All of it, as it is written."""
        facts = dict(self._facts)
        pace, batch = facts.get("steps_per_second"), facts.get("samples_per_step")
        if pace and batch:
            facts["samples_per_second"] = round(pace * batch, 3)
        return facts

    def _started(self, facts: Facts) -> None:
        self._facts["restarts"] += "world_size" in self._facts  # a run may begin with attempt 2
        self._facts["world_size"] = facts.get("world_size", 0)
        self._facts.pop("ended", None)

    def _cell(self, facts: Facts) -> None:
        cells = self._facts["cells"]
        if len(cells) >= MAX_CELLS:
            self._facts["more_cells"] = self._facts.get("more_cells", 0) + 1
            return
        whole = facts.get("source", "")
        source = whole[: min(MAX_SOURCE, max(0, MAX_SOURCES - self._sources))]
        self._sources += len(source)
        ranks = list(facts.get("ranks", ()))
        cell = {"number": facts.get("number"), "ranks": ranks, "source": source}
        cell |= {"is_cut": True} if len(source) < len(whole) else {}
        cells.append(cell | ({"again": True} if facts.get("again") else {}) | {"outcome": ""})

    def _cell_ended(self, facts: Facts) -> None:
        outcome, is_interrupted = facts.get("outcome", ""), facts.get("interrupted", False)
        self._facts |= {"outcome": outcome, "interrupted": is_interrupted}
        self._facts["failures"] += outcome != "ok" and not is_interrupted
        for cell in reversed(self._facts["cells"]):
            if cell["number"] == facts.get("number"):
                cell["outcome"] = outcome
                return

    def _healed(self, _facts: Facts) -> None:
        self._facts["heals"] += 1

    def _resumed(self, facts: Facts) -> None:
        lost = self._facts["seconds_lost"] + facts.get("seconds", 0.0)
        self._facts["seconds_lost"] = round(lost, 3)

    def _not_started(self, facts: Facts) -> None:
        reason = f"start failed: {facts.get('reason', '')}".partition("\n")[0]
        self._facts |= {"outcome": reason, "interrupted": False}

    def _configured(self, facts: Facts) -> None:
        known, values = self._facts["config"], facts["values"]
        self._facts["config"] = known | values if facts["rank"] == 0 else values | known

    def _stopped(self, _facts: Facts) -> None:
        self._facts["ended"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")


_ACTS: dict[str, Callable[[Description, Facts], None]] = {
    "start": Description._started,
    "start failed": Description._not_started,
    "cell": Description._cell,
    "cell ended": Description._cell_ended,
    "healed": Description._healed,
    "resumed": Description._resumed,
    "config": Description._configured,
    "stopped": Description._stopped,
}
