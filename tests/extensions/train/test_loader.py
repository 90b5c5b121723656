"""Each rank's own part of the data: whole, reshuffled, and the same again after a stop."""

import gc
import itertools
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_ranks import SIZES, as_rank, on_ranks, resumed, samples_of
from refusals import refusal
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import Dataset, DistributedSampler, TensorDataset

from nbddp.errors import ArgumentError
from nbddp.extensions.train.loader import Loader, loader
from nbddp.reporting import log_and_track

# a rank of a worker group, and pytest, have threads; workers that only load do not mind
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Augmented(Dataset[Any]):
    """Samples that draw from all three generators; it records the indices that were loaded here."""

    def __init__(self, samples: int = 23) -> None:
        self.samples = samples
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return torch.tensor([float(index), *draw()], dtype=torch.float64)


def draw() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@given(**SIZES, shuffle=st.booleans(), drop_last=st.booleans())
def test_the_loader_gives_each_rank_the_samples_of_a_distributed_sampler(
    samples: int, world_size: int, batch_size: int, shuffle: bool, drop_last: bool
) -> None:
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": 3}
    for rank in range(world_size):
        theirs = DistributedSampler(range(samples), world_size, rank, **options)
        with as_rank(rank, world_size):
            ours = loader(range(samples), batch_size, **options)
            assert not ours.is_evaluation
            for epoch in range(2):
                theirs.set_epoch(epoch)
                order = list(theirs)
                batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
                if drop_last:
                    batches = [batch for batch in batches if len(batch) == batch_size]
                assert len(ours) == len(batches)
                assert [batch.tolist() for batch in ours] == batches


@given(**SIZES)
def test_evaluation_gives_every_sample_to_one_rank_and_sizes_differ_by_one(
    samples: int, world_size: int, batch_size: int
) -> None:
    parts = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            ours = loader(range(samples), batch_size, evaluation=True)
            assert ours.is_evaluation
            batches = list(ours)
            assert len(batches) == len(ours)
        parts.append(samples_of(batches))
    assert sorted(itertools.chain(*parts)) == list(range(samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_getitems_collate_and_other_options_are_used_as_by_a_dataloader() -> None:
    asked = []

    class Fast(Augmented):
        def __getitems__(self, indices: list[int]) -> list[int]:
            asked.append(indices)
            return indices

    assert samples_of(loader(Fast(5), 2, shuffle=False)) == [0, 1, 2, 3, 4]
    assert asked == [[0, 1], [2, 3], [4]]
    assert list(loader(range(4), 2, shuffle=False, collate_fn=tuple)) == [(0, 1), (2, 3)]
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        loader(range(4), 2, batchsize=3)
    pairs = TensorDataset(torch.arange(4), torch.arange(4) * 2)
    [batch] = loader(pairs, 4, shuffle=False)
    assert [part.tolist() for part in batch] == [[0, 1, 2, 3], [0, 2, 4, 6]]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_augmentations_use_random_numbers_independent_of_the_training(workers: int) -> None:
    def begin() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    begin()
    drawn = [draw() for _ in range(6)]
    expected = list(loader(Augmented(), 4, seed=5))
    begin()
    ours = loader(Augmented(), 4, num_workers=workers, seed=5)
    found = [(batch, draw()) for batch in ours]
    assert [each for _, each in found] == drawn
    assert equal([batch for batch, _ in found], expected)


def test_augmentations_differ_between_seeds_ranks_and_epochs_except_in_evaluation() -> None:
    drawn = [
        torch.tensor(batch)[:, 1:]
        for seed in (0, 1)
        for batches in on_ranks(
            2, lambda seed=seed: loader(Augmented(), 4, shuffle=False, seed=seed), epochs=2
        )
        for batch in batches
    ]
    numbers = torch.cat(drawn).flatten()
    assert len(numbers.unique()) == len(numbers)
    evaluation = loader(Augmented(), 4, evaluation=True)
    assert equal(list(evaluation), list(evaluation))


class OfWorker(Augmented):
    drawn: torch.Tensor

    def __getitem__(self, _index: int) -> torch.Tensor:
        return self.drawn


def draw_in_worker(_worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    info.dataset.dataset.drawn = torch.rand((), dtype=torch.float64)


@pytest.mark.process
def test_the_seeds_of_loader_workers_depend_on_rank_and_epoch() -> None:
    def begin(epoch: int) -> list[float]:
        ours = loader(OfWorker(8), 2, num_workers=2, worker_init_fn=draw_in_worker)
        ours.load_state_dict({**ours.state_dict(), "epoch": epoch})
        return torch.cat(list(ours)[:2]).unique().tolist()

    found = []
    for rank in (0, 1):
        with as_rank(rank, 2):
            found += [begin(0), begin(1)]
            assert begin(1) == found[-1]
    assert len({number for each in found for number in each}) == 8


def test_a_dataset_that_fails_leaves_the_random_numbers_alone() -> None:
    class Failing(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index) / (1 // 0)

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError):
        list(loader(Failing(), 1))
    assert torch.equal(torch.rand(3), expected)


def play(
    ours: Loader, *, epochs: int, stop: int = 0
) -> tuple[list[torch.Tensor], dict[str, Any] | None]:
    """Train to the end; all batches, and the state at the stop-th."""
    batches, state = [], None
    while ours.epoch < epochs:
        for batch in ours:
            batches.append(batch)
            if len(batches) == stop:
                state = pickle.loads(pickle.dumps(ours.state_dict()))
    return batches, state


def assert_goes_on(stop: int, *, epochs: int, **options: Any) -> None:
    def make(seed: int) -> Loader:
        return loader(Augmented(), 4, seed=seed, **options)

    unbroken, state = play(make(7), epochs=epochs, stop=stop)
    again = resumed(lambda: make(9), state)  # the seed of the state wins
    rest, _ = play(again, epochs=epochs)
    assert equal(rest, unbroken[stop:])
    assert (again.epoch, again.step) == (epochs, len(unbroken))


@settings(max_examples=25)
@given(stop=st.integers(1, 15), shuffle=st.booleans(), drop_last=st.booleans())
def test_a_resumed_loader_gives_the_rest(stop: int, shuffle: bool, drop_last: bool) -> None:
    assert_goes_on(stop, epochs=3, shuffle=shuffle, drop_last=drop_last)


@pytest.mark.process
@pytest.mark.gate_runs("2-", "6-")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("stop", [2, 6, 8])
def test_resuming_works_with_prefetching_workers(stop: int, persistent: bool) -> None:
    assert_goes_on(stop, epochs=2, num_workers=2, persistent_workers=persistent)
    gc.collect()  # persistent workers end with their loader


def test_resuming_loads_nothing_that_was_loaded_before() -> None:
    dataset = Augmented(20)
    ours = loader(dataset, 4, shuffle=False)
    ours.load_state_dict({**ours.state_dict(), "batches": 3, "step": 3})
    assert [int(batch[0, 0]) for batch in ours] == [12, 16]
    assert dataset.loaded == list(range(12, 20))


def test_resuming_at_the_last_batch_ends_the_epoch_and_between_epochs_starts_the_next() -> None:
    ours, theirs = loader(range(8), 4), loader(range(8), 4)
    states = [ours.state_dict() for _ in ours]
    theirs.load_state_dict(states[-1])
    assert (theirs.epoch, theirs.step, list(theirs)) == (0, 2, [])
    assert (theirs.epoch, theirs.step) == (1, 2)
    theirs.load_state_dict(ours.state_dict())
    assert (theirs.epoch, theirs.step) == (1, 2)
    assert samples_of(theirs) == samples_of(ours)


def test_a_new_iterator_starts_the_next_epoch_or_continues_a_loaded_state() -> None:
    ours, theirs, whole = (loader(range(12), 4) for _ in range(3))
    assert len(list(itertools.islice(ours, 1))) == 1
    theirs.load_state_dict(ours.state_dict())
    first, second = samples_of(whole), samples_of(whole)
    assert samples_of(theirs) == first[4:]
    assert ours.epoch == 0
    assert samples_of(ours) == second
    ours = loader(range(12), 4)
    old = iter(ours)
    next(old)
    new = iter(ours)
    next(new)
    assert len(list(old)) == 2
    assert (ours.epoch, ours.state_dict()["batches"], ours.step) == (1, 1, 2)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("evaluation", [False, True])
def test_resuming_with_another_world_size_redivides_the_rest_of_the_epoch_with_a_warning(
    world_size: int, evaluation: bool
) -> None:
    def make() -> Loader:
        return loader(range(48), 4, evaluation=evaluation)

    with as_rank(0, 2):
        whole = make()
        states = [whole.state_dict() for _ in whole]
    order = samples_of(loader(range(48), 48, evaluation=evaluation))
    facts = f"sample 24 of epoch 0, .* size 2 .* size {world_size} "
    with as_rank(0, world_size), pytest.warns(UserWarning, match=facts):
        found = samples_of(resumed(make, states[2]))
    for rank in range(1, world_size):
        with as_rank(rank, world_size):
            found += samples_of(resumed(make, states[2]))
    assert sorted(found) == sorted(order[24:])


def test_ranks_and_batch_size_may_change_twice_in_an_epoch(snapshot: SnapshotAssertion) -> None:
    ours = loader(range(20), 2, shuffle=False)
    next(iter(ours))

    def make() -> Loader:
        return loader(range(20), 3, shuffle=False)

    with pytest.warns(UserWarning, match="sample 2 of epoch 0") as caught:
        theirs = resumed(make, ours.state_dict())
    assert str(caught[0].message) == snapshot
    assert next(iter(theirs)).tolist() == [2, 3, 4]
    state = theirs.state_dict()
    with as_rank(0, 2):
        with pytest.warns(UserWarning, match="sample 5 of epoch 0"):
            last = resumed(make, state)
        again = resumed(make, last.state_dict())  # the same ranks: nothing to say
        assert next(iter(again)).tolist() == [5, 7, 9]


def test_training_reports_each_step_before_it_gives_the_batch() -> None:
    steps: list[tuple[int, str]] = []
    end = log_and_track.on_step(lambda step, source: steps.append((step, source)))
    ours = loader(range(8), 4)
    for _ in range(2):
        for _ in ours:
            assert steps[-1] == (ours.step - 1, "loader")
    assert steps == [(step, "loader") for step in range(4)]
    assert len(list(loader(range(8), 4, evaluation=True))) == 2
    assert len(steps) == 4
    end()


def test_the_loader_refuses_other_states_and_invalid_arguments(snapshot: SnapshotAssertion) -> None:
    ours = loader(range(8), 4)
    state = ours.state_dict()
    others = [state | {"samples": 9}, state | {"shuffle": False}, state | {"drop_last": True}]
    assert [
        *(refusal(ArgumentError, ours.load_state_dict, each) for each in (*others, {"step": 3})),
        refusal(ArgumentError, loader, range(3), 0),
        refusal(ArgumentError, loader, range(3), 2, evaluation=True, drop_last=True),
    ] == snapshot
