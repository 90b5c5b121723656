"""A worker group for scripts and tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nbddp.controller.rank_requests import check_ranks
from nbddp.errors import ArgumentError
from nbddp.extension.installed import own_backends
from nbddp.group.display import TextDisplay
from nbddp.group.find_script import find_script
from nbddp.group.method_names import with_method_names
from nbddp.group.rank_group import RankGroup
from nbddp.group.recovery import Recovery
from nbddp.lifecycle.retries import Retries
from nbddp.record.cell import CellRequest, CellResult
from nbddp.record.heal.heal_report import Healed
from nbddp.wire.group_spec import BACKENDS, GroupSpec, StartOptions
from nbddp.wire.options.cell_spec import CellOptions

if TYPE_CHECKING:
    from nbddp.extensions import GroupMethods
else:
    GroupMethods = object


@with_method_names
class WorkerGroup(GroupMethods):
    """Ranks on this machine that run code and keep their variables between calls.

    Args:
        nproc: the number of ranks, 1 to 128.
        backend: ``auto`` (NCCL if there is a GPU for each rank, else Gloo), ``gloo``, ``nccl``,
            or one of an extension, such as ``shm``.
        gpus: the GPUs that the ranks see, by number, UUID or MIG name; None for all.
        timeout: seconds after which a collective fails.
        env: environment variables; they override those of this process.
        threads: threads per rank for torch's operators; 0 for cores / ranks.
        name: part of the name of the run folder.
        grace: seconds that a rank has to react to an interrupt or stop before it is killed.
        init: whether the ranks form a process group.

    Raises:
        ArgumentError: a value is not allowed.

    >>> with WorkerGroup(nproc=2) as group:
    ...     result = group.run("x = torch.ones(1) * rank; dist.all_reduce(x); x.item()")
    ...     group.pull("x.item() + rank")
    Out [ranks 0-1] 1.0
    [1.0, 2.0]
    """

    def __init__(
        self,
        nproc: int = StartOptions.nproc,
        *,
        backend: str = StartOptions.backend,
        gpus: Sequence[int | str] | None = StartOptions.gpus,
        timeout: float = StartOptions.timeout,
        env: Mapping[str, str] | None = None,
        threads: int = StartOptions.threads,
        name: str = StartOptions.name,
        grace: float = StartOptions.grace,
        init: bool = True,
    ) -> None:
        if backend not in (choices := (*BACKENDS, *own_backends())):
            raise ArgumentError(f"backend must be one of {', '.join(choices)}, got {backend!r}")
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
        self._group = RankGroup(spec)
        self._cell_numbers = itertools.count(1)  # of cells

    # ---- life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._group.close_in_own_process()

    @property
    def is_live(self) -> bool:
        """Whether the ranks are running."""
        return self._group.is_live

    @property
    def alive(self) -> list[int]:
        """The ranks whose process is alive, in order."""
        return self._group.life.alive

    @property
    def folder(self) -> Path | None:
        """The folder with the logs, numbers and events of the run; None without a run."""
        return self._group.scripts.active_session.event_log.folder

    def start(self) -> None:
        """Start the ranks and wait until all are ready.

        Raises:
            RequestError: the ranks already run, or cannot be started now.
            StartError: a rank failed to start.
        """
        self._group.start()

    def restart(self) -> None:
        """Stop all ranks, even in a running cell, and start new ones; their variables are lost.

        Raises:
            RequestError: the ranks cannot be started now.
            StartError: a rank failed to start.
        """
        self._group.restart()

    def stop(self) -> None:
        """End all ranks; the next start is still quick."""
        self._group.stop()

    def close(self) -> None:
        """End all ranks and every process that was started for them."""
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
        shard_copies: int = CellOptions.shard_copies,
    ) -> CellResult:
        """Run source on the ranks, print their output, and wait for the end.

        Args:
            source: Python, or anything that IPython accepts.
            ranks: the ranks that run it; None for all.
            quiet: print only the values of the last line.
            wants_value: fetch the values of the last expression for ``result.values()``.
            max_restarts: how often, after a failure, to restart the ranks, replay the successful
                cells and run this one again.
            heal: how often, before any restart, to replace dead ranks and run this cell again.
            elastic: when a node joins, restart with its ranks too, replay, and run this cell again.
            shard_copies: every so many optimizer steps, copy each rank's shards to the memory of
                the next rank, for a heal; 0 for no copies.

        Returns:
            The result of the cell.

        Raises:
            ArgumentError: a rank does not exist.
            RequestError: the cell cannot run now.
            CellFailedError: the cell failed on a rank.
            CellInterruptedError: the cell was interrupted.
        """
        options = {"wants_value": wants_value, "shard_copies": shard_copies}
        request = self._request(source, ranks, **options)
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
        """Run a script as torchrun would, print the output of its ranks, and wait for the end.

        The script gets as many ranks as this group has, in separate processes. They start with the
        environment and the working folder of this process, and end with the script. After a failure
        they stay until the next cell or script.

        Args:
            name: a Python file; with ``is_module``, the name of a module, as for ``python -m``.
            arguments: the arguments of the script.
            is_module: whether ``name`` is a module.
            keeps: run the script on the ranks of the cells, which then have its variables.
            ranks: start only these ranks; None for all.
            quiet: print nothing.
            max_restarts: how often to start its ranks again after a failure.

        Returns:
            The result of the script.

        Raises:
            ArgumentError: a rank does not exist.
            RequestError: the script cannot run, or not now.
            CellFailedError: the script failed on a rank, or its exit code was not 0.
            CellInterruptedError: the script was interrupted.
        """
        words = [os.fspath(each) for each in (name, *arguments)]
        script = find_script(words[0], words[1:], is_module=is_module, keeps=keeps)
        source = " ".join(["%ddp run", *(["-m"] if is_module else []), *words])
        request = self._request(source, ranks, needs_group=False, once=not keeps, script=script)
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

    def _request(self, source: str, ranks: Sequence[int] | None = None, **more: Any) -> CellRequest:
        if not isinstance(source, str):
            raise ArgumentError(f"a cell is text, not of the type {type(source).__name__}")
        more = {"needs_group": self._group.spec.joins_group} | more
        chosen = None if ranks is None else tuple(ranks)
        number = next(self._cell_numbers)
        return CellRequest(source=source, ranks=chosen, execution_count=number, **more)

    def _run(self, request: CellRequest, retries: Retries, *, quiet: bool) -> CellResult:
        check_ranks(self._group.session, request.ranks)
        self._group.scripts.end_previous()
        result = Recovery(self._group.session, TextDisplay(quiet=quiet)).run(request, retries)
        result.raise_for_failure()
        return result

    def interrupt(self) -> None:
        """Interrupt the cell, and keep variables. The second time, kill unresponsive ranks."""
        self._group.interrupt()

    def kill(self, rank: int) -> None:
        """Kill one rank, as if it had run out of memory. A running cell fails.

        Raises:
            ArgumentError: the rank does not exist.
            RequestError: the rank is already gone, or there is no group.
        """
        self._group.kill(rank)

    def heal(
        self, ranks: Sequence[int] = (), *, donor: int | None = None, rerun: bool = False
    ) -> Healed:
        """Replace dead ranks. New ranks get the variables of a donor.

        Args:
            ranks: the ranks to replace; all that died by default.
            donor: the rank whose variables they get; the lowest living rank by default.
            rerun: then run the cells again, on all ranks, that made trainers of other libraries.

        Raises:
            RequestError: the group cannot be healed; it has not changed.
            CellFailedError: a cell failed when it ran again.
        """
        healed = self._group.heal(ranks, donor=donor, rerun=rerun)
        if rerun:
            failed = Recovery(self._group.session, TextDisplay()).rerun()
            if failed is not None:
                failed.raise_for_failure()
        return healed

    def push(self, values: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Put values into the namespaces of the ranks.

        Args:
            values: the values, by name.
            ranks: the ranks that get them; None for all.

        Raises:
            ArgumentError: a rank does not exist, a name is not valid for a variable, or nbddp sets
                it on each rank, such as ``rank``.
            RequestError: a value cannot be pickled, or the ranks are not idle.
        """
        self._group.push(values, ranks=ranks)

    def pull(self, expression: str, *, rank: int | None = None) -> Any:
        """Return the value of a name or expression on one rank, or a list of all ranks' values.

        Args:
            expression: any Python expression; tensors are returned on the CPU.
            rank: the rank; None for a list of all living ranks, in order.

        Raises:
            ArgumentError: the rank does not exist.
            RequestError: a rank cannot evaluate the expression or pickle its value.
        """
        return self._group.pull(expression, rank=rank)
