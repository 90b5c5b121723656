"""What a heal could not carry is told in a bounded number of words, whatever it was."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from nbddp.record.healed import Healed
from nbddp.record.timeline import Happening
from nbddp.ui.words import say_event
from nbddp.worker.carry import pack_names
from nbddp.worker.untold import LONGEST, MOST, NAMES, PARTS, REASONS, few_of

LOCK = "cannot pickle '_thread.lock' object"


def healed(left: Mapping[str, str], more: Mapping[str, int], places: int = 0) -> Healed:
    return Healed(
        ranks=(1,),
        donor=0,
        names=3,
        left=left,
        more=more,
        places=tuple(f"t[{number}].rank" for number in range(places)),
        cells={},
        size=10,
        fork=0.1,
        carry=0.1,
        meet=0.1,
    )


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=2), max_size=300))
def test_a_few_are_told_and_all_are_counted(left: dict[str, str]) -> None:
    told, more = few_of(left)
    assert len(told) + sum(more.values()) == len(left)
    assert len(told) <= MOST
    assert len(more) <= REASONS + 1
    assert told.items() <= left.items()
    assert [*told] == [name for name in left if name in told]


def test_so_few_are_all_told() -> None:
    names = {f"lock{number}": LOCK for number in range(NAMES)}
    parts = {f"t[{number}].lock": LOCK for number in range(PARTS)}
    assert few_of(parts | names) == (parts | names, {})
    assert few_of({}) == ({}, {})


def test_names_go_before_parts_and_long_reasons_are_cut() -> None:
    parts = {f"t[{number}]": f"{number}" for number in range(MOST)}
    told, more = few_of({**parts, "model": "x" * 5000})
    assert told["model"] == "x" * LONGEST
    assert more == {f"{MOST - 1}": 1}


def test_reasons_that_are_too_many_are_counted_together() -> None:
    _, more = few_of({f"t[{number}]": f"<at {number}>" for number in range(3000)})
    assert more[""] == 3000 - MOST - REASONS


def test_the_first_line_says_who_was_healed_from_whom_and_how_long_all_of_it_took() -> None:
    done = healed({}, {})
    assert done.seconds == done.fork + done.carry + done.meet
    [line] = done.lines()
    assert line.startswith("rank 1 healed with the names of rank 0 in 0.30 s (3 names, ")


def test_the_lines_of_what_was_not_carried(snapshot: SnapshotAssertion) -> None:
    told, more = few_of({f"t[{number}].lock": LOCK for number in range(3000)} | {"file": "open"})
    assert healed(told, more).lines()[1:] == snapshot(name="one reason")
    assert healed({}, {"": 2920}).lines()[1:] == snapshot(name="many reasons")


@pytest.mark.parametrize(("count", "end"), [(20, "t[19].rank"), (3000, "t[19].rank, 2,980 more")])
def test_places_are_told_to_a_bound(count: int, end: str) -> None:
    [_, line] = healed({}, {}, places=count).lines()
    assert ": t[0].rank, " in line
    assert line.endswith(end)


def test_in_the_list_of_events_it_is_one_short_line() -> None:
    facts = {"ranks": [1], "donor": 0, "fork": 0.1, "bytes": 10, "carry": 0.1, "meet": 0.1}
    left = {f"t[{number}]": LOCK for number in range(9)}
    several, one, none = (
        say_event(Happening(0.0, "healed", {**facts, "left": left, "more": more}))
        for left, more in ((left, {LOCK: 2991}), ({"a": LOCK}, {}), ({}, {}))
    )
    assert several.endswith(
        ": " + ", ".join(f"t[{number}]" for number in range(8)) + ", 2,992 more"
    )
    assert one.endswith(": a")
    assert several.startswith(none)


def test_parts_that_have_no_name_are_counted_too() -> None:
    def gates() -> set[object]:
        return {(number for number in ()) for _ in range(3)}  # what is in a set has no name

    assert pack_names({"gates": gates()}).left == {
        "a generator in gates": "cannot pickle 'generator' object",
        "a generator in gates (2)": "cannot pickle 'generator' object",
        "a generator in gates (3)": "cannot pickle 'generator' object",
    }
