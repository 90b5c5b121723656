"""A cell on its way: its notices in order, bounded, and what came of it at the end."""

from contextlib import nullcontext
from dataclasses import asdict, fields
from typing import Any
from unittest.mock import Mock

import pytest
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp.errors import CellFailedError, RequestError
from nbddp.record.cell import CellHandle, CellRequest, CellResult
from nbddp.record.notices import ControllerMessage
from nbddp.wire.messages import CellEnded, Failure, decode, encode
from nbddp.wire.options.cell_spec import CellOptions


def handle_for(*ranks: int) -> CellHandle:
    request = CellRequest(source="x", execution_count=8)
    return CellHandle(7, request, ranks, lambda payload: payload["value"])


def well(value: int = 0) -> CellEnded:
    return CellEnded(cell=7, in_group=True, payload={"value": value})


def finished(*reports: CellEnded | int | None) -> CellResult:
    """The result of a cell: for each rank its report, its exit code if it died, or neither."""
    handle = handle_for(*range(len(reports)))
    for rank, report in reversed([*enumerate(reports)]):
        if isinstance(report, CellEnded):
            handle.add_report(rank, report)
        elif report is not None:
            handle.add_exit(rank, report)
    return handle.finish()


def badly() -> CellEnded:
    failure = Failure(name="ValueError", text="no", traceback="Traceback", at=1.0)
    return CellEnded(cell=7, in_group=True, failure=asdict(failure))


def test_the_result_of_a_cell_raises_its_first_cause_if_there_is_one() -> None:
    result = finished(well(0), well(1))
    assert (result.number, result.ranks, result.is_ok, result.exits) == (7, (0, 1), True, {})
    assert result.seconds >= 0
    assert result.values() == [0, 1]
    result.raise_for_failure()
    result = finished(well(), badly())
    assert not result.is_ok
    with pytest.raises(CellFailedError, match=r"rank 1: ValueError: no"):
        result.raise_for_failure()


def test_ranks_get_all_options_that_they_obey() -> None:
    options: dict[str, Any] = {"break_ranks": (1,), "shard_copies": 3}
    assert options.keys() == {item.name for item in fields(CellOptions)}
    options["options"] = {"trainers": {"no_trainer_metrics": True}}
    request = CellRequest(source="x", **options)
    received = decode(encode(CellHandle(7, request, (0, 1), Mock()).run_message()))
    assert {name: getattr(received, name) for name in options} == options


def test_values_are_fetched_once_and_cached() -> None:
    fetch = Mock(side_effect=[["a"], RequestError("gone"), ["b"]])
    handle = CellHandle(7, CellRequest(source="x"), (0, 1), fetch)
    for rank in (0, 1):
        handle.add_report(rank, well(rank))
    result = handle.finish()
    with pytest.raises(RequestError, match="gone"):
        result.values()
    first, second = result.values(), result.values()  # fetched values are not lost
    assert first == [["a"], ["b"]]
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_missing_values_raise_a_one_line_error(snapshot: SnapshotAssertion) -> None:
    others = {"failed": badly(), "died": None, "not asked": CellEnded(cell=7, in_group=True)}
    texts = {
        name: refusal(RequestError, finished(well(), other).values)
        for name, other in others.items()
    }
    assert texts == snapshot


def test_the_facts_of_a_cell_have_its_outcome() -> None:
    assert finished(well()).facts() == {"number": 8, "id": 7, "outcome": "ok"}
    result = finished(well(), badly())
    assert result.verdict is not None
    failed = {"outcome": "rank 1: ValueError: no", "report": result.verdict.report()}
    failures = [{"ranks": (1,), "what": "ValueError: no", "consequence": False}]
    assert result.facts() == {"number": 8, "id": 7, "failures": failures, **failed}
    stopped = CellEnded(cell=7, in_group=True, failure=badly().failure, is_interrupted=True)
    assert finished(stopped).facts()["interrupted"] is True


def test_a_dead_rank_is_among_the_exits_unless_it_had_failed_before() -> None:
    handle = handle_for(0, 1, 2, 3)
    handle.add_exit(3, -9, final_output="step 7", hint="out of memory")
    before = handle.exits
    handle.add_report(0, well())
    handle.add_report(2, badly())
    handle.add_exit(0, -9)
    handle.add_exit(2, -9)
    handle.add_exit(4, -9)  # it has not got the cell
    handle.add_report(1, well())
    assert (before, handle.exits) == ({3: -9}, {0: -9, 3: -9})
    death = handle.failure(3)
    assert death is not None
    assert death.process_exit is not None
    assert (death.process_exit.final_output, death.process_exit.hint) == ("step 7", "out of memory")
    assert handle.finish().exits == {0: -9, 3: -9}


def test_results_are_sorted_by_rank_and_omit_ranks_without_a_result() -> None:
    bundle = {"data": {"text/plain": "3"}, "metadata": {}}
    shown = CellEnded(cell=7, in_group=True, result=bundle)
    handle = handle_for(0, 1, 2)
    for rank, report in ((2, shown), (0, shown), (1, well())):
        handle.add_report(rank, report)
    assert list(handle.finish().results) == [0, 2]


def test_only_ranks_that_were_alive_count_as_ended_by_the_user() -> None:
    handle = handle_for(0, 1)
    handle.add_exit(1, -9)
    handle.set_ended_by("restart")
    handle.add_exit(0, -15)
    assert (handle.was_ended_by_user(0), handle.was_ended_by_user(1)) == (True, False)
    verdict = handle.finish().verdict
    assert verdict is not None
    assert verdict.causes == (1,)


@pytest.mark.parametrize("patience", [0.0, -1.0, 5.0])
def test_a_cell_handle_is_drained_after_its_last_notice_was_read(patience: float) -> None:
    handle = handle_for(0)
    assert handle.notice_queue.get(0) is None  # nothing yet, and not over
    assert (handle.notice_queue.is_drained, handle.is_finished) == (False, False)
    handle.notice_queue.put(ControllerMessage("a"))
    handle.add_report(0, well())
    assert not handle.is_finished
    handle.finish()
    assert (handle.notice_queue.is_drained, handle.is_finished) == (False, True)
    assert handle.notice_queue.get(patience) == ControllerMessage("a")
    assert not handle.notice_queue.is_drained
    assert handle.notice_queue.get(patience) is None
    assert handle.notice_queue.is_drained


@pytest.mark.parametrize("fails", [False, True])
def test_finish_calls_its_callback_first_and_completes_even_if_it_fails(fails: bool) -> None:
    handle, seen = handle_for(0), []

    def note(result: CellResult) -> None:
        seen.append((result.is_ok, handle.is_finished))
        if fails:
            raise OSError("no room")

    handle.add_report(0, well())
    with pytest.raises(OSError, match="no room") if fails else nullcontext():
        handle.finish(note)
    assert seen == [(True, False)]
    assert handle.result is not None
    assert list(handle.notices()) == []
    assert (handle.notice_queue.is_drained, handle.is_finished) == (True, True)
