"""Fetches what the ranks have traced of a cell, and puts it together in the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbddp.controller.asking import Asking
from nbddp.controller.session import Session
from nbddp.errors import RequestError
from nbddp.record.cell import CellResult
from nbddp.record.trace import MOST_EVENTS, Trace, write
from nbddp.wire.messages import Answer
from nbddp.wire.trace_messages import GiveTrace, Steps, Traced

DIED = "it died"
STOPPED = "the ranks are gone, and what they had traced with them"


def trace_of(session: Session, result: CellResult, asked: Steps) -> Trace:
    """What the ranks have traced of a cell that has ended, in one file if there is anything.

    What goes wrong is said in it: a trace that cannot be had ends nothing else.
    """
    folder = session.time_line.folder
    gone = [rank for rank in result.ranks if rank not in session.life.alive]
    missing = dict.fromkeys(gone, DIED)
    nothing = Trace(cell=result.prompt, asked=asked, ranks={}, missing=missing)
    left = [rank for rank in result.ranks if rank not in gone]
    if folder is None or not left or not session.life.state.is_ready:
        return replace(nothing, missing=dict.fromkeys(result.ranks, STOPPED))
    place = folder.path / "traces" / f"cell{result.prompt}"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        began = _began_at(session, result)
        return _Collector(session, result.number, nothing, place, began).collect(left)
    except OSError as error:
        return replace(nothing, missing=dict.fromkeys(left, _no_room(place, error)) | missing)
    finally:
        _clear(place)


def _began_at(session: Session, result: CellResult) -> float:
    """When the cell began: the file's times are counted from there."""
    for event in reversed(session.time_line.since(0.0)):
        if event.kind == "cell" and event.facts.get("id") == result.number:
            return float(event.facts["began"])
    return time.time() - result.seconds


def _no_room(place: Path, error: OSError) -> str:
    return f"the trace cannot be written to {place}: {error.strerror or error}"


@dataclass(frozen=True)
class _Collector:
    """Asks all ranks at once, and puts together what they have."""

    session: Session
    number: int  # of the cell
    nothing: Trace
    place: Path
    began: float

    def collect(self, ranks: Sequence[int]) -> Trace:
        """What these ranks have, which live.

        Raises:
            OSError: it cannot be written.
        """
        most = MOST_EVENTS // (len(ranks) + len(self.nothing.missing))
        outcomes = Asking(self.session).ask_each(
            {rank: self._question(rank, most) for rank in ranks}
        )
        answers = {rank: each for rank, each in outcomes.items() if isinstance(each, Answer)}
        told = {rank: Traced(**each.payload) for rank, each in sorted(answers.items())}
        missing = dict(self.nothing.missing)
        missing |= {rank: str(each) for rank, each in outcomes.items() if rank not in answers}
        missing |= {rank: each.why for rank, each in told.items() if each.why}
        for rank in [rank for rank in told if rank not in missing]:
            try:
                self._take_files(rank, answers[rank])
            except RequestError as error:
                missing[rank] = str(error)
        traced = {rank: each for rank, each in told.items() if rank not in missing}
        nothing = replace(self.nothing, missing=dict(sorted(missing.items())))
        return self._put_together(nothing, traced) if traced else nothing

    def _question(self, rank: int, most: int) -> Callable[[int], GiveTrace]:
        nodes, (ahead, _) = self.session.launcher.nodes(), self.session.launcher.clock(rank)
        return lambda number: GiveTrace(
            request=number,
            cell=self.number,
            rank=rank,
            folder="" if rank in nodes else str(self.place.resolve()),
            zero=self._zero + int(ahead * 1e9),
            most=most,
            node=nodes.get(rank, ""),
        )

    @property
    def _zero(self) -> int:
        return int(self.began * 1e6) * 1000

    def _take_files(self, rank: int, answer: Answer) -> None:
        """Write down what a rank of another machine has sent."""
        if not answer.parcel:
            return
        files: Any = self.session.require_link().unpack(answer.parcel)
        names = (f"rank{rank}.json.gz", f"rank{rank}.part")
        for name, data in zip(names, files, strict=True):
            opened = os.open(self.place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(opened, "wb") as file:
                file.write(data)

    def _put_together(self, nothing: Trace, traced: dict[int, Traced]) -> Trace:
        error = max(self.session.launcher.clock(rank)[1] for rank in traced)
        parts = {rank: self.place / f"rank{rank}.part" for rank in traced}
        facts = {"baseTimeNanoseconds": self._zero, "clockErrorMilliseconds": 1000 * error}
        path = write(parts, self.place.parent, self.place.name, facts)
        return replace(
            nothing,
            ranks=traced,
            path=path,
            folder=self.place,
            size=path.stat().st_size,
            error=error,
        )


def _clear(place: Path) -> None:
    """Leave only what is of use: the ranks' own files."""
    with suppress(OSError):  # somebody deletes it just now
        for part in [*place.glob("*.part"), *place.glob("*.tmp")]:
            part.unlink(missing_ok=True)
        if not any(place.iterdir()):
            place.rmdir()
