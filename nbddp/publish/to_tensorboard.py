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
from nbddp.publish.tracker import RunIdentity, RunOutcome, record_text, settings_text

RUNS = "runs"  # below the folder that the run was started in, as torch's own writer has it


class ToTensorBoard:
    """Curves are scalars, settings are hyperparameters, the record is text.

    What was done again after a failure takes the place of what was done before, as TensorBoard
    does it for a training that was started again from a checkpoint; the file has both.
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._record: list[tuple[float, str]] = []
        self._cell = -1
        self._before = -1  # the last step before the cell that runs, or that is done again
        self._highest = -1
        self._at = 0.0

    def begin(self, run: RunIdentity) -> str:
        """A new folder; a run of another place and time is not written to."""
        path = Path(run.place or RUNS).expanduser() / run.name
        self._writer = EventFileWriter(str(path), flush_secs=2)
        self._at = run.began
        self._settings = dict(run.settings)
        self._text("settings", settings_text(self._settings))
        plain = {name: its for name, its in self._settings.items() if its is not None}
        # the run's name: else trials with equal settings were one
        self._add(hparams_pb(plain, trial_id=run.name, start_time_secs=run.began))
        return str(path)

    def settle(self, settings: Mapping[str, Any]) -> None:
        """TensorBoard knows but one set of hyperparameters of a run: later ones are text."""
        self._settings |= settings
        self._text("settings", settings_text(self._settings))

    def log(self, points: Sequence[AggregatedStep]) -> None:
        """Steps as scalars, at the time when they were reported."""
        for point in points:
            if point.cell != self._cell:
                self._cell = point.cell
                self._before = self._before if point.is_again else self._highest
                # hide what is done again, unless that would hide what other cells have done
                if point.is_again and self._before < point.step <= self._highest:
                    log = SessionLog(status=SessionLog.START)
                    start = Event(wall_time=point.at, step=point.step, session_log=log)
                    self._writer.add_event(start)
            self._highest, self._at = max(self._highest, point.step), point.at
            values = [Summary.Value(tag=tag, simple_value=its) for tag, its in point.values.items()]
            self._add(Summary(value=values), step=point.step)
        self._writer.flush()

    def happened(self, at: float, text: str) -> None:
        """The record so far, at the step where the run is."""
        self._record.append((at, text))
        self._at = max(self._at, at)
        self._text("record", record_text(self._record))

    def finish(self, outcome: RunOutcome) -> None:
        """The outcome as text, the sums as scalars."""
        self._at = max(self._at, outcome.ended)
        self._text("outcome", outcome.text)
        self._text("record", record_text(outcome.record))
        for name, value in outcome.sums.items():
            tag = f"nbddp/{name}"
            self._add(Summary(value=[Summary.Value(tag=tag, simple_value=value)]), step=self._step)
        self._writer.close()

    @property
    def _step(self) -> int:
        return max(0, self._highest)

    def _text(self, tag: str, text: str) -> None:
        self._add(text_pb(tag, text), step=self._step)

    def _add(self, summary: Any, step: int = 0) -> None:
        # text_pb and hparams_pb make TensorFlow's class of the same message, where there is one
        own = Summary.FromString(summary.SerializeToString())
        self._writer.add_event(Event(wall_time=self._at, step=step, summary=own))
