"""Run a cell on several world sizes, a few rounds on each."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbddp.accelerator import is_device_backend
from nbddp.controller.session import Session
from nbddp.errors import ArgumentError, RequestError
from nbddp.extensions.runs.stored_run import StoredRun
from nbddp.extensions.sweeps import MIN_ROUNDS
from nbddp.extensions.sweeps.grid import SweepEntry, SweepPoint
from nbddp.extensions.sweeps.scaling_results import (
    Repetition,
    Scaling,
    WorldSizeResult,
    run_json_entry,
    steady_rate,
    time_shares,
)
from nbddp.extensions.sweeps.scaling_view import scaling_report
from nbddp.extensions.sweeps.sweep_view import describe_row, sweep_report
from nbddp.extensions.sweeps.trials import TrialRunner
from nbddp.extensions.timeline.notebook import timeline_of
from nbddp.formatting import plural
from nbddp.record.cell import CellResult
from nbddp.record.run_folder import read_facts
from nbddp.topology import cores_here

logger = logging.getLogger("nbddp")


class ScalingStudy:
    """Runs one cell on several world sizes.

    Args:
        runner: runs the cell.
        sizes: the world sizes.
        rounds: how often the cell runs on each world size.
        is_weak: whether the work of each rank stays the same, instead of the work of all ranks
            together.

    Raises:
        ArgumentError: there are fewer than two world sizes, or fewer than three rounds.
    """

    def __init__(
        self, runner: TrialRunner, sizes: Sequence[int], *, rounds: int, is_weak: bool
    ) -> None:
        given: object = sizes
        is_list = isinstance(given, Collection) and all(isinstance(each, int) for each in given)
        if not is_list or len(set(sizes)) < 2:
            raise ArgumentError(f"expected two or more numbers of ranks, got {given!r}")
        if rounds < MIN_ROUNDS:
            raise ArgumentError(f"expected {MIN_ROUNDS} rounds or more, got {rounds}")
        self._runner = runner
        self._display = runner.display
        self._specs = {each: replace(runner.spec, nproc=each) for each in sorted(set(sizes))}
        self._count = rounds
        self._is_weak = is_weak
        # round by round: a temporary load on the machine affects all world sizes
        settings = [(each, size) for each in range(1, rounds + 1) for size in self._specs]
        self._rows = [
            SweepEntry(SweepPoint(number, {"ranks": size, "round": round_number}))
            for number, (round_number, size) in enumerate(settings, start=1)
        ]
        self._rounds: dict[int, list[Repetition]] = {size: [] for size in self._specs}
        self._devices: tuple[str, ...] = ()

    def run(self) -> Scaling:
        """Run the cell on all world sizes, show the results, and return them.

        Raises:
            RequestError: the ranks of a world size cannot be started.
            CellFailedError: no run succeeded.
            CellInterruptedError: the user ended the study.
        """
        for spec in self._specs.values():
            self._runner.group.session.check_gpus(spec)
        self._runner.run_all(self._rows, self._run_one, self._describe, what="scale")
        self._display.show_progress(sweep_report(self._rows, what="scale"))
        scaling = Scaling(
            sizes=tuple(
                WorldSizeResult(ranks, tuple(done)) for ranks, done in self._rounds.items() if done
            ),
            is_weak=self._is_weak,
            cores=cores_here(),
            devices=self._devices,
        )
        self._display.show(scaling_report(scaling))
        self._runner.report_outcome(next_step="run again, the study starts over")
        return scaling

    def _run_one(self, row: SweepEntry) -> None:
        size, number = row.trial.settings["ranks"], row.trial.settings["round"]
        self._runner.run(
            row,
            self._specs[size],
            name=f"scale-{plural(size, 'rank').replace(' ', '')}-round{number}",
            facts=run_json_entry(size, number, self._count, is_weak=self._is_weak),
            finish=lambda *done: self._rounds[size].append(self._measure(*done)),
        )

    def _describe(self, row: SweepEntry) -> str:
        if not row.state.is_done:
            return describe_row(row)
        last = self._rounds[row.trial.settings["ranks"]][-1]
        return f"{last.rate:.3g} steps/s" if last.counts_steps else f"{1 / last.rate:.3g} s"

    def _measure(self, session: Session, result: CellResult) -> Repetition:
        """Measure a cell that succeeded, while its ranks are idle."""
        pace, measured = 1 / max(result.seconds, 1e-9), dict[str, Any]()
        steady = None
        path = session.event_log.path
        if path is not None:
            # the session records a cell after it has returned the result: wait for that
            session.call(lambda: None)
            facts = read_facts(path)
            measured["batch"] = facts.get("samples_per_step")
            self._devices = max(self._devices, tuple(facts.get("devices", ())), key=len)
            steady = _steady_pace(path)
        if steady is not None:
            pace, steps = steady
            measured |= _time_shares(session, pace, steps)
            if is_device_backend(str(facts.get("backend_used"))):
                measured["waiting"] = None  # NCCL: the timeline has the times of enqueueing
        ranks = session.snapshot().ranks
        return Repetition(
            rate=pace,
            counts_steps=steady is not None,
            **measured,
            memory=max((each.memory for each in ranks), default=0),
            gpu_memory=max((each.gpu_memory for each in ranks), default=0),
        )


def _time_shares(session: Session, pace: float, steps: int) -> dict[str, float | None]:
    try:
        return time_shares(timeline_of(session, steps), pace)
    except RequestError as error:  # a rank died after the cell
        logger.info("no timeline: %s", error)
        return {}


def _steady_pace(path: Path) -> tuple[float, int] | None:
    """Return the steps per second of the last cell and their number, or None without steps."""
    try:
        recorded = StoredRun(path)
        if recorded.cells:  # a full disk records none
            return steady_rate([*recorded.metric_rows()], recorded.cells[-1].began_at)
    except (RequestError, OSError) as error:  # the run was deleted
        logger.info("no pace: %s", error)
    return None
