"""MLflow: a run of an experiment, where ``MLFLOW_TRACKING_URI`` says, or in the folder's database.

It goes through MLflow's client alone: no run becomes the active one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import mlflow
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from nbddp.publish.step_aggregator import AggregatedStep
from nbddp.publish.tracker import PLACE, RunIdentity, RunOutcome, plain_name, record_text

MOST_METRICS, MOST_PARAMS = 1000, 100  # in a request
LONGEST = 500  # characters of a value that every server takes
_STATUS = {
    "ok": "FINISHED",
    "empty": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
    "killed": "KILLED",
}


class ToMlflow:
    """MLflow keeps every value with its time: steps may fall back. Parameters never change."""

    def __init__(self) -> None:
        self._params: set[str] = set()

    def begin(self, run: RunIdentity) -> str:
        """A run of this name, that began when the run did."""
        self._client = MlflowClient()
        name = run.place or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PLACE
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        made = self._client.create_run(
            experiment,
            start_time=_milliseconds(run.began),
            run_name=run.name,
            tags={"mlflow.source.name": "nbddp", "nbddp.run": run.name},
        )
        self._id = made.info.run_id
        self.settle(run.settings)
        return f"experiment {name}, run {run.name}, at {mlflow.get_tracking_uri()}"

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Parameters; what has changed since is a tag."""
        named = {plain_name(name): str(its)[:LONGEST] for name, its in settings.items()}
        changed = {name: its for name, its in named.items() if name in self._params}
        for name, its in changed.items():
            self._client.set_tag(self._id, name, its)
        params = iter([Param(name, its) for name, its in named.items() if name not in changed])
        self._params |= named.keys()
        while some := list(islice(params, MOST_PARAMS)):
            self._client.log_batch(self._id, params=some)

    def log(self, points: Sequence[AggregatedStep]) -> None:
        """Each value with its step and its time."""
        metrics = (
            Metric(plain_name(name), value, _milliseconds(point.at), point.step)
            for point in points
            for name, value in point.values.items()
        )
        while some := list(islice(metrics, MOST_METRICS)):
            self._client.log_batch(self._id, metrics=some)

    def happened(self, at: float, text: str) -> None:  # noqa: ARG002 - a tracker's
        """What happened last, as a tag; all of it becomes a file at the end."""
        self._client.set_tag(self._id, "nbddp.last", " ".join(text.split())[:LONGEST])

    def finish(self, outcome: RunOutcome) -> None:
        """The outcome and the sums as tags, the record as a file."""
        tags = {"nbddp.outcome": outcome.text[:LONGEST]}
        tags |= {f"nbddp.{name}": str(its) for name, its in outcome.sums.items()}
        for name, its in tags.items():
            self._client.set_tag(self._id, name, its)
        self._client.log_text(self._id, record_text(outcome.record), "nbddp/record.md")
        status = "RUNNING" if outcome.is_live else _STATUS.get(outcome.outcome, "RUNNING")
        if status != "RUNNING":
            self._client.set_terminated(self._id, status, _milliseconds(outcome.ended))


def _milliseconds(at: float) -> int:
    return int(at * 1000)
