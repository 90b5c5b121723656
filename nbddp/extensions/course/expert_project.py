"""The exercise of notebook 4.4: a layer whose experts are on different ranks."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from nbddp.extensions.course.grading import (
    is_close,
    judge,
    require,
    require_class,
    require_double,
    require_value,
)
from nbddp.extensions.memory.traffic import Traffic
from nbddp.extensions.train.collectives import all_gather
from nbddp.reporting import this_rank

EACH, WIDTH = 3, 24  # experts of a rank, numbers of a token
UNLIMITED, SLACK = 1000, 1.2  # of the bytes: counts are sent, too


def _batch(rank: int, *, is_even: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's tokens, the numbers of two experts for each, and their weights.

    All loads are equal; or rank 0 has no token, and the experts of the last rank get none.
    """
    generator, experts = torch.Generator().manual_seed(rank), EACH * this_rank.world_size()
    count = experts if is_even else 4 * rank
    weights, choices = torch.rand(count, experts - EACH, generator=generator).double().topk(2)
    if is_even:
        choices = (torch.arange(count)[:, None] + torch.tensor([rank, rank + 1])) % experts
    tokens = torch.randn(count, WIDTH, generator=generator).double()
    return tokens.requires_grad_(), choices, weights.requires_grad_()


def _compute(experts: nn.ModuleList, capacity: int, *batch: Tensor) -> tuple[Tensor, int]:
    """Return the output of a rank, computed in one process, and the number of used choices."""
    tokens, choices, weights = batch
    chosen = one_hot(choices.flatten(), len(experts))
    kept = ((chosen.cumsum(0) * chosen).sum(1) <= capacity).view_as(choices)
    output = torch.zeros_like(tokens)
    for at, expert in enumerate(experts):
        output = output + ((choices == at) * kept * weights).sum(1, keepdim=True) * expert(tokens)
    return output, int(kept.sum())


def _gradients(tensors: Sequence[Tensor]) -> Tensor:
    """Return the gradients in one tensor; a missing one is zero."""
    return torch.cat([(t * 0 if t.grad is None else t.grad).flatten() for t in tensors])


@judge("4.4a", on_ranks=True)
def my_experts(given: Any) -> None:
    """Judge ``class MyExperts``."""
    require_class(given, "experts", "capacity", base=nn.Module)
    _judge_loads(given, UNLIMITED, "4.4a equal loads", is_even=True)
    _judge_loads(given, UNLIMITED, "4.4a unequal loads", is_even=False)
    _judge_loads(given, 1, "4.4a other capacity", is_even=True)


def _judge_loads(given: Any, capacity: int, otherwise: str, *, is_even: bool) -> None:
    ranks, rank = this_rank.world_size(), this_rank.rank()
    torch.manual_seed(0)
    parts = [(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(EACH * ranks)]
    experts = nn.ModuleList(nn.Sequential(*each) for each in parts).double()
    share = [*experts[EACH * rank : EACH * (rank + 1)].parameters()]
    batches = [_batch(each, is_even=is_even) for each in range(ranks)]
    outputs, used = zip(*(_compute(experts, capacity, *each) for each in batches), strict=True)
    (tokens, choices, weights), right = batches[rank], outputs[rank]
    layer, batch = given(deepcopy(experts), capacity), _batch(rank, is_even=is_even)
    kept = [*layer.parameters()]
    is_share = len(kept) == len(share) and all(map(is_close, kept, share))
    require(is_share, "4.4a other experts", rank=rank, each=EACH, first=EACH * rank)
    with Traffic() as traffic:
        got = layer(*batch)
    mistakes = {
        "4.4a first choice": _compute(experts, capacity, tokens, choices[:, :1], weights[:, :1])[0],
        "4.4a capacity ignored": _compute(experts, UNLIMITED, *batches[rank])[0],
    }
    require_value(got, right, mistakes, otherwise)
    require_double(got, right, "output")
    require(got.requires_grad, "4.4a no gradient")
    torch.autograd.backward(outputs, [each.cos() for each in outputs])
    got.backward(right.detach().cos())
    require(is_close(_gradients(batch[:1]), _gradients([tokens])), "4.4a gradient of tokens")
    require(is_close(_gradients(batch[2:]), _gradients([weights])), "4.4a gradient of weights")
    total = _gradients(share)
    require_value(_gradients(kept), total, {"4.4a mean": total / ranks}, "4.4a gradient of experts")
    for name, ours, theirs in (
        ("gradient of the tokens", batch[:1], [tokens]),
        ("gradient of the weights", batch[2:], [weights]),
        ("gradient of the experts", kept, share),
    ):
        require_double(_gradients(ours), _gradients(theirs), name)
    moved = sum(all_gather(sum(each.num_bytes for each in traffic.sent)))
    least = 2 * sum(used) * WIDTH * total.itemsize  # there and back
    require(moved <= SLACK * least, "4.4a bytes", moved=moved, least=least)
