"""The exercises of notebook 4.1: classes for DDP and sharded Adam, tested on all ranks.

All ranks run the same tests and get the same hint, because each of them communicates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbddp.extensions.course.grading import all_true, is_close, judge, require, require_class
from nbddp.extensions.memory.traffic import Sent, Traffic
from nbddp.extensions.train.collectives import all_gather
from nbddp.reporting import this_rank
from nbddp.reporting.this_rank import communication_device

WIDTH = 16
LAYER_BYTES = 4 * WIDTH * WIDTH


@contextmanager
def recording_waits() -> Iterator[list[int]]:
    """Record the threads that wait for a collective inside the body, one entry for each wait."""
    work: Any = dist.Work
    wait, threads = work.wait, list[int]()

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        threads.append(get_ident())
        return wait(self, *args, **kwargs)

    try:
        work.wait = recorded
        yield threads
    finally:
        work.wait = wait


def _tower() -> nn.Sequential:
    """Return four layers of equal size and a buffer."""
    layers = [(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*itertools.chain(*layers))
    model.register_buffer("scale", torch.rand(1))
    return model


class _Heads(nn.Module):
    """A trunk and three heads, all of equal size; a forward pass uses one head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return torch.as_tensor(self.heads[head](torch.tanh(self.trunk(x))))


def _make(model: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return model().to(communication_device())


def _batch(step: int) -> Tensor:
    """Return the batch of this rank for a step."""
    torch.manual_seed(100 * step + this_rank.rank())
    return torch.randn(8, WIDTH).to(communication_device())


def _flat(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return one flat copy on the CPU; zeros for a missing tensor of a layer's size."""
    zeros = torch.zeros(WIDTH * WIDTH)
    parts = [zeros if each is None else each.detach().cpu().flatten() for each in tensors]
    return torch.cat(parts)


class _DDPStep(NamedTuple):
    """A step of a ``MyDDP``.

    Attributes:
        own: this rank's gradients, not averaged.
        mean: their mean over the ranks.
        got: the gradients after ``finish()``.
        early: the number of collectives before the gradient of the second layer was ready.
        waits: how often the hooks of the parameters waited for a collective.
        sent: the collectives during the backward pass.
    """

    gradients: Tensor
    mean: Tensor
    got: Tensor
    early: int
    waits: int
    sent: list[Sent]

    @property
    def is_right(self) -> bool:
        return all_true(is_close(self.got, self.mean))


def _gradients(inner: nn.Module, *calls: tuple[Any, ...]) -> Tensor:
    """Return this rank's gradients, summed over the calls. No hook of a parameter is called."""
    parameters = list(inner.parameters())
    total = torch.zeros(sum(each.numel() for each in parameters))
    for call in calls:
        loss = inner(*call).square().mean()
        total += _flat(torch.autograd.grad(loss, parameters, allow_unused=True))
    return total


def _mean(gradients: Tensor) -> Tensor:
    return torch.stack(all_gather(gradients)).mean(0)


def _run_step(model: Any, inner: nn.Module, *call: Any) -> _DDPStep:
    """Run one step of the class, and record it."""
    gradients, early, waits = _gradients(inner, call), 0, 0
    parameters = list(inner.parameters())
    inner.zero_grad()
    traffic = Traffic()

    def note_early(_: object) -> None:
        nonlocal early
        early = len(traffic.sent)

    def note_waits(_: object) -> None:
        nonlocal waits
        waits = threads.count(get_ident())  # a thread of the class may wait meanwhile

    first: Any = parameters[0]  # its gradient is the last one
    second: Any = parameters[1]
    probes = [  # they run after the hooks of the class
        second.register_post_accumulate_grad_hook(note_early),
        first.register_post_accumulate_grad_hook(note_waits),
    ]
    with traffic, recording_waits() as threads:
        model(*call).square().mean().backward()
    for handle in probes:
        handle.remove()
    model.finish()
    got = _flat([each.grad for each in parameters])
    return _DDPStep(gradients, _mean(gradients), got, early, waits, traffic.sent)


@judge("4.1a", on_ranks=True)
def own_ddp(ddp_class: Any) -> None:
    """Judge ``class MyDDP(nn.Module)``."""
    require_class(ddp_class, "module", "bucket_bytes")
    _judge_start(ddp_class)
    _judge_means_and_buckets(ddp_class)
    _judge_unused_parameters(ddp_class)
    _judge_accumulation(ddp_class)


def _judge_start(ddp_class: Any) -> None:
    """Require that all ranks begin with the state of rank 0."""
    inner = _make(_tower, this_rank.rank())
    parameters, buffers = list(inner.parameters()), list(inner.buffers())
    first = all_gather((_flat(parameters), _flat(buffers)))[0]
    model = ddp_class(inner, 2 * LAYER_BYTES)
    is_module = isinstance(model, nn.Module) and hasattr(model, "finish")
    require(all_true(is_module), "4.1a no module")
    require(all_true(_flat(parameters).equal(first[0])), "4.1a parameters")
    require(all_true(_flat(buffers).equal(first[1])), "4.1a buffers")


def _judge_means_and_buckets(ddp_class: Any) -> None:
    """Judge the gradients of two steps, and when and in which buckets they are sent."""
    inner = _make(_tower)
    model = ddp_class(inner, 2 * LAYER_BYTES)
    first, second = (_run_step(model, inner, _batch(number)) for number in range(2))
    world_size = this_rank.world_size()
    mistakes = {
        "4.1a sum": first.mean * world_size,
        "4.1a divided twice": first.mean / world_size,
        "4.1a own gradients": first.gradients,
    }
    found = (name for name, each in mistakes.items() if all_true(is_close(first.got, each)))
    require(first.is_right, next(found, "4.1a no mean"))
    require(second.is_right, "4.1a second step")
    sent = second.sent  # a class may use the first step to learn the order
    sizes = [each.num_bytes for each in sent if each.num_bytes >= LAYER_BYTES]
    require(sizes, "4.1a nothing sent")
    require(len(sizes) > 1 or sizes[0] < 4 * LAYER_BYTES, "4.1a one bucket")
    require(len(sizes) < 4, "4.1a message for each")
    require(not any(each.is_blocking for each in sent), "4.1a blocks")
    require(not second.waits, "4.1a waits")
    require(second.early > 0, "4.1a too late")
    require(sizes == [2 * LAYER_BYTES] * 2, "4.1a other buckets")


def _judge_unused_parameters(ddp_class: Any) -> None:
    """Judge a step in which the ranks use different parameters."""
    inner = _make(_Heads)
    model = ddp_class(inner, LAYER_BYTES)
    head = 1 if this_rank.rank() == this_rank.world_size() - 1 else 0
    for number in (2, 3):
        require(_run_step(model, inner, _batch(number), head).is_right, "4.1a unused")


def _judge_accumulation(ddp_class: Any) -> None:
    """Judge two micro-steps, the first one inside ``no_sync()``."""
    inner = _make(_tower)
    model = ddp_class(inner, 2 * LAYER_BYTES)
    require(all_true(hasattr(model, "no_sync")), "4.1a no no_sync")
    expected = _mean(_gradients(inner, (_batch(4),), (_batch(5),)))
    traffic = Traffic()
    with model.no_sync(), traffic:
        model(_batch(4)).square().mean().backward()
    require(all_true(not traffic.sent), "4.1a sends in no_sync")
    model(_batch(5)).square().mean().backward()
    model.finish()
    got = _flat([each.grad for each in inner.parameters()])
    require(all_true(is_close(got, expected)), "4.1a accumulation")


def _layers() -> nn.Sequential:
    """Return a large parameter for each rank, with small ones between them and at the end.

    A rank that takes each ``world_size``-th parameter gets all large ones, or none. If each rank
    takes as many parameters as the others, in order, the first half of the ranks gets all of them.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    world_size = this_rank.world_size()
    for _ in range(world_size):
        layers.append(nn.Linear(WIDTH, WIDTH, bias=False))
        layers += [nn.PReLU(WIDTH, 0.9) for _ in range(world_size - 1)]
    layers += [nn.PReLU(WIDTH, 0.9) for _ in range(world_size**2)]
    return nn.Sequential(*layers).to(communication_device())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(each.nbytes for each in values if isinstance(each, Tensor) and each.dim())


def _weights(model: nn.Module) -> Tensor:
    return _flat(list(model.parameters()))


@judge("4.1b", on_ranks=True)
def own_adam(adam_class: Any) -> None:
    """Judge ``class ShardedAdam``."""
    require_class(adam_class, "parameters", "lr")
    plain, model = _layers(), _layers()
    adam = torch.optim.Adam(plain.parameters(), lr=0.01)
    sharded = adam_class(model.parameters(), 0.01)
    names = ("step", "zero_grad", "optimizer")
    is_complete = all(hasattr(sharded, name) for name in names)
    has_adam = is_complete and isinstance(sharded.optimizer, torch.optim.Adam)
    require(all_true(has_adam), "4.1b incomplete")
    constants = ("betas", "eps", "weight_decay")
    is_plain = all(sharded.optimizer.defaults[name] == adam.defaults[name] for name in constants)
    require(is_plain, "4.1b other constants")
    for number in range(3):
        torch.manual_seed(number)  # the same batch on all ranks, as after an average
        batch = torch.randn(8, WIDTH).to(communication_device())
        for net, optimizer in ((plain, adam), (model, sharded)):
            optimizer.zero_grad()
            is_clear = not any(p.grad is not None and p.grad.any() for p in net.parameters())
            require(all_true(is_clear), "4.1b zero_grad")
            net(batch).square().mean().backward()
            optimizer.step()
        weights = _weights(model)
        require(all_true(weights.equal(all_gather(weights)[0])), "4.1b weights differ")
        mistake = "4.1b later step" if number else "4.1b first step"
        require(all_true(is_close(weights, _weights(plain))), mistake)
    _judge_shares(_state_bytes(adam), all_gather(_state_bytes(sharded.optimizer)))


def _judge_shares(whole: int, held: Sequence[int]) -> None:
    """Judge the bytes of Adam's averages that each rank holds."""
    require(sum(held) < 1.5 * whole, "4.1b copies")
    most = max(held)
    is_balanced = most <= 1.4 * whole / len(held)
    require(is_balanced, "4.1b unbalanced", rank=held.index(most), share=most / whole)
