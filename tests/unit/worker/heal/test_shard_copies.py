"""Ranks exchange copies of shards; a copy that one rank leaves out, or that fails, is dropped."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbddp.worker.heal import shard_copies
from nbddp.worker.heal.shard_copies import Copy, ShardCopies


class Pair:
    """The copies of two ranks in one process."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        bound: Any = None  # it is not used here
        self.ranks = [
            ShardCopies({}, bound, lambda: self.store, rank, 2, lambda _: None) for rank in (0, 1)
        ]
        for copies in self.ranks:
            copies._store = self.store

    def exchange(self, key: str, *copies: Copy | None) -> None:
        threads = [
            threading.Thread(target=self._exchange_one, args=(copies_of_rank, key, copy))
            for copies_of_rank, copy in zip(self.ranks, copies, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _exchange_one(self, rank: ShardCopies, key: str, copy: Copy | None) -> None:
        try:
            rank._exchange(key, copy)
        except RuntimeError as error:
            rank._problem = str(error)

    @property
    def steps(self) -> list[list[int]]:
        return [[copy.step for copy in each._copies] for each in self.ranks]


def copy_of(step: int, value: int) -> Copy:
    return Copy(step, [torch.full((step,), value, dtype=torch.uint8)], [], {})


def test_a_copy_replaces_the_one_before_only_when_all_ranks_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_copies, "TIMEOUT", timedelta(seconds=3))
    pair = Pair()
    pair.exchange("1", copy_of(4, 0), copy_of(4, 1))
    assert pair.steps == [[4], [4]]
    assert [each._copies[0].held[0].tolist() for each in pair.ranks] == [[1] * 4, [0] * 4]
    pair.exchange("2", copy_of(8, 0), None)  # rank 1 still exchanges the one before
    assert pair.steps == [[4], [4]]
    dist.PrefixStore("3", pair.store).add(
        "has it", 5
    )  # it will never be 2: one rank dies before it has the copy
    pair.exchange("3", copy_of(12, 0), copy_of(12, 1))
    assert pair.steps == [[4, 12], [4, 12]]
    assert all("imeout" in each._problem for each in pair.ranks)
