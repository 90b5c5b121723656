"""Sweeps: run a cell for each combination of values, seeds or world sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbddp.extension.manifest import Extension
from nbddp.wire.frozen import Frozen
from nbddp.wire.options.option import flag, option
from nbddp.wire.options.option_values import positive_int, swept, whole_number, world_sizes

MIN_ROUNDS = 3  # repetitions that a median needs
_ONCE = "run the cell once for that"
_ONE_BY_ONE = "run one after the other"
_SETS_RANKS = "--scale sets the numbers of ranks"
_EXCLUDED_BY_TRIALS = {
    "no_wait": "it returns when all runs are done; the stop button ends them",
    "out": "`nbddp.log` records numbers of each run, `nbddp.runs()` returns them",
    "timeline": _ONCE,
    "trace": _ONCE,
}


class SweepOptions(Frozen):
    """The options of a cell that runs several times."""

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


EXTENSION = Extension(
    name="sweeps",
    needs=("runs", "timeline"),
    cell_options=SweepOptions,
    notebook="nbddp.extensions.sweeps.notebook:Sweeps",
    group_methods={
        "scale": "nbddp.extensions.sweeps.group_methods:scale",
        "sweep": "nbddp.extensions.sweeps.group_methods:sweep",
    },
)
