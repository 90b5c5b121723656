"""Ticks, number formats, and the choice of a linear or logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

LOG_RATIO = 50.0  # the highest value divided by the lowest


class AxisScale(Enum):
    """The scale of the value axis."""

    AUTO = "auto"
    LINEAR = "linear"
    LOG = "log"


def wants_log(values: Sequence[float]) -> bool:
    """Return whether positive values span many orders of magnitude, even without the extremes.

    >>> wants_log([100.0, 10.0, 1.0, 0.1]), wants_log([1e6, 1.0, 2.0, 3.0])
    (True, False)
    """
    ordered = sorted(values)
    if len(ordered) < 3:
        return False
    few = 1 + len(ordered) // 200
    return min(ordered[-1 - few] / ordered[0], ordered[-1] / ordered[few]) > LOG_RATIO


def padded(low: float, high: float) -> tuple[float, float]:
    """Return limits with a margin around the values, also if all values are equal.

    >>> padded(0.0, 100.0), padded(0.0, 0.0)
    ((-6.0, 106.0), (-1.12, 1.12))
    """
    top = max(abs(low), abs(high))
    if top < 1e-290:  # too small to divide by
        low, high = -1.0, 1.0
    elif high - low <= 1e-6 * top:
        low, high = low - 0.1 * top, high + 0.1 * top
    room = 0.06 * (high - low)
    return low - room, high + room


def round_ticks(low: float, high: float, *, at_most: int = 5, least: float = 0.0) -> list[float]:
    """Return a few round numbers from ``low`` to ``high``, at least ``least`` apart.

    >>> round_ticks(-0.3, 2.1), round_ticks(0, 3, least=1), round_ticks(7, 7)
    ([0.0, 0.5, 1.0, 1.5, 2.0], [0, 1, 2, 3], [7])
    """
    if low == high:
        return [low]
    unit = 10.0 ** math.floor(math.log10((high - low) / at_most))
    for factor in (1, 2, 5, 10, 20):
        gap = max(least, factor * unit)
        first, last = math.ceil(low / gap), math.floor(high / gap)
        if last - first < at_most:
            break
    return [number * gap for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers between two powers of ten, given as exponents.

    >>> log_ticks(-3.2, 0.1), log_ticks(0.9, 2.1), log_ticks(1.3, 1.4)
    ([0.001, 0.01, 0.1, 1.0], [10.0, 20.0, 50.0, 100.0], [20.0, 22.0, 24.0])
    """
    if high - low < 1:
        return round_ticks(10.0**low, 10.0**high)
    decades = range(math.floor(low), math.ceil(high) + 1)
    stride = math.ceil((high - low) / 5)
    factors = (1, 2, 5) if high - low < 1.7 else (1,)
    ticks = [factor * 10.0**at for at in decades if not at % stride for factor in factors]
    return [tick for tick in ticks if tick > 0 and low <= math.log10(tick) <= high]


def format_number(value: float, digits: int = 4) -> str:
    """Format a value as a short text.

    >>> [format_number(value) for value in (0.123456, 12.0, 123456.7, 1.5e-7, math.nan)]
    ['0.1235', '12', '123457', '1.5e-7', 'nan']
    """
    if abs(value) < 1e6:  # an exponent would not be shorter
        digits = max(digits, len(f"{abs(value):.0f}"))
    text = f"{value + 0.0:.{digits}g}"
    mantissa, power, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if power else text


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Format equally spaced numbers with enough digits to tell them apart.

    >>> format_ticks([0.0, 0.25, 0.5]), format_ticks([0.0, 20000.0]), format_ticks([0.0, 2e-5])
    (['0', '0.25', '0.5'], ['0', '20000'], ['0', '2e-5'])
    >>> format_ticks([1000000.0, 1000020.0])
    ['1000000', '1000020']
    """
    if len(ticks) < 2:
        return [format_number(tick) for tick in ticks]
    top = max(map(abs, ticks))
    gap = (ticks[-1] - ticks[0]) / (len(ticks) - 1)  # above 2**53, neighbours can be equal
    digits = max(4, math.ceil(math.log10(top / gap)) + 2)
    return [format_number(tick if abs(tick) > gap / 2 else 0.0, digits) for tick in ticks]
