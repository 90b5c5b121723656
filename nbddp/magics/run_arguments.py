"""The options of everything that starts ranks or runs code: of ``%%ddp`` and ``%ddp run``."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from nbddp.extensions.sweeps.scaling_results import MIN_ROUNDS
from nbddp.lifecycle.retries import Retries
from nbddp.wire.frozen import Frozen
from nbddp.wire.group_spec import GroupSpec
from nbddp.wire.options import option_values as values
from nbddp.wire.options.cell_spec import CellOptions, RunOptions
from nbddp.wire.options.option import flag, option
from nbddp.wire.options.option_values import (
    count,
    numbers,
    positive_int,
    swept,
    whole_number,
    world_sizes,
)

_ONCE = "run the cell once for that"
_ONE_BY_ONE = "run one after the other"
_SETS_RANKS = "--scale sets the numbers of ranks"
_EXCLUDED_BY_TRIALS = {
    "no_wait": "it returns when all runs are done; the stop button ends them",
    "out": "`nbddp.log` records numbers of each run, `nbddp.runs()` returns them",
    "timeline": _ONCE,
    "trace": _ONCE,
}


class GroupArguments(Frozen):
    """The options with which ranks start.

    Attributes:
        start: the options of :class:`~nbddp.wire.group_spec.StartOptions` that the line has.
    """

    start: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, base: GroupSpec) -> GroupSpec:
        """Return ``base`` with the options of the line."""
        return replace(base, **{**self.start, "env": {**base.env, **self.start.get("env", {})}})


class RunArguments(GroupArguments, RunOptions):
    """The options of a cell or script that only the notebook obeys.

    Attributes:
        extensions: the options of extensions that the line has, by their class.
    """

    extensions: Mapping[type[Frozen], Any] = field(default_factory=dict)
    ranks: tuple[int, ...] | None = option(
        "--ranks 0,2", "run it on these ranks only", None, numbers, complete="ranks"
    )
    fresh: bool = flag("--fresh", "restart the ranks first, with empty namespaces")
    max_restarts: int = option(
        "--max-restarts N",
        "after a failure, up to N times: restart the ranks and run it again; before a cell, replay "
        "the successful cells (default: {default})",
        0,
        count,
    )
    heal: int = option(
        "--heal N",
        "after the death of a rank, up to N times and before any restart: replace the rank and run "
        "it again; in cells, the new rank gets the variables of a living one (default: {default})",
        0,
        count,
    )
    elastic: bool = flag(
        "--elastic",
        "when a node joins, restart with its ranks, replay the successful cells, and run "
        "this one again (see `%%ddp nodes`)",
    )
    no_wait: bool = flag("--no-wait", "return at once; `%%ddp wait` waits")
    quiet: bool = flag("--quiet", "show only the values of the last line")

    @property
    def retries(self) -> Retries:
        """How often the cell runs again after a failure."""
        return Retries(heals=self.heal, restarts=self.max_restarts, is_elastic=self.elastic)


class CellArguments(RunArguments, CellOptions):
    """Run the cell on every rank of the worker group.

    The first such cell starts the ranks: processes that stay, each with its own IPython. Later
    cells run on the same ranks and find the same variables. A cell can use `rank`, `local_rank`,
    `world_size`, `device`, `torch`, `dist` (torch.distributed) and `nbddp`; the process group is
    ready. `%ddp help` lists the commands that control the group.

    Examples:

        %%ddp --nproc 4
        x = torch.ones(1, device=device) * rank
        dist.all_reduce(x)
        x

        %%ddp --ranks 0 --push config --out report

        %%ddp --sweep lr=0.1,0.01 --sweep batch=16,64

        %%ddp --scale 1,2,4
    """  # noqa: D412 - this is the help

    push: tuple[str, ...] = option(
        "--push a,b", "first copy these variables from the notebook to the ranks", (), values.names
    )
    out: str = option(
        "--out NAME",
        "store the value of the last line of every rank as a list",
        "",
        values.name,
        excludes={"no_wait": "fetch the value with `%ddp pull` later"},
    )
    no_init: bool = flag(
        "--no-init", "no process group: the cell calls init_process_group() itself"
    )
    once: bool = flag("--once", "leave this cell out of any replay")
    timeline: bool = flag(
        "--timeline",
        "then show which rank waited for which",
        excludes={"no_wait": "use `%ddp timeline` later"},
    )
    sweep: Sequence[tuple[str, tuple[Any, ...]]] = option(
        "--sweep lr=0.1,0.01",
        "run the cell once for each of these values of a name, on fresh ranks, each as a run "
        "of its own; if repeated, once for each combination; quote values that contain spaces",
        (),
        swept,
        repeat=list,
        excludes=_EXCLUDED_BY_TRIALS,
    )
    repeat: int = option(
        "--repeat N",
        "run each with the seeds 0 to N-1, which are `seed` in the cell",
        0,
        positive_int,
        excludes=_EXCLUDED_BY_TRIALS,
    )
    scale: tuple[int, ...] = option(
        "--scale 1,2,4",
        "run the cell on each of these numbers of ranks and compare the speed",
        (),
        world_sizes,
        excludes={
            **_EXCLUDED_BY_TRIALS,
            **dict.fromkeys(("sweep", "repeat"), _ONE_BY_ONE),
            **dict.fromkeys(("nproc", "ranks", "elastic"), _SETS_RANKS),
        },
    )
    weak: bool = flag("--weak", "with --scale: every rank has the same work", needs=("scale",))
    rounds: int = option(
        "--rounds N",
        "with --scale: runs for each number of ranks, at least {default} (default: {default})",
        MIN_ROUNDS,
        whole_number(MIN_ROUNDS),
        needs=("scale",),
    )
    start_over: bool = flag(
        "--start-over", "repeat runs that an earlier sweep has finished", needs=("sweep", "repeat")
    )
    auto: bool = flag("--auto", SUPPRESS)  # `%ddp auto on` writes it
