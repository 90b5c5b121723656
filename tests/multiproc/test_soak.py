"""A random walk over everything that can happen to a group: after each step it answers.

The long walk: ``pytest -m soak``; another one: ``NBDDP_SOAK_SEED=7 NBDDP_SOAK_STEPS=1000``.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest
from drivers.ranks import Ranks, WarmLauncher
from processes import wait_until

from nbddp import CellFailedError, RequestError

pytestmark = pytest.mark.multiproc

SETTLED = ("ready", "a rank is gone", "not started")


class Walk:
    """One group, a source of chance, and what may be done to the one by the other."""

    def __init__(self, launcher: WarmLauncher, seed: int) -> None:
        self.chance = random.Random(seed)
        self.group = Ranks(nproc=2, launcher=launcher, grace=2.0)
        self.done: list[str] = []

    def step(self) -> None:
        """Do something, then ask the group whether it is well."""
        action: Callable[[], object] = self.chance.choice(
            [
                self.run_a_cell,
                self.raise_on_one_rank,
                self.die_in_a_cell,
                self.kill_one,
                self.interrupt_a_cell,
                self.interrupt_a_deadlock,
                self.stop_and_continue_with_kill,
                self.group.restart,
                self.group.stop,
                self.push_and_pull,
            ]
        )
        self.done.append(action.__name__)
        if not self.group.is_live:
            self.group.spec = self.group.spec.__class__(nproc=self.chance.randint(2, 4), grace=2.0)
            self.group.start()
        action()
        self.check()

    def check(self) -> None:
        """Check that the group answers, or reports why it cannot."""
        state = self.group.state
        assert state in SETTLED, state
        if state == "ready":
            self.group.assert_works()
        elif state == "a rank is gone":
            with pytest.raises(RequestError, match=r"group.restart"):
                self.group.run("pass")
            if self.group.alive:
                self.run("1 + 1", ranks=self.group.alive)
            if self.group.alive and self.chance.random() < 0.5:
                self.heal()
            else:
                self.group.restart()

    def heal(self) -> None:
        """Heal: surviving ranks keep processes and names, and new ranks get the names."""
        self.run("kept = 'kept'", ranks=self.group.alive)
        gone, before = self.group.dead, self.group.pids
        assert self.group.heal().ranks == gone
        after = self.group.pids
        assert {rank: pid for rank, pid in after.items() if rank not in gone} == before
        self.group.assert_works()
        assert self.group.pull("kept") == ["kept"] * self.group.world_size

    def run(self, source: str, **options: object) -> None:
        self.group.run(source, quiet=True, **options)

    def someone(self) -> int:
        return self.chance.choice(self.group.alive)

    def run_a_cell(self) -> None:
        self.run("x = torch.ones(1) * rank\ndist.all_reduce(x)\nprint('x' * 1000)")

    def raise_on_one_rank(self) -> None:
        with pytest.raises(CellFailedError, match="ValueError: on purpose"):
            self.run(f"if rank == {self.someone()}: raise ValueError('on purpose')\ndist.barrier()")

    def die_in_a_cell(self) -> None:
        rank = self.someone()
        with pytest.raises(CellFailedError, match=f"^rank {rank} exited with code 7"):
            self.run(f"import os\nif rank == {rank}: os._exit(7)\ndist.barrier()")

    def kill_one(self) -> None:
        self.group.kill(self.someone())

    def interrupt_a_cell(self) -> None:
        self._interrupted("import time\nfor _ in range(600): time.sleep(0.1); dist.barrier()")

    def interrupt_a_deadlock(self) -> None:
        self._interrupted(
            "x = torch.ones(1)\nif rank == 0: dist.recv(x, src=1)\nelse: dist.all_reduce(x)"
        )

    def _interrupted(self, source: str) -> None:
        timer = threading.Timer(self.chance.uniform(0.0, 0.5), self._press_until_heard)
        timer.start()
        with pytest.raises(CellFailedError):
            self.run(source)
        timer.join()

    def _press_until_heard(self) -> None:
        wait_until(lambda: self.group.is_busy)
        self.group.interrupt()

    def stop_and_continue_with_kill(self) -> None:
        rank = self.someone()
        with suppress(ProcessLookupError):
            os.kill(self.group.pids[rank], signal.SIGSTOP)
        self.group.kill(rank)

    def push_and_pull(self) -> None:
        if self.group.is_idle:
            self.group.push({"sent": self.done})
            assert self.group.pull("len(sent)", rank=0) == len(self.done)


def walk(launcher: WarmLauncher, *, seed: int, steps: int) -> None:
    """Walk, and leave nothing behind."""
    threads, descriptors = set(threading.enumerate()), psutil.Process().num_fds()
    journey = Walk(launcher, seed)
    try:
        for _ in range(steps):
            journey.step()
    except BaseException as error:
        raise AssertionError(f"seed {seed}, after {journey.done[-5:]}: {error!r}") from error
    finally:
        journey.group.close()
    del journey
    gc.collect()  # errors and their frames refer to each other
    assert wait_until(lambda: not {t for t in threading.enumerate() if t.is_alive()} - threads)
    assert wait_until(lambda: psutil.Process().num_fds() <= descriptors + 2)


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        pytest.param(20, 25, id="short"),
        pytest.param(
            int(os.environ.get("NBDDP_SOAK_SEED", "1")),
            int(os.environ.get("NBDDP_SOAK_STEPS", "300")),
            id="long",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_random_operations_leave_a_working_group_and_no_process(
    launcher: WarmLauncher, seed: int, steps: int
) -> None:
    walk(launcher, seed=seed, steps=steps)
