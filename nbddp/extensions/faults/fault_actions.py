"""The effect of each kind of fault on its rank."""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbddp.extensions.faults.kinds import Fault
from nbddp.reporting import this_rank
from nbddp.reporting.training_objects import checkpoints, prepared_models

EXIT_CODE = 3
IMPOSSIBLE_BYTES = 1 << 56  # more than a process can address, so no memory is really allocated
FLIPPED = 64  # bytes in the middle of a file; the checksum must detect the change
COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
)


class FaultError(RuntimeError):
    """A fault of kind ``raise`` fired, or a fault found no target."""


class FaultAction:
    """The effect of a fault: one function call, or the effect of a subclass.

    A subclass finds its target before the fault fires.

    Raises:
        FaultError: this rank has no such target.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def fire(self) -> None:
        """Fire now; this does not return if the rank dies."""
        IMMEDIATE_FAULTS[self._fault.kind](self._fault)

    def on_step(self) -> None:
        """Called at each later step of this rank."""

    def begin_cell(self) -> None:
        """Called when another cell starts."""

    @property
    def is_waiting(self) -> bool:
        """Whether the fault has fired but waits for a target, such as the next collective."""
        return False

    def undo(self) -> None:
        """End the effect."""


# ---- immediate faults


def _raise(fault: Fault) -> None:
    raise FaultError(f"fault: {fault}")


def _hang(_fault: Fault) -> None:
    while True:
        time.sleep(3600)


def _allocate_too_much(_fault: Fault) -> None:
    torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8, device=this_rank.device())


IMMEDIATE_FAULTS: dict[str, Callable[[Fault], object]] = {
    "raise": _raise,
    "kill": lambda _fault: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda _fault: ctypes.string_at(0),
    "exit": lambda _fault: os._exit(EXIT_CODE),
    "hang": _hang,
    "stop": lambda _fault: os.kill(os.getpid(), signal.SIGSTOP),
    "oom": _allocate_too_much,
}


# ---- slow


class SlowAction(FaultAction):
    """Make every step ``factor`` times as long, by a sleep after the step."""

    def __init__(self, fault: Fault) -> None:
        self._factor = fault.factor
        self._step_start: float | None = None

    def fire(self) -> None:
        """Start the time of the first step."""
        self._step_start = time.monotonic()

    def on_step(self) -> None:
        """Prolong the step that has ended, then start the time of the next one."""
        if self._step_start is not None:
            time.sleep((time.monotonic() - self._step_start) * (self._factor - 1))
        self._step_start = time.monotonic()

    def begin_cell(self) -> None:
        """Discard the time between two cells."""
        self._step_start = None

    def undo(self) -> None:
        """Stop slowing down steps."""
        self._factor = 1.0


# ---- nan


class NanAction(FaultAction):
    """Replace the first gradient of the next backward by NaN."""

    def __init__(self, fault: Fault) -> None:
        self._parameters = [
            parameter
            for model in prepared_models
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        if not self._parameters:
            raise FaultError(
                f"fault: {fault} finds no prepared model on this rank; "
                "call nbddp.prepare(model) first"
            )
        self._handles: list[Any] = []

    def fire(self) -> None:
        """Hook all parameters: the first one of the next backward is unknown."""
        self._handles = [
            parameter.register_hook(self._poison)  # type: ignore[no-untyped-call, unused-ignore]
            for parameter in self._parameters
        ]

    @property
    def is_waiting(self) -> bool:
        """Whether no backward has followed."""
        return bool(self._handles)

    def _poison(self, gradient: torch.Tensor) -> torch.Tensor:
        self.undo()
        return gradient * float("nan")

    def undo(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._parameters = [], []


# ---- skip


class SkipAction(FaultAction):
    """Skip one collective on this rank: a torch.distributed function, or DDP's averaging.

    These are never skipped: a function that was imported by name before (``from
    torch.distributed import all_reduce``), a collective in a new process group after an interrupt,
    and ``send`` and ``recv``. DDP reduces in C++. A model that nbddp prepared therefore skips its
    averaging for one forward and backward, as with ``no_sync``: all buckets of that backward are
    skipped.
    """

    def __init__(self, fault: Fault) -> None:
        if not dist.is_initialized():
            raise FaultError(
                f"fault: {fault} finds no process group on this rank, so no collective to skip"
            )
        self._models = [
            model for model in prepared_models if isinstance(model, DistributedDataParallel)
        ]
        self._group = dist.group.WORLD
        self._replaced: list[tuple[Any, str, Any]] = []
        self._handles: list[Any] = []
        self._unsynced_model: DistributedDataParallel | None = None

    def fire(self) -> None:
        """Replace all collectives, to skip the next one."""
        for module in (dist, dist.distributed_c10d):
            for name in COLLECTIVES:
                if hasattr(module, name):  # the names depend on the torch version
                    function = getattr(module, name)
                    self._replaced.append((module, name, function))
                    setattr(module, name, self._replacement_for(function))
        for model in self._models:
            self._handles.append(model.register_forward_pre_hook(self._before_forward))
            self._handles.append(model.register_forward_hook(self._after_forward))

    def undo(self) -> None:
        """Restore torch's functions and the models' averaging."""
        for module, name, function in self._replaced:
            setattr(module, name, function)
        for handle in self._handles:
            handle.remove()
        self._restore_sync()
        self._replaced, self._handles, self._models = [], [], []

    @property
    def is_waiting(self) -> bool:
        """Whether no collective has followed."""
        return bool(self._replaced)

    def _replacement_for(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def skipped(*args: Any, **options: Any) -> Any:
            should_skip = bool(self._replaced) and self._is_same_group()
            self.undo()
            if not should_skip:
                return function(*args, **options)
            arguments = inspect.signature(function).bind(*args, **options).arguments
            return _finished_work() if arguments.get("async_op") else None

        return skipped

    def _is_same_group(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self._group

    def _before_forward(self, model: DistributedDataParallel, _args: Any) -> None:
        self._restore_sync()  # the previous forward may have raised before it ended
        will_average = torch.is_grad_enabled() and model.require_backward_grad_sync
        if will_average and self._is_same_group():
            model.require_backward_grad_sync = False  # DDP reads it in forward, not in backward
            self._unsynced_model = model

    def _after_forward(self, model: DistributedDataParallel, _args: Any, _output: Any) -> None:
        if self._unsynced_model is model:
            self.undo()

    def _restore_sync(self) -> None:
        if self._unsynced_model is not None:
            self._unsynced_model.require_backward_grad_sync = True
            # the next forward broadcasts buffers again
            self._unsynced_model.require_forward_param_sync = True
        self._unsynced_model = None


def _finished_work() -> Any:
    """Return a completed work handle, as of an asynchronous collective."""
    done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    done.set_result([])
    bindings: Any = torch._C._distributed_c10d  # type: ignore[attr-defined, unused-ignore]
    return bindings._create_work_from_future(done)


# ---- corrupt


class CorruptAction(FaultAction):
    """Flip bytes of the newest checkpoint."""

    def __init__(self, fault: Fault) -> None:
        newest = [path for each in checkpoints if (path := each.newest())]
        if not newest:
            raise FaultError(f"fault: {fault} finds no checkpoint; save one before that step")
        self._path = max(newest, key=lambda path: path.stat().st_mtime_ns)

    def fire(self) -> None:
        """Flip the bytes."""
        flip_bytes(self._path)


def flip_bytes(path: Path) -> None:
    """Flip bytes in the middle of a file, or of the largest file in a folder; sizes stay."""
    if path.is_dir():
        files = [each for each in sorted(path.rglob("*")) if each.is_file()]
        path = max(files, key=lambda each: each.stat().st_size)
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(max(0, (size - FLIPPED) // 2))
        data = file.read(FLIPPED)
        file.seek(-len(data), os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in data))
        file.flush()
        os.fsync(file.fileno())


# the kinds whose effect lasts, or needs a target
ACTION_CLASSES: dict[str, type[FaultAction]] = {
    "slow": SlowAction,
    "nan": NanAction,
    "skip": SkipAction,
    "corrupt": CorruptAction,
}
