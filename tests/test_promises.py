"""A promise to a waiting caller is kept or broken, never forgotten."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from nbddp.controller.promises import Promises
from nbddp.errors import RequestError, StartError
from nbddp.wire.messages import Answer

GONE = "rank 0 is gone"


@pytest.fixture
def asked() -> Promises:
    return Promises()


def test_a_start_is_waited_for_until_all_are_ready(asked: Promises) -> None:
    future = asked.for_start()
    assert not future.done()
    asked.started()
    assert future.result() is None
    asked.start_failed(StartError("too late"))
    asked.started()
    assert future.result() is None


def test_a_start_that_fails_says_why(asked: Promises) -> None:
    error = StartError("rank 1 could not start")
    asked.start_failed(error)  # nobody waits for it
    future = asked.for_start()
    asked.start_failed(error)
    assert future.exception() is error


def test_a_start_that_is_overtaken_by_another_says_so(
    asked: Promises, snapshot: SnapshotAssertion
) -> None:
    assert asked.pending_start is None
    first = asked.for_start()
    assert asked.pending_start is first
    second = asked.for_start()
    assert str(first.exception()) == snapshot
    assert not second.done()
    asked.started()
    assert asked.pending_start is second
    assert second.result() is None


def test_everybody_who_waits_for_the_stop_hears_of_it_once(asked: Promises) -> None:
    futures = [asked.for_stop(), asked.for_stop()]
    asked.stopped()
    asked.stopped()
    assert [future.result() for future in futures] == [None, None]


def test_everybody_who_waits_for_a_rank_to_be_gone_hears_of_that_rank_only(asked: Promises) -> None:
    one, again, other = asked.for_kill(0), asked.for_kill(0), asked.for_kill(2)
    asked.gone(0, GONE)
    assert (one.done(), again.done(), other.done()) == (True, True, False)


def test_an_answer_reaches_who_asked_once(asked: Promises) -> None:
    one, two = asked.for_answer(1, 0), asked.for_answer(2, 1)
    answer = Answer(request=2)
    asked.answered(answer)
    assert two.result() is answer
    assert not one.done()
    asked.answered(answer)
    asked.answered(Answer(request=9))  # nobody waits for it
    assert two.result() is answer


def test_who_waits_for_an_answer_of_a_rank_that_ends_is_told_so(asked: Promises) -> None:
    future, other = asked.for_answer(1, 0), asked.for_answer(2, 1)
    asked.gone(0, GONE)
    assert isinstance(future.exception(), RequestError)
    assert str(future.exception()) == GONE
    assert not other.done()
