"""What a cell starts by ``multiprocessing``: its functions travel, and nothing is left behind.

A spawned process looks for a function by name in ``__main__``, which for a cell is empty there. So
what a cell defined is sent whole, as it is when values are pushed; everything else goes torch's
usual way, shared tensors and queues included.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing import context, process, reduction
from types import FunctionType
from typing import Any, ClassVar

import torch.multiprocessing
from torch.distributed import DistNetworkError

from nbddp.wire.sources import Pickler
from nbddp.worker.families import Arrival, at_home
from nbddp.worker.import_hooks import change_when_imported

PATIENCE = 1.0  # seconds to end when asked to
_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
_UNSENDABLE = (TypeError, AttributeError, pickle.PicklingError)


def let_cells_spawn(family: str) -> None:
    """From here on processes of this rank can run what a cell defined; they are one family."""
    original = reduction.dump

    @functools.wraps(original)
    def dump(value: Any, file: Any, protocol: int | None = None) -> None:
        if not isinstance(value, process.BaseProcess):
            original(value, file, protocol)
        elif _main_is_a_file():
            original(Arrival(value, family), file, protocol)
        else:
            _ByValue(file, protocol).dump(Arrival(value, family))

    module: Any = reduction
    module.dump = dump
    spawn: Any = importlib.import_module("torch.multiprocessing.spawn")
    package: Any = torch.multiprocessing
    package.start_processes = spawn.start_processes = _ending(spawn.start_processes)
    change_when_imported("torch.distributed.launcher.api", _explain_ports)


def _explain_ports(module: Any) -> None:
    """Have torch's launcher, which ``accelerate.notebook_launcher`` uses, say what to write."""
    launch = module.launch_agent

    @functools.wraps(launch)
    def launch_agent(config: Any, entrypoint: Any, *args: Any, **options: Any) -> Any:
        try:
            return launch(config, entrypoint, *args, **options)
        except DistNetworkError as error:
            name = getattr(entrypoint, "__name__", "train")
            raise RuntimeError(
                f"the ranks are already running, and this launcher would start more processes on "
                f"each of them. Call {name}() directly, without the launcher ({error})"
            ) from None

    module.launch_agent = launch_agent


def _refuse_lightning(caller: str) -> None:
    """Refuse the strategies by which Lightning starts processes: in a rank they never end."""
    if caller.partition(".")[0] in _LIGHTNING:
        raise RuntimeError(
            "this Lightning strategy starts its own processes, but the ranks are already running. "
            'Use strategy="ddp" with devices=world_size'
        )


def let_cell_choose_start_method() -> None:
    """Let ``set_start_method`` be called once in this cell too; what was chosen stays chosen."""
    default: Any = context._default_context
    if default._actual_context is not None:
        default._default_context, default._actual_context = default._actual_context, None


def _main_is_a_file() -> bool:
    """Whether a spawned process can import ``__main__``, as when ``%run`` runs a script."""
    return getattr(sys.modules["__main__"], "__file__", None) is not None


class _ByValue(Pickler):
    """As multiprocessing pickles, and what was defined in ``__main__`` whole."""

    dispatch_table: ClassVar[ChainMap[Any, Any]] = ChainMap(
        vars(reduction.ForkingPickler)["_extra_reducers"], Pickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        """Have the new process know a class or function of a cell by its name.

        What it sends back, as a loader's worker does, it pickles by that name.
        """
        reduced = super().reducer_override(obj)
        is_cells = isinstance(obj, type | FunctionType) and obj.__module__ == "__main__"
        if not is_cells or not isinstance(reduced, tuple):
            return reduced
        make, arguments, *more = reduced
        return at_home, (make, obj.__qualname__, *arguments), *more


def _ending(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start_processes(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
        daemon: bool = False,  # noqa: FBT001, FBT002
        start_method: str = "spawn",
    ) -> Any:
        _refuse_lightning(sys._getframe(1).f_globals.get("__name__", ""))
        with _nothing_left_behind():
            try:
                started = original(fn, args, nprocs, False, daemon, start_method)  # noqa: FBT003
            except _UNSENDABLE as error:
                name = getattr(fn, "__name__", "this function")
                raise RuntimeError(
                    f"{name} cannot be sent to a new process ({error}); the ranks are here "
                    "already: call it with rank in place of the index"
                ) from error
            if not join:
                return started
            while not _joined(started):
                pass
        return None

    return start_processes


def _joined(started: Any) -> bool:
    try:
        return bool(started.join())
    except torch.multiprocessing.ProcessRaisedException as error:
        last = error.msg.rstrip().rpartition("\n")[2]
        if "--ranks 0" in last:
            raise RuntimeError(last.partition(": ")[2]) from None
        raise


@contextmanager
def _nothing_left_behind() -> Any:
    """Whatever ends the wait, such as an interrupt, ends what was started meanwhile."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        started = set(multiprocessing.active_children()) - before
        for child in started:
            child.terminate()
        for child in started:
            child.join(PATIENCE)
            if child.is_alive():
                child.kill()
        raise
