"""A cell on its way: its notices in order, bounded, and what came of it at the end."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from nbddp.errors import CellFailedError, CellInterruptedError, RequestError
from nbddp.record import cell as room
from nbddp.record.cell import CellHandle, CellRequest, CellResult
from nbddp.record.notices import Said, Wrote
from nbddp.wire.messages import CellEnded, Failure


def handle_for(*ranks: int) -> CellHandle:
    return CellHandle(7, CellRequest(source="x"), ranks, lambda parcel: parcel["value"])


def well(value: int = 0) -> CellEnded:
    return CellEnded(cell=7, seconds=0.1, in_group=True, parcel={"value": value})


def badly() -> CellEnded:
    failure = Failure(name="ValueError", text="no", traceback="Traceback", at=1.0)
    return CellEnded(cell=7, seconds=0.1, in_group=True, failure=asdict(failure))


def test_notices_come_in_their_order_and_end_with_the_cell() -> None:
    handle = handle_for(0)
    notices = [Wrote(0, "a"), Said("b"), Wrote(0, "c")]
    for notice in notices:
        handle.feed(notice)
    handle.finish()
    assert list(handle.notices()) == notices


def test_a_cell_is_told_when_its_last_notice_was_read() -> None:
    handle = handle_for(0)
    assert handle.next_notice(0) is None  # nothing yet, and not over
    assert not handle.is_told
    handle.feed(Said("a"))
    handle.finish()
    assert handle.next_notice(0) == Said("a")
    assert not handle.is_told
    assert handle.next_notice(0) is None
    assert handle.is_told


def test_a_cell_is_finished_when_it_is_said_to_be() -> None:
    handle = handle_for(0)
    assert not handle.is_finished
    handle.note_report(0, well())
    assert not handle.is_finished
    handle.finish()
    assert handle.is_finished


def test_the_result_of_a_cell_that_went_well_raises_nothing() -> None:
    handle = handle_for(0, 1)
    handle.note_report(1, well(1))
    handle.note_report(0, well(0))
    handle.finish()
    result = handle.result
    assert result is not None
    assert (result.number, result.ranks, result.is_ok, result.exits) == (7, (0, 1), True, {})
    assert result.seconds >= 0
    assert result.values() == [0, 1]
    result.raise_for_failure()


def test_values_are_fetched_once_and_are_the_same_when_asked_again() -> None:
    fetched: list[int] = []

    def fetch(parcel: dict[str, int]) -> list[int]:
        fetched.append(parcel["value"])
        return [parcel["value"]]

    handle = CellHandle(7, CellRequest(source="x"), (0, 1), fetch)
    for rank in (0, 1):
        handle.note_report(rank, well(rank))
    result = handle.finish()
    first, second = result.values(), result.values()
    assert first == [[0], [1]]
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert fetched == [0, 1]


def test_a_value_that_cannot_be_fetched_does_not_lose_those_that_were() -> None:
    answers = iter(["a", RequestError("gone"), "b"])

    def fetch(_parcel: object) -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    handle = CellHandle(7, CellRequest(source="x"), (0, 1), fetch)
    for rank in (0, 1):
        handle.note_report(rank, well(rank))
    result = handle.finish()
    with pytest.raises(RequestError, match="gone"):
        result.values()
    assert result.values() == ["a", "b"]


@pytest.mark.parametrize(
    ("report", "complaint"),
    [
        (badly(), "there is no value of rank 1: the cell failed there"),
        (None, "there is no value of rank 1: the cell failed there"),
        (
            CellEnded(cell=7, seconds=0.1, in_group=True),
            "the values were not asked for: run the cell with wants_value=True",
        ),
    ],
    ids=["failed", "died", "not asked"],
)
def test_values_that_are_not_there_are_an_error_in_one_line(
    report: CellEnded | None, complaint: str
) -> None:
    handle = handle_for(0, 1)
    handle.note_report(0, well())
    if report is not None:
        handle.note_report(1, report)
    with pytest.raises(RequestError) as caught:
        handle.finish().values()
    assert str(caught.value) == complaint


def test_the_result_of_a_cell_that_failed_raises_its_first_cause() -> None:
    handle = handle_for(0, 1)
    handle.note_report(0, well())
    handle.note_report(1, badly())
    handle.finish()
    assert handle.result is not None
    assert not handle.result.is_ok
    with pytest.raises(CellFailedError, match="rank 1: ValueError: no"):
        handle.result.raise_for_failure()


def test_a_rank_that_died_before_it_was_through_is_among_the_exits() -> None:
    handle = handle_for(0, 1)
    handle.note_exit(1, -9)
    handle.note_report(0, well())
    handle.finish()
    assert handle.result is not None
    assert handle.result.exits == {1: -9}


def test_a_rank_that_died_after_it_was_through_is_too_unless_it_had_failed_before() -> None:
    handle = handle_for(0, 1, 2)
    handle.note_report(0, well())
    handle.note_report(2, badly())
    handle.note_exit(0, -9)
    handle.note_exit(2, -9)
    handle.note_report(1, well())
    result = handle.finish()
    assert result.exits == {0: -9}
    assert result.verdict is not None
    assert result.verdict.causes == (2,)


def test_a_rank_without_the_cell_that_died_is_not() -> None:
    handle = handle_for(0)
    handle.note_report(0, well())
    handle.note_exit(1, -9)
    handle.finish()
    assert handle.result is not None
    assert handle.result.exits == {}
    assert handle.result.is_ok


def test_results_are_those_of_ranks_that_have_one_in_order_of_rank() -> None:
    handle = handle_for(0, 1, 2)
    for rank in (2, 0):
        bundle = {"data": {"text/plain": str(rank)}, "metadata": {}}
        handle.note_report(rank, CellEnded(cell=7, seconds=0.1, in_group=True, result=bundle))
    handle.note_report(1, well())
    handle.finish()
    assert handle.result is not None
    assert list(handle.result.results) == [0, 2]


def test_the_user_ends_only_what_lived_until_then() -> None:
    handle = handle_for(0, 1)
    handle.note_exit(1, -9)
    handle.end_by("restart")
    handle.note_exit(0, -15)
    assert (handle.was_ended(0), handle.was_ended(1)) == (True, False)
    verdict = handle.finish().verdict
    assert verdict is not None
    assert verdict.summary().startswith("rank 1 was killed by SIGKILL")


# ---- for a reader who looks again and again


def test_a_reader_may_ask_for_one_thing_at_a_time() -> None:
    handle = handle_for(0)
    assert handle.next_notice(0.0) is None
    assert handle.next_notice(0.001) is None
    handle.feed(Said("a"))
    handle.feed(Wrote(0, "b"))
    assert [handle.next_notice(0.0), handle.next_notice(5.0)] == [Said("a"), Wrote(0, "b")]
    assert handle.next_notice(0.0) is None


@pytest.mark.parametrize("patience", [0.0, -1.0, 5.0])
def test_a_reader_knows_when_a_cell_has_told_everything(patience: float) -> None:
    handle = handle_for(0)
    handle.feed(Said("a"))
    handle.finish()
    assert not handle.is_told
    assert handle.next_notice(patience) == Said("a")
    assert not handle.is_told
    assert handle.next_notice(patience) is None
    assert handle.is_told


def test_a_reader_is_woken_by_what_comes() -> None:
    handle = handle_for(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.next_notice, 30.0)
        handle.feed(Said("a"))
        assert waiting.result(10) == Said("a")


# ---- while it runs


def test_a_rank_has_ended_when_it_said_so_or_died() -> None:
    handle = handle_for(0, 1, 2)
    handle.note_report(0, well())
    handle.note_exit(1, -9)
    assert [handle.has_ended(rank) for rank in range(3)] == [True, True, False]


def test_what_went_wrong_on_a_rank_is_known_before_the_cell_is_over() -> None:
    handle = handle_for(0, 1, 2, 3)
    handle.note_report(0, well())
    handle.note_report(1, badly())
    handle.note_exit(2, -9)
    said = [handle.trouble(rank) for rank in range(4)]
    assert [each and each.headline() for each in said] == [
        None,
        "ValueError: no",
        "was killed by SIGKILL",
        None,
    ]
    assert not handle.is_finished


def test_exits_are_known_while_the_cell_runs_and_are_a_copy() -> None:
    handle = handle_for(0, 1)
    assert handle.exits == {}
    handle.note_exit(1, None)
    before = handle.exits
    assert before == {1: None}
    handle.note_exit(0, 3)
    assert before == {1: None}
    assert handle.exits == {1: None, 0: 3}


def test_what_a_rank_that_died_left_is_in_the_report() -> None:
    handle = handle_for(0)
    handle.note_exit(0, -9, last_words="step 7", hint="probably out of memory")
    handle.finish()
    assert handle.result is not None
    assert handle.result.verdict is not None
    assert "step 7" in handle.result.verdict.report()
    assert "probably out of memory" in handle.result.verdict.report()


def test_its_seconds_go_on_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(100.0, 1.5)
    monkeypatch.setattr(room.time, "monotonic", lambda: next(now))
    handle = handle_for(0)
    assert [handle.seconds, handle.seconds] == [1.5, 3.0]
    handle.note_report(0, well())
    assert handle.finish().seconds == 4.5
    assert [handle.seconds, handle.seconds] == [4.5, 4.5]


def test_it_knows_when_it_began_and_on_which_ranks() -> None:
    before = time.time()
    handle = CellHandle(7, CellRequest(source="x"), [1, 0], lambda _: None, attempt=3)
    assert before <= handle.began_at <= time.time()
    assert (handle.ranks, handle.attempt) == ((1, 0), 3)
    assert handle_for(0).attempt == 1


@pytest.mark.parametrize("how", ["restart", "stop"])
def test_a_cell_that_the_user_ended_with_its_ranks_says_so(how: str) -> None:
    handle = handle_for(0, 1)
    handle.ended_by = how
    handle.note_exit(0, -15)
    handle.note_exit(1, -15)
    result = handle.finish()
    with pytest.raises(CellInterruptedError) as caught:
        result.raise_for_failure()
    assert str(caught.value) == f"the cell was ended by a {how}"


def test_a_result_is_noted_before_anybody_learns_of_the_end() -> None:
    handle = handle_for(0)
    handle.note_report(0, well())
    seen = []
    handle.finish(lambda result: seen.append((result.is_ok, handle.is_finished)))
    assert seen == [(True, False)]
    assert handle.is_finished


def test_a_record_that_cannot_be_written_keeps_nobody_waiting() -> None:
    def note(result: CellResult) -> None:
        raise OSError(f"no room for cell {result.number}")

    handle = handle_for(0)
    handle.note_report(0, well())
    with pytest.raises(OSError, match="no room for cell"):
        handle.finish(note)
    assert handle.result is not None
    assert list(handle.notices()) == []
    assert handle.is_told
