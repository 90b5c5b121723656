"""A signal handler of the user may call what reports something, inside any such call."""

import functools
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interrupt_places import handled_everywhere
from stores import MemoryStore
from torch import nn

import nbddp
from nbddp.reporting import log_and_track
from nbddp.wire.messages import EventReported, Metrics
from nbddp.wire.queues import QueueReader, QueueWriter
from nbddp.worker.output import outbox as outbox_module
from nbddp.worker.output.metric_sink import MetricSink
from nbddp.worker.output.outbox import Outbox

SECRET = b"s" * 32


class ReadStore(MemoryStore):
    """A store whose queues are always read."""

    def queue_len(self, key: str) -> int:  # noqa: ARG002 - see MemoryStore
        return 0


class Reports:
    """A rank's metric sink and outbox, with what the controller has received."""

    def __init__(self, path: Path) -> None:
        self.path = path / "metrics.jsonl"
        self.store = ReadStore()
        options = {"secret": SECRET, "sender": 0, "attempt": 1}
        writers = [QueueWriter(self.store, name, **options) for name in ("up", "urgent")]
        self.reader = QueueReader(self.store, "up", secret=SECRET)
        self.outbox = Outbox(*writers)
        self.sink = MetricSink(self.path, self.outbox, rank=0, attempt=1)
        self.outbox.start(self.sink)
        self.rows: list[object] = []
        self.events: list[EventReported] = []

    def receive(self) -> None:
        """Receive what was sent."""
        while self.store.queues[self.reader._name]:
            message = self.reader.get().message
            for part in getattr(message, "messages", [message]):
                if isinstance(part, Metrics):
                    self.rows += part.rows
                elif isinstance(part, EventReported):
                    self.events.append(part)


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reports]:
    monkeypatch.setattr(outbox_module, "BATCH_PERIOD", 0.001)
    made, before = Reports(tmp_path), log_and_track._sink
    handler = signal.getsignal(signal.SIGUSR1)
    log_and_track.set_sink(made.sink)
    yield made
    signal.signal(signal.SIGUSR1, handler)
    log_and_track.set_sink(before)
    nbddp.faults.clear()
    made.outbox.close()


MODEL = nn.Linear(2, 1)


def use_fault(_: Path) -> None:
    nbddp.faults.at(step=3, rank=0, kind="slow", factor=1.01, again=True)
    nbddp.log(step=3)
    nbddp.faults.clear()


@functools.cache
def checkpoint(path: Path) -> nbddp.Checkpoint:
    return nbddp.Checkpoint(path / "saved", keep=1)


ACTIONS: dict[str, Callable[[Path], object]] = {
    "log": lambda _: nbddp.log(loss=0.5),
    "track": lambda _: list(nbddp.track([1], label="loop")),
    "config": lambda _: nbddp.config(lr=0.1, model=MODEL),
    "mine": lambda path: log_and_track.record_event("mine", path=path),
    "flush": lambda _: log_and_track.flush(),
    "fault": use_fault,
    "loader": lambda _: list(nbddp.loader(range(4), 2)),
    "checkpoint": lambda path: checkpoint(path).save(1, model=MODEL),
    "background": lambda path: save_in_background(checkpoint(path)),
    "new checkpoint": lambda path: nbddp.Checkpoint(path / "more").save(1, model=MODEL),
}
SAVES = ("checkpoint", "background", "new checkpoint")
REPORTS = ("log", "track", "config", "mine", "flush")
EVERY = {"loader": 7, "checkpoint": 199, "background": 17, "new checkpoint": 397}


def save_in_background(saved: nbddp.Checkpoint) -> None:
    saved.save(2, model=MODEL, asynchronous=True)
    saved.wait()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", ACTIONS)
def test_a_signal_handler_may_report_at_any_place_of_a_report(
    reports: Reports, tmp_path: Path, name: str
) -> None:
    calls: Counter[str] = Counter()

    def call(action: str) -> None:
        ACTIONS[action](tmp_path)
        calls[action] += 1

    def handle() -> None:
        nbddp.log(step=7, handled=1.0)
        for action in (*REPORTS, *(SAVES if name in {"log", *SAVES} else ())):
            call(action)

    call(name)  # imports what it needs
    places = [*handled_everywhere(lambda: call(name), handle, every=EVERY.get(name, 1))]
    log_and_track.flush()
    reports.receive()
    rows = [json.loads(line) for line in reports.path.read_text().splitlines()]
    assert len(rows) == len(reports.rows)
    kinds = Counter(each.kind for each in reports.events)
    assert sum("loss" in each for each in rows) == calls["log"]
    for kind in ("mine", "fault"):
        assert kinds[kind] == calls[kind]
    assert kinds["checkpoint"] == sum(calls[each] for each in SAVES)
    assert reports.sink.steps["loss"] == calls["log"] - 1
    assert not [each for each in reports.sink._bars.values() if each.is_open]
    assert len(places) > 5
