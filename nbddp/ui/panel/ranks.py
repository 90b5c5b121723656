"""Many ranks at a glance: how they are in one line, a compact grid, and small curves of a few."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from statistics import median

from nbddp.record.snapshot import RankSnapshot
from nbddp.record.whereabouts import LoopProgress
from nbddp.ui.palette import rank_class, rank_color
from nbddp.ui.panel.html import escape, rank_table
from nbddp.ui.words import say_seconds, say_step

FEW = 8  # ranks with a row each; more are in a grid
BEHIND = 0.9  # of the others' pace: who is slower is named
POINTS = 40  # of a small curve
PERIOD = 1.0  # seconds between two of them
_WIDTH, _HEIGHT = 60, 14


def left_of(bars: Sequence[LoopProgress]) -> float | None:
    """Seconds until the outermost loop that knows its total ends, None where that is not known.

    The loops in it say how far its present round is.
    """
    known = [bar for bar in bars if bar.total]
    if not known:
        return None
    outer, *inner = known
    part = inner[0].done / inner[0].total if inner else 0.0
    done = min(float(outer.total), outer.done + part)
    if not done or outer.seconds <= 0:
        return None
    return (outer.total - done) * outer.seconds / done


def seconds_left(ranks: Sequence[RankSnapshot]) -> float | None:
    """Until the last rank is through; a rank that has ended has no time left."""
    known = [left_of(each.bars) for each in ranks if each.goes_on]
    return max((left for left in known if left is not None), default=None)


def straggler(ranks: Sequence[RankSnapshot]) -> int | None:
    """The rank that is clearly slower than most, None if there is none."""
    going = [each for each in ranks if each.goes_on and each.steps_per_second > 0]
    if len(going) < 2:
        return None
    slowest = min(going, key=lambda each: each.steps_per_second)
    usual = median(each.steps_per_second for each in going)
    return slowest.rank if slowest.steps_per_second < BEHIND * usual else None


def overview(ranks: Sequence[RankSnapshot]) -> str:
    """All ranks in one line.

    >>> overview([RankSnapshot(rank=rank, state="running") for rank in range(64)])
    '64 running'
    """
    counts = Counter(each.state if each.is_well else _trouble(each) for each in ranks)
    said = [f"{count} {state}" for state, count in counts.most_common(4)]
    slowest, left = straggler(ranks), seconds_left(ranks)
    if slowest is not None:
        said.append(f"slowest {slowest}")
    if left:
        said.append(f"{say_seconds(left)} left")
    return " · ".join(said)


def _trouble(each: RankSnapshot) -> str:
    if each.is_cause:
        return "failed"
    return "interrupted" if each.state.startswith("interrupted") else "ended"


def grid(ranks: Sequence[RankSnapshot]) -> str:
    """A small field for each rank: its number, how far it is, and whether it is well."""
    slowest = straggler(ranks)
    fields = "".join(_field(each, is_slowest=each.rank == slowest) for each in ranks)
    return f'<div class="nbddp-grid" role="list" aria-label="ranks">{fields}</div>'


def _field(each: RankSnapshot, *, is_slowest: bool) -> str:
    kind = "nbddp-waits" if not each.is_well or each.state == "waiting" or is_slowest else ""
    kind = "nbddp-wrong" if each.is_cause else kind
    known = [bar for bar in each.bars if bar.total]
    share = min(1.0, known[0].done / known[0].total) if known else 0.0
    said = [f"rank {each.rank}: {each.state}", f"step {say_step(each)}" if say_step(each) else ""]
    title = escape(" · ".join(filter(None, [*said, "slowest" if is_slowest else ""])))
    color = rank_color(each.rank)
    return (
        f'<span class="nbddp-field {kind}" role="listitem" title="{title}">'
        f'{each.rank}{"↓" if is_slowest else ""}<span class="nbddp-bar {rank_class(each.rank)}"'
        f' aria-hidden="true"><span style="width:{share:.1%};background:{color}"></span></span>'
        "</span>"
    )


def ranks_html(
    ranks: Sequence[RankSnapshot], *, is_open: bool, trends: Trends | None = None
) -> str:
    """A few ranks as rows; many as a line, those with trouble as rows, and all of them if asked."""
    if len(ranks) <= FEW:
        is_telling = straggler(ranks) is not None or seconds_left(ranks)
        return (_line(ranks) if is_telling else "") + rank_table(
            ranks, trend=trends.draw if trends else None
        )
    told = [each for each in ranks if each.is_cause][:FEW]
    rows = rank_table(told) if told else ""
    return _line(ranks) + rows + (grid(ranks) if is_open else "")


def _line(ranks: Sequence[RankSnapshot]) -> str:
    return f'<div class="nbddp-overview">{escape(overview(ranks))}</div>'


class Trends:
    """What became of each rank's pace, or else of its use of GPU or CPU, as small curves."""

    def __init__(self) -> None:
        self._curves: dict[int, tuple[str, deque[float]]] = {}
        self._next = 0.0

    def note(self, ranks: Sequence[RankSnapshot], now: float) -> None:
        """Take a point of each, now and then."""
        if now < self._next:
            return
        self._next = now + PERIOD
        for each in ranks[:FEW]:
            name, value = _telling(each)
            if self._curves.get(each.rank, ("",))[0] != name:
                self._curves[each.rank] = name, deque(maxlen=POINTS)
            self._curves[each.rank][1].append(value)

    def draw(self, each: RankSnapshot) -> str:
        """A rank's curve; nothing while it has no two points."""
        if each.rank not in self._curves:
            return ""
        name, values = self._curves[each.rank]
        if len(values) < 2:
            return ""
        top = max(*values, 1e-9)
        step = _WIDTH / (POINTS - 1)
        points = " ".join(
            f"{at * step:.1f},{_HEIGHT - 1 - value / top * (_HEIGHT - 2):.1f}"
            for at, value in enumerate(values)
        )
        label = f"{name}: now {values[-1]:.3g}, at most {top:.3g}"
        return (
            f'<svg class="{rank_class(each.rank)}" style="color:{rank_color(each.rank)}" role="img"'
            f' aria-label="{label}" width="{_WIDTH}" height="{_HEIGHT}"><title>{label}</title>'
            f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5">'
            "</polyline></svg>"
        )


def _telling(each: RankSnapshot) -> tuple[str, float]:
    if each.step is not None:
        return "steps per second", each.steps_per_second
    if each.gpu_use.load >= 0:
        return "GPU in percent", each.gpu_use.load
    return "CPU in percent", max(0.0, each.cpu)
