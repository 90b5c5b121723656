"""Attach to the libraries, each after its import."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from nbddp.extensions.trainers.reporting import add_trainer, enable, report
from nbddp.import_hooks import change_when_imported

Values = Mapping[str, Any]

# these libraries report by themselves: their calls of the changed methods are not reported again
_REPORTING = (
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "transformers",
    "trl",
)


def report_trainers() -> None:
    """Report the metrics and progress of other people's trainers, as ranks of a notebook do.

    For a script under torchrun, before it makes its trainer. Works with Transformers, TRL,
    Lightning, Accelerate, and all that write to TensorBoard. See :func:`nbddp.log` for where the
    numbers go.

    >>> report_trainers()
    """
    enable()
    attach_to_libraries()


@functools.cache
def attach_to_libraries() -> None:
    """Make the libraries report, if ``trainers.reporting.enable`` allows it."""
    change_when_imported("transformers.trainer", _add_transformers_callback)
    change_when_imported("accelerate.accelerator", _change_accelerate)
    for name in ("lightning.fabric.fabric", "lightning_fabric.fabric"):
        change_when_imported(name, _report_fabric)
    change_when_imported("torch.utils.tensorboard.writer", _report_tensorboard)


def _add_transformers_callback(trainer: Any) -> None:
    callback = importlib.import_module("nbddp.extensions.trainers.transformers_callback")
    trainer.DEFAULT_CALLBACKS.append(callback.NbddpCallback)


def _change_accelerate(module: Any) -> None:
    _report_accelerator(module)
    _let_ranks_share_a_gpu(module)


def _report_accelerator(module: Any) -> None:
    def report_log(_accelerator: Any, values: Values, step: Any = None, *_: Any, **__: Any) -> None:
        report(values, step)

    def add_accelerator(accelerator: Any, *_: Any, **__: Any) -> None:
        if not _is_called_by_trainer():
            wants_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
            add_trainer(
                "Accelerator",
                world_size=accelerator.num_processes,
                is_bf16=accelerator.mixed_precision == "bf16",
                unused="FSDP" if wants_fsdp and accelerator.device.type == "cpu" else "",
            )

    _call_after(module.Accelerator, "log", report_log)
    _call_after(module.Accelerator, "prepare", add_accelerator)


def _let_ranks_share_a_gpu(module: Any) -> None:
    """Let Accelerate use a GPU that several ranks share.

    It takes the local rank for the number of the rank's GPU, in two places:
    ``wait_for_everyone`` and the ``device_ids`` of DDP (accelerate 1.15).
    """

    def with_number_of_gpu(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def call(this: Any, *args: Any, **options: Any) -> Any:
            # AcceleratorState copies the values of PartialState whenever it is constructed
            states = module.PartialState(), getattr(this, "state", this)
            local_rank, gpu = states[0].local_process_index, states[0].device
            if gpu.index in (None, local_rank):
                return method(this, *args, **options)
            for state in states:
                state.local_process_index = gpu.index
            try:
                return method(this, *args, **options)
            finally:
                for state in states:
                    state.local_process_index = local_rank

        setattr(owner, name, call)

    with_number_of_gpu(module.PartialState, "wait_for_everyone")
    with_number_of_gpu(module.Accelerator, "prepare_model")


def _report_fabric(module: Any) -> None:
    def report_metrics(_fabric: Any, metrics: Values, step: Any = None) -> None:
        report(metrics, step)

    def add_fabric(fabric: Any, *_: Any, **__: Any) -> None:
        add_trainer("Fabric", world_size=fabric.world_size)

    _call_after(module.Fabric, "log_dict", report_metrics)
    _call_after(module.Fabric, "setup", add_fabric)


def _report_tensorboard(module: Any) -> None:
    def report_scalar(
        _writer: Any, tag: str, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any
    ) -> None:
        if not _is_called_by_trainer():
            report({tag: scalar_value}, global_step)

    _call_after(module.SummaryWriter, "add_scalar", report_scalar)


def _call_after(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Call a function with the arguments of each call of a method, after the call."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call_and_act(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        act(*args, **options)
        return result

    setattr(owner, name, call_and_act)


def _is_called_by_trainer() -> bool:
    """Return whether a library that reports by itself has called the changed method."""
    caller_frame = sys._getframe(3)  # the frames in between are ours: act, call_and_act
    caller = caller_frame.f_globals.get("__name__", "")
    return caller.partition(".")[0] in _REPORTING
