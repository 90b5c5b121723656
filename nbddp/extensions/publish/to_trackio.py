"""trackio: a run in a project of its local database, or in the Space that ``TRACKIO_*`` sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trackio

from nbddp.extensions.publish.step_aggregator import AggregatedStep
from nbddp.extensions.publish.tracker import (
    PublishError,
    RunIdentity,
    RunOutcome,
    events_text,
    settings_text,
)


class ToTrackio:
    """Publishes to trackio, which keeps all rows if step numbers decrease.

    trackio takes the settings only at the start of a run. A report at the end has the text.
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._highest_step = 0

    def start(self, run: RunIdentity) -> str:
        """Create a run with exactly this name."""
        self._settings = dict(run.settings)
        self._run = trackio.init(
            project=run.project,
            name=run.name,
            # trackio reserves names that begin with _
            config={name.lstrip("_") or "setting": value for name, value in run.settings.items()},
            embed=False,
            auto_log_gpu=False,  # the ranks may be on another machine, or have ended
            auto_log_cpu=False,
        )
        if self._run.name != run.name:
            raise PublishError(f"project {run.project} has a run {run.name} already")
        return f"project {run.project}, run {run.name}"

    def update_config(self, settings: Mapping[str, Any]) -> None:
        """Keep the settings for the report."""
        self._settings |= settings

    def log_steps(self, steps: Sequence[AggregatedStep]) -> None:
        """Send each step as a row."""
        for step in steps:
            self._highest_step = max(self._highest_step, step.step)
            self._run.log(dict(step.values), step=step.step)

    def log_event(self, at: float, text: str) -> None:
        """Do nothing: the report at the end has all events."""

    def finish(self, outcome: RunOutcome) -> None:
        """Send the totals as numbers, and outcome, settings and events as a report."""
        parts = f"**{outcome.text}**", settings_text(self._settings), events_text(outcome.events)
        report = "\n\n".join(parts)
        sums = {f"nbddp/{name}": float(value) for name, value in outcome.totals.items()}
        self._run.log({**sums, "nbddp/record": trackio.Markdown(report)}, step=self._highest_step)
        self._run.finish()
