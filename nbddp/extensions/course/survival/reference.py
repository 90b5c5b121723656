"""The training of notebook 2.6's ``train.py``: an answer must not change it.

A test compares this file with the notebook.
"""

from __future__ import annotations

from math import isclose

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nbddp.extensions.course.grading import require
from nbddp.extensions.course.survival.hook import checksum, describe_dropout, describe_optimizer
from nbddp.extensions.course.survival.trace import (
    EPOCHS,
    N_STEPS,
    RANKS,
    Attempt,
    RankTrace,
    TracedStep,
)

BATCH_SIZE = 16


def make_dataset() -> TensorDataset:
    points = torch.randn(640, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points[:, :5].argmax(dim=1))


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))


def given_training() -> list[RankTrace]:
    """Return the steps of the given script: batches, learning rates, and the net at the start."""
    with torch.random.fork_rng(devices=[]):
        net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=N_STEPS)
    start = checksum(net.state_dict().values())
    rates = []
    for _ in range(N_STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return [
        RankTrace(
            steps=[
                TracedStep(
                    samples=samples,
                    weights=start,
                    rate=rate,
                    dropout=describe_dropout(net),
                    optimizer=describe_optimizer(optimizer),
                )
                for samples, rate in zip(_samples_of(rank), rates, strict=True)
            ]
        )
        for rank in range(RANKS)
    ]


def _samples_of(rank: int) -> list[list[int]]:
    """Return the checksums of the samples in each batch of a rank."""
    dataset = make_dataset()
    sampler: DistributedSampler[int] = DistributedSampler(dataset, num_replicas=RANKS, rank=rank)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler, generator=torch.Generator())
    found = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        found += [[checksum([row]) for row in points] for points, _ in loader]
    return found


def judge_changes(attempt: Attempt, given: Attempt) -> None:
    """Compare the undisturbed run with the training of the given script."""
    for trace, expected in zip(attempt, given, strict=True):
        got, right = trace.steps[0], expected.steps[0]
        require(got.weights == right.weights, "2.6a other start")
        _require_equal(list(got.dropout), list(right.dropout), "2.6a other dropout")
        _require_equal(got.optimizer, right.optimizer, "2.6a other optimizer")
    for rank, both in enumerate(zip(attempt, given, strict=True)):
        pairs = zip(*(trace.steps for trace in both), strict=True)
        for step, (got, right) in enumerate(pairs, 1):
            is_same = list(got.samples) == list(right.samples)
            require(is_same, "2.6a other batch", step=step, rank=rank)
            is_same = isclose(got.rate, right.rate, rel_tol=1e-9, abs_tol=1e-12)
            rates = {"got": got.rate, "right": right.rate}
            require(is_same, "2.6a other rate", step=step, rank=rank, **rates)


def _require_equal(got: object, right: object, mistake: str) -> None:
    require(got == right, mistake, got=got, right=right)
