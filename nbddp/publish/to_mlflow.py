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
from nbddp.publish.tracker import DEFAULT_PROJECT, RunIdentity, RunOutcome, events_text, plain_name

METRICS_PER_CALL, PARAMS_PER_CALL = 1000, 100  # in a request
MAX_VALUE_LENGTH = 500  # characters of a value that every server takes
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

    def start(self, run: RunIdentity) -> str:
        """A run of this name, that began when the run did."""
        self._client = MlflowClient()
        name = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        made = self._client.create_run(
            experiment,
            start_time=_milliseconds(run.start_time),
            run_name=run.name,
            tags={"mlflow.source.name": "nbddp", "nbddp.run": run.name},
        )
        self._id = made.info.run_id
        self.update_config(run.settings)
        return f"experiment {name}, run {run.name}, at {mlflow.get_tracking_uri()}"

    def update_config(self, settings: Mapping[str, Any]) -> None:
        """Parameters; what has changed since is a tag."""
        named = {
            plain_name(name): str(value)[:MAX_VALUE_LENGTH] for name, value in settings.items()
        }
        changed = {name: value for name, value in named.items() if name in self._params}
        for name, value in changed.items():
            self._client.set_tag(self._id, name, value)
        params = iter([Param(name, value) for name, value in named.items() if name not in changed])
        self._params |= named.keys()
        while chunk := list(islice(params, PARAMS_PER_CALL)):
            self._client.log_batch(self._id, params=chunk)

    def log_steps(self, steps: Sequence[AggregatedStep]) -> None:
        """Each value with its step and its time."""
        metrics = (
            Metric(plain_name(name), value, _milliseconds(step.time), step.step)
            for step in steps
            for name, value in step.values.items()
        )
        while chunk := list(islice(metrics, METRICS_PER_CALL)):
            self._client.log_batch(self._id, metrics=chunk)

    def log_event(self, at: float, text: str) -> None:  # noqa: ARG002 - a tracker's
        """What happened last, as a tag; all of it becomes a file at the end."""
        self._client.set_tag(self._id, "nbddp.last", " ".join(text.split())[:MAX_VALUE_LENGTH])

    def finish(self, outcome: RunOutcome) -> None:
        """The outcome and the sums as tags, the record as a file."""
        tags = {"nbddp.outcome": outcome.text[:MAX_VALUE_LENGTH]}
        tags |= {f"nbddp.{name}": str(value) for name, value in outcome.totals.items()}
        for name, value in tags.items():
            self._client.set_tag(self._id, name, value)
        self._client.log_text(self._id, events_text(outcome.events), "nbddp/record.md")
        status = "RUNNING" if outcome.is_live else _STATUS.get(outcome.outcome, "RUNNING")
        if status != "RUNNING":
            self._client.set_terminated(self._id, status, _milliseconds(outcome.end_time))


def _milliseconds(at: float) -> int:
    return int(at * 1000)
