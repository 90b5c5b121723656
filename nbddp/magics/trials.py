"""A cell several times, each time on fresh ranks that know what earlier cells made."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbddp.archive.comparing import MOST
from nbddp.archive.sweeps import SEED, Row, State
from nbddp.controller.spec import GroupSpec
from nbddp.errors import (
    CellFailedError,
    CellInterruptedError,
    CommandInterruptedError,
    NbddpError,
    RequestError,
)
from nbddp.export import Omitted
from nbddp.interrupts import interrupt_held_back
from nbddp.lifecycle.reasons import BUSY
from nbddp.magics.desk import Desk
from nbddp.record.cell import CellRequest, CellResult, Deed
from nbddp.record.deeds import say_deeds
from nbddp.record.timeline import CONFIG
from nbddp.record.unmade import say_unmade
from nbddp.ui.report.sweep import describe_outcome

SEEDING = (
    'torch.manual_seed(seed); __import__("random").seed(seed); '
    '__import__("numpy").random.seed(seed)'
)
_OF_CELLS = ("steps", "steps_per_second", "samples_per_step")  # in ``run.json``


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of the cell, one of the times.

    Attributes:
        path: the run's folder, None if there is none.
        result: of the cell, None if the ranks did not come so far.
        why: for a failure what it was, in a line; empty if all went well.
        report: the same with its traceback.
    """

    path: Path | None
    result: CellResult | None = None
    why: str = ""
    report: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the cell came to its end on all ranks."""
        return self.result is not None and self.result.is_ok


class EndedError(Exception):
    """The user wants no more of it; ``path`` is the folder of the run that he ended."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.path = path


class Trials:
    """The ranks of one cell that runs several times.

    What was done to the ranks before is done again on each fresh group, and at the end on a last
    one, which the user goes on with.

    Args:
        desk: of the notebook.
        spec: of the ranks that are asked for; of the last ones, where there were none before.
        replays: whether earlier cells and pushes are done again.
    """

    def __init__(self, desk: Desk, spec: GroupSpec, *, replays: bool) -> None:
        self._desk = desk
        self._session = session = desk.group.session
        self._spec = desk.group.spec if desk.group.is_live else spec
        done = session.deeds if desk.group.is_live else ()  # what `%ddp stop` has ended is over
        self._all: tuple[Deed, ...] = (*done, *session.undone)
        self.deeds = self._all if replays else ()
        self._replays = replays
        held = session.unmade if session.life.alive else ()
        self._lost = [each for each in held if not any(map(each.is_made_by, session.undone))]
        self._has_begun = False
        self._times_ended = session.times_ended
        self._first: Tried | None = None  # of those that failed

    @property
    def is_ended(self) -> bool:
        """Whether the user has asked for an end since this began; our own stops do not count."""
        return self._session.times_ended > self._times_ended

    def check_nothing_is_lost(self) -> None:
        """What the ranks hold beside what is done again would be gone after the first time.

        Raises:
            RequestError: they hold such a thing, or a cell runs; with ``--fresh`` it may go.
        """
        self._desk.group.scripts.make_way(by_force=not self._replays)
        if not self._replays:
            return
        if self._session.life.state.is_busy:
            raise RequestError(BUSY)
        if self._lost:
            raise RequestError(
                f"{say_unmade(self._lost)}: that would be lost, as each run begins on fresh ranks, "
                "which do only those cells again that went well here; `%ddp restart --replay` "
                "gives it up, then this runs; with --fresh it runs at once, each time with no names"
            )

    def said_before(self) -> str:
        """What each time begins with, in words."""
        return f"fresh ranks, {say_deeds(self.deeds)} again" if self.deeds else "fresh ranks"

    def run(
        self,
        request: CellRequest,
        args: Namespace,
        spec: GroupSpec,
        *,
        announced: str,
        values: Mapping[str, Any],
        config: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> Tried:
        """Run the cell on fresh ranks.

        Args:
            request: the cell.
            args: as its options say.
            spec: of the ranks.
            announced: what a page shows until it runs.
            values: put into the ranks before it; ``seed`` seeds them, too.
            config: recorded as by ``nbddp.config``.
            facts: for ``run.json``.

        Raises:
            EndedError: the user wants no more, and this time is not over.
        """
        path: Path | None = None
        try:
            with self._fresh(spec, announced, quiet=args.quiet):
                path = self._desk.current_run
                self._describe(facts, config)
                self._put(values)
                result = self._desk.run_one_of_several(request, args)
            self._raise_if_ended(result)
        except (CellInterruptedError, EndedError, KeyboardInterrupt):
            raise EndedError(path) from None
        except NbddpError as error:
            if self.is_ended:
                raise EndedError(path) from None
            return self._not_tried(path, error)
        verdict = result.verdict
        if verdict is None:
            return Tried(path, result)
        return Tried(path, result, verdict.summary(), verdict.report())

    def _not_tried(self, path: Path | None, error: NbddpError) -> Tried:
        is_cell = isinstance(error, CellFailedError)
        report = error.report if isinstance(error, CellFailedError) else str(error)
        self._desk.views.say(report)
        what = "an earlier cell, done again: " if is_cell else ""
        return Tried(path, None, what + str(error).partition("\n")[0], report)

    def note(self, facts: Mapping[str, Any]) -> None:
        """More of the run that goes on, for ``run.json``."""
        self._describe(facts, {})

    def note_failure(self, tried: Tried) -> None:
        """Remember the first that did not go well."""
        if not tried.is_ok:
            self._first = self._first or tried

    def gather_unseen(self, since: float, rows: Sequence[Row]) -> None:
        """A page that was loaded again meanwhile is told of all of them at once."""
        names = [row.path.name for row in rows if row.path is not None and row.state.is_done]
        way = "`%ddp runs` lists its runs"
        if len(names) > 1:
            way += f", `%ddp compare {' '.join(names[:MOST])}` puts them beside each other"
        self._desk.views.gather_unseen(since, way)

    def _describe(self, facts: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        session = self._session
        if config:
            session.call(session.time_line.note, 0, CONFIG, {"values": dict(config)})
        session.call(session.time_line.describe, facts)

    def _raise_if_ended(self, result: CellResult | None = None) -> None:
        """A cell that went well counts, though the user wants no more after it."""
        if result is not None:
            verdict = result.verdict
            is_ended = verdict is not None and bool(verdict.is_interrupt or verdict.ended_by)
            if is_ended or (verdict is not None and self.is_ended):
                raise EndedError
        elif self.is_ended:
            raise EndedError

    @contextmanager
    def _fresh(self, spec: GroupSpec, announced: str, *, quiet: bool) -> Iterator[None]:
        self.stop()
        views = self._desk.views
        with views.announcing(announced, self._session, quiet=quiet), views.as_one_of_several():
            self._desk.make_ready(spec, fresh=True)
            self._raise_if_ended()
            yield

    def _put(self, values: Mapping[str, Any]) -> None:
        """What earlier cells made, then these names: whatever those cells made of them."""
        if SEED in values:
            self._desk.group.push({SEED: values[SEED]})
            self._seed()
        if self.deeds:
            self._replay(self.deeds)
            self._forget_numbers()
        if values:
            self._desk.group.push(values)
        if SEED in values:
            self._seed()
        self._raise_if_ended()

    def _forget_numbers(self) -> None:
        """What earlier cells report when they are done again is not what this run comes to."""
        self._session.call(self._session.whereabouts.tally.clear)
        self._describe(dict.fromkeys(_OF_CELLS) | {"last": {}, "curves": {}}, {})

    def _seed(self) -> None:
        self._replay([CellRequest(source=SEEDING, execution_count=0, needs_group=None)])

    def _replay(self, deeds: Sequence[Deed]) -> None:
        self._raise_if_ended()
        self._desk.group.replay(deeds, say=_say_nothing)

    def stop(self) -> None:
        """End the ranks; what is recorded of them is whole then."""
        self._has_begun = True
        if self._desk.group.is_live:
            self._times_ended += 1
            self._session.stop()

    def conclude(self, rows: Sequence[Row], *, is_ended: bool, what: str, way_on: str) -> None:
        """Raise what a cell raises of which the user has ended a part, or nothing went well.

        Raises:
            CellFailedError: none of them went well.
            CommandInterruptedError: the user has ended it.
        """
        if is_ended:
            raise CommandInterruptedError(
                f"`%%ddp --{what}` was ended by you: {describe_outcome(rows, what=what)}; "
                f"the same cell run again {way_on}"
            )
        if self._first is not None and not any(row.state.is_done for row in rows):
            said = f"none of the {len(rows)} runs went well; {self._first.why}"
            verdict = self._first.result.verdict if self._first.result is not None else None
            rank = verdict.first.rank if verdict is not None else 0
            raise CellFailedError(said, rank=rank, report=f"{said}\n{self._first.report}")

    def finish(self, *, is_ended: bool) -> str:
        """Give the user his ranks back, with what a replay makes; what to say of it.

        After an end that he has asked for nothing is started; a replay does it when he wants it.
        """
        if not self._has_begun:
            return "no run has begun; the ranks are as they were"
        is_ended = self._set_aside() or is_ended
        if not self._all:
            return "the ranks are stopped; the next cell starts others"
        what = say_deeds(self._all)
        if is_ended:
            return f"the ranks are stopped; `%ddp restart --replay` does {what} again"
        try:
            self._desk.restart_and_replay(self._spec)
        except (NbddpError, KeyboardInterrupt) as error:
            self._set_aside()
            why = str(error) or "interrupted"
            return (
                f"{what} could not be done again on new ranks ({why}); they are stopped, "
                "`%ddp restart --replay` tries it again"
            )
        number = self._desk.prompt_number
        self._desk.note(Omitted(f"cell [{number}]", "it ran several times, on ranks of its own"))
        lost = f"; given up: {say_unmade(self._lost)}" if self._lost else ""
        return f"the ranks were restarted, and {what} done again{lost}"

    def _set_aside(self) -> bool:
        """Stop the ranks and keep what is to be done on the next; whether he ends it meanwhile."""
        try:
            with interrupt_held_back():
                self._desk.group.spec = self._spec
                if self._all:
                    self._session.leave_undone(self._all, is_all=True)
                self.stop()
        except KeyboardInterrupt:
            return True
        return False


def run_rows(
    trials: Trials,
    rows: Sequence[Row],
    run_one: Callable[[Row], Tried],
    tell: Callable[[Row], None],
) -> bool:
    """One after the other, whatever becomes of each; whether the user has ended it.

    Args:
        trials: whose ranks they are run on.
        rows: those that are to be run, noted down in there.
        run_one: runs one.
        tell: told of each that is over.
    """
    began = time.monotonic()
    try:
        return _run_each(trials, rows, run_one, tell)
    finally:
        trials.gather_unseen(began, rows)


def _run_each(
    trials: Trials,
    rows: Sequence[Row],
    run_one: Callable[[Row], Tried],
    tell: Callable[[Row], None],
) -> bool:
    for row in rows:
        row.state, began = State.RUNNING, time.monotonic()
        try:
            tried = run_one(row)
            row.state, row.why = (State.OK if tried.is_ok else State.FAILED), tried.why
            row.seconds, row.path = time.monotonic() - began, tried.path
            trials.note_failure(tried)
            tell(row)
        except (EndedError, KeyboardInterrupt) as ended:
            if row.state is State.RUNNING:
                row.state, row.path = State.ENDED, getattr(ended, "path", None)
                row.seconds = time.monotonic() - began
            return True
        if trials.is_ended:
            return True
    return False


def _say_nothing(_text: str) -> None:
    """What becomes of a replay is said with its trial."""
