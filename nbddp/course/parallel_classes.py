"""The exercises of notebook 17: classes for FSDP and tensor parallelism, tested on all ranks.

Each function takes a class and raises a hint if it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nbddp.course.grading import WrongError, needs_class, stop_if
from nbddp.train import this_rank

NEEDS_MODULE = "The class has to be an `nn.Module`."
SIZES = (5, 7, 6, 7, 3)  # of the tested layers; most do not divide evenly by the ranks


def _close(got: Any, expected: Tensor) -> bool:
    return (
        isinstance(got, Tensor)
        and got.shape == expected.shape
        and torch.allclose(got.detach().to(expected), expected.detach(), rtol=1e-3, atol=1e-5)
    )


class _Watch:
    """Which layers are whole in memory: their weights' storages, which are not kept alive."""

    def __init__(self) -> None:
        self.storages: list[tuple[int, int, StorageWeakRef]] = []
        self.most = 0

    def add(self, layer: int, weight: Tensor) -> None:
        storage = weight.untyped_storage()
        self.storages.append((layer, weight.nbytes, StorageWeakRef(storage)))  # type: ignore[no-untyped-call]

    def bytes_of(self, layer: int) -> list[int]:
        """Return the size of each storage that a layer's weight had and that is alive."""
        found = []
        for at, _, reference in self.storages:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if at == layer and storage is not None:
                found.append(storage.nbytes())
        return found

    def whole(self) -> int:
        """Return the number of layers that are in memory."""
        return sum(
            any(each >= _bytes_of_weight(layer) for each in self.bytes_of(layer))
            for layer in range(len(SIZES) - 1)
        )

    def count(self) -> None:
        self.most = max(self.most, self.whole())


def _bytes_of_weight(layer: int) -> int:
    return 4 * SIZES[layer] * SIZES[layer + 1]


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
            raise WrongError(
                "The backward pass has reached a layer that is not in memory: gather it again, in "
                "a hook of the layer's output."
            )
        layer.watch.count()
        return gradient, None


class _WatchedLinear(nn.Linear):
    def __init__(self, at: int, watch: _Watch) -> None:
        super().__init__(SIZES[at], SIZES[at + 1])
        self.at, self.watch = at, watch
        watch.add(at, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.shape != (self.out_features, self.in_features) or not _is_there(self.weight):
            raise WrongError("A layer computes before its weight is whole: gather it first.")
        self.watch.add(self.at, self.weight)
        self.watch.count()
        output = super().forward(x)
        result: Tensor = _WatchedBackward.apply(output, self)  # type: ignore[no-untyped-call]
        return result


def _is_there(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def _layers(make: Callable[[int], nn.Module], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for at in range(len(SIZES) - 1):
        parts += [make(at), nn.Tanh()]
    return nn.Sequential(*parts)


def _plain(seed: int) -> nn.Sequential:
    return _layers(lambda at: nn.Linear(SIZES[at], SIZES[at + 1]), seed)


def _stepped(model: nn.Module, batches: Sequence[Tensor], *, scale: float) -> nn.Module:
    """Return a copy of a model after one step with the scaled sum of all ranks' gradients."""
    model = deepcopy(model)
    model.zero_grad()
    for batch in batches:
        model(batch).square().mean().backward()
    with torch.no_grad():
        for each in model.parameters():
            assert each.grad is not None
            dist.all_reduce(each.grad)
            each.sub_(each.grad * scale)
    return model


RATE = 0.5  # of the SGD by which the gradients are compared


@needs_class
def my_fsdp(given: Any) -> None:
    stop_if(None if issubclass(given, nn.Module) else NEEDS_MODULE)
    world_size, rank = this_rank.world_size(), this_rank.rank()
    watch = _Watch()
    watched = _layers(lambda at: _WatchedLinear(at, watch), seed=rank)
    first = _plain(0)
    torch.manual_seed(100 + rank)
    batches = [torch.randn(4, SIZES[0]) for _ in range(3)]

    model = given(watched)
    kept, total = (sum(p.numel() for p in each.parameters()) for each in (model, first))
    stop_if(_hint_of_share(kept, total, world_size))
    stop_if(_hint_of_memory(watch, "Before the first forward pass"))

    output = model(batches[0])
    stop_if(_hint_of_output(output, first(batches[0])))
    stop_if(_hint_of_memory(watch, "After the forward pass"))
    output.square().mean().backward()
    stop_if(_hint_of_backward(model, watched, watch))

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer.step()
    mean = _stepped(first, batches[:1], scale=RATE / world_size)
    added = _stepped(first, batches[:1], scale=RATE)
    got, outputs = model(batches[1]), [each(batches[1]) for each in (mean, first, added)]
    stop_if(_hint_of_step(got, *outputs))

    optimizer.zero_grad()
    got.square().mean().backward()
    model(batches[2]).square().mean().backward()
    optimizer.step()
    both, last = (
        _stepped(mean, some, scale=RATE / world_size) for some in (batches[1:], batches[2:])
    )
    got = model(batches[0])
    stop_if(_hint_of_two_passes(got, both(batches[0]), last(batches[0])))
    stop_if(_hint_of_memory(watch, "After the fourth forward pass"))


def _whole_parameters(model: nn.Module) -> list[Tensor]:
    layers = (each for each in model.modules() if isinstance(each, _WatchedLinear))
    found = [value for each in layers for value in (each.weight, each.bias)]
    return [each for each in found if each.numel() > 0]


def _hint_of_share(kept: int, total: int, world_size: int) -> str | None:
    if kept == 0:
        return "`parameters()` is empty: it has to return this rank's shards, for the optimizer."
    if kept >= total:
        return f"`parameters()` has {kept} values of {total}: it has to return only the shards."
    if kept > total / world_size + 2 * len(SIZES):
        return f"`parameters()` has {kept} values of {total}: keep one of {world_size} parts."
    return None


def _hint_of_memory(watch: _Watch, when: str) -> str | None:
    if watch.whole():
        return (
            f"{when} {watch.whole()} of {len(SIZES) - 1} layers are whole in memory. Set the size "
            "of their storage to 0: autograd keeps other views of it."
        )
    if watch.most > 2:
        return f"{watch.most} layers were whole at the same time: free each after its use."
    return None


def _hint_of_output(got: Any, expected: Tensor) -> str | None:
    if _close(got, expected):
        return None
    return (
        "The output is not that of the whole model with rank 0's initial values: broadcast them "
        "before you cut."
    )


def _hint_of_backward(model: nn.Module, watched: nn.Module, watch: _Watch) -> str | None:
    if all(each.grad is None for each in model.parameters()):
        return "After the backward pass no parameter has a gradient: reduce-scatter it into `grad`."
    if any(each.grad is not None for each in _whole_parameters(watched)):
        return "After the backward pass whole gradients are in memory: set their `grad` to None."
    return _hint_of_memory(watch, "After the backward pass")


def _hint_of_step(got: Any, mean: Tensor, old: Tensor, added: Tensor) -> str | None:
    if _close(got, mean):
        return None
    if _close(got, old):
        return "After a step of SGD the output is the old one: gather the new shards."
    if _close(got, added):
        return "The gradient is the sum over the ranks, not the mean."
    return "After a step of SGD the model is another one: is the gradient the mean of all ranks?"


def _hint_of_two_passes(got: Any, both: Tensor, last: Tensor) -> str | None:
    if _close(got, both):
        return None
    if _close(got, last):
        return "Two backward passes before a step: the second replaced the gradient. Add to it."
    return "With two backward passes before a step the model is another one."


def _layer(inputs: int, outputs: int) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """Return a layer, an input, its output, and the gradient of the output."""
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs)
    x = torch.randn(2, 3, inputs, requires_grad=True)
    gradient = torch.randn(2, 3, outputs)
    output = layer(x)
    output.backward(gradient)
    return layer, x, output.detach(), gradient


def _part(tensor: Tensor, dim: int) -> Tensor:
    return tensor.detach().chunk(this_rank.world_size(), dim)[this_rank.rank()].contiguous()


def _cut(given: Any, layer: nn.Linear, share: int) -> nn.Module:
    stop_if(None if issubclass(given, nn.Module) else NEEDS_MODULE)
    whole = deepcopy(layer)
    whole.zero_grad()
    cut = given(whole)
    kept = sum(each.numel() for each in cut.parameters())
    if kept == 0:
        stop_if("It has no parameters: an `nn.Parameter` keeps this rank's part of the weight.")
    hint = f"It keeps {kept} parameters on this rank, not {share}."
    stop_if(None if kept == share else hint)
    result: nn.Module = cut
    return result


def _hint_of_weight(cut: nn.Module, expected: Tensor) -> str | None:
    gradients = [each.grad for each in cut.parameters() if each.dim() == expected.dim()]
    if any(_close(each, expected) for each in gradients):
        return None
    if any(each is None for each in gradients):
        return "After the backward pass the weight has no gradient."
    return "The gradient of the weight is not the part of the whole layer's."


@needs_class
def column_parallel(given: Any) -> None:
    world_size = this_rank.world_size()
    layer, x, output, gradient = _layer(2 * world_size, 4 * world_size)
    assert layer.weight.grad is not None
    assert x.grad is not None
    cut = _cut(given, layer, share=4 * (2 * world_size + 1))
    own_x = x.detach().clone().requires_grad_()
    got = cut(own_x)
    if _close(got, _part(output, -1)):
        hint = None
    elif _close(got, output):
        hint = "It returns all outputs. Return this rank's: the next layer needs no others."
    elif _close(got, _part(output - layer.bias, -1)):
        hint = "The bias is missing: each rank adds its own part of it."
    else:
        hint = "The output is not this rank's part of the whole layer's."
    stop_if(hint)
    got.backward(_part(gradient, -1))
    partial = _part(gradient, -1) @ _part(layer.weight, 0)
    if _close(own_x.grad, x.grad):
        hint = _hint_of_weight(cut, _part(layer.weight.grad, 0))
    elif _close(own_x.grad, partial):
        hint = "The gradient of the input is only this rank's part of a sum: `f` is missing."
    else:
        hint = "The gradient of the input is not that of the whole layer."
    stop_if(hint)


@needs_class
def row_parallel(given: Any) -> None:
    world_size = this_rank.world_size()
    layer, x, output, gradient = _layer(4 * world_size, 2 * world_size)
    assert layer.weight.grad is not None
    assert x.grad is not None
    cut = _cut(given, layer, share=(4 + 1) * 2 * world_size)
    own_x = _part(x, -1).requires_grad_()
    got = cut(own_x)
    partial = own_x @ _part(layer.weight, 1).T
    if _close(got, output):
        hint = None
    elif _close(got, output + (world_size - 1) * layer.bias):
        hint = "Each rank has added the bias before the sum: add it once, after `g`."
    elif _close(got, output - layer.bias):
        hint = "The bias is missing: add it once, after `g`."
    elif _close(got, partial) or _close(got, partial + layer.bias):
        hint = "The output is only this rank's part of a sum: `g` is missing."
    else:
        hint = "The output is not that of the whole layer."
    stop_if(hint)
    got.backward(gradient)
    expected = _part(x.grad, -1)
    if _close(own_x.grad, expected):
        hint = _hint_of_weight(cut, _part(layer.weight.grad, 1))
    elif _close(own_x.grad, world_size * expected):
        hint = "The gradient is too large: the backward of `g` returns the gradient unchanged."
    elif own_x.grad is None:
        hint = "The input has no gradient: make an autograd function of the all-reduce."
    else:
        hint = "The gradient of the input is not this rank's part of the whole layer's."
    stop_if(hint)
