"""The exercise whose answer is a function that trains a model on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.data import Dataset

from nbddp.extensions.course.grading import is_close, judge, require, require_function
from nbddp.extensions.train.collectives import all_gather
from nbddp.reporting import this_rank
from nbddp.reporting.this_rank import communication_device

SHARE = 32  # training samples of each rank
BATCH_SIZE = 4  # on each rank


class _Samples(Dataset[Any]):
    """Labelled vectors that record which of them are asked for."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.inputs = torch.randn(number, 6, generator=generator).to(communication_device())
        self.labels = (self.inputs.sum(1) > 0).long()
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked += torch.arange(len(self))[index].reshape(-1).tolist()
        return self.inputs[index], self.labels[index]


class _Model(torch.nn.Linear):
    """A layer that records the mode of each forward pass, as dropout or batch norm would show."""

    def __init__(self) -> None:
        super().__init__(6, 2)
        self.is_training: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_training.append(self.training)
        return super().forward(x)


@judge("1.4b", on_ranks=True)
def train_on_all_ranks(train: Any) -> None:
    """Judge a function that trains for two epochs and counts the right test samples."""
    require_function(train)
    world_size, rank = this_rank.world_size(), this_rank.rank()
    train_set, test_set = _Samples(SHARE * world_size), _Samples(4 * world_size + 1)
    torch.manual_seed(rank)  # the models begin unequal
    model = _Model().to(communication_device())
    before = [each.tolist() for each in model.parameters()]
    counts = all_gather(train(model, train_set, test_set))
    weights = all_gather([each.tolist() for each in model.parameters()])
    require(not any(all_gather(weights[rank] == before)), "1.4b not trained")
    require(weights == [weights[0]] * world_size, "1.4b models differ")
    asked = all_gather(train_set.asked)
    _judge_samples(asked)
    _judge_weights(weights[0], all_gather(before), train_set, asked)
    steps = 2 * SHARE // BATCH_SIZE
    modes = model.is_training
    require(all(modes[:steps]) and not any(modes[steps:]), "1.4b mode")
    with torch.no_grad():
        right = int((model(test_set.inputs).argmax(1) == test_set.labels).sum())
    _judge_counts(counts, right, sum(map(len, all_gather(test_set.asked))))


def _judge_samples(asked: list[list[int]]) -> None:
    """Judge which samples each rank has trained on."""
    number = SHARE * len(asked)
    for rank, samples in enumerate(asked):
        require(len(samples) != 2 * number, "1.4b all samples")
        right = 2 * SHARE
        require(len(samples) == right, "1.4b samples", rank=rank, got=len(samples), right=right)
    epochs = [[samples[at : at + SHARE] for samples in asked] for at in (0, SHARE)]
    drawn = [sorted(each for samples in epoch for each in samples) for epoch in epochs]
    require(drawn == [[*range(number)]] * 2, "1.4b shared samples")
    require(epochs[0] != epochs[1], "1.4b same order")


def _judge_weights(
    weights: Sequence[Any], starts: Sequence[Any], train_set: _Samples, asked: list[list[int]]
) -> None:
    """Train again, with the samples that the ranks asked for, and compare the weights."""
    batches = torch.tensor(asked).view(len(asked), -1, BATCH_SIZE).transpose(0, 1).flatten(1)
    trained = []
    for start in starts:  # all ranks have begun with the weights of one of them
        weight, bias = (torch.tensor(each, requires_grad=True) for each in start)
        optimizer = torch.optim.SGD([weight, bias], lr=0.1)
        for indices in batches:
            optimizer.zero_grad()
            outputs = linear(train_set.inputs[indices].cpu(), weight, bias)
            loss = cross_entropy(outputs, train_set.labels[indices].cpu())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        trained.append((weight, bias))
    theirs = [torch.tensor(each) for each in weights]
    is_right = any(
        is_close(theirs[0], weight) and is_close(theirs[1], bias) for weight, bias in trained
    )
    require(is_right, "1.4b other weights")


def _judge_counts(counts: list[Any], right: int, tested: int) -> None:
    """Judge the counts that the ranks return; together they have tested so many samples."""
    number, world_size = 4 * len(counts) + 1, len(counts)
    try:
        counts = [float(each) for each in counts]
    except (TypeError, ValueError):
        counts = []
    require(counts, "1.4b no number")
    is_share = tested == number and sum(counts) == right
    require(not is_share and counts == [counts[0]] * world_size, "1.4b own count")
    require(not number < tested < number * world_size, "1.4b counted twice")
    require(tested < number * world_size, "1.4b all on each")
    require(counts[0] == right, "1.4b other count", right=right, number=number)
