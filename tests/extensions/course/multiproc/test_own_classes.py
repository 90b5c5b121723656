"""Exercises of notebooks 4.1 and 4.2 that are classes: right ones pass, each mistake has a hint."""

import pytest
from answers import assert_verdicts
from drivers.ranks import MakeRanks
from lessons import definitions
from syrupy.assertion import SnapshotAssertion

DDP_ANSWERS = "from contextlib import contextmanager\n" + definitions(
    "4.1",
    *("share_start", "pack", "unpack", "buckets_of", "owners_of", "sharded_step"),
    *("MyDDP", "ShardedAdam"),
)
DDP_OTHERS = """
class FirstStepInOneBucket(MyDDP):  # as torch's
    def __init__(self, module, bucket_bytes):
        super().__init__(module, 10**9)
        self.bucket_bytes, self.is_rebuilt = bucket_bytes, False

    def begin(self):
        if getattr(self, "is_rebuilt", True) is False:
            self.is_rebuilt = True
            self.buckets = buckets_of([*self.module.parameters()][::-1], self.bucket_bytes)
            self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        super().begin()

class AsTheyComplete(MyDDP):
    def gradient_is_ready(self, p):
        if self.is_syncing:
            self.missing[self.bucket_of[p]] -= 1
            if self.missing[self.bucket_of[p]] == 0:
                self.send(self.buckets[self.bucket_of[p]])

    def send(self, bucket):
        flat = pack(bucket) / world_size
        self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def send_rest(self):
        for bucket in self.buckets:
            if all(bucket is not each for each, _, _ in self.sent):
                self.send(bucket)

    def finish(self):
        self.send_rest()
        for bucket, flat, work in self.sent:
            work.wait()
            unpack(flat, bucket)
        self.begin()

def in_turn(parameters):  # rank 0 gets all large ones
    return {p: i % world_size for i, p in enumerate(parameters)}

def in_order(parameters):  # the first half of the ranks gets all large ones
    parameters = [*parameters]
    return {p: i * world_size // len(parameters) for i, p in enumerate(parameters)}

def half(parameters):  # one half of the ranks gets all large ones
    owner = {2: lambda i: i // world_size % (world_size // 2), 1: lambda i: i % world_size}
    return {p: owner[p.dim()](i) for i, p in enumerate(parameters)}

class FlatAdam:
    def __init__(self, parameters, lr):
        self.parameters = [*parameters]
        self.sizes = [p.numel() for p in self.parameters]
        self.size = -(-sum(self.sizes) // world_size)
        self.shard = nn.Parameter(self.flat(self.parameters).clone())
        self.optimizer = torch.optim.Adam([self.shard], lr=lr)

    def flat(self, tensors):
        flat = torch.cat([each.detach().flatten() for each in tensors])
        flat = nn.functional.pad(flat, (0, world_size * self.size - len(flat)))
        return flat[rank * self.size : (rank + 1) * self.size]

    def step(self):
        self.shard.grad = self.flat([p.grad for p in self.parameters])
        self.optimizer.step()
        shards = [torch.empty(self.size) for _ in range(world_size)]
        dist.all_gather(shards, self.shard.detach())
        pieces = torch.cat(shards)[: sum(self.sizes)].split(self.sizes)
        for p, piece in zip(self.parameters, pieces):
            p.detach().copy_(piece.view_as(p))

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None
"""
DDP_RIGHT = [
    '"4.1a", MyDDP',
    '"4.1a", FirstStepInOneBucket',
    '"4.1b", ShardedAdam',
    '"4.1b", FlatAdam',
]
BY_ARRIVAL = "parameters[::-1], bucket_bytes"
UNEVEN = "parameters[:-4:-1], 10**9) + buckets_of(parameters[-4::-1], 1"
DDP_WRONG = [
    '"4.1a", lambda module, bucket_bytes: module',
    '"4.1a", torch.optim.Adam if rank == 0 else (lambda: None)',
    '"4.1a", type("Plain", (), {"__init__": lambda self, *given: None})',
    '"4.1a", type("NoBuckets", (MyDDP,), {"__init__": lambda self, module: None})',
    '"4.1a", but("MyDDP", "share_start(module)", "pass")',
    '"4.1a", but("MyDDP", "[*model.parameters(), *model.buffers()]", "model.parameters()")',
    '"4.1a", but("MyDDP", "flat *= 1 / dist.get_world_size()", "pass")',
    '"4.1a", but("MyDDP", "flat *= 1 / dist.get_world_size()", "flat /= world_size**2")',
    '"4.1a", but("MyDDP", "unpack(flat, bucket)", "pass")',
    '"4.1a", but("MyDDP", "1 / dist.get_world_size()", "float(rank == 0)")',
    r'"4.1a", but("MyDDP", "bucket)\n        self.begin()", "bucket)")',
    '"4.1a", but("MyDDP", "if not self.is_syncing", "if True")',
    '"4.1a", but("MyDDP", "size >= bucket_bytes", "False")',
    '"4.1a", but("MyDDP", "size >= bucket_bytes", "size > 0")',
    '"4.1a", but("MyDDP", ", async_op=True", "", "work.wait()", "pass")',
    '"4.1a", but("MyDDP", "async_op=True)))", "async_op=True))); self.sent[-1][1].wait()")',
    '"4.1a", but("MyDDP", "parameters[::-1]", "parameters")',
    f'"4.1a", but("MyDDP", "{BY_ARRIVAL}", "{UNEVEN}")',
    '"4.1a", AsTheyComplete',
    '"4.1a", type("Incomplete", (AsTheyComplete,), {"send_rest": lambda self: None})',
    '"4.1a", but("MyDDP", "self.is_syncing = False", "pass")',
    r'"4.1a", but("MyDDP", "yield\n", "yield\n            self.module.zero_grad()\n")',
    '"4.1a", but("MyDDP", "def no_sync", "def without_sync")',
    '"4.1b", 3',
    '"4.1b", type("NoRate", (ShardedAdam,), {"__init__": lambda self, parameters: None})',
    '"4.1b", but("ShardedAdam", "(self.optimizer, self.owners)", "(self.optimizer, {})")',
    '"4.1b", but("ShardedAdam", "src=owner", "src=0")',
    '"4.1b", but("ShardedAdam", "lr=lr", "lr=1e-3")',
    '"4.1b", but("ShardedAdam", "p.grad = None", "self.optimizer.zero_grad()")',
    '"4.1b", but("ShardedAdam", "optimizer.step()", "optimizer.step(), optimizer.state.clear()")',
    '"4.1b", but("ShardedAdam", " if owner == dist.get_rank()", "")',
    '"4.1b", but("ShardedAdam", "owners_of(list(parameters))", "in_turn(parameters)")',
    '"4.1b", but("ShardedAdam", "owners_of(list(parameters))", "half(parameters)")',
    '"4.1b", but("ShardedAdam", "owners_of(list(parameters))", "in_order(parameters)")',
    '"4.1b", but("ShardedAdam", "optim.Adam(", "optim.SGD(")',
    '"4.1b", but("ShardedAdam", "optim.Adam(", "optim.AdamW(")',
    '"4.1b", but("ShardedAdam", "def zero_grad", "def clear")',
]


@pytest.mark.full
def test_check_answer_accepts_right_classes_and_names_the_mistake_of_wrong_ones(
    make_group: MakeRanks, snapshot: SnapshotAssertion
) -> None:
    assert_verdicts(make_group(4), DDP_OTHERS, DDP_RIGHT, DDP_WRONG, snapshot, answers=DDP_ANSWERS)


FSDP_ANSWERS = "import math\nfrom torch.nn.functional import linear\n" + definitions(
    "4.2",
    *("size_of", "part_of", "EnterSplit", "LeaveSplit", "AddTwice"),
    *("Layer", "MyFSDP", "ColumnParallelLinear", "RowParallelLinear"),
)
FSDP_OTHERS = """
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

Whole = nn.Sequential  # of the one model that it gets

def detached(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return x

def gathered(x):
    parts = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(parts, x.detach())
    return torch.cat(parts, -1)
"""
FSDP_RIGHT = [
    '"4.2a", MyFSDP',
    '"4.2a", Prefetching',
    '"4.2b", ColumnParallelLinear',
    '"4.2c", RowParallelLinear',
]
FSDP = '"4.2a", but("MyFSDP"'
COLUMN = '"4.2b", but("ColumnParallelLinear"'
ROW = '"4.2c", but("RowParallelLinear"'
ALL_AT_ONCE = "[each.gather() for each in self.layers]; return self.compute(x)"
INSIDE = '"self.weight)) + self.bias", "self.weight, self.bias))"'
LINEAR = "linear(f(x), self.weight, self.bias)"
FSDP_WRONG = [
    '"4.2a", MyFSDP(nn.Sequential(nn.Linear(2, 2)))',
    '"4.2a", MyFSDP if rank else 3',
    '"4.2a", dict',
    '"4.2a", Whole',
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
    '"4.2b", ColumnParallelLinear(nn.Linear(2, 4))',
    '"4.2b", RowParallelLinear',
    '"4.2b", Whole',
    '"4.2b", nn.Identity',
    f'{COLUMN}, "(layer.weight, 0)", "(layer.weight, 1)")',
    f'{COLUMN}, "f(x)", "x")',
    f'{COLUMN}, "self.weight, self.bias)", "self.weight)")',
    f'{COLUMN}, "{LINEAR}", "gathered({LINEAR})")',
    f'{COLUMN}, "f(x)", "AddTwice.apply(x)")',
    f'{COLUMN}, "self.weight, self.bias)", "self.weight.detach(), self.bias)")',
    f'{COLUMN}, "self.weight, self.bias)", "self.weight, self.bias.detach())")',
    '"4.2c", RowParallelLinear(nn.Linear(4, 2))',
    '"4.2c", Whole',
    f'{ROW}, "(layer.weight, 1)", "(layer.weight, 0)")',
    f'{ROW}, "g(linear(x, self.weight))", "linear(x, self.weight)")',
    f'{ROW}, "g(linear", "AddTwice.apply(linear")',
    f'{ROW}, "g(linear", "detached(linear")',
    f'{ROW}, "self.weight)) + self.bias", "self.weight, self.bias))")',
    f'{ROW}, "self.weight)) + self.bias", "self.weight))")',
    f'{ROW}, "self.weight)) + self.bias", "self.weight)) * 0")',
    f'{ROW}, "bias.detach().clone()", "bias.detach() / world_size", {INSIDE})',
    f'{ROW}, "bias.detach().clone()", "bias.detach() * (rank == 0)", {INSIDE})',
    f'{ROW}, "self.weight)) + self.bias", "self.weight, self.bias / world_size))")',
]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_classes_of_fsdp_and_tensor_parallelism_get_a_verdict(
    make_group: MakeRanks, snapshot: SnapshotAssertion, ranks: int
) -> None:
    assert_verdicts(
        make_group(ranks), FSDP_OTHERS, FSDP_RIGHT, FSDP_WRONG, snapshot, answers=FSDP_ANSWERS
    )


def test_an_answer_that_gathers_on_rank_0_only_gets_a_hint(make_group: MakeRanks) -> None:
    answer = FSDP_ANSWERS.replace("if size_of(self.full) == 0", "if rank == 0")
    limit = "from nbddp.extensions.course import time_limit\ntime_limit.SECONDS = 2.0"
    code = f"from torch import nn\n{limit}\n{answer}\nrepr(nbddp.check_answer('4.2a', MyFSDP))"
    group = make_group(2)
    late = "Not yet. It has not ended after 2 seconds. Rank 0 is at `dist.all_gather"
    assert all(hint.startswith(late) for hint in group.evaluate(code))
    group.assert_works()
