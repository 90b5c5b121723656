"""The training of notebook 18's ``train.py``: an answer must not change it.

A test compares this file with the notebook.
"""

from __future__ import annotations

from itertools import starmap
from math import isclose

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nbddp.course.grading import RIGHT
from nbddp.course.survival_hook import checksum, describe_dropout, describe_optimizer
from nbddp.course.survival_trace import EPOCHS, N_STEPS, RANKS, Attempt, RankTrace, TracedStep

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


def hint_to_changes(attempt: Attempt, given: Attempt) -> str:
    """Compare the undisturbed run with the training of the given script."""
    for trace, expected in zip(attempt, given, strict=True):
        first, start = trace.steps[0], expected.steps[0]
        if first.weights != start.weights:
            return (
                "The net begins with other weights than that of the given script. Keep the layers, "
                "and `torch.manual_seed(0)` before them: it has to be the same training."
            )
        if list(first.dropout) != list(start.dropout):
            return f"The net has dropout of {first.dropout}, and the given one {start.dropout}."
        if first.optimizer != start.optimizer:
            return f"The optimizer is {first.optimizer}, and in the given script {start.optimizer}."
    pairs = (
        zip(*(t.steps for t in both), strict=True) for both in zip(attempt, given, strict=True)
    )
    for rank, steps in enumerate(pairs):
        found = starmap(_hint_to_step, steps)
        hint = next(((n, text) for n, text in enumerate(found, 1) if text), None)
        if hint:
            return f"In step {hint[0]} on rank {rank}, {hint[1]}"
    return RIGHT


def _hint_to_step(step: TracedStep, expected: TracedStep) -> str:
    if list(step.samples) != list(expected.samples):
        return (
            "the batch is not the one of the given script. Keep the dataset, its order, and the "
            "size of a batch."
        )
    if not isclose(step.rate, expected.rate, rel_tol=1e-9, abs_tol=1e-12):
        return (
            f"the learning rate is {step.rate:.3g}, and in the given script {expected.rate:.3g}. "
            "Keep the scheduler, and call it after each step."
        )
    return RIGHT
