"""One thread does one thing after the other, in order, and its errors go where they belong."""

import logging
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
from fakes import FakeHandle
from processes import wait_until

from nbddp.controller import threads as actor_module
from nbddp.controller.threads import EventThread
from nbddp.errors import RequestError


@pytest.fixture
def actor() -> Iterator[EventThread]:
    actor = EventThread("test-actor")
    yield actor
    actor.close()


def settle(actor: EventThread) -> None:
    actor.run(lambda: None)
    actor.run(lambda: None)  # due calls run after a call that was submitted before


@pytest.mark.parametrize("kind", [LookupError, KeyboardInterrupt, SystemExit])
def test_an_error_is_raised_in_the_caller_or_logged_and_the_thread_continues(
    actor: EventThread, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def raise_it() -> None:
        raise kind("no such thing")

    with pytest.raises(kind, match="no such thing"):
        actor.run(raise_it)
    assert not caplog.messages
    with caplog.at_level(logging.ERROR):
        actor.submit(raise_it)
        assert actor.run(lambda: actor.run(max, 1, 2)) == 2  # the inner one on the thread itself
    assert len(caplog.messages) == 1
    assert f"{kind.__name__}: no such thing" in caplog.text


def test_a_flood_of_calls_does_not_delay_a_timer(actor: EventThread) -> None:
    rung = threading.Event()
    over = threading.Event()
    heard: list[bool] = []

    def flood(count: int) -> None:
        """Always one more piece of news in the queue, as from a rank that prints without end."""
        heard.append(rung.is_set())
        actor.submit(flood, count - 1) if count and not rung.is_set() else over.set()

    def begin() -> None:
        actor.call_later(0.0, rung.set)
        actor.submit(flood, 20_000)

    actor.run(begin)
    assert over.wait(30)
    assert heard[-1], "the alarm was due all the time and did not ring"


def test_urgent_calls_run_before_queued_calls(actor: EventThread) -> None:
    done: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(30)

    actor.submit(hold)
    assert begun.wait(30)
    for number in range(1000):
        actor.submit(done.append, f"output {number}")
    actor.submit_urgent(done.append, "news")
    actor.submit_urgent(done.append, "more news")
    go_on.set()
    settle(actor)
    assert done == ["news", "more news", *(f"output {number}" for number in range(1000))]


def test_calls_due_during_a_stall_wait_for_delayed_messages(
    actor: EventThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, done = SimpleNamespace(now=100.0), list[str]()
    monkeypatch.setattr(actor._loop, "time", lambda: clock.now)

    def stand_still() -> None:
        actor.call_later(0.01, done.append, "judged")
        clock.now += actor_module.STALL + 1

    actor.run(stand_still)
    actor.run(done.append, "heard")
    clock.now += actor_module.STALL_GRACE + actor_module.STALL + 1
    settle(actor)
    assert done == ["heard", "judged"]


class Exits:
    def __init__(self, actor: EventThread, count: int) -> None:
        self.handles = [FakeHandle() for _ in range(count)]
        self.seen: list[int] = []
        for number in range(count):
            actor.run(actor.watch, self.handles[number], partial(self.note, number))

    def note(self, number: int) -> None:
        self.handles[number].join()
        self.seen.append(number)


def test_the_exit_of_each_process_is_reported_once(actor: EventThread) -> None:
    exits = Exits(actor, 4)
    for number in (3, 1, 0, 2):
        exits.handles[number].end(0)
        assert wait_until(lambda number=number: exits.seen[-1:] == [number])
    settle(actor)
    assert exits.seen == [3, 1, 0, 2]


def test_close_waits_for_processes_that_are_still_exiting() -> None:
    actor = EventThread("test-actor")
    exits = Exits(actor, 1)
    timer = threading.Timer(0.05, exits.handles[0].end, (-9,))
    timer.start()
    actor.close()
    assert exits.seen == [0]
    timer.join()


def test_close_does_not_wait_forever_for_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "CLOSE_TIMEOUT", 0.01)
    actor = EventThread("test-actor")
    exits = Exits(actor, 1)
    actor.close()
    assert not exits.seen
    exits.handles[0].end(0)
    exits.handles[0].join()


def test_close_runs_queued_calls_and_then_ends_the_thread() -> None:
    actor = EventThread("test-actor")
    done: list[int] = []
    thread = actor.run(threading.current_thread)
    actor.run(actor.call_later, 3600.0, pytest.fail, "never")
    for number in range(100):
        actor.submit(done.append, number)
    actor.submit_urgent(done.append, 100)
    actor.close()
    done.remove(100)
    assert done == list(range(100))
    assert not thread.is_alive()
    assert not actor.submit(done.append, 1)
    with pytest.raises(RequestError):
        actor.run(done.append, 2)
    actor.close()
    assert len(done) == 100


def test_calls_during_close_get_a_result_or_a_request_error() -> None:
    for _ in range(50):
        actor = EventThread("test-actor")
        answers: list[object] = []

        def ask(actor: EventThread = actor, answers: list[object] = answers) -> None:
            try:
                answers.append(actor.run(max, 1, 2))
            except RequestError:
                answers.append("refused")

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        actor.close()
        for asker in askers:
            asker.join(30)
        assert len(answers) == 4
        assert set(answers) <= {2, "refused"}


def test_close_waits_for_a_stuck_thread_only_until_its_timeout() -> None:
    actor, gate = EventThread("test-actor"), threading.Event()
    actor.submit(gate.wait)
    actor.close(timeout=0.01)
    gate.set()
    actor.close()
