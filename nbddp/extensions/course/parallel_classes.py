"""The exercises of notebook 4.2: classes for FSDP and tensor parallelism, tested on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nbddp.extensions.course.grading import (
    RIGHT,
    WrongError,
    is_close,
    judge,
    require,
    require_class,
    require_value,
    say,
    stop_if,
)
from nbddp.reporting import this_rank
from nbddp.reporting.this_rank import communication_device

T = TypeVar("T")

SIZES = (5, 7, 6, 7, 3)  # of the tested layers; most do not divide evenly by the ranks
LAYERS = len(SIZES) - 1
RATE = 0.5  # of the SGD by which the gradients are compared


class _Watch:
    """Which layers are whole in memory: their weights' storages, which are not kept alive."""

    def __init__(self) -> None:
        self.storages: list[list[StorageWeakRef]] = [[] for _ in range(LAYERS)]
        self.most = 0

    def add(self, layer: int, weight: Tensor) -> None:
        reference = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        self.storages[layer].append(reference)

    def bytes_of(self, layer: int) -> list[int]:
        """Return the size of each storage that a layer's weight had and that is alive."""
        revive: Callable[[int], Any] = torch.UntypedStorage._new_with_weak_ptr
        storages = [revive(each.cdata) for each in self.storages[layer]]
        return [each.nbytes() for each in storages if each is not None]

    def whole(self) -> int:
        """Return the number of layers that are in memory."""
        sizes = [4 * inputs * outputs for inputs, outputs in pairwise(SIZES)]
        return sum(max(self.bytes_of(at), default=0) >= size for at, size in enumerate(sizes))

    def count(self) -> None:
        self.most = max(self.most, self.whole())


class _WatchedBackward(torch.autograd.Function):
    """Look at the memory when the backward pass reaches a layer."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, layer: _WatchedLinear) -> Tensor:
        ctx.layer = layer
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        layer = ctx.layer
        if 0 in layer.watch.bytes_of(layer.at):  # torch would read freed memory
            raise WrongError(say("4.2a backward without layer"))
        layer.watch.count()
        return gradient, None


class _WatchedLinear(nn.Linear):
    def __init__(self, at: int, watch: _Watch) -> None:
        super().__init__(SIZES[at], SIZES[at + 1])
        self.at, self.watch = at, watch
        watch.add(at, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        is_there = self.weight.untyped_storage().nbytes() >= self.weight.nbytes
        if not is_there or self.weight.shape != (self.out_features, self.in_features):
            raise WrongError(say("4.2a forward without layer"))
        self.watch.add(self.at, self.weight)
        self.watch.count()
        output = super().forward(x)
        result: Tensor = _WatchedBackward.apply(output, self)  # type: ignore[no-untyped-call]
        return result


def _layers(make: Callable[[int], nn.Module], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for at in range(LAYERS):
        parts += [make(at), nn.Tanh()]
    return nn.Sequential(*parts)


def _stepped(model: nn.Module, batches: Sequence[Tensor], *, scale: float) -> nn.Module:
    """Return a copy of a model after one step with the scaled sum of all ranks' gradients."""
    model = deepcopy(model)
    model.zero_grad()
    for batch in batches:
        model(batch).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.sub_(parameter.grad * scale)
    return model


def _run(call: Callable[[], T]) -> T:
    """Run code of an answer, and wait until it ends on all ranks.

    A rank may be in an all-gather that the other ranks leave out. If these began a smaller
    all-gather, to compare hints, Gloo would abort their processes. Gloo matches no all-gather with
    an all-to-all: the ranks wait, and nbddp names the line of each.
    """
    hint = RIGHT
    try:
        result = call()
    except WrongError as wrong:  # of a watched layer, perhaps on this rank only
        hint = str(wrong)
    number = torch.zeros(this_rank.world_size(), device=communication_device())
    dist.all_to_all_single(torch.empty_like(number), number)
    stop_if(hint)
    return result


@judge("4.2a", on_ranks=True)
def my_fsdp(given: Any) -> None:
    require_class(given, base=nn.Module)
    world_size, rank = this_rank.world_size(), this_rank.rank()
    watch = _Watch()
    watched = _layers(lambda at: _WatchedLinear(at, watch), seed=rank)
    first = _layers(lambda at: nn.Linear(SIZES[at], SIZES[at + 1]), seed=0)
    torch.manual_seed(100 + rank)
    batches = [torch.randn(4, SIZES[0]) for _ in range(3)]

    model = given(watched)
    kept, total = (sum(p.numel() for p in each.parameters()) for each in (model, first))
    counts = {"kept": kept, "total": total, "ranks": world_size}
    require(kept, "4.2a no parameters")
    require(kept < total, "4.2a whole parameters", **counts)
    require(kept <= total / world_size + 2 * len(SIZES), "4.2a other parameters", **counts)
    _require_memory(watch, "Before the first forward pass")

    output = _run(lambda: model(batches[0]))
    require(is_close(output, first(batches[0])), "4.2a output")
    _require_memory(watch, "After the forward pass")
    _run(lambda: output.square().mean().backward())
    has_gradient = any(each.grad is not None for each in model.parameters())
    require(has_gradient, "4.2a no gradient")
    is_free = all(each.grad is None for each in _whole_parameters(watched))
    require(is_free, "4.2a whole gradients")
    _require_memory(watch, "After the backward pass")

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer.step()
    mean = _stepped(first, batches[:1], scale=RATE / world_size)
    added = _stepped(first, batches[:1], scale=RATE)
    got = _run(lambda: model(batches[1]))
    mistakes = {"4.2a old output": first(batches[1]), "4.2a sum": added(batches[1])}
    require_value(got, mean(batches[1]), mistakes, "4.2a other step")

    optimizer.zero_grad()
    _run(lambda: got.square().mean().backward())
    _run(lambda: model(batches[2]).square().mean().backward())
    optimizer.step()
    both, last = (
        _stepped(mean, some, scale=RATE / world_size)(batches[0])
        for some in (batches[1:], batches[2:])
    )
    got = _run(lambda: model(batches[0]))
    require_value(got, both, {"4.2a replaced": last}, "4.2a two passes")
    _require_memory(watch, "After the fourth forward pass")


def _require_memory(watch: _Watch, when: str) -> None:
    whole = watch.whole()
    require(not whole, "4.2a in memory", when=when, whole=whole, layers=LAYERS)
    require(watch.most <= 2, "4.2a several in memory", most=watch.most)


def _whole_parameters(model: nn.Module) -> list[Tensor]:
    layers = (each for each in model.modules() if isinstance(each, _WatchedLinear))
    found = [value for each in layers for value in (each.weight, each.bias)]
    return [each for each in found if each.numel() > 0]


def _layer(inputs: int, outputs: int) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """Return a layer with gradients, an input with one, its output, and the output's gradient."""
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs)
    x = torch.randn(2, 3, inputs, requires_grad=True)
    gradient = torch.randn(2, 3, outputs)
    output = layer(x)
    output.backward(gradient)
    return layer, x, output.detach(), gradient


def _part(tensor: Tensor | None, dim: int) -> Tensor:
    assert tensor is not None  # a gradient
    return tensor.detach().chunk(this_rank.world_size(), dim)[this_rank.rank()].contiguous()


def _cut(given: Any, layer: nn.Linear, *, share: int, dim: int, mistake: str) -> Any:
    """Return this rank's part of a layer whose weight has to be cut along a dimension."""
    require_class(given, base=nn.Module)
    whole = deepcopy(layer)
    whole.zero_grad()
    cut = given(whole)
    kept = sum(each.numel() for each in cut.parameters())
    require(kept, "4.2b no parameters")
    require(kept == share, "4.2b other parameters", kept=kept, share=share)
    wrong = _part(layer.weight, 1 - dim).shape
    require(all(each.shape != wrong for each in cut.parameters()), mistake)
    return cut


def _require_weight(cut: nn.Module, expected: Tensor) -> None:
    gradients = [each.grad for each in cut.parameters() if each.dim() == expected.dim()]
    is_right = any(is_close(each, expected) for each in gradients)
    is_missing = any(each is None for each in gradients)
    require(is_right or not is_missing, "4.2b weight without gradient")
    require(is_right, "4.2b other gradient of weight")


@judge("4.2b", on_ranks=True)
def column_parallel(given: Any) -> None:
    world_size = this_rank.world_size()
    layer, x, output, gradient = _layer(2 * world_size, 4 * world_size)
    share = 4 * (2 * world_size + 1)
    cut = _cut(given, layer, share=share, dim=0, mistake="4.2b other dimension")
    own_x = x.detach().clone().requires_grad_()
    got = cut(own_x)
    mistakes = {"4.2b all outputs": output, "4.2b no bias": _part(output - layer.bias, -1)}
    require_value(got, _part(output, -1), mistakes, "4.2b other output")
    got.backward(_part(gradient, -1))
    partial = _part(gradient, -1) @ _part(layer.weight, 0)
    require_value(own_x.grad, x.grad, {"4.2b partial gradient": partial}, "4.2b other gradient")
    _require_weight(cut, _part(layer.weight.grad, 0))
    right = _part(layer.bias.grad, 0)
    gradients = [each.grad.flatten() for each in cut.parameters() if each.grad is not None]
    is_right = any(is_close(each, right) for each in gradients)
    require(is_right, "4.2b other gradient of bias")


@judge("4.2c", on_ranks=True)
def row_parallel(given: Any) -> None:
    world_size = this_rank.world_size()
    layer, x, output, gradient = _layer(4 * world_size, 2 * world_size)
    share = (4 + 1) * 2 * world_size
    cut = _cut(given, layer, share=share, dim=1, mistake="4.2c other dimension")
    own_x = _part(x, -1).requires_grad_()
    got = cut(own_x)
    partial = own_x @ _part(layer.weight, 1).T
    mistakes = {
        "4.2c bias on each": output + (world_size - 1) * layer.bias,
        "4.2c no bias": output - layer.bias,
        "4.2c partial output": partial if is_close(got, partial) else partial + layer.bias,
    }
    require_value(got, output, mistakes, "4.2c other output")
    own_bias = [each for each in cut.parameters() if each.numel() == layer.bias.numel()]
    is_whole = any(is_close(each.flatten(), layer.bias) for each in own_bias)
    require(is_whole, "4.2c other bias")
    got.backward(gradient)
    right = _part(x.grad, -1)
    require(own_x.grad is not None, "4.2c no gradient")
    mistakes = {"4.2c large gradient": world_size * right}
    require_value(own_x.grad, right, mistakes, "4.2c other gradient")
    _require_weight(cut, _part(layer.weight.grad, 1))
    for model in (layer, cut):
        torch.optim.SGD(model.parameters(), lr=RATE).step()
    is_whole = any(is_close(each.flatten(), layer.bias) for each in own_bias)
    require(is_whole, "4.2c bias after step")
