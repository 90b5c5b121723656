"""One thread does one thing after the other, in order, and its errors go where they belong."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from nbddp.controller import actor as actor_module
from nbddp.controller.actor import Actor, ClosedError


@pytest.fixture
def actor() -> Iterator[Actor]:
    actor = Actor("test-actor")
    yield actor
    actor.close()


def settle(actor: Actor) -> None:
    """Wait until all that was asked before is done."""
    actor.call(lambda: None)


def fail(words: str) -> None:
    raise LookupError(words)


def test_things_are_done_in_the_order_they_were_asked_for(actor: Actor) -> None:
    done: list[int] = []
    for number in range(100):
        actor.tell(done.append, number)
    settle(actor)
    assert done == list(range(100))


def test_a_call_returns_what_came_of_it(actor: Actor) -> None:
    assert actor.call(divmod, 7, 2) == (3, 1)
    assert actor.call(dict, a=1) == {"a": 1}


def test_everything_is_done_on_the_one_thread(actor: Actor) -> None:
    found: list[threading.Thread] = []
    actor.tell(lambda: found.append(threading.current_thread()))
    thread = actor.call(threading.current_thread)
    assert found == [thread]
    assert thread is not threading.current_thread()
    assert thread.name == "test-actor"
    assert thread.daemon


@pytest.mark.parametrize("kind", [LookupError, KeyboardInterrupt, SystemExit])
def test_a_call_raises_what_was_raised_and_the_thread_goes_on(
    actor: Actor, kind: type[BaseException]
) -> None:
    def raise_it() -> None:
        raise kind("no")

    with pytest.raises(kind, match="no"):
        actor.call(raise_it)
    assert actor.call(max, 1, 2) == 2


def test_what_was_told_and_failed_is_logged_and_the_thread_goes_on(
    actor: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        actor.tell(fail, "no such thing")
        assert actor.call(max, 1, 2) == 2
    assert caplog.messages == ["nbddp could not deal with an event"]
    assert "LookupError: no such thing" in caplog.text


def test_what_is_due_later_is_done_in_the_order_of_its_time(actor: Actor) -> None:
    done: list[str] = []
    over = threading.Event()

    def schedule() -> None:
        actor.later(0.03, over.set)
        actor.later(0.02, done.append, "second")
        actor.later(0.01, done.append, "first")

    actor.call(schedule)
    assert over.wait(30)
    assert done == ["first", "second"]


def test_what_is_due_at_the_same_time_is_done_in_the_order_it_was_asked_for(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    over = threading.Event()

    def schedule() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("time.monotonic", lambda: 0.0)
            for number in range(20):
                actor.later(0.0, done.append, number)
            actor.later(0.0, over.set)

    actor.call(schedule)
    assert over.wait(30)
    assert done == list(range(20))


def test_what_is_due_is_done_on_the_same_thread(actor: Actor) -> None:
    found: list[threading.Thread] = []
    over = threading.Event()
    actor.call(actor.later, 0.0, lambda: found.append(threading.current_thread()))
    actor.call(actor.later, 0.0, over.set)
    assert over.wait(30)
    assert found == [actor.call(threading.current_thread)]


def test_what_is_far_away_does_not_hold_up_what_is_asked_now(actor: Actor) -> None:
    actor.call(actor.later, 3600.0, fail, "too early")
    assert actor.call(max, 1, 2) == 2


def test_a_flood_of_news_does_not_keep_an_alarm_from_ringing(actor: Actor) -> None:
    rung = threading.Event()
    over = threading.Event()
    heard: list[bool] = []

    def flood(left: int) -> None:
        """Always one more piece of news in the queue, as from a rank that prints without end."""
        heard.append(rung.is_set())
        actor.tell(flood, left - 1) if left and not rung.is_set() else over.set()

    def begin() -> None:
        actor.later(0.0, rung.set)
        actor.tell(flood, 20_000)

    actor.call(begin)
    assert over.wait(30)
    assert heard[-1], "the alarm was due all the time and did not ring"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_nothing_that_was_told_can_end_the_thread(actor: Actor, kind: type[BaseException]) -> None:
    def raise_it() -> None:
        raise kind("no")

    actor.tell(raise_it)
    assert actor.call(max, 1, 2) == 2


def test_what_is_asked_on_the_thread_itself_is_done_at_once(actor: Actor) -> None:
    assert actor.call(lambda: actor.call(max, 1, 2)) == 2


def test_what_comes_after_the_end_is_refused_and_nobody_waits_for_it() -> None:
    actor = Actor("test-actor")
    actor.close()
    done: list[int] = []
    assert not actor.tell(done.append, 1)
    with pytest.raises(ClosedError, match="this actor was closed"):
        actor.call(done.append, 2)
    actor.close()
    assert not done


def test_whoever_asks_while_it_is_closed_is_answered_or_refused() -> None:
    for _ in range(50):
        actor = Actor("test-actor")
        answers: list[object] = []

        def ask(actor: Actor = actor, answers: list[object] = answers) -> None:
            try:
                answers.append(actor.call(max, 1, 2))
            except ClosedError:
                answers.append("refused")

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        actor.close()
        for asker in askers:
            asker.join(30)
        assert len(answers) == 4
        assert set(answers) <= {2, "refused"}


def test_a_thread_that_is_stuck_is_not_waited_for_longer_than_one_has_patience() -> None:
    actor, gate = Actor("test-actor"), threading.Event()
    actor.tell(gate.wait)
    actor.close(patience=0.01)
    gate.set()
    actor.close()


def test_closing_does_what_was_asked_before_and_then_ends_the_thread() -> None:
    actor = Actor("test-actor")
    done: list[int] = []
    thread = actor.call(threading.current_thread)
    actor.call(actor.later, 3600.0, fail, "never")
    for number in range(10):
        actor.tell(done.append, number)
    actor.close()
    assert done == list(range(10))
    assert not thread.is_alive()


def test_what_comes_first_does_not_wait_behind_what_waits_for_its_turn(actor: Actor) -> None:
    done: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(30)

    actor.tell(hold)
    assert begun.wait(30)
    for number in range(1000):
        actor.tell(done.append, f"output {number}")
    actor.tell_first(done.append, "news")
    actor.tell_first(done.append, "more news")
    go_on.set()
    settle(actor)
    assert done == ["news", "more news", *(f"output {number}" for number in range(1000))]


def test_what_was_told_before_the_end_is_done_before_it() -> None:
    actor, done = Actor("closing"), []
    for number in range(100):
        actor.tell(done.append, number)
    actor.tell_first(done.append, "first")
    actor.close()
    assert sorted(map(str, done)) == sorted([*map(str, range(100)), "first"])


def test_what_came_due_while_all_stood_still_waits_for_those_who_could_not_speak(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "STILL", 0.2)
    monkeypatch.setattr(actor_module, "RESPITE", 4.0)
    done: list[str] = []
    over, awake = threading.Event(), threading.Event()

    def stand_still() -> None:
        actor.later(0.01, done.append, "judged")
        actor.later(0.02, over.set)
        time.sleep(0.5)
        awake.set()

    actor.tell(stand_still)
    assert awake.wait(10)
    time.sleep(0.2)
    actor.tell(done.append, "heard")
    assert over.wait(30)
    assert done == ["heard", "judged"]
