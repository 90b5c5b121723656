"""The method of ``WorkerGroup`` that traces a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nbddp.errors import ArgumentError
from nbddp.extensions.trace import TraceOptions, TraceSteps
from nbddp.extensions.trace.merge import Trace
from nbddp.extensions.trace.notebook import collect_trace
from nbddp.lifecycle.retries import Retries

if TYPE_CHECKING:
    from nbddp.group.worker_group import WorkerGroup


def trace(  # noqa: D417 - a method
    self: WorkerGroup,
    source: str,
    first: int,
    last: int,
    *,
    memory: bool = False,
    ranks: Sequence[int] | None = None,
    quiet: bool = False,
) -> Trace:
    """Run source as :meth:`run` does, and trace some of its steps with torch's profiler.

    Args:
        source: Python, or anything that IPython accepts.
        first: the first step to trace, as reported by ``nbddp.log(step=...)``.
        last: the last step to trace.
        memory: also trace the memory of tensors.
        ranks: the ranks that run it; None for all.
        quiet: print only the values of the last line.

    Returns:
        The trace of each rank; ``path`` is one file for Perfetto with all ranks.

    Raises:
        ArgumentError: the steps or a rank do not exist.
        NbddpError: as in :meth:`run`.
    """
    if not 0 <= first <= last:
        raise ArgumentError(f"expected steps from first to last, got {first} to {last}")
    steps = TraceSteps(first=first, last=last, with_memory=memory)
    request = self._request(source, ranks, options=options_for_ranks(steps))
    result = self._run(request, Retries(), quiet=quiet)
    return collect_trace(self._group.session, result, steps)


def options_for_ranks(steps: TraceSteps) -> dict[str, Any]:
    """Return the options of a cell whose ranks trace these steps."""
    return {"trace": asdict(TraceOptions(trace=steps))}
