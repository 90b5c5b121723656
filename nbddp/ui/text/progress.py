"""How far a cell is, in a line now and then, and its charts as a picture when it is over."""

from __future__ import annotations

import logging
import shutil
import time
from base64 import b64encode
from collections.abc import Callable, Iterator

from nbddp.charts.axes import format_number
from nbddp.controller.session import Session
from nbddp.formatting import plural
from nbddp.imports import import_aside
from nbddp.record.cell import CellHandle
from nbddp.record.snapshot import RankSnapshot
from nbddp.ui.screen import Screen
from nbddp.ui.words import say_awaited, say_bar, say_seconds, say_step

logger = logging.getLogger(__name__)

PERIOD = 30.0  # seconds between two lines
TERMINAL_PERIOD = 1.0  # where a line takes the place of the one before
SHOWN_METRICS = 4  # in a line
MAX_CHARTS = 12
_ERASE = "\r\x1b[K"


class Progress:
    """Says how far a cell is, where there is something to say.

    Args:
        session: whose cell it is.
        is_terminal: whether a line can take the place of the one before.
        has_pictures: whether charts can be shown.
    """

    def __init__(self, session: Session, *, is_terminal: bool, has_pictures: bool) -> None:
        self._session = session
        self._is_terminal = is_terminal
        self._has_pictures = has_pictures
        self._period = TERMINAL_PERIOD if is_terminal else PERIOD
        self._next = self._period
        self._said = ""
        self._is_on_line = False

    def tell(
        self,
        screen: Screen,
        handle: CellHandle,
        leave_line: Callable[[], None] = lambda: None,
    ) -> None:
        """Print the progress, if an update is due and the progress has changed.

        ``leave_line`` ends a rank's unfinished line, so that this text starts on a new line.
        """
        seconds = time.time() - handle.began_at
        if seconds < self._next:
            return
        self._next = (seconds // self._period + 1) * self._period
        said = self._say(handle)
        if not said or (said == self._said and not self._is_terminal):
            return
        self._said = said
        leave_line()
        line = f"nbddp: {say_seconds(seconds)} · {said}"
        if self._is_terminal:
            self._is_on_line = True
            screen.write(f"{_ERASE}{line[: shutil.get_terminal_size().columns - 1]}")
        else:
            screen.write(f"{line}\n")
        screen.flush()

    def make_room(self, screen: Screen) -> None:
        """Take away the line that another one would take the place of: something else comes."""
        if self._is_on_line:
            self._is_on_line = False
            screen.write(_ERASE)

    def finish(self, screen: Screen) -> None:
        """Show the charts, if there are any and they can be shown."""
        self.make_room(screen)
        if self._has_pictures:
            show_charts(screen, self._session)

    def _say(self, handle: CellHandle) -> str:
        snapshot = self._session.snapshot(handle)
        ranks = [each for each in snapshot.ranks if each.bars or each.step]
        where = _say_where(min(ranks, key=_how_far)) if ranks else []
        late = [say_awaited(snapshot.awaited)] if snapshot.awaited else []
        return " · ".join([*where, *_say_values(self._session), *late])


def _how_far(each: RankSnapshot) -> tuple[float, int]:
    return each.step or 0.0, sum(bar.done for bar in each.bars)


def _say_where(slowest: RankSnapshot) -> list[str]:
    if slowest.bars:
        return [say_bar(bar) for bar in slowest.bars]
    return [f"step {say_step(slowest)}"]


def _say_values(session: Session) -> Iterator[str]:
    """The newest value of each metric, as a mean over ranks."""
    store = session.whereabouts.metrics
    for name in store.names()[:SHOWN_METRICS]:
        if last := store.last(name).values():
            yield f"{name} {format_number(sum(last) / len(last))}"


def show_charts(screen: Screen, session: Session) -> None:
    """Show the charts of the metrics that have more than a point, as one picture."""
    metrics = session.metrics({}, most=MAX_CHARTS)
    curves = {
        name: each
        for name, each in metrics.curves.items()
        if any(len(curve.steps) > 1 for curve in each.values())
    }
    if not curves:
        return
    import_aside("nbddp.charts.figure")  # loads matplotlib: not before there is a curve
    from nbddp.charts.chart_lines import rank_chart
    from nbddp.charts.figure import draw_charts, png_of

    try:
        png, width = png_of(draw_charts([rank_chart(*each) for each in curves.items()]))
    except Exception as error:
        logger.exception("the charts could not be drawn")
        screen.write(f"nbddp: the charts could not be drawn: {type(error).__name__}: {error}\n")
        return
    said = " · ".join(_say_values(session))
    data = {"image/png": b64encode(png).decode(), "text/plain": said}
    sizes = {"image/png": {"width": width}}
    screen.display(data, sizes, display_id="", is_update=False)
    if metrics.left_out:
        many = plural(metrics.left_out, "more metric")
        screen.write(f"nbddp: {many} {'is' if metrics.left_out == 1 else 'are'} in metrics.jsonl\n")
