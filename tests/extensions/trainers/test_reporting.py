"""The reports of other people's trainers, with libraries of a few lines."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sinks import Recorder
from typed import RUNS, Run, Typed

from nbddp.extensions.trainers import attach, reporting
from nbddp.extensions.trainers.lightning_callback import NbddpCallback
from nbddp.extensions.trainers.reporting import StepReporter, report


@pytest.fixture
def sink(recorder: Recorder) -> Iterator[Recorder]:
    reporting.begin_cell(is_enabled=True)
    yield recorder
    reporting.begin_cell(is_enabled=False)


def rows(sink: Recorder) -> list[Any]:
    return [each for each in sink.calls if isinstance(each[1], dict)]


@pytest.mark.parametrize(
    ("step", "expected"), [(3, 3), (None, 7), (torch.tensor(4), 4), (2.0, 2)], ids=repr
)
def test_numbers_are_reported_with_their_step(sink: Recorder, step: Any, expected: int) -> None:
    values = {"loss": torch.tensor(0.5), "note": "x", "ok": True, "step": 7, "all": torch.ones(2)}
    report(values, step)
    assert rows(sink) == [(expected, {"loss": 0.5})]


def test_nothing_is_reported_if_there_is_no_number_or_if_it_is_off(sink: Recorder) -> None:
    report({"note": "x"}, 1)
    reporting.enable(False)
    report({"loss": 1.0}, 1)
    StepReporter("train", 10).end_step(1)
    assert (rows(sink), sink.bars) == ([], [])


def test_steps_of_a_resumed_training_fill_a_bar_of_the_remaining_steps(sink: Recorder) -> None:
    steps = StepReporter("train", 10, first=6, samples=8)
    steps.end_step(7, {"loss": 2.0})
    [bar] = sink.bars
    assert (bar.label, bar.total, bar.done, bar.is_open) == ("train", 4, 1, True)
    [(step, values)] = rows(sink)
    assert (step, values.keys()) == (7, {"samples_per_second", "loss"})
    steps.close()
    assert not bar.is_open


class Accelerator:
    num_processes = 1
    mixed_precision = "bf16"
    device = torch.device("cpu")

    def log(self, values: dict[str, Any], step: int | None = None) -> str:
        if "bad" in values:
            raise ValueError("bad")
        return f"logged {len(values)} at {step}"

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        return objects


def test_calls_of_a_library_are_reported_and_return_what_they_did(sink: Recorder) -> None:
    library: Any = ModuleType("accelerate.accelerator")
    library.Accelerator = type("Accelerator", (Accelerator,), {})
    attach._report_accelerator(library)
    assert library.Accelerator().log({"loss": 0.5}, step=2) == "logged 1 at 2"
    with pytest.raises(ValueError, match="bad"):
        library.Accelerator().log({"bad": 1.0})
    assert rows(sink) == [(2, {"loss": 0.5})]


def test_trainer_without_the_group_warns_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("accelerate.accelerator")
    library.Accelerator = type("Accelerator", (Accelerator,), {})
    attach._report_accelerator(library)
    prepare = library.Accelerator().prepare
    exec("prepare()", {"prepare": prepare, "__name__": "transformers.trainer"})
    assert reporting.trainers_of_cell() == {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"Accelerator trains alone on each of the 2 ranks.*ND218"):
        assert prepare(1, 2) == (1, 2)
    facts = {"world_size": 1, "is_bf16": True, "unused": ""}
    assert reporting.trainers_of_cell() == {"Accelerator": facts}
    reporting.begin_cell(is_enabled=False)
    assert reporting.trainers_of_cell() == {}


@pytest.mark.parametrize(
    ("device", "passed"), [("cuda:0", 0), ("cuda:3", 3), ("cpu", 3)], ids=["shared", "own", "cpu"]
)
def test_accelerate_uses_the_gpu_that_ranks_share(device: str, passed: int) -> None:
    seen = []
    shared = {"local_process_index": 3, "device": torch.device(device)}

    class State:
        local_process_index: int

        def __init__(self) -> None:
            self.__dict__ = shared

        def wait_for_everyone(self) -> None:
            seen.append(self.local_process_index)

    class Accelerator:
        state = SimpleNamespace()

        def prepare_model(self, model: str) -> str:
            self.state.__dict__.update(shared)
            seen.append(self.state.local_process_index)
            return model

    attach._let_ranks_share_a_gpu(SimpleNamespace(PartialState=State, Accelerator=Accelerator))
    assert Accelerator().prepare_model("model") == "model"
    State().wait_for_everyone()
    assert seen == [passed, passed]
    assert shared["local_process_index"] == 3


def test_tensorboard_is_reported_unless_a_trainer_writes_to_it(sink: Recorder) -> None:
    class SummaryWriter:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int = 0) -> None:
            pass

    attach._report_tensorboard(SimpleNamespace(SummaryWriter=SummaryWriter))
    SummaryWriter().add_scalar("loss", 0.5, global_step=3)
    exec("write('loss', 0.5, 4)", {"write": SummaryWriter().add_scalar, "__name__": "lightning.x"})
    assert rows(sink) == [(3, {"loss": 0.5})]


def test_lightning_metrics_are_reported_at_the_moments_at_which_they_are_new(
    sink: Recorder,
) -> None:
    trainer = SimpleNamespace(
        estimated_stepping_batches=float("inf"),
        global_step=0,
        train_dataloader=SimpleNamespace(batch_size=4),
        accumulate_grad_batches=1,
        world_size=2,
        precision="32-true",
        log_every_n_steps=50,
        optimizers=[SimpleNamespace(param_groups=[{"lr": 0.1}])],
        current_epoch=0,
        sanity_checking=False,
        callback_metrics={},
    )
    callback = NbddpCallback()
    callback.on_train_start(trainer, None)
    assert sink.bars[0].total == 0
    callback.on_train_batch_end(trainer, None)  # only adds gradients
    trainer.global_step, trainer.callback_metrics = 1, {"loss": torch.tensor(0.5)}
    callback.on_train_batch_end(trainer, None)
    trainer.callback_metrics |= {"val_loss": torch.tensor(0.25)}
    callback.on_validation_end(trainer, None)
    trainer.global_step = 2
    callback.on_train_batch_end(trainer, None)
    trainer.callback_metrics |= {"loss_epoch": torch.tensor(0.75)}
    callback.on_train_epoch_end(trainer, None)
    callback.on_train_end(trainer, None)
    for _, values in rows(sink):
        values.pop("samples_per_second", 0.0)
    training = {"learning_rate": 0.1, "epoch": 0.0, "loss": 0.5}
    assert rows(sink) == [
        (1, training),
        (1, {"val_loss": 0.25}),
        (2, training),
        (2, {"loss_epoch": 0.75}),
    ]
    assert not sink.bars[0].is_open


def test_lightning_gets_a_callback_only_where_trainers_report(
    sink: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbddp.extensions.trainers.lightning_callback import lightning_callbacks

    library: Any = ModuleType("lightning.pytorch")
    library.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning.pytorch", library)
    [callback] = lightning_callbacks()
    assert isinstance(callback, library.Callback)
    assert isinstance(callback, NbddpCallback)
    reporting.enable(False)
    assert lightning_callbacks() == []
    assert rows(sink) == []


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_ranks_of_a_cell_or_a_script_can_leave_out_trainers(typed: Typed, run: Run) -> None:
    run(typed, "--no-trainer-metrics")
    assert typed.asked()[0].options == {"trainers": {"no_trainer_metrics": True}}
