"""Why ranks wait in vain, from what each of them said last."""

from __future__ import annotations

import pytest

from nbddp.record.mismatch import why
from nbddp.wire.messages import Pulse

CELL = 5


def waits(collective: str, shape: str = "") -> Pulse:
    return Pulse(cell=CELL, line=3, function="", collective=collective, shape=shape)


def went_on(last: str = "", last_cell: int = CELL) -> Pulse:
    return Pulse(cell=CELL, line=9, function="load", last=last, last_cell=last_cell)


REDUCE = waits("all_reduce #3", "float [4]")


@pytest.mark.parametrize(
    ("running", "ended", "said"),
    [
        (
            [REDUCE, waits("broadcast #3", "float [4]"), waits("broadcast #3", "float [4]")],
            [],
            "rank 0 called all_reduce #3, ranks 1-2 broadcast #3",
        ),
        ([went_on(), REDUCE, REDUCE], [], "ranks 1-2 called all_reduce #3, rank 0 never came"),
        ([REDUCE], [went_on()], "rank 0 called all_reduce #3, rank 1 is done with the cell"),
        (
            [REDUCE],
            [went_on("all_reduce #2 float [4]"), went_on()],
            "rank 0 called all_reduce #3, ranks 1-2 are done with the cell",
        ),
        (
            [REDUCE, waits("all_reduce #3", "float [2]")],
            [],
            "sizes differ: rank 0 called all_reduce #3 with float [4], rank 1 with float [2]",
        ),
        (
            [REDUCE],
            [went_on("all_reduce #3 double [4]")],
            "sizes differ: rank 0 called all_reduce #3 with float [4], rank 1 with double [4]",
        ),
        (
            [REDUCE, went_on("broadcast #3 float [4]")],
            [],
            "rank 0 called all_reduce #3, rank 1 broadcast #3",
        ),
        (
            [REDUCE, went_on("broadcast #3 float [4]", last_cell=CELL - 1)],
            [],
            "rank 0 called all_reduce #3, rank 1 never came",
        ),
        (
            [waits("scatter #1", "float [4]"), waits("scatter #1", "")],
            [],
            "ranks 0-1 called scatter #1",
        ),
        ([waits("recv"), waits("recv")], [], "ranks 0-1 called recv"),
        (
            [waits("all_reduce #2 of group [0, 2]"), went_on("barrier #2"), went_on()],
            [],
            "rank 0 called all_reduce #2 of group [0, 2], ranks 1-2 never came",
        ),
    ],
    ids=[
        "another call",
        "never came",
        "done",
        "one call behind",
        "other sizes",
        "another type, and went on",
        "another call, and went on",
        "another cell's call",
        "sizes that may differ",
        "no number",
        "another group's call",
    ],
)
def test_it_is_said_outright_who_called_what(
    running: list[Pulse], ended: list[Pulse], said: str
) -> None:
    among = dict(enumerate(running))
    done = dict(enumerate(ended, start=len(running)))
    assert why(CELL, among, done) == said
