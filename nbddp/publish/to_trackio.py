"""trackio: a run in a project of its local database, or in the Space that ``TRACKIO_*`` name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trackio

from nbddp.publish.step_aggregator import AggregatedStep
from nbddp.publish.tracker import (
    DEFAULT_PROJECT,
    PublishError,
    RunIdentity,
    RunOutcome,
    events_text,
    settings_text,
)


class ToTrackio:
    """Steps as they were reported: trackio takes those that fall back, and keeps both.

    It has one set of settings of a run, told at its beginning, and for text a report.
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._highest_step = 0

    def start(self, run: RunIdentity) -> str:
        """A run of this very name."""
        self._settings = dict(run.settings)
        project = run.project or DEFAULT_PROJECT
        self._run = trackio.init(
            project=project,
            name=run.name,
            # names that begin with _ are trackio's own
            config={name.lstrip("_") or "setting": value for name, value in run.settings.items()},
            embed=False,
            auto_log_gpu=False,  # of another machine, or of another time
            auto_log_cpu=False,
        )
        if self._run.name != run.name:
            raise PublishError(f"project {project} has a run {run.name} already")
        return f"project {project}, run {run.name}"

    def update_config(self, settings: Mapping[str, Any]) -> None:
        """Kept for the report."""
        self._settings |= settings

    def log_steps(self, steps: Sequence[AggregatedStep]) -> None:
        """Each step as a row."""
        for step in steps:
            self._highest_step = max(self._highest_step, step.step)
            self._run.log(dict(step.values), step=step.step)

    def log_event(self, at: float, text: str) -> None:
        """Told in the report."""

    def finish(self, outcome: RunOutcome) -> None:
        """The sums as numbers; the outcome, the settings and the record as a report."""
        report = "\n\n".join(
            (f"**{outcome.text}**", settings_text(self._settings), events_text(outcome.events))
        )
        sums = {f"nbddp/{name}": float(value) for name, value in outcome.totals.items()}
        self._run.log({**sums, "nbddp/record": trackio.Markdown(report)}, step=self._highest_step)
        self._run.finish()
