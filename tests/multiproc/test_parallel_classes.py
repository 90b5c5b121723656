"""The classes that notebook 17 asks for, checked on ranks: right ones, and usual mistakes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from answers import assert_verdicts
from drivers.ranks import Ranks
from syrupy.assertion import SnapshotAssertion

pytestmark = pytest.mark.multiproc
CLASSES = """
from torch import nn
from torch.nn import functional as F

def size_of(tensor):
    return tensor.untyped_storage().nbytes()

class Unit:
    def __init__(self, layer, fsdp):
        self.layer, self.parameters, self.fsdp = layer, list(layer.parameters()), fsdp
        self.shapes = [each.shape for each in self.parameters]
        whole = torch.cat([each.detach().flatten() for each in self.parameters])
        each = -(-len(whole) // world_size)
        self.full = torch.zeros(each * world_size)
        self.full[: len(whole)] = whole
        if fsdp.broadcasts:
            dist.broadcast(self.full, 0)
        self.shard = nn.Parameter(self.full.chunk(world_size)[rank].clone())
        self.bytes, self.waits = size_of(self.full), len(self.parameters)
        self.view()
        self.free()
        layer.register_forward_pre_hook(lambda *_: self.gather())
        layer.register_forward_hook(self.after_forward)
        for each in self.parameters:
            each.register_post_accumulate_grad_hook(self.ready)

    def view(self):
        at = 0
        for each, shape in zip(self.parameters, self.shapes):
            each.data = self.full[at : at + shape.numel()].view(shape)
            at += shape.numel()

    def gather(self):
        if size_of(self.full) == 0:
            if self.fsdp.empties:
                self.full = torch.empty(self.bytes // 4)
            self.full.untyped_storage().resize_(self.bytes)
            values = self.shard.detach() if self.fsdp.is_fresh else self.fsdp.old(self)
            dist.all_gather_into_tensor(self.full, values)
            self.view()

    def free(self):
        if self.fsdp.empties:  # autograd keeps other views of the storage
            self.full = torch.empty(0)
            for each in self.parameters:
                each.data = self.full
        self.full.untyped_storage().resize_(0)

    def after_forward(self, layer, inputs, output):
        if self.fsdp.frees:
            self.free()
        if self.fsdp.gathers_again:
            output.register_hook(lambda _: self.gather())

    def ready(self, _):
        self.waits -= 1
        if self.waits:
            return
        self.waits = len(self.parameters)
        whole = torch.zeros(self.bytes // 4)
        at = 0
        for each in self.parameters:
            whole[at : at + each.grad.numel()] = each.grad.flatten()
            at += each.grad.numel()
            if self.fsdp.drops_gradients:
                each.grad = None
        if self.fsdp.frees_at_last:
            self.free()
        mine = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(mine, whole)
        mine /= self.fsdp.divides_by
        if self.fsdp.own_gradient:
            mine = whole.chunk(world_size)[rank].clone()
        if self.fsdp.sets_gradient:
            if self.shard.grad is not None and self.fsdp.adds:
                mine += self.shard.grad
            self.shard.grad = mine


class MyFSDP(nn.Module):
    broadcasts = is_fresh = frees = gathers_again = drops_gradients = True
    frees_at_last = sets_gradient = adds = registers = True
    own_gradient = registers_whole = empties = False
    divides_by = world_size

    def __init__(self, model):
        super().__init__()
        self.hidden, self.shards = [model], {}
        self.units = [Unit(each, self) for each in model if list(each.parameters())]
        if self.registers:
            self.kept = nn.ParameterList([each.shard for each in self.units])
        if self.registers_whole:
            self.model = model

    def old(self, unit):
        return self.shards.setdefault(unit, unit.shard.detach().clone())

    def forward(self, x):
        return self.hidden[0](x)


def but(kind=MyFSDP, /, **changes):
    return type("Changed", (kind,), changes)


class AllAtOnce(MyFSDP):
    # gathers the whole model before the first layer
    def forward(self, x):
        for each in self.units:
            each.gather()
        return super().forward(x)


class Prefetching(MyFSDP):
    # gathers the next layer before a layer computes
    def __init__(self, model):
        super().__init__(model)
        for unit, following in zip(self.units, self.units[1:]):
            unit.layer.register_forward_pre_hook(lambda *_, unit=following: unit.gather())


class NotGathered(MyFSDP):
    def __init__(self, model):
        super().__init__(model)
        for each in self.units:
            each.gather = lambda: None


class Whole(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class AddTwice(Add):
    @staticmethod
    def backward(ctx, gradient):
        return Copy.backward(ctx, gradient)


def detached(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def part(tensor, dim):
    return nn.Parameter(tensor.detach().chunk(world_size, dim)[rank].clone())


class ColumnParallelLinear(nn.Module):
    f = staticmethod(Copy.apply)

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = part(layer.weight, 0), part(layer.bias, 0)

    def forward(self, x):
        return F.linear(self.f(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    g = staticmethod(Add.apply)

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = part(layer.weight, 1), nn.Parameter(layer.bias.detach().clone())

    def forward(self, x):
        return self.g(F.linear(x, self.weight)) + self.bias


Column, Row = ColumnParallelLinear, RowParallelLinear


def frozen(self, x):
    return F.linear(self.f(x), self.weight.detach(), self.bias)


def gathered(self, x):
    mine = F.linear(self.f(x), self.weight, self.bias)
    parts = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(parts, mine.detach())
    return torch.cat(parts, -1)
"""
RIGHT = [
    '"17.1", MyFSDP',
    '"17.1", Prefetching',
    '"17.2", ColumnParallelLinear',
    '"17.3", RowParallelLinear',
]
WRONG = [
    '"17.1", MyFSDP(nn.Sequential(nn.Linear(2, 2)))',
    '"17.1", MyFSDP if rank else 3',
    '"17.1", dict',
    '"17.1", Whole',
    '"17.1", but(registers=False)',
    '"17.1", but(registers_whole=True)',
    '"17.1", but(broadcasts=False)',
    '"17.1", NotGathered',
    '"17.1", AllAtOnce',
    '"17.1", but(empties=True)',
    '"17.1", but(frees=False)',
    '"17.1", but(gathers_again=False)',
    '"17.1", but(frees_at_last=False)',
    '"17.1", but(drops_gradients=False)',
    '"17.1", but(sets_gradient=False)',
    '"17.1", but(divides_by=1)',
    '"17.1", but(own_gradient=True)',
    '"17.1", but(is_fresh=False)',
    '"17.1", but(adds=False)',
    '"17.2", ColumnParallelLinear(nn.Linear(2, 4))',
    '"17.2", RowParallelLinear',
    '"17.2", Whole',
    '"17.2", nn.Identity',
    '"17.2", but(Column, f=staticmethod(lambda x: x))',
    '"17.2", but(Column, forward=lambda self, x: F.linear(self.f(x), self.weight))',
    '"17.2", but(Column, forward=gathered)',
    '"17.2", but(Column, f=staticmethod(AddTwice.apply))',
    '"17.2", but(Column, forward=frozen)',
    '"17.3", RowParallelLinear(nn.Linear(4, 2))',
    '"17.3", Whole',
    '"17.3", but(Row, g=staticmethod(lambda x: x))',
    '"17.3", but(Row, g=staticmethod(AddTwice.apply))',
    '"17.3", but(Row, g=staticmethod(detached))',
    '"17.3", but(Row, forward=lambda self, x: self.g(F.linear(x, self.weight, self.bias)))',
    '"17.3", but(Row, forward=lambda self, x: self.g(F.linear(x, self.weight)))',
    '"17.3", but(Row, forward=lambda self, x: self.g(F.linear(x, self.weight)) * 0)',
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_classes_of_fsdp_and_tensor_parallelism_get_a_verdict(
    make_group: Callable[..., Ranks], snapshot: SnapshotAssertion, ranks: int
) -> None:
    assert_verdicts(make_group(ranks), CLASSES, RIGHT, WRONG, snapshot)
