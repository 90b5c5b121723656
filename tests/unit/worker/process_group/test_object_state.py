"""The state of one rank's optimizer, schedule or scaler is copied to another rank."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules

from nbddp.worker.process_group.object_state import (
    describe_state,
    load_state,
    state_from_description,
    state_of,
    tensors_in,
)

PLAIN = "Adadelta Adafactor Adagrad Adamax ASGD LBFGS Muon NAdam RAdam Rprop"
OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.1, amsgrad=True),
    "adamw": partial(AdamW, lr=torch.tensor(0.1), foreach=False),
    "fused": partial(AdamW, lr=0.1, fused=True),
    "rmsprop": partial(optim.RMSprop, centered=True, momentum=0.5),
    **{name: getattr(optim, name) for name in PLAIN.split()},
}
SCHEDULES = {
    "constant": schedules.ConstantLR,
    "cosine": partial(schedules.CosineAnnealingLR, T_max=5),
    "warm": partial(schedules.CosineAnnealingWarmRestarts, T_0=2),
    "cyclic": partial(schedules.CyclicLR, base_lr=0.1, max_lr=0.5, cycle_momentum=False),
    "exponential": partial(schedules.ExponentialLR, gamma=0.5),
    "lambda": partial(schedules.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch),
    "linear": schedules.LinearLR,
    "milestones": partial(schedules.MultiStepLR, milestones=[1, 3]),
    "multiplicative": partial(schedules.MultiplicativeLR, lr_lambda=lambda _: 0.5),
    "one cycle": partial(schedules.OneCycleLR, max_lr=0.5, total_steps=20, cycle_momentum=False),
    "plateau": partial(schedules.ReduceLROnPlateau, patience=0),
    "polynomial": schedules.PolynomialLR,
    "sequential": lambda one: schedules.SequentialLR(
        one, [schedules.ConstantLR(one), schedules.StepLR(one, 1)], [2]
    ),
    "step": partial(schedules.StepLR, step_size=1),
}


class Rank:
    """A model on one rank, with what trains it."""

    def __init__(self, make: Any, schedule: Any = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2, bias=make is not optim.Muon)
        self.optimizer = make(self.model.parameters())
        self.schedule = schedule and schedule(self.optimizer)

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    def train(self, steps: int) -> Rank:
        for _ in range(steps):
            self.optimizer.step(self.loss)
            if isinstance(self.schedule, schedules.ReduceLROnPlateau):
                self.schedule.step(1.0)
            elif self.schedule is not None:
                self.schedule.step()
        return self

    def parts(self) -> list[Any]:
        return [self.optimizer, *([] if self.schedule is None else [self.schedule])]


def bring(source: Any, other: Any) -> None:
    """Do what ranks do together: the other one gets the source's state."""
    state = state_from_description(other, describe_state(source), torch.device("cpu"))
    filled = zip(tensors_in(state), tensors_in(state_of(source)), strict=True)
    for tensor, told in filled:
        assert (tensor.shape, tensor.dtype) == (told.shape, told.dtype)
        tensor.copy_(told)
    load_state(other, state)


def assert_goes_on(source: Rank, other: Rank) -> None:
    other.model.load_state_dict(source.model.state_dict())
    for part, theirs in zip(source.parts(), other.parts(), strict=True):
        bring(part, theirs)
    states = [[each.state_dict() for each in rank.parts()] for rank in (source, other)]
    assert str(states[0]) == str(states[1])
    source.train(2), other.train(2)
    for parameter, theirs in zip(source.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(parameter, theirs)


@pytest.mark.parametrize(("source", "other"), [(0, 2), (2, 0), (2, 3), (3, 2), (2, 2)])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_with_transferred_state_continues_like_the_source(
    make: Any, source: int, other: int
) -> None:
    assert_goes_on(Rank(make).train(source), Rank(make).train(other))


@pytest.mark.parametrize(("source", "other"), [(0, 2), (2, 0), (2, 3), (3, 2)])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_scheduler_with_transferred_state_continues_like_the_source(
    schedule: Any, source: int, other: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # SequentialLR's own, before its first step
        ranks = [Rank(partial(SGD, lr=0.1), schedule).train(steps) for steps in (source, other)]
        assert_goes_on(*ranks)


def test_a_scaler_with_transferred_state_continues_like_the_source() -> None:
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 4.0, 2.0)]
    scalers[2].scale(torch.ones(1))  # it has a tensor now, and the others have none
    for one, other in ((0, 1), (1, 2)):
        bring(scalers[one], scalers[other])
    assert [each.get_scale() for each in scalers] == [8.0] * 3


def test_matching_tensors_and_shared_dicts_of_an_optimizer_are_updated_in_place() -> None:
    source, other = (Rank(partial(SGD, lr=0.1, momentum=0.9)).train(1) for _ in range(2))
    other.optimizer.param_groups[0]["lr"] = 7.0

    def held() -> list[int]:
        groups, state = other.optimizer.param_groups, other.optimizer.state
        buffers = [each["momentum_buffer"] for each in state.values()]
        return [*map(id, (groups, groups[0], state, *buffers))]

    before = held()
    bring(source.optimizer, other.optimizer)
    assert held() == before
    assert other.optimizer.param_groups[0]["lr"] == 0.1


def test_other_optimizer_state_is_kept_if_all_ranks_have_it() -> None:
    def odd(value: object) -> Optimizer:
        optimizer: Optimizer = Rank(partial(SGD, lr=0.1)).optimizer
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter] = {"history": value, 7: "number"}
        return optimizer

    first, second = {1}, {2}
    bring(odd(first), other := odd(second))
    assert all(entry["history"] is second for entry in other.state.values())
    with pytest.raises(TypeError, match="a set in them cannot be sent"):
        bring(odd(first), Rank(partial(SGD, lr=0.1)).optimizer)
    bring(Rank(partial(SGD, lr=0.1)).optimizer, other)
    assert not other.state
