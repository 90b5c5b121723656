"""``nbddp.log()`` and ``nbddp.track()``: report numbers, progress and events of a training loop.

They go to a sink. A rank of a worker group sets its own sink. Without one, as under torchrun,
numbers and events go to the logger ``nbddp``.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from numbers import Complex, Real
from typing import Any, Generic, TypeVar

from nbddp.errors import ArgumentError

logger = logging.getLogger("nbddp")

T = TypeVar("T")

SHOW_PERIOD = 0.1  # seconds between two reports of the same bar
# fields that nbddp writes into each line of metrics.jsonl
RESERVED = frozenset({"time", "rank", "attempt", "step"})


@dataclass(slots=True, kw_only=True)
class ProgressBar:
    """The progress of a loop: ``done`` of ``total``, which is 0 if it is unknown.

    Attributes:
        sink: the sink in which it started, and where it ends.
    """

    label: str
    total: int
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    shown: float = -math.inf
    sink: Sink = field(default_factory=lambda: _sink, repr=False)

    @property
    def is_open(self) -> bool:
        """Whether the loop is running."""
        return not self.ended

    def close(self) -> None:
        """Record the end of the loop."""
        self.ended = time.monotonic()

    def state(self) -> list[Any]:
        """Return label, done, total and the seconds since the start."""
        seconds = (self.ended or time.monotonic()) - self.began
        return [self.label, self.done, self.total, round(seconds, 3)]


class Sink:
    """The receiver of reports. This one sends numbers and events to the logger, at level INFO."""

    def log(self, step: int | None, values: dict[str, float]) -> None:
        """Called with the numbers of a step; without a step, each name counts its own values."""
        shown = " ".join(f"{name}={value:.6g}" for name, value in values.items())
        if step is None:
            logger.info("%s", shown)
        else:
            logger.info("step %d: %s", step, shown)

    def record_event(self, kind: str, facts: dict[str, Any]) -> None:
        """Called with an event for the run's event log."""
        logger.info("%s %s", kind, " ".join(f"{name}={value}" for name, value in facts.items()))

    def record_config(self, values: dict[str, Any]) -> None:
        """Called with settings for the run's event log."""
        self.record_event("config", {"values": values})

    def open_bar(self, bar: ProgressBar) -> None:
        """Called when a loop starts."""

    def update_bar(self, bar: ProgressBar) -> None:
        """Called when a loop has made progress."""

    def close_bar(self, bar: ProgressBar) -> None:
        """Called when a loop has ended."""

    def flush(self) -> None:
        """Wait until all reports have been sent: the process may be about to die."""


OnStep = Callable[[int, str], None]

_sink: Sink = Sink()
_on_step: list[OnStep] = []
# counts for values without a step, by name; next() is atomic, also for signal handlers
_counts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def set_sink(sink: Sink) -> None:
    """Send all further reports to this sink."""
    global _sink
    _sink = sink


def begin_cell() -> None:
    """Restart the counts of values without a step at 0."""
    _counts.clear()


def log(
    values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any
) -> None:
    """Report named numbers for one step of the training.

    The panel draws a chart for each name, with a line for each rank. The numbers are also written
    to ``metrics.jsonl`` in the run's folder. Under torchrun they go to the logger ``nbddp``.

    If the step decreases, for example because each epoch counts from 0, the chart continues to the
    right with a mark, and no value is lost.

    Args:
        values: numbers, or tensors with one element, by name. Use it for names that are not valid
            keywords. A tensor on a GPU makes the call wait for the GPU.
        step: the optimizer's update, a whole number from 0. Without it, each name counts its own
            values, from 0 in each cell, on each rank; its lines in the file have no step.
        named: numbers by keyword.

    Raises:
        TypeError: a value is not a number, or a name is not a string; nothing is reported.
        ArgumentError: a name is empty, is reserved for nbddp's own fields, or is given twice.

    >>> log(step=3, loss=0.25, accuracy=0.9)
    >>> log(loss=0.25)
    >>> log({"train/loss": 0.25, "train/accuracy": 0.9}, step=3)
    >>> log(step=3, loss="low")
    Traceback (most recent call last):
    TypeError: nbddp.log: loss must be a number or a tensor with one element, got 'low'
    """
    __tracebackhide__ = True  # errors point at the user's line
    try:
        number = None if step is None else operator.index(step)
    except TypeError:
        raise TypeError(f"nbddp.log: step must be a whole number, got {step!r}") from None
    numbers = _merge_names(values, named)
    _sink.log(number, {name: _number(name, value) for name, value in numbers.items()})
    if number is None:  # the highest count of a name; each increases
        number = max((next(_counts[name]) for name in numbers), default=0)
    report_step(number, source="log")


def _merge_names(values: Mapping[str, Any] | None, named: dict[str, Any]) -> dict[str, Any]:
    """Merge both kinds of arguments, and check their names."""
    if values is None:
        values = {}
    elif not isinstance(values, Mapping):
        raise TypeError(
            "nbddp.log: numbers need names, as in nbddp.log(step=3, loss=loss) or "
            f'nbddp.log({{"train/loss": loss}}, step=3); got {type(values).__name__}'
        )
    for name in [*values, *named]:
        if not isinstance(name, str):
            raise TypeError(f"nbddp.log: a name must be a string, got {name!r}")
        if not name.strip():
            raise ArgumentError("nbddp.log: a name is empty: name each number")
        if name in RESERVED:
            raise ArgumentError(
                f"nbddp.log: choose another name for {name!r}: nbddp uses that name itself"
            )
    if duplicates := values.keys() & named.keys():
        raise ArgumentError(f"nbddp.log: {', '.join(sorted(duplicates))}: given twice")
    return {**values, **named}


def _number(name: str, value: Any) -> float:
    try:
        is_complex = isinstance(value, Complex) and not isinstance(value, Real)
        if is_complex or isinstance(value, (str, bytes, bytearray)):
            raise TypeError  # float() would parse a string, or drop the imaginary part
        if hasattr(value, "detach"):
            value = value.detach()  # torch warns if a tensor with a graph becomes a float
        return float(value)
    except RecursionError:  # a RuntimeError, but not of the value: the user's calls are too deep
        raise
    # RuntimeError: a tensor with several elements; OverflowError: an int too large for a float
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shown = repr(value)
        shown = shown if len(shown) < 60 else f"{shown[:60]}..."
        raise TypeError(
            f"nbddp.log: {name} must be a number or a tensor with one element, got {shown}"
        ) from None


def report_step(step: int, *, source: str) -> None:
    """Report the step of the loop; ``source`` is the counter: "log" or "loader"."""
    for callback in tuple(_on_step):
        callback(step, source)


def on_step(callback: OnStep) -> Callable[[], None]:
    """Call ``callback(step, source)`` at every step; return a function that removes it."""
    _on_step.append(callback)
    return lambda: _on_step.remove(callback)


def flush() -> None:
    """Wait until all reports have been sent, but only briefly if the notebook does not respond."""
    _sink.flush()


def record_event(kind: str, **facts: Any) -> None:
    """Record an event in the run's event log, ``events.jsonl``."""
    _sink.record_event(kind, facts)


def record_config(values: dict[str, Any]) -> None:
    """Record settings in the run's event log."""
    _sink.record_config(values)


def open_bar(*, label: str, total: int) -> ProgressBar:
    """Show the bar of a new loop; ``total`` is 0 if it is unknown."""
    bar = ProgressBar(label=label, total=total)
    bar.sink.open_bar(bar)
    return bar


def update_bar(bar: ProgressBar, done: int) -> None:
    """Set the number of finished iterations; show it at most every 0.1 seconds."""
    bar.done = done
    now = time.monotonic()
    if now >= bar.shown + SHOW_PERIOD:
        bar.shown = now
        bar.sink.update_bar(bar)


def close_bar(bar: ProgressBar) -> None:
    """Report that the loop has ended."""
    bar.sink.close_bar(bar)


def track(iterable: Iterable[T], *, total: int | None = None, label: str = "") -> Track[T]:
    """Iterate and show this rank's progress, speed and remaining time.

    Args:
        iterable: the items, such as a DataLoader. You can iterate again if ``iterable`` allows it.
        total: the number of items; by default ``len(iterable)``, if that works.
        label: the text next to the bar, such as ``"epoch 3"``.

    Returns:
        An iterable of the same items; it has a ``len()`` if the number is known.

    >>> [item * item for item in track([1, 2, 3], label="squares")]
    [1, 4, 9]
    """
    total = (length_of(iterable) or 0) if total is None else total
    # plain types: a NumPy number cannot be sent
    return Track(iterable, total=int(total), label=str(label))


def length_of(source: object) -> int | None:
    """Return the length of an iterable; None if it is unknown."""
    try:
        return len(source) if isinstance(source, Sized) else None
    except TypeError:  # a DataLoader over an IterableDataset has __len__, but no length
        return None


class Track(Generic[T]):
    """An iterable that shows its progress during an iteration; created by ``track()``."""

    def __init__(self, iterable: Iterable[T], *, total: int, label: str) -> None:
        self._iterable = iterable
        self._total = total
        self._label = label

    def __len__(self) -> int:
        if not self._total:
            raise TypeError("the number of items is unknown")
        return self._total

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[T]:
        bar = open_bar(label=self._label, total=self._total)
        try:
            for item in self._iterable:
                yield item
                update_bar(bar, bar.done + 1)
        finally:
            close_bar(bar)
