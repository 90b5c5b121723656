"""SIGINT at any moment of a wait, an import or a step that must not be left half done."""

import asyncio
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any
from unittest.mock import Mock, call

import pytest
from interrupt_places import interrupted_everywhere
from processes import wait_until

from nbddp import sigint
from nbddp.controller.threads import EventThread
from nbddp.sigint import (
    SIGNAL_CHECK_INTERVAL,
    Future,
    import_interruptibly,
    run_in_loop,
    sigint_deferred,
    wait_for_all,
    wait_for_result,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning"
)

# A stop that strikes in the callback of a weak reference is lost: CPython reports it as unraisable.


def check_interrupts(wait: Callable[[], object], submit: Callable[[Any], object]) -> None:
    """Interrupt a wait at each place; what ``submit`` gets must still run afterwards."""
    places = 0
    for places in interrupted_everywhere(wait):
        done = threading.Event()
        submit(done.set)
        assert done.wait(20), f"it hangs since a stop at place {places}"
    assert places > 20


def test_an_interrupt_anywhere_in_a_call_leaves_the_event_thread_running() -> None:
    actor = EventThread("stopped")
    check_interrupts(lambda: actor.run(time.sleep, 0.001), actor.submit)
    actor.close()


def test_an_interrupt_anywhere_in_a_wait_leaves_the_event_loop_running() -> None:
    """A kernel reads the messages of the page in such a loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    check_interrupts(
        lambda: wait_for_result(run_in_loop(loop, asyncio.sleep(0.001, 7))),
        loop.call_soon_threadsafe,
    )
    gc.collect()  # the coroutines that were stopped before they could begin
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


def test_a_future_is_resolved_once_and_every_waiter_gets_its_result() -> None:
    future: Future[int] = Future()
    heard: list[int] = []
    future.add_done_callback(lambda future: heard.append(future.result()))
    assert not future.done()
    threading.Timer(0.05, future.set_result, [7]).start()
    assert wait_for_result(future) == wait_for_result(future) == 7
    assert wait_until(lambda: heard == [7])
    future.add_done_callback(lambda future: heard.append(future.result() + 1))
    assert heard == [7, 8]
    with pytest.raises(RuntimeError):
        future.set_result(8)
    assert future.result() == 7
    assert future.exception() is None
    failed: Future[int] = Future()
    failed.set_exception(ValueError("on purpose"))
    with pytest.raises(ValueError, match="on purpose") as caught:
        wait_for_result(failed)
    assert failed.exception() is caught.value


def test_wait_for_all_ends_at_its_timeout_or_when_all_futures_are_done() -> None:
    futures: list[Future[int]] = [Future(), Future()]
    began = time.monotonic()
    wait_for_all(futures, 0.1)
    assert 0.1 <= time.monotonic() - began < 5
    futures[0].set_result(1)
    assert not futures[1]._callbacks  # no callback is left
    threading.Timer(0.05, futures[1].set_result, [2]).start()
    wait_for_all(futures, 60)
    assert [each.result() for each in futures] == [1, 2]


def test_a_wait_wakes_up_periodically_to_see_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes as a wait begins does not end it: it is seen when the wait ends."""
    get = Mock(side_effect=[Empty, Empty, KeyboardInterrupt])
    monkeypatch.setattr(sigint, "SimpleQueue", lambda: Mock(get=get))
    with pytest.raises(KeyboardInterrupt):
        wait_for_result(Future())
    assert get.mock_calls == [call(timeout=SIGNAL_CHECK_INTERVAL)] * 3


def test_an_import_can_be_interrupted_anywhere_and_repeated() -> None:
    for place in interrupted_everywhere(lambda: import_interruptibly("colorsys")):
        import_interruptibly("colorsys")
        assert place < 500


def test_an_interrupt_ends_the_wait_for_an_import_but_not_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, slow = tmp_path / "go_on", "slow_to_import"
    (tmp_path / f"{slow}.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\nvalue = 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, slow, raising=False)
    main = threading.main_thread().ident or 0

    def stop() -> None:
        wait_until(lambda: slow in sys.modules)
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt):
        import_interruptibly(slow)
    threading.Timer(0.1, go_on.touch).start()
    import_interruptibly(slow)  # goes on with the same import, and waits for it
    assert sys.modules[slow].value == 7
    (tmp_path / "broken_module.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_interruptibly("broken_module")


@pytest.mark.parametrize(
    ("raises_second", "times", "seen"), [(True, 1, [1]), (True, 2, [1]), (False, 3, [1, 2, 3])]
)
def test_sigint_deferred_delays_the_first_interrupt_or_all_and_raises_at_the_end(
    raises_second: bool, times: int, seen: list[int]
) -> None:
    counts = []

    def work() -> None:
        with sigint_deferred(raises_second=raises_second) as deferred:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
                counts.append(deferred.count)
            raise ValueError("refused")  # code that catches the error would go on

    with pytest.raises(KeyboardInterrupt):
        work()
    assert counts == seen
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with sigint_deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
