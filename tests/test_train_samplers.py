"""Samplers, streams and epochs that somebody else decides: each rank its part, all of it again."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nbddp.errors import ArgumentError
from nbddp.train import place
from nbddp.train.data import loader

# a rank of a worker group, and pytest, have threads; workers that only load do not mind
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Stream(IterableDataset[Any]):
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
        for each in order:
            drawn = [float(torch.rand(())), float(np.random.rand())] if self.noise else []
            yield torch.tensor([each, *drawn], dtype=torch.float64)


def on_ranks(world_size: int, make: Callable[[], Any], epochs: int = 1) -> list[list[Any]]:
    """The batches of each rank in some epochs."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "world_size", lambda: world_size)
        for rank in range(world_size):
            patch.setattr(place, "rank", lambda rank=rank: rank)
            batches = make()
            found.append([batch.tolist() for _ in range(epochs) for batch in batches])
    return found


def flat(parts: list[list[Any]]) -> list[Any]:
    return list(itertools.chain(*itertools.chain(*parts)))


def all_samplers() -> dict[str, Callable[[], Any]]:
    return {
        "list": lambda: [5, 3, 3, 1, 0],
        "subset": lambda: SubsetRandomSampler(range(0, 40, 2)),
        "weighted": lambda: WeightedRandomSampler([1.0] * 30 + [9.0] * 10, 21),
        "random": lambda: RandomSampler(range(40), generator=torch.Generator()),
        "sequential": lambda: SequentialSampler(range(40)),
    }


# ---- samplers


@pytest.mark.parametrize("name", all_samplers())
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_gets_its_part_of_what_a_sampler_gives(name: str, world_size: int) -> None:
    def make() -> Any:
        torch.manual_seed(random.randrange(1000))  # the ranks' own generators differ
        return loader(range(40), 4, sampler=all_samplers()[name](), evaluation=True, seed=3)

    parts = on_ranks(world_size, make)
    [whole] = on_ranks(1, make)
    for rank, part in enumerate(parts):
        assert list(itertools.chain(*part)) == list(itertools.chain(*whole))[rank::world_size]


def test_in_training_a_sampler_gives_all_ranks_equally_many_batches() -> None:
    parts = on_ranks(3, lambda: loader(range(40), 2, sampler=[5, 3, 9, 1, 0, 7, 2]))
    assert parts == [[[5, 1], [2]], [[3, 0], [5]], [[9, 7], [3]]]
    assert len(loader(range(40), 2, sampler=[5, 3, 9])) == 2


def test_a_sampler_draws_anew_in_each_epoch_and_the_same_again() -> None:
    def make() -> Any:
        return loader(range(40), 8, sampler=all_samplers()["weighted"](), seed=3)

    first, second = make(), make()
    epochs = [[batch.tolist() for batch in first] for _ in range(2)]
    assert epochs[0] != epochs[1]
    next(iter(second))
    again = make()
    again.load_state_dict(second.state_dict())
    assert [batch.tolist() for batch in again] == epochs[0][1:]
    assert [batch.tolist() for batch in again] == epochs[1]


def test_each_batch_of_a_batch_sampler_goes_to_one_rank() -> None:
    def make() -> Any:
        return loader(range(7), batch_sampler=BatchSampler(SequentialSampler(range(7)), 2, False))

    assert on_ranks(1, make) == [[[0, 1], [2, 3], [4, 5], [6]]]
    assert on_ranks(2, make) == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    assert on_ranks(3, make) == [[[0, 1], [6]], [[2, 3], [0, 1]], [[4, 5], [2, 3]]]
    ours = make()
    assert (len(ours), ours.batch_size) == (4, None)
    next(iter(ours))
    again = make()
    again.load_state_dict(ours.state_dict())
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5], [6]]


def test_a_sampler_that_does_not_know_its_length_has_an_order_all_the_same() -> None:
    ours = loader(range(9), 2, sampler=filter(None, [0, 4, 8]))
    with pytest.raises(TypeError, match=r"^how many batches there are is not known: the samples "):
        len(ours)
    assert [batch.tolist() for batch in ours] == [[4, 8]]


# ---- streams


@given(
    samples=st.integers(1, 40),
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    kind=st.sampled_from([{}, {"drop_last": True}, {"evaluation": True}]),
)
def test_a_stream_gives_the_batches_of_a_dataset_that_is_not_shuffled(
    samples: int, world_size: int, batch_size: int, kind: dict[str, bool]
) -> None:
    found = on_ranks(world_size, lambda: loader(Stream(samples), batch_size, **kind), epochs=2)
    expected = on_ranks(
        world_size, lambda: loader(range(samples), batch_size, shuffle=False, **kind), epochs=2
    )
    assert [[[int(each[0]) for each in batch] for batch in part] for part in found] == expected


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_stream_draws_is_the_same_on_all_ranks_and_again_after_a_stop(workers: int) -> None:
    def make() -> Any:
        torch.manual_seed(random.randrange(1000))
        return loader(Stream(22, noise=True), 3, num_workers=workers, seed=5)

    parts = on_ranks(2, make, epochs=2)
    samples = [int(each[0]) for part in parts for batch in part[:4] for each in batch]
    assert sorted(samples) == list(range(22))
    assert [part[:4] for part in parts] != [part[4:] for part in parts]
    before = make()
    for _ in range(2):
        state = [before.state_dict() for _ in before][2]
    again = make()
    again.load_state_dict(state)
    rest, whole = [batch.tolist() for batch in again], on_ranks(1, make, epochs=2)[0]
    assert rest == whole[8 + 3 :]
    assert before.dataset.epochs == ([0, 1] if workers == 0 else [])


def test_the_rest_of_a_stream_is_divided_among_the_ranks_that_there_are() -> None:
    ours = loader(Stream(12), 2)
    state = [ours.state_dict() for _ in ours][1]

    def make() -> Any:
        again = loader(Stream(12), 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("nbddp.train.data.warn", lambda _text: None)
            again.load_state_dict(state)
        return again

    assert sorted(flat(on_ranks(2, make))) == [[4 + each] for each in range(8)]


# ---- epochs


def test_a_pasted_loop_with_set_epoch_gives_the_same_as_one_without() -> None:
    ours, pasted = loader(range(20), 4, seed=2), loader(range(20), 4, seed=2)
    expected = [[batch.tolist() for batch in ours] for _ in range(3)]
    found = []
    for epoch in range(3):
        pasted.sampler.set_epoch(epoch)
        found.append([batch.tolist() for batch in pasted])
    assert found == expected
    pasted.set_epoch(1)
    assert [batch.tolist() for batch in pasted] == expected[1]
    assert (pasted.epoch, pasted.step) == (2, 20)


def test_after_a_break_set_epoch_begins_at_the_beginning() -> None:
    ours = loader(range(20), 4, seed=2)
    whole = [batch.tolist() for batch in loader(range(20), 4, seed=2)]
    next(iter(ours))
    ours.set_epoch(0)
    assert [batch.tolist() for batch in ours] == whole


def test_set_epoch_goes_on_in_the_middle_of_the_epoch_that_was_saved() -> None:
    ours, again = loader(range(20), 4, seed=2), loader(range(20), 4, seed=2)
    rest = list(itertools.islice(ours, 2))
    again.load_state_dict(ours.state_dict())
    again.set_epoch(0)
    assert len(rest) + len(list(again)) == 5
    again.set_epoch(0)
    assert len(list(again)) == 5
    with pytest.raises(ArgumentError, match=r"^set_epoch: epoch must be 0 or above, got -1$"):
        again.set_epoch(-1)


# ---- what does not go together


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"sampler": [0], "shuffle": True},
            "nbddp.loader: sampler gives the order: leave shuffle out, or sampler",
        ),
        (
            {"batch_sampler": [[0]], "batch_size": 2},
            "nbddp.loader: batch_sampler makes the batches: leave batch_size out, or batch_sampler",
        ),
        (
            {"batch_sampler": [[0]], "drop_last": True},
            "nbddp.loader: batch_sampler makes the batches: leave drop_last out, or batch_sampler",
        ),
        (
            {"sampler": DistributedSampler(range(3), 2, 0)},
            "nbddp.loader divides the samples among the ranks by itself: leave the "
            "DistributedSampler out",
        ),
        (
            {"batch_sampler": BatchSampler(DistributedSampler(range(3), 2, 0), 2, False)},
            "nbddp.loader divides the samples among the ranks by itself: leave the "
            "DistributedSampler out",
        ),
        (
            {"dataset": Stream(3), "shuffle": True},
            "nbddp.loader: an IterableDataset has its own order: shuffle in its __iter__, which "
            "draws the same random numbers on all ranks",
        ),
        (
            {"dataset": Stream(3), "sampler": [0]},
            "nbddp.loader: an IterableDataset has no indices to sample",
        ),
        (
            {"dataset": Stream(3), "num_workers": 2},
            "nbddp.loader: every worker would read all of an IterableDataset, from the beginning "
            "in each epoch: take num_workers=1 and no persistent_workers",
        ),
        (
            {"generator": torch.Generator()},
            "nbddp.loader makes its own generator; use a torch DataLoader for yours",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_way_out(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(words)}$"):
        loader(**{"dataset": range(3), **options})


def test_what_can_neither_be_indexed_nor_streamed_is_refused() -> None:
    words = "nbddp.loader needs a dataset with len() and [index], or an IterableDataset, got "
    for dataset in ((each for each in range(3)), {1, 2}):
        with pytest.raises(TypeError, match=re.escape(words) + type(dataset).__name__):
            loader(dataset, 2)
