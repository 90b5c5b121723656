"""TensorBoard's files: a folder for the run, with one file of events in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from nbddp.publish.step_aggregator import AggregatedStep
from nbddp.publish.tracker import RunIdentity, RunOutcome, events_text, settings_text

DEFAULT_FOLDER = (
    "runs"  # below the folder that the run was started in, as torch's own writer has it
)


class ToTensorBoard:
    """Curves are scalars, settings are hyperparameters, the record is text.

    What was done again after a failure takes the place of what was done before, as TensorBoard
    does it for a training that was started again from a checkpoint; the file has both.
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._record: list[tuple[float, str]] = []
        self._cell = -1
        self._last_own_step = -1  # the last step before the cell that runs, or that is done again
        self._highest_step = -1
        self._time = 0.0

    def start(self, run: RunIdentity) -> str:
        """A new folder; a run of another place and time is not written to."""
        path = Path(run.project or DEFAULT_FOLDER).expanduser() / run.name
        self._writer = EventFileWriter(str(path), flush_secs=2)
        self._time = run.start_time
        self._settings = dict(run.settings)
        self._add_text("settings", settings_text(self._settings))
        plain = {name: value for name, value in self._settings.items() if value is not None}
        # the run's name: else trials with equal settings were one
        self._add_summary(hparams_pb(plain, trial_id=run.name, start_time_secs=run.start_time))
        return str(path)

    def update_config(self, settings: Mapping[str, Any]) -> None:
        """TensorBoard knows but one set of hyperparameters of a run: later ones are text."""
        self._settings |= settings
        self._add_text("settings", settings_text(self._settings))

    def log_steps(self, steps: Sequence[AggregatedStep]) -> None:
        """Steps as scalars, at the time when they were reported."""
        for step in steps:
            if step.cell != self._cell:
                self._cell = step.cell
                self._last_own_step = self._last_own_step if step.is_again else self._highest_step
                # hide what is done again, unless that would hide what other cells have done
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
        """The record so far, at the step where the run is."""
        self._record.append((at, text))
        self._time = max(self._time, at)
        self._add_text("record", events_text(self._record))

    def finish(self, outcome: RunOutcome) -> None:
        """The outcome as text, the sums as scalars."""
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
        # text_pb and hparams_pb make TensorFlow's class of the same message, where there is one
        own = Summary.FromString(summary.SerializeToString())
        self._writer.add_event(Event(wall_time=self._time, step=step, summary=own))
