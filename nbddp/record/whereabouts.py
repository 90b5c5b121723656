"""What ranks say of themselves: where they are, how far, with which numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nbddp.record.cell import Purpose
from nbddp.record.hangs import HangWatch, Sign
from nbddp.record.metrics import MetricStore, RunTotals
from nbddp.record.rank_values import RankValues
from nbddp.record.waiting.collective_matcher import CollectiveMatcher, Straggler
from nbddp.record.waiting.stragglers import StragglerLag, slow_by_step_rate
from nbddp.wire.messages import Metrics, Progress, Pulse
from nbddp.wire.timing_messages import Arrivals

LOOK_PERIOD = 1.0  # seconds between two looks at whether anything moves
Sighting = Pulse | Arrivals | Metrics | Progress


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """A loop that a rank is in; ``total`` is 0 where it is not known."""

    label: str
    done: int
    total: int
    seconds: float

    @property
    def per_second(self) -> float:
        """How fast it went so far; 0 where that cannot be said."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long the rest will take at this rate, None where that cannot be said."""
        if not self.total or not self.done:
            return None
        return max(0, self.total - self.done) / self.per_second if self.per_second else None


class Whereabouts:
    """Keeps what the panel shows of each rank; fed on the session's thread, read from any.

    Args:
        is_stopped, is_working: see :class:`nbddp.record.hangs.HangWatch`.
    """

    def __init__(
        self,
        is_stopped: Callable[[int], bool],
        is_working: Callable[[int], bool] = lambda _rank: False,
    ) -> None:
        self.metrics = MetricStore()
        self.collectives = CollectiveMatcher()
        self.values = RankValues()
        self.missed = 0
        self._hang_watch = HangWatch(is_stopped, is_working)
        self._bars: dict[int, tuple[LoopProgress, ...]] = {}
        self._notes = 0
        self._steps: tuple[float, float] | None = None
        self._totals = RunTotals()  # of the cells before this one
        self._is_counted = False  # whether the numbers of the last cell are of this run
        self._is_replay = False

    @property
    def first_step(self) -> float | None:
        """The first step that any rank reported in this cell."""
        return self._steps[0] if self._steps else None

    @property
    def last_step(self) -> float | None:
        """The highest one so far."""
        return self._steps[1] if self._steps else None

    @property
    def version(self) -> int:
        """Another number whenever a rank said something of itself."""
        return self._notes

    @property
    def hang_after(self) -> float:
        """Seconds without progress on any rank that make a hang."""
        return self._hang_watch.hang_after

    @hang_after.setter
    def hang_after(self, seconds: float) -> None:
        self._hang_watch.hang_after = seconds

    @property
    def alarm(self) -> str:
        """What is wrong right now: nobody moves, or a rank is silent; empty if nothing is."""
        return self._hang_watch.alarm

    def begin_cell(
        self,
        ranks: Iterable[int],
        now: float,
        *,
        cell: int = 0,
        purpose: Purpose = Purpose.USER,
    ) -> None:
        """A cell begins: what was seen before says nothing about it.

        The curves of a cell that is tried again go on, and a replay adds nothing to them.
        """
        known = list(ranks)
        self._hang_watch.begin_cell(known, now)
        self.collectives.begin_cell(known, cell)
        self._is_replay = purpose is Purpose.REPLAY
        if purpose is Purpose.RETRY:
            self.metrics.resume()
        elif purpose is Purpose.USER:
            self._clear_metrics()
        self.missed = 0
        self._bars = {}
        self._steps = None

    def _clear_metrics(self) -> None:
        if self._is_counted:
            self._totals.add(self.metrics)
        self.metrics.clear()
        self._is_counted = True

    def totals(self) -> dict[str, Any]:
        """Return what the ranks of this run reported in all of its cells, for ``run.json``."""
        return self._totals.facts(self.metrics if self._is_counted else None)

    def begin_run(self) -> None:
        """Begin the totals of another run; the metrics of the last cell can still be shown."""
        self._totals.clear()
        self._is_counted = False

    def end_cell(self) -> None:
        """It is over: nobody waits any more."""
        self._hang_watch.alarm = ""

    def forget(self) -> None:
        """The ranks that were seen are gone."""
        self._hang_watch.forget()
        self.values.forget()

    def note(
        self,
        rank: int,
        message: Sighting,
        now: float,
        clock: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """A rank said something of itself.

        ``clock``: seconds that its clock is ahead of this machine's, and by how much that may be
        wrong.
        """
        self._notes += 1
        match message:
            case Pulse():
                self._hang_watch.note(rank, message, now)
            case Arrivals():
                ahead, error = clock
                self.collectives.add(rank, message, now, ahead=ahead, error=error)
            case Metrics(rows=rows, missed=missed):
                self.missed += missed
                for at, step, values in rows:
                    self.collectives.add_step(rank, at, step)
                    if self._is_replay:
                        continue
                    self.metrics.add(rank, at, step, values)
                    if step is not None:
                        first, last = self._steps or (step, step)
                        self._steps = first, max(step, last)
            case Progress(bars=bars):
                self._bars[rank] = tuple(LoopProgress(*each) for each in bars)

    def look(self, cell: int, waiting: Iterable[int], ranks: Iterable[int], now: float) -> str:
        """What is new and the user should know; see :meth:`HangWatch.look`."""
        return self._hang_watch.look(cell, waiting, ranks, now)

    def memory(self) -> int:
        """Bytes that all ranks together used when they were last seen."""
        return self._hang_watch.memory()

    def sign(self, rank: int) -> Sign | None:
        """The last sign of life of a rank."""
        return self._hang_watch.sign(rank)

    def lags(self, ranks: Iterable[int]) -> dict[int, StragglerLag]:
        """Those that are slower than the others, and by how much.

        Ranks that meet in collectives make the same number of steps: there it is the one that the
        others wait for.
        """
        waited_for = self.collectives.stragglers()
        if waited_for is not None:
            return waited_for
        rates = {rank: self.metrics.step_rate(rank) for rank in ranks}
        return slow_by_step_rate({rank: rate for rank, rate in rates.items() if rate is not None})

    def awaited(self) -> Straggler | None:
        """The rank that the others wait for most, if they do."""
        return self.collectives.straggler()

    def bars(self, rank: int) -> tuple[LoopProgress, ...]:
        """The loops that a rank is in, outermost first."""
        return self._bars.get(rank, ())
