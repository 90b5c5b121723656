"""Heals, names and nodes at random, for minutes."""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
from drivers.ranks import MakeRanks, Ranks
from limits import limit
from local_nodes import ORPHAN_TIMEOUT, OnNodes, SeparateNetworks, all_ended, process_tree
from multiproc.conftest import WarmLauncher
from processes import wait_until
from virtual_networks import NET, has_namespaces

from nbddp import CellFailedError, RequestError
from nbddp.record.waiting.collective_matcher import Straggler

pytestmark = [pytest.mark.multiproc, pytest.mark.soak, pytest.mark.timeout(3600)]

SETUP = """
import hashlib
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
model = nbddp.prepare(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = nbddp.loader(torch.randn(4096, 64), 16)
step = 0
def digest():
    parts = [each.detach().numpy().tobytes() for each in model.parameters()]
    parts += [each["exp_avg"].numpy().tobytes() for each in optimizer.state.values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()
"""
TRAIN = """
while True:
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        step += 1
"""


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_heal_replaces_a_rank_killed_at_a_random_moment(make_group: MakeRanks, nproc: int) -> None:
    chance = random.Random(nproc)
    group = make_group(nproc)
    group.run(SETUP, quiet=True)
    for kill in range(int(os.environ.get("NBDDP_SOAK_KILLS", "34"))):
        before, victim = group.pids, chance.randrange(nproc)
        timer = threading.Timer(chance.uniform(0.0, 0.6), os.kill, (before[victim], signal.SIGKILL))
        timer.start()
        with pytest.raises((CellFailedError, RequestError)):  # it may die before the cell begins
            group.run(TRAIN, quiet=True)
        timer.join()
        assert wait_until(lambda: not group.is_busy)
        assert group.heal().ranks == (victim,), f"kill {kill}"
        after = group.pids
        assert [rank for rank in range(nproc) if before[rank] != after[rank]] == [victim]
        told = group.evaluate("digest(), loader.step")
        assert len({*told}) == 1, f"kill {kill} of rank {victim}: {told}"


@pytest.mark.parametrize("nproc", [16, 64])
def test_heal_replaces_one_of_many_ranks(make_group: MakeRanks, nproc: int) -> None:
    group = make_group(nproc)
    group.run(SETUP, quiet=True)
    for victim in (3, 0, nproc - 1):
        group.kill(victim)
        assert group.heal().ranks == (victim,)
        told = group.evaluate("dist.barrier()\ndigest()")
        assert len({*told}) == 1


RUNS, AT_ONCE = 100, 5
# twelve seconds: the two-second and the ten-second reports both appear
EQUAL = """
import time
x, work, began, step, is_over = torch.ones(1000), torch.ones(128, 128), time.monotonic(), 0, False
while not is_over:
    time.sleep(0.02)
    work @ work
    dist.all_reduce(x)
    nbddp.log(step=step, loss=1.0)
    step += 1
    if step % 10 == 0:
        flag = torch.tensor([float(time.monotonic() - began > 12)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        is_over = bool(flag.item())
"""


def named_in(launcher: WarmLauncher, number: int) -> Straggler | None:
    """Return the first rank that is marked as slow in one run of a fresh group, or None."""
    found: list[Straggler] = []

    def look() -> bool:
        awaited = group.straggler()
        if awaited is not None:
            found.append(awaited)
        return handle.is_finished

    group = Ranks(nproc=2 + number % 3, launcher=launcher)
    try:
        group.start()
        handle = group.begin(EQUAL)
        assert wait_until(look, timeout=60.0)
        assert handle.result is not None
        assert handle.result.is_ok
    finally:
        group.close()
    return found[0] if found else None


def test_equal_ranks_are_marked_as_slow_in_at_most_one_of_100_runs(
    launcher: WarmLauncher,
    folder: Path,  # noqa: ARG001 - where the runs are recorded
) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        told = list(threads.map(lambda number: named_in(launcher, number), range(RUNS)))
    named = {number: each for number, each in enumerate(told) if each is not None}
    assert len(told) == RUNS
    assert len(named) <= 1, named


ROUNDS = int(os.environ.get("NBDDP_SOAK_ROUNDS", "20"))
NAMED = 2.0  # seconds until a node is named, from where it can be known
LEFT = 5.0  # seconds after which nothing of it is left
MEET = "dist.barrier()\nrank"
WORK = "while True: dist.all_reduce(torch.ones(1000))"


class Rounds:
    """A group on two nodes, one of which is lost repeatedly."""

    def __init__(self, on_nodes: OnNodes) -> None:
        self.on_nodes = on_nodes
        self.group = on_nodes.group
        self.chance = random.Random(7)
        self.took: dict[str, list[float]] = {}

    def note(self, what: str, seconds: float) -> None:
        """Record a duration."""
        self.took.setdefault(what, []).append(seconds)

    def report(self, title: str) -> None:
        """Print the recorded durations."""
        for what, seconds in self.took.items():
            middle, worst = statistics.median(seconds), max(seconds)
            count = f"{len(seconds)} times"
            sys.stdout.write(f"{title}, {what}: {count}, {middle:.2f} s, at worst {worst:.2f} s\n")

    def lose(self, rank: int, strike: Callable[[], None], *, known_after: float = 0.0) -> None:
        """Lose the node of this rank while a cell runs."""
        node = self.on_nodes.node_of(rank)
        ranks = self.on_nodes.nodes.launcher.ranks_of(node)
        before, told = self.group.pids, len(self.on_nodes.messages)
        kept = [other for other in before if other not in ranks]
        self.group.run("kept = rank", quiet=True)

        def act() -> None:
            strike()
            began = time.monotonic()
            limit = known_after + 3 * NAMED
            wait_until(lambda: len(self.on_nodes.messages) > told, timeout=limit)
            self.note("named", time.monotonic() - began - known_after)

        timer = threading.Timer(self.chance.uniform(0.0, 1.0), act)
        timer.start()
        with pytest.raises(CellFailedError) as caught:
            self.group.run(WORK, quiet=True)
        timer.join()
        assert f"node {node.name}: " in caught.value.report
        [said] = self.on_nodes.messages[told:]
        assert said.startswith(f"node {node.name} ")
        assert f"ranks {ranks[0]}-{ranks[-1]}" in said
        assert self.took["named"][-1] < NAMED, self.took["named"]
        assert self.group.alive == kept
        assert self.group.pids == {rank: before[rank] for rank in kept}

    def go_on(self, ranks: tuple[int, ...]) -> None:
        """Heal on the new node, and check that the ranks have their names again."""
        began = time.monotonic()
        before = self.group.pids
        assert self.group.heal().ranks == ranks
        now = self.group.pids
        assert {rank: now[rank] for rank in before} == before
        self.group.assert_works()
        assert self.group.evaluate("kept is not None") == [True] * 4
        self.note("healed", time.monotonic() - began)

    def await_end(self, processes: list[psutil.Process]) -> None:
        """Wait for the end of all processes of a node."""
        began = time.monotonic()
        assert all_ended(processes, timeout=3 * LEFT)
        self.note("gone", time.monotonic() - began)
        assert self.took["gone"][-1] < LEFT, self.took["gone"]


@pytest.fixture
def rounds(make_nodes: Callable[..., OnNodes]) -> Rounds:
    return Rounds(make_nodes())


def kill_agent(on_nodes: OnNodes) -> None:
    on_nodes.agent_of(2).kill()


def kill_all(on_nodes: OnNodes) -> None:
    for each in process_tree(on_nodes.agent_of(2)):
        each.kill()


@pytest.mark.parametrize("strike", [kill_agent, kill_all])
def test_heal_after_a_node_is_killed(rounds: Rounds, strike: Callable[[OnNodes], None]) -> None:
    on_nodes = rounds.on_nodes
    on_nodes.bring(3)
    on_nodes.start_ranks()
    for _ in range(ROUNDS):
        its = process_tree(on_nodes.agent_of(2))
        rounds.lose(2, partial(strike, on_nodes))
        rounds.await_end(its)
        rounds.go_on((2, 3))
        on_nodes.bring()  # the next spare
    rounds.report(strike.__name__)


# ---- cables


@pytest.fixture
def apart(make_nodes: Callable[..., SeparateNetworks]) -> SeparateNetworks:
    if not has_namespaces():
        pytest.skip("needs root, and network namespaces")
    return make_nodes(SeparateNetworks)


def test_heal_after_a_network_cable_is_cut(apart: SeparateNetworks) -> None:
    rounds = Rounds(apart)
    spaces = {f"{NET}.{number}": apart.connect_separate_node() for number in (2, 3)}
    apart.start_ranks()
    for number in range(4, 4 + ROUNDS):
        node = apart.node_of(2)
        its = process_tree(psutil.Process(node.facts["pid"]))
        cut = partial(apart.cables.cut, spaces[node.address])
        rounds.lose(2, cut, known_after=limit("node_silent_after"))
        began = time.monotonic()
        spaces[f"{NET}.{number}"] = apart.connect_separate_node()
        rounds.go_on((2, 3))
        assert all_ended(its, timeout=ORPHAN_TIMEOUT + limit("notebook_silent_after") + 3 * LEFT)
        rounds.note("the cut one ended itself", time.monotonic() - began)
    rounds.report("cable cut")


def test_nodes_return_after_a_network_partition(apart: SeparateNetworks) -> None:
    rounds = Rounds(apart)
    spaces = [apart.connect_separate_node("--orphan-timeout", "60") for _ in (2, 3)]
    apart.start_ranks()
    for number in range(ROUNDS):
        if number % 2:
            _lose_all(rounds, apart, spaces)
            continue
        space = spaces[int(apart.node_of(2).address.rpartition(".")[2]) - 2]
        rounds.lose(2, partial(apart.cables.cut, space), known_after=limit("node_silent_after"))
        began = time.monotonic()
        apart.cables.mend(space)
        apart.await_nodes(2)
        rounds.note("came back", time.monotonic() - began)
        rounds.go_on((2, 3))
    rounds.report("partition")


def _lose_all(rounds: Rounds, apart: SeparateNetworks, spaces: list[str]) -> None:
    """Disconnect all nodes for a while."""
    told = len(apart.messages)
    began: list[float] = []

    def cut() -> None:
        for space in spaces:
            apart.cables.cut(space)
        began.append(time.monotonic())

    timer = threading.Timer(rounds.chance.uniform(0.0, 1.0), cut)
    timer.start()
    with pytest.raises(CellFailedError, match=r"\b5 s\b"):
        rounds.group.run(WORK, quiet=True)
    timer.join()
    assert wait_until(lambda: len(apart.messages) == told + 2, timeout=3 * NAMED)
    rounds.note("all named", time.monotonic() - began[0] - limit("node_silent_after"))
    assert rounds.took["all named"][-1] < NAMED
    for space in spaces:
        apart.cables.mend(space)
    began.append(time.monotonic())
    apart.await_nodes(2)
    rounds.note("all came back", time.monotonic() - began[1])
    assert apart.restart_ranks().evaluate(MEET) == [0, 1, 2, 3]
    rounds.note("all run again", time.monotonic() - began[1])
