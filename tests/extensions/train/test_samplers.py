"""Samplers, streams and externally set epochs are divided completely among the ranks."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loader_ranks import SIZES, on_ranks, resumed, samples_of
from refusals import refusal
from syrupy.assertion import SnapshotAssertion
from torch.utils import data

from nbddp.errors import ArgumentError
from nbddp.extensions.train.loader import Loader, loader

# a rank of a worker group, and pytest, have threads; workers that only load do not mind
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Stream(data.IterableDataset[Any]):
    """Numbers one after the other; with ``noise`` they draw from all three generators."""

    def __init__(self, samples: int, *, noise: bool = False) -> None:
        self.samples = samples
        self.noise = noise
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.samples))
        if self.noise:
            random.shuffle(order)
        for index in order:
            drawn = [float(torch.rand(())), float(np.random.rand())] if self.noise else []
            yield torch.tensor([index, *drawn], dtype=torch.float64)


def epochs_of(ours: Loader, epochs: int = 1) -> list[list[Any]]:
    return [[batch.tolist() for batch in ours] for _ in range(epochs)]


class OfEpoch(data.Sampler[int]):
    """A sampler whose indices begin with the number of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + 16))


SAMPLERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [5, 3, 3, 1, 0],
    "subset": lambda: data.SubsetRandomSampler(range(0, 40, 2)),
    "weighted": lambda: data.WeightedRandomSampler([1.0] * 30 + [9.0] * 10, 21),
    "random": lambda: data.RandomSampler(
        range(40), generator=torch.Generator().manual_seed(random.randrange(1000))
    ),
    "of epoch": OfEpoch,
    "sequential": lambda: data.SequentialSampler(range(40)),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_gets_its_share_of_the_samples_of_a_sampler(name: str, world_size: int) -> None:
    def make() -> Loader:
        torch.manual_seed(random.randrange(1000))  # the ranks' own generators differ
        return loader(range(40), 4, sampler=SAMPLERS[name](), evaluation=True, seed=3)

    parts = on_ranks(world_size, make)
    [whole] = on_ranks(1, make)
    for rank, part in enumerate(parts):
        assert samples_of(part) == samples_of(whole)[rank::world_size]


def test_a_sampler_gives_all_ranks_equally_many_batches_and_needs_no_length() -> None:
    parts = on_ranks(3, lambda: loader(range(40), 2, sampler=[5, 3, 9, 1, 0, 7, 2]))
    assert parts == [[[5, 1], [2]], [[3, 0], [5]], [[9, 7], [3]]]
    assert len(loader(range(40), 2, sampler=[5, 3, 9])) == 2
    ours = loader(range(9), 2, sampler=filter(None, [0, 4, 8]))
    with pytest.raises(TypeError, match="unknown"):
        len(ours)
    assert epochs_of(ours) == [[[4, 8]]]


@pytest.mark.parametrize("name", ["weighted", "random", "of epoch"])
def test_a_sampler_draws_a_new_reproducible_order_in_each_epoch(name: str) -> None:
    def make() -> Loader:
        return loader(range(40), 8, sampler=SAMPLERS[name](), seed=3)

    first, second = epochs_of(make(), 2)
    assert first != second
    stopped = make()
    next(iter(stopped))
    assert epochs_of(resumed(make, stopped.state_dict()), 2) == [first[1:], second]


def test_each_batch_of_a_batch_sampler_goes_to_one_rank() -> None:
    def make() -> Loader:
        return loader(
            range(7), batch_sampler=data.BatchSampler(data.SequentialSampler(range(7)), 2, False)
        )

    assert on_ranks(1, make) == [[[0, 1], [2, 3], [4, 5], [6]]]
    assert on_ranks(2, make) == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    assert on_ranks(3, make) == [[[0, 1], [6]], [[2, 3], [0, 1]], [[4, 5], [2, 3]]]
    ours = make()
    assert (len(ours), ours.batch_size) == (4, None)
    next(iter(ours))
    assert epochs_of(resumed(make, ours.state_dict())) == [[[2, 3], [4, 5], [6]]]


@given(**SIZES, kind=st.sampled_from([{}, {"drop_last": True}, {"evaluation": True}]))
def test_a_stream_gives_the_same_batches_as_an_unshuffled_dataset(
    samples: int, world_size: int, batch_size: int, kind: dict[str, bool]
) -> None:
    found = on_ranks(world_size, lambda: loader(Stream(samples), batch_size, **kind), epochs=2)
    expected = on_ranks(
        world_size, lambda: loader(range(samples), batch_size, shuffle=False, **kind), epochs=2
    )
    assert [[[int(each[0]) for each in batch] for batch in part] for part in found] == expected


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.process)])
def test_random_numbers_of_a_stream_agree_on_all_ranks_and_after_a_resume(workers: int) -> None:
    def make() -> Loader:
        torch.manual_seed(random.randrange(1000))
        return loader(Stream(22, noise=True), 3, num_workers=workers, seed=5)

    parts = on_ranks(2, make, epochs=2)
    samples = [int(each[0]) for part in parts for batch in part[:4] for each in batch]
    assert sorted(samples) == list(range(22))
    drawn = [each[1] for part in parts for batch in part for each in batch]
    assert len(set(drawn)) == len(drawn) == 44
    before = make()
    for _ in range(2):
        state = [before.state_dict() for _ in before][2]
    [rest] = epochs_of(resumed(make, state))
    assert rest == on_ranks(1, make, epochs=2)[0][8 + 3 :]
    assert isinstance(before.dataset, Stream)
    assert before.dataset.epochs == ([0, 1] if workers == 0 else [])


@pytest.mark.filterwarnings("ignore:.*world size:UserWarning")
def test_the_rest_of_a_resumed_stream_is_divided_among_the_new_ranks() -> None:
    ours = loader(Stream(12), 2)
    state = [ours.state_dict() for _ in ours][1]
    parts = on_ranks(2, lambda: resumed(lambda: loader(Stream(12), 2), state))
    assert sorted(samples_of(itertools.chain(*parts))) == list(range(4, 12))


def make_of_20() -> Loader:
    return loader(range(20), 4, seed=2)


def test_calling_set_epoch_for_each_epoch_does_not_change_the_batches() -> None:
    pasted, expected = make_of_20(), epochs_of(make_of_20(), 3)
    found = []
    for epoch in range(3):
        pasted.sampler.set_epoch(epoch)
        found += epochs_of(pasted)
    assert found == expected
    pasted.set_epoch(1)
    assert epochs_of(pasted) == [expected[1]]
    assert (pasted.epoch, pasted.step) == (2, 20)


def test_set_epoch_restarts_an_epoch_after_a_break_but_continues_a_resumed_epoch() -> None:
    ours = make_of_20()
    assert len(list(itertools.islice(ours, 2))) == 2
    again = resumed(make_of_20, ours.state_dict())
    ours.set_epoch(0)
    whole = epochs_of(make_of_20())
    assert epochs_of(ours) == whole
    again.set_epoch(0)
    assert epochs_of(again) == [whole[0][2:]]
    again.set_epoch(0)
    assert epochs_of(again) == whole
    assert "-1" in refusal(ArgumentError, again.set_epoch, -1)


def test_conflicting_arguments_are_refused_with_the_next_step(snapshot: SnapshotAssertion) -> None:
    divides = data.DistributedSampler(range(3), 2, 0)
    refused: list[dict[str, Any]] = [
        {"sampler": [0], "shuffle": True},
        {"batch_sampler": [[0]], "batch_size": 2},
        {"batch_sampler": [[0]], "drop_last": True},
        {"sampler": divides},
        {"batch_sampler": data.BatchSampler(divides, 2, False)},
        {"dataset": Stream(3), "shuffle": True},
        {"dataset": Stream(3), "sampler": [0]},
        {"dataset": Stream(3), "num_workers": 2},
        {"generator": torch.Generator()},
    ]
    nothing = ((each for each in range(3)), {1, 2})
    assert [
        *(refusal(ArgumentError, loader, **{"dataset": range(3), **each}) for each in refused),
        *(refusal(TypeError, loader, each, 2) for each in nothing),
    ] == snapshot
