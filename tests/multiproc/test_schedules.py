"""Random schedules of deaths, stops, heals, lost nodes and timeouts, with real ranks.

Each schedule causes one or two failures during an operation, most often during a heal. Then
the group must settle, and each rank must have every variable that the heals did not report as lost.

A thousand: ``pytest -m soak tests/multiproc/test_schedules.py``; others: ``NBDDP_SOAK_SEED=7``,
``NBDDP_SOAK_STEPS=5000``.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest
from drivers.ranks import MakeRanks, Ranks
from limits import set_limits
from local_nodes import CONNECT_TIMEOUT, OnNodes, process_tree
from processes import wait_until

from nbddp import Healed, NbddpError

SEED = int(os.environ.get("NBDDP_SOAK_SEED", "1"))
STEPS = int(os.environ.get("NBDDP_SOAK_STEPS", "1000"))
SETTLED = ("ready", "a rank is dead", "not started")
FLOATS = 5_000_000  # a heal sends them for long enough that a rank dies meanwhile
HANGS = 90.0  # seconds after which a group that has not settled hangs

pytestmark = [
    pytest.mark.timeout(2 * 3600),
    # CPython reports and drops an interrupt in the callback of a weak reference
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL = """
model = nbddp.prepare(torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
TRAIN = """
import time
for _ in range(200):
    time.sleep(0.01)
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""
DIGEST = """
import hashlib
parts = [each.detach() for each in model.parameters()]
parts += [each["exp_avg"] for each in optimizer.state.values()]
hashlib.sha256(b"".join(each.numpy().tobytes() for each in parts)).hexdigest()
"""


class Schedules:
    def __init__(self, group: Ranks, seed: int) -> None:
        self.group = group
        self.chance = random.Random(seed)
        self.done: list[str] = []
        self.number = 0
        self.failures = {
            self.kill_any_rank: 4,
            self.kill_newest_process: 4,
            self.interrupt: 4,
            self.pause_briefly: 2,
            self.pause_until_killed: 2,
            self.stop_group: 1,
        }

    def run(self, source: str) -> None:
        self.group.run(source, quiet=True)

    def restart_ranks(self) -> None:
        self.group.restart()

    def replace_nodes(self) -> None:
        """Replace lost nodes; one machine has none."""

    def processes(self) -> list[psutil.Process]:
        """Return the ranks' processes, those that are just starting included."""
        return psutil.Process(self.group.helper_pid).children()

    # ---- one schedule

    def play(self) -> None:
        """Play one schedule, and check the state of the group."""
        self.number += 1
        self.done.clear()
        self.run(
            f"kept = {self.number}\nown = ({self.number}, rank)\nweights = torch.ones({FLOATS})"
        )
        self.run(MODEL)
        kinds: list[Callable[[], None]] = [self.heal, self.heal, self.heal, self.cell, self.restart]
        act = self.chance.choice(kinds)
        self.done.append(act.__name__)
        act()
        self.settle()

    def heal(self) -> None:
        """Kill some ranks, and cause failures while the others heal the group."""
        for rank in self.chance.sample(range(self.size), self.chance.randint(1, self.size - 1)):
            self.kill(rank)
        self.fail_during(self.group.heal, within=0.15)

    def cell(self) -> None:
        self.fail_during(lambda: self.run(TRAIN), within=0.3)

    def restart(self) -> None:
        """Cause failures while the ranks end and start again: their variables are gone then."""
        self.fail_during(self.restart_ranks, within=0.3)

    @property
    def size(self) -> int:
        return self.group.world_size

    def fail_during(self, act: Callable[[], object], *, within: float) -> None:
        """Run an operation; cause one or two failures during it, or just after it."""
        count = self.chance.choice([1, 1, 2])
        drawn = self.chance.choices(list(self.failures), list(self.failures.values()), k=count)
        failures = list(dict.fromkeys(drawn))  # no two interrupts, whose second would be anywhere
        moments = sorted(self.chance.uniform(0.0, within) for _ in failures)
        has_ended = threading.Event()

        def cause() -> None:
            began = time.monotonic()
            for failure, moment in zip(failures, moments, strict=True):
                time.sleep(max(0.0, began + moment - time.monotonic()))
                self.done.append(failure.__name__)
                failure()
            has_ended.set()

        outcome: object = None
        try:
            threading.Thread(target=cause).start()
            try:
                outcome = act()
            except NbddpError as error:
                outcome = error
            assert wait_until(has_ended.is_set)
        except KeyboardInterrupt as error:
            outcome = error
            assert wait_until(has_ended.is_set)
        self.done.append(repr(outcome))
        if isinstance(outcome, Healed):
            assert not outcome.left, outcome

    # ---- failures

    def pick_process(self) -> int:
        """Return a rank's process id; 0 if no rank has one: a node has not sent it yet."""
        pids = [pid for pid in self.group.pids.values() if pid]
        return self.chance.choice(pids) if pids else 0

    def kill(self, rank: int) -> None:
        self.done.append(f"kill {rank}")
        if self.chance.random() < 0.5:
            self.group.kill(rank)
        else:
            self._send(self.group.pids[rank], signal.SIGKILL)

    def kill_any_rank(self) -> None:
        """Kill a rank, as the system does; it may be the donor."""
        if pid := self.pick_process():
            self._send(pid, signal.SIGKILL)

    def kill_newest_process(self) -> None:
        """Kill the process that was started last: in a heal most often a replacement."""
        with suppress(psutil.Error):
            if alive := self.processes():
                self._send(max(each.pid for each in alive), signal.SIGKILL)

    def interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def pause_briefly(self) -> None:
        self._pause(lambda pid: self._send(pid, signal.SIGCONT))

    def pause_until_killed(self) -> None:
        self._pause(lambda pid: self._send(pid, signal.SIGKILL))

    def _pause(self, end: Callable[[int], None]) -> None:
        if pid := self.pick_process():
            self._send(pid, signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.0, 1.0))
            end(pid)

    def stop_group(self) -> None:
        """Stop the group, as a button of another thread does."""
        self.group.stop()

    def _send(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    # ---- the state after a schedule

    def settle(self) -> None:
        """Wait until the group is idle, heal dead ranks, and check the variables of all ranks."""
        assert wait_until(lambda: self.group.state in SETTLED, timeout=HANGS), self.group.state
        was_restarted = self.done[0] == "restart"
        for _ in range(6):
            self.replace_nodes()
            if self.group.state == "not started" or not self.group.alive:
                was_restarted = True
                with suppress(NbddpError):  # a node may be lost only now
                    self.restart_ranks()
            elif self.group.dead:
                with suppress(NbddpError):
                    report = self.group.heal()
                    assert not report.left, report
            with suppress(NbddpError):  # a rank that failed last can be reported as dead only now
                self.group.assert_works()
                break
        assert self.group.state == "ready", self.group.state
        kept = self.group.evaluate("globals().get('kept')")
        assert kept in ([self.number] * self.size, [None] * self.size), kept
        if kept[0] is None:
            assert was_restarted, "variables were lost, and no report lists them"
        else:
            values = self.group.evaluate("own[0], weights.sum().item()")
            assert values == [(self.number, FLOATS)] * self.size, values
            assert len({*self.group.evaluate(DIGEST)}) == 1


def play(schedules: Schedules, count: int) -> None:
    try:
        for _ in range(count):
            schedules.play()
    except BaseException as error:
        number, done = schedules.number, schedules.done
        raise AssertionError(f"schedule {number}: {done}: {error!r}") from error
    finally:
        schedules.group.close()


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped rank is given up after seconds, not minutes."""
    set_limits(monkeypatch, cancel_timeout=4.0)


COUNTS = pytest.mark.parametrize(
    "count",
    [pytest.param(10, id="short"), pytest.param(STEPS // 4, marks=pytest.mark.soak, id="long")],
)


@pytest.mark.gate_runs("2-short")
@COUNTS
@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_random_failures_lose_no_variable_without_a_report(
    make_group: MakeRanks, nproc: int, count: int
) -> None:
    play(Schedules(make_group(nproc, grace=2.0), SEED * 100 + nproc), count)


class NodeSchedules(Schedules):
    """The same on two nodes, which are lost, too."""

    def __init__(self, on_nodes: OnNodes, seed: int) -> None:
        self.on_nodes = on_nodes
        super().__init__(on_nodes.start(2), seed)
        del self.failures[self.stop_group]  # it would release the nodes
        self.failures[self.lose_node] = 6

    def restart_ranks(self) -> None:
        self.on_nodes.restart_ranks()

    def replace_nodes(self) -> None:
        listener = self.on_nodes.nodes.listener
        if (missing := 2 - len(listener.nodes)) > 0:
            self.done.append(f"bring {missing}")
            self.on_nodes.nodes.start_local(missing)
        has_come = wait_until(lambda: len(listener.nodes) >= 2, timeout=CONNECT_TIMEOUT)
        assert has_come, (listener.nodes, self.on_nodes.messages[-5:])

    def processes(self) -> list[psutil.Process]:
        agents = [psutil.Process(node.facts["pid"]) for node in self.on_nodes.nodes.listener.nodes]
        forkservers = [child for agent in agents for child in agent.children()]
        return [child for forkserver in forkservers for child in forkserver.children()]

    def lose_node(self) -> None:
        nodes = list(self.on_nodes.nodes.listener.nodes)
        if nodes:
            with suppress(psutil.Error):
                for process in process_tree(self.on_nodes.agent_at(self.chance.choice(nodes))):
                    process.kill()


@pytest.mark.full
@COUNTS
def test_random_failures_on_nodes_lose_no_variable_without_a_report(
    make_nodes: Callable[..., OnNodes], count: int
) -> None:
    play(NodeSchedules(make_nodes(), SEED), count)
