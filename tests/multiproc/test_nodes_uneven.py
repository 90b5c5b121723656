"""Machines that differ: two ranks on one and one on the other, and what each has of its own."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from nodes_here import OnNodes
from processes import wait_until

from nbddp.errors import RequestError

pytestmark = [pytest.mark.full, pytest.mark.multiproc, pytest.mark.timeout(180)]

PLACES = """
import os
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
[os.environ[name] for name in names], (rank, local_rank, world_size), os.environ["MACHINE"]
"""


@pytest.fixture
def on_nodes(make_nodes: Callable[..., OnNodes]) -> OnNodes:
    return make_nodes(least=1, most=2)


def test_a_machine_of_two_ranks_and_one_of_one(on_nodes: OnNodes) -> None:
    for nproc, threads in ((2, "1"), (1, "3")):
        env = os.environ | {"MACHINE": f"of {nproc}", "OMP_NUM_THREADS": threads}
        on_nodes.bring_keeper(nproc, env=env, with_agent=True)
    group = on_nodes.start_ranks()
    assert group.evaluate(PLACES) == [
        (["0", "0", "2", "0", "2", "3"], (0, 0, 3), "of 2"),
        (["1", "1", "2", "0", "2", "3"], (1, 1, 3), "of 2"),
        (["2", "0", "1", "1", "2", "3"], (2, 0, 3), "of 1"),
    ]
    cores = [node.facts["cores"] for node in on_nodes.nodes.door.nodes]
    expected = [max(1, cores[0] // 2)] * 2 + [cores[1]]
    assert group.evaluate("torch.get_num_threads()") == expected
    group.assert_works()
    first, second = (node.name for node in on_nodes.nodes.door.nodes)
    assert [each.node for each in group.snapshot().ranks] == [first, first, second]


def test_a_spare_that_is_too_small_takes_no_place_and_makes_a_smaller_world(
    on_nodes: OnNodes,
) -> None:
    lost = on_nodes.bring_keeper(2)
    group = on_nodes.bring_all(1, 1)  # the last is a spare
    name = on_nodes.node_of(0).name
    on_nodes.nodes.leave(name)
    lost.wait(30)
    assert wait_until(lambda: group.alive == [2])
    with pytest.raises(RequestError, match=f"node {name} "):
        group.heal()
    on_nodes.restart_ranks()
    assert group.evaluate("dist.barrier()\nrank, local_rank") == [(0, 0), (1, 0)]
