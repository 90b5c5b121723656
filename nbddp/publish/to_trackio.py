"""trackio: a run in a project of its local database, or in the Space that ``TRACKIO_*`` name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trackio

from nbddp.publish.step_aggregator import AggregatedStep
from nbddp.publish.tracker import (
    PLACE,
    PublishError,
    RunIdentity,
    RunOutcome,
    record_text,
    settings_text,
)


class ToTrackio:
    """Steps as they were reported: trackio takes those that fall back, and keeps both.

    It has one set of settings of a run, told at its beginning, and for text a report.
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._highest = 0

    def begin(self, run: RunIdentity) -> str:
        """A run of this very name."""
        self._settings = dict(run.settings)
        project = run.place or PLACE
        self._run = trackio.init(
            project=project,
            name=run.name,
            # names that begin with _ are trackio's own
            config={name.lstrip("_") or "setting": its for name, its in run.settings.items()},
            embed=False,
            auto_log_gpu=False,  # of another machine, or of another time
            auto_log_cpu=False,
        )
        if self._run.name != run.name:
            raise PublishError(f"project {project} has a run {run.name} already")
        return f"project {project}, run {run.name}"

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Kept for the report."""
        self._settings |= settings

    def log(self, points: Sequence[AggregatedStep]) -> None:
        """Each step as a row."""
        for point in points:
            self._highest = max(self._highest, point.step)
            self._run.log(dict(point.values), step=point.step)

    def happened(self, at: float, text: str) -> None:
        """Told in the report."""

    def finish(self, outcome: RunOutcome) -> None:
        """The sums as numbers; the outcome, the settings and the record as a report."""
        report = "\n\n".join(
            (f"**{outcome.text}**", settings_text(self._settings), record_text(outcome.record))
        )
        sums = {f"nbddp/{name}": float(its) for name, its in outcome.sums.items()}
        self._run.log({**sums, "nbddp/record": trackio.Markdown(report)}, step=self._highest)
        self._run.finish()
