"""The project of notebook 2.7: replicas that take each step with those that are alive.

The judge goes through rounds. In each of them, the ranks that are not absent call ``step`` once.
Their parameters are compared with one process. A replica that returns is a new object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from nbddp.extensions.course.grading import judge, open_store, require, require_class, require_value
from nbddp.extensions.train.collectives import all_gather
from nbddp.reporting import this_rank

GOODPUT = 0.85  # a replica may compute nothing in the round in which it returns
LR, MOMENTUM = 0.1, 0.9


def _alive(first: Iterator[Sequence[int]], living: Sequence[int]) -> set[int]:
    """Return the replicas that seem alive: other ones in the first calls."""
    return {*next(first, living)}


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def _loss(model: nn.Module, rank: int, called: list[int], step: int) -> Any:
    """Note the step. Return the loss of a replica's samples of this step."""
    called.append(step)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x.prod(1, keepdim=True)).square().mean()


def _gradient(weights: Tensor, rank: int, step: int) -> Tensor:
    vector_to_parameters(weights, (model := _model(0)).parameters())
    loss = _loss(model, rank, [], step)
    return parameters_to_vector(torch.autograd.grad(loss, [*model.parameters()]))


@judge("2.7a", on_ranks=True)
def survive(replica_class: Any) -> None:
    """Judge ``class Replica`` by its parameters after each round, and by its goodput."""
    require_class(replica_class, "store", "rank", "model", "optimizer")
    rank, size, store = this_rank.rank(), this_rank.world_size(), open_store()
    right = parameters_to_vector(_model(0).parameters()).detach()
    momentum, due, kept, idle = torch.zeros_like(right), 0, 0, list[int]()
    absent = [None, None, size - 1, size - 1, None, 0, 0, size - 2, size - 2, None]
    rounds = [[each for each in range(size) if each != gone] for gone in absent]
    for at, living in enumerate(rounds):
        new = [each for each in living if at == 0 or each not in rounds[at - 1]]
        if rank in new:
            optimizer = torch.optim.SGD((model := _model(at)).parameters(), LR, MOMENTUM)
            replica = replica_class(store, rank, model, optimizer)
        called: list[int] = []
        if rank in living:
            alive = partial(_alive, iter([range(size)] * 3 * (rank % 2)), living)
            replica.step(alive, partial(_loss, model, rank, called))
        made = all_gather((called, parameters_to_vector(model.parameters()).detach()))
        facts = {"round": at + 1, "living": living, "due": due}
        gradients = {each: _gradient(right, each, due) for each in living if made[each][0]}
        for member in gradients:
            step, *more = made[member][0]
            mistake = "2.7a twice" if more else "2.7a again" if step < due else "2.7a skips"
            require(step == due and not more, mistake, rank=member, step=step, **facts)
        if not gradients:
            idle.append(at + 1)
            continue
        total = sum(gradients.values(), torch.zeros_like(right))
        mean, kept, due = total / len(gradients), kept + len(gradients), due + 1
        slow = MOMENTUM * momentum
        wrong = {"2.7a behind": 0 * right, "2.7a sum": slow + total, "2.7a optimizer": mean}
        wrong["2.7a world size"] = slow + total / size
        wrong["2.7a not zero"] = slow + mean + momentum  # the gradient of step 0, in step 1
        momentum = slow + mean
        for member in (*new, *living):
            wrong["2.7a own gradient"] = slow + gradients.get(member, mean)
            otherwise = "2.7a old state" if at and member in new else "2.7a other"
            changed = (right - made[member][1]) / LR
            require_value(changed, momentum, wrong, otherwise, rank=member, **facts)
        right = right - LR * momentum
    share = kept / sum(map(len, rounds))
    require(share >= GOODPUT, "2.7a goodput", share=share, goal=GOODPUT, idle=idle)
