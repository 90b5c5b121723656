"""The classes that notebook 17 asks for, checked on ranks: right ones, and usual mistakes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from answers import assert_verdicts
from drivers.ranks import Ranks
from lessons import definitions
from syrupy.assertion import SnapshotAssertion

ANSWERS = "import math\nfrom torch.nn.functional import linear\n" + definitions(
    "17",
    *("size_of", "part_of", "EnterSplit", "LeaveSplit", "AddTwice"),
    *("Layer", "MyFSDP", "ColumnParallelLinear", "RowParallelLinear"),
)
OTHERS = """
f, g = EnterSplit.apply, LeaveSplit.apply

class Prefetching(MyFSDP):
    # gathers the next layer before a layer computes
    def __init__(self, model):
        super().__init__(model)
        layers = [each for each in model if list(each.parameters())]
        for layer, following in zip(layers, self.layers[1:]):
            layer.register_forward_pre_hook(lambda *_, layer=following: layer.gather())

class Copying(Layer):
    # autograd keeps other views of the storage
    def gather(self):
        if size_of(self.full) == 0:
            self.full = torch.empty(self.bytes // 4)
            dist.all_gather_into_tensor(self.full, self.shard.detach())
            sizes = [each.numel() for each in self.shapes]
            parts = self.full[: sum(sizes)].split(sizes)
            for each, shape, part in zip(self.parameters, self.shapes, parts):
                each.data = part.view(shape)

    def free(self):
        self.shapes = getattr(self, "shapes", [each.shape for each in self.parameters])
        self.full = torch.empty(0)
        for each in self.parameters:
            each.data = self.full

class Whole(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)

def detached(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return x

def gathered(x):
    parts = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(parts, x.detach())
    return torch.cat(parts, -1)
"""
RIGHT = [
    '"17.1", MyFSDP',
    '"17.1", Prefetching',
    '"17.2", ColumnParallelLinear',
    '"17.3", RowParallelLinear',
]
FSDP, COLUMN, ROW = (
    f'"{number}", but("{name}"'
    for number, name in (
        ("17.1", "MyFSDP"),
        ("17.2", "ColumnParallelLinear"),
        ("17.3", "RowParallelLinear"),
    )
)
ALL_AT_ONCE = "[each.gather() for each in self.layers]; return self.compute(x)"
LINEAR = "linear(f(x), self.weight, self.bias)"
WRONG = [
    '"17.1", MyFSDP(nn.Sequential(nn.Linear(2, 2)))',
    '"17.1", MyFSDP if rank else 3',
    '"17.1", dict',
    '"17.1", Whole',
    f'{FSDP}, "nn.ParameterList([each.shard for each in self.layers])", "None")',
    f'{FSDP}, "self.compute = model.forward", "self.compute = self.model = model")',
    f'{FSDP}, "dist.broadcast(self.full, src=0)", "pass")',
    f'{FSDP}, "if size_of(self.full) == 0", "if False")',
    f'{FSDP}, "return self.compute(x)", "{ALL_AT_ONCE}")',
    f'{FSDP}, "[Layer(each)", "[Copying(each)")',
    f'{FSDP}, "self.free()\\n        output", "output")',
    f'{FSDP}, "output.register_hook(lambda gradient: self.gather())", "pass")',
    f'{FSDP}, "self.free()\\n            mine", "mine")',
    f'{FSDP}, "each.grad = None", "pass")',
    f'{FSDP}, "self.shard.grad = mine if", "mine if")',
    f'{FSDP}, "mine /= world_size", "pass")',
    f'{FSDP}, "mine /= world_size", "mine = flat.chunk(world_size)[rank].clone()")',
    f'{FSDP}, "self.shard.detach())", "vars(self).setdefault(0, self.shard.detach().clone()))")',
    f'{FSDP}, "self.shard.grad + mine", "mine")',
    '"17.2", ColumnParallelLinear(nn.Linear(2, 4))',
    '"17.2", RowParallelLinear',
    '"17.2", Whole',
    '"17.2", nn.Identity',
    f'{COLUMN}, "f(x)", "x")',
    f'{COLUMN}, "self.weight, self.bias)", "self.weight)")',
    f'{COLUMN}, "{LINEAR}", "gathered({LINEAR})")',
    f'{COLUMN}, "f(x)", "AddTwice.apply(x)")',
    f'{COLUMN}, "self.weight, self.bias)", "self.weight.detach(), self.bias)")',
    '"17.3", RowParallelLinear(nn.Linear(4, 2))',
    '"17.3", Whole',
    f'{ROW}, "g(linear(x, self.weight))", "linear(x, self.weight)")',
    f'{ROW}, "g(linear", "AddTwice.apply(linear")',
    f'{ROW}, "g(linear", "detached(linear")',
    f'{ROW}, "self.weight)) + self.bias", "self.weight, self.bias))")',
    f'{ROW}, "self.weight)) + self.bias", "self.weight))")',
    f'{ROW}, "self.weight)) + self.bias", "self.weight)) * 0")',
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_classes_of_fsdp_and_tensor_parallelism_get_a_verdict(
    make_group: Callable[..., Ranks], snapshot: SnapshotAssertion, ranks: int
) -> None:
    assert_verdicts(make_group(ranks), OTHERS, RIGHT, WRONG, snapshot, answers=ANSWERS)
