"""Pushed and pulled values: sent unchanged, collected once, and removed from the store."""

from __future__ import annotations

import pytest
from drivers.ranks import MakeRanks, Ranks

from nbddp import CellFailedError, RequestError


def kept_in_store(group: Ranks) -> int:
    """Return the number of values in the store."""
    store = group.store
    names = [
        f"a1/payload/{rank}/{kind}{number}"
        for rank in (0, 1)
        for number in range(50)
        for kind in ("cell", "request")
    ]
    names += [f"push/{number}" for number in range(50)]
    return sum(store.check([f"{name}/0"]) for name in names)


CLASSES = """
import abc, dataclasses, enum
class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2
class Flag(enum.IntFlag):
    READ = 1
@dataclasses.dataclass
class Settings:
    rate: float = 0.5
    kind: Kind = Kind.LARGE
class Base(abc.ABC):
    @abc.abstractmethod
    def size(self): ...
class Box(Base):
    def __init__(self): self.parts = {1, 2}
    def size(self): return len(self.parts)
    def __eq__(self, other): return type(self) is type(other) and self.parts == other.parts
    __hash__ = None
class Own:
    mine = rank
"""


def test_pulled_values_of_two_ranks_share_one_class(shared_group: Ranks) -> None:
    shared_group.run(CLASSES)
    nested = "{'a': [Settings(), Kind.SMALL]}"
    for expression in ("Kind.LARGE", "Flag.READ", "Settings(2.0)", "Box()", nested):
        first, second = shared_group.pull(expression)
        assert first == second
        assert type(first) is type(second)
        assert shared_group.pull(expression, rank=1) == first
        assert shared_group.evaluate(expression) == [first, second]
        shared_group.push({"back": first})
        assert shared_group.pull(f"back == {expression}") == [True, True]


def test_class_that_differs_among_ranks_is_pulled_per_rank(shared_group: Ranks) -> None:
    shared_group.run(CLASSES)
    assert [each.mine for each in shared_group.pull("Own")] == [0, 1]
    before = shared_group.pull("Settings()", rank=0)
    shared_group.run(
        "@dataclasses.dataclass\nclass Settings:\n    rate: float = 0.5\n    more: int = 3"
    )
    after = shared_group.pull("Settings()", rank=0)
    assert (after.more, hasattr(before, "more"), before == after) == (3, False, False)


def test_failed_pull_on_one_rank_leaves_no_values_in_the_store(group: Ranks) -> None:
    group.run("bytes(9)", wants_value=True, quiet=True)
    assert kept_in_store(group) == 2
    with pytest.raises(RequestError, match="rank 1: ZeroDivisionError"):
        group.pull("bytes(5_000_000) if rank == 0 else 1 / 0")
    with pytest.raises(CellFailedError):
        group.run("1 / 0 if rank else bytes(5_000_000)", wants_value=True, quiet=True)
    assert group.pull("rank") == [0, 1]
    group.push({"x": 1})
    assert kept_in_store(group) == 2


class Counted:
    """Counts how often it is pickled."""

    times = 0

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        Counted.times += 1
        return int, (7,)


def test_replay_sends_the_recorded_bytes_without_pickling(group: Ranks) -> None:
    Counted.times = 0
    pushed = [1, Counted()]
    group.push({"pushed": pushed})
    pushed.append(3)
    for _ in range(2):
        entries = group.replay_log
        group.restart()
        group.replay(entries)
        assert group.pull("pushed") == [[1, 7], [1, 7]]
    assert Counted.times == 1


class Deadly:
    """A value that kills rank 1 while it is pickled."""

    def __init__(self, group: Ranks) -> None:
        self._group = group

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        self._group.kill(1)
        return int, (7,)


class Opened:
    """A value that rank 1 does not survive."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return eval, ("__import__('os').environ['RANK'] == '1' and __import__('os')._exit(3)",)


def failed_push(group: Ranks, value: object) -> str:
    """Push a value that kills rank 1. Return the error message."""
    with pytest.raises(RequestError) as caught:
        group.push({"x": value})
    ways = ("group.heal()", "group.restart()", "group.run(..., ranks=[0,2])")
    for words in ("ranks 0,2 only", "rank 1", *ways):
        assert words in str(caught.value)
    return str(caught.value)


def test_push_names_a_rank_that_died_before_sending_and_the_receivers(
    make_group: MakeRanks,
) -> None:
    group = make_group(3)
    assert "SIGKILL" in failed_push(group, Deadly(group))
    assert [group.pull("x", rank=rank) for rank in (0, 2)] == [7, 7]
    group.push({"y": 8})  # an earlier death is not reported again
    assert group.pull("y") == [8, 8]
    assert len(group.replay_log) == 1


def test_push_names_a_rank_that_died_unpickling_and_the_receivers(make_group: MakeRanks) -> None:
    group = make_group(3)
    assert "code 3" in failed_push(group, Opened())
    assert group.pull("x") == [False, False]
    assert group.replay_log == ()


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


def test_each_rank_has_random_states_of_its_own(group: Ranks) -> None:
    group.run("import random\nimport numpy as np")
    for draw in ("torch.rand(1).item()", "np.random.rand()", "random.random()"):
        first, second = group.pull(draw)
        assert first != second
