"""Loss curves for charts."""

from collections.abc import Callable

from nbddp.record.metrics import Curve, MetricStore


def falling(rank: int, step: int) -> float:
    return 2.0 - step / 60 + 0.05 * rank


def steep(_rank: int, step: int) -> float:
    return float(10.0 ** (-step / 20))


def counting(_rank: int, step: int) -> float:
    return step + 1.0


def losses(
    value: Callable[[int, int], float], *, ranks: int = 1, steps: int = 100
) -> dict[int, Curve]:
    metrics = MetricStore()
    for step in range(steps):
        for rank in range(ranks):
            metrics.add(rank, 0.0, step, {"loss": value(rank, step)})
    return metrics.curves("loss")
