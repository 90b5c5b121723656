"""What a training loop says of itself: numbers, progress, and what happened.

It goes to a sink. A rank of a worker group puts its own in; elsewhere, as under torchrun, numbers
and events go to the logger ``nbddp``.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from numbers import Complex, Real
from typing import Any, Generic, TypeVar

from nbddp.errors import ArgumentError

logger = logging.getLogger("nbddp")

T = TypeVar("T")

SHOW_PERIOD = 0.1  # seconds between two reports of the same bar
# what each line of metrics.jsonl says anyway
RESERVED = frozenset({"time", "rank", "attempt", "step"})


@dataclass(slots=True, kw_only=True)
class ProgressBar:
    """A loop on its way: ``done`` of ``total`` (0 where that is not known)."""

    label: str
    total: int
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the loop goes on."""
        return not self.ended

    def close(self) -> None:
        """The loop is over."""
        self.ended = time.monotonic()

    def state(self) -> list[Any]:
        """Label, done, total and seconds since it began."""
        seconds = (self.ended or time.monotonic()) - self.began
        return [self.label, self.done, self.total, round(seconds, 3)]


class Sink:
    """Where it all goes: by itself, numbers and events go to the logger, at level INFO."""

    def log(self, step: int | None, values: dict[str, float]) -> None:
        """Take the numbers of one step; None if each name counts by itself."""
        shown = " ".join(f"{name}={value:.6g}" for name, value in values.items())
        if step is None:
            logger.info("%s", shown)
        else:
            logger.info("step %d: %s", step, shown)

    def record_event(self, kind: str, facts: dict[str, Any]) -> None:
        """Take an event for the record."""
        logger.info("%s %s", kind, " ".join(f"{name}={value}" for name, value in facts.items()))

    def open_bar(self, bar: ProgressBar) -> None:
        """A loop begins."""

    def update_bar(self, bar: ProgressBar) -> None:
        """It has moved."""

    def close_bar(self, bar: ProgressBar) -> None:
        """It is over."""

    def flush(self) -> None:
        """Wait until all that was reported has arrived: the process may be about to die."""


OnStep = Callable[[int, str], None]

_sink = Sink()
_on_step: list[OnStep] = []
_counts: dict[str, int] = {}  # of values without a step, by name


def set_sink(sink: Sink) -> None:
    """Send everything there from now on."""
    global _sink
    _sink = sink


def begin_cell() -> None:
    """What counts by itself counts from 0 again."""
    _counts.clear()


def log(
    values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any
) -> None:
    """Report named numbers for one step of the training.

    They are drawn in the panel, a chart for each name with a line for each rank, and written to
    ``metrics.jsonl`` in the run's folder. Under torchrun they go to the logger ``nbddp``.

    A step that falls back, as where each epoch counts from 0, begins the loop again: its chart
    counts on, with a mark there, and no value is lost.

    Args:
        values: numbers, or tensors with one element, by name; for names that Python does not take
            as keywords. A tensor on a GPU is waited for.
        step: the optimizer's update, a whole number from 0. Without it each name counts its own
            values, from 0 in each cell, on each rank; its lines in the file have no step.
        named: numbers, as ``values``, by keyword.

    Raises:
        TypeError: a value is no number, or a name no string; nothing is reported.
        ArgumentError: a name is one that every line of the file has anyway, or is there twice.

    >>> log(step=3, loss=0.25, accuracy=0.9)
    >>> log(loss=0.25)
    >>> log({"train/loss": 0.25, "train/accuracy": 0.9}, step=3)
    >>> log(step=3, loss="low")
    Traceback (most recent call last):
    TypeError: nbddp.log: loss must be a number or a tensor with one element, got 'low'
    """
    __tracebackhide__ = True  # what goes wrong in here is said of the user's line
    try:
        number = None if step is None else operator.index(step)
    except TypeError:
        raise TypeError(f"nbddp.log: step must be a whole number, got {step!r}") from None
    numbers = _merge_names(values, named)
    _sink.log(number, {name: _number(name, value) for name, value in numbers.items()})
    report_step(_count(numbers) if number is None else number, source="log")


def _count(names: Iterable[str]) -> int:
    """Count a value of each name; the highest of their counts before."""
    highest = 0
    for name in names:
        count = _counts.get(name, 0)
        highest = max(highest, count)
        _counts[name] = count + 1
    return highest


def _merge_names(values: Mapping[str, Any] | None, named: dict[str, Any]) -> dict[str, Any]:
    """All that is to be logged, under names that the file can have."""
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
        if name in RESERVED:
            raise ArgumentError(
                f"nbddp.log: choose another name for {name!r}: nbddp writes that one"
            )
    if duplicates := values.keys() & named.keys():
        raise ArgumentError(f"nbddp.log: {', '.join(sorted(duplicates))}: given twice")
    return {**values, **named}


def _number(name: str, value: Any) -> float:
    try:
        is_complex = isinstance(value, Complex) and not isinstance(value, Real)
        if is_complex or isinstance(value, (str, bytes, bytearray)):
            raise TypeError  # float() would read them, or drop the imaginary part
        if hasattr(value, "detach"):
            value = value.detach()  # torch warns of a float made from a loss that has its graph
        return float(value)
    # RuntimeError: a tensor with more elements, OverflowError: a whole number beyond any float
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shown = repr(value)
        shown = shown if len(shown) < 60 else f"{shown[:60]}..."
        raise TypeError(
            f"nbddp.log: {name} must be a number or a tensor with one element, got {shown}"
        ) from None


def report_step(step: int, *, source: str) -> None:
    """Say that the loop is at this step; ``source`` is who counts: "log" or "loader"."""
    for callback in tuple(_on_step):
        callback(step, source)


def on_step(callback: OnStep) -> Callable[[], None]:
    """Have ``act(step, source)`` called at every step; returns what ends that."""
    _on_step.append(callback)
    return lambda: _on_step.remove(callback)


def flush() -> None:
    """Wait until all that was reported has arrived; briefly, if nobody takes it."""
    _sink.flush()


def record_event(kind: str, **facts: Any) -> None:
    """Put an event on the run's time line and into its ``events.jsonl``."""
    _sink.record_event(kind, facts)


def track(iterable: Iterable[T], *, total: int | None = None, label: str = "") -> Track[T]:
    """Go through something and show how far this rank is, how fast, and how long it will take.

    Args:
        iterable: what to go through, such as a DataLoader; more than once, if it allows that.
        total: how many there are; found out by itself where ``len()`` works.
        label: shown beside the bar, such as ``"epoch 3"``.

    Returns:
        The same items; it has a ``len()`` if that is known.

    >>> [item * item for item in track([1, 2, 3], label="squares")]
    [1, 4, 9]
    """
    total = (length_of(iterable) or 0) if total is None else total
    # as they are mailed: a NumPy number cannot be
    return Track(iterable, total=int(total), label=str(label))


def length_of(source: object) -> int | None:
    """The length of something to go through; None where that is not known."""
    try:
        return len(source) if isinstance(source, Sized) else None
    except TypeError:  # a DataLoader over an IterableDataset has the method, and no length
        return None


class Track(Generic[T]):
    """An iterable whose progress is shown while somebody goes through it."""

    def __init__(self, iterable: Iterable[T], *, total: int, label: str) -> None:
        self._iterable = iterable
        self._total = total
        self._label = label

    def __len__(self) -> int:
        if not self._total:
            raise TypeError("it is not known how many there are")
        return self._total

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[T]:
        bar = ProgressBar(label=self._label, total=self._total)
        sink, next_show = _sink, 0.0
        sink.open_bar(bar)
        try:
            for item in self._iterable:
                yield item
                bar.done += 1
                now = time.monotonic()
                if now >= next_show:
                    next_show = now + SHOW_PERIOD
                    sink.update_bar(bar)
        finally:
            sink.close_bar(bar)
