"""Answers that are functions, checked on four ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from answers import assert_verdicts
from drivers.ranks import Ranks
from syrupy.assertion import SnapshotAssertion

pytestmark = pytest.mark.multiproc
RANKS = 4
PARTS = """
import math

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

def each_for_itself(store, download):
    return download()

def in_bytes(store, download):
    if store.add("turn", 1) == 1:
        store.set("name", download())
    return store.get("name")

def another_name(store, download):
    if store.add("turn", 1) == 1:
        download()
    return "digits"

def own_name(store, download):
    if store.add("turn", 1) == 1:
        download()
    return f"digits-{rank}"

def checksum(model):
    return sum(each.double().sum().item() for each in model.parameters())

def spread(model):
    mine = checksum(model)
    return nbddp.all_reduce(mine, "max") - nbddp.all_reduce(mine, "min")

def seen_by_the_last(model):
    return spread(model) and rank == world_size - 1

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
    '"01.4", each_for_itself',
    '"01.4", lambda store, download: "digits"',
    '"01.4", in_bytes',
    '"01.4", another_name',
    '"01.4", own_name',
    '"01.4", lambda store, download: len(name_of(store, download))',
    '"02.2", lambda model: True',
    '"02.2", lambda model: False',
    '"02.2", seen_by_the_last',
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
]


def test_check_answer_returns_the_same_verdict_on_all_ranks(
    make_group: Callable[..., Ranks], snapshot: SnapshotAssertion
) -> None:
    assert_verdicts(make_group(RANKS), PARTS, RIGHT, WRONG, snapshot)
