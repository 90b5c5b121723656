"""A worker group for scripts and tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbddp.archive.sweep_grid import sweep_points
from nbddp.controller.group_spec import GroupSpec
from nbddp.controller.rank_requests import RankRequests
from nbddp.errors import ArgumentError
from nbddp.group.display import TextDisplay
from nbddp.group.method_names import with_method_names
from nbddp.group.rank_group import RankGroup
from nbddp.group.recovery import Recovery
from nbddp.group.run_script import find_script
from nbddp.group.scaling import ScalingStudy
from nbddp.group.sweep import Sweep
from nbddp.group.trace import collect_trace
from nbddp.group.trials import TrialRunner
from nbddp.lifecycle.retries import Retries
from nbddp.record.cell import CellRequest, CellResult
from nbddp.record.heal.heal_report import Healed
from nbddp.record.trace import Trace
from nbddp.record.waiting.collective_timeline import Timeline
from nbddp.runs_api import Run
from nbddp.wire.trace_messages import TraceSteps

NOT_STARTED = "the worker group is not started: call its start(), or use it in a `with` block"


@with_method_names
class WorkerGroup:
    """Ranks on this machine that run what they are given and keep their names.

    Args:
        nproc: ranks, 1 to 128.
        backend: ``auto`` (NCCL when there is a GPU for every rank, else Gloo), ``gloo``, ``nccl``.
        gpus: which GPUs the ranks see, by number, UUID or MIG name; None for all.
        timeout: seconds after which a collective gives up.
        env: variables that win over this process's environment.
        threads: threads per rank for torch's operators; 0 for cores / ranks.
        name: part of the run folder's name.
        grace: seconds that a rank gets to obey before it is killed.
        init: whether ranks form a process group.

    Raises:
        ArgumentError: when a value makes no sense.

    >>> with WorkerGroup(nproc=2) as group:
    ...     result = group.run("x = torch.ones(1) * rank; dist.all_reduce(x); x.item()")
    ...     group.pull("x.item() + rank")
    Out [ranks 0-1] 1.0
    [1.0, 2.0]
    """

    def __init__(
        self,
        nproc: int = 2,
        *,
        backend: str = "auto",
        gpus: Sequence[int | str] | None = None,
        timeout: float = 1800.0,
        env: Mapping[str, str] | None = None,
        threads: int = 0,
        name: str = "",
        grace: float = 5.0,
        init: bool = True,
    ) -> None:
        spec = GroupSpec(
            nproc=nproc,
            backend=backend,
            gpus=None if gpus is None else tuple(gpus),
            timeout=timeout,
            env=env or {},
            threads=threads,
            name=name,
            grace=grace,
            joins_group=init,
        )
        self._group = RankGroup(spec, not_started=NOT_STARTED)
        self._cell_numbers = itertools.count(1)  # of cells

    # ---- life

    def __enter__(self) -> WorkerGroup:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._group.close_in_own_process()

    @property
    def is_live(self) -> bool:
        """Whether there are ranks."""
        return self._group.is_live

    @property
    def alive(self) -> list[int]:
        """The ranks whose process is there, in order."""
        return self._group.life.alive

    @property
    def folder(self) -> Path | None:
        """Where the logs, numbers and events of the run are; None while there is no run."""
        folder = self._group.scripts.active_session.event_log.folder
        return None if folder is None else folder.path

    def start(self) -> None:
        """Start the ranks and wait until all are ready.

        Raises:
            RequestError: they run already, or the group cannot be had.
            StartError: a rank could not start.
        """
        self._group.start()

    def restart(self) -> None:
        """Stop all ranks, even in a running cell, and start new ones; their names are lost.

        Raises:
            RequestError: the group cannot be had.
            StartError: a rank could not start.
        """
        self._group.restart()

    def stop(self) -> None:
        """End all ranks; the next start is still quick."""
        self._group.stop()

    def close(self) -> None:
        """End all ranks and everything that was started for them."""
        self._group.close()

    # ---- cells

    def run(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        quiet: bool = False,
        wants_value: bool = False,
        max_restarts: int = 0,
        heal: int = 0,
        elastic: bool = False,
    ) -> CellResult:
        """Run source on the ranks, print what they print, and wait for the end.

        Args:
            source: Python, or whatever IPython takes.
            ranks: where; None for all.
            quiet: print nothing but the values of the last line.
            wants_value: fetch the last expression's values, for ``result.values()``.
            max_restarts: after a failure, so often restart the ranks, replay the cells that had
                gone well, and run this one again.
            heal: before that, so many times, replace ranks that died, and run this one again.
            elastic: when a node comes, restart with its ranks too, and do the same.

        Returns:
            What came of it.

        Raises:
            ArgumentError: there is no such rank.
            RequestError: it cannot run now.
            CellFailedError: it failed on some rank.
            CellInterruptedError: it was interrupted.
        """
        chosen = None if ranks is None else tuple(ranks)
        request = self._request(source, ranks=chosen, wants_value=wants_value)
        retries = Retries(heals=heal, restarts=max_restarts, is_elastic=elastic)
        return self._run(request, retries, quiet=quiet)

    def run_script(
        self,
        name: str | os.PathLike[str],
        *arguments: str | os.PathLike[str],
        is_module: bool = False,
        keeps: bool = False,
        ranks: Sequence[int] | None = None,
        quiet: bool = False,
        max_restarts: int = 0,
    ) -> CellResult:
        """Run a script as torchrun would, print what its ranks print, wait for the end.

        It gets as many ranks as this group has, in processes of their own. They begin with the
        environment and the working folder of this process, and end with the script; after a failure
        they stay until the next cell or script.

        Args:
            name: a Python file; with ``is_module`` a module's name, as behind ``python -m``.
            arguments: the script's own.
            is_module: see ``name``.
            keeps: run it in the ranks of the cells, which then find its names.
            ranks: start these alone; None for all.
            quiet: print nothing.
            max_restarts: after a failure, start its ranks again so many times.

        Returns:
            What came of it.

        Raises:
            ArgumentError: there is no such rank.
            RequestError: it cannot run now, or not at all.
            CellFailedError: it failed on some rank, or ended with another exit code than 0.
            CellInterruptedError: it was interrupted.
        """
        words = [os.fspath(each) for each in (name, *arguments)]
        script = find_script(words[0], words[1:], is_module=is_module, keeps=keeps)
        request = CellRequest(
            source=" ".join(["%ddp run", *(["-m"] if is_module else []), *words]),
            execution_count=next(self._cell_numbers),
            ranks=None if ranks is None else tuple(ranks),
            needs_group=False,
            once=not keeps,
            script=script,
        )
        retries = Retries(restarts=max_restarts)
        if keeps:
            return self._run(request, retries, quiet=quiet)
        self._group.close_at_exit()
        scripts = self._group.scripts
        session = scripts.open()
        scripts.start(replace(self._group.spec, ranks=request.ranks), script)
        result = Recovery(session, TextDisplay(quiet=quiet)).run(request, retries)
        scripts.end(session, result)
        result.raise_for_failure()
        return result

    def sweep(
        self,
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
        """Run source once for each combination of values, each time as a run of its own.

        Each run has new ranks, on which the cells and pushes of this group are replayed first. The
        ranks of this group keep their names. Combinations that an earlier sweep of the same source
        has finished are not run again.

        Args:
            source: Python, or whatever IPython takes.
            settings: the values to try, by name.
            repeat: how many seeds each combination has; the source has them as ``seed``.
            fresh: replay nothing.
            start_over: also run combinations that are finished.
            quiet: print only the values of the last line.
            max_restarts: of each run, as in :meth:`run`.
            heal: of each run, as in :meth:`run`.

        Returns:
            The run of each combination, in order, including those that failed.

        Raises:
            ArgumentError: a name or value is not allowed.
            RequestError: it cannot run now.
            CellFailedError: no run succeeded.
            CellInterruptedError: it was interrupted.
        """
        trials = sweep_points((settings or {}).items(), repeat)
        retries = Retries(heals=heal, restarts=max_restarts)
        runner = self._trial_runner(source, retries, fresh=fresh, quiet=quiet)
        sweep = Sweep(runner, trials, start_over=start_over)
        sweep.run()
        return [Run(row.path) for row in sweep.rows if row.path is not None]

    def scale(
        self,
        source: str,
        sizes: Sequence[int],
        *,
        rounds: int = 3,
        weak: bool = False,
        fresh: bool = False,
        quiet: bool = False,
    ) -> list[dict[str, Any]]:
        """Run source on several world sizes, and compare how fast they are.

        Each run has new ranks, as in :meth:`sweep`.

        Args:
            source: Python, or whatever IPython takes.
            sizes: the world sizes.
            rounds: how often it runs on each, at least 3.
            weak: whether each rank has the same work on all world sizes.
            fresh: replay nothing.
            quiet: print only the values of the last line.

        Returns:
            A dictionary for each world size that succeeded: ``ranks``, ``steps_per_second`` (or
            ``cells_per_second`` if the cell reports no steps), ``samples_per_second``,
            ``speed_up``, ``efficiency``, the shares of time ``waiting``, ``loading``,
            ``communication`` and ``exposed`` (communication while nothing is computed), and
            ``memory`` and ``gpu_memory`` of the largest rank in bytes.

        Raises:
            ArgumentError: a number is not allowed.
            RequestError: it cannot run now.
            CellFailedError: no run succeeded.
            CellInterruptedError: it was interrupted.
        """
        runner = self._trial_runner(source, Retries(), fresh=fresh, quiet=quiet)
        return ScalingStudy(runner, sizes, rounds=rounds, is_weak=weak).run().rows()

    def _trial_runner(
        self, source: str, retries: Retries, *, fresh: bool, quiet: bool
    ) -> TrialRunner:
        display = TextDisplay(quiet=quiet)
        return TrialRunner(
            group=self._group,
            display=display,
            run_cell=lambda session, request: Recovery(session, display).run(request, retries),
            request=self._request(source),
            spec=self._group.spec,
            fresh=fresh,
        )

    def _request(self, source: str, **more: Any) -> CellRequest:
        if not isinstance(source, str):
            raise ArgumentError(f"a cell is text, not of the type {type(source).__name__}")
        number = next(self._cell_numbers)
        needs_group = self._group.spec.joins_group
        return CellRequest(source=source, execution_count=number, needs_group=needs_group, **more)

    def _run(self, request: CellRequest, retries: Retries, *, quiet: bool) -> CellResult:
        self._group.check_started()
        RankRequests(self._group.session).check_ranks(request.ranks)
        self._group.scripts.end_previous()
        result = Recovery(self._group.session, TextDisplay(quiet=quiet)).run(request, retries)
        result.raise_for_failure()
        return result

    def interrupt(self) -> None:
        """End the running cell and keep every name; a second time, kill what does not answer."""
        self._group.interrupt()

    def kill(self, rank: int) -> None:
        """Kill one rank, as if it had run out of memory; a cell that runs fails on it.

        Raises:
            ArgumentError: there is no such rank.
            RequestError: it is gone already, or there is no group.
        """
        self._group.kill(rank)

    def heal(self, ranks: Sequence[int] = (), *, donor: int | None = None) -> Healed:
        """Replace ranks that are gone by new ones with a donor's names (the lowest that lives).

        Raises:
            RequestError: it cannot be done; the group is as it was before.
        """
        return self._group.heal(ranks, donor=donor)

    def timeline(self, last: int | None = None) -> Timeline:
        """Who waited for whom in the last cell, or in its last so many steps."""
        return self._group.timeline(last)

    def trace(
        self,
        source: str,
        first: int,
        last: int,
        *,
        memory: bool = False,
        ranks: Sequence[int] | None = None,
        quiet: bool = False,
    ) -> Trace:
        """Run source as :meth:`run`, and trace some of its steps with torch's profiler.

        Args:
            source: Python, or whatever IPython takes.
            first: the first step that is traced, as ``nbddp.log(step=...)`` reports it.
            last: the last one.
            memory: trace the memory of tensors too.
            ranks: where; None for all.
            quiet: print nothing but the values of the last line.

        Returns:
            What each rank has traced; ``path`` is one file for Perfetto with all ranks in it.

        Raises:
            ArgumentError: there are no such steps, or no such rank.
            NbddpError: as :meth:`run`.
        """
        if not 0 <= first <= last:
            raise ArgumentError(f"not steps of a cell: {first} to {last}")
        steps = TraceSteps(first=first, last=last, with_memory=memory)
        request = self._request(source, ranks=None if ranks is None else tuple(ranks), trace=steps)
        result = self._run(request, Retries(), quiet=quiet)
        return collect_trace(self._group.session, result, steps)

    def push(self, values: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Put values into the namespace of the ranks.

        Args:
            values: by their names.
            ranks: where; None for all.

        Raises:
            ArgumentError: there is no such rank.
            RequestError: one cannot be pickled, or the ranks cannot take it now.
        """
        self._group.push(values, ranks=ranks)

    def pull(self, expression: str, *, rank: int | None = None) -> Any:
        """The value of a name or expression: of one rank, or a list of all ranks'.

        Args:
            expression: any Python expression; tensors come as they are, on the CPU.
            rank: whose; None for a list of all that live, in order.

        Raises:
            ArgumentError: there is no such rank.
            RequestError: it does not exist there, or cannot be pickled.
        """
        return self._group.pull(expression, rank=rank)
