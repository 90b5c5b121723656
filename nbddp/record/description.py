"""What ``run.json`` says of a run, put together from what happens to it.

CONTRIBUTING.md describes the file field by field.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

FORMAT = 2  # 1 had only what was known at the start, and no such number

Facts = Mapping[str, Any]


class Description:
    """The facts of one run; the session's thread tells it what happens.

    Args:
        known: what is known already, as of a run that goes on.
    """

    def __init__(self, known: Facts | None = None) -> None:
        self._facts: dict[str, Any] = {"format": FORMAT, "outcome": "", "config": {}}
        self._facts |= dict.fromkeys(("restarts", "heals", "failures"), 0) | {"seconds_lost": 0.0}
        self._facts |= dict(known or {}) | {"format": FORMAT}

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

    def _cell_ended(self, facts: Facts) -> None:
        outcome, is_interrupted = facts.get("outcome", ""), facts.get("interrupted", False)
        self._facts |= {"outcome": outcome, "interrupted": is_interrupted}
        self._facts["failures"] += outcome != "ok" and not is_interrupted

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
    "cell ended": Description._cell_ended,
    "healed": Description._healed,
    "resumed": Description._resumed,
    "config": Description._configured,
    "stopped": Description._stopped,
}
