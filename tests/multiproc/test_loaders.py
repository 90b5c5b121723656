"""An interrupt in a DataLoader loop leaves a working loader and no pending work."""

from __future__ import annotations

import time

import pytest
from conditions import run_and_act, wait_until_blocked
from drivers.ranks import MakeRanks, Ranks

from nbddp import CellInterruptedError

pytestmark = pytest.mark.multiproc


def stopped(group: Ranks, source: str) -> None:
    """Run endless source, and interrupt it when all ranks have begun."""

    def interrupt() -> None:
        assert wait_until_blocked(group.pids.values())
        group.interrupt()

    is_begun = lambda said: said.count("begun") == group.world_size  # noqa: E731
    with pytest.raises(CellInterruptedError):
        run_and_act(group, source, is_begun, interrupt)


def test_objects_of_an_interrupted_cell_are_freed_before_the_next_cell(
    make_group: MakeRanks,
) -> None:
    group = make_group(2, init=False)
    group.run("import gc, time, weakref\nclass Big: pass\ngc.disable()")
    stopped(
        group,
        "def work():\n    global seen\n    big = Big()\n    seen = weakref.ref(big)\n"
        "    print('begun')\n    time.sleep(60)\nwork()",
    )
    group.run("held = seen() is not None")
    assert group.pull("held") == [False, False]


def test_loader_workers_of_an_interrupted_loop_do_not_delay_the_next_cell(group: Ranks) -> None:
    group.run(
        "import multiprocessing, time\nfrom torch.utils.data import DataLoader, _utils\n"
        "_utils.MP_STATUS_CHECK_INTERVAL *= 10"  # seconds that torch waits for each worker
    )
    stopped(
        group,  # not in a put: of that, an interrupt may lose the next wakeup (CPython's Condition)
        "for each in DataLoader(range(99), num_workers=3):\n    print('begun')\n    time.sleep(60)",
    )
    began = time.monotonic()
    group.run("assert not multiprocessing.active_children()")
    assert time.monotonic() - began < 40  # it was 15 s, and would be 150 s


def test_persistent_workers_survive_an_interrupt_at_the_start_of_an_epoch(group: Ranks) -> None:
    group.run(
        "import os, signal\nfrom torch.utils.data import DataLoader\n"
        "loader = DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True)\n"
        "assert len(list(loader)) == 4\n"
        "workers = [each.pid for each in loader._iterator._workers]"
    )
    stopped(
        group,  # one worker answers too late
        "os.kill(workers[1], signal.SIGSTOP)\nprint('begun')\n"
        "try: list(loader)\nfinally: os.kill(workers[1], signal.SIGCONT)",
    )
    group.run(
        "for _ in range(3):\n"
        "    assert [each.tolist() for each in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]"
    )


def test_loader_workers_return_classes_and_functions_of_a_cell(group: Ranks) -> None:
    group.run(
        "from enum import Enum\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class Kind(Enum):\n    ODD = 1\n"
        "class Batch:\n    class Part: pass\n    def __init__(self, items): self.items = items\n"
        "def name(): return 'name'\n"
        "def collate(items): return Batch([*items, Kind.ODD, name, Batch.Part()])\n"
        "class Rows(Dataset):\n    def __len__(self): return 2\n"
        "    def __getitem__(self, at): return at\n"
    )
    group.run(  # a batch that cannot be sent would never arrive
        "loader = DataLoader(Rows(), 2, num_workers=1, collate_fn=collate, timeout=30)\n"
        "[batch] = loader\n*rows, kind, function, part = batch.items\n"
        "assert type(batch) is Batch and type(part) is Batch.Part and kind is Kind.ODD\n"
        "assert rows == [0, 1] and function() == 'name'"
    )
