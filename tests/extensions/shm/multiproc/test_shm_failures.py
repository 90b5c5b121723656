"""Many kills, interrupts and different calls at random moments in collectives.

``NBDDP_SHM_FAILURES`` is the number of each, ``NBDDP_SOAK_SEED`` the seed.
"""

import os
import random
from collections.abc import Callable

import pytest
from conditions import interrupt_at
from drivers.ranks import MakeRanks, Ranks
from processes import wait_until

from nbddp import CellFailedError

FAILURES = int(os.environ.get("NBDDP_SHM_FAILURES", "10"))
SEED = int(os.environ.get("NBDDP_SOAK_SEED", "1"))
RANKS = 3
SETUP = """
import itertools, os, random, threading
from pathlib import Path
pair = dist.new_group([0, 1])

def reduce_all(x):
    dist.all_reduce(x)

def reduce_later(x):
    dist.all_reduce(x, async_op=True).wait()

def gather(x):
    found = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(found, x)
    x.copy_(sum(found))

def send_around(x):
    total = x.clone()
    for _ in range(world_size - 1):
        got = torch.empty_like(x)
        work = dist.isend(x.clone(), (rank + 1) % world_size)
        dist.recv(got, (rank - 1) % world_size)
        work.wait()
        x.copy_(got)
        total += got
    x.copy_(total)

def use_pair(x):
    if rank < 2:
        dist.all_reduce(x, group=pair)
    dist.broadcast(x, 0)
    x += 3

CALLS = [reduce_all, reduce_later, gather, send_around, use_pair]
OF_ALL = CALLS[:3]  # the others would wait for a rank that is in another group, or sends nothing

def call(rng, calls=CALLS):
    x = torch.full((rng.choice([1, 100, 40_000, 2_000_000]),), rank + 1.0)
    rng.choice(calls)(x)
    assert x.eq(6).all(), "a wrong value"

def loop(seed, steps, act, calls=CALLS):
    rng = random.Random(seed)
    for step in itertools.count():
        if step == steps:
            act()
        call(rng, calls)

def used():
    return Path("/proc/self/maps").read_text().count("nbddp-shm")
"""
WORKS = "for seed in range(3):\n    call(random.Random(seed))"
DIFFERENT = (
    *("dist.barrier()", "dist.all_reduce(torch.ones(3, dtype=torch.int32))"),
    "dist.all_gather([torch.ones(9) for _ in range(3)], torch.ones(9))",
)


def kill(group: Ranks, loop: str, victim: int, _number: int) -> None:
    moment = "lambda: threading.Timer(random.random() / 100, os.kill, (os.getpid(), 9)).start()"
    with pytest.raises(CellFailedError, match=rf"rank {victim} .*SIGKILL") as failed:
        group.run(f"{loop}, {moment})", quiet=True)
    assert "wrong" not in str(failed.value)
    group.heal(donor=int(victim == 0))  # rank 2 is not in the group `pair`


def interrupt(group: Ranks, loop: str, victim: int, number: int) -> None:
    handle = group.begin(f"{loop}, Path('at{number}.{victim}').touch)")
    interrupt_at(group, handle, f"at{number}.{victim}")


def call_differently(group: Ranks, loop: str, _victim: int, number: int) -> None:
    with pytest.raises(CellFailedError, match="have called different collectives"):
        group.run(f"{loop}, lambda: {DIFFERENT[number % len(DIFFERENT)]}, OF_ALL)", quiet=True)


@pytest.mark.full
@pytest.mark.timeout(60 + 5 * FAILURES)
@pytest.mark.parametrize("fail", [kill, interrupt, call_differently])
def test_failures_in_collectives_leave_no_wrong_value_and_no_memory(
    make_group: MakeRanks, fail: Callable[[Ranks, str, int, int], None]
) -> None:
    group, rng = make_group(RANKS, backend="shm"), random.Random(SEED)
    group.run(f"{SETUP}{WORKS}")
    before = group.evaluate("used()")
    for number in range(FAILURES):
        victim, steps = rng.randrange(RANKS), rng.randrange(20)
        loop = f"loop({number}, {steps} if rank == {victim} else -1"
        fail(group, loop, victim, number)
        group.run(WORKS, quiet=True)
    # threads of interrupted calls may end later
    assert wait_until(lambda: group.evaluate("used()") == before)
