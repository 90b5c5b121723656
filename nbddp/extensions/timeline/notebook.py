"""``%ddp timeline`` and ``--timeline``: build the timeline of a cell, and show it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pickle import UnpicklingError

from nbddp.controller.rank_requests import resolve_ranks
from nbddp.controller.session import Session
from nbddp.errors import NbddpError
from nbddp.extensions.timeline import SHOWN_STEPS, TimelineArguments
from nbddp.extensions.timeline.collective_timeline import (
    DdpOverlap,
    Timeline,
    build_timeline,
    find_unfinished,
    overlap_of,
)
from nbddp.extensions.timeline.view import timeline_report
from nbddp.group.notebook_half import CellWithResult, NotebookHalf
from nbddp.group.push_pull import pull
from nbddp.record.run_events import CellEnded, CellStarted, RankExited
from nbddp.ui.report.blocks import Report

DDP_TIMING_EXPRESSION = (
    "__import__('nbddp.extensions.timeline.ddp_timing', fromlist=['read_ddp_timing'])"
    ".read_ddp_timing(globals())"
)

logger = logging.getLogger(__name__)


class Timelines(NotebookHalf):
    """Shows the timeline of a cell."""

    def timeline(self, args: TimelineArguments) -> None:
        """Show the last steps of the last cell."""
        timeline = timeline_of(self.notebook.group.scripts.last_session, args.last)
        self.notebook.show(timeline_report(timeline))

    def after_cell(self, cell: CellWithResult) -> Sequence[Report]:
        """Report the last steps of a cell; useful above all for a cell that hung."""
        timeline = timeline_of(cell.session, SHOWN_STEPS)
        if self.notebook.has_record:  # it has the same sentence about the slow rank
            timeline = replace(timeline, awaited=None)
        return [timeline_report(timeline)]


def timeline_of(session: Session, last: int | None = None) -> Timeline:
    """Return the timeline of the last cell. Busy ranks are not asked for DDP timings."""
    collectives = session.rank_monitor.collectives
    history = collectives.history()
    cell = session.life.cell
    is_over = cell is None or cell.number != history.cell
    end_event = session.event_log.of_cell(CellEnded, history.cell)
    # no rank hung in a cell that succeeded
    went_well = end_event is not None and end_event.outcome == "ok"
    end_time = time.time() if end_event is None else end_event.time
    at_end = () if went_well else find_unfinished(history, end_time, is_over=is_over)
    exits = session.event_log.since(history.began) if history.began else ()
    died = {
        event.rank: event.time
        for event in exits
        if isinstance(event, RankExited) and event.time <= end_time
    }
    timeline = build_timeline(history, collectives.straggler(), last=last, unmet=at_end, died=died)
    start_event = session.event_log.of_cell(CellStarted, history.cell)
    number = start_event.number if start_event else history.cell
    timeline = replace(timeline, is_over=is_over, cell=number)
    if timeline.is_empty:
        return timeline
    return replace(timeline, overlaps=_collect_overlaps(session, history.began))


def _collect_overlaps(session: Session, began: float) -> tuple[DdpOverlap, ...]:
    """Return the DDP timings since the cell started, within the error of the node clocks."""
    if not session.life.state.is_ready:
        return ()
    try:
        ranks = resolve_ranks(session, None)
        measurements = zip(ranks, pull(session, DDP_TIMING_EXPRESSION, ranks), strict=True)
    except (NbddpError, UnpicklingError) as error:  # a rank died or was stopped in the meantime
        logger.info("no DDP timings: %s", error)
        return ()
    found = []
    for rank, models in measurements:
        ahead, uncertainty = session.launcher.clock_offset(rank)
        # the earliest time that the clock of the rank may have shown at the start of the cell
        since = began + ahead - uncertainty
        found += [overlap_of(rank, name, measured, since=since) for name, measured in models]
    return tuple(each for each in found if each is not None)
