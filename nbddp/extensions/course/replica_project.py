"""The project of notebook 2.7: replicas that take each step with those that are alive.

The judge goes through rounds. In each of them, the ranks that are not absent call ``step`` once.
Their parameters are compared with one process. A replica that returns is a new object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from nbddp.extensions.course.grading import is_close, judge, open_store, require, require_class
from nbddp.extensions.train.collectives import all_gather
from nbddp.reporting import this_rank

ROUNDS = 10
GOODPUT = 0.85  # a replica may compute nothing in the round in which it returns
LR, MOMENTUM = 0.1, 0.9


def _living(at: int, size: int) -> list[int]:
    """Return the ranks that are not absent in a round."""
    absences = [(size - 1, 2, 4), (0, 5, 7), (1, 7, 9)]  # rank, first round, return
    absent = {rank for rank, first, end in absences[:size] if first <= at < end}
    return sorted({*range(size)} - absent)


def _alive(living: Sequence[int], others: Sequence[int], calls: Iterator[int]) -> set[int]:
    """Return the replicas that seem alive: in the first calls, the absent others too."""
    return {*living, *(others if next(calls) < 3 else ())}


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def _loss(model: nn.Module, rank: int, called: list[int], step: int) -> Tensor:
    """Note the step. Return the loss of a replica's samples of this step."""
    called.append(step)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * step + rank))
    loss: Tensor = (model(x) - x.prod(1, keepdim=True)).square().mean()
    return loss


def _gradient(weights: Tensor, rank: int, step: int) -> Tensor:
    vector_to_parameters(weights, (model := _model(0)).parameters())
    loss = _loss(model, rank, [], step)
    return parameters_to_vector(torch.autograd.grad(loss, [*model.parameters()]))


@judge("2.7a", on_ranks=True)
def survive(replica_class: Any) -> None:
    """Judge ``class Replica`` by its parameters after each round, and by its goodput."""
    require_class(replica_class, "store", "rank", "model", "optimizer")
    rank, size, store = this_rank.rank(), this_rank.world_size(), open_store()
    model, due, kept, idle = _model(0), 0, 0, list[int]()
    right = parameters_to_vector(model.parameters()).detach()
    momentum, rounds = torch.zeros_like(right), [_living(at, size) for at in range(ROUNDS)]
    for at, living in enumerate(rounds):
        new = [each for each in living if at == 0 or each not in rounds[at - 1]]
        if rank in new:
            model = _model(at)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
            replica = replica_class(store, rank, model, optimizer)
        called: list[int] = []
        if rank in living:
            alive = partial(_alive, living, range(size) if rank % 2 else (), count())
            replica.step(alive, partial(_loss, model, rank, called))
        vector = parameters_to_vector(model.parameters()).tolist()
        calls, vectors = zip(*all_gather((called, vector)), strict=True)
        facts = {"round": at + 1, "living": living, "due": due}
        gradients = {each: _gradient(right, each, due) for each in living if calls[each]}
        for member in gradients:
            step, *more = calls[member]
            require(not more, "2.7a twice", rank=member, **facts)
            mistake = "2.7a again" if step < due else "2.7a skips"
            require(step == due, mistake, rank=member, step=step, **facts)
        if not gradients:
            idle.append(at + 1)
            continue
        total = sum(gradients.values(), torch.zeros_like(right))
        mean, kept, due = total / len(gradients), kept + len(gradients), due + 1
        updates = {"": MOMENTUM * momentum + mean, "2.7a behind": torch.zeros_like(right)}
        updates |= {"2.7a sum": MOMENTUM * momentum + total, "2.7a optimizer": mean}
        updates["2.7a world size"] = MOMENTUM * momentum + total / size
        for member in (*new, *living):
            alone = MOMENTUM * momentum + gradients.get(member, mean)
            changed = (right - torch.tensor(vectors[member])) / LR
            cases = (updates | {"2.7a own gradient": alone}).items()
            found = (name for name, update in cases if is_close(changed, update))
            mistake = next(found, "2.7a old state" if at and member in new else "2.7a other")
            require(not mistake, mistake, rank=member, **facts)
        momentum = updates[""]
        right = right - LR * momentum
    possible = sum(map(len, rounds))
    facts = {"kept": kept, "possible": possible, "share": kept / possible, "goal": GOODPUT}
    require(kept >= GOODPUT * possible, "2.7a goodput", idle=idle, **facts)
