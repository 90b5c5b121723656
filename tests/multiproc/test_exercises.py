"""Answers that are functions, checked on four ranks."""

from __future__ import annotations

from collections.abc import Callable

from answers import assert_verdicts
from drivers.ranks import Ranks
from syrupy.assertion import SnapshotAssertion

RANKS = 4
PARTS = """
import copy
import math
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

left, right = (rank - 1) % world_size, (rank + 1) % world_size

def turn(x, to=right, of=left):
    arriving = torch.empty_like(x)
    there, here = dist.isend(x, to), dist.irecv(arriving, of)
    there.wait(), here.wait()
    return arriving

def ring(tensor, first=1, steps=world_size - 1):
    chunks = tensor.tensor_split(world_size)
    for step in range(steps):
        mine = (rank - step - 1 - first) % world_size
        chunks[mine].add_(turn(chunks[(rank - step - first) % world_size]))
    return chunks[(rank + 1 - first) % world_size]

def name_of(store, download):
    if store.add("turn", 1) == 1:
        store.set("name", download())
    return store.get("name").decode()

def checksum(model):
    return sum(each.double().sum().item() for each in model.parameters())

def spread(model):
    mine = checksum(model)
    return nbddp.all_reduce(mine, "max") - nbddp.all_reduce(mine, "min")

def seen_by_the_last(model):
    return spread(model) and rank == world_size - 1

def train(model, train_set, test_set, *, seed=0, shuffle=True, tell=True, wrap=True, share=True):
    own = DistributedSampler(train_set, seed=seed) if share else None
    loader = DataLoader(train_set, batch_size=4, sampler=own)
    wrapped = DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        if share and tell:
            own.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(inputs), labels).backward()
            optimizer.step()
    return count(model, Subset(test_set, range(rank, len(test_set), world_size)))

def count(model, samples):
    batches = DataLoader(samples, batch_size=4)
    return sum((model(inputs).argmax(1) == labels).sum() for inputs, labels in batches)

def right_on_all(*sets, **options):
    total = torch.as_tensor(train(*sets, **options))
    dist.all_reduce(total)
    return total

def all_on_each(model, *sets):
    train(model, sets[0], [])
    return count(model, sets[1])

def padded(model, *sets):
    train(model, sets[0], [])
    total = count(model, Subset(sets[1], list(DistributedSampler(sets[1]))))
    dist.all_reduce(total)
    return total

def begin(loader, state):
    batches = iter(loader)
    torch.set_rng_state(state)
    return batches

def is_left_out(loss):
    return math.isnan(nbddp.all_reduce(loss.item(), "mean"))

def shared(batches):
    return batches[: nbddp.all_reduce(len(batches), "min")]
"""
RIGHT = [
    '"01.1", turn',
    '"01.2", ring',
    '"01.4", name_of',
    '"02.2", spread',
    '"02.3", 12, 8, 3, 11',
    '"02.5", right_on_all',
    '"02.5", lambda *given: right_on_all(*given).item()',
    '"02.5", all_on_each',
    '"04.1", begin',
    '"05.3", is_left_out',
    '"06.1", shared',
    '"06.1", lambda batches: iter(shared(batches))',
    '"10.2", lambda loss: nbddp.all_reduce(loss, "mean") < 0.1',
    '"10.2", lambda loss: nbddp.all_reduce(loss, "min") < 0.1',
    '"10.2", lambda loss: torch.tensor(nbddp.all_reduce(loss)) < 0.4',
]
WRONG = [
    '"01.1", lambda x: x',
    '"01.1", lambda x: turn(x, left, right)',
    '"01.1", lambda x: turn(x) * 0',
    '"01.1", lambda x: None',
    '"01.1", lambda x: turn(x)[:0]',
    '"01.1", turn if rank else 3',
    '"01.1", lambda x: turn(x) * (rank != 2)',
    '"01.2", lambda x: ring(x, first=0)',
    '"01.2", lambda x: ring(x, steps=1)',
    '"01.2", lambda x: None',
    '"01.4", lambda store, download: download()',
    '"01.4", lambda store, download: "digits"',
    '"01.4", lambda store, download: name_of(store, download).encode()',
    '"01.4", lambda store, download: name_of(store, download) and "digits"',
    '"01.4", lambda store, download: f"{name_of(store, download)}-{rank}"',
    '"01.4", lambda store, download: len(name_of(store, download))',
    '"02.2", lambda model: True',
    '"02.2", lambda model: False',
    '"02.2", seen_by_the_last',
    '"02.5", train',
    '"02.5", lambda *given: right_on_all(*given, share=False)',
    '"02.5", lambda *given: right_on_all(*given, tell=False)',
    '"02.5", lambda *given: right_on_all(*given, seed=rank)',
    '"02.5", lambda *given: right_on_all(*given, wrap=False)',
    '"02.5", lambda model, *sets: right_on_all(copy.deepcopy(model), *sets)',
    '"02.5", lambda model, some, test: right_on_all(model, Subset(some, range(8)), test)',
    '"02.5", lambda model, *sets: all_on_each(model, *sets) * world_size',
    '"02.5", padded',
    '"02.5", lambda *given: right_on_all(*given) / 17',
    '"02.5", lambda *given: [right_on_all(*given)] * 2',
    '"05.3", lambda loss: loss.isnan()',
    '"05.3", lambda loss: is_left_out(loss) and rank == 2',
    '"05.3", lambda loss: True',
    '"06.1", lambda batches: batches',
    '"06.1", lambda batches: shared(batches)[::-1]',
    '"06.1", lambda batches: None',
    '"06.1", lambda batches: torch.tensor(nbddp.all_reduce(len(batches), "min"))',
    '"06.1", lambda batches: batches[: nbddp.all_reduce(len(batches)) // world_size]',
    '"10.2", lambda loss: loss < 0.1',
    '"10.2", lambda loss: True',
    '"10.2", lambda loss: False',
    '"18.1", "train.py"',  # on the ranks, not in the notebook
]


def test_check_answer_returns_the_same_verdict_on_all_ranks(
    make_group: Callable[..., Ranks], snapshot: SnapshotAssertion
) -> None:
    assert_verdicts(make_group(RANKS), PARTS, RIGHT, WRONG, snapshot)
