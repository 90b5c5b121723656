"""A callback for the Trainer of Transformers, and so for the trainers of TRL.

Transformers gives each Trainer the callbacks of ``transformers.trainer.DEFAULT_CALLBACKS``.
"""

# ruff: noqa: ARG002 - Transformers passes all of them

from __future__ import annotations

import re
from typing import Any

from transformers.trainer_callback import TrainerCallback

from nbddp.extensions.trainers.reporting import StepReporter, add_trainer, report
from nbddp.extensions.trainers.training_data import data_facts
from nbddp.reporting.log_and_track import length_of

# totals of a whole training or evaluation, which make no curve
_TOTALS = re.compile(r"_runtime$|_steps_per_second$|_preparation_time$|^total_flos$")


class NbddpCallback(TrainerCallback):  # type: ignore[misc]
    """Reports metrics under the names that Transformers gives them, and progress."""

    def __init__(self) -> None:
        self._training: StepReporter | None = None
        self._evaluation: StepReporter | None = None
        self._batches = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Show how far the training is."""
        name = re.sub(r"(TrainingArguments|Config)$", "Trainer", type(args).__name__)
        asked = "FSDP" if args.fsdp else "DeepSpeed" if args.deepspeed else ""
        add_trainer(
            name,
            world_size=args.world_size,
            gpus=args.n_gpu if args.n_gpu > 1 else 0,
            is_bf16=args.bf16,
            unused=asked if args.device.type == "cpu" else "",
            **data_facts(train_dataloader),
        )
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._training = StepReporter(
            "train", state.max_steps, first=state.global_step, samples=samples
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step and its speed."""
        if self._training:
            self._training.end_step(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Report metrics."""
        values = {name: value for name, value in (logs or {}).items() if not _TOTALS.search(name)}
        report(values, state.global_step)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any
    ) -> None:
        """Show how far the evaluation or the prediction is."""
        if self._evaluation is None:
            self._evaluation = StepReporter("evaluate", length_of(eval_dataloader) or 0)
            self._batches = 0
        self._batches += 1
        self._evaluation.show(self._batches)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the bar of the evaluation."""
        if self._evaluation:
            self._evaluation.close()
            self._evaluation = None
        self._skip_pause()

    on_predict = on_evaluate

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the time for the checkpoint out of the speed."""
        self._skip_pause()

    def _skip_pause(self) -> None:
        if self._training:
            self._training.skip_pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the bar of the training."""
        if self._training:
            self._training.close()
