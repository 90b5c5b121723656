"""A promise to a waiting caller is kept or broken, never forgotten."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures._base import DoneAndNotDoneFutures

import pytest

from nbddp.controller import promises
from nbddp.controller.promises import Promises
from nbddp.errors import RequestError, StartError
from nbddp.record.cell import HEARING
from nbddp.wire.messages import Answer


@pytest.fixture
def waiting() -> Promises:
    return Promises()


def test_a_start_is_waited_for_until_all_are_ready(waiting: Promises) -> None:
    future = waiting.for_start()
    assert not future.done()
    waiting.started()
    assert future.result(0) is None
    waiting.start_failed(StartError("too late"))
    waiting.started()
    assert future.result(0) is None


def test_a_start_that_fails_says_why(waiting: Promises) -> None:
    future = waiting.for_start()
    error = StartError("rank 1 could not start")
    waiting.start_failed(error)
    assert future.exception(0) is error


def test_a_start_that_is_overtaken_by_another_says_so(waiting: Promises) -> None:
    first, second = waiting.for_start(), waiting.for_start()
    assert str(first.exception(0)) == "restarted before it was ready"
    assert not second.done()


def test_the_start_that_was_asked_for_last_can_be_had(waiting: Promises) -> None:
    assert waiting.start is None
    first = waiting.for_start()
    assert waiting.start is first
    second = waiting.for_start()
    assert waiting.start is second
    waiting.started()
    assert waiting.start is second
    assert second.result(0) is None


def test_news_of_a_start_that_nobody_waits_for_is_no_mistake(waiting: Promises) -> None:
    waiting.started()
    waiting.start_failed(StartError("nobody hears"))


def test_everybody_who_waits_for_the_stop_hears_of_it_once(waiting: Promises) -> None:
    futures = [waiting.for_stop(), waiting.for_stop()]
    waiting.stopped()
    waiting.stopped()
    assert [future.result(0) for future in futures] == [None, None]


def test_everybody_who_waits_for_a_rank_to_be_gone_hears_of_that_rank_only(
    waiting: Promises,
) -> None:
    one, again, other = waiting.for_kill(1), waiting.for_kill(1), waiting.for_kill(2)
    waiting.gone(1, "rank 1 was killed by SIGKILL before it could answer")
    assert one.done()
    assert again.done()
    assert not other.done()


def test_an_answer_reaches_who_asked(waiting: Promises) -> None:
    one, two = waiting.for_answer(1, 0), waiting.for_answer(2, 1)
    answer = Answer(request=2)
    waiting.answered(answer)
    assert two.result(0) is answer
    assert not one.done()


def test_an_answer_that_nobody_waits_for_is_dropped(waiting: Promises) -> None:
    waiting.for_answer(1, 0)
    waiting.answered(Answer(request=1))
    waiting.answered(Answer(request=1))
    waiting.answered(Answer(request=9))


def test_who_waits_for_an_answer_of_a_rank_that_ends_is_told_so(waiting: Promises) -> None:
    future, other = waiting.for_answer(1, 0), waiting.for_answer(2, 1)
    waiting.gone(0, "rank 0 was killed by SIGKILL before it could answer")
    error = future.exception(0)
    assert isinstance(error, RequestError)
    assert str(error) == "rank 0 was killed by SIGKILL before it could answer"
    assert not other.done()


def test_whoever_waits_for_a_promise_looks_up_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal that comes as a wait begins does not end it: it is seen when the wait ends."""
    promise: Future[int] = Future()
    waits: list[float | None] = []

    def wait(left: set[Future[int]], timeout: float | None) -> DoneAndNotDoneFutures[int]:
        waits.append(timeout)
        if len(waits) == 3:
            promise.set_result(7)
            return DoneAndNotDoneFutures(left, set())
        return DoneAndNotDoneFutures(set(), left)

    monkeypatch.setattr(promises, "wait", wait)
    assert promises.kept(promise) == 7
    assert waits == [HEARING] * 3
