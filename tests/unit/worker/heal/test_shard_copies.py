"""Ranks exchange copies of shards; a copy that one rank leaves out, or that fails, is dropped."""

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import wait_until

from nbddp.worker.heal import shard_copies
from nbddp.worker.heal.shard_copies import Copy, ShardCopies


class Pair:
    """The copies of two ranks in one process."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        group: Any = SimpleNamespace(backend="gloo", lasts=True)
        self.lines: list[str] = []
        self.ranks = [
            ShardCopies({}, group, lambda: self.store, rank, 2, self.lines.append)
            for rank in (0, 1)
        ]
        for copies in self.ranks:
            copies._has_thread = True
            arguments = self.store, copies._jobs, copies._busy, 0
            threading.Thread(target=copies._run, args=arguments, daemon=True).start()
            copies.begin_cell("1", 1)

    def exchange(self, key: str, *copies: Copy | None) -> None:
        """Let the threads of both ranks exchange a copy."""
        for rank, copy in zip(self.ranks, copies, strict=True):
            if copy is not None:
                rank._busy.acquire()
            rank._jobs.put((key, copy))
        assert wait_until(lambda: not any(each._busy.locked() for each in self.ranks))

    @property
    def steps(self) -> list[list[int]]:
        return [[copy.step for copy in each._copies] for each in self.ranks]


def copy_of(step: int, value: int) -> Copy:
    return Copy(step, torch.full((step,), value, dtype=torch.uint8))


def test_a_copy_replaces_the_one_before_only_when_all_ranks_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_copies, "TIMEOUT", timedelta(seconds=3))
    pair = Pair()
    pair.exchange("1", copy_of(4, 0), copy_of(4, 1))
    assert pair.steps == [[4], [4]]
    assert [each._copies[0].held.tolist() for each in pair.ranks] == [[1] * 4, [0] * 4]
    pair.exchange("2", copy_of(8, 0), None)  # rank 1 still exchanges the one before
    assert pair.steps == [[4], [4]]
    dist.PrefixStore("3", pair.store).add(
        "has it", 5
    )  # it will never be 2: one rank dies before it has the copy
    pair.exchange("3", copy_of(12, 0), copy_of(12, 1))
    assert pair.steps == [[4, 12], [4, 12]]
    assert any("imeout" in each._problem for each in pair.ranks)


def test_a_failed_copy_ends_the_wait_of_the_others_and_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_on_rank_1(packed: Any, _group: Any, rank: int, _size: int) -> Any:
        if rank == 1:
            raise RuntimeError("connection closed")
        return packed

    monkeypatch.setattr(shard_copies, "_pass_on", fail_on_rank_1)
    pair = Pair()
    pair.exchange("1", copy_of(4, 0), copy_of(4, 1))
    assert pair.steps == [[4], []]
    for rank in pair.ranks:
        rank.begin_cell("2", 0)  # the cell had ended before
        rank.end_cell()
    failed = "the copy of shards of step 4 failed: connection closed"
    assert pair.lines == [f"{failed} (rank 1)", failed]


@pytest.mark.parametrize("ending", ["next cell", "heal"])
def test_no_rank_waits_for_one_whose_cell_has_failed(ending: str) -> None:
    pair = Pair()
    first, second = pair.ranks
    first._busy.acquire()
    first._jobs.put(("1/1", copy_of(4, 0)))  # rank 1 has not reached this step
    assert wait_until(lambda: pair.store.check(["1/1/here"]))
    if ending == "heal":
        first._problem = "the copy of shards of step 2 failed: connection closed"
        first._start_again()
    second.begin_cell("2", 1)
    assert wait_until(lambda: not first._busy.locked())
    assert (first._problem, pair.steps) == ("", [[], []])


def test_a_line_says_that_an_optimizer_is_in_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copies, "has_dtensors", lambda _: True)
    pair = Pair()
    group: Any = pair.ranks[0]._group
    group.step_counts = SimpleNamespace(total=lambda _: 4)
    group.bound_objects = SimpleNamespace(optimizers=[])
    optimizer = torch.optim.SGD([torch.ones(1)])
    for _ in range(2):
        pair.ranks[0]._count_step(optimizer)
    [line] = pair.lines
    assert "no variable leads to the optimizer" in line
