"""Answers that are tried out, and need no ranks for it: right ones, and mistakes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def begin(loader, state):
    batches = iter(loader)
    torch.set_rng_state(state)
    return batches


def restored_too_soon(loader, state):
    torch.set_rng_state(state)
    return iter(loader)


def one_batch_taken(loader, state):
    batches = begin(loader, state)
    next(batches)
    return batches


class Server:
    """As notebook 14 has it, without a lock."""

    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.version, self.history, self.is_open = 0, [], True

    def push(self, trainer, version, gradients, loss):
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.history.append((trainer, self.version - version, loss))
        self.version += 1
        return self.is_open


def refusing(*, above: int, says: Any = True, notes: bool = False) -> type[Server]:
    """A server that refuses, and what it does then."""

    class Strict(Server):
        def push(self, trainer, version, gradients, loss):
            if self.version - version <= above:
                return super().push(trainer, version, gradients, loss)
            if notes:
                self.history.append((trainer, self.version - version, loss))
            return says

    return Strict


LINES = """
if rank == 5:
    dist.all_reduce(x){}
    dist.all_reduce(y){}
"""
OK = "  # nbddp: ok ND101"
RIGHT: dict[str, list[tuple[Any, ...]]] = {
    "03.3": [(1.0078125,), (1 + 2**-7,)],
    "04.1": [(begin,)],
    "04.2": [({1, 2},), ([1, 2],), ((2, 1, 2),), ({"1", "2"},)],
    "06.2": [(0.3, 1.2), (1.18, 10.36)],
    "10.1": [(LINES.format(OK, ""),), (LINES.format("  #nbddp: ok ND101, ND102", ""),)],
    "12.3": [
        (lambda rank: range(rank // 8 * 8, rank // 8 * 8 + 8),),
        (lambda rank: torch.arange(64).view(8, 8)[rank // 8].tolist(),),
        (lambda rank: torch.arange(64).view(8, 8)[rank // 8],),
    ],
    "14.1": [(refusing(above=4),)],
}
WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "03.3": {
        "fp32's": (1 + 2**-23,),
        "fp16's": (1 + 2**-10,),
        "half of it": (1 + 2**-8,),
        "one": (1,),
        "no number": ("more",),
    },
    "04.1": {
        "restored too soon": (restored_too_soon,),
        "one batch taken": (one_batch_taken,),
        "the loader": (lambda *given: given[0],),
        "nothing": (lambda *_: None,),
        "no function": (3,),
    },
    "04.2": {
        "the older alone": ({1},),
        "the newer alone": ({2},),
        "none": (set(),),
        "one that is not there": ({0, 1},),
        "a number": (1,),
        "text": ("12",),
    },
    "06.2": {
        "cheaper": (1.2, 0.3),
        "the same": (0.3, 0.3),
        "nothing": (0, 0.3),
        "no number": (None, 0.3),
        "true": (0.3, True),
        "not a number": (float("nan"), 1.0),
    },
    "10.1": {
        "as before": (LINES.format("", ""),),
        "another rule": (LINES.format("  # nbddp: ok ND102", ""),),
        "the other line": (LINES.format("", OK),),
        "both lines": (LINES.format(OK, OK),),
        "a line of its own": ("# nbddp: ok ND101\n" + LINES.format("", ""),),
        "other lines": ("dist.all_reduce(x)",),
        "no Python": ("if rank == 5",),
        "a number": (5,),
    },
    "12.3": {
        "a rank of each machine": (lambda rank: range(rank % 8, 64, 8),),
        "without itself": (lambda rank: [each for each in range(8) if each != rank],),
        "itself alone": (lambda rank: [rank],),
        "the machine": (lambda rank: rank // 8,),
        "text": (lambda rank: [str(rank)],),
        "no function": (3,),
    },
    "14.1": {
        "never refuses": (Server,),
        "refuses above 5": (refusing(above=5),),
        "refuses above 3": (refusing(above=3),),
        "notes what it refuses": (refusing(above=4, notes=True),),
        "answers nothing": (refusing(above=4, says=None),),
        "a server, not the class": (refusing(above=4)(),),
        "another class": (dict,),
    },
}
