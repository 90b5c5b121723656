"""A future to a waiting caller is resolved or rejected, never forgotten."""

from __future__ import annotations

from nbddp.controller.pending_futures import PendingFutures
from nbddp.errors import RequestError

GONE = RequestError("rank 0 is gone")


def test_resolve_completes_all_futures_with_that_key_and_no_others() -> None:
    asked = PendingFutures()
    one, again, other = asked.new("kill", 0), asked.new("kill", 0), asked.new("kill", 2)
    asked.resolve("kill", 0)
    asked.resolve("kill", 0)
    assert (one.done(), again.done(), other.done()) == (True, True, False)
    asked.resolve("start")  # no future is pending for it
    asked.reject(GONE, "start")


def test_a_future_is_resolved_with_its_value() -> None:
    asked = PendingFutures()
    one, two = asked.new("answer", 0, 1), asked.new("answer", 1, 2)
    asked.resolve("answer", 1, 2, value="yes")
    assert two.result() == "yes"
    assert not one.done()


def test_futures_for_a_rank_that_exited_are_rejected() -> None:
    asked = PendingFutures()
    first, second, other = (asked.new("answer", *each) for each in ((0, 1), (0, 2), (1, 3)))
    asked.reject(GONE, "answer", 0)
    assert first.exception() is second.exception() is GONE
    assert not other.done()
