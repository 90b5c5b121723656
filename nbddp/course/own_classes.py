"""The exercises of notebook 16: classes for DDP and sharded Adam, tested on all ranks.

Each function takes the class and returns a hint to the first test that fails, or :data:`RIGHT`.
All ranks run the same tests, because each of them communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nbddp.course.grading import RIGHT, hint_to_signature, needs_class, stop_if
from nbddp.train import this_rank
from nbddp.train.call_agreement import communication_device
from nbddp.train.collectives import all_gather

WIDTH = 16
LAYER_BYTES = 4 * WIDTH * WIDTH


@dataclass(slots=True)
class _Sent:
    """A collective that the class has called."""

    num_bytes: int
    is_blocking: bool


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the collectives that are called inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[_Sent] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the base class is untyped
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            is_blocking = len(args) > 3 and args[-1] is False  # async_op; left out if true
            self.sent.append(_Sent(_bytes_of(args[0]), is_blocking))
        return func(*args, **(kwargs or {}))


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes_of, value)) if isinstance(value, list | tuple) else 0


class _Tower(nn.Module):
    """Four layers of equal size and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.register_buffer("scale", torch.rand(1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.get_buffer("scale")


class _Heads(nn.Module):
    """A trunk and three heads, all of equal size; a forward pass uses one head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return torch.as_tensor(self.heads[head](torch.tanh(self.trunk(x))))


@contextmanager
def _own_seed(seed: int) -> Iterator[None]:
    """Seed torch, and restore the state of its generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _batch(step: int) -> torch.Tensor:
    """Return the batch of this rank for a step."""
    with _own_seed(100 * step + this_rank.rank()):
        return torch.randn(8, WIDTH).to(communication_device())


def _flat(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return one flat copy on the CPU; zeros for a missing tensor of a layer's size."""
    zeros = torch.zeros(WIDTH * WIDTH)
    parts = [zeros if each is None else each.detach().cpu().flatten() for each in tensors]
    return torch.cat(parts)


def _all_true(value: object) -> bool:
    """Return whether a value is true on all ranks, so that all of them take the same branch."""
    return all(all_gather(bool(value)))


@dataclass
class _DDPStep:
    """A step of a ``MyDDP``: its gradients, the right ones, and what it has sent.

    Attributes:
        own: this rank's gradients, not averaged.
        mean: the mean over the ranks.
        got: the gradients after ``finish()``.
        early: the number of collectives before the gradient of the second layer was ready.
        backward: the collectives during the backward pass.
    """

    own: torch.Tensor
    mean: torch.Tensor
    got: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    early: int = 0
    backward: list[_Sent] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return torch.allclose(self.got, self.mean, rtol=1e-4, atol=1e-6)


def _gradients(inner: nn.Module, *calls: tuple[Any, ...]) -> torch.Tensor:
    """Return this rank's gradients, summed over the calls. No hook of a parameter is called."""
    parameters = list(inner.parameters())
    total = torch.zeros(sum(each.numel() for each in parameters))
    for call in calls:
        loss = inner(*call).square().mean()
        total += _flat(torch.autograd.grad(loss, parameters, allow_unused=True))
    return total


def _mean(own: torch.Tensor) -> torch.Tensor:
    return torch.stack(all_gather(own)).mean(0)


def _run_step(model: Any, inner: nn.Module, *call: Any) -> _DDPStep:
    """Run one step of the class, and record it."""
    own = _gradients(inner, call)
    step = _DDPStep(own, _mean(own))
    parameters = list(inner.parameters())
    inner.zero_grad()
    traffic = _Traffic()

    def note(_: object) -> None:
        step.early = len(traffic.sent)

    second: Any = parameters[1]
    probe = second.register_post_accumulate_grad_hook(note)  # runs after the hooks of the class
    with traffic:
        model(*call).square().mean().backward()
    probe.remove()
    step.backward = traffic.sent
    model.finish()
    step.got = _flat([each.grad for each in parameters])
    return step


def _hint_to_gradients(step: _DDPStep) -> str:
    world_size = this_rank.world_size()
    mistakes = {
        "The gradients are the sum over the ranks: DDP needs their mean.": step.mean * world_size,
        "The gradients are divided by the number of ranks twice.": step.mean / world_size,
        "After `finish()`, the gradients are still each rank's own: put the means into `grad`.": (
            step.own
        ),
    }
    for hint, found in mistakes.items():
        if _all_true(torch.allclose(step.got, found, rtol=1e-4, atol=1e-6)):
            return hint
    return "After `finish()`, the gradients are not the mean over the ranks."


def _start_of(own: Any) -> str:
    """Check that all ranks begin with the state of rank 0."""
    with _own_seed(this_rank.rank()):
        inner = _Tower().to(communication_device())
    parameters, buffers = list(inner.parameters()), list(inner.buffers())
    first = all_gather((_flat(parameters), _flat(buffers)))[0]
    model = own(inner, 2 * LAYER_BYTES)
    if not _all_true(isinstance(model, nn.Module) and hasattr(model, "finish")):
        return "It must be a `torch.nn.Module` with a method `finish()`."
    if not _all_true(_flat(parameters).equal(first[0])):
        return "At the start, the parameters are not those of rank 0 on all ranks: broadcast them."
    if not _all_true(_flat(buffers).equal(first[1])):
        return "The buffers are not those of rank 0 on all ranks: broadcast them, too."
    return RIGHT


def _means_and_buckets_of(own: Any) -> str:
    """Check the gradients of two steps, and when and in which buckets they are sent."""
    with _own_seed(0):
        inner = _Tower().to(communication_device())
    model = own(inner, 2 * LAYER_BYTES)
    steps = [_run_step(model, inner, _batch(number)) for number in range(2)]
    if not _all_true(steps[0].is_right):
        return _hint_to_gradients(steps[0])
    if not _all_true(steps[1].is_right):
        return "The first step is right, the second is not: count the gradients of each step anew."
    sent = steps[1].backward  # a class may use the first step to learn the order
    whole = [each for each in sent if each.num_bytes >= LAYER_BYTES]
    if not whole:
        return "Nothing is sent during `backward()`: send each bucket from a hook of its gradients."
    if len(whole) == 1 and whole[0].num_bytes >= 4 * LAYER_BYTES:
        return "There is one bucket for all gradients: start a new one at `bucket_bytes`."
    if len(whole) >= 4:
        return (
            "There is a message for each parameter: a bucket takes several, up to `bucket_bytes`."
        )
    if any(each.is_blocking for each in sent):
        return (
            "An all-reduce blocks the backward pass: use `async_op=True`, and wait in `finish()`."
        )
    if steps[1].early == 0:
        return (
            "The first bucket is sent too late: put the last layers into it, they are ready first."
        )
    if [each.num_bytes for each in whole] != [2 * LAYER_BYTES] * 2:
        return (
            "Four layers of 1,024 bytes and `bucket_bytes` of 2,048 make two buckets of 2,048. "
            "Send both in `backward()`."
        )
    return RIGHT


def _unused_parameters_of(own: Any) -> str:
    """Check a step in which the ranks use different parameters."""
    with _own_seed(0):
        inner = _Heads().to(communication_device())
    model = own(inner, LAYER_BYTES)
    head = 1 if this_rank.rank() == this_rank.world_size() - 1 else 0
    for number in (2, 3):
        step = _run_step(model, inner, _batch(number), head)
        if not _all_true(step.is_right):
            return (
                "The ranks used different parameters, and the gradients are wrong: all ranks send "
                "all buckets in one order, with zeros for a missing gradient."
            )
    return RIGHT


def _accumulation_of(own: Any) -> str:
    """Check two micro-steps, the first one inside ``no_sync()``."""
    with _own_seed(0):
        inner = _Tower().to(communication_device())
    model = own(inner, 2 * LAYER_BYTES)
    if not _all_true(hasattr(model, "no_sync")):
        return "It has no `no_sync()`: write a context manager."
    expected = _mean(_gradients(inner, (_batch(4),), (_batch(5),)))
    traffic = _Traffic()
    with model.no_sync(), traffic:
        model(_batch(4)).square().mean().backward()
    if not _all_true(not traffic.sent):
        return "Inside `no_sync()` something is sent: the hook has to return at once."
    model(_batch(5)).square().mean().backward()
    model.finish()
    got = _flat([each.grad for each in inner.parameters()])
    if not _all_true(torch.allclose(got, expected, rtol=1e-4, atol=1e-6)):
        return "After `no_sync()` and one more micro-step, `grad` is not the mean of the sums."
    return RIGHT


@needs_class
def own_ddp(own: Any) -> str:
    """Grade ``class MyDDP(nn.Module)``."""
    stop_if(hint_to_signature(own, ("module", "bucket_bytes")))
    tests: list[Callable[[Any], str]] = [
        _start_of,
        _means_and_buckets_of,
        _unused_parameters_of,
        _accumulation_of,
    ]
    for test in tests:
        hints = all_gather(test(own))
        wrong = [hint for hint in hints if hint != RIGHT]
        if wrong:
            return wrong[0]
    return RIGHT


def _layers() -> nn.Sequential:
    """Return equal layers with biases, two for each rank."""
    with _own_seed(0):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2 * this_rank.world_size())]
        return nn.Sequential(*layers).to(communication_device())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(each.nbytes for each in values if isinstance(each, torch.Tensor) and each.dim())


def _weights(model: nn.Module) -> torch.Tensor:
    return _flat(list(model.parameters()))


def _all_equal(model: nn.Module) -> bool:
    """Return whether the parameters are equal on all ranks."""
    mine = _weights(model)
    return _all_true(mine.equal(all_gather(mine)[0]))


@needs_class
def own_adam(own: Any) -> str:
    """Grade ``class ShardedAdam``."""
    stop_if(hint_to_signature(own, ("parameters", "lr")))
    plain, model = _layers(), _layers()
    adam, sharded = torch.optim.Adam(plain.parameters(), lr=0.01), own(model.parameters(), 0.01)
    names = ("step", "zero_grad", "optimizer")
    is_complete = all(hasattr(sharded, name) for name in names)
    if not _all_true(is_complete and isinstance(sharded.optimizer, torch.optim.Adam)):
        return "It needs `step()`, `zero_grad()`, and `optimizer`: this rank's `torch.optim.Adam`."
    for number in range(3):
        with _own_seed(number):  # the same batch on all ranks, as after an average
            batch = torch.randn(8, WIDTH).to(communication_device())
        for each, optimizer in ((plain, adam), (model, sharded)):
            optimizer.zero_grad()
            if not _all_true(
                not any(p.grad is not None and p.grad.any() for p in each.parameters())
            ):
                return "`zero_grad()` must clear the gradients of all parameters."
            each(batch).square().mean().backward()
            optimizer.step()
        if not _all_equal(model):
            return "After `step()`, the weights differ between ranks: send each from its owner."
        if not _all_true(torch.allclose(_weights(model), _weights(plain), atol=1e-5)):
            if number == 0:
                return "The first step is not Adam's: does each rank update its share with `lr`?"
            return "Only the first step is right: keep Adam's averages from step to step."
    return _hint_to_shares(_state_bytes(adam), all_gather(_state_bytes(sharded.optimizer)))


def _hint_to_shares(whole: int, held: Sequence[int]) -> str:
    """Check the bytes of Adam's averages that each rank holds."""
    if sum(held) >= 1.5 * whole:
        return "The ranks hold more than one copy of the averages together: give Adam only a share."
    if max(held) > 1.4 * whole / len(held):
        rank = held.index(max(held))
        return f"Rank {rank} holds {max(held) / whole:.0%} of the averages: balance by size."
    return RIGHT
