"""Receive the metrics and the progress of a trainer."""

from __future__ import annotations

import operator
import os
import time
import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

from nbddp.reporting import log_and_track
from nbddp.reporting.log_and_track import RESERVED, ProgressBar
from nbddp.wire.messages import JsonDict

_is_enabled = False
_trainers: dict[str, JsonDict] = {}


def begin_cell(*, is_enabled: bool) -> None:
    """Forget the trainers of the earlier cell."""
    enable(is_enabled)
    _trainers.clear()


def trainers_of_cell() -> dict[str, JsonDict]:
    """Return the facts of the trainers that have trained in this cell, by their class names."""
    return dict(_trainers)


def add_trainer(name: str, *, world_size: int, **more: Any) -> None:
    """Record that a trainer starts to train. Warn at once if it does not use the process group.

    Args:
        name: the name of its class.
        world_size: the number of ranks that it trains with.
        more: other facts for the rules of the extension ``checks``, see ``TrainerFacts`` there.
    """
    _trainers[name] = {"world_size": world_size, **more}
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 < ranks:
        warnings.warn(
            f"{name} trains alone on each of the {ranks} ranks, on all the data (ND218)",
            stacklevel=2,
        )


def enable(is_enabled: bool = True) -> None:  # noqa: FBT001, FBT002 - the value of an option
    """Report the metrics of trainers from now on, or stop."""
    global _is_enabled
    _is_enabled = is_enabled


def is_enabled() -> bool:
    """Return whether trainers report here."""
    return _is_enabled


def numbers_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are numbers or tensors with one element, by name.

    >>> numbers_in({"loss": 0.5, "note": "text", "done": True, "step": 3, "scores": [1.0]})
    {'loss': 0.5}
    """
    return {
        name: value for name, value in values.items() if name not in RESERVED and _is_number(value)
    }


def _is_number(value: Any) -> bool:
    if isinstance(value, Real):
        return not isinstance(value, bool)
    return getattr(value, "numel", lambda: 0)() == 1


def report(values: Mapping[str, Any], step: Any = None) -> None:
    """Report those values that are numbers, as :func:`nbddp.log` does.

    Args:
        values: numbers, tensors, and anything else, by name.
        step: the step; None if the library has none.
    """
    if not _is_enabled:
        return
    numbers = numbers_in(values)
    if step is None:
        step = values.get("step")
    try:
        step = None if step is None else operator.index(step)
    except TypeError:  # Lightning's step may be a tensor or a float
        step = int(step)
    if numbers:
        log_and_track.log(numbers, step=step)


class StepReporter:
    """Reports the steps of a training loop: a progress bar, and the samples per second.

    Args:
        label: the text next to the bar.
        total: the number of steps; 0 if it is unknown.
        first: the number of steps that an earlier training has already done.
        samples: the number of samples of all ranks in a step; 0 if it is unknown.
    """

    def __init__(self, label: str, total: int, *, first: int = 0, samples: int = 0) -> None:
        self._first = first
        self._samples = samples
        self._bar: ProgressBar | None = None
        self._mark = time.monotonic()
        if _is_enabled:
            self._bar = log_and_track.open_bar(label=label, total=max(0, total - first))

    def end_step(self, step: int, values: Mapping[str, Any] | None = None) -> None:
        """Report that this step has ended, with its metrics."""
        now = time.monotonic()
        seconds, self._mark = now - self._mark, now
        rate = {"samples_per_second": self._samples / seconds} if self._samples and seconds else {}
        report({**rate, **(values or {})}, step)
        self.show(step)

    def show(self, step: int) -> None:
        """Show that this step has ended."""
        if self._bar:
            log_and_track.update_bar(self._bar, step - self._first)

    def skip_pause(self) -> None:
        """Leave the time since the last step, such as that of an evaluation, out of the next."""
        self._mark = time.monotonic()

    def close(self) -> None:
        """Report that the loop has ended."""
        if self._bar:
            log_and_track.close_bar(self._bar)
