"""MLflow: a run in an experiment, at ``MLFLOW_TRACKING_URI`` or in the folder's database.

It uses only MLflow's client, so the run never becomes the active run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import mlflow
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from nbddp.extensions.publish.step_aggregator import AggregatedStep
from nbddp.extensions.publish.tracker import RunIdentity, RunOutcome, events_text, plain_name

METRICS_PER_CALL, PARAMS_PER_CALL = 1000, 100  # MLflow's limits for a request
MAX_VALUE_LENGTH = 500  # characters of a value that every server accepts
_STATUS = {
    "ok": "FINISHED",
    "empty": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
    "killed": "KILLED",
}


class ToMlflow:
    """Publishes to MLflow, which keeps every value with its time, so step numbers may decrease.

    Parameters cannot change in MLflow.
    """

    def __init__(self) -> None:
        self._params: set[str] = set()

    def start(self, run: RunIdentity) -> str:
        """Create a run with this name and start time."""
        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        made = self._client.create_run(
            experiment,
            start_time=_milliseconds(run.start_time),
            run_name=run.name,
            tags={"mlflow.source.name": "nbddp", "nbddp.run": run.name},
        )
        self._id = made.info.run_id
        self.update_config(run.settings)
        return f"experiment {run.project}, run {run.name}, at {mlflow.get_tracking_uri()}"

    def update_config(self, settings: Mapping[str, Any]) -> None:
        """Send settings as parameters; send changed settings as tags."""
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
        """Send each value with its step and time."""
        metrics = (
            Metric(plain_name(name), value, _milliseconds(step.time), step.step)
            for step in steps
            for name, value in step.values.items()
        )
        while chunk := list(islice(metrics, METRICS_PER_CALL)):
            self._client.log_batch(self._id, metrics=chunk)

    def log_event(self, at: float, text: str) -> None:  # noqa: ARG002 - the protocol
        """Send the latest event as a tag; ``finish`` sends all events as a file."""
        self._client.set_tag(self._id, "nbddp.last", " ".join(text.split())[:MAX_VALUE_LENGTH])

    def finish(self, outcome: RunOutcome) -> None:
        """Send the outcome and the totals as tags, and the events as a file."""
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
