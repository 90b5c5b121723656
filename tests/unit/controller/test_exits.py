"""The exit of every process is seen once, independently of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from fakes import FakeHandle

from nbddp.controller import threads as watcher_module
from nbddp.controller.threads import ExitWatcher
from nbddp.launch.local_launcher import RankHandle


class Ends:
    """Records the handles whose exit was reported."""

    def __init__(self) -> None:
        self.seen: list[RankHandle] = []
        self._came = threading.Condition()

    def note(self, handle: RankHandle) -> None:
        handle.join()
        with self._came:
            self.seen.append(handle)
            self._came.notify_all()

    def wait_for(self, count: int) -> bool:
        with self._came:
            return self._came.wait_for(lambda: len(self.seen) >= count, 20)


@pytest.fixture
def watcher() -> Iterator[ExitWatcher]:
    watcher = ExitWatcher()
    yield watcher
    watcher.close()


def test_the_exit_of_each_process_is_reported_once(watcher: ExitWatcher) -> None:
    ends, handles = Ends(), [FakeHandle() for _ in range(4)]
    handles[-1].end(1)  # already
    for handle in handles:
        watcher.watch(handle, ends.note)
    assert ends.wait_for(1)
    for count, handle in enumerate(reversed(handles[:-1]), start=2):
        handle.end(0)
        assert ends.wait_for(count)
    assert ends.seen == handles[::-1]


def test_a_failing_exit_callback_does_not_block_later_callbacks(
    watcher: ExitWatcher, caplog: pytest.LogCaptureFixture
) -> None:
    ends, failing, other = Ends(), FakeHandle(), FakeHandle()

    def fail(handle: RankHandle) -> None:
        handle.join()
        raise LookupError("no")

    watcher.watch(failing, fail)
    watcher.watch(other, ends.note)
    failing.end(1)
    other.end(0)
    assert ends.wait_for(1)
    assert str(failing.pid) in caplog.text


def test_close_waits_for_processes_that_are_still_exiting() -> None:
    watcher, ends, handle = ExitWatcher(), Ends(), FakeHandle()
    watcher.watch(handle, ends.note)
    timer = threading.Timer(0.05, handle.end, (-9,))
    timer.start()
    watcher.close()
    assert ends.seen == [handle]
    timer.join()


def test_close_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "CLOSE_TIMEOUT", 0.01)
    watcher, ends, handle = ExitWatcher(), Ends(), FakeHandle()
    watcher.watch(handle, ends.note)
    watcher.close()
    assert not ends.seen
    handle.end(0)
    handle.join()
