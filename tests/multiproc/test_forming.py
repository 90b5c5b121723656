"""A process group that cannot be formed costs nobody but the rank that it fails on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from drivers.ranks import Ranks
from limits import set_limits

from nbddp import CellFailedError

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

# Rank 0 has told its address, which is above the others', so that Gloo leaves it to rank 0 to dial
# them; then it dies in the moment in which it would look up where they are.
DIES_BEFORE_IT_DIALS = """
import os, signal
c10d = dist.distributed_c10d

class LastStore(dist.Store):
    def __init__(self, store):
        super().__init__()
        self.store = store
    def set(self, key, value):
        self.store.set(key, value)
    def wait(self, *args):
        self.store.set("has told its address", "")
        os.kill(os.getpid(), signal.SIGKILL)
    get = multi_get = wait

def die_before_it_dials(store, rank, size, timeout, **_):
    options = real._Options()
    options._timeout = timeout
    options._devices = [real.create_device(hostname="127.0.0.2")]
    return real(LastStore(store), rank, size, options)

kept, real = rank, c10d.ProcessGroupGloo
if rank == 0: c10d.ProcessGroupGloo = die_before_it_dials
"""


def check_survivors(group: Ranks, *, dead: int) -> None:
    """All but one rank live and have their names."""
    alive = [rank for rank in range(group.world_size) if rank != dead]
    assert group.alive == alive
    kept = group.run("kept", ranks=alive, quiet=True, wants_value=True)
    assert kept.values() == alive


@pytest.mark.parametrize(
    ("before", "cell"),
    [
        pytest.param("dist.destroy_process_group()", "dist.barrier()", id="group of all ranks"),
        pytest.param("pass", "dist.new_group([0, 1, 2])\ndist.barrier()", id="group of some"),
    ],
)
def test_a_rank_that_dies_before_it_has_connected_costs_the_others_no_name(
    make_group: Callable[..., Ranks],
    capsys: pytest.CaptureFixture[str],
    before: str,
    cell: str,
) -> None:
    group = make_group(4)
    group.run(DIES_BEFORE_IT_DIALS)
    group.run(before)
    began = time.monotonic()
    with pytest.raises(CellFailedError) as caught:
        group.run(cell)
    assert time.monotonic() - began < 30  # the process group's timeout is half an hour
    assert str(caught.value) == "rank 0 was killed by SIGKILL"
    assert "did not answer" not in capsys.readouterr().out
    check_survivors(group, dead=0)


NO_ROOM = (
    "this rank has no file descriptors left for a process group (its limit is 256): close files "
    "in a cell with --no-init, which needs none"
)


@pytest.mark.gate_runs("0-(0, 1)", "5-(0,)")
@pytest.mark.parametrize(
    ("ranks", "who"), [("(0,)", "rank 0"), ("(1,)", "rank 1"), ("(0, 1)", "ranks 0-1")]
)
@pytest.mark.parametrize("left", [0, 5])
def test_a_cell_without_descriptors_for_a_process_group_says_how_to_get_some(
    group: Ranks, monkeypatch: pytest.MonkeyPatch, ranks: str, who: str, left: int
) -> None:
    if who == "ranks 0-1":  # each has time to find it out
        set_limits(monkeypatch, peers_patience=30.0)
    group.run(
        "import resource\nkept, opened = rank, []\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\ndist.destroy_process_group()\n"
        f"if rank in {ranks}:\n"
        "    try:\n        while True: opened.append(open('/dev/null'))\n"
        f"    except OSError: del opened[:{left}]"
    )
    for _ in range(2):
        with pytest.raises(CellFailedError) as caught:
            group.run("dist.barrier()")
        assert str(caught.value) == f"{who}: NoDescriptorsError: {NO_ROOM}"
        assert "Every rank keeps its names." in caught.value.report
    group.run_cell("for each in opened: each.close()", needs_group=False)
    group.run("dist.barrier()")
    assert group.pull("kept") == [0, 1]
