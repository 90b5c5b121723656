"""Keep the reports of running ranks: status, progress, metrics, collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nbddp.record.cell import Purpose
from nbddp.record.collectives.collective_matcher import CollectiveMatcher
from nbddp.record.collectives.stragglers import StragglerLag, slow_by_step_rate
from nbddp.record.hang_detector import HangDetector, Heartbeat
from nbddp.record.heal.rank_values import RankValues
from nbddp.record.metrics import MetricStore, RunTotals
from nbddp.wire.collective_arrivals import CollectiveArrivals
from nbddp.wire.messages import Metrics, Progress, RankStatus

CHECK_PERIOD = 1.0  # seconds between two checks for a hang
StatusMessage = RankStatus | CollectiveArrivals | Metrics | Progress


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """Progress of a loop on a rank; ``total`` is 0 if unknown."""

    label: str
    done: int
    total: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Mean iterations per second; 0 if unknown."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end of the loop; None if unknown."""
        if not self.total or not self.per_second:
            return None
        return max(0, self.total - self.done) / self.per_second


class RankMonitor:
    """Keeps the reports of all ranks. The session's thread writes; any thread may read.

    Args:
        is_stopped, is_working: see :class:`nbddp.record.hang_detector.HangDetector`.

    Attributes:
        version: a counter that changes with every report.
        progress_bars: the loops that each rank is in, outermost first.
        missed_rows: number of metrics rows that are only in the file.
        first_step: the first step that a rank reported in this cell; None if none.
        last_step: the highest step until now; None if none.
    """

    def __init__(
        self,
        is_stopped: Callable[[int], bool],
        is_working: Callable[[int], bool] = lambda _rank: False,
    ) -> None:
        self.metrics = MetricStore()
        self.collectives = CollectiveMatcher()
        self.values = RankValues()
        self.hangs = HangDetector(is_stopped, is_working)
        self.version = self.missed_rows = 0
        self.progress_bars: dict[int, tuple[LoopProgress, ...]] = {}
        self.first_step: float | None = None
        self.last_step: float | None = None
        self._totals = RunTotals()  # of earlier cells
        self._is_counted = False  # whether the metrics of the last cell belong to this run
        self._is_replay = False

    def reset_for_cell(
        self, ranks: Sequence[int], now: float, *, cell: int = 0, purpose: Purpose = Purpose.USER
    ) -> None:
        """Reset the reports at the start of a cell.

        The curves of a cell that runs again after a failure continue. A replay adds nothing to the
        curves.
        """
        self.hangs.reset_for_cell(ranks, now)
        self.collectives.reset_for_cell(ranks, cell)
        self._is_replay = purpose is Purpose.REPLAY
        if purpose is Purpose.RETRY:
            self.metrics.resume()
        elif purpose is Purpose.USER:
            if self._is_counted:
                self._totals.add(self.metrics)
            self.metrics.clear()
            self._is_counted = True
        self.missed_rows = 0
        self.progress_bars = {}
        self.first_step = self.last_step = None

    def totals(self) -> dict[str, Any]:
        """Return the totals of all cells of this run, for ``run.json``."""
        return self._totals.facts(self.metrics if self._is_counted else None)

    def reset_totals(self) -> None:
        """Reset the totals for a new run. The metrics of the last cell stay visible."""
        self._totals = RunTotals()
        self._is_counted = False

    def clear_ranks(self) -> None:
        """Clear the reports of ranks that were replaced."""
        self.hangs.clear()
        self.values.clear()

    def add(
        self, rank: int, message: StatusMessage, now: float, clock: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """Add a report of a rank.

        ``clock``: seconds that the rank's clock is ahead of this machine, and the error of that
        number.
        """
        self.version += 1
        match message:
            case RankStatus():
                self.hangs.heartbeats[rank] = Heartbeat(message, now)
            case CollectiveArrivals():
                ahead, error = clock
                self.collectives.add(rank, message, now, ahead=ahead, error=error)
            case Metrics(rows=rows, missed=missed):
                self.missed_rows += missed
                for at, step, values in rows:
                    self.collectives.add_step(rank, at, step)
                    if self._is_replay:
                        continue
                    self.metrics.add(rank, at, step, values)
                    if step is not None:
                        if self.first_step is None or self.last_step is None:
                            self.first_step = self.last_step = step
                        self.last_step = max(step, self.last_step)
            case Progress(bars=bars):
                self.progress_bars[rank] = tuple(LoopProgress(*bar) for bar in bars)

    def lags(self, ranks: Iterable[int]) -> dict[int, StragglerLag]:
        """Return the ranks that are slower than the others, and by how much.

        Ranks that meet in collectives make the same number of steps. There, the slow rank is the
        one for which the others wait.
        """
        waited_for = self.collectives.stragglers()
        if waited_for is not None:
            return waited_for
        rates = {rank: self.metrics.step_rate(rank) for rank in ranks}
        return slow_by_step_rate({rank: rate for rank, rate in rates.items() if rate is not None})
