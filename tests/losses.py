"""Curves of a loss, for charts to be drawn of."""

from __future__ import annotations

from collections.abc import Callable

from nbddp.record.metrics import Curve, MetricStore


def losses(
    value: Callable[[int, int], float], *, ranks: int = 1, steps: int = 100
) -> dict[int, Curve]:
    """The curve of each rank; ``value`` is given a rank and a step."""
    metrics = MetricStore()
    for step in range(steps):
        for rank in range(ranks):
            metrics.add(rank, 0.0, step, {"loss": value(rank, step)})
    return metrics.curves("loss")
