"""The exercise whose answer is a function that trains a model on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from nbddp.course.grading import RIGHT, needs_ranks
from nbddp.train import this_rank
from nbddp.train.call_agreement import communication_device
from nbddp.train.collectives import all_gather

SHARE = 32  # training samples of each rank


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


@needs_ranks
def train_on_all_ranks(train: Any) -> str:
    """Check a function that trains for two epochs and counts the right test samples."""
    world_size, rank = this_rank.world_size(), this_rank.rank()
    train_set, test_set = _Samples(SHARE * world_size), _Samples(4 * world_size + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)  # the models begin unequal
        model = torch.nn.Linear(6, 2).to(communication_device())
    before = [each.tolist() for each in model.parameters()]
    counts = all_gather(train(model, train_set, test_set))
    weights = all_gather([each.tolist() for each in model.parameters()])
    if any(all_gather(weights[rank] == before)):
        return "The model is as before. Train it: the DDP wrapper keeps its parameters."
    if weights != [weights[0]] * world_size:
        return "The models of the ranks differ: call the model that DDP has wrapped."
    return _samples_hint(all_gather(train_set.asked)) or _count_hint(
        counts, _number_right(model, test_set), sum(map(len, all_gather(test_set.asked)))
    )


def _samples_hint(asked: list[list[int]]) -> str:
    """Return a hint if the samples that each rank trained on are not right."""
    number = SHARE * len(asked)
    for rank, samples in enumerate(asked):
        if len(samples) == 2 * number:
            return "Each rank trains on all samples: give the loader a sampler."
        if len(samples) != 2 * SHARE:
            return f"Rank {rank} uses {len(samples)} samples in two epochs, not {2 * SHARE}."
    epochs = [[samples[at : at + SHARE] for samples in asked] for at in (0, SHARE)]
    drawn = [sorted(each for samples in epoch for each in samples) for epoch in epochs]
    if drawn != [[*range(number)]] * 2:
        return "In an epoch, ranks share samples and miss others: all must draw the same order."
    if epochs[0] == epochs[1]:
        return "Both epochs have the same order: tell the sampler the epoch."
    return RIGHT


def _number_right(model: torch.nn.Module, samples: _Samples) -> int:
    with torch.no_grad():
        return int((model(samples.inputs).argmax(1) == samples.labels).sum())


def _count_hint(counts: list[Any], right: int, tested: int) -> str:
    """Return a hint if the counts that the ranks return are not right."""
    number = 4 * len(counts) + 1
    try:
        counts = [float(each) for each in counts]
    except (TypeError, ValueError):
        return "The function has to return a number: how many test samples are right."
    are_shares = tested == number and sum(counts) == right
    if are_shares or counts != [counts[0]] * len(counts):
        return "Each rank returns its own count: add up the counts of all ranks."
    if number < tested < number * len(counts):
        return "Some test samples are counted twice: `DistributedSampler` fills up the shares."
    if counts[0] == right:
        return RIGHT
    if counts[0] == right * len(counts) and tested == number * len(counts):
        return "Each rank counts all test samples: give each its own share of them."
    return f"{right} of the {number} test samples are right. Count samples, not batches or shares."
