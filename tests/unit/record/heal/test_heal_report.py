"""The report of a heal: variables that were not copied, and values of the new rank's own."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.record.heal.heal_report import Healed
from nbddp.wire.request_messages import KEEPS_RANK

LOCK = "cannot pickle '_thread.lock' object"


def healed(reasons: Mapping[str, str], more: Mapping[str, int], places: int = 0) -> Healed:
    return Healed(
        ranks=(1,),
        donor=0,
        names=3,
        left=reasons,
        more=more,
        places=tuple(f"t[{number}].rank" for number in range(places)),
        own=(),
        unknown=(),
        cells={},
        size=10,
        fork=0.1,
        carry=0.1,
        meet=0.1,
    )


def test_the_first_line_of_a_heal_report_has_both_ranks_and_the_total_time() -> None:
    done = healed({}, {})
    assert done.seconds == done.fork + done.carry + done.meet
    [line] = done.lines()
    assert line.startswith("rank 1 healed with the variables of rank 0 in 0.30 s (3 variables, ")
    assert "(1 variable, " in str(replace(done, names=1))


def test_the_heal_report_lists_variables_that_were_not_copied(snapshot: SnapshotAssertion) -> None:
    assert healed({"file": "open", "t.lock": LOCK}, {"": 2980}).lines()[1:] == snapshot


@pytest.mark.parametrize(("count", "end"), [(20, "t[19].rank"), (3000, "t[19].rank, 2,980 more")])
def test_the_heal_report_lists_a_bounded_number_of_places(count: int, end: str) -> None:
    [_, line] = healed({}, {}, places=count).lines()
    assert ": t[0].rank, " in line
    assert line.endswith(end)


def test_the_heal_report_names_the_cells_that_make_trainers_again() -> None:
    done = replace(
        healed({"trainer": KEEPS_RANK, "net.trainer": KEEPS_RANK, "file": "open"}, {}),
        cells={"trainer": 7, "net.trainer": 0, "file": 3},
    )
    assert done.trainers == ["trainer", "net.trainer"]
    [_, trainer, part, file] = done.lines()
    assert "cell [7] makes it, on all ranks (`%ddp heal --rerun`)" in trainer
    assert done.lines(reruns=(7,))[1].endswith("; cell [7] makes it, and runs again now")
    assert done.lines(reruns=(3,)) == done.lines()
    assert part.endswith("make it again, on all ranks")
    assert "--rerun" not in file
