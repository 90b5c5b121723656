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

from nbddp.errors import ArgumentError as ArgumentError
from nbddp.errors import CellFailedError as CellFailedError
from nbddp.errors import CellInterruptedError as CellInterruptedError
from nbddp.errors import CheckpointError as CheckpointError
from nbddp.errors import NbddpError as NbddpError
from nbddp.errors import RequestError as RequestError
from nbddp.errors import StartError as StartError
from nbddp.topology import Topology as Topology

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbddp.extensions import *  # noqa: F403 - it lists the names of the extensions
    from nbddp.group.worker_group import WorkerGroup as WorkerGroup
    from nbddp.record.cell import CellResult as CellResult
    from nbddp.record.heal.heal_report import Healed as Healed
    from nbddp.reporting.log_and_track import Track as Track
    from nbddp.reporting.log_and_track import log as log
    from nbddp.reporting.log_and_track import track as track

__version__ = "0.1.0"

_LOADED = {
    "ArgumentError",
    "CellFailedError",
    "CellInterruptedError",
    "CheckpointError",
    "NbddpError",
    "RequestError",
    "StartError",
    "Topology",
    "load_ipython_extension",
    "unload_ipython_extension",
}
_TARGETS = {
    "CellResult": "nbddp.record.cell:CellResult",
    "Healed": "nbddp.record.heal.heal_report:Healed",
    "Track": "nbddp.reporting.log_and_track:Track",
    "WorkerGroup": "nbddp.group.worker_group:WorkerGroup",
    "log": "nbddp.reporting.log_and_track:log",
    "track": "nbddp.reporting.log_and_track:track",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use: a rank never needs the controller."""
    from nbddp.extension.installed import load, public_targets

    if name == "__all__":
        return sorted({*_LOADED, *_TARGETS, *public_targets()})
    target = _TARGETS.get(name) or public_targets().get(name)
    if target is None:
        raise AttributeError(f"module 'nbddp' has no attribute {name!r}")
    return load(target)


def __dir__() -> list[str]:
    """Return the public names for Tab completion."""
    return [name for name in __getattr__("__all__") if not name.endswith("_ipython_extension")]


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register ``%ddp`` and ``%%ddp``, and start to preload in the background."""
    import_module("nbddp.magics.load").load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Stop the worker group and remove the magics."""
    import_module("nbddp.magics.load").unload(ipython)
