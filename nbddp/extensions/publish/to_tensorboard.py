"""TensorBoard: a folder for the run, with one event file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from nbddp.extensions.publish.step_aggregator import AggregatedStep
from nbddp.extensions.publish.tracker import RunIdentity, RunOutcome, events_text, settings_text


class ToTensorBoard:
    """Publishes metrics as scalars, settings as hyperparameters, and events as text.

    TensorBoard hides steps that were repeated after a failure, as after a restart from a
    checkpoint. The file has both versions of these steps.
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._events: list[tuple[float, str]] = []
        self._cell = -1
        self._last_own_step = -1  # the last step before this cell and its repetitions
        self._highest_step = -1
        self._time = 0.0

    def start(self, run: RunIdentity) -> str:
        """Create a new folder for the run."""
        path = Path(run.project).expanduser() / run.name
        self._writer = EventFileWriter(str(path), flush_secs=2)
        self._time = run.start_time
        self._settings = dict(run.settings)
        self._add_text("settings", settings_text(self._settings))
        plain = {name: value for name, value in self._settings.items() if value is not None}
        # the run's name as trial_id: else trials with equal settings would be merged
        self._add_summary(hparams_pb(plain, trial_id=run.name, start_time_secs=run.start_time))
        return str(path)

    def update_config(self, settings: Mapping[str, Any]) -> None:
        """Send settings as text: a run has only one set of hyperparameters."""
        self._settings |= settings
        self._add_text("settings", settings_text(self._settings))

    def log_steps(self, steps: Sequence[AggregatedStep]) -> None:
        """Send steps as scalars, with the time of their report."""
        for step in steps:
            if step.cell != self._cell:
                self._cell = step.cell
                self._last_own_step = self._last_own_step if step.is_again else self._highest_step
                # hide repeated steps, but never steps of other cells
                if step.is_again and self._last_own_step < step.step <= self._highest_step:
                    log = SessionLog(status=SessionLog.START)
                    start = Event(wall_time=step.time, step=step.step, session_log=log)
                    self._writer.add_event(start)
            self._highest_step, self._time = max(self._highest_step, step.step), step.time
            values = [
                Summary.Value(tag=tag, simple_value=value) for tag, value in step.values.items()
            ]
            self._add_summary(Summary(value=values), step=step.step)
        self._writer.flush()

    def log_event(self, at: float, text: str) -> None:
        """Send all events so far as text, at the current step."""
        self._events.append((at, text))
        self._time = max(self._time, at)
        self._add_text("record", events_text(self._events))

    def finish(self, outcome: RunOutcome) -> None:
        """Send the outcome as text, and the totals as scalars."""
        self._time = max(self._time, outcome.end_time)
        self._add_text("outcome", outcome.text)
        self._add_text("record", events_text(outcome.events))
        for name, value in outcome.totals.items():
            tag = f"nbddp/{name}"
            self._add_summary(
                Summary(value=[Summary.Value(tag=tag, simple_value=value)]), step=self._step
            )
        self._writer.close()

    @property
    def _step(self) -> int:
        return max(0, self._highest_step)

    def _add_text(self, tag: str, text: str) -> None:
        self._add_summary(text_pb(tag, text), step=self._step)

    def _add_summary(self, summary: Any, step: int = 0) -> None:
        # with TensorFlow installed, text_pb and hparams_pb return TensorFlow's message class
        copy = Summary.FromString(summary.SerializeToString())
        self._writer.add_event(Event(wall_time=self._time, step=step, summary=copy))
