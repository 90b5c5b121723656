"""The methods of ``WorkerGroup`` that run code several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbddp.extensions.runs.api import Run
from nbddp.extensions.sweeps import MIN_ROUNDS
from nbddp.extensions.sweeps.grid import sweep_points
from nbddp.extensions.sweeps.scaling import ScalingStudy
from nbddp.extensions.sweeps.sweep import Sweep
from nbddp.extensions.sweeps.trials import TrialRunner
from nbddp.group.display import TextDisplay
from nbddp.group.recovery import Recovery
from nbddp.lifecycle.retries import Retries

if TYPE_CHECKING:
    from nbddp.group.worker_group import WorkerGroup


def sweep(  # noqa: D417 - a method
    self: WorkerGroup,
    source: str,
    settings: Mapping[str, Sequence[Any]] | None = None,
    *,
    repeat: int = 0,
    fresh: bool = False,
    start_over: bool = False,
    quiet: bool = False,
    max_restarts: int = 0,
    heal: int = 0,
) -> list[Run]:
    """Run source once for each combination of values, each time as a separate run.

    Each run has new ranks, on which the cells and pushes of this group are replayed first. The
    ranks of this group keep their variables. Combinations that an earlier sweep of the same
    source finished are not run again.

    Args:
        source: Python, or anything that IPython accepts.
        settings: the values to try, by name.
        repeat: the number of seeds for each combination; the source has the seed as ``seed``.
        fresh: replay nothing.
        start_over: also run finished combinations.
        quiet: print only the values of the last line.
        max_restarts: for each run, as in :meth:`WorkerGroup.run`.
        heal: for each run, as in :meth:`WorkerGroup.run`.

    Returns:
        The run of each combination in order, failed runs included.

    Raises:
        ArgumentError: a name or value is not allowed.
        RequestError: the sweep cannot run now.
        CellFailedError: no run succeeded.
        CellInterruptedError: the sweep was interrupted.
    """
    trials = sweep_points((settings or {}).items(), repeat)
    retries = Retries(heals=heal, restarts=max_restarts)
    runner = _trial_runner(self, source, retries, fresh=fresh, quiet=quiet)
    sweep = Sweep(runner, trials, start_over=start_over)
    sweep.run()
    return [Run(row.path) for row in sweep.rows if row.path is not None]


def scale(  # noqa: D417 - a method
    self: WorkerGroup,
    source: str,
    sizes: Sequence[int],
    *,
    rounds: int = MIN_ROUNDS,
    weak: bool = False,
    fresh: bool = False,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Run source on several world sizes, and compare their speed.

    Each run has new ranks, as in :meth:`sweep`.

    Args:
        source: Python, or anything that IPython accepts.
        sizes: the world sizes.
        rounds: how often source runs on each world size, at least 3.
        weak: whether each rank has the same work on all world sizes.
        fresh: replay nothing.
        quiet: print only the values of the last line.

    Returns:
        A dictionary for each world size that succeeded: ``ranks``, ``steps_per_second`` (or
        ``cells_per_second`` if the cell reports no steps), ``samples_per_second``,
        ``speed_up``, ``efficiency``, the shares of time ``waiting``, ``loading``,
        ``communication`` and ``exposed`` (communication without computation at the same time),
        and ``memory`` and ``gpu_memory`` of the largest rank in bytes.

    Raises:
        ArgumentError: a number is not allowed.
        RequestError: the study cannot run now.
        CellFailedError: no run succeeded.
        CellInterruptedError: the study was interrupted.
    """
    runner = _trial_runner(self, source, Retries(), fresh=fresh, quiet=quiet)
    return ScalingStudy(runner, sizes, rounds=rounds, is_weak=weak).run().rows()


def _trial_runner(
    group: WorkerGroup, source: str, retries: Retries, *, fresh: bool, quiet: bool
) -> TrialRunner:
    display = TextDisplay(quiet=quiet)
    return TrialRunner(
        group=group._group,
        display=display,
        run_cell=lambda session, request: Recovery(session, display).run(request, retries),
        request=group._request(source),
        spec=group._group.spec,
        fresh=fresh,
    )
