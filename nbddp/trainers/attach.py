"""Attach to the libraries, each after its import."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from nbddp.import_hooks import change_when_imported
from nbddp.trainers.reporting import enable, report

Reported = tuple[Mapping[str, Any], Any]  # values and step

# they write to TensorBoard what they have already reported
_REPORTING = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")


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
    """Make the libraries report, if :func:`~nbddp.trainers.reporting.enable` allows it."""
    change_when_imported("transformers.trainer", _add_transformers_callback)
    change_when_imported("accelerate.accelerator", _report_accelerator)
    for name in ("lightning.fabric.fabric", "lightning_fabric.fabric"):
        change_when_imported(name, _report_fabric)
    change_when_imported("torch.utils.tensorboard.writer", _report_tensorboard)


def _add_transformers_callback(trainer: Any) -> None:
    callback = importlib.import_module("nbddp.trainers.transformers_callback")
    trainer.DEFAULT_CALLBACKS.append(callback.NbddpCallback)


def _report_accelerator(module: Any) -> None:
    _report_calls(module.Accelerator, "log", lambda values, step=None, **_: (values, step))


def _report_fabric(module: Any) -> None:
    _report_calls(module.Fabric, "log_dict", lambda metrics, step=None: (metrics, step))


def _report_tensorboard(module: Any) -> None:
    def reported(tag: str, scalar_value: Any, global_step: Any = None, *_: Any) -> Reported:
        caller = sys._getframe(2).f_globals.get("__name__", "")
        is_reported = caller.partition(".")[0] in _REPORTING
        return {} if is_reported else {tag: scalar_value}, global_step

    _report_calls(module.SummaryWriter, "add_scalar", reported)


def _report_calls(owner: Any, name: str, reported: Callable[..., Reported]) -> None:
    """Report the arguments of each call of a method, after the call."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call_and_report(self: Any, *args: Any, **options: Any) -> Any:
        result = method(self, *args, **options)
        report(*reported(*args, **options))
        return result

    setattr(owner, name, call_and_report)
