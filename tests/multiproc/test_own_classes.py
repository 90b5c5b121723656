"""Assignments that are classes, on four ranks: right ones pass, each mistake has a hint."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from answers import assert_verdicts
from drivers.ranks import Ranks
from syrupy.assertion import SnapshotAssertion

pytestmark = pytest.mark.multiproc
RANKS = 4
PARTS = """
from contextlib import contextmanager, nullcontext
from torch import nn

class MyDDP(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module = module
        for each in self.shared():
            dist.broadcast(each.detach(), 0)
        self.buckets = self.buckets_of([*module.parameters()][::-1], bucket_bytes)
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.is_syncing = True
        self.begin()
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.is_ready)

    def shared(self):
        return [*self.module.parameters(), *self.module.buffers()]

    def buckets_of(self, parameters, bucket_bytes):
        buckets, size = [[]], 0
        for p in parameters:
            if size >= bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(p)
            size += p.nbytes
        return buckets

    def begin(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent = []

    def forward(self, *args):
        return self.module(*args)

    def is_ready(self, p):
        if not self.is_syncing:
            return
        self.missing[self.bucket_of[p]] -= 1
        while len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] == 0:
            self.send(len(self.sent))

    def reduce(self, flat):
        return dist.all_reduce(flat, async_op=True)

    def scale(self):
        return 1 / world_size

    def send(self, i):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.buckets[i]]
        flat = torch.cat([each.flatten() for each in grads]) * self.scale()
        self.sent.append((i, flat, self.reduce(flat)))

    def send_rest(self):
        sent = {i for i, _, _ in self.sent}
        for i in range(len(self.buckets)):
            if i not in sent:
                self.send(i)

    def write(self, p, mean):
        p.grad = mean.view_as(p)

    def finish(self):
        self.send_rest()
        for i, flat, work in self.sent:
            if work is not None:
                work.wait()
            bucket = self.buckets[i]
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                self.write(p, mean)
        self.begin()

    @contextmanager
    def no_sync(self):
        self.is_syncing = False
        yield
        self.is_syncing = True

def but(kind, **methods):
    return type("Changed", (kind,), methods)

class FirstStepInOneBucket(MyDDP):  # as torch's
    def __init__(self, module, bucket_bytes):
        super().__init__(module, 10**9)
        self.bucket_bytes, self.is_rebuilt = bucket_bytes, False

    def begin(self):
        if getattr(self, "is_rebuilt", True) is False:
            self.is_rebuilt = True
            self.buckets = self.buckets_of([*self.module.parameters()][::-1], self.bucket_bytes)
            self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        super().begin()

class OnlyOnce(MyDDP):
    def begin(self):
        if not hasattr(self, "missing"):
            super().begin()

class UnevenBuckets(MyDDP):
    def buckets_of(self, parameters, bucket_bytes):
        half = super().buckets_of(parameters[:3], 10**9)
        return half + super().buckets_of(parameters[3:], 1)

class AsTheyComplete(MyDDP):
    def is_ready(self, p):
        if self.is_syncing:
            self.missing[self.bucket_of[p]] -= 1
            if self.missing[self.bucket_of[p]] == 0:
                self.send(self.bucket_of[p])

class ForgetsTheFirst(MyDDP):
    @contextmanager
    def no_sync(self):
        self.is_syncing = False
        yield
        self.is_syncing = True
        self.module.zero_grad()

class ShardedAdam:
    def __init__(self, parameters, lr):
        self.owners = self.owners_of([*parameters])
        self.optimizer = torch.optim.Adam(self.mine(), lr=self.rate(lr))

    def owners_of(self, parameters):
        held, owners = [0] * world_size, {}
        for p in sorted(parameters, key=lambda p: -p.numel()):
            owners[p] = held.index(min(held))
            held[owners[p]] += p.numel()
        return owners

    def mine(self):
        return [p for p, owner in self.owners.items() if owner == rank]

    def rate(self, lr):
        return lr

    def step(self):
        self.optimizer.step()
        for p, owner in self.owners.items():
            dist.broadcast(p.detach(), owner)

    def zero_grad(self):
        for p in self.owners:
            p.grad = None

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

class AllFromRankZero(ShardedAdam):
    def step(self):
        self.optimizer.step()
        for p in self.owners:
            dist.broadcast(p.detach(), 0)

class Forgetful(ShardedAdam):
    def step(self):
        self.optimizer.state.clear()
        super().step()

class InTurn(ShardedAdam):
    def owners_of(self, parameters):  # with an even number of ranks, some get biases only
        return {p: i % world_size for i, p in enumerate(parameters)}

class Sgd(ShardedAdam):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.optimizer = torch.optim.SGD(self.mine(), lr=lr)

"""
RIGHT = ['"16.1", MyDDP', '"16.1", FirstStepInOneBucket', '"16.2", ShardedAdam', '"16.2", FlatAdam']
WRONG = [
    '"16.1", lambda module, bucket_bytes: module',
    '"16.1", torch.optim.Adam if rank == 0 else (lambda: None)',
    '"16.1", type("Plain", (), {"__init__": lambda self, *given: None})',
    '"16.1", type("NoBuckets", (MyDDP,), {"__init__": lambda self, module: None})',
    '"16.1", but(MyDDP, shared=lambda self: [])',
    '"16.1", but(MyDDP, shared=lambda self: [*self.module.parameters()])',
    '"16.1", but(MyDDP, scale=lambda self: 1)',
    '"16.1", but(MyDDP, write=lambda self, p, mean: MyDDP.write(self, p, mean / world_size))',
    '"16.1", but(MyDDP, write=lambda self, p, mean: None)',
    '"16.1", but(MyDDP, scale=lambda self: float(rank == 0))',
    '"16.1", OnlyOnce',
    '"16.1", but(MyDDP, is_ready=lambda self, p: None)',
    '"16.1", but(MyDDP, buckets_of=lambda self, parameters, _: [parameters])',
    '"16.1", but(MyDDP, buckets_of=lambda self, parameters, _: [[p] for p in parameters])',
    '"16.1", but(MyDDP, reduce=lambda self, flat: dist.all_reduce(flat))',
    '"16.1", but(MyDDP, buckets_of=lambda self, ps, size: MyDDP.buckets_of(self, ps[::-1], size))',
    '"16.1", UnevenBuckets',
    '"16.1", AsTheyComplete',
    '"16.1", but(AsTheyComplete, send_rest=lambda self: None)',
    '"16.1", but(MyDDP, no_sync=lambda self: nullcontext())',
    '"16.1", ForgetsTheFirst',
    '"16.1", but(MyDDP, no_sync=property())',
    '"16.2", 3',
    '"16.2", type("NoRate", (ShardedAdam,), {"__init__": lambda self, parameters: None})',
    '"16.2", but(ShardedAdam, step=lambda self: self.optimizer.step())',
    '"16.2", AllFromRankZero',
    '"16.2", but(ShardedAdam, rate=lambda self, lr: 1e-3)',
    '"16.2", but(ShardedAdam, zero_grad=lambda self: self.optimizer.zero_grad())',
    '"16.2", Forgetful',
    '"16.2", but(ShardedAdam, mine=lambda self: [*self.owners])',
    '"16.2", InTurn',
    '"16.2", Sgd',
    '"16.2", but(ShardedAdam, zero_grad=property())',
]


def test_check_answer_accepts_right_classes_and_names_the_mistake_of_wrong_ones(
    make_group: Callable[..., Ranks], snapshot: SnapshotAssertion
) -> None:
    assert_verdicts(make_group(RANKS), PARTS, RIGHT, WRONG, snapshot)
