"""``%%ddp --scale``: the cell on several world sizes, a few rounds of each."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbddp.archive.scaling import Round, Scaling, Size, facts_of, shares, steady_pace
from nbddp.archive.sweeps import Row, Trial
from nbddp.controller.spec import GroupSpec
from nbddp.errors import RequestError
from nbddp.formatting import plural
from nbddp.magics.desk import Desk
from nbddp.magics.trial_options import LEAST
from nbddp.magics.trials import Trials, Tried, run_rows
from nbddp.record.cell import CellRequest
from nbddp.record.finished import RecordedRun
from nbddp.record.folder import read_facts
from nbddp.record.snapshot import Snapshot
from nbddp.topology import cores_here
from nbddp.ui.report.sweep import describe_current, describe_failures, sweep_report

logger = logging.getLogger("nbddp")

WHAT = "scale"


class Scale:
    """One cell on several world sizes.

    Args:
        desk: of the notebook.
        request: the cell.
        args: its options.
        spec: of the ranks, but for how many they are.
        values: pushed each time before it.

    Raises:
        RequestError: there are nodes.
    """

    def __init__(
        self,
        desk: Desk,
        request: CellRequest,
        args: Namespace,
        *,
        spec: GroupSpec,
        values: Mapping[str, Any],
    ) -> None:
        if desk.group.nodes is not None:
            raise RequestError(
                "--scale is for ranks of this machine: `%ddp stop` sends the nodes home"
            )
        self._desk = desk
        self._request = request
        self._args = args
        self._specs = {ranks: replace(spec, nproc=ranks) for ranks in sorted(args.scale)}
        self._values = values
        self._count: int = args.rounds or LEAST
        self._trials = Trials(desk, spec, replays=not args.fresh)
        # round by round: what comes over the machine meanwhile strikes all world sizes
        self._rows = [
            Row(Trial(number, {"ranks": ranks, "round": each}))
            for number, (each, ranks) in enumerate(
                ((each, ranks) for each in range(1, self._count + 1) for ranks in self._specs),
                start=1,
            )
        ]
        self._rounds: dict[int, list[Round]] = {ranks: [] for ranks in self._specs}
        self._devices: tuple[str, ...] = ()

    def run(self) -> None:
        """Run them all; show what they come to.

        Raises:
            RequestError: the ranks of a world size cannot be had, or hold what would be lost.
            CellFailedError: none went well.
            CommandInterruptedError: the user has ended it.
        """
        for spec in self._specs.values():
            spec.check_gpus()
        self._trials.check_nothing_is_lost()
        before, count = self._trials.said_before(), len(self._rows)
        self._say(f"{plural(count, 'run')}, each with {before}")
        is_ended = run_rows(self._trials, self._rows, self._run_one, self._tell)
        said = self._trials.finish(is_ended=is_ended)
        self._desk.views.show_progress(sweep_report(self._rows, what=WHAT))
        self._desk.views.show_scaling(self.scaling())
        for each in [*describe_failures(self._rows), said]:
            self._say(each)
        self._trials.conclude(self._rows, is_ended=is_ended, what=WHAT, way_on="starts over")

    def scaling(self) -> Scaling:
        """What they came to so far."""
        sizes = [Size(ranks, tuple(rounds)) for ranks, rounds in self._rounds.items() if rounds]
        return Scaling(
            sizes=tuple(sizes),
            is_weak=self._args.weak,
            rounds=self._count,
            cores=cores_here(),
            devices=self._devices,
            threads={ranks: spec.threads_per_rank() for ranks, spec in self._specs.items()},
        )

    def _run_one(self, row: Row) -> Tried:
        ranks, number = row.trial.settings["ranks"], row.trial.settings["round"]
        spec = self._specs[ranks]
        said = describe_current(self._rows, row, what=WHAT)
        if not self._args.quiet:
            self._desk.views.show_progress(sweep_report(self._rows, row, what=WHAT))
        name = f"scale-{plural(ranks, 'rank').replace(' ', '')}-round{number}"
        tried = self._trials.run(
            self._request,
            self._args,
            replace(spec, name="-".join(filter(None, (spec.name, name)))),
            announced=f"{said}: starting {plural(ranks, 'rank')} ...",
            values=self._values,
            config={},
            facts=facts_of(ranks, number, self._count, is_weak=self._args.weak),
        )
        if tried.is_ok:
            self._rounds[ranks].append(self._measure(tried))
        return tried

    def _tell(self, row: Row) -> None:
        if not row.state.is_done or self._desk.views.shows_panels:
            return
        last = self._rounds[row.trial.settings["ranks"]][-1]
        pace = f"{last.pace:.3g} steps/s" if last.counts_steps else f"{1 / last.pace:.3g} s"
        self._say(f"{row.trial}: {pace}")

    def _measure(self, tried: Tried) -> Round:
        """What the run came to whose ranks are idle now."""
        if tried.result is None:
            raise RuntimeError("what has no result was not run")
        pace, known = 1 / max(tried.result.seconds, 1e-9), dict[str, Any]()
        steady = None
        if tried.path is not None:
            self._trials.note({})  # the record of a cell is written when its result is told already
            facts = read_facts(tried.path)
            known["batch"] = facts.get("samples_per_step")
            self._devices = max(self._devices, tuple(facts.get("devices", ())), key=len)
            steady = _steady(tried.path)
        if steady is not None:
            pace, count = steady
            known |= self._shares(pace, count)
            if facts.get("backend_used") == "nccl":
                known["waiting"] = None  # the time line has the times of enqueueing
        return Round(
            pace=pace,
            counts_steps=steady is not None,
            **known,
            **_memory(self._desk.group.session.snapshot()),
        )

    def _shares(self, pace: float, steps: int) -> dict[str, float | None]:
        try:
            return shares(self._desk.group.timeline(last=steps), pace)
        except RequestError as error:  # a rank has died after the cell
            logger.info("no time line: %s", error)
            return {}

    def _say(self, text: str) -> None:
        if not self._args.quiet:
            self._desk.views.say(f"nbddp: {text}")


def _steady(path: Path) -> tuple[float, int] | None:
    """The pace of the cell that ran last, and its steps; None if no steps are on record."""
    try:
        recorded = RecordedRun(path)
        if recorded.cells:  # not where a full disk has taken none of it
            return steady_pace([*recorded.numbers()], recorded.cells[-1].began_at)
    except (RequestError, OSError) as error:  # it was taken away by hand meanwhile
        logger.info("no pace: %s", error)
    return None


def _memory(snapshot: Snapshot) -> dict[str, int]:
    return {
        "memory": max((each.memory for each in snapshot.ranks), default=0),
        "gpu_memory": max((each.gpu_memory for each in snapshot.ranks), default=0),
    }
