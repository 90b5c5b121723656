"""The numbers beside a chart's axes: where they stand, and in which words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

LOG_RATIO = 50.0  # from the lowest value to the highest


def wants_log(values: Sequence[float]) -> bool:
    """Whether values are of many magnitudes, and would be without the farthest at either end too.

    >>> wants_log([100.0, 10.0, 1.0, 0.1]), wants_log([1e6, 1.0, 2.0, 3.0])
    (True, False)
    """
    ordered = sorted(values)
    if len(ordered) < 3 or ordered[0] <= 0:
        return False
    few = 1 + len(ordered) // 200
    return min(ordered[-1 - few] / ordered[0], ordered[-1] / ordered[few]) > LOG_RATIO


def padded(low: float, high: float) -> tuple[float, float]:
    """Limits with room around them, also where all values are one.

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


def step_ticks(low: float, high: float, *, at_most: int = 6, least: float = 1.0) -> list[float]:
    """A few round numbers from one step to another, ``least`` apart: whole ones, unless it is 0.

    >>> step_ticks(0, 3), step_ticks(7, 7), step_ticks(0, 999)
    ([0.0, 1.0, 2.0, 3.0], [7.0], [0.0, 200.0, 400.0, 600.0, 800.0])
    """
    return [low + 0.0] if low == high else _multiples(low, high, at_most=at_most, least=least)


def value_ticks(low: float, high: float) -> list[float]:
    """A few round numbers between two values.

    >>> value_ticks(-0.3, 2.1)
    [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    return _multiples(low, high, at_most=5)


def log_ticks(low: float, high: float) -> list[float]:
    """A few round numbers between two exponents of ten.

    >>> log_ticks(-3.2, 0.1), log_ticks(0.9, 1.9)
    ([0.001, 0.01, 0.1, 1.0], [10.0, 20.0, 50.0])
    """
    decades = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1, 2, 5), (1, 3)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        within = [tick for tick in ticks if tick > 0 and low <= math.log10(tick) <= high]
        if len(within) <= 5:
            return within
    stride = math.ceil((high - low) / 5)
    ticks = [10.0**each for each in decades if not each % stride]
    return [tick for tick in ticks if tick > 0 and low <= math.log10(tick) <= high]


def _multiples(low: float, high: float, *, at_most: int, least: float = 0.0) -> list[float]:
    """Those of the smallest round number of which there are not too many in between."""
    unit = 10.0 ** math.floor(math.log10((high - low) / at_most))
    for factor in (1, 2, 5, 10, 20):
        gap = max(least, factor * unit)
        first, last = math.ceil(low / gap), math.floor(high / gap)
        if last - first < at_most:
            break
    return [number * gap for number in range(first, last + 1)]


def say_number(value: float) -> str:
    """A value in a few characters.

    >>> [say_number(value) for value in (0.123456, 12.0, 123456.7, 1.5e-7, math.nan)]
    ['0.1235', '12', '123457', '1.5e-7', 'nan']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value + 0.0:g}"
    if 1e4 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e4 else _power(value, 3)


def say_ticks(ticks: Sequence[float]) -> list[str]:
    """The shortest texts that say these numbers, all in one form.

    >>> say_ticks([0.0, 0.25, 0.5]), say_ticks([0.0, 20000.0]), say_ticks([0.0, 2e-5, 4e-5])
    (['0.00', '0.25', '0.50'], ['0', '20k'], ['0', '2e-5', '4e-5'])
    """
    top = max(map(abs, ticks), default=0.0)
    forms = [_shortest(ticks, lambda tick, digits: f"{tick:.{digits}f}")]
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if max(unit, 1e4) <= top < 1e12 and not any(tick % (unit / 100) for tick in ticks):
            texts = [_trimmed(f"{tick / unit:.2f}") for tick in ticks]
            forms.append([text if text == "0" else text + suffix for text in texts])
    if not (top == 0 or 1e-3 <= top < 1e6):
        forms.append(_shortest(ticks, _power))
    return min(forms, key=lambda texts: max(map(len, texts), default=0))


def _shortest(ticks: Sequence[float], say: Callable[[float, int], str]) -> list[str]:
    """In a form that takes digits, with as few as will do."""
    texts: list[str] = []
    for digits in range(17):
        texts = [say(tick, digits) for tick in ticks]
        is_right = (
            math.isclose(float(text), tick, rel_tol=1e-14)
            for text, tick in zip(texts, ticks, strict=True)
        )
        if len(set(texts)) == len(ticks) and all(is_right):
            break
    return texts


def _power(value: float, digits: int) -> str:
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return f"{_trimmed(mantissa)}e{int(exponent)}" if value else "0"


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
