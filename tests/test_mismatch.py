"""Why ranks wait in vain, from what each of them said last."""

from __future__ import annotations

from typing import Any

from syrupy.assertion import SnapshotAssertion

from nbddp.record.mismatch import why
from nbddp.wire.collective import Collective
from nbddp.wire.messages import Pulse

CELL = 5


def waits(*call: Any) -> Pulse:
    return Pulse(cell=CELL, line=3, function="", collective=Collective(*call))


def went_on(*call: Any, last_cell: int = CELL) -> Pulse:
    last = Collective(*call) if call else None
    return Pulse(cell=CELL, line=9, function="load", last=last, last_cell=last_cell)


REDUCE = waits("all_reduce", 3, "", "float [4]")


CASES: dict[str, tuple[list[Pulse], list[Pulse]]] = {
    "another call": ([REDUCE, *[waits("broadcast", 3, "", "float [4]")] * 2], []),
    "never came": ([went_on(), REDUCE, REDUCE], []),
    "done": ([REDUCE], [went_on()]),
    "one call behind": ([REDUCE], [went_on("all_reduce", 2, "", "float [4]"), went_on()]),
    "other sizes": ([REDUCE, waits("all_reduce", 3, "", "float [2]")], []),
    "another type, and went on": ([REDUCE], [went_on("all_reduce", 3, "", "double [4]")]),
    "another call, and went on": ([REDUCE, went_on("broadcast", 3, "", "float [4]")], []),
    "another cell's call": (
        [REDUCE, went_on("broadcast", 3, "", "float [4]", last_cell=CELL - 1)],
        [],
    ),
    "sizes that may differ": ([waits("scatter", 1, "", "float [4]"), waits("scatter", 1)], []),
    "no number": ([waits("recv"), waits("recv")], []),
    "another group's call": (
        [waits("all_reduce", 2, "[0, 2]"), went_on("barrier", 2), went_on()],
        [],
    ),
}


def test_it_is_said_outright_who_called_what(snapshot: SnapshotAssertion) -> None:
    said = {}
    for name, (running, ended) in CASES.items():
        among = dict(enumerate(running))
        done = dict(enumerate(ended, start=len(running)))
        said[name] = why(CELL, among, done)
    assert said == snapshot
