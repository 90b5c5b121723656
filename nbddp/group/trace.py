"""Fetches what the ranks have traced of a cell, and puts it together in the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbddp.controller.rank_requests import RankRequests
from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.record.cell import CellResult
from nbddp.record.trace import MAX_EVENTS, Trace, write_merged
from nbddp.wire.request_messages import Answer
from nbddp.wire.trace_messages import SendTrace, TraceSent, TraceSteps

RANK_DIED = "it died"
RANKS_STOPPED = "the ranks are gone, and what they had traced with them"


def collect_trace(session: Session, result: CellResult, asked: TraceSteps) -> Trace:
    """What the ranks have traced of a cell that has ended, in one file if there is anything.

    What goes wrong is said in it: a trace that cannot be had ends nothing else.
    """
    folder = session.event_log.folder
    gone = [rank for rank in result.ranks if rank not in session.life.alive]
    nothing = Trace(
        cell=result.prompt, asked=asked, ranks={}, missing=dict.fromkeys(gone, RANK_DIED)
    )
    left = [rank for rank in result.ranks if rank not in gone]
    if folder is None or not left or not session.life.state.is_ready:
        return replace(nothing, missing=dict.fromkeys(result.ranks, RANKS_STOPPED))
    place = folder.path / "traces" / f"cell{result.prompt}"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _collect(session, result, nothing, place, left)
    except OSError as error:
        why = f"the trace cannot be written to {place}: {error.strerror or error}"
        return replace(nothing, missing={**dict.fromkeys(left, why), **nothing.missing})
    finally:
        _remove_parts(place)


def _cell_start(session: Session, result: CellResult) -> int:
    """The nanoseconds from which the file's times are counted: the cell's beginning."""
    began = time.time() - result.seconds
    for event in session.event_log.since(0.0):
        if event.kind == "cell" and event.facts.get("id") == result.number:
            began = event.facts["began"]
    return int(began * 1e6) * 1000


def _collect(
    session: Session, result: CellResult, nothing: Trace, place: Path, ranks: Sequence[int]
) -> Trace:
    """Ask all ranks at once, and put together what they have."""
    nodes, zero = session.launcher.nodes(), _cell_start(session, result)

    def question(rank: int) -> Callable[[int], SendTrace]:
        ahead, _ = session.launcher.clock(rank)
        return lambda number: SendTrace(
            request=number,
            cell=result.number,
            rank=rank,
            folder="" if rank in nodes else str(place.resolve()),
            zero=zero + int(ahead * 1e9),
            most=MAX_EVENTS // len(result.ranks),
            node=nodes.get(rank, ""),
        )

    outcomes = RankRequests(session).ask_each({rank: question(rank) for rank in ranks})
    missing, traced = dict(nothing.missing), dict[int, TraceSent]()
    for rank, outcome in sorted(outcomes.items()):
        if not isinstance(outcome, Answer):
            missing[rank] = str(outcome)
            continue
        told = TraceSent(**outcome.content)
        try:
            if not told.why:
                _write_files(session, place, rank, outcome)
        except RequestError as problem:
            told = replace(told, why=str(problem))
        if told.why:
            missing[rank] = told.why
        else:
            traced[rank] = told
    nothing = replace(nothing, missing=dict(sorted(missing.items())))
    if not traced:
        return nothing
    error = max(session.launcher.clock(rank)[1] for rank in traced)
    parts = {rank: place / f"rank{rank}.part" for rank in traced}
    facts = {"baseTimeNanoseconds": zero, "clockErrorMilliseconds": 1000 * error}
    path = write_merged(parts, place.parent, place.name, facts)
    size = path.stat().st_size
    return replace(nothing, ranks=traced, path=path, folder=place, size=size, error=error)


def _write_files(session: Session, place: Path, rank: int, answer: Answer) -> None:
    """Write down what a rank of another machine has sent."""
    if not answer.payload:
        return
    files: Any = session.require_link().unpack(answer.payload)
    names = (f"rank{rank}.json.gz", f"rank{rank}.part")
    for name, data in zip(names, files, strict=True):
        opened = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(opened, "wb") as file:
            file.write(data)


def _remove_parts(place: Path) -> None:
    """Leave only what is of use: the ranks' own files."""
    with suppress(OSError):  # somebody deletes it just now
        for part in [*place.glob("*.part"), *place.glob("*.tmp")]:
            part.unlink(missing_ok=True)
        if not any(place.iterdir()):
            place.rmdir()
