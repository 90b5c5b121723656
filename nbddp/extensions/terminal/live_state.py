"""What a controller knows of its run now, as JSON: the content of ``state.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nbddp.controller.session import Session
from nbddp.extensions.runs import SCHEMA
from nbddp.extensions.terminal.safe_json import safe
from nbddp.formatting import format_line, format_ranks, format_seconds, ranks_by_text
from nbddp.lifecycle.group_state import GroupState
from nbddp.lifecycle.refusals import way_out
from nbddp.record.cell import CellHandle
from nbddp.record.metrics import MetricStore, spread
from nbddp.record.snapshot import RankSnapshot, Snapshot
from nbddp.ui import wording
from nbddp.ui.report.render import render_text
from nbddp.ui.report.status import status_report
from nbddp.wire.messages import JsonDict

ENDED = "ended"
SHOWN_SOURCE = 80  # characters of the first line of a cell


def describe_run(session: Session, *, is_over: bool) -> JsonDict:
    """Return the state of a session's current or last run."""
    path = session.event_log.path
    name = path.name if path is not None else ""
    # the reader knows the folder, by a path of its own
    snapshot = replace(session.snapshot(), run=name, folder="")
    cell = session.cell
    if cell is not None and cell.attempt != session.life.attempt:
        cell = None  # it ran on earlier ranks
    kind, text, advice = _reason(session, snapshot, cell)
    if is_over:
        advice = "All ranks have ended; the next cell starts new ones."
    facts: JsonDict = {
        "schema": SCHEMA,
        "run": name,
        "is_over": is_over,
        "state": ENDED if is_over else snapshot.state.value,
        "attempt": snapshot.attempt,
        "seconds": round(snapshot.seconds, 1),
        "cell": None if cell is None else _cell(cell),
        "ranks": [_rank(each) for each in snapshot.ranks],
        "events": [
            {"seconds": round(event.time - snapshot.began, 1), "text": text}
            for event, _, text in wording.describe_events(snapshot)
        ],
        "metrics": _metrics(session.rank_monitor.metrics),
        "why": {"kind": kind, "text": text, "way_out": advice},
        "text": _ended(snapshot, text) if is_over else render_text(status_report(snapshot)),
    }
    described: JsonDict = safe(facts)
    return described


def _cell(cell: CellHandle) -> JsonDict:
    lines = [line.strip() for line in cell.request.source.splitlines()]
    code = (line for line in lines if line and not line.startswith("#"))
    return {
        "number": cell.prompt,
        "source": next(code, "")[:SHOWN_SOURCE],
        "script": cell.request.script.name if cell.request.script else "",
        "ranks": cell.ranks,
        "began": cell.began_at,
        "seconds": round(cell.seconds, 1),
        "is_running": not cell.is_finished,
    }


def _rank(rank: RankSnapshot) -> JsonDict:
    return {
        "rank": rank.rank,
        "state": rank.state,
        "is_alive": rank.is_alive,
        "pid": rank.pid,
        "node": rank.node,
        "device": rank.device,
        "line": rank.line,
        "file": rank.file,
        "code": rank.code,
        "call": rank.collective,
        "seconds_still": round(rank.seconds, 1),
        "step": rank.step,
        "steps_per_second": round(rank.steps_per_second, 3),
        "progress": [wording.format_progress_bar(bar) for bar in rank.progress_bars],
        "cpu": rank.cpu,
        "memory": rank.memory,
        "gpu": rank.gpu,
        "gpu_memory": rank.gpu_memory,
        "slow": wording.describe_lag(rank.lag) if rank.lag else "",
    }


def _metrics(store: MetricStore) -> Mapping[str, Mapping[str, float]]:
    return {name: spread(last) for name in store.names() if (last := store.last(name))}


# ---- why

_Reason = tuple[str, str, str]  # the kind, the text, and what to do


def _reason(session: Session, snapshot: Snapshot, cell: CellHandle | None) -> _Reason:
    life, verdict = session.life, cell.verdict if cell is not None else None
    error = session.actor.state.start_error
    if snapshot.alarm:
        card, _, last = snapshot.alarm.rpartition("\n" if "\n" in snapshot.alarm else "; ")
        return "hang", card, last.strip()
    if snapshot.state.is_busy:
        slow = wording.describe_straggler(snapshot.straggler) if snapshot.straggler else ""
        since = f"{snapshot.start_of} has run for {format_seconds(snapshot.seconds)}"
        lines = [slow or f"no problem is known: {since}", *_positions(snapshot)]
        return "slow" if slow else "running", "\n".join(lines), ""
    if error is not None and not life.state.is_live:
        return "not started", "\n".join([str(error), *error.details.splitlines()]), ""
    if verdict is not None:
        was_healed = verdict.exited_ranks and life.state.is_live and not life.gone
        healed = f"{format_ranks(verdict.exited_ranks)} healed since: the next cell works"
        kind = "interrupted" if verdict.is_interrupt else "failed"
        advice = healed if was_healed else verdict.way_out()
        return kind, verdict.report(advises=False), advice
    if snapshot.state is GroupState.BROKEN:
        return "dead ranks", "\n".join(_positions(snapshot)), way_out(life)
    last = f": cell [{cell.prompt}] is done" if cell is not None else ""
    return "nothing", f"nothing has failed{last}", ""


def _positions(snapshot: Snapshot) -> list[str]:
    """Return a line for each group of ranks that do the same."""
    groups = ranks_by_text({rank.rank: _position(rank) for rank in snapshot.ranks})
    return [f"  {format_ranks(ranks)} {text}" for text, ranks in groups.items()]


def _position(rank: RankSnapshot) -> str:
    call = f" in {rank.collective}" if rank.state == "waiting" and rank.collective else ""
    return f"{rank.state}{call}" + (f", {format_line(rank.line, rank.file)}" if rank.line else "")


def _ended(snapshot: Snapshot, why: str) -> str:
    return f"{ENDED} · attempt {snapshot.attempt} · {snapshot.run}\n\n{why}"
