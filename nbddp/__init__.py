"""nbddp: distributed PyTorch experiments in Jupyter cells.

``%load_ext nbddp``, then ``%%ddp --nproc 4`` runs a cell on four ranks. The same from Python::

    with nbddp.WorkerGroup(nproc=2) as group:
        group.run("print(rank, world_size)")

This module is imported in every rank, so it pulls in neither IPython nor ipywidgets nor torch.
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

    from nbddp.course.exercises import Judgement, check_answer
    from nbddp.group import WorkerGroup
    from nbddp.magics.timeline import timeline
    from nbddp.opened import Run, compare, runs
    from nbddp.record.cell import CellResult
    from nbddp.record.healed import Healed
    from nbddp.record.spent import Timeline
    from nbddp.record.trace import Trace
    from nbddp.train import faults
    from nbddp.train.checkpoint import Checkpoint, Resumed
    from nbddp.train.collectives import all_gather, all_reduce, main_rank_first, on_main
    from nbddp.train.config import config
    from nbddp.train.data import Loader, loader
    from nbddp.train.digits import Digits, digits
    from nbddp.train.models import prepare
    from nbddp.train.precision import Precision, precision
    from nbddp.train.report import Track, log, track
    from nbddp.train.sonnets import sonnets

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
    "runs",
    "sonnets",
    "timeline",
    "track",
    "unload_ipython_extension",
]

_MODULES = {
    "nbddp.course.exercises": ("Judgement", "check_answer"),
    "nbddp.group": ("WorkerGroup",),
    "nbddp.magics.timeline": ("timeline",),
    "nbddp.opened": ("Run", "compare", "runs"),
    "nbddp.record.cell": ("CellResult",),
    "nbddp.record.healed": ("Healed",),
    "nbddp.record.spent": ("Timeline",),
    "nbddp.record.trace": ("Trace",),
    "nbddp.train.checkpoint": ("Checkpoint", "Resumed"),
    "nbddp.train.collectives": ("all_gather", "all_reduce", "main_rank_first", "on_main"),
    "nbddp.train.config": ("config",),
    "nbddp.train.data": ("Loader", "loader"),
    "nbddp.train.digits": ("Digits", "digits"),
    "nbddp.train.faults": ("faults",),
    "nbddp.train.models": ("prepare",),
    "nbddp.train.precision": ("Precision", "precision"),
    "nbddp.train.report": ("Track", "log", "track"),
    "nbddp.train.sonnets": ("sonnets",),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name's room when it is first asked for: a rank never needs the controller's."""
    if name not in _LAZY:
        raise AttributeError(f"module 'nbddp' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    return module if name == "faults" else getattr(module, name)


def __dir__() -> list[str]:
    """What Tab offers: the kit."""
    return [name for name in __all__ if not name.endswith("_ipython_extension")]


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register ``%ddp`` and ``%%ddp`` and begin to warm up, in the background."""
    import_module("nbddp.magics").load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Stop the worker group and take the magics away again."""
    import_module("nbddp.magics").unload(ipython)
