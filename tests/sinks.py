"""A sink that records the reports of a training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbddp.reporting import log_and_track
from nbddp.reporting.log_and_track import ProgressBar, Sink, set_sink


class Recorder(Sink):
    """Keeps reports in their order: a step alone, or with its values; events, bars, flushes."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.bars: list[ProgressBar] = []

    def log(self, step: int | None, values: dict[str, float]) -> None:
        self.calls.append((step, values) if values else step)

    def record_event(self, kind: str, facts: dict[str, Any]) -> None:
        self.calls.append((kind, facts))

    def open_bar(self, bar: ProgressBar) -> None:
        self.bars.append(bar)
        self.calls.append(("begin", bar.label))

    def update_bar(self, bar: ProgressBar) -> None:
        self.calls.append(("show", bar.label, bar.done))

    def close_bar(self, bar: ProgressBar) -> None:
        bar.close()
        self.calls.append(("end", bar.label, bar.done))

    def flush(self) -> None:
        self.calls.append("flush")


@contextmanager
def recording() -> Iterator[Recorder]:
    before, recorder = log_and_track._sink, Recorder()
    set_sink(recorder)
    try:
        yield recorder
    finally:
        set_sink(before)
