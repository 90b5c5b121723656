"""Of which cells a replay makes nothing, and which later ones have made up for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.record.cell import CellRequest
from nbddp.record.deeds import Deeds
from nbddp.record.push_store import PushRecord
from nbddp.record.unmade import Unmade, say_unmade, unmade_by
from nbddp.record.verdict import Trouble, Verdict
from nbddp.wire.messages import Failure

pytestmark = pytest.mark.until_cut


def verdict(name: str = "ValueError", text: str = "no", *, is_interrupt: bool = False) -> Verdict:
    failure = Failure(name=name, text=text, traceback="")
    first = Trouble(rank=0, at=0.0, failure=failure, is_interrupted=is_interrupt)
    return Verdict(first=first, causes=(0,), others=(), lost=(), is_interrupt=is_interrupt)


def cell(source: str, number: int = 3, ranks: tuple[int, ...] | None = None) -> CellRequest:
    return CellRequest(source=source, execution_count=number, ranks=ranks)


MISSING = verdict("NameError", "name 'modle' is not defined")


@pytest.mark.parametrize(
    ("source", "why", "counts"),
    [
        ("w += 1", verdict(is_interrupt=True), True),
        ("fit(model)\nprint(modle)", MISSING, True),
        ("for x in y:\n    modle", MISSING, True),
        ("fit(model)", MISSING, True),
        ("fit(modle)", MISSING, False),
        ("!ls\nfit(modle)", MISSING, True),
        ("w = 1\n1 / 0", replace(verdict(), ended_by="restart"), False),
        ("w = 1\n1 / 0", replace(verdict(), has_survivors=False), False),
    ],
)
def test_a_cell_that_has_done_nothing_does_not_count(
    source: str, why: Verdict, *, counts: bool
) -> None:
    assert bool(unmade_by(cell(source), why)) is counts


@pytest.mark.parametrize(
    ("unmade", "deed", "is_made"),
    [
        (Unmade(cell("w += 1"), is_interrupt=True), cell("w += 1", 4), True),
        (Unmade(cell("w += 1"), is_interrupt=True), cell("w += 2", 4), False),
        (Unmade(cell("w = 1\n1 / 0")), cell("w = 1", 4), True),
        (Unmade(cell("v = w = 1\n1 / 0")), cell("w = 1", 4), False),
        (Unmade(cell("fit()\n1 / 0")), cell("fit()", 4), False),
        (Unmade(cell("!ls\n1 / 0")), cell("fit()", 4), False),
        (Unmade(cell("w = 1")), cell("w = 1", 4, ranks=(0,)), False),
        (Unmade(cell("w = 1", ranks=(0,))), cell("w = 1", 4, ranks=(0, 1)), True),
        (Unmade(cell("w = 1")), PushRecord(("w",), None, None), False),
        (Unmade(), cell("w = 1"), False),
    ],
)
def test_the_next_cell_makes_up_for_one(
    unmade: Unmade, deed: CellRequest | PushRecord, *, is_made: bool
) -> None:
    assert unmade.is_made_by(deed) is is_made
    deeds = Deeds()
    deeds.unmade = (unmade,)
    deeds.note(deed)
    assert bool(deeds.unmade) is not is_made
    deeds.forget()
    assert not deeds.unmade


def test_a_cell_after_the_next_one_makes_up_for_nothing() -> None:
    """What came between may have used what the failed one had made: a replay of it would fail."""
    deeds = Deeds()
    deeds.unmade = (Unmade(cell("w = 1\n1 / 0")),)
    deeds.note(cell("v = w + 1", 4))
    deeds.note(cell("w = 1", 5))
    assert len(deeds.unmade) == 1


def test_many_are_said_in_one_line(snapshot: SnapshotAssertion) -> None:
    many = [Unmade(cell("", number)) for number in range(1, 7)]
    deeds = Deeds()
    deeds.note_taken_back()
    assert [say_unmade(many), say_unmade(deeds.unmade)] == snapshot
