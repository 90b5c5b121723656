"""A sink that records the metrics of a training."""

from __future__ import annotations

from typing import Any

from nbddp.train.log_and_track import Sink


class Recorder(Sink):
    """Keeps steps, events and flushes, in their order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, step: int, values: dict[str, float]) -> None:  # noqa: ARG002
        self.calls.append(step)

    def record_event(self, kind: str, facts: dict[str, Any]) -> None:
        self.calls.append((kind, facts))

    def flush(self) -> None:
        self.calls.append("flush")
