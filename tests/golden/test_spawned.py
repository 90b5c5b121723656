"""Golden walks of ranks that are started with ``spawn``, as on macOS."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers.ranks import Ranks, new_launcher
from processes import wait_until

import nbddp

pytestmark = [pytest.mark.multiproc, pytest.mark.full]

WORKS = "x = torch.ones(1)\ndist.all_reduce(x)\nkept, int(x.item())"


@pytest.fixture
def spawned(folder: Path) -> Iterator[Ranks]:  # noqa: ARG001 - where the run is recorded
    group = Ranks(nproc=2, launcher=new_launcher("spawn"))
    try:
        group.start()
        group.run("kept = rank * 10", quiet=True)
        yield group
        assert group.run(WORKS, wants_value=True).values() == [(0, 2), (10, 2)]
    finally:
        group.close()


def test_spawned_ranks_have_names_and_a_process_group(spawned: Ranks) -> None:
    assert spawned.alive == [0, 1]
    spawned.push({"sent": [1, 2]})
    assert spawned.pull("sum(sent) + rank") == [3, 4]
    assert spawned.run("world_size, local_rank", wants_value=True).values() == [(2, 0), (2, 1)]


def test_interrupt_ends_a_cell_on_all_spawned_ranks(spawned: Ranks, folder: Path) -> None:
    handle = spawned.begin(
        "import time\nopen(f'begun{rank}', 'w').close()\nif rank == 0: dist.barrier()\n"
        "while True: time.sleep(0.01)"
    )
    assert wait_until(lambda: all((folder / f"begun{rank}").exists() for rank in range(2)))
    spawned.interrupt()
    with pytest.raises(nbddp.CellInterruptedError):
        spawned.finish(handle).raise_for_failure()


def test_killed_spawned_rank_is_named_and_restart_replaces_all_ranks(spawned: Ranks) -> None:
    before = spawned.pids
    spawned.kill(1)
    with pytest.raises(nbddp.RequestError, match=r"rank 1.*SIGKILL.*heal"):
        spawned.run("pass")
    assert spawned.alive == [0]
    spawned.restart()
    assert not set(spawned.pids.values()) & set(before.values())
    spawned.run("kept = rank * 10", quiet=True)


def test_heal_replaces_one_spawned_rank_and_keeps_the_other(spawned: Ranks) -> None:
    before = spawned.pids
    with pytest.raises(nbddp.CellFailedError, match=r"rank 1.*\b3\b"):
        spawned.run("import os\nif rank == 1: os._exit(3)\ndist.barrier()")
    spawned.heal()
    after = spawned.pids
    assert after[0] == before[0]
    assert after[1] != before[1]
