"""A callback for the Trainer of Lightning, as ``lightning.pytorch`` or ``pytorch_lightning``.

Each of them calls the factory that the package metadata of nbddp names, in each new Trainer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from nbddp.extensions.trainers.reporting import StepReporter, add_trainer, is_enabled, report
from nbddp.extensions.trainers.training_data import data_facts


class NbddpCallback:
    """Reports the metrics that a module logs, and progress; a base class for both libraries."""

    def __init__(self) -> None:
        self._loop: StepReporter | None = None
        self._step = 0
        self._moments: dict[str, str] = {}  # when a metric is new, by its name

    def on_train_start(self, trainer: Any, _module: Any) -> None:
        """Show how far the training is."""
        is_bf16 = "bf16" in str(trainer.precision)
        data = data_facts(trainer.train_dataloader)
        add_trainer("Trainer", world_size=trainer.world_size, is_bf16=is_bf16, **data)
        total, first = trainer.estimated_stepping_batches, trainer.global_step
        size = getattr(trainer.train_dataloader, "batch_size", None) or 0
        self._loop = StepReporter(
            "fit",
            int(total) if math.isfinite(total) else 0,
            first=first,
            samples=size * trainer.accumulate_grad_batches * trainer.world_size,
        )
        self._step = first

    def on_train_batch_end(self, trainer: Any, _module: Any, *_: Any) -> None:
        """Report a step with its metrics; those on a GPU only as often as Lightning logs them."""
        step = trainer.global_step
        if self._loop is None or step == self._step:  # this batch only added gradients
            return
        self._step = step
        metrics = self._metrics(trainer, "batch")
        if step % trainer.log_every_n_steps and any(
            metric.device.type != "cpu" for metric in metrics.values()
        ):
            metrics = {}  # to read them would make the rank wait for the GPU
        rates = [group["lr"] for each in trainer.optimizers for group in each.param_groups]
        rate = {"learning_rate": rates[0]} if rates else {}
        self._loop.end_step(step, {**rate, "epoch": trainer.current_epoch, **metrics})

    def on_train_epoch_end(self, trainer: Any, _module: Any) -> None:
        """Report the metrics of an epoch."""
        report(self._metrics(trainer, "epoch"), trainer.global_step)

    def on_validation_end(self, trainer: Any, _module: Any) -> None:
        """Report the metrics of a validation."""
        if not trainer.sanity_checking:
            report(self._metrics(trainer, "validation"), trainer.global_step)
        if self._loop:
            self._loop.skip_pause()

    def on_test_end(self, trainer: Any, _module: Any) -> None:
        """Report the metrics of a test."""
        report(self._metrics(trainer, "test"), trainer.global_step)

    def on_train_end(self, *_: Any) -> None:
        """Close the bar."""
        if self._loop:
            self._loop.close()

    def _metrics(self, trainer: Any, moment: str) -> Mapping[str, Any]:
        """Return the metrics that are new at such moments: Lightning keeps all of them.

        The first moment at which a metric is there decides.
        """
        metrics = trainer.callback_metrics
        for name in metrics:
            self._moments.setdefault(name, moment)
        return {name: value for name, value in metrics.items() if self._moments[name] == moment}


def lightning_callbacks() -> list[Any]:
    """Return the callback for a Trainer of ``lightning.pytorch``, if trainers report here."""
    return _callbacks("lightning.pytorch")


def pytorch_lightning_callbacks() -> list[Any]:
    """Return the callback for a Trainer of ``pytorch_lightning``, if trainers report here."""
    return _callbacks("pytorch_lightning")


def _callbacks(library: str) -> list[Any]:
    base = sys.modules[library].Callback
    return [type("NbddpCallback", (NbddpCallback, base), {})()] if is_enabled() else []
