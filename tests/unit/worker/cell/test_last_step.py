"""An interrupted cell ends after the same step on all ranks, or else at once, with the reason."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn import Linear, ReLU
from torch.nn.modules import module
from torch.optim import SGD

from nbddp.wire.rank_start import last_step_key
from nbddp.worker.cell import last_step
from nbddp.worker.cell.last_step import LastStep
from nbddp.worker.process_group.unfinished_steps import StepCounts


class Training:
    """Rank 0 of two ranks in a loop, whose control thread receives an interrupt."""

    def __init__(self, *, optimizers: int = 1, calls_model: bool = True) -> None:
        self.store = dist.HashStore()
        self.last_step = LastStep(self.store, 1, 0)
        self.last_step.raise_interrupt = self.raise_interrupt
        self.calls_model = calls_model
        self.optimizers = [SGD([torch.ones(1)]) for _ in range(optimizers)]
        self.model = Linear(1, 1)
        self.texts: list[str] = []
        self.steps = 0
        self.reason = "none"
        self.limits: list[float] = []

    def raise_interrupt(self, text: str) -> None:
        if text:
            self.texts.append(text)
            raise KeyboardInterrupt(text)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for optimizer in self.optimizers:
                if self.calls_model:
                    self.model(torch.ones(1))
                optimizer.step()
            ReLU()(torch.ones(1))  # a loss or a metric, which does not begin an iteration
            in_thread(lambda: self.model(torch.ones(1)))
            self.steps += 1

    def interrupt(self) -> None:
        self.last_step.begin_wait()
        self.reason = self.last_step.wait(1, [0, 1], self.limits.append, self.has_ended)
        self.last_step.is_awaited = False

    def has_ended(self, seconds: float) -> bool:
        time.sleep(seconds)
        return bool(self.texts)

    def other_rank_sets(self, name: object, value: str) -> None:
        self.store.set(last_step_key(1, 1, name), value)


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_step, "MIN_LIMIT", 0.3)


AFTER_2 = "after step 2 of this cell"


def in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def interrupted(training: Training, act: Callable[[], None]) -> None:
    control = threading.Thread(target=training.interrupt)
    control.start()
    act()
    control.join()


def wait_and_train(training: Training, steps: int) -> None:
    while not training.last_step._next:
        time.sleep(0.001)
    training.train(steps)


@pytest.mark.parametrize("calls_model", [True, False])
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize(("other", "last"), [("3", 4), ("4", 4), ("6", 6)])
def test_a_cell_ends_after_the_last_iteration_of_all_ranks(
    other: str, last: int, optimizers: int, *, calls_model: bool
) -> None:
    counts = StepCounts()
    training = Training(optimizers=optimizers, calls_model=calls_model)
    training.train(3)
    training.other_rank_sets(1, other)

    def go_on() -> None:
        with pytest.raises(KeyboardInterrupt, match=f"^after step {last} of this cell$"):
            wait_and_train(training, 9)

    interrupted(training, go_on)
    assert (training.reason, training.steps) == ("", last)
    assert {each.count for each in training.last_step._progress.values()} == {last}
    assert not counts.is_inside_step
    assert not module._has_any_global_hook()


@pytest.mark.parametrize("is_new_cell", [False, True])
def test_the_hook_of_forwards_goes_after_the_wait(*, is_new_cell: bool) -> None:
    training = Training(calls_model=False)
    training.train(1)
    training.other_rank_sets(1, "2")
    interrupted(training, lambda: wait_and_train(training, 1))
    assert training.reason == "a rank did not end its step within 0 s"
    assert module._has_any_global_hook()
    training.last_step.begin_cell() if is_new_cell else training.model(torch.ones(1))
    assert not module._has_any_global_hook()
    assert (training.texts, training.last_step.text) == ([], "" if is_new_cell else AFTER_2)


def test_a_stop_does_not_compile_a_model_again(recwarn: pytest.WarningsRecorder) -> None:
    training = Training()
    compiled: Any = torch.compile(training.model, backend="eager")
    training.model = compiled
    training.train(3)
    graphs = counters["stats"]["unique_graphs"]
    training.other_rank_sets(1, "4")

    def go_on() -> None:
        with pytest.raises(KeyboardInterrupt):
            wait_and_train(training, 9)

    interrupted(training, go_on)
    training.train(1)
    assert (training.steps, counters["stats"]["unique_graphs"]) == (5, graphs)
    assert not recwarn.list


def test_no_rank_goes_on_before_it_knows_the_last_step() -> None:
    training = Training()
    training.train(1)
    interrupted(training, lambda: training.train(9))
    assert training.steps == 10
    assert training.reason == "a rank did not end its step within 0 s"
    assert training.store.get(last_step_key(1, 1, 0)) == b"2"


def test_a_rank_without_steps_ends_the_wait_of_the_others() -> None:
    training = Training()
    training.interrupt()
    assert training.reason == ""
    end = last_step_key(1, 1, "end")
    assert training.store.get(end) == b"rank 0 was making no steps"
    training.train(1)
    training.interrupt()
    assert training.reason == "rank 0 was making no steps"
    training.train(1)
    time.sleep(0.4)
    training.interrupt()  # its last step was too long ago
    assert training.reason == ""


def test_uneven_steps_end_the_wait() -> None:
    training = Training(optimizers=2)
    training.train(1)
    for _ in range(2):
        training.optimizers[0].step()
    training.interrupt()
    assert training.reason == "the optimizers have made different numbers of steps"
    training = Training()
    training.train(1)
    training.other_rank_sets(1, "7")
    training.interrupt()
    assert training.reason == "the ranks have made different numbers of steps"


def test_a_rank_does_not_wait_for_one_that_has_ended() -> None:
    training = Training(calls_model=False)
    training.last_step.blocked_at = lambda: "a recv"
    training.train(2)
    training.other_rank_sets(1, "3")
    training.other_rank_sets("done", "")
    interrupted(training, lambda: wait_and_train(training, 1))
    assert (training.reason, training.texts) == ("after step 3 of this cell", [])
    assert not training.store.check([last_step_key(1, 1, "end")])


@pytest.mark.parametrize("another_has_ended", [True, False])
def test_a_rank_gets_more_time_if_another_one_has_ended_after_the_last_step(
    *, another_has_ended: bool
) -> None:
    training = Training(calls_model=False)
    training.train(2)
    training.other_rank_sets(1, "3")
    if another_has_ended:
        training.other_rank_sets("done", "")

    def go_on() -> None:
        wait_and_train(training, 1)
        time.sleep(1)  # a schedule, a slow loader
        with suppress(KeyboardInterrupt):
            training.model(torch.ones(1))

    interrupted(training, go_on)
    reason = "a rank did not end its step within 0 s"
    assert training.reason == ("" if another_has_ended else reason)
    assert training.store.check([last_step_key(1, 1, "done")]) == another_has_ended
    assert training.limits == [0.3, 10.0][: 1 + another_has_ended]


def test_a_stage_of_a_pipeline_ends_before_it_waits_for_its_input() -> None:
    class Schedule:
        def step(self, number: int) -> int:
            return number + 1

    training, schedule = Training(calls_model=False), Schedule()
    kinds = {
        "PipelineScheduleSingle": Schedule,
        "PipelineScheduleMulti": type("Multi", (Schedule,), {}),
    }
    training.last_step._watch_schedules(SimpleNamespace(**kinds))
    assert schedule.step(2) == 3
    training.train(2)
    training.other_rank_sets(1, "3")

    def go_on() -> None:
        wait_and_train(training, 1)
        with pytest.raises(KeyboardInterrupt, match=r"^after step 3 of this cell$"):
            schedule.step(3)

    interrupted(training, go_on)


def test_the_limit_is_two_steps_but_at_most_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    training = Training()
    training.train(2)
    [progress] = training.last_step._progress.values()
    progress.seconds = 4.0
    assert progress.limit == 8.0
    progress.seconds = 40.0
    assert progress.limit == 10.0
    monkeypatch.setattr(last_step, "MAX_LIMIT", 0.1)
    training.last_step.begin_wait()
    training.last_step.wait(1, [0, 1], limits.append, lambda _: True)
    assert limits == [0.1]


@pytest.mark.parametrize(("other", "last"), [("2", 2), ("1", 1), ("0", 0)])
def test_a_rank_without_steps_goes_on_if_another_one_makes_steps(other: str, last: int) -> None:
    training = Training()
    training.other_rank_sets(1, other)

    def go_on() -> None:
        own_key = last_step_key(1, 1, 0)
        while training.last_step.is_undecided or not training.store.check([own_key]):
            time.sleep(0.001)  # as in the signal handler
        if training.last_step.is_awaited:
            with pytest.raises(KeyboardInterrupt, match=f"^after step {last} of this cell$"):
                training.train(9)

    interrupted(training, go_on)
    assert (training.reason, training.steps) == ("", last)


@pytest.mark.parametrize("seconds", [0.0, 0.4])
def test_a_rank_inside_its_first_step_ends_it(seconds: float) -> None:
    training = Training()
    training.other_rank_sets(1, "0")
    training.last_step._begin_step(training.optimizers[0])
    time.sleep(seconds)  # more than the limit of a later step
    training.last_step.begin_wait()
    assert (training.last_step._next, training.last_step.is_undecided) == (1, False)


def test_a_step_does_not_begin_once_the_interrupt_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    training, counts = Training(), StepCounts()

    def raise_due(_: str) -> None:
        raise KeyboardInterrupt

    # torch keeps the hooks: they must raise nothing in the next test
    monkeypatch.setattr(training.last_step, "raise_interrupt", raise_due)
    in_thread(training.optimizers[0].step)  # of a thread, which no interrupt ends
    with pytest.raises(KeyboardInterrupt):
        training.train(1)
    assert not counts.is_inside_step
    assert [each.count for each in training.last_step._progress.values()] == [1]


def test_an_interrupt_does_not_wait_where_no_step_is_expected() -> None:
    training = Training()
    training.train(1)
    training.last_step.begin_wait()
    assert training.last_step.is_awaited
    time.sleep(0.4)
    training.last_step.begin_wait()
    assert not training.last_step.is_awaited
