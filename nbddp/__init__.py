"""nbddp: distributed PyTorch experiments in Jupyter cells.

``%load_ext nbddp``, then ``%%ddp --nproc 4`` runs a cell on four ranks. The same from Python::

    with nbddp.WorkerGroup(nproc=2) as group:
        group.run("print(rank, world_size)")

Every process of nbddp imports this module. Not every process needs torch, IPython or ipywidgets, so
this module imports none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nbddp.errors import (
    ArgumentError,
    CellFailedError,
    CellInterruptedError,
    CheckpointError,
    NbddpError,
    RequestError,
    StartError,
)
from nbddp.topology import Topology

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.extensions.course.digits import Digits, digits
    from nbddp.extensions.course.exercises import Judgement, check_answer
    from nbddp.extensions.course.sonnets import sonnets
    from nbddp.extensions.faults import arming as faults
    from nbddp.extensions.runs.api import Run, compare, runs
    from nbddp.extensions.timeline.collective_timeline import Timeline
    from nbddp.extensions.trace.merge import Trace
    from nbddp.extensions.train.checkpoint.checkpoint import Checkpoint, Resumed
    from nbddp.extensions.train.collectives import all_gather, all_reduce, main_rank_first, on_main
    from nbddp.extensions.train.config import config
    from nbddp.extensions.train.loader import Loader, loader
    from nbddp.extensions.train.precision import Precision, precision
    from nbddp.extensions.train.prepare import prepare
    from nbddp.extensions.trainers.attach import report_trainers
    from nbddp.group.worker_group import WorkerGroup
    from nbddp.magics.load import timeline
    from nbddp.record.cell import CellResult
    from nbddp.record.heal.heal_report import Healed
    from nbddp.reporting.log_and_track import Track, log, track

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CellFailedError",
    "CellInterruptedError",
    "CellResult",
    "Checkpoint",
    "CheckpointError",
    "Digits",
    "Healed",
    "Judgement",
    "Loader",
    "NbddpError",
    "Precision",
    "RequestError",
    "Resumed",
    "Run",
    "StartError",
    "Timeline",
    "Topology",
    "Trace",
    "Track",
    "WorkerGroup",
    "all_gather",
    "all_reduce",
    "check_answer",
    "compare",
    "config",
    "digits",
    "faults",
    "load_ipython_extension",
    "loader",
    "log",
    "main_rank_first",
    "on_main",
    "precision",
    "prepare",
    "report_trainers",
    "runs",
    "sonnets",
    "timeline",
    "track",
    "unload_ipython_extension",
]

_MODULES = {
    "nbddp.extensions.course.digits": ("Digits", "digits"),
    "nbddp.extensions.course.exercises": ("Judgement", "check_answer"),
    "nbddp.extensions.course.sonnets": ("sonnets",),
    "nbddp.extensions.faults.arming": ("faults",),
    "nbddp.extensions.runs.api": ("Run", "compare", "runs"),
    "nbddp.extensions.timeline.collective_timeline": ("Timeline",),
    "nbddp.extensions.trace.merge": ("Trace",),
    "nbddp.extensions.train.checkpoint.checkpoint": ("Checkpoint", "Resumed"),
    "nbddp.extensions.train.collectives": (
        "all_gather",
        "all_reduce",
        "main_rank_first",
        "on_main",
    ),
    "nbddp.extensions.train.config": ("config",),
    "nbddp.extensions.train.loader": ("Loader", "loader"),
    "nbddp.extensions.train.precision": ("Precision", "precision"),
    "nbddp.extensions.train.prepare": ("prepare",),
    "nbddp.extensions.trainers.attach": ("report_trainers",),
    "nbddp.group.worker_group": ("WorkerGroup",),
    "nbddp.magics.load": ("timeline",),
    "nbddp.record.cell": ("CellResult",),
    "nbddp.record.heal.heal_report": ("Healed",),
    "nbddp.reporting.log_and_track": ("Track", "log", "track"),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use: a rank never needs the controller."""
    if name not in _LAZY:
        raise AttributeError(f"module 'nbddp' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    return module if name == "faults" else getattr(module, name)


def __dir__() -> list[str]:
    """Return the public names for Tab completion."""
    return [name for name in __all__ if not name.endswith("_ipython_extension")]


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register ``%ddp`` and ``%%ddp``, and start to preload in the background."""
    import_module("nbddp.magics.load").load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Stop the worker group and remove the magics."""
    import_module("nbddp.magics.load").unload(ipython)
