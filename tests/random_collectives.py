"""Random collectives, by a backend and by Gloo, on the ranks of a group: the results are equal.

All ranks draw the same numbers, and each fills its tensors with its own. Gloo gets contiguous
tensors, because it reduces wrong elements of others. Asynchronous calls of several groups start in
another order on each rank. The backend makes each reduction twice: the bits are the same.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

Tensors = list[torch.Tensor]
OP = dist.ReduceOp
DTYPES = (  # of Gloo
    *[torch.float32, torch.float64, torch.float16, torch.bfloat16],
    *[torch.int8, torch.uint8, torch.int32, torch.int64],
)
SHAPES = ((1,), (7,), (3, 5), (0, 2), (1000,), (40000,), (300, 1000), (5, 300_000))
MAX_WAITING = 5  # asynchronous calls
REDUCED = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "coalesced")
BLOCKING = ("objects", "messages", "coalesced", "all_to_all")  # Gloo's all_to_all sends objects


class Case:
    """One collective on this rank; ``run`` carries it out in a group."""

    def __init__(self, rng: random.Random, number: int, sets: Sequence[tuple[int, ...]]) -> None:
        self.ranks = rng.choice(sets)
        self.kind = rng.choice([name for name in vars(Case) if name.startswith("do_")])[3:]
        self.dtype = rng.choice(DTYPES)
        self.op = rng.choice([OP.SUM, OP.SUM, OP.MIN, OP.MAX, OP.PRODUCT])
        self.shape = rng.choice(SHAPES)
        self.is_strided = rng.random() < 0.3
        self.is_async = rng.random() < 0.5 and self.kind not in BLOCKING
        self.root = rng.choice(self.ranks)
        size = len(self.ranks)
        self.parts = [[rng.randint(0, 50) for _ in range(size)] for _ in range(size)]
        is_reduced = self.kind in REDUCED
        # equal bits if two ranks add, or if no order of the ranks matters
        is_exact = not is_reduced or size == 2 or self.op in (OP.MIN, OP.MAX)
        coarse = {torch.float16: 0.05, torch.bfloat16: 0.3, torch.float32: 1e-4}
        self.tolerance = 0.0 if is_exact else coarse.get(self.dtype, 1e-9)
        if dist.get_rank() not in self.ranks:
            return
        self.me = self.ranks.index(dist.get_rank())
        self.generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        self.one = self.tensor(self.shape)
        self.lists = [self.tensor(self.shape) for _ in self.ranks]
        self.all = self.tensor((self.shape[0] * size, *self.shape[1:]))
        self.uneven = self.tensor((sum(self.parts[self.me]), 3))

    def tensor(self, shape: Sequence[int]) -> torch.Tensor:
        wide = [*shape[:-1], 2 * shape[-1]]
        if self.dtype.is_floating_point:
            made = torch.randn(wide, generator=self.generator).to(self.dtype)
        else:
            made = torch.randint(0, 5, wide, generator=self.generator).to(self.dtype)
        return made[..., ::2] if self.is_strided else made[..., : shape[-1]].contiguous()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy for this group, which it may change."""
        if self.is_gloo:
            return tensor.contiguous().clone()
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)

    def new(self, shape: Sequence[int] | None = None) -> torch.Tensor:
        return torch.empty(self.shape if shape is None else shape, dtype=self.dtype)

    def run(self, group: Any, *, is_gloo: bool) -> tuple[Tensors, Callable[[], object]]:
        """Return the results, and a function that waits for them."""
        self.group, self.is_gloo = group, is_gloo
        self.given: dict[str, Any] = {"group": group, "async_op": self.is_async}
        results, work = getattr(self, f"do_{self.kind}")()
        return results, work.wait if work is not None else lambda: None

    # ---- the collectives

    def do_all_reduce(self) -> Any:
        x = self.copy(self.one)
        return [x], dist.all_reduce(x, self.op, **self.given)

    def do_reduce(self) -> Any:
        x = self.copy(self.one)
        work = dist.reduce(x, self.root, self.op, **self.given)
        return [x] if dist.get_rank() == self.root else [], work

    def do_broadcast(self) -> Any:
        x = self.copy(self.one)
        return [x], dist.broadcast(x, self.root, **self.given)

    def do_all_gather(self) -> Any:
        out = [self.new() for _ in self.ranks]
        return out, dist.all_gather(out, self.copy(self.one), **self.given)

    def do_all_gather_into_tensor(self) -> Any:
        out = self.new(self.all.shape)
        return [out], dist.all_gather_into_tensor(out, self.copy(self.one), **self.given)

    def do_reduce_scatter(self) -> Any:
        out = self.new()
        return [out], dist.reduce_scatter(out, [*map(self.copy, self.lists)], self.op, **self.given)

    def do_reduce_scatter_tensor(self) -> Any:
        out = self.new()
        return [out], dist.reduce_scatter_tensor(out, self.copy(self.all), self.op, **self.given)

    def do_all_to_all(self) -> Any:
        out = [self.new() for _ in self.ranks]
        if not self.is_gloo:
            return out, dist.all_to_all(out, [*map(self.copy, self.lists)], **self.given)
        sent: list[Any] = [None] * len(self.ranks)  # Gloo has no all_to_all
        dist.all_gather_object(sent, self.lists, group=self.group)
        return [each[self.me] for each in sent], None

    def do_all_to_all_single(self) -> Any:
        out = self.new(self.all.shape)
        return [out], dist.all_to_all_single(out, self.copy(self.all), **self.given)

    def do_uneven_all_to_all_single(self) -> Any:
        received = [sent[self.me] for sent in self.parts]
        out, sent = self.new((sum(received), 3)), self.copy(self.uneven)
        sizes = received, self.parts[self.me]
        return [out], dist.all_to_all_single(out, sent, *sizes, **self.given)

    def do_gather(self) -> Any:
        out = [self.new() for _ in self.ranks] if dist.get_rank() == self.root else []
        return out, dist.gather(self.copy(self.one), out or None, self.root, **self.given)

    def do_scatter(self) -> Any:
        out, is_root = self.new(), dist.get_rank() == self.root
        sent = [*map(self.copy, self.lists)] if is_root else None
        return [out], dist.scatter(out, sent, self.root, **self.given)

    def do_barrier(self) -> Any:
        return [], dist.barrier(**self.given)

    def do_objects(self) -> Any:
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, dist.get_rank(), group=self.group)
        assert found == [*self.ranks]
        return [], None

    def do_messages(self) -> Any:
        """Send two to the next rank, which receives them in the other order."""
        size, group = len(self.ranks), self.group
        if size == 1:
            return [], None
        target, source = self.ranks[(self.me + 1) % size], self.ranks[self.me - 1]
        sent, out = [*map(self.copy, self.lists[:2])], [self.new(), self.new()]
        works: list[Any] = [dist.isend(each, target, group, tag) for tag, each in enumerate(sent)]
        works += [dist.irecv(out[tag], source, group, tag) for tag in (1, 0)]
        for work in works:
            work.wait()
        return out, None

    def do_coalesced(self) -> Any:
        out = [*map(self.copy, self.lists)]
        if self.is_gloo:
            for tensor in out:
                dist.all_reduce(tensor, self.op, self.group)
        else:
            with dist.distributed_c10d._coalescing_manager(self.group):
                for tensor in out:
                    dist.all_reduce(tensor, self.op, self.group)
        return out, None


def compare(count: int, seed: int) -> None:
    """Compare so many collectives of the default group's backend with those of Gloo."""
    size = dist.get_world_size()
    sets = [tuple(range(size)), *(tuple(range(n)) for n in range(1, size)), (*range(1, size),)]
    groups = {
        ranks: (dist.new_group([*ranks], backend="gloo"), dist.new_group([*ranks]))
        for ranks in dict.fromkeys(sets)
    }
    rng, own_rng = random.Random(seed), random.Random(dist.get_rank())
    batch: list[Case] = []
    for number in range(count):
        batch.append(Case(rng, seed * count + number, sets))
        if batch[-1].is_async and len(batch) < MAX_WAITING and number < count - 1:
            continue
        *waiting, last = batch
        runs = [run_twice(case, groups) for case in [*shuffled(waiting, own_rng), last]]
        for checked in filter(None, runs):
            check(*checked)
        batch.clear()


def shuffled(cases: Sequence[Case], rng: random.Random) -> Iterator[Case]:
    """Yield cases in a random order, but those of a group in their own."""
    queues = defaultdict(list)
    for case in cases:
        queues[case.ranks].append(case)
    for ranks in rng.sample([case.ranks for case in cases], len(cases)):
        yield queues[ranks].pop(0)


def run_twice(case: Case, groups: Any) -> Any:
    """Run a case by Gloo and by the backend, by this once more if it reduces."""
    if dist.get_rank() not in case.ranks:
        return None
    gloo, tried = groups[case.ranks]
    expected, found = case.run(gloo, is_gloo=True), case.run(tried, is_gloo=False)
    again = case.run(tried, is_gloo=False) if case.kind in REDUCED else None
    return case, expected, found, again


def check(case: Case, expected: Any, found: Any, again: Any) -> None:
    """Wait for the calls, and compare their results."""
    for _, wait in filter(None, (expected, found, again)):
        wait()
    limits: Any = {"rtol": case.tolerance, "atol": case.tolerance, "equal_nan": True}
    for one, other in zip(expected[0], found[0], strict=True):
        assert torch.allclose(one, other, **limits), vars(case)
    for one, other in zip(found[0], again[0], strict=True) if again else ():
        assert bits(one).equal(bits(other)), vars(case)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    # contiguous() keeps the stride of a single element
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(torch.uint8)
