"""A cell's time line, with what the ranks' models have measured of themselves."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pickle import UnpicklingError

from nbddp.controller.rank_requests import RankRequests
from nbddp.controller.session import Session
from nbddp.errors import NbddpError
from nbddp.record.event_log import RunEvent
from nbddp.record.waiting.collective_timeline import (
    DdpOverlap,
    Timeline,
    build_timeline,
    find_unfinished,
    overlap_of,
)
from nbddp.wire.request_messages import Pull

DDP_TIMING_EXPRESSION = (
    "__import__('nbddp.worker.watch.ddp_timing', fromlist=['read_ddp_timing'])"
    ".read_ddp_timing(globals())"
)

logger = logging.getLogger(__name__)


def timeline_of(session: Session, last: int | None = None) -> Timeline:
    """Where the time of the last cell went; ranks that run another one are not asked for more."""
    collectives = session.rank_monitor.collectives
    history = collectives.history()
    cell = session.life.cell
    is_over = cell is None or cell.number != history.cell
    end_event = _find_event(session, "cell ended", history.cell)
    went_well = end_event is not None and end_event.facts.get("outcome") == "ok"  # then nobody hung
    end_time = time.time() if end_event is None else end_event.at
    at_end = () if went_well else find_unfinished(history, end_time, is_over=is_over)
    exits = session.event_log.since(history.began) if history.began else ()
    died = {
        each.facts["rank"]: each.at for each in exits if each.kind == "exit" and each.at <= end_time
    }
    timeline = build_timeline(history, collectives.straggler(), last=last, unmet=at_end, died=died)
    start_event = _find_event(session, "cell", history.cell)
    number = start_event.facts["number"] if start_event else history.cell
    timeline = replace(timeline, is_over=is_over, cell=number)
    if timeline.is_empty:
        return timeline
    return replace(timeline, overlaps=_collect_overlaps(session, history.began))


def _find_event(session: Session, kind: str, cell: int) -> RunEvent | None:
    """Return the event of a cell's beginning or end; None if it is not recorded."""
    events = (each for each in session.event_log.since(0.0) if each.kind == kind)
    return next((each for each in events if each.facts.get("id") == cell), None)


def _collect_overlaps(session: Session, began: float) -> tuple[DdpOverlap, ...]:
    """What was measured since the cell began, give or take what nodes' clocks are apart."""
    if not session.life.state.is_ready:
        return ()
    requests = RankRequests(session)
    try:
        link = session.require_link()
        answers = requests.request(
            requests.resolve_ranks(None),
            lambda number: Pull(request=number, expression=DDP_TIMING_EXPRESSION),
        )
        measurements = {rank: link.load_payload(answer.payload) for rank, answer in answers.items()}
    except (NbddpError, UnpicklingError) as error:  # a rank dies just now, or is told to stop
        logger.info("the models were not asked: %s", error)
        return ()
    found = []
    for rank, models in measurements.items():
        ahead, uncertainty = session.launcher.clock_offset(rank)
        since = began + ahead - uncertainty  # the earliest that the rank's own clock may have shown
        found += [overlap_of(rank, name, measured, since=since) for name, measured in models]
    return tuple(each for each in found if each is not None)
